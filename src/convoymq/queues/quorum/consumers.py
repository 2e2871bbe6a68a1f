# cython: annotation_typing=False
"""The consumers of a quorum queue: who is served next, and who may be served at all.

| state     | served | leaves it by                                               |
|-----------|--------|------------------------------------------------------------|
| UP        | yes    | cancel; quiescing or waiting (single active consumer only) |
| WAITING   | no     | activation; cancel                                         |
| QUIESCING | no     | last settle -> WAITING; contender gone -> UP; cancel       |
| CANCELLED | no     | last settle or return -> removed                           |
| POLLER    | no     | (number 0: holds what basic.get took) end of the session   |

A consumer of a suspected node keeps its state and is not served until NODE_UP.
One with a filter is not in the service queue: its node picks messages for it (`filtering`).

Single active consumer: with `single_active_strict` (the default) an active consumer that is
cancelled or whose node is suspected stays the active one for as long as it holds messages: the
next one begins when they are settled or back in the queue, so with prefetch 1 nothing overtakes
them. Without, the next one begins at once (RabbitMQ's rule). See ADR 0027. While there is a
reservation, it is who is active.

Invariants: a consumer is in the service queue exactly when it is UP, its node is not suspected and
it has credit and no filter; with single active consumer at most one is UP or QUIESCING.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from convoymq.model import trace as words
from convoymq.queues.group_machine import GroupMachine
from convoymq.queues.quorum import runs, tracing
from convoymq.queues.sessions import Packed, Session
from convoymq.replication.machine import EFFECT_ACTIVITY, NEVER

UP = 0
WAITING = 1
QUIESCING = 2
CANCELLED = 3
POLLER = 4

#: Window of a consumer that asks for no limit, and of no_ack (the channel settles as it sends).
WINDOW_UNLIMITED = 2000

#: Unsettled messages of a consumer with credit: bounds what it may ask for.
WINDOW_CREDITED = 32_768

#: The version that brought credit, and what consumers say of messages (ADR 0200).
OUTCOMES_SINCE = 6
#: The version since which a turn completes what its consumer settles at once (ADR 0003).
BATCHES_SINCE = 3
#: Where consumers are busy or quick, a turn is at most so many messages.
BUSY_TURN_MAX = 64
#: Who settles within this time of its last turn may have twice as many in its next one.
QUICK_MS = 100

TAKEN = 2
"""Of the effect ACTIVITY, in place of whether: another consumer has the link of this one now."""

CONSUMER_EXISTS = "consumer_exists"
EXCLUSIVE = "exclusive"
FILTER_OF_SINGLE_ACTIVE = "filter"


class Consumer:
    """One consumer and what it holds."""

    __slots__ = (
        "arguments", "checked_out", "exclusive", "filtered", "limit", "link", "next_id", "no_ack",
        "number", "priority", "queued", "session", "settled_at_once", "state", "tag", "turn_limit",
        "turn_ms", "window",
    )  # fmt: skip

    def __init__(self, session: QueueSession, number: int, state: int) -> None:
        self.session = session
        self.number = number
        self.state = state
        self.tag = ""
        self.window = 0
        self.no_ack = False
        self.exclusive = False
        self.priority = 0
        self.arguments: dict[str, object] = {}
        self.next_id = 0
        #: The message id below which messages are handed out; -1: the window alone says.
        self.limit = -1
        #: Key of its link, which may go on without its session; empty: none (`links`).
        self.link = b""
        #: It gets what its node picks.
        self.filtered = False
        self.queued = False
        self.checked_out = runs.CheckedOut()
        #: Messages of the last SETTLE that settled some; 0 in version 1.
        self.settled_at_once = 0
        #: Messages that a turn of it may have since it settles quickly, 1 … BUSY_TURN_MAX; and the
        #: logged time of its last turn. Both since version 3.
        self.turn_limit = 1
        self.turn_ms = 0

    def room(self) -> int:
        """Returns how many messages may be handed out."""
        room = self.window - self.checked_out.messages
        if self.limit < 0:
            return room
        credit = self.limit - self.next_id
        return min(room, credit)

    def settled(self, messages: int, time_ms: int, version: int) -> None:
        """Takes note that some messages were settled by one command."""
        if version >= 2:
            self.settled_at_once = messages
        if version >= BATCHES_SINCE:
            if time_ms - self.turn_ms <= QUICK_MS:
                self.turn_limit = min(2 * self.turn_limit, BUSY_TURN_MAX)
            else:
                self.turn_limit = max(self.turn_limit // 2, 1)

    def turn_of(self, time_ms: int) -> int:
        """Returns `turn_limit`, and 0 of one that may be slow: it holds messages of a turn that is
        over for longer than QUICK_MS."""
        if self.checked_out.messages and time_ms - self.turn_ms > QUICK_MS:
            return 0
        return self.turn_limit

    def missing_in_batch(self) -> int:
        """Returns how many messages it lacks of as many as it settles at once, at least 1. It must
        have settled some."""
        return self.settled_at_once - self.checked_out.messages % self.settled_at_once

    def pack(self, version: int) -> list[object]:
        """Plain values for the snapshot."""
        packed: list[object] = [
            self.number,
            self.state,
            self.tag,
            self.window,
            self.no_ack,
            self.exclusive,
            self.priority,
            self.arguments,
            self.next_id,
            self.checked_out.pack(),
        ]
        if version >= 2:
            packed.append(self.settled_at_once)
        if version >= BATCHES_SINCE:
            packed += [self.turn_limit, self.turn_ms]
        if version >= OUTCOMES_SINCE:
            packed += [self.limit, self.link, self.filtered]
        return packed

    def unpack(self, packed: list[Any]) -> None:
        """Takes over what `pack` gave; number and state are known."""
        self.tag = packed[2]
        self.window = packed[3]
        self.no_ack = packed[4]
        self.exclusive = packed[5]
        self.priority = packed[6]
        self.arguments = packed[7]
        self.next_id = packed[8]
        self.checked_out.unpack(packed[9])
        if len(packed) > 10:
            self.settled_at_once = packed[10]
        if len(packed) > 11:
            self.turn_limit, self.turn_ms = packed[11:13]
        if len(packed) > 13:
            self.limit, self.link = packed[13:15]
        if len(packed) > 15:
            self.filtered = packed[15]


class QueueSession(Session):
    """A session and its consumers."""

    __slots__ = ("consumers",)

    def __init__(self, session_id: int) -> None:
        super().__init__(session_id)
        self.consumers: dict[int, Consumer] = {}


class Consumers:
    """The consumers of all sessions of a machine."""

    def __init__(self, machine: GroupMachine) -> None:
        self.machine = machine
        self.single_active = bool(machine.settings["single_active"])
        self.strict = bool(machine.settings["single_active_strict"])
        #: Consumers with credit, by priority, the next to serve on the left. No level is empty.
        self.levels: dict[int, deque[Consumer]] = {}
        self.priorities: list[int] = []
        #: Single active consumer: who is UP or QUIESCING, or (strict) CANCELLED and still holds
        #: messages; and who waits, in order of arrival.
        self.active: Consumer | None = None
        self.waiting: list[Consumer] = []
        #: Single active consumer: a reservation has the queue.
        self.is_reserved = False
        #: Subscribed consumers and reservations.
        self.count = 0
        #: How often consumers came, went, or changed places with the active one, since this
        #: machine was made; no part of the state.
        self.changes = 0
        #: When a consumer last went, or basic.get last asked (logged time).
        self.last_active_ms = 0

    # ---------------------------------------------------------------- the service queue

    def serve_last(self, consumer: Consumer) -> None:
        """Puts a consumer at the end of the service queue, if it may be served and is not in it."""
        if (
            consumer.queued
            or consumer.filtered
            or consumer.state != UP
            or consumer.room() <= 0
            or consumer.session.node in self.machine.down_nodes
        ):
            return
        assert self.active is consumer or not self.single_active, "a consumer of two is not active"
        consumer.queued = True
        level = self.levels.get(consumer.priority)
        if level is None:
            self.levels[consumer.priority] = deque((consumer,))
            self.priorities = sorted(self.levels, reverse=True)
        else:
            level.append(consumer)

    def serve_no_more(self, consumer: Consumer) -> None:
        """Takes a consumer out of the service queue."""
        if consumer.queued:
            consumer.queued = False
            level = self.levels[consumer.priority]
            level.remove(consumer)
            if not level:
                self.drop_level(consumer.priority)
        assert not consumer.queued, "a consumer is still in the service queue"

    def drop_level(self, priority: int) -> None:
        """Removes a priority that no consumer with credit has any more."""
        assert not self.levels[priority], "a level of the service queue is not empty"
        del self.levels[priority]
        self.priorities = sorted(self.levels, reverse=True)

    def next_without(self, others: Sequence[tuple[int, int]]) -> Consumer | None:
        """Returns the consumer that is served next, of those that are not among the others."""
        for priority in self.priorities:
            for consumer in self.levels[priority]:
                if (consumer.session.id, consumer.number) not in others:
                    return consumer
        return None

    def restore_queue(self, order: list[Consumer]) -> None:
        """Sets the service queue of a snapshot."""
        assert not self.levels, "a service queue is restored over another"
        for consumer in order:
            assert consumer.state == UP, "a consumer that is not up is in the service queue"
            consumer.queued = True
            self.levels.setdefault(consumer.priority, deque()).append(consumer)
        self.priorities = sorted(self.levels, reverse=True)

    def refresh(self, consumer: Consumer) -> None:
        """After a consumer's holdings or window changed."""
        if consumer.state == UP:
            if not consumer.queued:
                self.serve_last(consumer)
            elif consumer.room() <= 0:
                self.serve_no_more(consumer)
        if consumer.checked_out.messages:
            return
        if consumer.state == CANCELLED:
            consumer.session.consumers.pop(consumer.number, None)
        if consumer is self.active and (consumer.state != UP or self.machine.down_nodes):
            self.choose_active()

    # ---------------------------------------------------------------- they come and go

    def refusal(self, session: QueueSession, number: int, spec: Packed) -> str | None:
        """Returns why a consumer cannot be added; None when it can."""
        if number == 0 or number in session.consumers:
            return CONSUMER_EXISTS
        if self.single_active and spec.get("filtered"):
            return FILTER_OF_SINGLE_ACTIVE
        if self.machine.settings["exclusive_honoured"] and self.count:
            others = [c for c in self.all() if c.state < CANCELLED]
            if bool(spec.get("exclusive", False)) or any(other.exclusive for other in others):
                return EXCLUSIVE
        return None

    def add(self, session: QueueSession, number: int, spec: Packed) -> Consumer:
        """Registers a consumer. It is served when `begin` says so."""
        assert number not in session.consumers, "a consumer is registered twice"
        assert number > 0, "number 0 is that of basic.get"
        consumer = Consumer(session, number, UP)
        consumer.tag = str(spec.get("tag", ""))
        consumer.no_ack = bool(spec.get("no_ack", False))
        consumer.priority = int(spec.get("priority", 0))
        consumer.arguments = dict(spec.get("args") or {})
        honoured = bool(self.machine.settings["exclusive_honoured"])
        consumer.exclusive = bool(spec.get("exclusive", False)) and honoured
        prefetch = int(spec.get("prefetch", 0))
        consumer.window = WINDOW_UNLIMITED if prefetch <= 0 or consumer.no_ack else prefetch
        if self.machine.version >= OUTCOMES_SINCE and spec.get("credited"):
            consumer.window = WINDOW_CREDITED
            consumer.limit = 0
            consumer.filtered = bool(spec.get("filtered"))
        session.consumers[number] = consumer
        self.count += 1
        self.changes += 1
        tracing.owner(self.machine.trace, words.CAME, consumer)
        return consumer

    def begin(self, consumer: Consumer) -> None:
        """From now on a new consumer is served, when its turn comes."""
        assert not consumer.checked_out.messages or consumer.link, "a consumer begins with messages"
        assert not consumer.queued, "a consumer begins twice"
        if consumer is self.active:
            self._tell_activity(consumer, True)
            self.serve_last(consumer)
            self.choose_active()
        elif self.single_active:
            consumer.state = WAITING
            self.waiting.append(consumer)
            self._tell_activity(consumer, False)
            self.choose_active()
        else:
            self.serve_last(consumer)

    def succeed(self, before: Consumer, consumer: Consumer) -> None:
        """A consumer has the messages of one that ended; it is active in its place."""
        assert before.state == CANCELLED, "a consumer has a successor, and goes on"
        if before is self.active:
            self.active = consumer

    def poller(self, session: QueueSession) -> Consumer:
        """Returns the holder of what a session took by basic.get."""
        poller = session.consumers.get(0)
        if poller is None:
            poller = session.consumers[0] = Consumer(session, 0, POLLER)
            tracing.owner(self.machine.trace, words.CAME, poller)
        assert poller.state == POLLER, "number 0 is a subscribed consumer"
        return poller

    def set_window(self, consumer: Consumer, window: int) -> None:
        """Sets how many messages a consumer may hold from now on."""
        assert consumer.state < CANCELLED, "a consumer without deliveries gets credit"
        consumer.window = window
        self.refresh(consumer)

    def grant(self, consumer: Consumer, limit: int) -> None:
        """Sets the message id below which a consumer with credit gets messages."""
        assert consumer.limit >= 0, "a consumer with a window gets credit"
        consumer.limit = limit
        self.refresh(consumer)

    def cancel(self, consumer: Consumer) -> None:
        """No more deliveries; the record stays while the consumer holds messages."""
        assert consumer.state < CANCELLED, "a consumer is cancelled twice"
        self.serve_no_more(consumer)
        if consumer.state == WAITING:
            self.waiting.remove(consumer)
        consumer.state = CANCELLED
        tracing.owner(self.machine.trace, words.GONE, consumer)
        self._left()
        if not consumer.checked_out.messages:
            del consumer.session.consumers[consumer.number]
        if self.single_active:
            self.choose_active()

    def end(self, consumer: Consumer) -> bool:
        """The consumer's session is over; what it holds has to be returned, or kept. True when it
        was not cancelled before. Who is active next is another question: `choose_active`."""
        self.serve_no_more(consumer)
        if consumer.state == WAITING:
            self.waiting.remove(consumer)
        if consumer is self.active and not consumer.link:
            self.active = None
        if consumer.state < CANCELLED:
            self._left()
        ended = consumer.state != CANCELLED
        consumer.state = CANCELLED
        return ended

    def _left(self) -> None:
        self.count -= 1
        self.changes += 1
        self.last_active_ms = self.machine.time_ms
        assert self.count >= 0, "more consumers went than came"

    # ---------------------------------------------------------------- reservations

    def reservation_came(self) -> None:
        """A reservation counts as a consumer; with single active consumer it is the active one."""
        assert not self.is_reserved, "two reservations are active"
        self.count += 1
        self.is_reserved = self.single_active
        assert not (self.single_active and self.active is not None), "two are active"

    def reservation_went(self) -> None:
        """A reservation is over."""
        assert self.is_reserved == self.single_active, "a reservation was not the active one"
        self._left()
        self.is_reserved = False
        if self.single_active:
            self.choose_active()

    # ---------------------------------------------------------------- single active consumer

    def best_waiting(self) -> Consumer | None:
        """Single active consumer: highest priority among those whose node is up, then arrival."""
        best: Consumer | None = None
        for consumer in self.waiting:
            if consumer.session.node in self.machine.down_nodes:
                continue
            if best is None or consumer.priority > best.priority:
                best = consumer
        return best

    def choose_active(self) -> None:
        """Single active consumer: swaps, quiesces or activates as the rules ask for it now."""
        assert self.single_active, "the queue serves all consumers"
        if self.is_reserved:
            assert self.active is None, "a consumer and a reservation are active"
            return
        active = self.active
        assert active is None or active.state != WAITING, "who waits is the active one"
        if active is not None and (
            active.state == CANCELLED or active.session.node in self.machine.down_nodes
        ):
            self.serve_no_more(active)
            if self.strict and active.checked_out.messages:
                return
            if active.state != CANCELLED:
                self._tell_activity(active, False)
                active.state = WAITING
                self.waiting.append(active)
            self.active = active = None
        best = self.best_waiting()
        if active is not None:
            if best is None or best.priority <= active.priority:
                if active.state == QUIESCING:
                    active.state = UP
                    self._tell_activity(active, True)
                    self.serve_last(active)
                return
            if active.state == UP:
                self._tell_activity(active, False)
            self.serve_no_more(active)
            if active.checked_out.messages:
                active.state = QUIESCING
                return
            active.state = WAITING
            self.waiting.append(active)
            self.active = None
        assert self.active is None, "two are active"
        if best is not None:
            assert best.state == WAITING, "who takes over did not wait"
            self.waiting.remove(best)
            best.state = UP
            self.active = best
            self._tell_activity(best, True)
            self.serve_last(best)

    def _tell_activity(self, consumer: Consumer, active: bool) -> None:
        """Has the consumer's client told. Nodes of older releases do not understand it."""
        self.changes += 1
        machine = self.machine
        if machine.version >= OUTCOMES_SINCE:
            machine.effects.append((EFFECT_ACTIVITY, consumer.session.id, consumer.number, active))

    def tell_activity(self, session: QueueSession) -> None:
        """Has a session's client told of all its consumers."""
        if self.single_active:
            for consumer in session.consumers.values():
                if consumer.state < CANCELLED:
                    self._tell_activity(consumer, consumer.state == UP)

    # ---------------------------------------------------------------- looking at it

    def all(self) -> list[Consumer]:
        """Returns every consumer, pollers and cancelled ones too."""
        sessions = self.machine.sessions.values()
        return [consumer for session in sessions for consumer in session.consumers.values()]

    def oldest_live(self) -> int:
        """Returns the first entry index of what consumers hold, NEVER when they hold nothing. It is
        asked for again and again, with thousands of consumers."""
        oldest = NEVER
        for session in self.machine.sessions.values():
            for consumer in session.consumers.values():
                held = consumer.checked_out
                if held.messages:
                    oldest = min(oldest, held.first_index())
        return oldest

    def find(self, session: int, number: int) -> Consumer | None:
        """Returns a consumer of a session; None when it is unknown."""
        known = self.machine.sessions.get(session)
        return known.consumers.get(number) if known is not None else None

    def service_queue(self) -> list[tuple[int, int]]:
        """Returns (session, consumer number) in the order in which they will be served."""
        return [
            (consumer.session.id, consumer.number)
            for priority in self.priorities
            for consumer in self.levels[priority]
        ]

    def positions(self, session_node: int) -> list[tuple[int, int, int]]:
        """Returns (session, consumer, next message id) of the subscribed consumers of a node."""
        return [
            (consumer.session.id, consumer.number, consumer.next_id)
            for consumer in self.all()
            if consumer.session.node == session_node and consumer.state != POLLER
        ]

    def position(self, session: int, number: int) -> int:
        """Returns a consumer's next message id; 0 when it is unknown."""
        found = self.find(session, number)
        return found.next_id if found is not None else 0

    def infos(self) -> list[dict[str, object]]:
        """Returns the fields of each consumer that the management API shows."""
        names = ("up", "waiting", "quiescing", "cancelled", "poller")
        made: list[dict[str, object]] = []
        for consumer in self.all():
            if consumer.state == POLLER:
                continue
            status = names[consumer.state]
            if consumer.session.node in self.machine.down_nodes:
                status = "suspected_down"
            elif self.single_active and consumer.state == UP:
                status = "single_active"
            made.append(
                {
                    "session": consumer.session.id,
                    "number": consumer.number,
                    "consumer_tag": consumer.tag,
                    "prefetch_count": consumer.window,
                    "ack_required": not consumer.no_ack,
                    "priority": consumer.priority,
                    "active": consumer.state == UP,
                    "activity_status": status,
                    "unacked": consumer.checked_out.messages,
                }
            )
        return made
