"""The life of every message, from all that was decided about it.

Input: decided rows and the rows of the last state snapshot, sorted by group, ENQUEUE command and
log order. The ranges of one command's rows cut each other into *atoms*: ranges of messages with
one history. Each history is followed through these states; what is not in the table is a violation.

| before        | published | delivered | acked     | returned | dropped   |
|---------------|-----------|-----------|-----------|----------|-----------|
| nothing       | ready     | –         | –         | –        | –         |
| ready         | –         | held      | –         | –        | gone      |
| held          | –         | –         | gone      | ready    | gone      |
| gone          | –         | –         | –         | –        | –         |

Judged are only neighbours in log order without a gap of the trace between them.
"""

from __future__ import annotations

import numpy as np

from convoymq.model import trace as words
from convoymq.spark.audit.findings import (
    FATE_DROPPED,
    FATE_HELD,
    FATE_READY,
    FATE_SETTLED,
    HOUR_US,
    LOW,
    ORDINAL_BITS,
    Array,
    Columns,
    Findings,
    Scope,
    bucket_of,
)
from convoymq.spark.audit.invariants import Invariant

KEYS = ("group", "position_index", "command")
COLUMNS = (
    "group", "position_index", "command", "first", "count", "order", "kind", "flags", "reason",
    "time_us", "session", "consumer", "counts",
)  # fmt: skip
"""`order` = index · 2^24 + ordinal; `counts` = acquired · 2^32 + delivered."""


def _atoms(columns: Columns) -> tuple[Array, Array, Array]:
    """Returns (row, atom, messages) of every event: rows cut where another row of their command
    begins or ends, sorted by atom and log order."""
    keys = [columns[key] for key in KEYS]
    fresh = np.zeros(len(keys[0]), bool)
    for key in keys:
        fresh[1:] |= key[1:] != key[:-1]
    base = np.cumsum(fresh) << 33
    start = base + columns["first"]
    end = start + columns["count"]
    bounds = np.unique(np.concatenate([start, end]))
    low = np.searchsorted(bounds, start)
    parts = np.searchsorted(bounds, end) - low
    row = np.repeat(np.arange(len(start)), parts)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
    atom = low[row] + offset
    if (atom[1:] < atom[:-1]).any():
        order = np.argsort(atom, kind="stable")
        row, atom = row[order], atom[order]
    return row, atom, bounds[atom + 1] - bounds[atom]


def _since_start(values: Array, starts: Array, atom_of: Array) -> Array:
    """Returns how many True lie before each event within its atom."""
    before = np.cumsum(values) - values
    result: Array = before - before[starts][atom_of]
    return result


def _first_events(atom: Array) -> tuple[Array, Array]:
    """Returns (The first event of each atom, the atom of each event), counted from 0."""
    fresh = np.ones(len(atom), bool)
    fresh[1:] = atom[1:] != atom[:-1]
    return np.flatnonzero(fresh), np.cumsum(fresh) - 1


def _latest_events(event: Array, start: Array) -> tuple[Array, Array]:
    """Returns (The latest event up to each, the one before it in the same atom), or -1.

    Args:
        event: whether it changed anything; state snapshots don't.
        start: where the atom begins.
    """
    latest = np.maximum.accumulate(np.where(event, np.arange(len(event)), -1))
    before = np.full(len(event), -1)
    before[1:] = latest[:-1]
    before[before < start] = -1
    return latest, before


