"""Message groups: one message of a group at a time, in order, over retries (ADR 0051)."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.kernels import batch
from convoymq.kernels.group_table import KEY_BYTES_MAX
from convoymq.queues.quorum.backlog import AS_RABBITMQ, FRONT, ORIGINAL, TAIL
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import EFFECT_DELIVER
from tests.unit.queues.quorum.support import Log, Queue, apply, replies, session_id

A, B, C, D = session_id(1), session_id(2), session_id(3), session_id(4)
POSITIONS = [AS_RABBITMQ, ORIGINAL, FRONT, TAIL]


def record_in(
    group: bytes | None, size: int = 8, priority: int | None = None, expiration: str | None = None
) -> tuple[bytes, int]:
    """A record with the header x-group-id, and the flags of its ENQUEUE."""
    properties, bits = b"", 0
    if group is not None:
        field = b"\x0ax-group-idS" + len(group).to_bytes(4, "big") + group
        properties += len(field).to_bytes(4, "big") + field
        bits |= 1 << 13
    if priority is not None:
        properties += bytes([priority])
        bits |= 1 << 11
    if expiration is not None:
        properties += bytes([len(expiration)]) + expiration.encode()
        bits |= 1 << 8
    payload = b"\x00\x3c\x00\x00" + size.to_bytes(8, "big") + bits.to_bytes(2, "big") + properties
    header = b"\x02\x00\x01" + len(payload).to_bytes(4, "big") + payload + b"\xce"
    body = b"\x03\x00\x01" + size.to_bytes(4, "big") + bytes(size) + b"\xce"
    flags = (priority is not None) << 1 | (expiration is not None) << 2 | (group is not None) << 3
    return b"\x00\x01q" + header + body, flags


class Named:
    """A queue of version 2 whose messages have names: `a1` is one of group a, `-1` of none. A word
    is one message; words that are published together are one entry."""

    def __init__(self, **settings: Any) -> None:
        declared = {k: v for k, v in settings.items() if k.startswith("single")}
        self.queue = Queue(**declared)
        self.queue.machine.set_version(2)
        self.names: dict[tuple[int, int, int], str] = {}
        changed = {k: v for k, v in settings.items() if k not in declared}
        if changed:
            self.log.configure(**changed)
            self.queue.step()

    @property
    def log(self) -> Log:
        return self.queue.log

    @property
    def machine(self) -> QuorumMachine:
        return self.queue.machine

    def step(self, after_ms: int = 1) -> list[Any]:
        return self.queue.step(after_ms)

    def publish(self, *words: str, session: int = A, **attributes: Any) -> list[Any]:
        for word in words:
            group = None if word[0] == "-" else word[:-1].encode()
            record, flags = record_in(group, **attributes)
            # One command holds groups and others.
            self.log._target(session).publish([record], 8, 0, flags | 8)
        entry = self.log.seal(1)
        names = iter(words)
        for kind, _, _, _, count, _, offset, _ in batch.commands(entry.data):
            if kind == batch.CMD_ENQUEUE:
                for i in range(count):
                    self.names[entry.index, offset, i] = next(names)
        effects = apply(self.machine, entry)
        check_invariants(self.machine)
        return effects

    def given(self, effects: list[Any], session: int | None = None) -> list[str]:
        """Names of what was handed out."""
        return [
            self.names[e[4], e[5], e[6] + i]
            for e in effects
            if e[0] == EFFECT_DELIVER and session in (None, e[1])
            for i in range(e[7])
        ]

    def consume(self, session: int, prefetch: int = 10, **spec: Any) -> list[str]:
        self.log.checkout(session, 1, prefetch, **spec)
        return self.given(self.step(), session)

    def restored(self) -> None:
        """The queue goes on from its snapshot."""
        copy = QuorumMachine()
        copy.restore(self.machine.snapshot())
        assert copy.snapshot() == self.machine.snapshot()
        self.queue.machine = copy
        check_invariants(copy)


def test_one_message_of_a_group_at_a_time() -> None:
    named = Named()
    named.publish("a1", "a2", "b1", "-1", "a3", "b2", "-2")
    assert named.consume(B) == ["a1", "b1", "-1", "-2"]
    named.restored()
    named.log.settle(B, 1, 0, 0)
    assert named.given(named.step()) == ["a2"]
    named.log.settle(B, 1, 1, 4)
    assert named.given(named.step()) == ["a3", "b2"]
    named.log.settle(B, 1, 5, 6)
    named.step()
    assert not named.machine.backlog.groups.heads
    assert named.machine.totals()["acked"] == 7


def test_what_is_not_blocked_comes_in_the_order_of_the_log() -> None:
    named = Named()
    named.publish("a1", "a2", "b1", "c1", "a3")
    assert named.consume(B, 1) == ["a1"]
    for message_id, expected in enumerate((["a2"], ["b1"], ["c1"], ["a3"], [])):
        named.log.settle(B, 1, message_id, message_id)
        assert named.given(named.step()) == expected


def test_many_consumers_share_the_groups() -> None:
    named = Named()
    for session in (B, C, D):
        named.consume(session, 1)
    assert named.given(named.publish("a1", "a2", "b1", "c1", "a3", "d1")) == ["a1", "b1", "c1"]
    # Whoever has credit gets the next one of the group.
    named.log.settle(D, 1, 0, 0)
    assert named.given(named.step()) == ["d1"]
    named.log.settle(B, 1, 0, 0)
    assert named.given(named.step(), B) == ["a2"]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("how", ["return", "fail", "close", "node"])
def test_a_group_keeps_its_order_over_retries(position: int, how: str) -> None:
    """Others go where the queue says; the group's message is its next one again."""
    named = Named(requeue_position=position, delivery_limit=-1 if how == "return" else 20)
    named.publish("a1", "-1", "a2", "-2")
    assert named.consume(B, 2) == ["a1", "-1"]
    named.log.cancel(B, 1)
    named.step()
    if how == "close":
        named.log.close(B)
    elif how == "node":
        named.log.node_down(2, gone=True)
    else:
        named.log.return_(B, 1, 0, 1, failed=how == "fail")
    named.step()
    named.restored()
    given = named.consume(C, 10)
    assert [name for name in given if name[0] == "a"] == ["a1"]
    assert set(given) == {"a1", "-1", "-2"}
    named.log.settle(C, 1, given.index("a1"), given.index("a1"))
    assert named.given(named.step()) == ["a2"]


