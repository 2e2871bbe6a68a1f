"""Operations on chosen messages: what the machine decides, alone and against a naive model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.queues.quorum import operations
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.reservations import MALFORMED
from convoymq.queues.sessions import APPLIED_OK, APPLIED_REJECTED
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_DELIVER
from tests.unit.queues.quorum.support import Log, apply, session_id

ASKING = session_id(1, 1)
OTHER = session_id(2, 2)
TARGET = ["target", 7]
Place = tuple[int, int, int]


class Queue:
    """A machine, its log, and what is asked of it."""

    def __init__(self, version: int = 2, **config: int) -> None:
        self.log = Log()
        self.machine = QuorumMachine({})
        self.machine.set_version(version)
        self.effects: list[Any] = []
        if config:
            self.log.configure(**config)
            self.seal()

    def seal(self) -> list[Any]:
        self.effects = apply(self.machine, self.log.seal())
        check_invariants(self.machine)
        return self.effects

    def publish(self, *sizes: int) -> None:
        self.log.publish(OTHER, sizes)
        self.seal()

    def ask(self, op: str, id: str = "a", **fields: Any) -> Any:
        body = msgspec.msgpack.encode({"op": op, "operation": id, **fields})
        self.log.command(ASKING, batch.CMD_RESERVATION, count=len(body), body=body)
        answers = [
            each[3:5] for each in self.seal() if each[0] == EFFECT_APPLIED and each[1] == ASKING
        ]
        status, reply = answers[-1]
        assert status == (APPLIED_OK if isinstance(reply, dict) else APPLIED_REJECTED)
        return reply

    def claim(
        self,
        places: list[Place],
        id: str = "a",
        part: int = 0,
        *,
        last: bool = True,
        spec: bytes | None = b"s",
    ) -> Any:
        ranges = [n for index, offset, record in places for n in (index, offset, record, record)]
        more = {} if spec is None else {"spec": spec}
        return self.ask(operations.CLAIM, id, part=part, last=last, ranges=ranges, **more)

    def advance(self, id: str = "a", **fields: Any) -> Any:
        return self.ask(operations.ADVANCE, id, **{"upto": 0, "routed": 0, **fields})

    def ready(self) -> list[Place]:
        """In the order of delivery."""
        return [
            (run[0], run[1], run[2] + i)
            for run in self.machine.backlog.in_order()
            for i in range(run[3])
        ]

    def held(self, id: str = "a") -> list[Place]:
        operation = self.machine.operations.by_id[id]
        return [
            (run[0], run[1], run[2] + i) for _, run in operation.held.held() for i in range(run[3])
        ]

    def restored(self) -> None:
        """Goes on from a snapshot, which has to be all of the state."""
        copy = QuorumMachine({})
        copy.restore(self.machine.snapshot())
        assert copy.state_hash() == self.machine.state_hash()
        self.machine = copy
        check_invariants(copy)


def counts(reply: dict[str, int], *names: str) -> tuple[int, ...]:
    return tuple(reply[name] for name in names)


def test_what_is_chosen_is_deleted_and_what_is_not_there_is_gone() -> None:
    queue = Queue()
    queue.publish(1, 2, 3, 4, 5)
    places = queue.ready()
    chosen = [places[1], places[3]]
    reply = queue.claim(chosen, spec=None)
    assert counts(reply, "selected", "deleted", "gone", "sealed") == (2, 2, 0, 1)
    assert queue.ready() == [places[0], places[2], places[4]]
    assert queue.machine.backlog.ready_bytes() == 9
    # The same question gets the same answer; another one about them finds nothing.
    assert queue.claim(chosen, spec=None) == reply
    assert counts(queue.claim(chosen, "b", spec=None), "deleted", "gone") == (0, 2)
    assert queue.machine.totals()["purged"] == 2


def test_messages_are_moved_once_they_are_safe() -> None:
    queue = Queue()
    queue.publish(*[1] * 6)
    places = queue.ready()
    queue.claim(places[::-1][:4])
    # In the order in which they were asked for.
    assert queue.held() == places[::-1][:4]
    assert queue.ready() == places[:2]
    assert queue.advance(routes=[[3, [TARGET]], [1, []]])["moved"] == 0
    assert queue.advance(upto=5) == MALFORMED
    assert queue.advance(upto=2)["moved"] == 2
    queue.restored()
    # A leader that did not know of the routes: what is logged holds.
    queue.advance(upto=2, routed=0, routes=[[4, []]])
    assert queue.machine.operations.by_id["a"].route_of(2) == (("target", 7),)
    reply = queue.advance(upto=4)
    assert counts(reply, "moved", "returned") == (3, 1)
    assert queue.ready() == [places[2], *places[:2]]
    assert queue.advance(upto=4) == reply
    assert not queue.machine.operations.by_id


def test_a_message_whose_target_is_gone_comes_back() -> None:
    queue = Queue()
    queue.publish(*[1] * 5)
    places = queue.ready()
    queue.claim(places)
    queue.advance(routes=[[5, [TARGET]]])
    reply = queue.advance(upto=5, back=[1, 2])
    assert counts(reply, "moved", "returned") == (3, 2)
    assert queue.ready() == places[1:3]
    assert queue.machine.backlog.acked == 3


def test_cancelling_gives_back_what_is_not_on_its_way() -> None:
    queue = Queue()
    queue.publish(*[1] * 5)
    places = queue.ready()
    queue.claim(places, last=False)
    queue.advance(routes=[[2, [TARGET]]])
    reply = queue.ask(operations.CANCEL)
    assert counts(reply, "returned", "moved", "sealed") == (3, 0, 1)
    assert queue.ready() == places[2:]
    assert queue.advance(upto=2)["moved"] == 2
    assert queue.ask(operations.CANCEL)["moved"] == 2
    assert queue.ask(operations.CANCEL, "other") == operations.NO_OPERATION


def test_parts_count_once_and_in_order() -> None:
    queue = Queue()
    queue.publish(*[1] * 6)
    places = queue.ready()
    assert queue.claim(places[:2], part=1) == operations.OPERATION_PART
    first = queue.claim(places[:2], last=False)
    assert queue.claim(places[:2], last=False) == first
    assert queue.claim(places[2:4], part=2) == operations.OPERATION_PART
    assert queue.claim(places[2:4], part=1, spec=b"other") == operations.OPERATION_DIFFERS
    assert queue.claim(places[2:4], part=1, last=False)["selected"] == 4
    assert counts(queue.claim([], part=2), "selected", "sealed", "parts") == (4, 1, 3)
    assert queue.claim(places[4:], part=3)["selected"] == 4
    assert queue.ready() == places[4:]


def test_there_are_only_so_many_operations() -> None:
    queue = Queue()
    queue.publish(*[1] * (operations.OPERATIONS_MAX + 1))
    places = queue.ready()
    for number in range(operations.OPERATIONS_MAX):
        queue.claim([places[number]], str(number), last=False)
    assert queue.claim([places[-1]], "more") == operations.OPERATION_LIMIT
    assert queue.ready() == places[-1:]
    # One that was left with nothing to do makes room.
    queue.advance("7", routes=[[1, [TARGET]]])
    queue.advance("7", upto=1)
    assert queue.claim([places[-1]], "more")["selected"] == 1
    assert queue.machine.operations.finished["7"]["sealed"]


@pytest.mark.parametrize(
    "fields",
    [
        {"part": -1, "ranges": []},
        {"part": 0, "ranges": [1, 2, 3]},
        {"part": 0, "ranges": [1, 2, 3, 2]},
        {"part": 0, "ranges": [1, 2, 3, 3, 1, 2, 3, 3]},
        {"part": 0, "ranges": [1, 2, 0, 1 << 30]},
        {"part": 0, "ranges": "x"},
        {"part": 0, "ranges": [], "spec": 1},
        {"part": 0, "ranges": [], "operation": ""},
        {"part": 0, "ranges": [], "operation": "x" * 200},
    ],
)
def test_what_is_malformed_changes_nothing(fields: dict[str, Any]) -> None:
    queue = Queue()
    queue.publish(1, 2)
    before = queue.ready()
    assert queue.ask(operations.CLAIM, **fields) == MALFORMED
    assert queue.ready() == before
    assert not queue.machine.operations.by_id


@pytest.mark.parametrize(
    "fields", [{"back": [None]}, {"routes": [[0, []]]}, {"routes": [[1, [[1, 1]]]]}, {"upto": "x"}]
)
def test_a_malformed_advance_changes_nothing(fields: dict[str, Any]) -> None:
    queue = Queue()
    queue.publish(1)
    queue.claim(queue.ready())
    assert queue.advance(**fields) == MALFORMED
    assert queue.machine.operations.by_id["a"].routed == 0


def test_version_1_does_not_know_operations() -> None:
    queue = Queue(version=1)
    queue.publish(1)
    for op in operations.OPS:
        assert queue.ask(op, part=0, last=True, ranges=[], upto=0, routed=0) == MALFORMED
    assert "operations" not in msgspec.msgpack.decode(queue.machine.snapshot())


def test_an_unused_queue_stays_while_it_has_an_operation() -> None:
    queue = Queue(expires_ms=100)
    queue.publish(1)
    assert queue.machine.next_due_ms() is not None
    queue.claim(queue.ready())
    assert queue.machine.next_due_ms() is None
    queue.advance(routes=[[1, [TARGET]]])
    queue.advance(upto=1)
    assert queue.machine.next_due_ms() == queue.machine.time_ms + 100


def test_messages_behind_those_that_came_to_the_tail_keep_their_turn() -> None:
    """Fresh messages are taken out before and behind a group of the tail."""
    queue = Queue(delivery_limit=-1)
    queue.publish(*range(1, 5))
    queue.log.checkout(OTHER, 1, prefetch=2)
    queue.log.return_(OTHER, 1, 0, 1)
    queue.log.cancel(OTHER, 1)
    queue.seal()
    queue.publish(5, 6, 7)
    places = queue.ready()
    queue.claim([places[-1], places[0]], spec=None)
    assert queue.ready() == places[1:-1]


STEP = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 5)),
    st.tuples(st.just("priority"), st.integers(0, 6)),
    st.tuples(st.just("take"), st.integers(1, 4)),
    st.tuples(st.just("back"), st.booleans()),
    st.tuples(st.just("claim"), st.lists(st.integers(0, 12), unique=True, max_size=6)),
    st.tuples(st.just("delete"), st.lists(st.integers(0, 12), unique=True, max_size=6)),
    st.tuples(st.just("route"), st.integers(1, 4)),
    st.tuples(st.just("finish"), st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.none()),
    st.tuples(st.just("restore"), st.none()),
)


CONFIGS: tuple[dict[str, int], ...] = (
    {"delivery_limit": -1},
    {"delivery_limit": 2},
    {"delivery_limit": 3, "requeue_position": 1},
    {"delivery_limit": 3, "requeue_position": 2},
    {"delivery_limit": 3, "two_priority_classes": 1},
)


class Model:
    """Lists of places: what is ready, what is held by operations, and what became of the rest."""

    def __init__(self, config: dict[str, int]) -> None:
        self.queue = Queue(**config)
        self.taken: list[int] = []
        self.got: dict[int, Place] = {}
        self.ended: Counter[Place] = Counter()
        self.number = 0
        self.held: list[Place] = []
        self.routed = 0

    def publish(self, count: int) -> None:
        self.queue.publish(*range(1, count + 1))

    def priority(self, priority: int) -> None:
        self.queue.log.publish_as(OTHER, 3, priority)
        self.queue.seal()

    def take(self, count: int) -> None:
        for _ in range(count):
            self.queue.log.get(OTHER)
            for effect in self.queue.seal():
                if effect[0] == EFFECT_DELIVER:
                    self.taken.append(effect[3])
                    self.got[effect[3]] = (effect[4], effect[5], effect[6])

    def back(self, failed: bool) -> None:
        for message_id in self.taken:
            self.queue.log.return_(OTHER, 0, message_id, message_id, failed=failed)
        self.taken = []
        self.queue.seal()

    def _chosen(self, wanted: list[int]) -> list[Place]:
        """Some that are ready, some that a consumer holds."""
        places = self.queue.ready() + [self.got[each] for each in self.taken]
        return [places[each] for each in wanted if each < len(places)]

    def claim(self, wanted: list[int]) -> None:
        if self.held:
            return
        chosen, before = self._chosen(wanted), self.queue.ready()
        self.number += 1
        self.routed = 0
        reply = self.queue.claim(chosen, str(self.number))
        self.held = [place for place in chosen if place in before]
        assert reply["gone"] == len(chosen) - len(self.held)
        if self.held:
            assert self.queue.held(str(self.number)) == self.held
        self._are_left([place for place in before if place not in self.held])

    def _are_left(self, places: list[Place]) -> None:
        """These are ready, in their order; whose turn it is of two classes depends on what was
        chosen."""
        ready = self.queue.ready()
        if self.queue.machine.backlog.two_classes:
            ready, places = sorted(ready), sorted(places)
        assert ready == places

    def delete(self, wanted: list[int]) -> None:
        chosen, before = self._chosen(wanted), self.queue.ready()
        self.number += not self.held
        reply = self.queue.claim(chosen, f"d{len(self.queue.log.entries)}", spec=None)
        gone = [place for place in chosen if place in before]
        assert reply["deleted"] == len(gone)
        self.ended.update(gone)
        self._are_left([place for place in before if place not in gone])

    def route(self, count: int) -> None:
        if self.held:
            targets = [TARGET] if count % 2 else []
            id = str(self.number)
            self.queue.advance(id, routed=self.routed, routes=[[count, targets]])
            self.routed = min(self.routed + count, self._next())

    def _next(self) -> int:
        return self.queue.machine.operations.by_id[str(self.number)].next

    def finish(self, count: int) -> None:
        if not self.held:
            return
        operation = self.queue.machine.operations.by_id[str(self.number)]
        first = operation.first
        upto = min(first + count, operation.routed)
        for offset in range(first, upto):
            place = self.held.pop(0)
            if operation.route_of(offset):
                self.ended[place] += 1
        self.queue.advance(str(self.number), upto=upto)

    def cancel(self, _: None) -> None:
        if self.held:
            operation = self.queue.machine.operations.by_id[str(self.number)]
            self.held = self.held[: operation.routed - operation.first]
            self.queue.ask(operations.CANCEL, str(self.number))

    def restore(self, _: None) -> None:
        self.queue.restored()

    def check(self) -> None:
        """Every message is in one place."""
        places = Counter(self.queue.ready())
        places.update(self.held)
        places.update(self.got[each] for each in self.taken)
        places.update(self.ended)
        dropped = sum(self.queue.machine.backlog.dropped.values())
        assert all(count == 1 for count in places.values())
        assert len(places) + dropped == self.queue.machine.backlog.published


@given(st.sampled_from(CONFIGS), st.lists(STEP, max_size=25))
def test_every_message_is_in_one_place(
    config: dict[str, int], steps: list[tuple[str, Any]]
) -> None:
    model = Model(config)
    for name, argument in steps:
        getattr(model, name)(argument)
        model.check()
