"""Fields of messages' records, read apart from the kernels."""

from __future__ import annotations

from convoymq.messages.record import head_of, header_of, split_of
from convoymq.model.errors import PeerError

IDENTITY_BYTES = 12
"""Begin of a body: publisher and number."""
_FRAME_HEAD = 7
_BODY_SIZE_AT = 4


def identity_of(record: bytes) -> bytes:
    """Returns the first 12 bytes of a record's body: publisher and number."""
    at = len(head_of(record)) + _FRAME_HEAD
    return record[at : at + IDENTITY_BYTES]


def body_bytes_of(record: bytes) -> int:
    """Returns the size of a record's body, as its content header says."""
    return int.from_bytes(header_of(record)[_BODY_SIZE_AT : _BODY_SIZE_AT + 8], "big")


def message_id_of(record: bytes) -> bytes:
    """Returns the message-id of a record; empty = it has none."""
    return property_of(record, "message_id")[1:]


def property_of(record: bytes, name: str) -> bytes:
    """Returns an encoded property of a record; empty = it has none, or cannot be read."""
    try:
        return split_of(record)[1].get(name, b"")
    except PeerError:
        return b""


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
