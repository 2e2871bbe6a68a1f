"""A naive reference of the entry and command layout, the oracle of the kernel tests."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field


def pad8(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def command(
    type_: int, flags: int, session: int, seq: int, count: int, arg: int, body: bytes
) -> bytes:
    padded = pad8(bytes(32) + body)
    return (
        struct.pack("<IBBHQQII", len(padded), type_, flags, 0, session, seq, count, arg)
        + (padded[32:])
    )


def enqueue(session: int, seq: int, records: list[bytes], sizes: list[int], flags: int) -> bytes:
    offsets = [40]
    for record in records:
        offsets.append(offsets[-1] + len(record))
    body = struct.pack("<Q", sum(sizes)) + b"".join(records)
    body += bytes(-len(body) % 4)
    table = 32 + len(body)
    body += struct.pack(f"<{len(offsets)}I", *offsets)
    uniform = 1 if len(set(sizes)) <= 1 else 0
    return command(1, flags | uniform, session, seq, len(records), table, body)


def entry_body(entry: bytes) -> bytes:
    return entry[48:]


@dataclass
class Stream:
    """What one session has appended, as a plain list."""

    session: int
    seq: int = 0
    records: list[bytes] = field(default_factory=list)