def follow(columns: Columns, scope: Scope, findings: Findings) -> None:
    """Checks whole commands; the input is in log order within each command."""
    row, atom, size = _atoms(columns)
    n = len(row)
    if not n:
        return
    kind = columns["kind"][row]
    group = columns["group"][row]
    order = columns["order"][row]
    span = scope.span(group, order >> ORDINAL_BITS)
    session = columns["session"][row]
    consumer = columns["consumer"][row]
    counts = columns["counts"][row]
    flags = columns["flags"][row]

    starts, atom_of = _first_events(atom)
    start = starts[atom_of]

    event = kind != words.STATE
    latest, before = _latest_events(event, start)
    has = before >= 0
    prior = np.where(has, kind[before], 0)
    known = has & (span[before] == span) & (span >= 0)
    # Without anything before: judged when the place of its publishing is covered without a gap.
    origin = scope.span(group, columns["position_index"][row])
    judged = known | (~has & (origin >= 0) & (origin == span))

    def example(k: int) -> dict[str, object]:
        shown = _shown(columns, row[k])
        if has[k]:
            shown["before"] = _shown(columns, row[before[k]])
        return shown

    def bad(invariant: Invariant, mask: Array) -> None:
        findings.violation(invariant, group, size, mask & judged, example)
        findings.violation(invariant, group, size, mask & ~judged, example, what="unproved")

    published = kind == words.PUBLISHED
    delivered = kind == words.DELIVERED
    acked = kind == words.ACKED
    returned = kind == words.RETURNED
    dropped = kind == words.DROPPED
    held = flags & words.HELD != 0
    ready = (prior == words.PUBLISHED) | (prior == words.RETURNED)
    out = prior == words.DELIVERED
    ended = (prior == words.ACKED) | (prior == words.DROPPED)
    changed = event & ~published

    bad(Invariant.NUMBERED, published & has)
    bad(Invariant.DELIVERED_IS_PUBLISHED, changed & ~has)
    bad(Invariant.ENDED_STAYS_ENDED, changed & ended)
    bad(Invariant.ONE_OWNER, delivered & out)
    from_owner = acked | returned | (dropped & held)
    owner = (session == session[before]) & (consumer == consumer[before])
    same_counts = counts == counts[before]
    bad(Invariant.LEFT_BY_OWNER, from_owner & (ready | (out & ~(owner & same_counts))))
    by_rule = np.isin(columns["reason"][row], list(words.REASON_NAMES))
    # The owners of all that a deleted queue had out are known too.
    bad(Invariant.DROPPED_BY_RULE, dropped & (~by_rule | (~held & out)))

    # Counts: how often it was returned before, if all of that is in the trace.
    back = _since_start(returned, starts, atom_of)
    failed = _since_start(returned & (flags & words.FAILED != 0), starts, atom_of)
    whole = published[start] & (span[start] == span) & (span >= 0)
    shown = flags & words.REDELIVERED != 0
    wrong = (counts != (back << 32) + failed) | (shown != (counts >> 32 > 0))
    findings.violation(Invariant.REDELIVERED, group, size, delivered & whole & wrong, example)

    _state_snapshot(columns, scope, findings, row, size, start, starts, atom_of, latest)
    _latencies(columns, findings, row, size, delivered, acked, before, known, whole, start)


