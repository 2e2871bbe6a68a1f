"""The referee of one queue: a naive model that follows the committed log, message by message.

It sees every committed entry once, with the effects that the first replica to apply it produced,
and every delivery and answer that a client got. It keeps its own session table and the place of
every message, and knows nothing of runs, service queues or snapshots. What it asserts:

- a message is accepted once, whatever was resent; the machine's counters agree;
- fresh messages are handed out in the order of the log;
- nothing is handed out that is checked out to a consumer whose session still runs and whose node
  was not given up, nor what was settled or dropped;
- a message is dropped only by reject without requeue, the delivery limit, or purge;
- what a client receives is what was checked out to it under that message id, and committed;
- what a client was told to be safe is in the log, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from convoymq.cluster.interfaces import EFFECT_DELIVER, Effect
from convoymq.kernels import batch
from convoymq.queues.quorum.invariants import check_invariants

Key = tuple[int, int, int]
"""Place of a message in the log: entry index, command offset, record."""


class InvariantBroken(AssertionError):
    """Something happened that must never happen."""


class Place(Enum):
    """Where a message is."""

    READY = "ready"
    HELD = "held"
    STAGED = "staged"
    SETTLED = "settled"
    REJECTED = "rejected"
    LIMIT = "delivery limit"
    PURGED = "purged"


@dataclass(slots=True)
class Message:
    """What the referee knows of a message."""

    identity: bytes
    place: Place = Place.READY
    holder: tuple[int, int, int] | None = None
    """(session, consumer, message id)"""
    acquired: int = 0
    failed: int = 0
    loose: bool = False
    """Returned by a rule that depends on time: its counts are taken from the machine."""


def identity_of(record: bytes) -> bytes:
    """The first 12 bytes of a record's body: publisher and number."""
    at = 1 + record[0]
    at += 1 + record[at]
    header = int.from_bytes(record[at + 3 : at + 7], "big")
    at += 7 + header + 1
    return record[at + 7 : at + 19]


