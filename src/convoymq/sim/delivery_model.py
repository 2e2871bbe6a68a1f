"""Model of deliveries: a quorum queue computed from its committed log, message by message.

It is written from the rules (ADR 0003, "Who is served"; ADR 0008; the specification of RabbitMQ's
quorum queues, B3 to B7), not from the machine: no runs, no service queue, no index. There is one
object per message, and whoever is to be served is looked for among all consumers, every time. The
referee compares what it gives with what the machine gives.

Beside computing, `_check_turn` and `_check_activation` state what must be true of every turn.
"""

from __future__ import annotations

import struct
from bisect import insort
from collections.abc import Iterator, Mapping
from typing import NoReturn, cast

from convoymq.kernels import batch
from convoymq.kernels.entries import Entry
from convoymq.messages.record import read_record, traits_of
from convoymq.model.errors import InvariantViolated
from convoymq.queues.sessions import APPLIED_OK, APPLIED_REJECTED, decode_map
from convoymq.sim import outcome_rules, turns
from convoymq.sim.command_bodies import CheckoutSpec, OtherOps, ReservationOp
from convoymq.sim.delivery_parts import (
    STILL_THERE,
    Consumer,
    Key,
    Message,
    Place,
    Session,
    incarnation_of,
    name_of,
    name_of_consumer,
)
from convoymq.sim.queue_rules import (
    AT_LEAST_ONCE,
    answer_queue_op,
    configure,
    is_unused,
    keep_length,
    purge,
)
from convoymq.sim.ready_lines import LEVEL_DEFAULT, ReadyLines, group_of
from convoymq.sim.records import RememberedIds, body_bytes_of, identity_of

HandOut = tuple[int, int, int, Key, int, int, bytes]
"""(session, consumer, message id, message, acquired, failed, annotations): one message is given
out."""

Answer = tuple[int, int, int, object]
"""(session, seq, status, reply) of a command that asked something."""

SESSION_OPEN = batch.CMD_SESSION_OPEN

LEVEL_MAX = 31
WINDOW_UNLIMITED = 2000
LIMITS = (
    "message_ttl_ms", "expires_ms", "max_length", "max_length_bytes", "reject_publish",
    "delayed_retry", "delayed_retry_min_ms", "delayed_retry_max_ms",
)  # fmt: skip
SWEEP_MS = 100


class InvariantBroken(InvariantViolated):
    """Something happened that must never happen."""