def test_a_message_over_the_delivery_limit_makes_way() -> None:
    named = Named(delivery_limit=0, dead_letters=2)
    named.publish("a1", "a2")
    assert named.consume(B) == ["a1"]
    named.log.return_(B, 1, 0, 0, failed=True)
    assert named.given(named.step()) == ["a2"]
    assert named.machine.totals()["dropped_delivery_limit"] == 1
    # Its dead letter waits for the target, and not the group for the dead letter.
    assert named.machine.dead_letters.held.messages == 1


def test_a_rejected_message_makes_way() -> None:
    named = Named()
    named.publish("a1", "a2")
    assert named.consume(B) == ["a1"]
    named.log.discard(B, 1, 0, 0)
    assert named.given(named.step()) == ["a2"]


def test_a_group_s_order_comes_before_priorities_and_these_before_other_groups() -> None:
    named = Named()
    named.publish("a1", priority=1)
    named.publish("a2", priority=9)
    named.publish("b1", priority=5)
    named.publish("-1", priority=2)
    assert named.consume(B, 1) == ["b1"]
    for message_id, expected in enumerate((["-1"], ["a1"], ["a2"])):
        named.log.settle(B, 1, message_id, message_id)
        assert named.given(named.step()) == expected


def test_expired_messages_make_way_for_their_group() -> None:
    named = Named()
    named.publish("a1", expiration="50")
    named.publish("a2", expiration="50")
    named.publish("a3")
    named.publish("b1")
    assert named.machine.next_due_ms() is not None
    named.log.leader(batch.CMD_TICK)
    named.step(100)
    assert named.machine.totals()["dropped_expired"] == 2
    assert named.consume(B) == ["a3", "b1"]


def test_a_blocked_message_expires_when_it_is_next() -> None:
    named = Named()
    assert named.consume(B, 5) == []
    named.publish("a1")
    named.publish("a2", expiration="50")
    named.publish("a3")
    named.restored()
    named.log.leader(batch.CMD_TICK)
    named.step(100)
    assert named.machine.totals()["dropped_expired"] == 0
    named.log.settle(B, 1, 0, 0)
    assert named.given(named.step()) == ["a3"]
    assert named.machine.totals()["dropped_expired"] == 1


def test_drop_head_drops_what_is_next_and_then_what_is_blocked() -> None:
    named = Named(max_length=2)
    named.publish("a1", "a2", "b1", "b2")
    # a1 goes, then a2, which was blocked by it.
    assert named.machine.totals()["dropped_maxlen"] == 2
    assert named.consume(B) == ["b1"]
    named.publish("b3", "b4")
    assert named.machine.totals()["dropped_maxlen"] == 3
    assert named.machine.totals()["ready"] == 2
    named.log.settle(B, 1, 0, 0)
    assert named.given(named.step()) == ["b3"]


def test_bytes_of_blocked_messages_count() -> None:
    named = Named(max_length_bytes=16)
    assert named.consume(B) == []
    named.publish("a1", "a2", "a3", "a4")
    assert named.machine.totals()["dropped_maxlen"] == 1
    assert named.machine.backlog.length_bytes() == 16


def test_blocked_messages_count_as_ready() -> None:
    named = Named()
    named.publish("a1", "a2", "a3")
    totals = named.machine.totals()
    assert (totals["ready"], totals["blocked"], totals["ready_bytes"]) == (3, 2, 24)
    assert not named.machine.at_rest()
    named.log.get(B)
    assert replies(named.step(), B)[-1][-1] == [0, 2]
    named.log.get(B)
    assert replies(named.step(), B)[-1][-1] == []
    assert not named.machine.at_rest(), "an acknowledgement lets the next message go"
    named.log.reservation(C, "delete_check", if_empty=True)
    assert replies(named.step(), C)[-1][-1] == "not_empty"


