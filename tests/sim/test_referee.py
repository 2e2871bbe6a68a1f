"""The referee's own rules: what it lets pass, and what stops a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.kernels import batch
from convoymq.queues.interface import PublishOutcome
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.sim.clients import ChannelParts, ClientConfig, Workload
from convoymq.sim.clock import Process, Scheduler
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.delivery_parts import Place
from convoymq.sim.referee import Referee
from convoymq.sim.reservations import ReservationChannel, ReservedReferee
from convoymq.sim.streams import StreamChannel
from convoymq.sim.trace import Trace
from convoymq.storage.types import EntryGone
from tests.unit.queues.quorum.support import Log, apply, session_id

TIMEOUT_MS = 500
A, B = session_id(1), session_id(2)
SETTINGS = {"disconnect_timeout_ms": TIMEOUT_MS, "delivery_limit": -1}


class Queue:
    """A log with one message that is checked out to a consumer of node 2."""

    def __init__(self) -> None:
        self.log = Log()
        self.machine = QuorumMachine(SETTINGS)
        self.referee = Referee(1, SETTINGS)
        self.log.publish(A, [12])
        self.log.checkout(B, 1)
        self.step()
        self.log.node_down(2)
        self.step()
        assert self.place is Place.HELD

    @property
    def place(self) -> Place:
        (message,) = self.referee.messages.values()
        return message.place

    def step(self, after_ms: int = 1) -> None:
        entry = self.log.seal(after_ms)
        effects = apply(self.machine, entry)
        self.referee.on_entry(entry.index, entry.data, effects)
        self.referee.check_machine(self.machine)


def test_what_a_lost_node_settles_behind_the_time_limit_comes_too_late() -> None:
    """In one entry with the TICK: the message is ready again, and goes to who asks for it."""
    queue = Queue()
    queue.log.leader(batch.CMD_TICK)
    queue.log.node_up(2)
    queue.log.settle(B, 1, 0, 0)
    queue.log.checkout(A, 1)
    queue.step(TIMEOUT_MS)
    assert queue.place is Place.HELD
    assert queue.machine.totals()["acked"] == 0


def test_what_a_lost_node_settles_before_the_time_limit_is_settled() -> None:
    queue = Queue()
    queue.log.leader(batch.CMD_TICK)
    queue.log.settle(B, 1, 0, 0)
    queue.step(TIMEOUT_MS - 1)
    assert queue.place is Place.SETTLED


def test_a_node_that_is_back_in_time_keeps_what_it_has() -> None:
    queue = Queue()
    queue.log.node_up(2)
    queue.log.leader(batch.CMD_TICK)
    queue.log.settle(B, 1, 0, 0)
    queue.step(TIMEOUT_MS)
    assert queue.place is Place.SETTLED


def parts_of(queue: Any, referee: Any, config: ClientConfig | None = None) -> ChannelParts:
    """Returns the parts of a channel that publishes and does not consume."""
    return ChannelParts(
        scheduler=Scheduler(1),
        trace=Trace(lambda: 0),
        process=Process("node1"),
        node=1,
        group=1,
        queue=queue,
        session=A,
        config=config or ClientConfig(),
        workload=Workload(),
        referee=referee,
        publishes=True,
        consumes=False,
        on_closed=lambda channel: None,
    )


@pytest.mark.parametrize(
    ("snapshot_index", "reserved", "kept"),
    [(30, False, True), (30, True, False), (20, False, False)],
    ids=["replaced", "lost by the snapshot", "lost"],
)
def test_entries_may_be_gone_only_from_a_log_that_a_snapshot_has_replaced(
    snapshot_index: int, reserved: bool, kept: bool
) -> None:
    """Entry 7 is gone, of a reservation that the machine at entry 20 shows."""

    def read_entry(group: int, index: int) -> Any:
        raise EntryGone(f"entry {index} is gone")

    runs = SimpleNamespace(between=lambda start, end, most: [(start, (7, 0, 0, 2, 24, 0, 0))])
    reservation = SimpleNamespace(next=2, held=runs)
    machine = SimpleNamespace(
        index=20, reservations=SimpleNamespace(reading=lambda *asked: reservation)
    )
    replica = SimpleNamespace(machine=machine, log=SimpleNamespace(snapshot_index=snapshot_index))
    node = SimpleNamespace(host=SimpleNamespace(read_entry=read_entry))
    referee = ReservedReferee(1, SETTINGS)
    if reserved:
        referee.model.reservations["s1"] = SimpleNamespace(
            epoch=5, keys={0: (7, 0, 0), 1: (7, 0, 1)}
        )  # type: ignore[assignment]
    queue: Any = SimpleNamespace(client=lambda session, events: None)
    owner = ReservationChannel(parts_of(queue, referee), replicas=lambda group: [(node, replica)])
    owner._reservation, owner._epoch, owner._next = "s1", 5, 2
    if kept:
        owner._look()
        assert owner._read == 0
    else:
        with pytest.raises(InvariantBroken, match="entry 7 is gone"):
            owner._look()


class Target:
    """A publish target that notes the first sequence of every named batch."""

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.tags: list[list[int]] = []

    def command(self, type: int, flags: int, count: int, consumer: int, body: bytes = b"") -> None:
        if type == batch.CMD_PRODUCER:
            self.firsts.append(int.from_bytes(body[:8], "little"))
            self.tags.append([])

    def publish(self, record: bytes, size: int, tag: int) -> None:
        self.tags[-1].append(tag)


def test_a_named_producer_repeats_what_was_refused_before_it_goes_on() -> None:
    """Else an older sequence is taken for a repeat although it never came (seed 2016)."""
    target = Target()
    queue = SimpleNamespace()
    client = SimpleNamespace(session=A, target=target, queue=queue)
    queue.client = lambda session, events: client
    referee = SimpleNamespace(on_confirmed=lambda identity: None)
    owner = StreamChannel(parts_of(queue, referee, ClientConfig(unconfirmed_max=1000)))

    def publish() -> tuple[int, list[int]]:
        owner._publish()
        return target.firsts[-1], target.tags[-1]

    owner._scheduler.chance = lambda probability: probability > 0.3  # type: ignore[method-assign]
    _, confirmed = publish()
    _, second = publish()
    first_refused = len(confirmed)
    _, third = publish()
    owner.on_published(client, [confirmed[0], confirmed[-1]], PublishOutcome.ACCEPTED)
    owner.on_published(client, [third[0], third[-1]], PublishOutcome.REFUSED_UNAVAILABLE)
    owner.on_published(client, [second[0], second[-1]], PublishOutcome.REFUSED_UNAVAILABLE)
    refused = len(second) + len(third)
    following = first_refused
    while following < first_refused + refused:
        first, tags = publish()
        assert first == following
        following += len(tags)
    assert publish()[0] == following
