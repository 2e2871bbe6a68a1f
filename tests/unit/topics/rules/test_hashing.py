"""Hashes of keys: published values, a second way to compute them, spread and independence."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TypedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.topics.rules import hashing
from convoymq.topics.rules.refusals import BadTopic

VECTORS = Path(__file__).resolve().parents[3] / "vectors" / "topics" / "murmur3-x86-32.json"


class Vector(TypedDict):
    key_hex: str
    seed: int
    hash: str
    text: str


def vectors() -> list[Vector]:
    found: list[Vector] = json.loads(VECTORS.read_text("utf-8"))
    assert len(found) > 20
    return found


@pytest.mark.parametrize("vector", vectors(), ids=lambda v: f"{v['key_hex'][:16]}-{v['seed']}")
def test_published_values_come_out(vector: Vector) -> None:
    key = bytes.fromhex(vector["key_hex"])
    if "text" in vector:
        assert hashing.key_bytes(vector["text"]) == key
    assert f"{hashing.murmur3(key, vector['seed']):08x}" == vector["hash"]


def naive_murmur3(data: bytes, seed: int) -> int:
    """The reference's steps with bytes one by one and arithmetic modulo 2**32."""
    modulus = 2**32
    state = seed
    padded = data + bytes(-len(data) % 4)
    for number, (word,) in enumerate(struct.iter_unpack("<I", padded)):
        word = word * 0xCC9E2D51 % modulus
        word = word * 2**15 % modulus + word // 2**17
        state ^= word * 0x1B873593 % modulus
        if 4 * number + 4 <= len(data):
            state = state * 2**13 % modulus + state // 2**19
            state = (state * 5 + 0xE6546B64) % modulus
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ state // 2**shift) * factor % modulus
    return state


@given(st.binary(max_size=40), st.integers(0, hashing.SEED_MAX))
@settings(max_examples=60)
def test_a_second_computation_agrees(key: bytes, seed: int) -> None:
    assert hashing.murmur3(key, seed) == naive_murmur3(key, seed)


@given(st.binary(max_size=20), st.integers(1, 65_536))
@settings(max_examples=50)
def test_a_logical_partition_is_the_hash_modulo_their_number(key: bytes, logical: int) -> None:
    lp = hashing.logical_partition(key, logical, 7)
    assert lp == hashing.murmur3(key, 7) % logical


def test_text_is_taken_as_utf_8() -> None:
    assert hashing.key_bytes("zażółć") == "zażółć".encode()
    assert hashing.key_bytes(b"\xff") == b"\xff"


@pytest.mark.parametrize(("hash_id", "seed"), [(0, 0), (2, 0), (1, -1), (1, 2**32)])
def test_an_unknown_hash_or_seed_is_refused(hash_id: int, seed: int) -> None:
    with pytest.raises(BadTopic):
        hashing.check_hash(hash_id, seed)
    hashing.check_hash(hashing.MURMUR3_X86_32, 0)
