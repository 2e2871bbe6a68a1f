"""Hashes of order keys: which logical partition a key belongs to.

That is the same for ever and in every client language. The logical partition comes from
MurmurHash3 (x86, 32 bits) of the key's bytes; a key that is text is taken as UTF-8. Apache Commons,
Guava, Scala, mmh3 and Spark's `HashingTF` compute the same values. Spark's SQL function `hash` does
so only for keys whose length is a multiple of four.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from convoymq.topics.rules.refusals import BadTopic

MURMUR3_X86_32 = 1
"""The only `hash_id` so far."""
SEED_MAX = 0xFFFF_FFFF
_MASK = 0xFFFF_FFFF
_C1 = 0xCC9E_2D51
_WITH_KEY = 0x8000_0000
"""Set in the hash of a key, which is none without one."""
_C2 = 0x1B87_3593


def key_bytes(key: bytes | str) -> bytes:
    """Return what of a key is hashed and stored."""
    return key.encode() if isinstance(key, str) else key


def murmur3(data: bytes, seed: int = 0) -> int:
    """Return MurmurHash3 x86 32 of `data`, from 0 to 2**32 - 1. Cost: O(len(data)).

    Source: Austin Appleby, SMHasher, which is in the public domain.
    """
    assert 0 <= seed <= SEED_MAX, seed
    length = len(data)
    tail = length & 3
    value = seed
    for at in range(0, length - tail, 4):
        block = int.from_bytes(data[at : at + 4], "little") * _C1 & _MASK
        value ^= _rotated(block, 15) * _C2 & _MASK
        value = (_rotated(value, 13) * 5 + 0xE654_6B64) & _MASK
    if tail:
        block = int.from_bytes(data[length - tail :], "little") * _C1 & _MASK
        value ^= _rotated(block, 15) * _C2 & _MASK
    return _mixed(value ^ (length & _MASK))


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & _MASK


def _mixed(value: int) -> int:
    value = (value ^ value >> 16) * 0x85EB_CA6B & _MASK
    value = (value ^ value >> 13) * 0xC2B2_AE35 & _MASK
    return value ^ value >> 16


def logical_partition(key: bytes, logical: int, seed: int = 0) -> int:
    """Return the logical partition of a key, 0 to `logical` (exclusive)."""
    return murmur3(key, seed) % logical


def check_hash(hash_id: int, seed: int) -> None:
    """Raises BadTopic for a hash that is not known."""
    if hash_id != MURMUR3_X86_32:
        raise BadTopic(f"hash {hash_id} is not known: {MURMUR3_X86_32} is MurmurHash3 x86 32")
    if not 0 <= seed <= SEED_MAX:
        raise BadTopic(f"the seed of a hash is a number from 0 to {SEED_MAX}, not {seed}")


def key_hashes(keys: Iterable[bytes]) -> bytes:
    """Return 64 bits of hash, little-endian, of each key; 0 of an empty one, which is none."""
    pairs = ((murmur3(key), murmur3(key, _C1) | _WITH_KEY) if key else (0, 0) for key in keys)
    return b"".join(struct.pack("<II", *pair) for pair in pairs)