class Referee:
    """The model of one group's queue."""

    def __init__(self, group: int, delivery_limit: int, disconnect_timeout_ms: int) -> None:
        self.group = group
        self.delivery_limit = delivery_limit
        self.disconnect_timeout_ms = disconnect_timeout_ms
        self.index = 0
        self.time_ms = 0
        self.messages: dict[Key, Message] = {}
        self.by_identity: dict[bytes, Key] = {}
        self.held: dict[tuple[int, int], dict[int, Key]] = {}
        """(session, consumer) -> message id -> message."""
        self.was: dict[tuple[int, int, int], Key] = {}
        """(session, consumer, message id) -> message, for ever."""
        self.seqs: dict[int, int] = {}
        self.ended: set[int] = set()
        self.down_ever: set[int] = set()
        """Nodes that were suspected by the log: their messages may go to others."""
        self.away: dict[int, int | None] = {}
        """Nodes that are suspected -> since when; None = their messages were returned."""
        self.given_up: set[int] = set()
        """Those whose messages came back in the last entry."""
        self.places: dict[Place, int] = dict.fromkeys(Place, 0)
        self.last_fresh: Key = (0, 0, 0)
        self.purging = False
        """The last entry held a purge."""
        self.swept: list[Key] = []
        """What came back in the last entry because sessions ended."""

    def fail(self, text: str) -> None:
        """Stops the run."""
        raise InvariantBroken(f"queue {self.group}, entry {self.index}: {text}")

    def _move(self, message: Message, place: Place) -> None:
        self.places[message.place] -= 1
        self.places[place] += 1
        message.place = place

    # The log.

    def on_entry(self, index: int, data: bytes, effects: list[Effect]) -> None:
        """A committed entry of commands, in order of the log."""
        self.index = index
        self.time_ms = max(self.time_ms, batch.Entry(data).time_ms)
        self.purging = False
        self.given_up.clear()
        self.swept.clear()
        ending: list[int] = []
        purged: list[Message] = []
        before_ended = len(self.ended)
        for kind, flags, session, seq, count, arg, offset, _length in batch.commands(data):
            if session and not self._accepts(session, seq):
                continue
            if kind == batch.CMD_ENQUEUE:
                self._enqueue(index, offset, count, data)
            elif kind in (batch.CMD_SETTLE, batch.CMD_RETURN, batch.CMD_DISCARD):
                ranges = batch.ranges(data, offset, count)
                for i in range(0, len(ranges), 2):
                    self._release(kind, flags, session, arg, ranges[i], ranges[i + 1])
            elif kind in (batch.CMD_STAGE, batch.CMD_TICK):
                self._other(kind, session, seq, batch.command_body(data, offset))
                if kind == batch.CMD_TICK:
                    self._tick()
            elif kind == batch.CMD_PURGE:
                self.purging = True
                for message in self.messages.values():
                    if message.place is Place.READY:
                        self._move(message, Place.PURGED)
                        purged.append(message)
            elif kind == batch.CMD_SESSION_CLOSE:
                ending.append(session)
            elif kind == batch.CMD_SESSION_DOWN:
                ending.append(int.from_bytes(batch.command_body(data, offset)[:8], "little"))
            elif kind == batch.CMD_NODE_DOWN:
                self.down_ever.add(arg)
                if not flags & 1:
                    self.away.setdefault(arg, self.time_ms)
                else:
                    self.away.pop(arg, None)
                    ending += [s for s in self.seqs if s >> 56 == arg and s not in self.ended]
            elif kind == batch.CMD_NODE_UP:
                self.away.pop(arg, None)
                body = batch.command_body(data, offset)
                incarnation = int.from_bytes(body[:8], "little")
                ending += [
                    s for s in self.seqs if s >> 56 == arg and s >> 24 & 0xFFFFFFFF < incarnation
                ]
            self.ended.update(ending)
        for effect in effects:
            if effect[0] == EFFECT_DELIVER:
                self._deliver(effect, purged)
        if len(self.ended) != before_ended:
            self._sweep(ending)

    def _other(self, kind: int, session: int, seq: int, body: bytes) -> None:
        """TICK, or an op on a stage."""

    def _tick(self) -> None:
        """What is checked out to nodes that are away for too long is ready again: what they settle
        from here on comes too late."""
        for node, since_ms in self.away.items():
            if since_ms is None or self.time_ms < since_ms + self.disconnect_timeout_ms:
                continue
            self.away[node] = None
            self.given_up.add(node)
            for (session, _consumer), held in self.held.items():
                if session >> 56 == node and session not in self.ended:
                    for key in held.values():
                        self._return(self.messages[key], 0)
                    held.clear()

    def _accepts(self, session: int, seq: int) -> bool:
        if session in self.ended:
            return False
        last = self.seqs.get(session, 0)
        if seq != last + 1:
            return False
        self.seqs[session] = seq
        return True

    def _enqueue(self, index: int, offset: int, count: int, data: bytes) -> None:
        for i in range(count):
            identity = identity_of(batch.record(data, offset, i))
            known = self.by_identity.get(identity)
            if known is not None:
                self.fail(f"message {_name(identity)} was accepted twice, first at {known}")
            key = (index, offset, i)
            self.by_identity[identity] = key
            self.messages[key] = Message(identity)
            self.places[Place.READY] += 1

    def _release(
        self, kind: int, flags: int, session: int, consumer: int, first: int, last: int
    ) -> None:
        held = self.held.get((session, consumer))
        if not held:
            return
        for message_id in [m for m in held if first <= m <= last]:
            message = self.messages[held.pop(message_id)]
            if kind == batch.CMD_SETTLE:
                self._move(message, Place.SETTLED)
                message.holder = None
            elif kind == batch.CMD_DISCARD:
                self._move(message, Place.REJECTED)
                message.holder = None
            else:
                self._return(message, flags & 1)

    def _return(self, message: Message, failed: int) -> None:
        message.holder = None
        message.acquired += 1
        message.failed += failed
        if 0 <= self.delivery_limit < message.failed:
            self._move(message, Place.LIMIT)
        else:
            self._move(message, Place.READY)

    def _sweep(self, sessions: list[int]) -> None:
        """What ended sessions held returns, in this entry."""
        gone = set(sessions)
        for (session, _consumer), held in self.held.items():
            if session in gone and held:
                for key in held.values():
                    message = self.messages[key]
                    message.loose = session >> 56 in self.down_ever
                    self._return(message, 1)
                    if message.loose or self.purging:
                        self.swept.append(key)
                held.clear()

    def _deliver(self, effect: Effect, purged: list[Message]) -> None:
        _, session, consumer, first_id, index, offset, first, count, acquired, delivered = effect
        held = self.held.setdefault((session, consumer), {})
        for i in range(count):
            key = (index, offset, first + i)
            message_id = first_id + i
            message = self.messages.get(key)
            if message is None:
                self.fail(f"{key} was handed out, but nothing was published there")
                return
            if message_id in held:
                continue
            if message.place is Place.HELD:
                self._taken_back(key, message)
            elif message.place is not Place.READY and message not in purged:
                self.fail(f"{_name(message.identity)} is {message.place.value}, yet handed out")
            if message.loose:
                message.acquired, message.failed = acquired, delivered
                message.loose = False
            if message.acquired != acquired or message.failed != delivered:
                self.fail(
                    f"{_name(message.identity)} was returned {message.acquired} times"
                    f" ({message.failed} failed), handed out as ({acquired}, {delivered})"
                )
            if not acquired:
                if key <= self.last_fresh:
                    self.fail(f"{key} was handed out after {self.last_fresh}: out of order")
                self.last_fresh = key
            self._move(message, Place.HELD)
            message.holder = (session, consumer, message_id)
            held[message_id] = key
            self.was[(session, consumer, message_id)] = key

    def _taken_back(self, key: Key, message: Message) -> None:
        """A held message is handed out again: its holder must have ended or been given up."""
        assert message.holder is not None
        session, consumer, message_id = message.holder
        failed = int(session in self.ended)
        message.loose = session >> 56 in self.down_ever
        if not failed and not message.loose:
            self.fail(
                f"{_name(message.identity)} is checked out to {session:x}/{consumer}, whose session"
                " runs, and was handed out again"
            )
            return
        del self.held[(session, consumer)][message_id]
        self._return(message, failed)

    def check_machine(self, machine: Any) -> None:
        """Compares counters with those of a machine that applied the same index."""
        check_invariants(machine)
        totals = machine.totals()
        seen = {
            "published": len(self.messages),
            "acked": self.places[Place.SETTLED],
            "purged": self.places[Place.PURGED],
            "dropped_rejected": self.places[Place.REJECTED],
            "dropped_delivery_limit": self.places[Place.LIMIT],
        }
        for name, count in seen.items():
            if totals[name] != count:
                self.fail(
                    f"the machine counts {totals[name]} {name}, the log says {count}:"
                    f" {totals} against {self.places}"
                )
        if totals["ready"] + totals["unacked"] != (
            self.places[Place.READY] + self.places[Place.HELD] + self.places[Place.STAGED]
        ):
            self.fail(f"messages vanished or appeared: {totals} against {self.places}")

    def waits_for(self) -> str:
        """What has to happen before the end: no message may be left."""
        left = sum(self.places[place] for place in (Place.READY, Place.HELD, Place.STAGED))
        return f"queue {self.group} holds {left}: {self.open_messages()[:3]}" if left else ""

    def sync(self, machine: Any) -> None:
        """After an entry: follows the machine where this model has no rule of its own."""
        staged = sum(stage.held.messages for stage in machine.stages.by_name.values())
        if machine.unacked - staged != self.places[Place.HELD]:
            self._sync_held(machine)
        if self.purging or self.swept:
            self._sync_ready(machine)

    def _sync_held(self, machine: Any) -> None:
        """What a node got in the entry in which it was given up is ready again here too."""
        for (session, consumer), held in self.held.items():
            if not held or session >> 56 not in self.given_up:
                continue
            kept: set[int] = set()
            for message_id, run in machine.holds(session, consumer):
                kept.update(range(message_id, message_id + run[3]))
            for message_id in [m for m in held if m not in kept]:
                message = self.messages[held.pop(message_id)]
                message.loose = True
                self._return(message, 0)

    def _sync_ready(self, machine: Any) -> None:
        """Several reasons in one entry, in an order that this model does not follow, bring messages
        back, drop or purge them: which of those it was is taken from the machine."""
        ready: set[Key] = set()
        for run in [*machine.fresh.runs(), *machine.returned.runs()]:
            ready.update((run[0], run[1], run[2] + i) for i in range(run[3]))
        for key, message in self.messages.items():
            if message.place is Place.PURGED and key in ready:
                self.fail(f"{key} was purged and is ready")
        dropped = machine.dropped["delivery_limit"]
        gone = []
        for key in self.swept:
            message = self.messages[key]
            if message.place not in (Place.READY, Place.LIMIT):
                continue
            if key in ready:
                self._move(message, Place.READY)
            elif self.purging:
                gone.append(message)
        for message in gone:
            self._move(message, Place.PURGED)
        for message in gone[: max(0, dropped - self.places[Place.LIMIT])]:
            self._move(message, Place.LIMIT)
        if self.purging:
            for key, message in self.messages.items():
                if message.place is Place.READY and key not in ready:
                    self._move(message, Place.PURGED)

    # The clients.

    def on_received(
        self, session: int, consumer: int, message_id: int, identity: bytes, acquired: int
    ) -> None:
        """A client got a message."""
        key = self.was.get((session, consumer, message_id))
        if key is None:
            self.fail(
                f"{session:x}/{consumer} got message id {message_id}, which no committed entry gave"
            )
            return
        if self.messages[key].identity != identity:
            self.fail(
                f"{session:x}/{consumer} got {_name(identity)} as message id {message_id}, but the"
                f" log gave it {_name(self.messages[key].identity)}"
            )

    def on_confirmed(self, identity: bytes) -> None:
        """A publisher was told that a message is safe."""
        if identity not in self.by_identity:
            self.fail(f"{_name(identity)} was confirmed, but no committed entry holds it")

    def open_messages(self) -> list[str]:
        """Messages that are neither settled nor dropped."""
        return [
            f"{_name(m.identity)} {m.place.value} {m.holder}"
            for m in self.messages.values()
            if m.place in (Place.READY, Place.HELD, Place.STAGED)
        ]


def _name(identity: bytes) -> str:
    """Publisher and number, readable."""
    publisher = int.from_bytes(identity[:4], "big")
    return f"message {publisher}:{int.from_bytes(identity[4:], 'big')}"
