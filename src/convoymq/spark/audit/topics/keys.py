"""The messages of a key over all partitions of its topic (A1, A4, A8, A12, A13, A15).

Input: rows by key (`partitions.KEY_COLUMNS`), sorted by topic, key, reader, order token. Order of a
key is that of its order tokens: the version that created the partition, then the offset.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from convoymq.spark.audit.findings import Array, Columns, Findings, changes, picked
from convoymq.spark.audit.invariants import Invariant
from convoymq.spark.audit.topics.partitions import (
    BY_ACK,
    BY_PARK,
    BY_PARK_BEHIND,
    DONE,
    EFFECT,
    HEAD,
    KEY_COLUMNS,
    READ,
    SOURCE,
    STORED,
)
from convoymq.spark.audit.topics.scope import NEVER, TopicScope

KEYS = ("topic", "key")
SORT = ("topic", "key", "reader", "reader_epoch", "version", "offset", "row", "time_us")
COLUMNS = KEY_COLUMNS
APPLIED = 1
"""`how` of an effect that was applied; 0: it was ignored."""


def follow_keys(columns: Columns, scope: TopicScope, findings: Findings) -> None:
    """Checks whole keys; the input is sorted by `SORT`."""
    row = columns["row"]
    _stored(picked(columns, row == STORED), scope, findings)
    _delivered(picked(columns, row == READ), scope, findings)
    for own in _of_readers(columns, (DONE, HEAD), (BY_PARK, BY_PARK_BEHIND)):
        _parked(own, scope, findings)
    if scope.sinks:
        for own in _of_readers(columns, (EFFECT,), (BY_ACK,)):
            if (int(own["topic"][0]), int(own["reader"][0])) in scope.sinks:
                _effects(own, columns, scope, findings)


def _say(
    findings: Findings,
    scope: TopicScope,
    invariant: Invariant,
    columns: Columns,
    mask: Array,
    **more: Array,
) -> None:
    """A violation for each row that the mask picks, where the trace of its partition is whole."""
    if not mask.any():
        return

    def example(k: int) -> dict[str, object]:
        known = scope.partitions.get(int(columns["group"][k]))
        shown: dict[str, object] = {
            "topic": known.name if known is not None else "",
            "key": f"{int(columns['key'][k]) & (1 << 64) - 1:016x}",
            "token": [int(columns["version"][k]), int(columns["offset"][k])],
        }
        if columns["reader"][k]:
            shown["group"] = scope.name(int(columns["reader"][k]))
        return {**shown, **{name: int(values[k]) for name, values in more.items()}}

    whole = np.array(
        [
            group in scope.partitions and scope.partitions[group].whole
            for group in columns["group"].tolist()
        ],
        bool,
    )
    ones = np.ones(len(mask), np.int64)
    group = columns["group"]
    findings.violation(invariant, group, ones, mask & whole, example)
    findings.violation(invariant, group, ones, mask & ~whole, example, what="unproved")


def _order(columns: Columns, *keys: str) -> Columns:
    at = np.lexsort([columns[key] for key in reversed(keys)])
    return {name: values[at] for name, values in columns.items()}


# --- stored: A1, A4 ------------------------------------------------------------------------


def _stored(columns: Columns, scope: TopicScope, findings: Findings) -> None:
    n = len(columns["key"])
    if not n:
        return
    fresh = changes(columns, KEYS)
    time_us = columns["time_us"]
    early = np.zeros(n, bool)
    elsewhere = columns["group"][1:] != columns["group"][:-1]
    early[1:] = ~fresh[1:] & elsewhere & (time_us[1:] < time_us[:-1] - scope.bound_us)
    _say(findings, scope, Invariant.TOPIC_ONE_PLACE, columns, early)

    # `settled_us` is the publisher here, `settled_lease` the delivery tag.
    tagged = picked(columns, (columns["settled_lease"] >= 0) & (columns["settled_us"] != 0))
    mine = _order(tagged, "topic", "key", "settled_us", "version", "offset")
    same = ~changes(mine, (*KEYS, "settled_us"))
    tag = mine["settled_lease"]
    wrong = np.zeros(len(tag), bool)
    wrong[1:] = same[1:] & (tag[1:] <= tag[:-1])
    again = np.zeros(len(tag), bool)
    again[1:] = same[1:] & (tag[1:] == tag[:-1])
    _say(findings, scope, Invariant.TOPIC_LOG_ORDER, mine, wrong & ~again, tag=tag)
    _say(findings, scope, Invariant.TOPIC_STORED_ONCE, mine, again, tag=tag)


# --- delivered: A8 -------------------------------------------------------------------------


def _delivered(columns: Columns, scope: TopicScope, findings: Findings) -> None:
    """Rows: one for each message, reader and lease; a message that was never handed out has one
    without a lease."""
    n = len(columns["key"])
    if not n:
        return
    of_reader = (*KEYS, "reader", "reader_epoch")
    of_message = (*of_reader, "version", "offset")
    number = np.cumsum(changes(columns, of_message)) - 1
    time_us = np.where(columns["time_us"] < 0, NEVER, columns["time_us"])
    # The first hand-out of each message.
    at = np.lexsort([time_us, number])
    first = at[np.flatnonzero(np.diff(number[at], prepend=-1))]
    message = {name: values[first] for name, values in columns.items()}
    came_us, lease = time_us[first], message["lease"]
    group, settled_us = message["group"], message["settled_us"]
    has = np.zeros(len(first), bool)
    has[1:] = ~changes(message, of_reader)[1:]
    before = np.maximum(np.arange(len(first)) - 1, 0)
    same_lease = has & (lease == lease[before]) & (group == group[before])
    # A loss is passed over.
    judged = has & (came_us < NEVER) & (message["how"][before] != 4)

    bound = np.where(same_lease, 0, scope.bound_us)
    overtaken = judged & (came_us[before] < NEVER) & (came_us < came_us[before] - bound)

    there = np.sort(_pair(number, columns["lease"]))
    wanted = _pair(before, lease)
    place = np.minimum(np.searchsorted(there, wanted), max(len(there) - 1, 0))
    same_partition = group == group[before]
    came_there = same_partition & (there[place] == wanted)
    ended = settled_us[before] >= 0
    settled_lease = message["settled_lease"][before]
    in_time = settled_us[before] <= came_us + scope.bound_us
    ended_before = ended & (
        (same_partition & (settled_lease < lease))
        | (same_partition & (settled_lease == lease) & in_time)
        | (~same_partition & in_time)
    )
    jumped = judged & ~came_there & ~ended_before
    # A member with one message of a key at a time was given the next one too early.
    overtaken |= judged & same_lease & (message["alone"] > 0) & ended & ~in_time
    # What was handed out by a node whose acts are not all there may have been so before.
    told = np.array(
        [
            each in scope.partitions and scope.partitions[each].told
            for each in group.tolist()
        ],
        bool,
    )  # fmt: skip
    unknown = jumped & (came_us[before] == NEVER) & ~told
    # A weak topic keeps the order of what one member hands out of one partition.
    weak = _weak(group, scope)
    jumped &= ~weak
    unknown &= ~weak
    overtaken &= ~weak | same_lease
    wrong = overtaken | (jumped & ~unknown)
    _say(findings, scope, Invariant.TOPIC_DELIVERY_ORDER, message, wrong, epoch=lease)
    ones = np.ones(len(first), np.int64)
    findings.violation(
        Invariant.TOPIC_DELIVERY_ORDER, group, ones, unknown & ~wrong, lambda _: {}, what="unproved"
    )


def _weak(group: Array, scope: TopicScope) -> Array:
    """Returns True for rows of partitions of weak topics."""
    weak = {number for number, each in scope.partitions.items() if each.weak}
    return np.isin(group, list(weak))


def _pair(message: Array, lease: Array) -> Array:
    """Returns message and lease as one number."""
    pair: Array = (message.astype(np.int64) << 24) + (lease & ((1 << 24) - 1))
    return pair


# --- parked: A12 ---------------------------------------------------------------------------


def _of_readers(
    columns: Columns, kinds: tuple[int, ...], hows: tuple[int, ...]
) -> Iterator[Columns]:
    """Yields the rows of each reader of a key that has rows of these kinds: there are few."""
    keys = (*KEYS, "reader")
    starts = np.flatnonzero(changes(columns, keys))
    wanted = np.isin(columns["row"], kinds) | (
        (columns["row"] == READ) & np.isin(columns["how"], hows)
    )
    if not len(starts):
        return
    many = np.add.reduceat(wanted.astype(np.int64), starts)
    ends = np.append(starts[1:], len(wanted))
    for k in np.flatnonzero(many):
        yield {name: values[starts[k] : ends[k]] for name, values in columns.items()}


def _parked(own: Columns, scope: TopicScope, findings: Findings) -> None:
    """One reader of a key with parked messages."""
    read = own["row"] == READ
    parked = read & np.isin(own["how"], (BY_PARK, BY_PARK_BEHIND))
    n = len(read)
    ends: dict[tuple[int, int], list[int]] = {}
    for k in np.flatnonzero(own["row"] == DONE):
        token = (int(own["version"][k]), int(own["offset"][k]))
        ends.setdefault(token, []).append(int(own["time_us"][k]))
    wrong = np.zeros(n, bool)
    bound = scope.bound_us
    version, offset, time_us = own["version"], own["offset"], own["time_us"]
    seen = set()
    for k in np.flatnonzero(parked):
        token = (int(version[k]), int(offset[k]))
        if (*token, int(own["reader_epoch"][k])) in seen:
            continue
        seen.add((*token, int(own["reader_epoch"][k])))
        begin_us = int(own["settled_us"][k])
        later = [each for each in ends.get(token, ()) if each >= begin_us - bound]
        end_us = min(later, default=NEVER)
        behind = (version > token[0]) | ((version == token[0]) & (offset > token[1]))
        same = own["reader_epoch"] == own["reader_epoch"][k]
        fresh = read & same & (time_us >= 0) & _first_of(own)
        heads = own["row"] == HEAD
        meanwhile = (time_us > begin_us + bound) & (time_us < end_us - bound)
        wrong |= behind & meanwhile & (fresh | heads)
    wrong &= ~_weak(own["group"], scope)
    _say(findings, scope, Invariant.TOPIC_PARK_ORDER, own, wrong)


def _first_of(own: Columns) -> Array:
    """Returns True at the first hand-out of each message to a reader."""
    keys = ("reader_epoch", "version", "offset", "row")
    at = np.lexsort([own["time_us"], *(own[key] for key in reversed(keys))])
    sorted_ = {name: own[name][at] for name in keys}
    made = np.zeros(len(at), bool)
    made[at] = changes(sorted_, keys)
    return made


# --- effects: A13, A15 ---------------------------------------------------------------------


def _effects(own: Columns, columns: Columns, scope: TopicScope, findings: Findings) -> None:
    """One reader of a key whose sink recorded what it did."""
    effect = own["row"] == EFFECT
    applied = picked(own, effect & (own["how"] == APPLIED))
    if len(applied["key"]):
        # In the order in which the sink did it.
        done = _order(applied, "time_us")
        wrong = np.zeros(len(done["key"]), bool)
        later = (done["version"][1:] > done["version"][:-1]) | (
            (done["version"][1:] == done["version"][:-1])
            & (done["offset"][1:] > done["offset"][:-1])
        )
        wrong[1:] = ~later
        wrong &= ~_weak(_placed(done, own)["group"], scope)
        _say(findings, scope, Invariant.TOPIC_EFFECTS_ONCE, _placed(done, own), wrong)
    tokens = set(zip(applied["version"].tolist(), applied["offset"].tolist(), strict=True))
    acknowledged = (own["row"] == READ) & (own["how"] == BY_ACK)
    missing = np.array(
        [
            bool(acknowledged[k]) and (int(own["version"][k]), int(own["offset"][k])) not in tokens
            for k in range(len(effect))
        ],
        bool,
    )
    _say(findings, scope, Invariant.TOPIC_EFFECTS_ONCE, own, missing)
    source = picked(
        columns,
        (columns["row"] == SOURCE)
        & (columns["key"] == own["key"][0])
        & (columns["topic"] == own["topic"][0]),
    )
    if len(source["key"]) and len(applied["key"]):
        last = _order(applied, "version", "offset")
        wanted = source["settled_lease"][np.argmax(source["time_us"])]
        differs = np.zeros(len(last["key"]), bool)
        differs[-1] = last["settled_lease"][-1] != wanted
        differs &= ~_weak(_placed(last, own)["group"], scope)
        _say(findings, scope, Invariant.TOPIC_END_STATE, _placed(last, own), differs)
    elif len(source["key"]):
        nothing = np.zeros(len(effect), bool)
        nothing[0] = True
        _say(findings, scope, Invariant.TOPIC_END_STATE, own, nothing)


def _placed(effects: Columns, own: Columns) -> Columns:
    """Effects do not know the Raft group of their message's partition: it is that of what was read,
    or of any."""
    groups = {
        (int(v), int(o)): int(g)
        for v, o, g in zip(own["version"], own["offset"], own["group"], strict=True)
        if g
    }
    some = next(iter(groups.values()), 0)
    tokens = zip(effects["version"].tolist(), effects["offset"].tolist(), strict=True)
    return {**effects, "group": np.array([groups.get(each, some) for each in tokens], np.int64)}