class DeliveryModel(ReadyLines):
    """One queue.

    Args:
        group: its number, for messages.
        settings: as of `QuorumMachine`; what a queue is declared with.
    """

    def __init__(self, group: int, settings: Mapping[str, int]) -> None:
        super().__init__()
        self.group = group
        self.delivery_limit: int = settings.get("delivery_limit", 20)
        self.disconnect_timeout_ms: int = settings.get("disconnect_timeout_ms", 60_000)
        self.single_active = bool(settings.get("single_active", False))
        self.strict = self.single_active and bool(settings.get("single_active_strict", True))
        self.in_order = self.strict
        self.index = 0
        self.time_ms = 0
        self.messages: dict[Key, Message] = {}
        self.by_identity: dict[bytes, Key] = {}
        self.without_effect: frozenset[int] = frozenset()
        """Commands of a leader that change nothing that this model knows."""
        self.names_messages = True
        """Bodies begin with what makes a message one of a kind."""
        self.limits = dict.fromkeys(LIMITS, -1)
        #: All that a client gives back has failed, as in RabbitMQ 4.1.
        self.counts_returns = settings.get("counts_returns", 0) > 0
        if "two_priority_classes" in settings:
            self.limits["two_priority_classes"] = settings["two_priority_classes"]
        self.remembered = RememberedIds()
        self.since: dict[int, int] = {}
        """Version of the machine -> the first entry that it applies."""
        self.scheduled: list[tuple[int, Key]] = []
        """(ready from, message) of what waits for a time, in this order."""
        self.refusing = False
        self.swept_ms = 0
        """Time at which messages left last because they had expired behind others."""
        self.used_ms = 0
        """Time of the last use of the queue: a consumer or a reservation that went, a get, an
        operation that ended; or since when it may be unused."""
        self.unused = 0
        """Number of times that the last entry said that the queue was unused for too long."""
        self.sessions: dict[int, Session] = {}
        """In the order in which they began."""
        self.over: set[int] = set()
        self.openings: dict[int, tuple[int, set[int]]] = {}
        """Node -> (incarnation, opening numbers of it that were used)."""
        self.away: dict[int, list[int]] = {}
        """Suspected node -> [since, 1 when what it held was returned]."""
        self.active: Consumer | None = None
        self.quiescing = False
        self.waiting: list[Consumer] = []
        self.strategy = 0
        """Strategy for dead letters: 0 nothing, 1 published at most once, 2 at least once."""
        self.kept: dict[int, Message] = {}
        """Dead letters by number, at least once, until the leader says that they are done."""
        self.kept_so_far = 0
        self.moved: set[bytes] = set()
        """Identities that the target of dead letters has taken; kept by the world."""
        self.chosen: OtherOps | None = None
        self.places: dict[Place, int] = dict.fromkeys(Place, 0)
        self.delivered = 0
        self.redelivered = 0
        self.returns = 0
        self.hand_outs: list[HandOut] = []
        """Of the last entry, in order."""
        self.answers: list[Answer] = []
        """Of the last entry, in order."""
        self.released: list[tuple[int, int, int]] = []
        """(session, consumer, message id) of what clients settled or rejected in the last entry."""
        self.touched: set[int] = set()
        """Sessions with commands that were accepted in the last entry."""
        self._moments = 0

    def fail(self, text: str) -> NoReturn:
        """Stops the run."""
        raise InvariantBroken(f"queue {self.group}, entry {self.index}: {text}")

    # The log.

    def apply(self, index: int, data: bytes) -> None:
        """Follows one committed entry of commands; what it gave is in `hand_outs` and `answers`."""
        self.index = index
        self.time_ms = max(self.time_ms, Entry(data).time_ms)
        self.hand_outs = []
        self.answers = []
        self.released = []
        self.touched = set()
        self.unused = 0
        self.remembered.forget(self.time_ms)
        self._fire()
        self._expire()
        self._sweep()
        for kind, flags, session_id, seq, count, arg, offset, _length in batch.commands(data):
            if session_id:
                session = self._accepted(session_id, seq, kind, arg << 32 | count)
                if session is None:
                    continue
                self.touched.add(session_id)
                self._command(session, kind, flags, count, arg, data, offset)
            elif kind == batch.CMD_ENQUEUE:
                self._enqueue(data, offset, count)
            else:
                self._leader_command(kind, flags, arg, batch.command_body(data, offset))
            self._settle_down()

    def _accepted(self, session_id: int, seq: int, kind: int, number: int) -> Session | None:
        """Returns the session, when this command is its next one. A session begins once."""
        session = self.sessions.get(session_id)
        if session is None:
            if kind in (SESSION_OPEN, batch.CMD_SESSION_CLOSE):
                self._hear_of(session_id >> 56, incarnation_of(session_id))
            if kind != SESSION_OPEN or seq != 1 or not self._opens(session_id, number):
                return None
            if session_id in self.over:
                self.fail(f"{session_id:x} begins again, under number {number}")
            session = self.sessions[session_id] = Session(session_id)
        elif seq != session.seq + 1:
            return None
        session.seq = seq
        return session

    def _hear_of(self, node: int, incarnation: int) -> None:
        """Older incarnations of the node open nothing any more."""
        if node not in self.openings or self.openings[node][0] < incarnation:
            self.openings[node] = (incarnation, set())

    def _opens(self, session_id: int, number: int) -> bool:
        """An opening number counts once, and only for the newest incarnation of its node."""
        incarnation, used = self.openings[session_id >> 56]
        if incarnation != incarnation_of(session_id) or number in used:
            return False
        used.add(number)
        return True

    def _command(
        self,
        session: Session,
        kind: int,
        flags: int,
        count: int,
        arg: int,
        data: bytes,
        offset: int,
    ) -> None:
        consumer = session.consumers.get(arg)
        if kind == batch.CMD_ENQUEUE:
            self._enqueue(data, offset, count)
        elif kind in (batch.CMD_SETTLE, batch.CMD_RETURN, batch.CMD_DISCARD):
            if consumer is not None:
                held = len(consumer.held)
                ranges = batch.ranges(data, offset, count)
                for first, last in zip(ranges[::2], ranges[1::2], strict=True):
                    self._release(consumer, kind, flags, first, last)
                settled = held - len(consumer.held)
                if kind == batch.CMD_SETTLE and settled:
                    turns.has_settled(consumer, settled, self.time_ms, self._version())
        elif kind == batch.CMD_CHECKOUT:
            spec = decode_map(batch.command_body(data, offset), count)
            self._checkout(session, arg, cast(CheckoutSpec, spec))
        elif kind == batch.CMD_CREDIT:
            if consumer is not None and not consumer.cancelled and consumer.number:
                body = decode_map(batch.command_body(data, offset), count)
                consumer.window = int(body["credit"])
                self._look_at_window(consumer)
        elif kind == outcome_rules.GRANT:
            outcome_rules.grant(self, session, consumer, flags, batch.command_body(data, offset))
        elif kind == outcome_rules.MODIFY:
            outcome_rules.modify(self, consumer, flags, count, data, offset)
        elif kind == batch.CMD_CANCEL:
            if consumer is not None and consumer.number:
                self._retire(consumer)
            self._answer(session, APPLIED_OK, None)
        elif kind == batch.CMD_GET:
            self._get(session, settled=bool(flags & 1))
        elif kind == batch.CMD_PURGE:
            purge(self, session)
        elif kind == batch.CMD_SESSION_CLOSE:
            self._end(session)
        elif kind == batch.CMD_RESERVATION:
            op = cast(ReservationOp, decode_map(batch.command_body(data, offset), count))
            users = self.reservation_count()
            if not answer_queue_op(self, session, op):
                self._reservation(session, op)
            self._see_reservations_go(users)
        elif kind != SESSION_OPEN:
            self.fail(f"the model has no rule for command {kind}")

    def _leader_command(self, kind: int, flags: int, arg: int, body: bytes) -> None:
        if kind == batch.CMD_TICK:
            users = self.reservation_count()
            self._expire_reservations()
            self._see_reservations_go(users)
            self._tick()
            self.unused += is_unused(self)
        elif kind == batch.CMD_SESSION_DOWN:
            session = self.sessions.get(int.from_bytes(body[:8], "little"))
            if session is not None:
                self._end(session)
        elif kind == batch.CMD_NODE_DOWN:
            if flags & 1:
                self.away.pop(arg, None)
                self._end_all(session for session in self.sessions.values() if session.node == arg)
            elif arg not in self.away:
                self.away[arg] = [self.time_ms, 0]
        elif kind == batch.CMD_NODE_UP:
            incarnation = int.from_bytes(body[:8], "little")
            self._hear_of(arg, incarnation)
            self.away.pop(arg, None)
            self._end_all(
                session
                for session in self.sessions.values()
                if session.node == arg and session.incarnation < incarnation
            )
        elif kind == batch.CMD_CONFIG:
            configure(self, decode_map(body, 0))
        elif kind == batch.CMD_SETTLE:
            self._moved(body)
        elif kind not in self.without_effect:
            self.fail(f"the model has no rule for command {kind} of a leader")

    def _moved(self, body: bytes) -> None:
        """The leader says that dead letters are done: their target must have them."""
        numbers = struct.unpack(f"<{len(body) // 8}Q", body)
        for first, last in zip(numbers[::2], numbers[1::2], strict=True):
            for number in range(first, last + 1):
                message = self.kept.pop(number, None)
                if message is not None and message.identity not in self.moved:
                    self.fail(f"{name_of(message.identity)} is done, and nobody has it")

    def _leave(self, message: Message, place: Place) -> None:
        """A message leaves unacknowledged."""
        self._move(message, place)
        if self.strategy == AT_LEAST_ONCE:
            self.kept[self.kept_so_far] = message
            self.kept_so_far += 1

    def _answer(self, session: Session, status: int, reply: object) -> None:
        self.answers.append((session.id, session.seq, status, reply))

    # Messages.

    def _move(self, message: Message, place: Place) -> None:
        self.places[message.place] -= 1
        self.places[place] += 1
        message.place = place
        if place is not Place.HELD:
            message.holder = None
        if place not in STILL_THERE:
            self._make_way(message)

    def _enqueue(self, data: bytes, offset: int, count: int) -> None:
        for i in range(count):
            record = batch.record(data, offset, i)
            identity = identity_of(record)
            if self.remembered.drops(record, identity, self.time_ms):
                continue
            key = (self.index, offset, i)
            known = self.by_identity.get(identity)
            if known is not None and self.names_messages:
                self.fail(f"{name_of(identity)} was accepted twice, first at {known}")
            message = Message(key, identity)
            message.size = body_bytes_of(record)
            self.by_identity[identity] = key
            self.messages[key] = message
            self.places[Place.READY] += 1
            self._give_attributes(message, record)
            delay = self._delay_of(record)
            if delay > 0 and message.group is None:
                self._schedule(message, self.time_ms + delay)
            else:
                self._enter(message)

    def _version(self) -> int:
        return max((known for known, at in self.since.items() if self.index >= at), default=1)

    def in_force(self, version: int) -> bool:
        """Returns whether that version of the machine, or a later one, applies entries by now."""
        return self._version() >= version

    def _delay_of(self, record: bytes) -> int:
        """For how long a message is to wait."""
        field = read_record(record).headers.get("x-delay") if self.in_force(2) else None
        return field.value if field is not None and isinstance(field.value, int) else 0

    def _schedule(self, message: Message, ready_ms: int) -> None:
        """Lets a message wait until the first entry at that time."""
        self.in_order = False
        message.waited = True
        self._move(message, Place.WAITING)
        insort(self.scheduled, (ready_ms, message.key))

    def _fire(self) -> None:
        """Puts what has waited until now at the tail, or in front: what came back, by its rules,
        and what has a priority above the default one."""
        due = [key for ready_ms, key in self.scheduled if ready_ms <= self.time_ms]
        del self.scheduled[: len(due)]
        for key in due:
            message = self.messages[key]
            self._move(message, Place.READY)
            if outcome_rules.come_back(self, message):
                continue
            if message.acquired:
                self._put_back(message)
            elif message.level > LEVEL_DEFAULT:
                self.returned.append(message)
            else:
                self._append_last(message)
        self._put_front()
        if due:
            self._settle_down()

    def _give_attributes(self, message: Message, record: bytes) -> None:
        """Sets its priority, and when it expires: both stay as they are now."""
        ttl = self.limits["message_ttl_ms"]
        times = [ttl] if ttl >= 0 else []
        if self.in_force(2):
            traits = traits_of(record)
            if traits.priority is not None:
                message.level = min(traits.priority, LEVEL_MAX)
            if traits.expiration_ms is not None:
                times.append(traits.expiration_ms)
            message.group = group_of(record)
        if times:
            message.due_ms = self.time_ms + max(1, min(times))

    def _expire(self) -> None:
        """Expires what stands at a head and whose time is over, until there is no such message:
        first what came back, last the default level. One that leaves may make way for another."""
        while True:
            beside = [self.levels[level] for level in sorted(self.levels, reverse=True)]
            heads = [source for source in (self.returned, *beside, self.fresh) if source]
            late = [
                source
                for source in heads
                if source[0].due_ms is not None and source[0].due_ms <= self.time_ms
            ]
            if not late:
                return
            self._leave(late[0].popleft(), Place.EXPIRED)

    def _sweep(self) -> None:
        """Lets what has expired leave wherever it stands, in the order of the log, where the queue
        says so; not again within SWEEP_MS."""
        if self.limits.get("expire_by_due", 0) <= 0 or self.time_ms < self.swept_ms + SWEEP_MS:
            return
        late = [m for m in self.ready() if 0 < (m.due_ms or 0) <= self.time_ms and not m.avoids]
        if not late:
            return
        self.swept_ms = self.time_ms
        self._take_out(late)
        for message in sorted(late, key=lambda m: m.key):
            self._leave(message, Place.EXPIRED)
        self._expire()

    def _take(self, message: Message | None = None) -> Message:
        """The next message: what came back goes before what is fresh, then by priority; or one that
        not everybody gets."""
        if self.in_order:
            self._check_order()
        if message is None:
            message = self._pop()
        if message.outs != message.acquired:
            self.fail(
                f"{name_of(message.identity)} was out {message.outs} times,"
                f" and counts {message.acquired}"
            )
        self._check_group(message)
        message.outs += 1
        self.delivered += 1
        if message.acquired:
            self.redelivered += 1
        return message

    def _check_group(self, message: Message) -> None:
        """A message of a group is given when all that were published before it are gone."""
        first = message if message.group is None else self.in_group[message.group][0]
        if first is not message:
            self.fail(f"{name_of(message.identity)} is given before {name_of(first.identity)}")

    def _check_order(self) -> None:
        """Checks the promise of a single active consumer with prefetch 1: the next message is the
        oldest that is not settled."""
        if self.places[Place.HELD]:
            self.fail("a message is given, and the one before it is not settled")
        ready = [message.key for message in self.returned]
        if self.fresh:
            ready.append(self.fresh[0].key)
        if min(ready) != ready[0]:
            self.fail(f"{ready[0]} is given before {min(ready)}")

    def _give(self, consumer: Consumer, avoided: Message | None = None) -> Message:
        message = self._take(avoided)
        message_id = consumer.next_id
        consumer.next_id += 1
        consumer.held[message_id] = message
        self._move(message, Place.HELD)
        message.holder = (consumer.session, consumer.number, message_id)
        self.hand_outs.append(
            (
                consumer.session,
                consumer.number,
                message_id,
                message.key,
                message.acquired,
                message.failed,
                message.said,
            )
        )
        return message

    def _return(self, message: Message, failed: int, counted: int, due_ms: int = 0) -> None:
        """Behind everything else that came back; or out of the queue, over the limit. `failed`: its
        client says so; `counted`: the queue does; `due_ms`: until when it is to wait."""
        self.returns += 1
        message.acquired += 1
        message.failed += counted
        if 0 <= self.delivery_limit < message.failed:
            self._leave(message, Place.LIMIT)
            return
        delay = due_ms - self.time_ms if due_ms else self._retry_delay(message, failed)
        if delay > 0:
            self._schedule(message, self.time_ms + delay)
            return
        self._move(message, Place.READY)
        if not outcome_rules.come_back(self, message):
            self._put_back(message)

    def _retry_delay(self, message: Message, failed: int) -> int:
        """For how long what has come back waits: longer with each failure."""
        kind = self.limits["delayed_retry"]
        if kind <= 0 or (kind == 2 and not failed) or (kind == 3 and failed):
            return 0
        least, most = self.limits["delayed_retry_min_ms"], self.limits["delayed_retry_max_ms"]
        return min(least * max(1, message.failed), most)

    def _requeue(self, message: Message, failed: int, counted: int) -> None:
        """Without a limit: behind all, unless it is in a group, or waits for a retry before."""
        self.returns += 1
        message.acquired += 1
        message.failed += counted
        delay = self._retry_delay(message, failed) if self.counts_returns else 0
        if delay > 0:
            self._schedule(message, self.time_ms + delay)
            return
        self._move(message, Place.READY)
        if outcome_rules.come_back(self, message):
            return
        if message.group is None:
            self._append_last(message)
        else:
            self._restore(message)

    def _return_held(self, consumer: Consumer, failed: int) -> None:
        for message_id in sorted(consumer.held):
            counted = 1 if self.counts_returns else failed
            self._return(consumer.held[message_id], failed, counted)
        consumer.held.clear()

    def _release(self, consumer: Consumer, kind: int, flags: int, first: int, last: int) -> None:
        failed, untried = flags & 1, flags & 2
        counted = int(not untried) if self.counts_returns else failed
        if last - first < len(consumer.held):
            ids = [i for i in range(first, last + 1) if i in consumer.held]
        else:
            ids = sorted(i for i in consumer.held if first <= i <= last)
        for message_id in ids:
            message = consumer.held.pop(message_id)
            by_rule = not self.limits.get("requeue_position", 0) and self.delivery_limit < 0
            if kind == batch.CMD_RETURN and by_rule and (self.counts_returns or not failed):
                self._requeue(message, failed, counted)
                continue
            if kind == batch.CMD_RETURN:
                self._return(message, failed, counted)
                continue
            self.released.append((consumer.session, consumer.number, message_id))
            if kind == batch.CMD_SETTLE:
                self._move(message, Place.SETTLED)
            else:
                self._leave(message, Place.REJECTED)

    def _get(self, session: Session, *, settled: bool) -> None:
        self.used_ms = self.time_ms
        if self.single_active:
            self._answer(session, APPLIED_REJECTED, "single_active")
        elif not self._has_ready():
            self._answer(session, APPLIED_OK, [])
        else:
            poller = session.consumers.get(0)
            if poller is None:
                poller = session.consumers[0] = Consumer(session.id, 0, 0, 0)
            message_id = poller.next_id
            message = self._give(poller)
            if settled:
                del poller.held[message_id]
                self._move(message, Place.SETTLED)
            self._expire()
            self._answer(session, APPLIED_OK, [message_id, len(self.ready())])

    # Consumers.

    def consumers(self) -> Iterator[Consumer]:
        """Yields all, in the order of their sessions and of their registration."""
        for session in self.sessions.values():
            yield from session.consumers.values()

    def consumer_count(self) -> int:
        """Returns the number of consumers that are not cancelled."""
        return sum(1 for c in self.consumers() if c.number and not c.cancelled)

    def _checkout(self, session: Session, number: int, spec: CheckoutSpec) -> None:
        if number == 0 or number in session.consumers:
            self._answer(session, APPLIED_REJECTED, "consumer_exists")
            return
        prefetch = int(spec.get("prefetch", 0))
        unlimited = prefetch <= 0 or spec.get("no_ack", False)
        consumer = Consumer(
            session.id,
            number,
            WINDOW_UNLIMITED if unlimited else prefetch,
            int(spec.get("priority", 0)),
        )
        if spec.get("credited") and self.in_force(outcome_rules.SINCE):
            consumer.window, consumer.limit = outcome_rules.WINDOW_CREDITED, 0
        session.consumers[number] = consumer
        self._look_at_window(consumer)
        if self.single_active:
            self._wait(consumer)
        self._answer(session, APPLIED_OK, None)

    def _look_at_window(self, consumer: Consumer) -> None:
        if consumer.window > 1:
            self.in_order = False

    def _retire(self, consumer: Consumer) -> None:
        """Nothing is given to it any more; it stays until it has settled what it holds."""
        if consumer.number and not consumer.cancelled:
            self.used_ms = self.time_ms
        consumer.cancelled = True
        if consumer in self.waiting:
            self.waiting.remove(consumer)

    def _end(self, session: Session) -> None:
        """The session is over: what its consumers hold was delivered in vain."""
        del self.sessions[session.id]
        self.over.add(session.id)
        for consumer in session.consumers.values():
            self._retire(consumer)
            self._return_held(consumer, 1)

    def _end_all(self, sessions: Iterator[Session]) -> None:
        for session in list(sessions):
            self._end(session)

    def _tick(self) -> None:
        """Nodes that are away for too long lose what they hold; nobody is to blame."""
        timeout_ms = self.limits.get("consumer_disconnected_timeout_ms", -1)
        if timeout_ms < 0:
            timeout_ms = self.disconnect_timeout_ms
        for node, state in self.away.items():
            if not state[1] and self.time_ms >= state[0] + timeout_ms:
                state[1] = 1
                for consumer in self.consumers():
                    if consumer.node == node:
                        self._return_held(consumer, 0)

    def _reservation(self, session: Session, op: ReservationOp) -> None:
        if self.chosen is None or not self.chosen.apply(self, session, op):
            self.fail("this model has no reservations")

    def _expire_reservations(self) -> None:
        """At TICK, before nodes are looked at."""

    def _see_reservations_go(self, before: int) -> None:
        if self.reservation_count() < before:
            self.used_ms = self.time_ms

    def reservation_count(self) -> int:
        """Reservations and leases of the queue."""
        return 0

    # Serving.

    def _settle_down(self) -> None:
        """After every command: who is active, who waits to be served, and serving them."""
        self._put_front()
        if self.single_active:
            self._activate()
        for session in self.sessions.values():
            for consumer in list(session.consumers.values()):
                if not self._may_be_served(consumer):
                    consumer.waits_since = 0
                    if consumer.cancelled and not consumer.held:
                        del session.consumers[consumer.number]
                elif not consumer.waits_since:
                    self._stand_last(consumer)
        self._expire()
        if self.avoided:
            outcome_rules.serve_avoided(self)
        while self._has_ready():
            queue = [consumer for consumer in self.consumers() if consumer.waits_since]
            if not queue:
                break
            self._turn(queue)
        keep_length(self)

    def _may_be_served(self, consumer: Consumer) -> bool:
        return (
            consumer.number > 0
            and not consumer.cancelled
            and consumer.node not in self.away
            and consumer.room() > 0
            and (not self.single_active or (consumer is self.active and not self.quiescing))
        )

    def _stand_last(self, consumer: Consumer) -> None:
        self._moments += 1
        consumer.waits_since = self._moments
        consumer.passed.clear()

    def _turn(self, queue: list[Consumer]) -> None:
        """Serves the one of the highest priority that waits the longest."""
        highest = max(consumer.priority for consumer in queue)
        rivals = [consumer for consumer in queue if consumer.priority == highest]
        consumer = min(rivals, key=lambda c: c.waits_since)
        ready, average, version = self._available(), self._average_held(), self._version()
        here = (ready, len(rivals), average)
        share, completes = turns.share_of(consumer, *here, self.time_ms, version)
        if version >= 3:
            consumer.turn_ms = self.time_ms
            average = max(average, consumer.quick_turn)
        given = 0
        while given < share and consumer.room() > 0:
            if not self._has_ready():
                break
            came_back = len(self.returned)
            first = self.returned[0] if self.returned else None
            message = self._give(consumer)
            given += 1
            if first is not None and message is not first:
                self.fail(f"{message.key} is fresh, and {came_back} returned ones wait")
            self._expire()
            if message.place is not Place.HELD or len(consumer.held) > consumer.window:
                self.fail(f"{name_of_consumer(consumer)} holds {len(consumer.held)}")
        self._check_turn(consumer, given, ready, average)
        goes_on = completes and given < share
        consumer.goes_on = goes_on and self._may_be_served(consumer)
        if not self._may_be_served(consumer):
            consumer.waits_since = 0
        elif not goes_on:
            self._stand_last(consumer)

    def _average_held(self) -> int:
        held = self.places[Place.HELD] + self.places[Place.RESERVED]
        return held // max(1, self.consumer_count() + self.reservation_count())

    def _check_turn(self, consumer: Consumer, given: int, ready: int, average: int) -> None:
        """Nobody of a higher priority could have had these; nobody of the same one is passed over
        twice by the same one, nor for more than a share, or than others have to do meanwhile."""
        me = (consumer.session, consumer.number)
        rivals = 0
        for other in self.consumers():
            if other is consumer or not self._may_be_served(other):
                continue
            if other.priority > consumer.priority:
                self.fail(f"{me} was served, and {name_of_consumer(other)} has priority and credit")
            if other.priority == consumer.priority:
                rivals += 1
                # A turn that goes on is no other one.
                other.passed[me] = other.passed.get(me, 0) + (not consumer.goes_on)
                if other.passed[me] > 1:
                    self.fail(f"{name_of_consumer(other)} has credit and saw two turns of {me}")
        if turns.is_too_long(consumer, given, ready, rivals, average):
            self.fail(f"{me} got {given} of {ready} at once, and {rivals} others wait")

    # Single active consumer.

    def _wait(self, consumer: Consumer) -> None:
        self._moments += 1
        consumer.arrived = self._moments
        self.waiting.append(consumer)

    def _activate(self) -> None:
        """The active one stays unless it is cancelled or its node is suspected, or somebody of a
        higher priority waits and it has settled all it holds: until then it gets nothing new. In
        strict mode it stays in any case for as long as it holds something."""
        active = self.active
        if active is not None and (active.cancelled or active.node in self.away):
            if self.strict and active.held:
                return
            active.lost = True
            if not active.cancelled:
                self._wait(active)
            self.active = active = None
        if self.reservation_count():
            return
        self.quiescing = False
        able = [consumer for consumer in self.waiting if consumer.node not in self.away]
        if active is not None:
            if not any(consumer.priority > active.priority for consumer in able):
                return
            if active.held:
                self.quiescing = True
                return
            self._wait(active)
        if not able:
            return
        highest = max(consumer.priority for consumer in able)
        chosen = next(consumer for consumer in able if consumer.priority == highest)
        self.waiting.remove(chosen)
        self.active = chosen
        chosen.lost = False
        self._check_activation(chosen)

    def _check_activation(self, chosen: Consumer) -> None:
        """Nobody who waits comes before it, and nobody who was active before can still work."""
        for other in self.consumers():
            if other is chosen or not other.number:
                continue
            if not other.held:
                other.lost = False
            if other in self.waiting and other.node not in self.away:
                mine, theirs = (chosen.priority, -chosen.arrived), (other.priority, -other.arrived)
                if theirs > mine:
                    self.fail(
                        f"{name_of_consumer(chosen)} became active before {name_of_consumer(other)}"
                    )
            if other.held and (self.strict or not (other.cancelled or other.lost)):
                self.fail(
                    f"{name_of_consumer(chosen)} became active, and {name_of_consumer(other)} still"
                    f" holds {len(other.held)}"
                )
