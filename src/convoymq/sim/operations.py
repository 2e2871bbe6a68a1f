"""Operations on chosen messages in the simulator (ADR 0053): who asks for them, where messages go,
and a model that follows them in the log.

What is asserted, beyond what holds for every queue:

- ops are answered as a model of the rules says, on every replica;
- a message that is done is where it was to go, and one that came back is not;
- nothing arrives twice, whatever becomes of leaders, nodes and links.

The target is no queue of the world: it keeps what arrives and the highest sequence of each
producer, as a quorum queue does. Its streams deliver in order, late, and not always to their end:
also when the process that opened them is dead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from convoymq.model.errors import BrokerError, Unavailable
from convoymq.queues.interface import PublisherEvents, Queue, QueueFeatures, outcome_of
from convoymq.queues.null_events import NullEvents
from convoymq.queues.quorum.client import QuorumClient
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.moves import QUEUE, MoveSpec
from convoymq.queues.quorum.operations import (
    ADVANCE,
    CLAIM,
    COUNTS,
    FINISHED_KEPT_MAX,
    NO_OPERATION,
    OPERATION_PART,
    OPS,
)
from convoymq.queues.reservations import MALFORMED
from convoymq.queues.sessions import APPLIED_OK, APPLIED_REJECTED
from convoymq.sim.clock import Process
from convoymq.sim.command_bodies import ChosenOp, ReservationOp
from convoymq.sim.dead_letters import TARGET_GROUP, DeadLetterTarget
from convoymq.sim.delivery_model import DeliveryModel, InvariantBroken
from convoymq.sim.delivery_parts import Message, Place, Session, name_of
from convoymq.sim.records import identity_of

if TYPE_CHECKING:
    from convoymq.sim.group_node import GroupNode
    from convoymq.sim.group_world import GroupWorld
    from convoymq.sim.quorum import QuorumLoad

NAME = "chosen"
GROUP = TARGET_GROUP + 1
DELAY_MAX_US = 40_000
NO_ROUTE_CHANCE = 0.05
UNAVAILABLE_CHANCE = 0.05
LOSS_CHANCE = 0.02
FULL_CHANCE = 0.02
ASK_EVERY_US = 120_000
CHOSEN_MAX = 24
DELETE_CHANCE = 0.2
REPEAT_CHANCE = 0.2
CANCEL_CHANCE = 0.1
QUESTION_CHANCE = 0.15
"""Of what is asked: about the queue itself, not about chosen messages."""
SHARE = 0.4
"""Of the seeds have operations."""
SPEC = MoveSpec(to=QUEUE, queue=NAME).pack()


class _Published(NamedTuple):
    producer: bytes
    sequence: int
    identity: bytes
    tag: int


class Arrivals:
    """Messages that arrived at the target; one object for a world."""

    def __init__(self, world: GroupWorld) -> None:
        self.world = world
        self.rng = world.own_rng(0xC405E)
        self.questions = world.own_rng(0xA5C)
        """Draws of questions to queues themselves."""
        self.active = self.rng.random() < SHARE
        self.taken: set[bytes] = set()
        self._last: dict[bytes, int] = {}

    def take(self, published: _Published) -> None:
        """A message arrives. Raises InvariantBroken when it is there already."""
        if published.sequence <= self._last.get(published.producer, -1):
            return
        self._last[published.producer] = published.sequence
        if published.identity in self.taken:
            raise InvariantBroken(f"{name_of(published.identity)} was moved twice")
        self.taken.add(published.identity)


class ChosenRoutes(DeadLetterTarget):
    """Routes of messages, as one process of a node sees them."""

    def __init__(self, load: QuorumLoad, process: Process) -> None:
        super().__init__(load, process)
        self._chosen = ChosenTarget(load, process)

    def route_dead_letter(self, *message: object) -> tuple[Any, ...]:
        """See `DeadLetterRoutes`."""
        if message[2:3] != ((NAME,),):
            return super().route_dead_letter(*message)
        draw = 1.0 if self._world.quiet else self._load.arrivals.rng.random()
        if draw < UNAVAILABLE_CHANCE:
            raise Unavailable("the target is not open yet")
        return () if draw < UNAVAILABLE_CHANCE + NO_ROUTE_CHANCE else (self._chosen,)

    def queue_of_group(self, vhost: str, name: str, group: int) -> Any:
        """See `DeadLetterRoutes`."""
        assert (vhost, name, group) == ("/", NAME, GROUP), "a message goes where it was not routed"
        return self._chosen


class ChosenTarget:
    """The target as one process of a node sees it."""

    vhost = "/"
    name = NAME
    group = GROUP
    ended = None
    deleted = False
    serves_attributes = True
    features = QueueFeatures(drops_repeats=True)

    def __init__(self, load: QuorumLoad, process: Process) -> None:
        self.world = load.world
        self.arrivals = load.arrivals
        self.process = process

    @property
    def refuses_publishes(self) -> bool:
        """Full now and then."""
        return not self.world.quiet and self.arrivals.rng.random() < FULL_CHANCE

    def client(self, _session: int, events: PublisherEvents) -> _Stream:
        """Opens a stream of publishes."""
        return _Stream(self, events)


class _Stream:
    """One stream: what it has is under way, in order. It goes on without its process."""

    def __init__(self, queue: ChosenTarget, events: PublisherEvents) -> None:
        self.queue = queue
        self.target = self
        self._events = events
        self._closed = False
        self._waiting: deque[_Published] = deque()
        self._producer = (b"", 0)
        #: The session is lost, and its owner has not heard of it: nothing that follows arrives.
        self._lost = False

    def name_next(self, producer: bytes, sequence: int) -> None:
        """See `PublishTarget`."""
        self._producer = (producer, sequence)

    def publish(self, parts: Sequence[bytes], _body_size: int, tag: int, _flags: int) -> None:
        """See `PublishTarget`."""
        if self._lost:
            self._answer([tag], False)
            return
        published = _Published(*self._producer, identity_of(b"".join(parts)), tag)
        self._waiting.append(published)
        if len(self._waiting) == 1:
            self._later()

    def _later(self) -> None:
        world = self.queue.world
        delay_us = self.queue.arrivals.rng.randrange(1, DELAY_MAX_US // 8)
        world.scheduler.after(delay_us, None, self._arrive)

    def _arrive(self) -> None:
        world = self.queue.world
        loss = LOSS_CHANCE if self.queue.process.alive else 8 * LOSS_CHANCE
        if not world.quiet and self.queue.arrivals.rng.random() < loss:
            # The session is lost, with all that has not arrived.
            tags = [published.tag for published in self._waiting]
            self._waiting.clear()
            self._lost = True
            self._answer(tags, False)
            return
        published = self._waiting.popleft()
        self.queue.arrivals.take(published)
        self._answer([published.tag], True)
        if self._waiting:
            self._later()

    def _answer(self, tags: list[int], ok: bool) -> None:
        delay_us = self.queue.arrivals.rng.randrange(1, DELAY_MAX_US)
        scheduler = self.queue.world.scheduler
        scheduler.after(delay_us, self.queue.process, self._tell, tags, ok)

    def _tell(self, tags: list[int], ok: bool) -> None:
        self._lost = self._lost and ok
        if not self._closed:
            for tag in tags:
                self._events.on_published(self, [tag, tag], outcome_of(ok))  # type: ignore[arg-type]

    def close(self) -> None:
        """No answers follow; what is under way is not called back."""
        self._closed = True


class _Operation:
    """Operation as the log has it."""

    def __init__(self, spec: object) -> None:
        self.spec = spec
        self.messages: dict[int, Message] = {}
        self.routed: list[bool] = []
        """Of each offset, from the first on: whether it has a target."""
        self.first = self.next = 0
        self.counts = dict.fromkeys(COUNTS, 0)


class ChosenModel:
    """Operations of one queue, by the rules of ADR 0053."""

    def __init__(self, taken: set[bytes]) -> None:
        self.taken = taken
        self.open: dict[str, _Operation] = {}
        self.ended: dict[str, dict[str, int]] = {}

    def apply(self, model: DeliveryModel, session: Session, op: ReservationOp) -> bool:
        """Follows an op; False: it is none of these."""
        if op["op"] not in OPS:
            return False
        reply: object = MALFORMED
        if model.in_force(2):
            reply = self._reply(model, cast(ChosenOp, op))
        status = APPLIED_REJECTED if isinstance(reply, str) else APPLIED_OK
        model._answer(session, status, reply)
        return True

    def _reply(self, model: DeliveryModel, op: ChosenOp) -> object:
        id = op["operation"]
        if id in self.ended:
            return self.ended[id]
        operation = self.open.get(id)
        if op["op"] == CLAIM:
            if op["part"] > (0 if operation is None else operation.counts["parts"]):
                return OPERATION_PART
            if operation is None:
                operation = self.open[id] = _Operation(op.get("spec"))
            if op["part"] == operation.counts["parts"] and not operation.counts["sealed"]:
                self._claim(model, operation, op)
        elif operation is None:
            return NO_OPERATION
        elif op["op"] == ADVANCE:
            self._advance(model, operation, op)
        else:
            operation.counts["sealed"] = 1
            for offset in range(len(operation.routed), operation.next):
                self._give_back(model, operation, offset)
            operation.next = len(operation.routed)
        if operation.counts["sealed"] and operation.first == operation.next:
            self.ended[id] = self.open.pop(id).counts
            model.used_ms = model.time_ms
            if len(self.ended) > FINISHED_KEPT_MAX:
                del self.ended[next(iter(self.ended))]
        return dict(operation.counts)

    def _claim(self, model: DeliveryModel, operation: _Operation, op: ChosenOp) -> None:
        model.in_order = False
        counts = operation.counts
        counts["parts"] += 1
        counts["sealed"] = int(op["last"])
        numbers = op["ranges"]
        found: list[Message] = []
        for at in range(0, len(numbers), 4):
            index, offset, first, last = numbers[at : at + 4]
            for record in range(first, last + 1):
                counts["selected"] += 1
                message = model.messages.get((index, offset, record))
                lines = [line for line in model._sources() if message in line]
                if message is None or message in found or not lines:
                    counts["gone"] += 1
                    continue
                found.append(message)
        model._take_out(found)
        for message in found:
            if operation.spec is None:
                counts["deleted"] += 1
                model._move(message, Place.PURGED)
                continue
            model.delivered += 1
            model.redelivered += bool(message.acquired)
            message.outs += 1
            model._move(message, Place.RESERVED)
            operation.messages[operation.next] = message
            operation.next += 1

    def _advance(self, model: DeliveryModel, operation: _Operation, op: ChosenOp) -> None:
        for offset in range(operation.first, op["upto"]):
            message = operation.messages[offset]
            if not operation.routed[offset] or offset in op["back"]:
                self._give_back(model, operation, offset)
                continue
            if message.identity not in self.taken:
                model.fail(f"{name_of(message.identity)} is moved, and nobody has it")
            operation.counts["moved"] += 1
            model._move(operation.messages.pop(offset), Place.SETTLED)
        operation.first = max(operation.first, op["upto"])
        if op["routed"] == len(operation.routed):
            for count, targets in op["routes"]:
                room = operation.next - len(operation.routed)
                operation.routed += [bool(targets)] * min(count, room)

    def _give_back(self, model: DeliveryModel, operation: _Operation, offset: int) -> None:
        message = operation.messages.pop(offset)
        if message.identity in self.taken:
            model.fail(f"{name_of(message.identity)} comes back, and was moved")
        operation.counts["returned"] += 1
        model._return(message, 0, 0)


class Choosing:
    """Asks for operations on any node, again and again, and for some of them twice."""

    def __init__(self, load: QuorumLoad) -> None:
        self._load = load
        self._world = load.world
        self._clients: dict[Queue, QuorumClient] = {}
        self._asked: dict[int, list[dict[str, object]]] = {}
        """Group -> what was asked."""
        self._number = 0

    def start(self) -> None:
        """Begins, in some of the worlds."""
        if self._load.arrivals.active and self._load.chosen:
            self._later()

    def _later(self) -> None:
        delay_us = self._load.arrivals.rng.randrange(1, ASK_EVERY_US)
        self._world.scheduler.after(delay_us, None, self._ask)

    def _ask(self) -> None:
        self._later()
        world, rng = self._world, self._load.arrivals.rng
        alive = [node for node in world.nodes.values() if node.alive and node.queues]
        if not alive:
            return
        node = rng.choice(alive)
        group = rng.choice(sorted(node.queues))
        op = self._end(group) if world.quiet else self._next(node, group)
        if op is None:
            return
        queue = node.queues[group]
        client = self._clients.get(queue)
        if client is None:
            made = queue.client(node.new_session(), NullEvents())
            assert isinstance(made, QuorumClient)
            client = self._clients[queue] = made
        client.reservation(msgspec.msgpack.encode(op), _ignore)

    def _next(self, node: GroupNode, group: int) -> dict[str, object] | None:
        rng = self._load.arrivals.rng
        asked = self._asked.setdefault(group, [])
        draw = rng.random()
        ask = self._load.arrivals.questions.random()
        if ask < QUESTION_CHANCE:
            return self._question(node, group, ask < QUESTION_CHANCE / 2)
        if asked and draw < REPEAT_CHANCE:
            return rng.choice(asked[-4:])
        if asked and draw < REPEAT_CHANCE + CANCEL_CHANCE:
            return {"op": "cancel_operation", "operation": rng.choice(asked[-4:])["operation"]}
        replica = node.host.groups.get(group)
        machine = None if replica is None else replica.machine
        if not isinstance(machine, QuorumMachine):
            return None
        ready = [
            (run[0], run[1], run[2] + i)
            for run in machine.backlog.in_order()
            for i in range(run[3])
        ]
        if not ready:
            return None
        chosen = rng.sample(ready, min(len(ready), rng.randrange(1, CHOSEN_MAX)))
        last = asked[-1] if asked else None
        op: dict[str, object]
        if last is not None and not last["last"]:
            op = {**last, "part": 1, "last": True}
        else:
            self._number += 1
            op = {"op": CLAIM, "operation": f"o{self._number}", "part": 0}
            op["last"] = rng.random() < 0.8
            if rng.random() >= DELETE_CHANCE:
                op["spec"] = SPEC
        op["ranges"] = [number for index, offset, record in chosen
                        for number in (index, offset, record, record)]  # fmt: skip
        asked.append(op)
        return op

    def _question(self, node: GroupNode, group: int, about: bool) -> dict[str, object] | None:
        """Returns a command that asks whether the queue may be deleted, or that cancels what
        waits; None = nothing waits that a replica knows of."""
        rng = self._load.arrivals.questions
        if about:
            if rng.random() < 0.5:
                return {"op": "renew"}
            conditions = {"if_unused": rng.random() < 0.5, "if_empty": rng.random() < 0.5}
            return {"op": "delete_check", **conditions}
        replica = node.host.groups.get(group)
        machine = None if replica is None else replica.machine
        if not isinstance(machine, QuorumMachine):
            return None
        waits = [
            [due_ms, run[0], run[1], run[2] + i]
            for due_ms, run in machine.waiting.rows()
            for i in range(run[3])
        ]
        if not waits:
            return None
        chosen = rng.sample(waits, min(len(waits), rng.randrange(1, CHOSEN_MAX)))
        # Some of them are named twice, and some wait at another time.
        chosen += [[due_ms + 1, *place] for due_ms, *place in chosen[:1]] + chosen[:2]
        return {"op": "cancel_scheduled", "messages": chosen}

    def _end(self, group: int) -> dict[str, object] | None:
        """Returns a command that ends an operation that was begun and is not complete; None = there
        is none."""
        model = self._load.chosen[group]
        for id, operation in model.open.items():
            if not operation.counts["sealed"]:
                return {"op": "cancel_operation", "operation": id}
        return None


def _ignore(_reply: object, _error: BrokerError | None) -> None:
    """Whoever asks may ask again."""
