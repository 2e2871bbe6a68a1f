"""Operations on chosen ready messages of a quorum queue: delete them, or move them (ADR 0053).

    ready --claim--> held --advance: routed--> on its way --advance: upto--> gone (moved)
                       |                            +------ back ----------> ready (returned)
                       +--------- cancel ---------------------------------> ready (returned)
    ready --claim, delete--> gone (deleted)

An operation has a name that who asks for it chooses. Its parts are numbered, so a part counts once
however often it is asked for, and the latest operations that have ended are remembered: asking
again gives the same answer. What is claimed gets offsets from 0, which are also the sequences under
which it is published to its targets (`operation_mover`). Where each message goes is logged before
it is published: whoever leads later publishes the same messages to the same queues, in the same
order, so that these know repeats.

| op               | fields                                     | refused with                  |
|------------------|--------------------------------------------|-------------------------------|
| claim_messages   | operation, part, last, ranges, spec or –   | malformed, limit, differs,    |
|                  |                                            | part                          |
| advance_operation| operation, upto, back, routed, routes      | malformed, no_operation       |
| cancel_operation | operation                                  | malformed, no_operation       |

Without a spec what is claimed is deleted. A spec is for the leader; nothing here reads it.

Invariants (`check`): an operation holds exactly the offsets first … next - 1; first <= routed <=
next; its routes cover first … routed - 1 without gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from convoymq.model import trace as words
from convoymq.queues.group_machine import GroupMachine
from convoymq.queues.quorum import runs, selection, tracing
from convoymq.queues.quorum.backlog import Backlog
from convoymq.queues.quorum.consumers import Consumers
from convoymq.queues.quorum.deliveries import Deliveries
from convoymq.queues.reservations import MALFORMED, Refusal

CLAIM = "claim_messages"
ADVANCE = "advance_operation"
CANCEL = "cancel_operation"
OPS = frozenset((CLAIM, ADVANCE, CANCEL))

NO_OPERATION = "no_operation"
OPERATION_LIMIT = "operation_limit"
OPERATION_DIFFERS = "operation_differs"
OPERATION_PART = "operation_part"

OPERATIONS_MAX = 64
"""At a time; each may hold any number of messages."""
FINISHED_KEPT_MAX = 256
NAME_BYTES_MAX = 128
RANGES_MAX = 1024
"""Of one part: what is applied at once must stay short."""
RANGE_MESSAGES_MAX = 1 << 20
SPEC_BYTES_MAX = 2 << 20
ROUTES_MAX = 1024
"""Of one advance."""
TARGETS_MAX = 1024
_U63 = (1 << 63) - 1

Target: TypeAlias = tuple[str, int]
"""(name of a queue, its group)"""
Summary: TypeAlias = dict[str, int]
"""Counts of an operation: parts, sealed, selected, gone, deleted, moved, returned."""

PackedOperations: TypeAlias = tuple[
    list[
        tuple[
            str, int, bytes | None, int, int, int, list[int],
            list[tuple[int, int, list[Target]]], bytes,
        ]
    ],
    list[tuple[str, list[int]]],
]  # fmt: skip
"""Form that `Operations.pack` gives: (operations, finished)."""

COUNTS = ("parts", "sealed", "selected", "gone", "deleted", "moved", "returned")


class Operation:
    """One operation that has not ended."""

    __slots__ = (
        "began", "deleted", "first", "gone", "held", "id", "moved", "next", "parts", "returned",
        "routed", "routes", "sealed", "selected", "spec",
    )  # fmt: skip

    def __init__(self, id: str, began: int, spec: bytes | None) -> None:
        self.id = id
        self.began = began
        """The entry that began it."""
        self.spec = spec
        """Options of the move; None: the messages are deleted."""
        self.held = runs.CheckedOut()
        self.first = 0
        """Oldest offset that is neither moved nor given back."""
        self.routed = 0
        """Offsets below this one have a route."""
        self.next = 0
        """Offset that the next message gets."""
        self.routes: deque[tuple[int, int, tuple[Target, ...]]] = deque()
        """(first offset, count, targets) ascending; without a target it is to come back."""
        self.parts = 0
        self.sealed = False
        """No part follows."""
        self.selected = 0
        """Messages that were asked for."""
        self.gone = 0
        """Messages of them that were not ready any more."""
        self.deleted = 0
        self.moved = 0
        self.returned = 0

    @property
    def name(self) -> str:
        """Under which it is traced, beside reservations."""
        return f"operation {self.id}"

    @property
    def is_done(self) -> bool:
        """Nothing is left to be done, and nothing will come."""
        return self.sealed and self.first == self.next

    def summary(self) -> Summary:
        """See `Summary`."""
        return {name: int(getattr(self, name)) for name in COUNTS}

    def route_of(self, offset: int) -> tuple[Target, ...]:
        """Returns the targets of the message at an offset; it must be routed."""
        for first, count, targets in self.routes:
            if first <= offset < first + count:
                return targets
        raise AssertionError("a message is asked for that has no route")


class Operations:
    """All operations of one queue."""

    def __init__(
        self,
        machine: GroupMachine,
        backlog: Backlog,
        consumers: Consumers,
        deliveries: Deliveries,
    ) -> None:
        self._machine = machine
        self._backlog = backlog
        self._consumers = consumers
        self._deliveries = deliveries
        self.by_id: dict[str, Operation] = {}
        #: The latest that have ended, oldest first.
        self.finished: dict[str, Summary] = {}

    # ---------------------------------------------------------------- ops

    def apply(self, op: Mapping[str, object]) -> tuple[str | None, Summary | None]:
        """Carries out one op; nothing about its fields is taken for granted. Returns (None,
        summary), or (reason, None) when it is refused and nothing has changed."""
        try:
            kind, id = op.get("op"), _id(op)
            if kind == CLAIM:
                return None, self._claim(id, op)
            if id in self.finished and id not in self.by_id:
                return None, self.finished[id]
            operation = self.by_id.get(id)
            if operation is None:
                raise Refusal(NO_OPERATION)
            if kind == ADVANCE:
                self._advance(operation, op)
            elif kind == CANCEL:
                self._cancel(operation)
            else:
                raise Refusal(MALFORMED)
        except Refusal as refusal:
            return refusal.reason, None
        return None, self._ended(operation)

    def _ended(self, operation: Operation) -> Summary:
        """Returns the summary; an operation that is done is remembered by it only."""
        summary = operation.summary()
        if operation.is_done:
            assert not operation.held.messages, "an operation that ends holds messages"
            del self.by_id[operation.id]
            self.finished[operation.id] = summary
            if len(self.finished) > FINISHED_KEPT_MAX:
                del self.finished[next(iter(self.finished))]
            self._consumers.last_active_ms = self._machine.time_ms
            if operation.spec is not None:
                tracing.reservation(self._machine.trace, words.GONE, operation)
        return summary

    def _claim(self, id: str, op: Mapping[str, object]) -> Summary:
        part, is_last = _number(op, "part"), op.get("last") is True
        ranges, spec = checked_ranges(op.get("ranges")), op.get("spec")
        if spec is not None and not (isinstance(spec, bytes) and len(spec) <= SPEC_BYTES_MAX):
            raise Refusal(MALFORMED)
        operation = self.by_id.get(id)
        if operation is None:
            if id in self.finished:
                return self.finished[id]
            if part:
                raise Refusal(OPERATION_PART)
        elif operation.spec != spec:
            raise Refusal(OPERATION_DIFFERS)
        elif part < operation.parts or operation.sealed:
            return operation.summary()
        elif part > operation.parts:
            raise Refusal(OPERATION_PART)
        elif is_last and not ranges:
            return self._seal(operation)
        if operation is None and len(self.by_id) >= OPERATIONS_MAX:
            self._make_room()
        try:
            found = selection.remove(self._backlog, ranges)
        except selection.Overlapping:
            raise Refusal(MALFORMED) from None
        if operation is None:
            operation = self.by_id[id] = Operation(id, self._machine.index, spec)
            if spec is not None:
                tracing.reservation(self._machine.trace, words.CAME, operation)
        operation.parts += 1
        operation.sealed = is_last
        selected = sum(last - first + 1 for _, _, first, last in ranges)
        operation.selected += selected
        operation.gone += selected - sum(run[3] for run in found)
        if spec is None:
            self._delete(operation, found)
        else:
            self._hold(operation, found)
        return self._ended(operation)

    def _seal(self, operation: Operation) -> Summary:
        operation.parts += 1
        operation.sealed = True
        return self._ended(operation)

    def _make_room(self) -> None:
        """Ends an operation that holds nothing and whose owner has left it. Raises Refusal."""
        for operation in self.by_id.values():
            if operation.first == operation.next:
                operation.sealed = True
                self._ended(operation)
                return
        raise Refusal(OPERATION_LIMIT)

    def _delete(self, operation: Operation, found: Sequence[runs.Run]) -> None:
        rows = self._machine.trace
        for run in found:
            if rows is not None:
                tracing.left(rows, words.DROPPED, 0, words.PURGED, 0, 0, run)
            operation.deleted += run[3]
            self._backlog.purged += run[3]
            if self._backlog.follows():
                self._backlog.gone(run)

    def _hold(self, operation: Operation, found: Sequence[runs.Run]) -> None:
        rows, backlog = self._machine.trace, self._backlog
        owner = tracing.reservation_session(operation.name)
        for run in found:
            if rows is not None:
                tracing.delivered(rows, words.BY_RESERVATION, owner, 0, operation.next, run)
            operation.held.add(operation.next, *run)
            operation.next += run[3]
            backlog.delivered += run[3]
            if run[5]:
                backlog.redelivered += run[3]
            backlog.hold(run[3], run[4])

    # ---------------------------------------------------------------- on their way

    def _advance(self, operation: Operation, op: Mapping[str, object]) -> None:
        upto, routed = _number(op, "upto"), _number(op, "routed")
        back, routes = _offsets(op.get("back")), _routes(op.get("routes"))
        if upto > operation.routed:
            raise Refusal(MALFORMED)
        self._finish(operation, upto, back)
        # Another leader may have routed them meanwhile: what is logged first holds.
        if routed == operation.routed:
            for count, targets in routes:
                count = min(count, operation.next - operation.routed)
                if count:
                    operation.routes.append((operation.routed, count, targets))
                    operation.routed += count

    def _finish(self, operation: Operation, upto: int, back: frozenset[int]) -> None:
        """Offsets below `upto` are safe where they go, but those that come back."""
        while operation.first < upto:
            first, count, targets = operation.routes[0]
            end = min(first + count, upto)
            start = operation.first
            if not targets:
                self._give_back(operation, start, end)
            else:
                while start < end:
                    comes_back = start in back
                    stop = start + 1
                    while stop < end and (stop in back) == comes_back:
                        stop += 1
                    if comes_back:
                        self._give_back(operation, start, stop)
                    else:
                        self._settle(operation, start, stop)
                    start = stop
            operation.first = end
            if end == first + count:
                operation.routes.popleft()
            else:
                operation.routes[0] = (end, first + count - end, targets)

    def _settle(self, operation: Operation, start: int, end: int) -> None:
        rows = self._machine.trace
        held = operation.held
        if rows is not None:
            owner = tracing.reservation_session(operation.name)
            for _, run in held.between(start, end, held.run_count()):
                tracing.left(rows, words.ACKED, words.BY_RESERVATION, 0, owner, 0, run)
        heads = self._backlog.follows()
        left = held.between(start, end, end - start) if heads else ()
        messages, size = held.drop_oldest(end - 1)
        assert messages == end - start, "an operation has a gap"
        operation.moved += messages
        self._backlog.settle(messages, size)
        for _, run in left:
            self._backlog.gone(run)

    def _give_back(self, operation: Operation, start: int, end: int) -> None:
        """Back to the queue, which counts no failure: nobody had the message."""
        rows = self._machine.trace
        for run in operation.held.remove(start, end - 1):
            if rows is not None:
                owner = tracing.reservation_session(operation.name)
                tracing.left(rows, words.RETURNED, words.BY_RESERVATION, 0, owner, 0, run)
            operation.returned += run[3]
            self._deliveries.give_back(run, 0, 0)

    def _cancel(self, operation: Operation) -> None:
        """Cancels an operation: what is not on its way comes back; the rest arrives."""
        operation.sealed = True
        if operation.routed < operation.next:
            self._give_back(operation, operation.routed, operation.next)
            operation.next = operation.routed

    # ---------------------------------------------------------------- looking

    def summary(self, id: str) -> Summary | None:
        """Returns the counts of an operation; None = it is not known."""
        operation = self.by_id.get(id)
        return self.finished.get(id) if operation is None else operation.summary()

    def held(self) -> list[runs.CheckedOut]:
        """Returns what operations hold."""
        return [operation.held for operation in self.by_id.values()]

    # ---------------------------------------------------------------- snapshots

    def pack(self) -> list[object]:
        """Plain values: [operations, finished]."""
        return [
            [
                [
                    operation.id,
                    operation.began,
                    operation.spec,
                    operation.first,
                    operation.routed,
                    operation.next,
                    list(operation.summary().values()),
                    list(operation.routes),
                    operation.held.pack(),
                ]
                for operation in self.by_id.values()
            ],
            [[id, list(summary.values())] for id, summary in self.finished.items()],
        ]

    def unpack(self, packed: PackedOperations) -> None:
        """Replaces all by what `pack` gave, and holds it. Raises ValueError."""
        operations, finished = packed
        self.by_id.clear()
        for id, began, spec, first, routed, end, counts, routes, held in operations:
            operation = self.by_id[id] = Operation(id, began, spec)
            operation.first, operation.routed, operation.next = first, routed, end
            for name, value in zip(COUNTS, counts, strict=True):
                setattr(operation, name, bool(value) if name == "sealed" else value)
            operation.routes.extend(
                (start, count, tuple((name, group) for name, group in targets))
                for start, count, targets in routes
            )
            operation.held.unpack(held)
            self._backlog.hold(operation.held.messages, operation.held.size)
        self.finished = {id: dict(zip(COUNTS, counts, strict=True)) for id, counts in finished}

    def check(self) -> list[runs.Run]:
        """Asserts what the module docstring promises; returns the runs that are held."""
        assert len(self.by_id) <= OPERATIONS_MAX
        assert len(self.finished) <= FINISHED_KEPT_MAX
        places: list[runs.Run] = []
        for id, operation in self.by_id.items():
            assert operation.id == id
            assert not operation.is_done
            assert operation.first <= operation.routed <= operation.next
            at = operation.first
            for offset, run in operation.held.held():
                assert offset == at, "an operation has a gap"
                at += run[3]
                places.append(run)
            assert at == operation.next
            at = operation.first
            for first, count, _ in operation.routes:
                assert first == at and count > 0, "routes have a gap"  # noqa: PT018
                at += count
            assert at == operation.routed
            done = operation.moved + operation.returned + operation.deleted + operation.gone
            assert done + operation.held.messages == operation.selected
        return places


def _id(op: Mapping[str, object]) -> str:
    id = op.get("operation")
    if type(id) is not str or not 0 < len(id.encode("utf-8", "replace")) <= NAME_BYTES_MAX:
        raise Refusal(MALFORMED)
    return id


def _number(op: Mapping[str, object], key: str) -> int:
    value = op.get(key)
    if type(value) is not int or not 0 <= value <= _U63:
        raise Refusal(MALFORMED)
    return value


def _offsets(given: object) -> frozenset[int]:
    if given is None:
        return frozenset()
    if not isinstance(given, list) or any(type(each) is not int for each in given):
        raise Refusal(MALFORMED)
    return frozenset(given)


def checked_ranges(given: object) -> list[selection.Range]:
    """Returns the entry index, command offset, first and last record of each."""
    if not isinstance(given, list) or len(given) > 4 * RANGES_MAX or len(given) % 4:
        raise Refusal(MALFORMED)
    if any(type(each) is not int or not 0 <= each <= _U63 for each in given):
        raise Refusal(MALFORMED)
    made = list(zip(given[::4], given[1::4], given[2::4], given[3::4], strict=True))
    if any(not 0 <= last - first < RANGE_MESSAGES_MAX for _, _, first, last in made):
        raise Refusal(MALFORMED)
    return made


def _routes(given: object) -> list[tuple[int, tuple[Target, ...]]]:
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > ROUTES_MAX:
        raise Refusal(MALFORMED)
    made: list[tuple[int, tuple[Target, ...]]] = []
    try:
        for count, targets in given:
            if type(count) is not int or count <= 0 or len(targets) > TARGETS_MAX:
                raise Refusal(MALFORMED)
            for name, group in targets:
                if type(name) is not str or type(group) is not int:
                    raise Refusal(MALFORMED)
            made.append((count, tuple((name, group) for name, group in targets)))
    except (TypeError, ValueError):
        raise Refusal(MALFORMED) from None
    return made
