"""A commit log in memory, and what carries questions from one core to another."""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from crc32c import crc32c

from convoymq.replication.group.types import Ask, Fetch, Tail

R = TypeVar("R")


BLANK = 0xCBD43194
"""Magic of what fills up a file."""


def record(offset: int, body: bytes, life: int = 0) -> bytes:
    """A message with its place, and the time that makes it unlike any other there."""
    return struct.pack(">II20xqq", 44 + len(body), 0xDAA320A7, offset, life) + body


class MemoryLog:
    """Implements `Log`."""

    file_bytes = 1000

    def __init__(self, begin: int = 0) -> None:
        self.min_offset = begin
        self.data = bytearray()
        self.ends: list[tuple[int, int]] = []
        self.parsed = begin
        self._flushed: int | None = None

    @property
    def flushed(self) -> int:
        """All, unless a test says otherwise."""
        return self.max_offset if self._flushed is None else self._flushed

    @flushed.setter
    def flushed(self, offset: int) -> None:
        self._flushed = offset

    @property
    def stored(self) -> int:
        return self.flushed

    @property
    def max_offset(self) -> int:
        return self.min_offset + len(self.data)

    def put(self, body: bytes, life: int = 0) -> int:
        """Appends a message; returns where it ends."""
        self.append_raw(self.max_offset, record(self.max_offset, body, life))
        return self.max_offset

    def read_raw(self, offset: int, limit: int) -> memoryview:
        at = offset - self.min_offset
        return memoryview(bytes(self.data[at : at + limit]))

    def append_raw(self, offset: int, block: bytes | memoryview) -> None:
        if not self.data:
            self.min_offset = offset
        assert offset == self.max_offset
        self.data += block
        start = self.parsed if self.ends else self.min_offset
        while start + 8 <= self.max_offset:
            at = start - self.min_offset
            size, magic = struct.unpack_from(">II", self.data, at)
            if start + size > self.max_offset:
                break
            if magic != BLANK:
                self.ends.append((start, start + size))
            start += size
        self.parsed = start

    def truncate(self, offset: int) -> None:
        del self.data[offset - self.min_offset :]
        self.ends = [each for each in self.ends if each[1] <= offset]
        self.parsed = offset

    def record_before(self, offset: int) -> tuple[int, int] | None:
        return next((each for each in reversed(self.ends) if each[1] <= offset), None)

    def crc32c(self, start: int, end: int) -> int:
        return crc32c(bytes(self.read_raw(start, end - start)))


def carry(
    steps: Generator[Any, Any, R], tail: Callable[[Ask], Tail], log: MemoryLog
) -> tuple[R, int]:
    """Answers a generator's questions; returns its result and their number."""
    count = 0
    try:
        question = next(steps)
        while True:
            count += 1
            if isinstance(question, Fetch):
                question = steps.send(bytes(log.read_raw(question.offset, question.limit)))
            else:
                question = steps.send(tail(question))
    except StopIteration as ended:
        return ended.value, count
