"""The messages of a partition, and what became of each for every group that reads it.

Input: rows of parts of partitions (2^18 offsets), sorted by part and log order. Checked here is
what one partition alone can tell (A4, A9, A10, A11); what each message went through goes to the
sweep over keys, one row a message, or a message, reader and lease.

| row          | reader       | time             | lease | settled, settled_lease  | how     |
|--------------|--------------|------------------|-------|-------------------------|---------|
| STORED       | –            | appended         | –     | publisher, delivery tag | –       |
| READ         | group, epoch | first handed out | epoch | first end: when, lease  | BY_ACK… |
| DONE, HEAD   | group        | of it            | –     | –                       | reason  |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from convoymq.kernels.trace import name_hash
from convoymq.model import trace as words
from convoymq.spark.audit.findings import (
    Array,
    Columns,
    Findings,
    changes,
    picked,
    whole_groups,
)
from convoymq.spark.audit.invariants import Invariant
from convoymq.spark.audit.topics.scope import NEVER, PartitionScope, TopicScope
from convoymq.spark.audit.topics.wide import batches_of

KEYS = ("group", "part")
COLUMNS = (
    "group", "part", "order", "kind", "flags", "reason", "time_us", "session", "consumer", "seq",
    "first_id", "count", "position_index", "position_command", "position_first", "acquired",
)  # fmt: skip
STORED, READ, DONE, HEAD, EFFECT, SOURCE = range(6)
"""Kinds of rows by key."""
KEY_COLUMNS = (
    "topic", "key", "reader", "reader_epoch", "version", "offset", "row", "time_us", "group",
    "lease", "alone", "settled_us", "settled_lease", "how",
)  # fmt: skip
BY_ACK, BY_PARK, BY_PARK_BEHIND, BY_LOSS, BY_COPY = 1, 2, 3, 4, 5
"""BY_COPY: another copy was read, in a partition that was sealed from outside."""
PARKS = (words.PARK, words.PARK_BEHIND)
Block: TypeAlias = dict[str, Array]


class PartitionSweep:
    """For `mapInArrow`: whole parts of partitions."""

    def __init__(self, scope: TopicScope) -> None:
        self.scope = scope

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields findings and rows by key."""
        for columns in whole_groups(batches, KEYS):
            starts = np.flatnonzero(changes(columns, KEYS))
            ends = np.append(starts[1:], len(columns["group"]))
            for start, end in zip(starts, ends, strict=True):
                part = {name: values[start:end] for name, values in columns.items()}
                known = self.scope.partitions.get(int(part["group"][0]))
                if known is not None:
                    findings = Findings()
                    blocks = follow_part(part, known, self.scope, findings)
                    yield from batches_of(findings, KEY_COLUMNS, blocks)


KEYLESS = name_hash(b"")
"""Hash of messages without an order key."""
Number = TypeVar("Number", int, Array)


def keyless_key(version: Number, offset: Number) -> Number:
    """Returns what stands for the key of a message that has none."""
    return (version << 40) ^ offset ^ KEYLESS


class _Messages:
    """Messages of one part, by offset."""

    def __init__(self, keyed: Columns) -> None:
        count = keyed["count"]
        row = np.repeat(np.arange(len(count)), count)
        step = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        offset = keyed["first_id"][row] + step
        order = np.argsort(offset, kind="stable")
        self.offset = offset[order]
        row = row[order]
        self.key = keyed["session"][row]
        self.lp = keyed["consumer"][row]
        self.order = keyed["order"][row]
        self.time_us = keyed["time_us"][row]

    def __len__(self) -> int:
        return len(self.offset)

    def of_runs(self, first: Array, count: Array) -> tuple[Array, Array]:
        """Returns (run, message) for each message that lies in a run."""
        low = np.searchsorted(self.offset, first)
        n = np.searchsorted(self.offset, first + count) - low
        run = np.repeat(np.arange(len(first)), n)
        at = np.arange(len(run)) - np.repeat(np.cumsum(n) - n, n)
        return run, low[run] + at


def follow_part(
    part: Columns, known: PartitionScope, scope: TopicScope, findings: Findings
) -> list[Block]:
    """Checks one part of a partition; returns its rows by key."""
    kind = part["kind"]
    group = int(part["group"][0])
    messages = _Messages(picked(part, kind == words.KEYED))
    _stored(part, messages, known, findings)
    blocks = [_stored_rows(part, messages, known), *_park_rows(part, known)]
    _leases(part, known, scope, findings)
    for reader, place in known.readers.items():
        if reader[0] not in known.ungrouped:
            mine = picked(part, part["session"] == reader[0])
            rows = _Reading(mine, messages, reader, known, scope, group)
            rows.check(place.start, place.left_order, findings)
            blocks.append(rows.rows(place.start))
    return blocks


