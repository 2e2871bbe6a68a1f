"""What the thread of a group's member sends, and what it makes of answers and of silence."""

from __future__ import annotations

import itertools
import queue
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from convoymq.client import ClientConfig, errors, member_thread
from convoymq.client.member_thread import MISSING_MS, SILENCE_MS, Delivered, MemberThread
from convoymq.client.topic_consumer import TopicDelivery
from convoymq.client.topic_messages import COLUMNS, Hashing
from convoymq.kernels.column_frame import build_frame
from convoymq.model.columnar import ErrorCode, Frame, Op
from convoymq.topics.rules.member import GroupMember, Lanes

Done = Callable[[Frame | None], None]


@dataclass
class FakePipeline:
    """Keeps requests until the test answers them."""

    config: ClientConfig
    sent: list[tuple[Op, Mapping[str, object], Done]] = field(default_factory=list)
    is_connected: bool = True
    refusal: errors.ClientError | None = None
    drops: int = 0
    answers: list[Callable[[], None]] = field(default_factory=list)

    def send(self, op: Op, fields: Mapping[str, object], done: Done) -> None:
        self.sent.append((op, fields, done))

    def poll(self, timeout_s: float) -> None:
        answers, self.answers = self.answers, []
        for answer in answers:
            answer()

    def wake(self) -> None:
        pass

    def drop(self) -> None:
        self.drops += 1
        sent, self.sent = self.sent, []
        for _, _, done in sent:
            done(None)

    def close(self) -> None:
        pass


class World:
    """A member thread that is not started: turns are taken by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lanes: int = 2) -> None:
        self.now = 1_000
        monkeypatch.setattr(member_thread, "Pipeline", FakePipeline)
        monkeypatch.setattr(member_thread, "now_ms", lambda: self.now)
        self.core = GroupMember(
            "g", "m", len, window=lanes, retries=0, one_of_key=True, lanes=Lanes(1_000, 1 << 20)
        )
        self.got: queue.SimpleQueue[Delivered | None] = queue.SimpleQueue()
        config = ClientConfig(("127.0.0.1:1",))
        self.thread = MemberThread(config, "t", self.core, Hashing(16, 0), self.got)
        self.pipeline: FakePipeline = self.thread._pipeline  # type: ignore[assignment]

    def turn(self) -> None:
        self.now += 1
        self.thread._turn()
        self.thread._turn()

    def waiting(self, op: Op) -> list[Mapping[str, object]]:
        return [fields for each, fields, _ in self.pipeline.sent if each is op]

    def answer(self, op: Op, payload: bytes = b"", status: int = 0, **told: object) -> None:
        """Answers the oldest request of an operation."""
        at = next(n for n, each in enumerate(self.pipeline.sent) if each[0] is op)
        _, _, done = self.pipeline.sent.pop(at)
        frame = Frame(op + 128, status, 1, dict(told), memoryview(payload))
        self.pipeline.answers.append(lambda: done(frame))
        self.turn()

    def lease(self, *leases: int, revoked: tuple[int, ...] = (), is_member: bool = True) -> None:
        sent_ms = self.waiting(Op.GROUP_HEARTBEAT)[0]["sent_ms"]
        self.answer(
            Op.GROUP_HEARTBEAT,
            sent_ms=sent_ms,
            group_epoch=1,
            leases=list(leases),
            revoked=list(revoked),
            is_member=is_member,
        )

    def beat(self) -> None:
        """The next heartbeat is due."""
        self.now += 3_000
        self.turn()

    def fetched(
        self, *messages: tuple[bytes, bytes], first: int = 1, view: bool = True, **told: object
    ) -> None:
        if view:
            told["view"] = {"acked": [1], "parked": [], "park_version": 0}
        self.answer(
            Op.GROUP_FETCH,
            rows(first, *messages),
            code="OK",
            next=first + len(messages),
            close=-1,
            version=2,
            **told,
        )

    def deliveries(self) -> list[Delivered]:
        found = []
        while not self.got.empty():
            delivered = self.got.get()
            if delivered is not None:
                found.append(delivered)
        return found


def rows(first: int, *messages: tuple[bytes, bytes]) -> bytes:
    """An answer's rows of (key, body)."""
    count = len(messages)
    none = struct.pack(f"<{count + 1}i", *[0] * (count + 1))
    one = struct.pack("<i", 0)
    buffers = [
        b"",
        struct.pack(f"<{count}q", *[5_000] * count),
        b"",
        *texts([body for _, body in messages]),
        *(b"", none, one, b"", b"", one, b""),
        *texts([key for key, _ in messages]),
    ]
    return build_frame(COLUMNS, count, first, first + count, buffers)


