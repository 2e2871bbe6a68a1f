"""Order tokens: numbers that increase along the history of every logical partition (I13).

A token is the version that created a message's partition, then the message's offset there. A child
is created by a later version than its parents, so tokens increase through splits, merges and moves.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from convoymq.model.errors import SyntaxFault

_PACKED = struct.Struct(">QQ")
SIZE_BYTES = _PACKED.size
NUMBER_MAX = (1 << 64) - 1
_TEXT_LENGTH = 33
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True, order=True)
class OrderToken:
    """The place of a message in the history of its logical partition. Tokens of different logical
    partitions compare, but that says nothing about time."""

    created_version: int
    offset: int

    def __post_init__(self) -> None:
        assert 0 <= self.created_version <= NUMBER_MAX
        assert 0 <= self.offset <= NUMBER_MAX

    def pack(self) -> bytes:
        """Return 16 bytes that compare as the tokens do."""
        return _PACKED.pack(self.created_version, self.offset)

    @classmethod
    def unpack(cls, packed: bytes) -> OrderToken:
        """Return the token of `pack`. Raises SyntaxFault."""
        if len(packed) != SIZE_BYTES:
            raise SyntaxFault(f"an order token has {SIZE_BYTES} bytes, not {len(packed)}")
        return cls(*_PACKED.unpack(packed))

    def __str__(self) -> str:
        """Return 33 characters that compare as the tokens do."""
        return f"{self.created_version:016x}-{self.offset:016x}"

    @classmethod
    def parse(cls, text: str) -> OrderToken:
        """Return the token of `str`. Raises SyntaxFault."""
        version, dash, offset = text[:16], text[16:17], text[17:]
        if len(text) != _TEXT_LENGTH or dash != "-" or not _HEX.issuperset(version + offset):
            raise SyntaxFault(f"not an order token: {text!r}")
        return cls(int(version, 16), int(offset, 16))