def _example(known: PartitionScope, **more: object) -> dict[str, object]:
    return {"topic": known.name, "pid": known.pid, **more}


def _say(
    findings: Findings,
    invariant: Invariant,
    known: PartitionScope,
    part: Columns,
    mask: Array,
    example: dict[str, Array],
    *,
    judged: bool = True,
) -> None:
    """A violation for each place that the mask picks; `judged`: the trace can tell."""
    if mask.any():
        group = np.full(len(mask), int(part["group"][0]), np.int64)
        findings.violation(
            invariant,
            group,
            np.ones(len(mask), np.int64),
            mask,
            lambda k: _example(known, **{name: int(each[k]) for name, each in example.items()}),
            what="violation" if judged else "unproved",
        )


# --- what is stored ------------------------------------------------------------------------


def _stored(part: Columns, messages: _Messages, known: PartitionScope, findings: Findings) -> None:
    """A4 within a partition, and the counts for A14."""
    offset, lp = messages.offset, messages.lp
    close = NEVER if known.close_offset < 0 else known.close_offset
    sealed = NEVER if known.seal_order < 0 else known.seal_order
    outside = (lp >= 0) & ((lp < known.lo) | (lp >= known.hi))
    behind = (offset >= close) | (messages.order > sealed) | (offset < 1)
    again = np.zeros(len(messages), bool)
    again[1:] = offset[1:] == offset[:-1]
    shown = {"offset": offset, "lp": lp}
    _say(findings, Invariant.TOPIC_ONE_PLACE, known, part, outside | behind | again, shown)
    published = (part["kind"] == words.PUBLISHED) & (part["reason"] == 0)
    group = part["group"][:1]
    if len(group):
        for name, value in (
            ("keyed", len(messages)),
            ("published", int(part["count"][published].sum())),
            ("last", int(offset[-1]) if len(offset) else 0),
        ):
            findings.counts(f"topic_{name}", group, [], np.array([value], np.int64))


def _stored_rows(part: Columns, messages: _Messages, known: PartitionScope) -> Block:
    n = len(messages)
    publisher = np.zeros(n, np.int64)
    tag = np.full(n, -1, np.int64)
    tagged = picked(part, part["kind"] == words.TAGGED)
    run, message = messages.of_runs(tagged["first_id"], tagged["count"])
    publisher[message] = tagged["position_index"][run]
    tag[message] = tagged["seq"][run] + messages.offset[message] - tagged["first_id"][run]
    return _rows(
        known,
        messages.key,
        STORED,
        messages.offset,
        messages.time_us,
        part,
        settled_us=publisher,
        settled_lease=tag,
    )


def _park_rows(part: Columns, known: PartitionScope) -> Iterator[Block]:
    """Ends of parked messages, and heads of parked keys that were handed out: also of messages
    that lie in other partitions."""
    parked = part["kind"] == words.PARKED
    done = parked & np.isin(part["reason"], (words.PARK_DONE, words.PARK_SKIPPED))
    head = (part["kind"] == words.HANDED_OUT) & (part["flags"] & words.PARKED_HEAD != 0)
    for kind, mask in ((DONE, done), (HEAD, head)):
        mine = picked(part, mask)
        yield _rows(
            known,
            mine["position_index"],
            kind,
            mine["first_id"],
            mine["time_us"],
            part,
            reader=mine["session"],
            version=mine["position_first"],
            how=mine["reason"],
        )


def _rows(
    known: PartitionScope,
    key: Array,
    kind: int,
    offset: Array,
    time_us: Array,
    part: Columns,
    **more: Array,
) -> Block:
    n = len(key)
    block: Block = {name: np.zeros(n, np.int64) for name in KEY_COLUMNS}
    block["topic"][:] = known.topic
    block["version"][:] = known.created
    block["row"][:] = kind
    if len(part["group"]):
        block["group"][:] = part["group"][0]
    block["key"], block["offset"], block["time_us"] = key, offset, time_us
    block.update(more)
    # A message without a key has no order: each is a key by itself.
    keyless = block["key"] == KEYLESS
    if keyless.any():
        alone = keyless_key(block["version"], block["offset"])
        block["key"] = np.where(keyless, alone, block["key"])
    return block