def _state_snapshot(
    columns: Columns,
    scope: Scope,
    findings: Findings,
    row: Array,
    size: Array,
    start: Array,
    starts: Array,
    atom_of: Array,
    latest: Array,
) -> None:
    """Checks that the state snapshot has what is not ended, as the log left it, and no more."""
    kind = columns["kind"][row]
    group = columns["group"][row]
    index = columns["order"][row] >> ORDINAL_BITS
    span = scope.span(group, index)
    state_snapshot = scope.state_snapshot(group)
    event = kind != words.STATE
    here = np.arange(len(row))
    last = np.maximum.reduceat(np.where(event & (index <= state_snapshot), here, -1), starts)
    seen = np.maximum.reduceat(np.where(~event, here, -1), starts)
    at = starts
    final = kind[np.maximum(last, 0)]
    open_ = (last >= 0) & np.isin(final, (words.PUBLISHED, words.RETURNED, words.DELIVERED))
    has_state_snapshot = state_snapshot[at] >= 0
    near = scope.span(group[at], state_snapshot[at]) == span[np.maximum(last, 0)]

    def example(k: int) -> dict[str, object]:
        found = last[k] if last[k] >= 0 else seen[k]
        return {**_shown(columns, row[found]), "state_snapshot": int(state_snapshot[at[k]])}

    def bad(mask: Array, near: Array) -> None:
        args = (Invariant.NOTHING_LOST, group[at], size[at])
        findings.violation(*args, mask & near, example)
        findings.violation(*args, mask & ~near, example, what="unproved")

    bad(has_state_snapshot & open_ & (seen < 0), near)
    state = np.maximum(seen, 0)
    same_owner = (
        columns["session"][row[state]] == columns["session"][row[np.maximum(last, 0)]]
    ) & (columns["consumer"][row[state]] == columns["consumer"][row[np.maximum(last, 0)]])
    out = columns["flags"][row[state]] & words.HELD != 0
    fits = np.where(out, (final == words.DELIVERED) & same_owner, final != words.DELIVERED)
    origin = scope.span(group[at], columns["position_index"][row[at]])
    bad((seen >= 0) & (last >= 0) & ~(open_ & fits), near)
    # In the state snapshot, and the log knows nothing of it: only if its publishing should be
    # there.
    bad((seen >= 0) & (last < 0), scope.span(group[at], state_snapshot[at]) == origin)

    # Where every published message is now: the last event of all, in the state snapshot or not.
    ends = np.append(starts[1:], len(row)) - 1
    final_event = latest[ends]
    counted = (kind[start[ends]] == words.PUBLISHED) & (final_event >= starts)
    fate_kind = kind[np.maximum(final_event, 0)]
    fate = np.select(
        [fate_kind == words.ACKED, fate_kind == words.DROPPED, fate_kind == words.DELIVERED],
        [FATE_SETTLED, FATE_DROPPED, FATE_HELD],
        FATE_READY,
    ).astype(np.int64)
    reason = np.where(
        fate == FATE_DROPPED, columns["reason"][row[np.maximum(final_event, 0)]], 0
    ).astype(np.int64)
    queued = fate >= FATE_READY
    in_snapshot = (seen >= 0) & queued
    findings.counts(
        "fate",
        group[at][counted],
        [fate[counted], reason[counted], in_snapshot[counted].astype(np.int64)],
        size[at][counted],
    )


def _latencies(
    columns: Columns,
    findings: Findings,
    row: Array,
    size: Array,
    delivered: Array,
    acked: Array,
    before: Array,
    known: Array,
    whole: Array,
    start: Array,
) -> None:
    """Histograms by hour of publishing, or of delivery where that is not known."""
    time = columns["time_us"][row]
    group = columns["group"][row]
    hour = np.where(whole, time[start], time) // HOUR_US
    first = delivered & known & (columns["kind"][row[before]] == words.PUBLISHED)
    settled = acked & known
    for metric, mask, since in (
        (0, first, start),
        (1, settled, before),
        (2, settled & whole, start),
    ):
        took = (time - time[since])[mask]
        keys = [hour[mask], np.full(len(took), metric, np.int64), bucket_of(took)]
        findings.counts("latency", group[mask], keys, size[mask])


def _shown(columns: Columns, k: int) -> dict[str, object]:
    """Returns a row for people."""
    order = int(columns["order"][k])
    kind = int(columns["kind"][k])
    counts = int(columns["counts"][k])
    return {
        "row": words.KIND_NAMES.get(kind, str(kind)),
        "index": order >> ORDINAL_BITS,
        "ordinal": order & ((1 << ORDINAL_BITS) - 1),
        "session": f"{int(columns['session'][k]) & (2**64 - 1):016x}",
        "consumer": int(columns["consumer"][k]),
        "position": [
            int(columns["position_index"][k]),
            int(columns["command"][k]),
            int(columns["first"][k]),
        ],
        "count": int(columns["count"][k]),
        "acquired": counts >> 32,
        "delivered": counts & LOW,
    }
