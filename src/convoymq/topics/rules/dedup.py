"""Duplicate detection per (producer, logical partition), with contiguous sequences.

| sequence      | outcome    |
|---------------|------------|
| last + 1      | appended   |
| <= last       | DUPLICATE  |
| > last + 1    | OUT_OF_SEQ |

A higher producer epoch begins again at 1; a lower one is fenced, in every logical partition of the
table. The table of a sealed partition is the seed of its targets. Sources have disjoint ranges, so
a union of seeds has nothing to reconcile.

A range is *seedless* when its source was sealed from outside: nobody knows what it stored. There a
request carries `base`, the producer's first unacknowledged sequence; everything below counts as
stored, for every request and not for the first alone: the dead partition may acknowledge late what
was sent here as well.

Sessions of producers that begin where the table is seedless get numbers that none before can have,
whatever the dead partition knew: `first_epoch`.

Source: ordered topics, sections 1.6, 3, 4 and 10.3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from convoymq.topics.rules.refusals import Code

Range = tuple[int, int]
UNANSWERED_MAX = 1_000
"""Messages of a logical partition that a producer may have without an answer. So many, from its
first unacknowledged one on, may be stored again behind a partition that was sealed from outside."""
EPOCH_BITS = 32


class Row(NamedTuple):
    """State of one producer in one logical partition."""

    epoch: int
    last_seq: int
    last_time_ms: int
    source_pos: bytes


@dataclass(frozen=True, slots=True)
class SourceSeal:
    """The table of a sealed source; None when it is unknown."""

    lo: int
    hi: int
    dedup: bytes | None


class DedupTable:
    """The table of one physical partition."""

    __slots__ = ("epochs", "idle", "rows", "seedless")

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], Row] = {}
        self.epochs: dict[int, int] = {}
        self.idle: dict[int, int] = {}
        """Of producers without rows, the time at which that was first seen: their older sessions
        stay fenced for as long as rows are kept."""
        self.seedless: list[Range] = []

    def last_seq(self, producer: int, epoch: int, lp: int) -> int:
        """The last stored sequence of this session, 0 for none."""
        row = self.rows.get((producer, lp))
        return row.last_seq if row is not None and row.epoch == epoch else 0

    def decide(self, producer: int, epoch: int, lp: int, seq: int, base: int) -> tuple[Code, int]:
        """The outcome, and the sequence that is expected next. Changes nothing."""
        if epoch < self.epochs.get(producer, 0):
            return Code.PRODUCER_FENCED, 0
        last = self.last_seq(producer, epoch, lp)
        if base and self.is_seedless(lp):
            last = max(last, base - 1)
        return self.compare(seq, last), last + 1

    @staticmethod
    def compare(seq: int, last: int) -> Code:
        """The sequence rule."""
        if seq == last + 1:
            return Code.OK
        return Code.DUPLICATE if seq <= last else Code.OUT_OF_SEQ

    def is_seedless(self, lp: int) -> bool:
        """True when a source of this logical partition was sealed from outside."""
        return any(lo <= lp < hi for lo, hi in self.seedless)

    def record(
        self, producer: int, epoch: int, lp: int, seq: int, time_ms: int, source_pos: bytes
    ) -> None:
        """A message was appended. A source position never falls: sessions go on from there."""
        before = self.rows.get((producer, lp))
        if before is not None and before.source_pos > source_pos:
            source_pos = before.source_pos
        self.rows[producer, lp] = Row(epoch, seq, time_ms, source_pos)
        if epoch > self.epochs.get(producer, 0):
            self.epochs[producer] = epoch

    def fence(self, producer: int, epoch: int) -> bool:
        """Refuses older sessions from now on; False when this one is older itself."""
        if epoch < self.epochs.get(producer, 0):
            return False
        self.epochs[producer] = epoch
        self.idle.pop(producer, None)
        return True

    @property
    def oldest_ms(self) -> int | None:
        """Time at which the row was last used that is idle for longest; None without rows. Cost:
        all rows."""
        return min((row.last_time_ms for row in self.rows.values()), default=None)

    def expire(self, before_ms: int, now_ms: int) -> None:
        """Forgets rows that were last used before a time, and producers that have had none since
        then."""
        self.rows = {k: row for k, row in self.rows.items() if row.last_time_ms >= before_ms}
        active = {producer for producer, _ in self.rows}
        idle = {p: self.idle.get(p, now_ms) for p in self.epochs if p not in active}
        self.idle = {p: since for p, since in idle.items() if since >= before_ms}
        self.epochs = {p: e for p, e in self.epochs.items() if p in active or p in self.idle}

    def pack(self) -> bytes:
        """The table as bytes; equal tables give equal bytes."""
        rows = sorted(
            (producer, lp, row.epoch, row.last_seq, row.last_time_ms, row.source_pos.hex())
            for (producer, lp), row in self.rows.items()
        )
        epochs, idle = sorted(self.epochs.items()), sorted(self.idle.items())
        packed = [rows, epochs, idle, sorted(self.seedless)]
        return json.dumps(packed, separators=(",", ":")).encode()

    @classmethod
    def load(cls, packed: bytes) -> DedupTable:
        """The table that was packed."""
        table = cls()
        if packed:
            table.merge(packed, 0, 1 << 62)
        return table

    def merge(self, packed: bytes, lo: int, hi: int) -> None:
        """Takes over what a packed table says about [lo, hi)."""
        rows, epochs, idle, seedless = json.loads(packed)
        for producer, lp, epoch, seq, time_ms, source_pos in rows:
            if lo <= lp < hi:
                self.rows[producer, lp] = Row(epoch, seq, time_ms, bytes.fromhex(source_pos))
        for producer, epoch in epochs:
            self.epochs[producer] = max(epoch, self.epochs.get(producer, 0))
        for producer, since_ms in idle:
            self.idle[producer] = max(since_ms, self.idle.get(producer, since_ms))
        for low, high in seedless:
            if max(lo, low) < min(hi, high):
                self.seedless.append((max(lo, low), min(hi, high)))


def first_epoch(version: int) -> int:
    """Returns what comes before the first number of a session that begins in a partition which a
    version created behind one that was sealed from outside."""
    return version << EPOCH_BITS


def seed_of(lo: int, hi: int, sources: Iterable[SourceSeal]) -> bytes:
    """The seed of a target [lo, hi): the union of its sources' tables, restricted to its range."""
    table = DedupTable()
    for source in sources:
        low, high = max(lo, source.lo), min(hi, source.hi)
        if low >= high:
            continue
        if source.dedup is None:
            table.seedless.append((low, high))
        else:
            table.merge(source.dedup, low, high)
    return table.pack()