def texts(values: Sequence[bytes]) -> list[bytes]:
    ends = list(itertools.accumulate(map(len, values), initial=0))
    return [struct.pack(f"<{len(ends)}i", *ends), b"".join(values)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(monkeypatch)
    made.turn()
    made.lease(3, 7)
    return made


def test_messages_come_with_their_places(world: World) -> None:
    world.fetched((b"bb", b"1"), (b"a", b"2"))
    first, second = world.deliveries()
    message = first.message
    assert (message.key, message.body, message.time_ms) == (b"bb", b"1", 5)
    assert (message.pid, message.offset, message.route_version) == (3, 1, 2)
    assert str(message.order_token) == f"{2:016x}-{1:016x}"
    assert 0 <= message.lp < 16
    assert (first.handle.epoch, first.attempt, second.message.offset) == (7, 1, 2)
    assert world.thread.leases[3].epoch == 7
    assert world.thread.may_start(first.handle)


def test_messages_of_what_the_group_had_skipped_say_so(world: World) -> None:
    """As long as the partition counts as skipped; those of other partitions never."""
    consumer: Any = None
    world.fetched((b"a", b"1"), late=True)
    world.fetched((b"bb", b"2"), first=2, view=False)
    world.beat()
    world.lease(3, 7, 4, 1)
    assert [fields["pid"] for fields in world.waiting(Op.GROUP_FETCH)] == [3, 4]
    world.fetched(first=3, view=False)
    world.fetched((b"bb", b"3"))
    found = [(each.message.pid, TopicDelivery(each, consumer)) for each in world.deliveries()]
    assert [(pid, message.late) for pid, message in found] == [(3, True), (3, False), (4, False)]


def test_acknowledgements_gather_while_one_is_under_way(world: World) -> None:
    world.fetched((b"bb", b"1"), (b"a", b"2"))
    first, second = world.deliveries()
    world.thread.handled(first.handle, ok=True)
    world.turn()
    world.thread.handled(second.handle, ok=True)
    world.turn()
    (under_way,) = world.waiting(Op.GROUP_SETTLE)
    assert under_way["ranges"] == [1, 1]
    world.answer(Op.GROUP_SETTLE, code="OK", drained=False)
    (following,) = world.waiting(Op.GROUP_SETTLE)
    assert following["ranges"] == [2, 2]


def test_what_has_no_answer_is_sent_again_after_the_connection_is_lost(world: World) -> None:
    world.fetched((b"a", b"1"))
    (delivered,) = world.deliveries()
    world.thread.handled(delivered.handle, ok=True)
    world.turn()
    world.pipeline.drop()
    world.now += 1_000
    world.turn()
    (again,) = world.waiting(Op.GROUP_SETTLE)
    assert (again["kind"], again["ranges"]) == ("ack", [1, 1])
    assert world.waiting(Op.GROUP_HEARTBEAT)
    assert world.waiting(Op.GROUP_WAKE)
    assert world.waiting(Op.GROUP_FETCH)
    world.answer(Op.GROUP_SETTLE, code="OK", drained=True)
    assert not world.core.held[3].in_window


def test_a_fenced_acknowledgement_ends_the_lease(world: World) -> None:
    world.fetched((b"a", b"1"))
    (delivered,) = world.deliveries()
    world.thread.handled(delivered.handle, ok=True)
    world.turn()
    world.answer(Op.GROUP_SETTLE, code="LEASE_FENCED", drained=False)
    assert not world.thread.leases
    assert world.thread.is_lost(delivered.handle)


def test_a_server_that_says_nothing_is_given_up(world: World) -> None:
    world.beat()
    world.now += SILENCE_MS + 1
    world.turn()
    assert world.pipeline.drops == 1


def test_a_member_that_is_woken_sends_its_heartbeat(world: World) -> None:
    assert not world.waiting(Op.GROUP_HEARTBEAT)
    world.answer(Op.GROUP_WAKE, woken=True)
    world.turn()
    assert world.waiting(Op.GROUP_HEARTBEAT)


def test_data_that_is_gone_stops_the_member(world: World) -> None:
    with pytest.raises(errors.DataExpired, match="partition 3"):
        world.answer(Op.GROUP_FETCH, code="DATA_EXPIRED")


def test_a_group_that_is_gone_stops_the_member(world: World) -> None:
    world.beat()
    gone: dict[str, Any] = {"status": ErrorCode.NOT_FOUND, "text": "no group 'g'"}
    world.answer(Op.GROUP_HEARTBEAT, **gone)
    # A leader that is new may not know it yet.
    world.now += 300
    world.turn()
    world.now += MISSING_MS
    with pytest.raises(errors.NotFound, match="no group"):
        world.answer(Op.GROUP_HEARTBEAT, **gone)


def test_a_server_that_cannot_do_it_now_is_asked_again(world: World) -> None:
    world.beat()
    world.answer(Op.GROUP_HEARTBEAT, status=ErrorCode.UNAVAILABLE, text="nobody leads")
    assert not world.waiting(Op.GROUP_HEARTBEAT)
    world.now += 300
    world.turn()
    assert world.waiting(Op.GROUP_HEARTBEAT)


def test_who_leaves_gives_back_what_nobody_has_begun(world: World) -> None:
    world.fetched((b"bb", b"1"), (b"a", b"2"))
    begun = world.got.get()
    assert begun is not None
    world.thread.leave()
    world.turn()
    assert world.got.get() is None
    assert 3 in world.core.held, "one is still being handled"
    world.thread.handled(begun.handle, ok=True)
    world.turn()
    world.answer(Op.GROUP_SETTLE, code="OK", drained=False)
    world.turn()
    assert 3 not in world.core.held
    (beat,) = world.waiting(Op.GROUP_HEARTBEAT)
    assert (beat["leaves"], beat["held"]) == (True, [3, 7])
    world.lease(3, 7)
    world.now += 1
    world.turn()
    (beat,) = world.waiting(Op.GROUP_HEARTBEAT)
    assert beat["released"] == [3, 7]
    world.lease(is_member=True)
    world.now += 50
    world.turn()
    world.lease(is_member=False)
    assert world.thread._is_gone


def test_a_message_that_fails_is_parked_by_its_place(world: World) -> None:
    world.fetched((b"a", b"1"), (b"a", b"2"))
    (delivered,) = world.deliveries()
    world.thread.handled(delivered.handle, ok=False)
    world.turn()
    (park,) = world.waiting(Op.GROUP_SETTLE)
    assert (park["kind"], park["offset"], park["key"], park["follow"]) == ("park", 1, b"a", False)
    world.answer(Op.GROUP_SETTLE, code="OK", live=False, park_version=1, head=None)
    (follow,) = world.waiting(Op.GROUP_SETTLE)
    assert (follow["offset"], follow["follow"]) == (2, True)


def test_the_head_of_a_parked_key_is_delivered_with_its_own_place(world: World) -> None:
    view = {"acked": [1], "parked": [[b"a", [1, 9, 0]], [b"b", None]], "park_version": 4}
    world.answer(
        Op.GROUP_FETCH,
        rows(9, (b"a", b"old")),
        code="OK",
        next=1,
        close=-1,
        version=2,
        view=view,
    )
    (delivered,) = world.deliveries()
    message = delivered.message
    assert (message.pid, message.offset, message.route_version) == (0, 9, 1)
    assert message.body == b"old"
    world.thread.handled(delivered.handle, ok=True)
    world.turn()
    (done,) = world.waiting(Op.GROUP_SETTLE)
    assert (done["kind"], done["version"], done["offset"]) == ("done", 1, 9)
    assert (done["key"], done["failed"]) == (b"a", False)
    world.answer(
        Op.GROUP_SETTLE,
        rows(11, (b"a", b"next")),
        code="OK",
        live=False,
        park_version=5,
        head=[1, 11, 0],
    )
    (following,) = world.deliveries()
    assert (following.message.body, following.message.offset) == (b"next", 11)
