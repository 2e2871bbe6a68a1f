"""Fields of messages' records, read apart from the kernels."""

from __future__ import annotations

IDENTITY_BYTES = 12
"""Begin of a body: publisher and number."""
_SHORT_BEFORE_HEADERS = (1 << 15, 1 << 14)
_HEADERS = 1 << 13
_BYTES = (1 << 12, 1 << 11)
_SHORT_BEFORE_MESSAGE_ID = (1 << 10, 1 << 9, 1 << 8)
_MESSAGE_ID = 1 << 7


def _content_header(record: bytes) -> tuple[int, int]:
    """Returns (where the payload of the content header begins, its length)."""
    at = 1 + record[0]
    at += 1 + record[at]
    return at + 7, int.from_bytes(record[at + 3 : at + 7], "big")


def identity_of(record: bytes) -> bytes:
    """Returns the first 12 bytes of a record's body: publisher and number."""
    at, header = _content_header(record)
    at += header + 1
    return record[at + 7 : at + 7 + IDENTITY_BYTES]


def body_bytes_of(record: bytes) -> int:
    """Returns the size of a record's body, as its content header says."""
    at, _ = _content_header(record)
    return int.from_bytes(record[at + 4 : at + 12], "big")


def message_id_of(record: bytes) -> bytes:
    """Returns the message-id of a record; empty = it has none."""
    at, _ = _content_header(record)
    flags = int.from_bytes(record[at + 12 : at + 14], "big")
    at += 14
    for bit in _SHORT_BEFORE_HEADERS:
        if flags & bit:
            at += 1 + record[at]
    if flags & _HEADERS:
        at += 4 + int.from_bytes(record[at : at + 4], "big")
    at += sum(1 for bit in _BYTES if flags & bit)
    for bit in _SHORT_BEFORE_MESSAGE_ID:
        if flags & bit:
            at += 1 + record[at]
    return record[at + 1 : at + 1 + record[at]] if flags & _MESSAGE_ID else b""


class RememberedIds:
    """The message-ids that a queue has to remember, by the rules of ADR 0052: a list, which is
    searched from its begin."""

    def __init__(self) -> None:
        self.settings = {"deduplication_count": -1, "deduplication_time_ms": -1}
        self.known: list[tuple[bytes, int]] = []
        """(message-id, when it came), the oldest first."""
        self.dropped: set[bytes] = set()
        """Identities of repeats: confirmed, and in no queue."""

    def configure(self, name: str, value: int) -> bool:
        """Follows a setting, if it is one of these; returns whether it is."""
        if name not in self.settings:
            return False
        self.settings[name] = value
        return True

    def forget(self, now_ms: int) -> None:
        """Forgets what the settings do not want remembered."""
        count, time_ms = self.settings.values()
        if 0 in (count, time_ms) or (count < 0 and time_ms < 0):
            self.known = []
        if time_ms > 0:
            self.known = [(one, came) for one, came in self.known if now_ms - came < time_ms]
        if count > 0:
            self.known = self.known[-count:]

    def drops(self, record: bytes, identity: bytes, now_ms: int) -> bool:
        """Returns whether a message that is published is a repeat; otherwise remembers it."""
        message_id = message_id_of(record)
        if not message_id:
            return False
        if any(one == message_id for one, _ in self.known):
            self.dropped.add(identity)
            return True
        self.known.append((message_id, now_ms))
        self.forget(now_ms)
        return False
