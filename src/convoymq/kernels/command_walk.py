"""Goes through the commands of an entry.

Layout: docs/formats/entries-and-frames.md. An entry of an ordered topic has many commands of few
messages: nothing is made for each.
"""

import cython
from cython.cimports.convoymq.kernels.bytes import bytes_pointer, get32, get64
from cython.cimports.convoymq.kernels.layout import (
    COMMAND_ARG,
    COMMAND_COUNT,
    COMMAND_FLAGS,
    COMMAND_HEADER_SIZE,
    COMMAND_SEQ,
    COMMAND_SESSION,
    COMMAND_TYPE,
    ENTRY_HEADER_SIZE,
)


@cython.cclass
class CommandWalk:
    def __init__(self, data: bytes):
        size: cython.Py_ssize_t = len(data)
        p: cython.p_uchar = bytes_pointer(data)
        if size < ENTRY_HEADER_SIZE:
            raise ValueError("entry is shorter than its header")
        at: cython.Py_ssize_t = ENTRY_HEADER_SIZE
        while at < size:
            if size - at < COMMAND_HEADER_SIZE:
                raise ValueError(f"malformed command at {at}")
            length: cython.Py_ssize_t = get32(p + at)
            if length < COMMAND_HEADER_SIZE or length & 7 or length > size - at:
                raise ValueError(f"malformed command at {at}")
            at += length
        self.data = data
        self.offset = ENTRY_HEADER_SIZE
        self.length = 0

    @cython.ccall
    @cython.exceptval(check=False)
    def next(self) -> cython.bint:
        at: cython.Py_ssize_t = self.offset + self.length
        if at >= len(self.data):
            return False
        p: cython.p_uchar = bytes_pointer(self.data) + at
        self.offset = at
        self.length = get32(p)
        self.type = p[COMMAND_TYPE]
        self.flags = p[COMMAND_FLAGS]
        self.session = get64(p + COMMAND_SESSION)
        self.seq = get64(p + COMMAND_SEQ)
        self.count = get32(p + COMMAND_COUNT)
        self.arg = get32(p + COMMAND_ARG)
        return True
