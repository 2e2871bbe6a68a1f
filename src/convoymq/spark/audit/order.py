"""Order: of the log, of publishers, of consumers' deliveries; confirms, and what nodes sent.

Each sweep sees a part of a sequence (a range of entries, a range of message ids), checks its
neighbours, and emits how the part begins and ends; `plan` compares the ends of adjacent parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from convoymq.model import trace as words
from convoymq.spark.audit.findings import (
    HOUR_US,
    ORDINAL_BITS,
    Array,
    Columns,
    Findings,
    Scope,
    bucket_of,
    changes,
    columns_of,
    picked,
)
from convoymq.spark.audit.invariants import Invariant
from convoymq.spark.audit.messages import _shown

EDGE_TIME = 1
EDGE_TERM = 2
EDGE_NUMBER = 3
EDGE_SEQ = 4
EDGE_IDS = 5
EDGE_PLACE = 6
EDGE_INVARIANTS = {
    EDGE_TIME: Invariant.LOG_ORDER,
    EDGE_TERM: Invariant.LOG_ORDER,
    EDGE_NUMBER: Invariant.NUMBERED,
    EDGE_SEQ: Invariant.PUBLISHER_ORDER,
    EDGE_IDS: Invariant.DELIVERY_NUMBERS,
    EDGE_PLACE: Invariant.FIRST_DELIVERY_ORDER,
}
NODE_BITS = 8
NODE_SHIFT = 56
"""A session's number begins with its node's."""
CAME = -1
"""Begin of a consumer's ids: it came in this part. End: it left."""

LOG_KEYS = ("group", "part")
LOG_COLUMNS = (
    "group", "part", "order", "kind", "flags", "reason", "term", "time_us", "session", "consumer",
    "seq", "first_id", "count", "position_index", "command", "first", "counts",
)  # fmt: skip
CONFIRM_COLUMNS = ("group", "session", "seq", "phase", "count", "whole")
SENT_KEYS = ("group", "session", "consumer", "part")
SENT_COLUMNS = (
    "group", "session", "consumer", "part", "first_id", "count", "kind", "position_index",
    "command", "first", "counts", "time_us", "order", "whole",
)  # fmt: skip
"""`whole`: 1 where what is not in the trace cannot have been."""


def _sorted(columns: Columns, keys: tuple[str, ...]) -> Columns:
    order = np.lexsort([columns["order"], *(columns[key] for key in reversed(keys))])
    return {name: values[order] for name, values in columns.items()}