# --- leases --------------------------------------------------------------------------------


def _leases(part: Columns, known: PartitionScope, scope: TopicScope, findings: Findings) -> None:
    """A10: what was settled and handed out belongs to the lease in force."""
    kind = part["kind"]
    settled = (kind == words.SETTLED) | (
        (kind == words.PARKED) & np.isin(part["reason"], (*PARKS, words.PARK_DONE))
    )
    handed = kind == words.HANDED_OUT
    rows = np.flatnonzero((settled | handed) & ~np.isin(part["session"], list(known.ungrouped)))
    wrong = np.zeros(len(kind), bool)
    missing = np.zeros(len(kind), bool)
    pairs, which = np.unique(
        np.stack([part["session"][rows], part["consumer"][rows]]), axis=1, return_inverse=True
    )
    leases = [known.leases.get((int(group), int(epoch))) for group, epoch in pairs.T]
    table = np.array([each or (0,) * 6 for each in leases], np.int64).reshape(-1, 6)
    _, member, from_order, to_order, from_us, to_us = table[which.reshape(-1)].T
    there = np.array([each is not None for each in leases], bool)[which.reshape(-1)]
    bound = scope.bound_us
    order, time_us = part["order"][rows], part["time_us"][rows]
    # When a member has what it settles now is not known; the log says whether it still may.
    heard = part["flags"][rows] & words.AT_SETTLING != 0
    late = (time_us < from_us - bound) | ((time_us > to_us + bound) & ~heard)
    strange = late | (part["seq"][rows] != member)
    misplaced = (order < from_order) | (order >= to_order)
    missing[rows] = ~there
    if known.weak:
        # A member that was not heard of goes on until it hears of the next one.
        strange = part["seq"][rows] != member
    wrong[rows] = there & np.where(handed[rows], strange, misplaced)
    shown = {"epoch": part["consumer"], "first": part["first_id"], "count": part["count"]}
    _say(findings, Invariant.TOPIC_ONE_OWNER, known, part, wrong, shown)
    _say(findings, Invariant.TOPIC_ONE_OWNER, known, part, missing, shown, judged=known.whole)


# --- readers -------------------------------------------------------------------------------


