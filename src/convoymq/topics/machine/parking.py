"""The parked keys of a group: failed messages, and the later ones of their keys behind them.

| command | key is live    | key is parked            | key resumes                  |
|---------|----------------|--------------------------|------------------------------|
| park    | becomes parked | appended                 | appended                     |
| follow  | NOT_PARKED     | appended                 | appended                     |
| resume  | NOT_PARKED     | resumes                  | stays so                     |
| retry   | NOT_PARKED     | resumes for its head     | stays so                     |
| done    | NOT_PARKED     | NOT_PARKED               | head leaves; empty: live;    |
|         |                |                          | for its head: parked again   |
| stop    | NOT_PARKED     | NOT_PARKED               | becomes parked again         |
| skip    | NOT_PARKED     | head leaves; empty: live | head leaves; empty: live     |
| replace | NOT_PARKED     | head has another content | head has another content     |

Entries are copies: the partition that the messages lay in may be deleted. The set belongs to
logical partitions, not to physical ones: it is handed over with the cursors (`partition.py`).
Limits refuse; nothing is ever dropped.

Source: ordered topics, section 9.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from convoymq.topics.rules.answers import ParkedEntry
from convoymq.topics.rules.order_token import OrderToken
from convoymq.topics.rules.refusals import Code

PARKED_KEYS_MAX = 10_000
PARKED_BYTES_MAX = 64 * 1024 * 1024
ONCE = 2
"""In a packed set, in place of `resuming`: for the head alone."""


@dataclass(slots=True)
class ParkedKey:
    """One key: its entries in order. `resuming`: the head is delivered again. `once`: and nothing
    behind it."""

    lp: int
    entries: list[ParkedEntry] = field(default_factory=list)
    resuming: bool = False
    once: bool = False


class ParkSet:
    """The parked keys of a group in one physical partition."""

    __slots__ = ("bytes_max", "bytes_used", "keys", "keys_max")

    def __init__(self, keys_max: int = PARKED_KEYS_MAX, bytes_max: int = PARKED_BYTES_MAX) -> None:
        self.keys: dict[bytes, ParkedKey] = {}
        self.bytes_used = 0
        self.keys_max = keys_max
        self.bytes_max = bytes_max

    def append(self, key: bytes, lp: int, entry: ParkedEntry, *, follow: bool) -> Code:
        """Parks a message. `follow`: only behind a key that is parked already."""
        parked = self.keys.get(key)
        if parked is None and follow:
            return Code.NOT_PARKED
        if parked is not None and parked.entries[-1].token >= entry.token:
            return Code.DUPLICATE
        full = parked is None and len(self.keys) >= self.keys_max
        if full or self.bytes_used + len(entry.message) > self.bytes_max:
            return Code.PARK_FULL
        if parked is None:
            parked = self.keys[key] = ParkedKey(lp)
        parked.entries.append(entry)
        self.bytes_used += len(entry.message)
        return Code.OK

    def resume(self, key: bytes, *, once: bool = False) -> Code:
        """Has the entries of a key delivered again, in order; with `once` the head only."""
        parked = self.keys.get(key)
        if parked is None:
            return Code.NOT_PARKED
        parked.once = once and (parked.once or not parked.resuming)
        parked.resuming = True
        return Code.OK

    def stop(self, key: bytes, token: OrderToken) -> Code:
        """The head failed again: the key waits for the next resume."""
        parked = self.keys.get(key)
        if parked is None or not parked.resuming or parked.entries[0].token != token:
            return Code.NOT_PARKED
        parked.resuming = parked.once = False
        return Code.OK

    def done(self, key: bytes, token: OrderToken) -> Code:
        """The head was processed."""
        parked = self.keys.get(key)
        if parked is None or not parked.resuming:
            return Code.NOT_PARKED
        code = self.skip(key, token)
        if code is Code.OK and parked.once:
            parked.resuming = parked.once = False
        return code

    def skip(self, key: bytes, token: OrderToken) -> Code:
        """The head leaves the park log; an empty one makes the key live."""
        parked = self.keys.get(key)
        if parked is None or parked.entries[0].token != token:
            return Code.NOT_PARKED
        self.bytes_used -= len(parked.entries.pop(0).message)
        if not parked.entries:
            del self.keys[key]
        return Code.OK

    def replace(self, key: bytes, token: OrderToken, message: bytes) -> Code:
        """Gives the head another content."""
        parked = self.keys.get(key)
        if parked is None or parked.entries[0].token != token:
            return Code.NOT_PARKED
        head = parked.entries[0]
        used = self.bytes_used - len(head.message) + len(message)
        if used > self.bytes_max:
            return Code.PARK_FULL
        parked.entries[0] = head._replace(message=message)
        self.bytes_used = used
        return Code.OK

    def pack(self) -> list[list[object]]:
        """The set as plain values, sorted by key."""
        return [
            [
                key.hex(),
                parked.lp,
                ONCE if parked.once else parked.resuming,
                [[e.version, e.offset, e.pid, e.message.hex()] for e in parked.entries],
            ]
            for key, parked in sorted(self.keys.items())
        ]

    def merge(self, packed: list[list[object]], lo: int, hi: int) -> None:
        """Takes over the keys of a packed set whose logical partition is in [lo, hi)."""
        for key, lp, resuming, entries in packed:
            assert isinstance(lp, int)
            if not lo <= lp < hi:
                continue
            assert isinstance(key, str)
            assert isinstance(entries, list)
            loaded = [ParkedEntry(v, o, pid, bytes.fromhex(text)) for v, o, pid, text in entries]
            name = bytes.fromhex(key)
            known = self.keys.get(name)
            if known is not None:
                # Messages without a key may come from several partitions.
                loaded = sorted([*known.entries, *loaded], key=lambda entry: entry.token)
                self.bytes_used -= sum(len(entry.message) for entry in known.entries)
            self.keys[name] = ParkedKey(lp, loaded, bool(resuming), resuming == ONCE)
            self.bytes_used += sum(len(entry.message) for entry in loaded)

    def drop(self, lo: int, hi: int) -> None:
        """Forgets the keys whose logical partition is in [lo, hi)."""
        for key in [key for key, parked in self.keys.items() if lo <= parked.lp < hi]:
            self.bytes_used -= sum(len(entry.message) for entry in self.keys.pop(key).entries)

    def check_invariants(self) -> None:
        """Raises AssertionError when a key has no entries, or they are out of order."""
        for key, parked in self.keys.items():
            tokens = [entry.token for entry in parked.entries]
            assert tokens, key
            assert all(a < b for a, b in pairwise(tokens)), (key, tokens)
        used = sum(len(e.message) for parked in self.keys.values() for e in parked.entries)
        assert used == self.bytes_used
