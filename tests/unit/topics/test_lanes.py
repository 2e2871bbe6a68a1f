"""A member with key lanes, against the real state machine of a partition."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from convoymq.topics import commands as c
from convoymq.topics.answers import (
    AckAnswer,
    FetchAnswer,
    ParkAnswer,
    ParkedEntry,
    Record,
)
from convoymq.topics.consumer import Fetch, GroupConsumer, Handle, Request
from convoymq.topics.hashing import lane, logical_partition
from convoymq.topics.heartbeats import TTL_MS, Leases
from convoymq.topics.leaseholder import SendHeartbeat
from convoymq.topics.partition import PartitionMachine
from convoymq.topics.refusals import Code

RETRIES = 1
RETRY_MS = 5
DRAIN_MS = 1_000
BODY = b"12345678"


class World:
    """A partition, one member of a group, and an application with threads."""

    def __init__(
        self, keys: Sequence[bytes], *, lanes: int = 3, window: int = 100, window_bytes: int = 0
    ) -> None:
        self.now = 0
        self.keys = keys
        self.machine = PartitionMachine(3, 0, 8, 0)
        self.machine.apply(c.Open("creation", 0, 1))
        self.machine.apply(c.OpenCursor("g", 1))
        for key in keys:
            self.machine.apply(c.Produce(1, 1, 0, 0, key))
        self.member = GroupConsumer(
            "g",
            "m",
            lambda key: lane(key, 1 << 32),
            lanes=lanes,
            window=window,
            window_bytes=window_bytes,
            retries=RETRIES,
            retry_ms=RETRY_MS,
            drain_ms=DRAIN_MS,
        )
        self.running: list[Handle] = []
        self.first: list[int] = []
        """Messages in the order in which the application got them first."""
        self.sent: list[Request] = []
        self.beats: list[SendHeartbeat] = []
        self.epoch = 0
        self.lease()

    def lease(self) -> None:
        self.epoch += 1
        self.machine.apply(c.Lease("g", 1, self.epoch, "m"))
        self.tell({3: self.epoch})

    def tell(self, leases: dict[int, int], *revoked: int) -> None:
        self.now += 1
        self.member.on_leases(Leases("m", self.now, 1, leases, frozenset(revoked)), self.now)
        self.run()

    def run(self) -> None:
        self.member.step(self.now)
        while actions := self.member.take_actions():
            for action in actions:
                match action:
                    case Fetch():
                        self._fetch(action)
                    case Handle():
                        self._hand_out(action)
                    case Request():
                        if action not in self.sent:
                            self.sent.append(action)
                    case SendHeartbeat():
                        self.beats.append(action)

    def _fetch(self, fetch: Fetch) -> None:
        machine = self.machine
        code = machine.check_fetch("g", fetch.group_epoch, fetch.epoch)
        if code is not Code.OK:
            self.member.on_fetched(fetch, FetchAnswer(code), self.now)
            return
        own = machine.groups["g"]
        view = None
        if fetch.offset < 0 or fetch.park_version < own.park_version:
            view = machine.view("g")
        found, following = machine.unread("g", fetch.offset, min(4, fetch.count))
        if view is None and not found:
            return
        records = [Record(n, 0, self.keys[n - 1], 0, 0, 1, BODY) for n in found]
        answer = FetchAnswer(code, tuple(records), following, view)
        self.member.on_fetched(fetch, answer, self.now)

    def _hand_out(self, handle: Handle) -> None:
        assert handle.lane not in {each.lane for each in self.running}
        assert handle.key not in {each.key for each in self.running}
        cursor = self.machine.groups["g"].cursor
        record = handle.record
        if not isinstance(record, ParkedEntry):
            assert record.offset not in cursor, "handed out after it was acknowledged"
            before = [n for n in range(1, record.offset) if self.keys[n - 1] == handle.key]
            assert all(n in cursor for n in before), "what comes first is not in force"
            assert handle.key not in self.machine.groups["g"].parked.keys
            if record.offset not in self.first:
                self.first.append(record.offset)
        self.running.append(handle)

    def handled(self, number: int = 0, *, ok: bool = True) -> None:
        self.member.on_handled(self.running.pop(number), ok, self.now)
        self.run()

    def answer(self, number: int = 0) -> None:
        request = self.sent.pop(number)
        outcome = self.machine.apply(request.command)
        self.machine.check_invariants()
        assert isinstance(outcome, AckAnswer | ParkAnswer)
        self.member.on_answer(request, outcome, self.now)
        self.run()

    def pass_time(self, ms: int) -> None:
        self.now += ms
        self.run()

    @property
    def acked(self) -> list[int]:
        cursor = self.machine.groups["g"].cursor
        return [n for n in range(1, len(self.keys) + 1) if n in cursor]


STEPS = ("handled", "failed", "answer", "time", "resume", "lease")
KEY = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])


@settings(max_examples=80)
@given(st.lists(KEY, max_size=14), st.data())
def test_keys_are_in_order_and_all_is_acknowledged_or_parked(
    keys: list[bytes], data: st.DataObject
) -> None:
    """Handlers finish and fail, answers come, operators resume and leases change in any order."""
    world = World(keys, window=data.draw(st.integers(1, 6)), window_bytes=20)
    for _ in range(data.draw(st.integers(0, 30))):
        step = data.draw(st.sampled_from(STEPS))
        if step in ("handled", "failed") and world.running:
            number = data.draw(st.integers(0, len(world.running) - 1))
            world.handled(number, ok=step == "handled")
        elif step == "answer" and world.sent:
            world.answer(data.draw(st.integers(0, len(world.sent) - 1)))
        elif step == "resume":
            for key in world.machine.groups["g"].parked.keys:
                once = data.draw(st.booleans())
                world.machine.apply(c.ResumeParked("g", key, once))
            world.pass_time(1)
        elif step == "lease" and not world.running:
            world.tell({})
            world.sent.clear()
            world.lease()
        else:
            world.pass_time(RETRY_MS)
    for _ in range(200):
        if not world.running and not world.sent:
            world.pass_time(60_000)
        while world.running:
            world.handled()
        while world.sent:
            world.answer()
        world.tell({3: world.epoch})
    assert world.acked == list(range(1, len(keys) + 1))
    for key in set(keys):
        firsts = [n for n in world.first if keys[n - 1] == key]
        assert firsts == sorted(firsts)


def test_a_slow_key_holds_up_its_lane_and_no_other() -> None:
    world = World([b"a", b"a", b"b", b"b", b"c"], lanes=1 << 10)
    assert sorted(each.key for each in world.running) == [b"a", b"b", b"c"]
    world.handled([each.key for each in world.running].index(b"b"))
    world.answer()
    assert sorted(each.record.offset for each in world.running) == [1, 4, 5]
    assert world.acked == [3]


def test_the_window_counts_messages_and_bytes() -> None:
    by_messages = World([b"a"] * 9, window=2)
    assert by_messages.member.held[3].queued == 2
    by_bytes = World([b"a"] * 9, window_bytes=len(BODY) + 1)
    held = by_bytes.member.held[3]
    # Four came at once; one of them is with the application.
    assert held.waiting_bytes == 3 * len(BODY)
    by_bytes.handled()
    by_bytes.answer()
    by_bytes.handled()
    by_bytes.answer()
    assert held.waiting_bytes == 1 * len(BODY) + 4 * len(BODY)


def test_a_message_that_is_not_begun_waits_in_its_lane_again() -> None:
    world = World([b"a", b"a", b"b"])
    handle = world.running.pop(0)
    world.member.on_unhandled(handle, world.now)
    world.run()
    assert sorted(each.record.offset for each in world.running) == [1, 3]
    assert not world.sent


def test_what_is_not_begun_is_given_back_with_a_revoked_lease() -> None:
    world = World([b"a", b"b"], lanes=1 << 10)
    world.tell({3: 1}, 3)
    world.handled()
    world.answer()
    assert 3 in world.member.held
    world.member.on_unhandled(world.running.pop(), world.now)
    world.run()
    assert 3 not in world.member.held
    assert world.beats[-1].heartbeat.released == {3: 1}


def test_a_handler_that_hangs_keeps_a_revoked_lease_for_a_bounded_time() -> None:
    world = World([b"a"])
    world.tell({3: 1}, 3)
    assert world.member.due_ms(world.now) <= world.now + DRAIN_MS
    world.pass_time(DRAIN_MS - 1)
    assert 3 in world.member.held
    world.pass_time(1)
    assert 3 not in world.member.held
    assert world.beats[-1].heartbeat.released == {3: 1}
    # It comes back at last; nothing of it counts.
    world.handled()
    assert not world.sent


def test_a_member_that_never_parks_tries_for_ever() -> None:
    world = World([b"a"])
    world.member.retries = -1
    for _ in range(20):
        world.handled(ok=False)
        world.pass_time(RETRY_MS)
    assert not world.sent
    assert world.running


def test_nothing_begins_when_the_lease_may_be_over() -> None:
    world = World([b"a", b"a"])
    world.handled()
    world.now += TTL_MS
    world.answer()
    assert not world.running
    world.tell({3: 1})
    assert len(world.running) == 1


def test_lanes_spread_the_keys_of_one_partition() -> None:
    """The hash of lanes has nothing to do with the one of logical partitions: keys of a range that
    is a few neighbours modulo the logical partitions use every lane alike."""
    lanes = 16
    keys = [b"key-%d" % n for n in range(20_000)]
    own = [key for key in keys if logical_partition(key, 1024) < 64]
    counts = [0] * lanes
    for key in own:
        counts[lane(key, 1 << 32) % lanes] += 1
    assert min(counts) > 0.6 * len(own) / lanes
    assert max(counts) < 1.4 * len(own) / lanes


def test_a_retry_is_for_the_first_message_alone() -> None:
    world = World([b"a", b"a", b"a"])
    for _ in range(RETRIES + 1):
        world.handled(ok=False)
        world.pass_time(RETRY_MS)
    while world.sent:
        world.answer()
    parked = world.machine.groups["g"].parked
    assert [entry.offset for entry in parked.keys[b"a"].entries] == [1, 2, 3]
    world.machine.apply(c.ResumeParked("g", b"a", once=True))
    snapshot = world.machine.snapshot()
    world.machine.restore(snapshot)
    world.pass_time(60_000)
    world.tell({3: 1})
    parked = world.machine.groups["g"].parked
    assert [each.record.offset for each in world.running] == [1]
    world.handled()
    world.answer()
    assert not world.running
    assert [entry.offset for entry in parked.keys[b"a"].entries] == [2, 3]
    assert not parked.keys[b"a"].resuming
