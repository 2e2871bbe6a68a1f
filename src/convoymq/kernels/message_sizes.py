"""Sizes of published messages, counted by range (compiled only)."""

import cython
from cython.cimports.libc.stdint import uint64_t

BOUNDS = (100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 50_000_000, 100_000_000)


@cython.cclass
class MessageSizes:
    def __cinit__(self):
        i: cython.int
        for i in range(9):
            self.counts[i] = 0
        self.total = 0

    def add(self, size: uint64_t):
        count_size(self, size)

    def up_to(self):
        """See the .pyi."""
        found: list = []
        messages: uint64_t = 0
        i: cython.int
        for i in range(9):
            messages += self.counts[i]
            found.append(messages)
        return found
