"""Arrays of words as little-endian bytes, whatever the machine."""

from __future__ import annotations

import sys
from array import array


def words_to_bytes(words: array[int]) -> bytes:
    """Returns the bytes of words of any width."""
    if sys.byteorder == "little":
        return words.tobytes()
    swapped = array(words.typecode, words)
    swapped.byteswap()
    return swapped.tobytes()


def words_from_bytes(data: bytes, stride: int = 1, typecode: str = "Q") -> array[int]:
    """Returns the words of `words_to_bytes`, in rows of `stride`. Raises ValueError when the length
    does not fit."""
    words: array[int] = array(typecode)
    if len(data) % (words.itemsize * stride):
        raise ValueError("packed runs: length is not a multiple of the run size")
    words.frombytes(data)
    if sys.byteorder != "little":
        words.byteswap()
    return words