class _Reading:
    """One reader of the messages of a part."""

    def __init__(
        self,
        rows: Columns,
        messages: _Messages,
        reader: tuple[int, int],
        known: PartitionScope,
        scope: TopicScope,
        group: int,
    ) -> None:
        self.group = group
        self.part = rows
        self.messages = messages
        self.reader = reader
        self.known = known
        self.bound_us = scope.bound_us
        n = len(messages)
        self.settled_us = np.full(n, -1, np.int64)
        self.settled_lease = np.full(n, -1, np.int64)
        self.settled_order = np.full(n, NEVER, np.int64)
        self.how = np.zeros(n, np.int64)
        self._settle()
        if known.given_up:
            self.how[self.settled_us < 0] = BY_LOSS
        self._hand_out()

    def _settle(self) -> None:
        """The first end of each message."""
        rows = self.part
        kind, reason = rows["kind"], rows["reason"]
        mask = np.isin(kind, (words.SETTLED, words.LOST, words.PASSED))
        mask &= rows["seq"] == self.reader[1]
        mask |= (kind == words.PARKED) & np.isin(reason, PARKS) & (rows["seq"] == self.reader[1])
        mine = picked(rows, mask)
        run, message = self.messages.of_runs(mine["first_id"], mine["count"])
        at = np.lexsort((mine["order"][run], message))
        message, run = message[at], run[at]
        first = np.ones(len(message), bool)
        first[1:] = message[1:] != message[:-1]
        message, run = message[first], run[first]
        kinds, reasons = mine["kind"][run], mine["reason"][run]
        self.settled_us[message] = mine["time_us"][run]
        self.settled_order[message] = mine["order"][run]
        self.settled_lease[message] = mine["consumer"][run]
        self.how[message] = np.select(
            [
                kinds == words.SETTLED,
                kinds == words.LOST,
                kinds == words.PASSED,
                reasons == words.PARK,
            ],
            [BY_ACK, BY_LOSS, BY_COPY, BY_PARK],
            BY_PARK_BEHIND,
        )

    def _hand_out(self) -> None:
        """The first hand-out of each message in each lease."""
        rows = self.part
        mask = (rows["kind"] == words.HANDED_OUT) & (rows["flags"] & words.PARKED_HEAD == 0)
        leases = self.known.leases
        group, group_epoch = self.reader
        epochs = np.unique(rows["consumer"][mask])
        mine = [
            epoch
            for epoch in epochs.tolist()
            if (group, epoch) in leases and leases[group, epoch].group_epoch == group_epoch
        ]
        handed = picked(rows, mask & np.isin(rows["consumer"], mine))
        run, message = self.messages.of_runs(handed["first_id"], handed["count"])
        self.out_message = message
        self.out_lease = handed["consumer"][run]
        self.out_us = handed["time_us"][run]
        self.out_heard = handed["flags"][run] & words.AT_SETTLING != 0
        """Heard of when they were settled: perhaps not for the first time."""
        self.out_alone = (handed["flags"][run] & words.ONE_OF_KEY != 0).astype(np.int64)

    def check(self, start: int, left_order: int, findings: Findings) -> None:
        """A9 and A11, and what A7 needs."""
        known, messages = self.known, self.messages
        if not len(messages):
            return
        out = self.out_message
        settled_lease, settled_us = self.settled_lease[out], self.settled_us[out]
        ended = (settled_us >= 0) & (self.how[out] != BY_LOSS)
        later = (settled_lease < self.out_lease) | (
            (settled_lease == self.out_lease)
            & (self.out_us > settled_us + self.bound_us)
            & ~self.out_heard
        )
        shown = {"offset": messages.offset[out], "epoch": self.out_lease}
        self._say(findings, Invariant.TOPIC_REDELIVERY, ended & later, shown)

        offset = messages.offset
        shown = {"offset": offset}
        if left_order < NEVER:
            lost = (offset >= start) & (self.settled_order > left_order)
            self._say(findings, Invariant.TOPIC_NOTHING_LOST, lost, shown, judged=known.whole)
        delivered = np.zeros(len(messages), bool)
        delivered[out] = True
        unseen = np.isin(self.how, (BY_ACK, BY_PARK)) & ~delivered
        judged = known.told and not known.repeats
        self._say(findings, Invariant.TOPIC_NOTHING_LOST, unseen, shown, judged=judged)
        self._gate(findings, start)

    def _gate(self, findings: Findings, start: int) -> None:
        mine = self.messages.offset >= start
        settled = self.settled_us[mine & np.isin(self.how, (BY_ACK, BY_PARK, BY_PARK_BEHIND))]
        values = [
            np.array([int(self.out_us.min()) if len(self.out_us) else NEVER], np.int64),
            np.array([int(settled.max()) if len(settled) else -1], np.int64),
        ]
        keys = [np.array([number], np.int64) for number in self.reader]
        findings.edges(0, np.array([self.group], np.int64), keys, values)

    def _say(
        self,
        findings: Findings,
        invariant: Invariant,
        mask: Array,
        example: dict[str, Array],
        *,
        judged: bool = True,
    ) -> None:
        part = {"group": np.array([self.group], np.int64)}
        _say(findings, invariant, self.known, part, mask, example, judged=judged)

    def rows(self, start: int) -> Block:
        """Rows by key: one for each message and lease, or one for a message that was never handed
        out."""
        messages = self.messages
        out, lease, time_us = self.out_message, self.out_lease, self.out_us
        at = np.lexsort((time_us, lease, out))
        out, lease, time_us, alone = out[at], lease[at], time_us[at], self.out_alone[at]
        first = np.ones(len(out), bool)
        first[1:] = (out[1:] != out[:-1]) | (lease[1:] != lease[:-1])
        out, lease, time_us, alone = out[first], lease[first], time_us[first], alone[first]
        unseen = np.setdiff1d(np.flatnonzero(messages.offset >= start), out)
        message = np.concatenate([out, unseen])
        none = np.full(len(unseen), -1, np.int64)
        n = len(message)
        return _rows(
            self.known,
            messages.key[message],
            READ,
            messages.offset[message],
            np.concatenate([time_us, none]),
            {"group": np.array([self.group], np.int64)},
            reader=np.full(n, self.reader[0], np.int64),
            reader_epoch=np.full(n, self.reader[1], np.int64),
            lease=np.concatenate([lease, none]),
            alone=np.concatenate([alone, none]),
            settled_us=self.settled_us[message],
            settled_lease=self.settled_lease[message],
            how=self.how[message],
        )
