"""Framing of RocketMQ's remoting protocol, and its binary header (docs/formats/rocketmq.md).

    frame   length 4 (of what follows) · header word 4 · header · body
    word    top byte: encoding of the header (0 JSON, 1 binary) · low 24 bits: length of the header
    binary  code 2 · language 1 · version 2 · opaque 4 · flag 4 · remark 4 + n ·
            length of the fields 4 + { key 2 + n · value 4 + n }

All integers are big-endian.
"""

import cython
from cython.cimports.convoymq.kernels.bytes import (
    bytes_pointer,
    copy_bytes,
    load16,
    load32,
    store16,
    store32,
    uninitialized,
)
from cython.cimports.libc import string
from cython.cimports.libc.stdint import int32_t, uint32_t

HEADER_BYTES_MAX = 0xFFFFFF
KEY_BYTES_MAX = 0x7FFF

_FIXED = cython.declare(cython.Py_ssize_t, 21)
"""Of a binary header: all before the text of the remark, and the length of the fields."""
_NAMES_MAX = cython.declare(cython.Py_ssize_t, 4096)


@cython.cclass
class FrameScanner:
    frame_bytes_max: cython.Py_ssize_t
    rest: bytearray
    wanted: cython.Py_ssize_t

    def __init__(self, frame_bytes_max: cython.Py_ssize_t):
        if not 4 <= frame_bytes_max <= 1 << 30:
            raise ValueError("a frame has between 4 bytes and a gibibyte")
        self.frame_bytes_max = frame_bytes_max
        self.rest = bytearray()
        self.wanted = 0

    def feed(self, data: bytes) -> list:
        if self.rest:
            self.rest += data
            # Not joined anew for each part of a large frame.
            if len(self.rest) < self.wanted:
                return []
            data = bytes(self.rest)
        p: cython.p_uchar = bytes_pointer(data)
        size: cython.Py_ssize_t = len(data)
        at: cython.Py_ssize_t = 0
        frames: list = []
        self.wanted = 8
        while size - at >= 4:
            length: cython.Py_ssize_t = load32(p + at)
            if length < 4 or length > self.frame_bytes_max:
                raise ValueError(f"a frame of {length} bytes")
            if size - at < 8:
                break
            word: uint32_t = load32(p + at + 4)
            header: cython.Py_ssize_t = word & 0xFFFFFF
            # Before the frame is whole: nobody waits for what cannot be one.
            if header > length - 4:
                raise ValueError(f"a header of {header} bytes in a frame of {length}")
            if (word >> 24) > 1:
                raise ValueError(f"a header in encoding {word >> 24}")
            if size - at < 4 + length:
                self.wanted = 4 + length
                break
            frames.append((
                word >> 24,
                copy_bytes(p + at + 8, header),
                copy_bytes(p + at + 8 + header, length - 4 - header),
            ))  # fmt: skip
            at += 4 + length
        if at or not self.rest:
            self.rest = bytearray(data[at:])
        return frames


def frame(encoding: cython.int, header: bytes, body) -> bytes:
    view: cython.const[cython.uchar][::1] = body
    size: cython.Py_ssize_t = len(header)
    rest: cython.Py_ssize_t = view.shape[0]
    if size > 0xFFFFFF or rest > (1 << 30) or not 0 <= encoding <= 1:
        raise ValueError("a header has less than 16 MiB, a body a gibibyte at most")
    made: bytes = uninitialized(8 + size + rest)
    p: cython.p_uchar = bytes_pointer(made)
    store32(p, cython.cast(uint32_t, 4 + size + rest))
    store32(p + 4, (cython.cast(uint32_t, encoding) << 24) | cython.cast(uint32_t, size))
    string.memcpy(p + 8, bytes_pointer(header), size)
    if rest:
        string.memcpy(p + 8 + size, cython.address(view[0]), rest)
    return made


def decode_binary(header: bytes) -> tuple:
    p: cython.p_uchar = bytes_pointer(header)
    size: cython.Py_ssize_t = len(header)
    if size < _FIXED:
        raise ValueError("a binary header is cut")
    remark_size: cython.Py_ssize_t = cython.cast(int32_t, load32(p + 13))
    if remark_size < 0 or remark_size > size - _FIXED:
        raise ValueError("the remark of a binary header is cut")
    remark: object = None
    if remark_size:
        remark = (p + 17)[:remark_size].decode("utf-8", "strict")
    at: cython.Py_ssize_t = 17 + remark_size
    rest: cython.Py_ssize_t = cython.cast(int32_t, load32(p + at))
    at += 4
    if rest < 0 or rest > size - at:
        raise ValueError("the fields of a binary header are cut")
    end: cython.Py_ssize_t = at + rest
    fields: dict = {}
    while at < end:
        if end - at < 2:
            raise ValueError("a field of a binary header is cut")
        key_size: cython.Py_ssize_t = load16(p + at)
        at += 2
        if key_size + 4 > end - at:
            raise ValueError("a field of a binary header is cut")
        key: str = (p + at)[:key_size].decode("utf-8", "strict")
        at += key_size
        value_size: cython.Py_ssize_t = cython.cast(int32_t, load32(p + at))
        at += 4
        if value_size < 0 or value_size > end - at:
            raise ValueError("a field of a binary header is cut")
        if len(fields) >= _NAMES_MAX:
            raise ValueError("a binary header has too many fields")
        fields[key] = (p + at)[:value_size].decode("utf-8", "strict")
        at += value_size
    code: cython.int = load16(p)
    if code >= 0x8000:
        code -= 0x10000
    return (
        code,
        p[2],
        cython.cast(cython.int, load16(p + 3)),
        cython.cast(int32_t, load32(p + 5)),
        cython.cast(int32_t, load32(p + 9)),
        remark,
        fields,
    )


def encode_binary(
    code: cython.int,
    language: cython.int,
    version: cython.int,
    opaque: int32_t,
    flag: int32_t,
    remark,
    fields: dict,
) -> bytes:
    if not -0x8000 <= code < 0x8000:
        raise ValueError(f"code {code} does not fit into a binary header")
    text: bytes = b"" if remark is None else remark.encode()
    names: list = []
    size: cython.Py_ssize_t = 0
    for key, value in fields.items():
        name: bytes = key.encode()
        content: bytes = value.encode()
        if len(name) > 0x7FFF:
            raise ValueError("the name of a field has too many bytes")
        names.append(name)
        names.append(content)
        size += 6 + len(name) + len(content)
    made: bytes = uninitialized(_FIXED + len(text) + size)
    p: cython.p_uchar = bytes_pointer(made)
    store16(p, cython.cast(uint32_t, code) & 0xFFFF)
    p[2] = cython.cast(cython.uchar, language)
    store16(p + 3, cython.cast(uint32_t, version) & 0xFFFF)
    store32(p + 5, cython.cast(uint32_t, opaque))
    store32(p + 9, cython.cast(uint32_t, flag))
    store32(p + 13, cython.cast(uint32_t, len(text)))
    string.memcpy(p + 17, bytes_pointer(text), len(text))
    at: cython.Py_ssize_t = 17 + len(text)
    store32(p + at, cython.cast(uint32_t, size))
    at += 4
    i: cython.Py_ssize_t
    for i in range(0, len(names), 2):
        name = names[i]
        content = names[i + 1]
        store16(p + at, cython.cast(uint32_t, len(name)))
        string.memcpy(p + at + 2, bytes_pointer(name), len(name))
        at += 2 + len(name)
        store32(p + at, cython.cast(uint32_t, len(content)))
        string.memcpy(p + at + 4, bytes_pointer(content), len(content))
        at += 4 + len(content)
    return made
