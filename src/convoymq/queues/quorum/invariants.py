"""Invariants of a quorum queue's machine between any two entries."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise, repeat
from operator import add, itemgetter, le, rshift

from convoymq.model.words import words_from_bytes
from convoymq.queues.quorum.backlog import Backlog
from convoymq.queues.quorum.consumers import (
    CANCELLED,
    POLLER,
    QUIESCING,
    UP,
    WAITING,
    Consumer,
    Consumers,
)
from convoymq.queues.quorum.due_expiry import SWEEP_MS, SegmentedFifo
from convoymq.queues.quorum.levels import LEVEL_DEFAULT, LEVEL_MAX, Levels, due_of, level_of
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.notes import NOTHING
from convoymq.queues.quorum.restored import place_of
from convoymq.queues.quorum.runs import MARKED, Fifo, Run
from convoymq.queues.sessions import REPLIES_KEPT_MAX, check_openings, check_written

COUNT, SIZE = itemgetter(3), itemgetter(4)
"""Of a run."""


def check_invariants(machine: QuorumMachine) -> None:
    """Asserts what the module docstring promises. Cost: O(runs); tests call it after every step."""
    check_openings(machine)
    check_written(machine)
    backlog, consumers = machine.backlog, machine.consumers
    served = consumers.service_queue()
    assert len(served) == len(set(served)), "a consumer is in the service queue twice"
    serving = set(served)
    assert not (serving and backlog.ready()), "a message and a consumer wait for each other"
    places: list[Run] = []
    for session in machine.sessions.values():
        assert session.applied_at == -1
        assert len(session.replies) <= REPLIES_KEPT_MAX
        for number, consumer in session.consumers.items():
            assert consumer.number == number
            places += _check_held(consumer)
            _check_state(consumer, consumers, (session.id, number) in serving)
    places += _check_links(machine)
    places += _check_reservations(machine)
    places += machine.operations.check()
    places += machine.transactions.check()
    _check_who_is_active(machine)
    unacked = sum(map(COUNT, places))
    assert unacked == backlog.unacked
    assert sum(map(SIZE, places)) == backlog.unacked_bytes
    subscribed = [consumer for consumer in consumers.all() if consumer.state < CANCELLED]
    assert len(subscribed) + len(machine.reservations) == consumers.count
    returned = backlog.returned.runs()
    assert sum(map(COUNT, returned)) == backlog.returned.messages
    assert sum(map(SIZE, returned)) == backlog.returned.size
    places += returned
    places += _check_tail(backlog)
    places += _check_levels(machine)
    assert not backlog.fronted, "what came back to the head is not there"
    places += machine.dead_letters.check()
    places += backlog.groups.blocked_runs()
    places += _check_notes(machine)
    machine.deduplication.check()
    places += _check_waiting(machine)
    places += [run for held in machine.transactions.incoming() for _, run in held.held()]
    live = list(machine.live_ranges())
    _check_fresh(backlog.fresh, places, live)
    if backlog.expiry is not None:
        # Messages may have left between others: each is named.
        places += backlog.fresh.runs()
        wanted = backlog.expiry.wanted_ms
        avoided = {place_of(run) for run in backlog.notes.avoided.runs()}
        ready = [run for run in backlog.ready_runs() if place_of(run) not in avoided]
        dues = [due_of(run[7]) for run in ready if due_of(run[7])]
        assert not dues or 0 < wanted <= max(min(dues), backlog.expiry.swept_ms + SWEEP_MS)
    _check_places(places, live)
    _check_groups(machine)
    gone = backlog.acked + backlog.purged + sum(backlog.dropped.values())
    kept = backlog.stored() + backlog.waiting.messages + unacked
    assert kept + gone == backlog.published, "messages appeared or vanished"


def _check_held(consumer: Consumer) -> list[Run]:
    """Checks that what a consumer holds adds up, under ids that ascend."""
    held = consumer.checked_out.held()
    runs = [run for _, run in held]
    assert sum(map(COUNT, runs)) == consumer.checked_out.messages
    assert sum(map(SIZE, runs)) == consumer.checked_out.size
    last = -1
    for message_id, run in held:
        assert message_id > last, "message ids overlap"
        assert run[3] > 0
        last = message_id + run[3] - 1
    assert last < consumer.next_id
    return runs


def _check_state(consumer: Consumer, consumers: Consumers, is_served: bool) -> None:
    """A consumer is served exactly when it may be."""
    assert (consumer.number == 0) == (consumer.state == POLLER)
    may = (
        consumer.state == UP
        and not consumer.filtered
        and consumer.session.node not in consumers.machine.down_nodes
        and consumer.room() > 0
    )
    assert may == is_served == consumer.queued, (consumer.session.id, consumer.number, may)
    assert (consumer.state == WAITING) == any(c is consumer for c in consumers.waiting)
    if consumer.state == CANCELLED:
        assert consumer.checked_out.messages, "a cancelled consumer stays for nothing"


def _check_links(machine: QuorumMachine) -> list[Run]:
    """Checks that consumers are those of their links, and that what is kept has a time."""
    links = machine.links
    attached = [consumer for consumer in machine.consumers.all() if consumer.link]
    assert all(links.receivers[each.link] is each for each in attached)
    assert len(links.receivers) == len(attached) + len(links.kept())
    assert links.due_ms.keys() <= links.receivers.keys()
    assert links._tags == sum(len(each.tags) for each in links.publishers.values())
    places: list[Run] = []
    for consumer in links.kept():
        assert consumer.state == CANCELLED
        assert consumer.checked_out.messages, "a link is kept for nothing"
        places += _check_held(consumer)
    return places


def _check_reservations(machine: QuorumMachine) -> list[Run]:
    """Reservations hold their offsets without gaps; what they hold."""
    machine.reservations.check()
    places: list[Run] = []
    for reservation in machine.reservations.by_name.values():
        held = reservation.held.held()
        assert reservation.held.messages == reservation.next - reservation.first
        assert not held or held[0][0] == reservation.first
        runs = [run for _, run in held]
        assert sum(map(SIZE, runs)) == reservation.held.size
        for i, (message_id, run) in enumerate(held):
            after = held[i + 1][0] if i + 1 < len(held) else reservation.next
            assert message_id + run[3] == after, "a reservation has a gap"
        places += runs
    return places


def _check_who_is_active(machine: QuorumMachine) -> None:
    """With single active consumer there is at most one, or a reservation."""
    consumers = machine.consumers
    if not consumers.single_active:
        assert not consumers.waiting
        assert consumers.active is None
        return
    actives = [
        consumer
        for consumer in [*consumers.all(), *machine.links.kept()]
        if consumer.state in (UP, QUIESCING) or (consumers.strict and consumer.state == CANCELLED)
    ]
    assert len(actives) + len(machine.reservations) <= 1
    assert consumers.active is (actives[0] if actives else None)
    assert consumers.is_reserved == (len(machine.reservations) > 0)
    if consumers.strict:
        for consumer in [*consumers.all(), *machine.links.kept()]:
            assert consumer is consumers.active or not consumer.checked_out.messages, (
                "who is not the active consumer holds messages"
            )


def _check_waiting(machine: QuorumMachine) -> list[Run]:
    """Checks that what waits adds up, is in the order of its times, and waits no longer than it has
    to."""
    waiting = machine.backlog.waiting
    rows = list(waiting.rows())
    found = [run for _, run in rows]
    assert sum(map(COUNT, found)) == waiting.messages
    assert sum(map(SIZE, found)) == waiting.size
    assert len(rows) == waiting.run_count()
    keys = [(due_ms, *run[:3]) for due_ms, run in rows]
    assert keys == sorted(set(keys)), "what waits is not in order"
    assert not keys or keys[0][0] > machine.time_ms, "a message waits too long"
    return found


def _check_tail(backlog: Backlog) -> list[Run]:
    """Groups of the tail add up, and wait for messages that have entered the queue; its runs."""
    tail = backlog.requeued
    runs, (_, groups) = tail.runs(), tail.pack_tail()
    assert sum(map(COUNT, runs)) == tail.messages == sum(count for _, count in groups)
    assert sum(map(SIZE, runs)) == tail.size
    assert all(count > 0 for _, count in groups)
    turns = [entered for entered, _ in groups]
    assert turns == sorted(set(turns))
    assert not turns or turns[-1] <= backlog.published
    return runs


def _check_levels(machine: QuorumMachine) -> list[Run]:
    """Messages lie at their levels, in the order of the log; nothing that has expired stands at a
    head, and the queue keeps its length. Their runs."""
    backlog = machine.backlog
    runs: list[Run] = []
    for level in backlog.levels.with_messages():
        assert 0 <= level <= LEVEL_MAX
    for level, fifo in backlog.levels.by_level().items():
        assert level != LEVEL_DEFAULT
        found = fifo.runs()
        assert all(level_of(run[7]) == level for run in found)
        assert all(one[:3] < other[:3] for one, other in pairwise(found))
        assert sum(map(COUNT, found)) == fifo.messages
        assert sum(map(SIZE, found)) == fifo.size
        runs += found
    assert sum(map(COUNT, runs)) <= backlog.beside
    runs += _check_restored(backlog.levels)
    assert sum(map(COUNT, runs)) == backlog.levels.messages
    assert sum(map(SIZE, runs)) == backlog.levels.size
    assert backlog.timed or not backlog.may_expire()
    due = backlog.due_ms()
    assert not due or due > machine.time_ms, "what has expired stands at a head"
    assert backlog.refuses or not backlog.exceeds(), "the queue is longer than it may be"
    assert not backlog.refuses or backlog.refusing or not backlog.exceeds()
    assert backlog.refuses or not backlog.refusing
    return runs


def _check_notes(machine: QuorumMachine) -> list[Run]:
    """Checks that what is avoided adds up and waits for a consumer without credit; its runs."""
    notes = machine.backlog.notes
    assert NOTHING not in notes.by_place.values(), "a note says nothing"
    found = notes.avoided.runs()
    assert sum(map(COUNT, found)) == notes.avoided.messages
    assert sum(map(SIZE, found)) == notes.avoided.size
    consumers = machine.consumers
    able = {
        (consumer.session.id, consumer.number)
        for consumer in consumers.all()
        if consumer.state < CANCELLED
        and (not consumers.single_active or consumer is consumers.active)
    }
    for run in found:
        for _, (_, avoiding) in notes.parts(run):
            assert avoiding, "a message is avoided for nobody"
            assert not able or able - set(avoiding), "no consumer may get a message"
            assert consumers.next_without(avoiding) is None, "a consumer may get a message"
    return found


def _check_groups(machine: QuorumMachine) -> None:
    """Each group has one head, which is ready or held, and what is blocked of it is younger."""
    backlog = machine.backlog
    groups = backlog.groups
    heads = groups.keys()
    keys = {key: place for place, key in heads.items()}
    assert len(keys) == len(heads), "a group has two heads"
    blocked = groups.blocked_runs()
    assert sum(map(COUNT, blocked)) == groups.messages
    assert sum(map(SIZE, blocked)) == groups.size
    for key, found in groups.blocked_by_key().items():
        assert found, "a group blocks nothing"
        places = [keys[key], *map(place_of, found)]
        assert places == sorted(set(places)), "a group is not in the order of the log"
    if not heads:
        return
    somewhere = [
        *backlog.returned.runs(), *backlog.requeued.runs(), *backlog.fresh.runs(),
        *backlog.levels.restored.all_runs(),
        *(run for fifo in backlog.levels.fifos() for run in fifo.runs()),
        *(run for consumer in machine.consumers.all() for _, run in consumer.checked_out.held()),
        *(run for consumer in machine.links.kept() for _, run in consumer.checked_out.held()),
        *(run for each in machine.reservations.by_name.values() for _, run in each.held.held()),
        *backlog.waiting.runs(), *backlog.notes.avoided.runs(),
        *(run for held in machine.operations.held() for _, run in held.held()),
        *(run for held in machine.transactions.held() for _, run in held.held()),
    ]  # fmt: skip
    known = {
        (index, (offset << 32 | first) + i)
        for index, offset, first, count, *_ in somewhere
        for i in range(count)
    }
    assert heads.keys() <= known, "the head of a group is neither ready nor held"


def _check_restored(levels: Levels) -> list[Run]:
    """Checks that what stands at its place is counted, at the level of its mark; returns its
    runs."""
    restored = levels.restored
    runs: list[Run] = []
    for level in restored.levels():
        found = restored.runs(level)
        assert all(level_of(run[7]) == level for run in found)
        assert sum(map(COUNT, found)) == restored.count(level) > 0
        runs += found
    assert sum(map(COUNT, runs)) == restored.messages
    assert sum(map(SIZE, runs)) == restored.size
    assert sum(run[3] for run in runs if run[5]) == restored.again
    return runs


def _check_fresh(fresh: Fifo, others: list[Run], live: list[tuple[int, int]]) -> None:
    """Fresh messages lie in the order of the log, in no other place and in a live range. There may
    be very many: no object is made per run."""
    packed = fresh.pack()
    assert packed.startswith(MARKED) == fresh.has_marks
    stride = 4 if fresh.has_marks else 3
    words = words_from_bytes(packed[8 * (stride - 3) :], stride)
    indexes, places, amounts = words[0::stride], words[1::stride], words[2::stride]
    # An amount is a count above a size, a place an offset above the first record.
    assert sum(amounts) == (fresh.messages << 32) + fresh.size
    if not words:
        return
    assert min(amounts) >> 32 > 0
    ends = zip(indexes, map(add, places, map(rshift, amounts, repeat(32))), strict=True)
    starts = zip(indexes, places, strict=True)
    next(starts)
    assert all(map(le, ends, starts)), "fresh messages are not in the order of the log"
    if not isinstance(fresh, SegmentedFifo):
        assert any(low <= indexes[0] and indexes[-1] <= high for low, high in live)
    for index, offset, first, count, *_ in others:
        at = bisect_left(indexes, index)
        if at == len(indexes) or indexes[at] != index:
            # Most entries of messages elsewhere have no fresh ones left.
            continue
        for run in fresh.runs_from(index, offset, first, 1, 1):
            assert run[:2] != (index, offset) or first + count <= run[2], (
                "a message is in two places"
            )


def _check_places(places: list[Run], live: list[tuple[int, int]]) -> None:
    """No message is in two places, and the entries of all are in the live ranges."""
    places.sort()
    ranges = iter(live)
    high = last_index = last_offset = -2
    end = 0
    for index, offset, first, count, *_ in places:
        if index == last_index and offset == last_offset:
            assert end <= first, "a message is in two places"
        last_index = index
        last_offset = offset
        end = first + count
        while index > high:
            before = high
            low, high = next(ranges, (0, -1))
            assert before + 1 < low, "live ranges overlap, or an entry is in none"
            assert low <= high
            if index <= high:
                assert low <= index, "an entry that is needed is not in the live ranges"
    for low, after in ranges:
        assert high + 1 < low
        high = after