def test_a_get_that_acknowledges_makes_way() -> None:
    named = Named()
    named.publish("a1", "a2")
    for expected in ("a1", "a2"):
        named.log.get(B, settled=True)
        assert named.given(named.step()) == [expected]
    assert not named.machine.backlog.groups.heads


def test_a_purge_drops_what_is_blocked_and_keeps_what_is_held() -> None:
    named = Named()
    named.publish("a1", "a2", "b1", "b2")
    assert named.consume(B, 1) == ["a1"]
    named.log.command(C, batch.CMD_PURGE)
    assert replies(named.step(), C)[-1][-1] == 3
    named.restored()
    named.publish("a3", "b3")
    named.log.return_(B, 1, 0, 0)
    assert named.given(named.step()) == ["a1"]
    named.log.settle(B, 1, 1, 1)
    assert named.given(named.step()) == ["a3"]


def test_a_reservation_holds_one_message_of_a_group() -> None:
    named = Named()
    named.publish("a1", "a2", "b1", "-1", "a3")
    named.log.reservation(B, "open", owner="x", ttl_ms=10_000)
    named.step()
    epoch = named.machine.reservations.by_name["s"].epoch
    own = {"epoch": epoch, "fencing_token": 1}
    named.log.reservation(B, "take", after=0, max=10, **own)
    named.step()
    held = named.machine.reservations.by_name["s"].held
    assert held.messages == 3
    assert named.consume(C) == []
    named.log.reservation(B, "settle", upto=1, **own)
    assert named.given(named.step()) == ["a2"]
    named.log.reservation(B, "release", **own, **{"from": 1})
    # By RabbitMQ's rule what came back goes before all others; a group's goes to its place.
    assert named.given(named.step()) == ["-1", "b1"]


def test_a_single_active_consumer_takes_groups_in_turn() -> None:
    named = Named(single_active=True)
    named.publish("a1", "a2", "b1")
    assert named.consume(B) == ["a1", "b1"]
    assert named.consume(C) == []
    named.log.close(B)
    assert named.given(named.step(), C) == ["a1", "b1"]
    named.log.settle(C, 1, 0, 0)
    assert named.given(named.step()) == ["a2"]


def test_a_cancelled_consumer_keeps_its_groups_until_it_settles() -> None:
    named = Named()
    named.publish("a1", "a2")
    assert named.consume(B) == ["a1"]
    named.log.cancel(B, 1)
    named.step()
    assert named.consume(C) == []
    named.log.settle(B, 1, 0, 0)
    assert named.given(named.step(), C) == ["a2"]


def test_live_ranges_name_blocked_messages_one_by_one() -> None:
    named = Named()
    assert named.consume(B, 1) == []
    named.publish("a1")
    named.publish("a2")
    for _ in range(5):
        named.publish("-1")
    named.publish("a3")
    first = next(index for (index, _, _), name in named.names.items() if name == "a1")
    assert named.machine.oldest_live() <= first
    live = list(named.machine.live_ranges())
    for index, _, _ in named.names:
        assert any(low <= index <= high for low, high in live)
    assert named.machine.memory_bytes() > 0
    assert named.machine.run_count() >= 4
    assert len(named.machine.state_snapshot()) >= 4


def test_a_long_name_is_one_name_and_another_one_is_another() -> None:
    named = Named()
    long = "x" * (KEY_BYTES_MAX + 40)
    named.publish(long + "1", long + "2", long + "y1", "y" + long + "1")
    assert named.machine.backlog.groups.heads == 3
    assert all(len(key) <= KEY_BYTES_MAX for key in named.machine.backlog.groups.keys().values())


def test_without_a_name_or_in_version_1_there_is_no_group() -> None:
    named = Named()
    assert named.consume(B) == []
    assert named.given(named.publish("-1", "-1", "-1")) == ["-1"] * 3
    assert not named.machine.backlog.groups.heads
    queue = Queue()
    for _ in range(2):
        record, flags = record_in(b"a")
        queue.log._target(A).publish([record], 8, 0, flags)
    queue.log.checkout(B, 1, 10)
    queue.step()
    assert queue.machine.backlog.unacked == 2
    assert "groups" not in queue.machine._pack()


def test_records_of_a_repeated_publish_are_in_no_group_twice() -> None:
    named = Named()
    named.publish("a1", "a2")
    named.consume(B)
    assert named.machine.backlog.unacked == 1
    assert named.machine.backlog.groups.messages == 1


def test_what_is_ready_of_one_command_stays_in_one_piece() -> None:
    """A batch of different groups is one run, ready and held."""
    named = Named()
    named.publish(*[f"g{i:03}x" for i in range(100)])
    assert named.machine.backlog.fresh.run_count() == 1
    effects = []
    named.log.checkout(B, 1, 1_000)
    effects = named.step()
    assert sum(1 for effect in effects if effect[0] == EFFECT_DELIVER) == 1