def follow_log(columns: Columns, scope: Scope, findings: Findings) -> None:
    """Checks whole parts; the input is sorted by part and log order. Rows: published, delivered,
    owner."""
    columns = {**columns, "zero": np.zeros(len(columns["order"]), np.int64)}
    time = columns["time_us"]
    term = columns["term"]
    own = ("group", "part")
    _chain(columns, scope, findings, EDGE_TIME, own, (time,), (time,), np.less)
    _chain(columns, scope, findings, EDGE_TERM, own, (term,), (term,), np.less)

    published = columns["kind"] == words.PUBLISHED
    entered = picked(columns, published & (columns["reason"] == 0))
    first = entered["first_id"]
    by_state_snapshot = entered["order"] >> ORDINAL_BITS <= scope.state_snapshot(entered["group"])
    findings.counts(
        "entered", entered["group"], [by_state_snapshot.astype(np.int64)], entered["count"]
    )
    _chain(
        entered, scope, findings, EDGE_NUMBER, own, (first,), (first + entered["count"],),
        np.not_equal,
    )  # fmt: skip
    sent = _sorted(picked(columns, published & (columns["session"] != 0)), (*own, "session"))
    seq = sent["seq"]
    # A command of a named producer may be cut in two rows: what it had sent before, and the rest.
    _chain(
        sent, scope, findings, EDGE_SEQ, (*own, "session"), (seq,), (seq,),
        lambda begin, end: (begin < end) | ((begin == end) & (sent["first"] == 0)),
    )  # fmt: skip

    by_reservation = columns["flags"] & words.BY_RESERVATION != 0
    delivered = columns["kind"] == words.DELIVERED
    consumer = (*own, "session", "consumer")
    mine = _sorted(
        picked(columns, (delivered | (columns["kind"] == words.OWNER)) & ~by_reservation), consumer
    )
    gone = mine["flags"] & words.GONE != 0
    owner = mine["kind"] == words.OWNER
    begin = np.where(owner, CAME, mine["first_id"])
    end = np.where(owner & gone, -2, mine["first_id"] + mine["count"])
    _chain(
        mine, scope, findings, EDGE_IDS, consumer, (begin,), (end,),
        lambda begin, end: (begin != end) & (begin != CAME),
    )  # fmt: skip

    # Whose clients published, and were given messages: these nodes have something to show.
    named = (published & (columns["session"] != 0)) | (delivered & ~by_reservation)
    session = columns["session"][named].astype(np.uint64)
    node = (session >> np.uint64(NODE_SHIFT)).astype(np.int64)
    known = [columns["kind"][named], node]
    findings.counts("client", columns["group"][named], known, columns["count"][named])

    fresh = _sorted(picked(columns, delivered & (columns["counts"] >> 32 == 0)), consumer)
    place = (fresh["position_index"], (fresh["command"] << 30) + fresh["first"])
    after = (place[0], place[1] + fresh["count"])
    _chain(fresh, scope, findings, EDGE_PLACE, consumer, place, after, _is_before)

    got = picked(columns, delivered)
    findings.counts(
        "share",
        got["group"],
        [got["time_us"] // HOUR_US, got["session"], got["consumer"]],
        got["count"],
    )


def _is_before(place: Sequence[Array], end: Sequence[Array]) -> Array:
    """Returns whether a place (index, rest) lies before where the last one ended."""
    index, rest = place
    last_index, last_rest = end
    result: Array = (index < last_index) | ((index == last_index) & (rest < last_rest))
    return result


def _chain(
    columns: Columns,
    scope: Scope,
    findings: Findings,
    edge: int,
    keys: tuple[str, ...],
    begin: tuple[Array, ...],
    end: tuple[Array, ...],
    is_wrong: Callable[..., Array],
) -> None:
    """Compares where each row begins with where the one before of the same key ended."""
    n = len(columns["order"])
    if not n:
        return
    group = columns["group"]
    order = columns["order"]
    span = scope.span(group, order >> ORDINAL_BITS)
    fresh = changes(columns, keys)
    here = np.arange(n)
    before = np.where(fresh, here, here - 1)
    wide = len(begin) == 2
    ended = tuple(values[before] for values in end)
    wrong = is_wrong(begin, ended) if wide else is_wrong(begin[0], ended[0])
    near = ~fresh & (span == span[before]) & (span >= 0)

    def example(k: int) -> dict[str, object]:
        return {**_shown(columns, k), "before": _shown(columns, int(before[k]))}

    findings.violation(EDGE_INVARIANTS[edge], group, columns["count"], wrong & near, example)
    starts = np.flatnonzero(fresh)
    ends = np.append(starts[1:], n) - 1
    zero = np.zeros(len(starts), np.int64)
    found = [
        begin[0][starts],
        begin[1][starts] if wide else zero,
        end[0][ends],
        end[1][ends] if wide else zero,
        span[starts],
        span[ends],
        order[starts],
    ]
    names = [columns[key][starts] for key in keys[2:]] + [zero] * (4 - len(keys))
    findings.edges(edge, group[starts], [*names, columns["part"][starts]], found)


class ConfirmSweep:
    """For `mapInArrow`: publishes and confirms of whole sessions, sorted by seq. A confirm is two
    rows: phase 0 before its first seq, phase 2 behind its last; a publish is phase 1."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields findings. Memory: batches up to a place that no confirm spans."""
        held: Columns | None = None
        for batch in batches:
            if not batch.num_rows:
                continue
            columns = columns_of(batch)
            if held is not None:
                columns = {k: np.concatenate([held[k], columns[k]]) for k in columns}
            depth = np.cumsum((columns["phase"] == 0).astype(int) - (columns["phase"] == 2))
            closed = np.flatnonzero(depth == 0)
            cut = int(closed[-1]) + 1 if len(closed) else 0
            held = {name: values[cut:] for name, values in columns.items()}
            yield from self._check({name: values[:cut] for name, values in columns.items()})
        if held is not None:
            yield from self._check(held)

    def _check(self, columns: Columns) -> Iterator[pa.RecordBatch]:
        findings = Findings()
        if len(columns["phase"]):
            follow_confirms(columns, self.scope, findings)
        yield from findings.take()


def follow_confirms(columns: Columns, scope: Scope, findings: Findings) -> None:
    """Checks confirms against publishes; opens and closes are balanced in the input."""
    phase = columns["phase"]
    group = columns["group"]
    total = np.cumsum(np.where(phase == 1, columns["count"], 0))
    opens = np.flatnonzero(phase == 0)
    closes = np.flatnonzero(phase == 2)
    if not len(opens):
        return
    published = total[closes] - total[opens]
    counts = columns["count"][closes]
    # A confirm of a queue that was deleted, or of what the trace does not reach, can't be judged.
    judged = columns["whole"][closes] != 0

    def example(k: int) -> dict[str, object]:
        at = closes[k]
        return {
            "session": f"{int(columns['session'][at]) & (2**64 - 1):016x}",
            "first_seq": int(columns["seq"][opens[k]]),
            "last_seq": int(columns["seq"][at]),
            "confirmed": int(counts[k]),
            "published": int(published[k]),
        }

    wrong = published != counts
    args = (Invariant.CONFIRMED_IS_PUBLISHED, group[closes], counts)
    findings.violation(*args, wrong & judged, example)
    findings.violation(*args, wrong & ~judged, example, what="unproved")
    overlap = np.zeros(len(opens), bool)
    overlap[1:] = opens[1:] < closes[:-1]
    findings.violation(Invariant.CONFIRMED_ONCE, group[closes], counts, overlap, example)
    findings.counts("confirmed", group[closes], [], counts)


def _last_of(columns: Columns, mask: Array, values: Array) -> Array:
    """Returns the highest value of the rows that `mask` picks, in the part of each row; -1 =
    none."""
    fresh = changes(columns, SENT_KEYS)
    starts = np.flatnonzero(fresh)
    found: Array = np.maximum.reduceat(np.where(mask, values, -1), starts)[np.cumsum(fresh) - 1]
    return found


def _sent_atoms(columns: Columns, base: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Returns (row, atom, whether it was sent, messages, messages of the row before it) of every
    piece of the rows, cut where another row of the same part begins or ends."""
    fresh = changes(columns, SENT_KEYS)
    low = columns["first_id"] - np.minimum.reduceat(
        columns["first_id"], np.flatnonzero(fresh)
    )[np.cumsum(fresh) - 1]  # fmt: skip
    start = base + low
    end = start + columns["count"]
    bounds = np.unique(np.concatenate([start, end]))
    at = np.searchsorted(bounds, start)
    parts = np.searchsorted(bounds, end) - at
    row = np.repeat(np.arange(len(start)), parts)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
    atom = at[row] + offset
    is_sent = columns["kind"][row] == words.SENT
    order = np.lexsort([is_sent, atom])
    row, atom, is_sent = row[order], atom[order], is_sent[order]
    return row, atom, is_sent, bounds[atom + 1] - bounds[atom], bounds[atom] - start[row]


def follow_sent(columns: Columns, shared: bool, findings: Findings) -> None:
    """Checks what was decided for consumers and what nodes sent them: whole parts, in any order
    within a part. A row of kind OWNER stands at the last id that a consumer could get before it was
    gone. Of a stream, whose messages go to many (`shared`): what is in it, and what was sent."""
    gone = columns["kind"] == words.OWNER
    gone_at = _last_of(columns, gone, columns["first_id"])
    sent_at = _last_of(columns, columns["kind"] == words.SENT, columns["first_id"])
    columns = {**columns, "gone_at": gone_at, "sent_at": sent_at}
    columns = picked(columns, ~gone)
    if not len(columns["kind"]):
        return
    base = np.cumsum(changes(columns, SENT_KEYS)) << 40
    row, atom, is_sent, size, skip = _sent_atoms(columns, base)
    group = columns["group"][row]

    begins = np.ones(len(atom), bool)
    begins[1:] = atom[1:] != atom[:-1]
    starts = np.flatnonzero(begins)
    decided = starts[np.cumsum(begins) - 1]
    has = ~is_sent[decided]
    again = np.zeros(len(atom), bool)
    again[1:] = is_sent[1:] & is_sent[:-1] & ~begins[1:]
    source = row[decided]
    place_known = (columns["position_index"][row] != 0) & (columns["command"][row] != 0)
    moved = place_known & (
        (columns["position_index"][row] != columns["position_index"][source])
        | (columns["command"][row] != columns["command"][source])
        | (columns["first"][row] + skip != columns["first"][source] + skip[decided])
    )
    differs = (columns["counts"][row] != columns["counts"][source]) | moved
    whole = columns["whole"][row] != 0
    time = columns["time_us"][row]
    early = np.zeros(len(atom), bool)
    if not shared:
        # Decided and sent rows alternate: compare with the sent row before in the same part.
        at_sent = np.flatnonzero(is_sent)
        same = (base[row][at_sent[1:]] == base[row][at_sent[:-1]]) & (
            time[at_sent[1:]] < time[at_sent[:-1]]
        )
        early[at_sent[1:]] = same

    def example(k: int) -> dict[str, object]:
        shown = {**_shown(columns, row[k]), "id": int(columns["first_id"][row[k]] + skip[k])}
        if has[k]:
            shown["decided"] = _shown(columns, source[k])
        return shown

    args = (Invariant.SENT_AS_DECIDED, group, size)
    lonely = is_sent & ~has
    findings.violation(*args, is_sent & ((again & (not shared)) | early | (has & differs)), example)
    findings.violation(*args, lonely & whole, example)
    findings.violation(*args, lonely & ~whole, example, what="unproved")
    if not shared:
        # A decided range without a row of the node. Ids are sent in their order: with a later one
        # sent, this one was left out. Without, it may have been on its way when the trace ended,
        # and when the consumer was gone it went back.
        last = np.append(starts[1:], len(atom)) - 1
        unsent = np.zeros(len(atom), bool)
        unsent[starts] = ~is_sent[starts] & ~is_sent[last]
        at_id = columns["first_id"][row] + skip
        left_out = unsent & (columns["sent_at"][row] > at_id)
        excused = unsent & (columns["gone_at"][row] >= at_id)
        findings.violation(*args, left_out & ~excused & whole, example)
        unknown = unsent & ~excused & ~(left_out & whole)
        findings.violation(*args, unknown, example, what="unproved")
    sent = is_sent & has
    took = (time - columns["time_us"][source])[sent]
    hour = columns["time_us"][source][sent] // HOUR_US
    keys = [hour, np.full(len(took), 3, np.int64), bucket_of(took)]
    findings.counts("latency", group[sent], keys, size[sent])
