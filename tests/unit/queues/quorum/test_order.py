"""Where a message goes that comes back, and which level is next (ADR 0050)."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from convoymq.kernels import batch
from convoymq.queues.quorum.backlog import AS_RABBITMQ, FRONT, ORIGINAL, TAIL
from convoymq.queues.quorum.settings import SINCE_VERSION_2, machine_settings
from convoymq.replication.machine import EFFECT_DELIVER
from tests.unit.queues.quorum.support import (
    Queue,
    apply,
    deliveries,
    expand,
    places,
    replies,
    restored,
    second,
    session_id,
)

A, B, C = session_id(1), session_id(2), session_id(3)
POSITIONS = [ORIGINAL, FRONT, TAIL]


def publish(queue: Queue, count: int, **attributes: Any) -> list[int]:
    """Messages, one an entry; their entries."""
    made = []
    for _ in range(count):
        queue.log.publish_as(A, 8, **attributes)
        queue.step()
        made.append(len(queue.log.entries))
    return made


def take_all(queue: Queue, session: int = C) -> list[int]:
    """Entries of all that is ready, in the order in which it is given."""
    queue.log.checkout(session, 1, 1_000)
    return places(queue, queue.step(), session)


# Where what comes back goes.


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (AS_RABBITMQ, [1, 0, 2, 3, 4]),
        (ORIGINAL, [0, 1, 2, 3, 4]),
        (FRONT, [0, 1, 2, 3, 4]),
        (TAIL, [2, 3, 4, 1, 0]),
    ],
)
def test_what_comes_back_one_by_one_goes_where_the_setting_says(
    position: int, expected: list[int]
) -> None:
    """The second message comes back first."""
    queue = second(requeue_position=position)
    entries = publish(queue, 5)
    queue.log.get(B)
    queue.log.get(B)
    queue.step()
    for message_id in (1, 0):
        queue.log.return_(B, 0, message_id, message_id)
        queue.step()
        restored(queue)
    assert [entries.index(entry) for entry in take_all(queue)] == expected


def test_front_and_original_differ_in_what_came_back_before() -> None:
    """The first comes back, then the second: at the front it goes before the first."""
    for position, expected in ((FRONT, [1, 0, 2]), (ORIGINAL, [0, 1, 2])):
        queue = second(requeue_position=position)
        entries = publish(queue, 3)
        for _ in range(2):
            queue.log.get(B)
        queue.step()
        for message_id in (0, 1):
            queue.log.return_(B, 0, message_id, message_id)
            queue.step()
        assert [entries.index(entry) for entry in take_all(queue)] == expected


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("how", ["close", "return", "ranges", "node"])
def test_what_comes_back_together_keeps_its_order(position: int, how: str) -> None:
    queue = second(requeue_position=position)
    entries = publish(queue, 6)
    queue.log.checkout(B, 1, 4)
    queue.step()
    queue.log.cancel(B, 1)
    queue.step()
    if how == "close":
        queue.log.close(B)
    elif how == "return":
        queue.log.return_(B, 1, 0, 3)
    elif how == "ranges":
        queue.log.return_(B, 1, 2, 3, 0, 1, failed=True)
    else:
        queue.log.node_down(2, gone=True)
    queue.step()
    expected = [4, 5, 0, 1, 2, 3] if position == TAIL else [0, 1, 2, 3, 4, 5]
    if position == TAIL and how == "ranges":
        expected = [4, 5, 2, 3, 0, 1]
    assert [entries.index(entry) for entry in take_all(queue)] == expected


@pytest.mark.parametrize("position", POSITIONS)
def test_a_reservation_gives_back_to_the_same_place(position: int) -> None:
    queue = second(requeue_position=position)
    entries = publish(queue, 4)
    queue.log.reservation(B, "lease", owner="x", ttl_ms=10_000, max=3)
    queue.step()
    epoch = queue.machine.reservations.by_name["s"].epoch
    release = {"epoch": epoch, "from": 0, "fencing_token": 1}
    queue.log.reservation(B, "release", **release)
    queue.step()
    restored(queue)
    expected = [3, 0, 1, 2] if position == TAIL else [0, 1, 2, 3]
    assert [entries.index(entry) for entry in take_all(queue)] == expected


@pytest.mark.parametrize("position", POSITIONS)
def test_a_message_leaves_over_the_delivery_limit_wherever_it_would_go(position: int) -> None:
    queue = second(requeue_position=position, delivery_limit=1)
    publish(queue, 1)
    for _ in range(2):
        queue.log.get(B)
        held = [message_id for message_id, _ in deliveries(queue.step(), B, 0)]
        queue.log.return_(B, 0, held[0], held[0], failed=True)
        queue.step()
    assert queue.machine.totals()["dropped_delivery_limit"] == 1
    assert queue.machine.backlog.ready() == 0


@pytest.mark.parametrize("position", [ORIGINAL, FRONT])
def test_without_a_limit_the_setting_counts_and_not_the_tail(position: int) -> None:
    queue = second(requeue_position=position, delivery_limit=-1)
    entries = publish(queue, 2)
    queue.log.get(B)
    queue.step()
    queue.log.return_(B, 0, 0, 0)
    queue.step()
    assert take_all(queue) == entries


def test_at_its_place_a_message_keeps_its_priority() -> None:
    """RabbitMQ serves what came back before everything."""
    for position, expected in ((ORIGINAL, [9, 9, 4, 1]), (FRONT, [1, 9, 9, 4])):
        queue = second(requeue_position=position)
        low = publish(queue, 1, priority=1)
        queue.log.get(B)
        queue.step()
        high = publish(queue, 2, priority=9)
        plain = publish(queue, 1)
        queue.log.return_(B, 0, 0, 0)
        queue.step()
        restored(queue)
        levels = dict.fromkeys(low, 1) | dict.fromkeys(high, 9) | dict.fromkeys(plain, 4)
        assert [levels[entry] for entry in take_all(queue)] == expected


def test_at_its_place_a_message_expires_when_it_is_next() -> None:
    queue = second(requeue_position=ORIGINAL)
    publish(queue, 1)
    publish(queue, 1, expiration="50")
    publish(queue, 1)
    for _ in range(2):
        queue.log.get(B)
    queue.step()
    for message_id in (1, 0):
        queue.log.return_(B, 0, message_id, message_id)
        queue.step()
    due = queue.machine.next_due_ms()
    assert due is None, "a message behind one that stays does not expire"
    queue.log.get(B)
    queue.step()
    assert queue.machine.next_due_ms() is not None
    queue.log.leader(batch.CMD_TICK)
    queue.step(100)
    assert queue.machine.totals()["dropped_expired"] == 1
    assert queue.machine.backlog.ready() == 1


@pytest.mark.parametrize("position", POSITIONS)
def test_purge_live_ranges_and_counts_know_what_came_back(position: int) -> None:
    queue = second(requeue_position=position)
    entries = publish(queue, 3)
    for _ in range(2):
        queue.log.get(B)
    queue.step()
    queue.log.return_(B, 0, 0, 0)
    queue.step()
    assert queue.machine.totals()["returned_ready"] == 1
    live = list(queue.machine.live_ranges())
    assert all(any(low <= entry <= high for low, high in live) for entry in entries)
    assert queue.machine.oldest_live() == entries[0]
    assert queue.machine.memory_bytes() > 0
    queue.log.command(C, batch.CMD_PURGE)
    assert replies(queue.step(), C)[-1][-1] == 2
    assert queue.machine.oldest_live() == entries[1]


def test_a_setting_that_changes_leaves_what_came_back_before() -> None:
    queue = second(requeue_position=ORIGINAL)
    entries = publish(queue, 4)
    for _ in range(2):
        queue.log.get(B)
    queue.step()
    queue.log.return_(B, 0, 1, 1)
    queue.step()
    queue.log.configure(requeue_position=AS_RABBITMQ)
    queue.log.return_(B, 0, 0, 0)
    queue.step()
    assert take_all(queue) == entries


def test_version_1_knows_no_position() -> None:
    queue = Queue(delivery_limit=-1)
    assert "requeue_position" not in queue.machine.settings
    assert "order" not in queue.machine._pack()
    queue.machine.set_version(2)
    assert queue.machine.settings["requeue_position"] == AS_RABBITMQ


@pytest.mark.parametrize(
    ("value", "expected"),
    [("original", ORIGINAL), ("front", FRONT), ("tail", TAIL), (None, AS_RABBITMQ)],
)
def test_the_setting_comes_from_the_queue(value: str | None, expected: int) -> None:
    settings = {} if value is None else {"requeue-position": value}
    assert machine_settings(settings)["requeue_position"] == expected
    assert SINCE_VERSION_2["requeue_position"] == AS_RABBITMQ


# Two classes of priorities.


def classes(queue: Queue, *priorities: int | None) -> list[int]:
    """Publishes messages of these priorities; their entries."""
    return [publish(queue, 1, priority=priority)[0] for priority in priorities]


def test_two_of_the_higher_class_are_followed_by_one_of_the_other() -> None:
    queue = second(two_priority_classes=1)
    entries = classes(queue, None, 0, 4, 9, 5, 31, 5, 6)
    given = [entries.index(entry) for entry in take_all(queue)]
    # Strictly: 5, 3, 7, 4, 6, then 0, 2, 1.
    assert given == [3, 4, 0, 5, 6, 1, 7, 2]


def test_an_older_message_of_the_higher_class_goes_before_the_other_class() -> None:
    queue = second(two_priority_classes=1)
    entries = classes(queue, 9, 9, 9, 0, 9, 9, 0)
    assert [entries.index(entry) for entry in take_all(queue)] == [0, 1, 2, 4, 5, 3, 6]


def test_one_class_alone_is_first_in_first_out_and_counts() -> None:
    queue = second(two_priority_classes=1)
    classes(queue, 0, 4)
    for _ in range(2):
        queue.log.get(B)
    queue.step()
    restored(queue)
    # Two were taken: the next turn is that of the other class.
    entries = classes(queue, 1, 9, 9)
    assert [entries.index(entry) for entry in take_all(queue)] == [0, 1, 2]


def test_what_came_back_goes_before_both_classes_and_does_not_count() -> None:
    queue = second(two_priority_classes=1)
    entries = classes(queue, 0)
    queue.log.get(B)
    queue.step()
    entries += classes(queue, 9, 1, 9)
    queue.log.return_(B, 0, 0, 0)
    queue.step()
    # One was taken; after another one of the higher class it is the other's turn.
    assert [entries.index(entry) for entry in take_all(queue)] == [0, 1, 2, 3]


def test_a_changed_mode_acts_on_what_waits() -> None:
    queue = second()
    entries = classes(queue, 0, 1, 31, 9, 30, 8)
    queue.log.configure(two_priority_classes=1)
    queue.step()
    restored(queue)
    assert [entries.index(entry) for entry in take_all(queue)] == [2, 3, 0, 4, 5, 1]
    queue = second(two_priority_classes=1)
    entries = classes(queue, 0, 1, 31, 9)
    queue.log.configure(two_priority_classes=0)
    queue.step()
    assert [entries.index(entry) for entry in take_all(queue)] == [2, 3, 1, 0]


def test_drop_head_and_reservations_follow_the_classes() -> None:
    queue = second(two_priority_classes=1)
    entries = classes(queue, 0, 9, 9, 0)
    queue.log.reservation(B, "lease", owner="x", ttl_ms=10_000, max=3)
    queue.step()
    held = queue.machine.reservations.by_name["s"].held.held()
    assert [entries.index(run[0]) for _, run in held] == [1, 2, 0]
    queue = second(two_priority_classes=1)
    entries = classes(queue, 0, 9, 9, 0)
    queue.log.configure(max_length=1)
    queue.step()
    assert [entries.index(run[0]) for run in queue.machine.backlog.ready_runs()] == [3]


def test_a_purge_begins_the_turns_anew() -> None:
    queue = second(two_priority_classes=1)
    classes(queue, 9, 9, 0)
    for _ in range(2):
        queue.log.get(B)
    queue.log.command(C, batch.CMD_PURGE)
    queue.step()
    entries = classes(queue, 0, 9, 9)
    assert [entries.index(entry) for entry in take_all(queue)] == [1, 2, 0]


@pytest.mark.parametrize(("value", "expected"), [("strict", 0), ("two-classes", 1), (None, 0)])
def test_the_mode_comes_from_the_queue(value: str | None, expected: int) -> None:
    settings = {} if value is None else {"priority-mode": value}
    assert machine_settings(settings)["two_priority_classes"] == expected


# Looking ahead.


@pytest.mark.parametrize("position", [AS_RABBITMQ, *POSITIONS])
@pytest.mark.parametrize("seed", range(12))
def test_what_would_be_delivered_next_is_known_before(seed: int, position: int) -> None:
    rng = Random(seed)
    settings = {"delivery_limit": rng.choice((-1, 20)), "two_priority_classes": seed % 2}
    queue = second(requeue_position=position, **settings)
    held: list[int] = []
    for _ in range(30):
        for _ in range(rng.randrange(4)):
            queue.log.publish_as(A, 8, rng.choice((None, None, 0, 4, 9, 31)))
        if rng.random() < 0.6:
            queue.log.get(B)
        if held and rng.random() < 0.5:
            taken = held.pop(rng.randrange(len(held)))
            queue.log.return_(B, 0, taken, taken, failed=rng.random() < 0.3)
        held += [message_id for message_id, _ in deliveries(queue.step(), B, 0)]
    expected = expand(queue.machine.backlog.in_order())
    assert len(expected) == queue.machine.backlog.ready()
    queue.log.checkout(C, 1, 1_000)
    effects = apply(queue.machine, queue.log.seal())
    given = expand((e[4], e[5], e[6], e[7]) for e in effects if e[0] == EFFECT_DELIVER)
    assert given == expected
