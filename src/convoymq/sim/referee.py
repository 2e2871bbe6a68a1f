"""The referee of one queue: compares what the machine gives, and what clients get, with a model.

The model (`sim.delivery_model`) computes from the committed log alone who gets which message. The
referee sees every committed entry once, with the effects that the first replica to apply it gave,
and every delivery and answer that a client got. What it asserts:

- the machine's deliveries are the model's, message by message, in the same order, under the same
  message ids and with the same counts; its answers and its counters too;
- a message is accepted once, whatever was resent;
- a queue is unused for too long when it is, and not before;
- every turn is just (`DeliveryModel._check_turn`, `_check_activation`);
- what a client receives is what the log gave it under that message id, and committed, with the
  right counts; it skips only what it does not hold any more;
- a message that was settled or rejected was received before;
- what a client was told to be safe is in the log, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, Protocol

from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.replication.machine import (
    EFFECT_APPLIED,
    EFFECT_DELIVER,
    EFFECT_UNUSED,
    Effect,
    Machine,
)
from convoymq.sim.delivery_model import Answer, DeliveryModel, HandOut
from convoymq.sim.delivery_parts import Key, Message, Place, name_of

INVARIANTS_EVERY = 4
"""Entries of a run after which the machine checks itself."""
DIFFERENCES_SHOWN = 3
OPEN_PLACES = (Place.READY, Place.WAITING, Place.HELD, Place.RESERVED)
_REASONS = {
    Place.REJECTED: "rejected",
    Place.LIMIT: "delivery_limit",
    Place.EXPIRED: "expired",
    Place.OVER_LENGTH: "maxlen",
}


class IndexedMachine(Machine, Protocol):
    """A machine that knows what it has applied."""

    @property
    def index(self) -> int:
        """Returns the last entry that it applied."""


class GroupReferee(Protocol):
    """The model of what is in one group, by the group's log."""

    @property
    def index(self) -> int:
        """Returns the last entry that was seen."""

    def on_entry(self, index: int, data: bytes, effects: list[Effect]) -> None:
        """A committed entry of commands, in order of the log."""

    def check_machine(self, machine: Machine) -> None:
        """Compares with a machine that applied the same index."""

    def waits_for(self) -> str:
        """Returns what has to happen before the end; empty when nothing has."""


class Referee:
    """Compares one group's queue with its model.

    Args:
        settings: of the queue, as `QuorumMachine` takes them.
        clients: clients report to this referee what they receive, so it knows what they did not.
    """

    def __init__(self, group: int, settings: Mapping[str, int], *, clients: bool = False) -> None:
        self.group = group
        self.model = self._new_model(group, settings)
        self._clients = clients
        # What is broken stays so: in a run every entry costs more than it tells.
        self._invariants_every = INVARIANTS_EVERY if clients else 1
        self.handed: dict[tuple[int, int], list[tuple[Message, int, int, bytes]]] = {}
        """(session, consumer) -> (message, acquired, failed) by message id, for ever."""
        self.received: set[tuple[int, int, int]] = set()
        """(session, consumer, message id)"""

    def _new_model(self, group: int, settings: Mapping[str, int]) -> DeliveryModel:
        return DeliveryModel(group, settings)

    @property
    def index(self) -> int:
        """Returns the last entry that was seen."""
        return self.model.index

    @property
    def messages(self) -> dict[Key, Message]:
        """Returns all messages that were ever accepted."""
        return self.model.messages

    def fail(self, text: str) -> NoReturn:
        """Stops the run."""
        self.model.fail(text)

    # The log.

    def on_version(self, index: int, version: int) -> None:
        """An entry is applied by that version of the machine."""
        self.model.since.setdefault(version, index)

    def on_entry(self, index: int, data: bytes, effects: list[Effect]) -> None:
        """A committed entry of commands, in order of the log."""
        model = self.model
        model.apply(index, data)
        self._check_deliveries(effects)
        self._check_answers(effects)
        unused = sum(effect[0] == EFFECT_UNUSED for effect in effects)
        if unused != model.unused:
            self.fail(f"the queue is said {unused} times to be unused, not {model.unused}")
        for session, consumer, message_id, key, acquired, failed, said in model.hand_outs:
            handed = self.handed.setdefault((session, consumer), [])
            if message_id == 0:
                handed.clear()
            if message_id != len(handed):
                self.fail(f"{session:x}/{consumer} was given {message_id} after {len(handed)}")
            handed.append((model.messages[key], acquired, failed, said))
        if self._clients:
            for released in model.released:
                if released not in self.received:
                    session, consumer, message_id = released
                    self.fail(f"{session:x}/{consumer} settled {message_id} and did not get it")

    def _check_deliveries(self, effects: list[Effect]) -> None:
        given: list[HandOut] = []
        for effect in effects:
            if effect[0] == EFFECT_DELIVER:
                (
                    _,
                    session,
                    consumer,
                    first_id,
                    index,
                    offset,
                    first,
                    count,
                    acquired,
                    delivered,
                    *said,
                ) = effect
                given += [
                    (
                        session,
                        consumer,
                        first_id + i,
                        (index, offset, first + i),
                        acquired,
                        delivered,
                        b"".join(said),
                    )
                    for i in range(count)
                ]
        expected = self.model.hand_outs
        if given == expected:
            return
        at = 0
        while at < len(given) and at < len(expected) and given[at] == expected[at]:
            at += 1
        self.fail(
            f"hand-out {at} of {len(expected)} is"
            f" {_shown(given[at : at + DIFFERENCES_SHOWN])}, the log says"
            f" {_shown(expected[at : at + DIFFERENCES_SHOWN])}"
        )

    def _check_answers(self, effects: list[Effect]) -> None:
        """Every question is answered as the model answers it, and every session hears how far it
        got; nobody hears that a command counts that was not accepted."""
        model = self.model
        told: list[Answer] = []
        last: dict[int, int] = {}
        for effect in effects:
            if effect[0] != EFFECT_APPLIED:
                continue
            _, session_id, seq, status, reply = effect
            told.append((session_id, seq, status, reply))
            last[session_id] = max(seq, last.get(session_id, 0))
            session = model.sessions.get(session_id)
            if session is None:
                if session_id not in model.over and session_id not in model.touched:
                    # The close of a session that nobody knows any more is answered as done.
                    self._check_unknown(effect)
            elif seq > session.seq:
                self.fail(f"{session_id:x} hears that {seq} is applied, but it is at {session.seq}")
        for answer in model.answers:
            if answer not in told:
                mine = [one for one in told if one[:2] == answer[:2]]
                self.fail(f"{answer[0]:x}#{answer[1]} is answered {mine}, not {answer[2:]}")
        for session_id in model.touched:
            session = model.sessions.get(session_id)
            if session is not None and last.get(session_id, 0) != session.seq:
                self.fail(f"{session_id:x} hears {last.get(session_id)}, but is at {session.seq}")

    def _check_unknown(self, effect: Effect) -> None:
        if effect[3:] != (0, None):
            self.fail(f"a session that never was hears {effect}")

    def check_machine(self, machine: Machine) -> None:
        """Compares counters with those of a machine that applied the same index."""
        assert isinstance(machine, QuorumMachine)
        model = self.model
        if not model.index % self._invariants_every:
            check_invariants(machine)
        places = model.places
        totals = machine.totals()
        ready = model.ready()
        seen = {
            "ready": len(ready),
            "returned_ready": sum(1 for m in ready if m.outs or m.waited),
            "unacked": places[Place.HELD] + places[Place.RESERVED],
            "consumers": model.consumer_count() + model.reservation_count(),
            "published": len(model.messages),
            "delivered": model.delivered,
            "redelivered": model.redelivered,
            "acked": places[Place.SETTLED],
            "returned": model.returns,
            "purged": places[Place.PURGED],
            "dropped_rejected": places[Place.REJECTED],
            "dropped_delivery_limit": places[Place.LIMIT],
            "dropped_expired": places[Place.EXPIRED],
            "dropped_maxlen": places[Place.OVER_LENGTH],
            "dlx": len(model.kept),
            "deduplicated": len(model.remembered.dropped),
            "delayed": len(model.scheduled),
        }
        if machine.backlog.refusing != model.refusing:
            self.fail(f"the machine refuses publishes: {machine.backlog.refusing}")
        for name, count in seen.items():
            if totals[name] != count:
                self.fail(
                    f"the machine counts {totals[name]} {name}, the log says {count}:"
                    f" {totals} against {seen}"
                )

        if machine.deduplication.count() != len(model.remembered.known):
            self.fail(f"the machine remembers {machine.deduplication.count()} message-ids")
        self._check_dead_letters(machine)

    def _check_dead_letters(self, machine: QuorumMachine) -> None:
        """Checks that what is kept is what left, under the same numbers and for the same
        reasons."""
        expected = {
            number: (message.key, _REASONS[message.place], message.said)
            for number, message in self.model.kept.items()
        }
        count = len(expected)
        kept = {
            number + i: ((index, offset, record + i), reason, said)
            for number, index, offset, record, run, reason, said in (
                machine.dead_letters.letters(0, count + 1)
            )
            for i in range(run)
        }
        if kept != expected:
            self.fail(f"dead letters are {kept}, the log says {expected}")

    def waits_for(self) -> str:
        """Returns what has to happen before the end: no message may be left."""
        if self.model.kept:
            return f"queue {self.group} keeps dead letters {sorted(self.model.kept)[:3]}"
        places = self.model.places
        left = sum(places[place] for place in OPEN_PLACES)
        return f"queue {self.group} holds {left}: {self.open_messages()[:3]}" if left else ""

    # The clients.

    def on_received(
        self,
        session: int,
        consumer: int,
        message_id: int,
        identity: bytes,
        acquired: int,
        delivered: int,
        said: bytes | None = None,
    ) -> None:
        """A client got a message; `said`: its annotations, None: the client does not see them."""
        handed = self.handed.get((session, consumer), [])
        who = f"{session:x}/{consumer}"
        if message_id >= len(handed):
            self.fail(f"{who} got message id {message_id}, which no committed entry gave")
        message, times, failed, annotations = handed[message_id]
        if said is not None and said != annotations:
            self.fail(f"{who} got {name_of(identity)} with {said!r}, not {annotations!r}")
        if message.identity != identity:
            self.fail(
                f"{who} got {name_of(identity)} as message id {message_id}, but the log gave it"
                f" {name_of(message.identity)}"
            )
        if (acquired, delivered) != (times, failed):
            self.fail(
                f"{who} got {name_of(identity)} as returned {acquired} times ({delivered} failed),"
                f" but that is {times} ({failed})"
            )
        if (session, consumer, message_id) in self.received:
            self.fail(f"{who} got message id {message_id} twice")
        self.received.add((session, consumer, message_id))

    def on_skipped(self, session: int, consumer: int, first: int, last: int) -> None:
        """A client went on as if message ids first … last (inclusive) were not its any more."""
        for message_id in range(first, last + 1):
            message, *_ = self.handed[session, consumer][message_id]
            if message.holder == (session, consumer, message_id):
                self.fail(f"{session:x}/{consumer} holds {message_id}, and its client skipped it")

    def on_confirmed(self, identity: bytes) -> None:
        """A publisher was told that a message is safe."""
        model = self.model
        if identity not in model.by_identity and identity not in model.remembered.dropped:
            self.fail(f"{name_of(identity)} was confirmed, but no committed entry holds it")

    def open_messages(self) -> list[str]:
        """Returns the messages that are neither settled nor dropped."""
        return [
            f"{name_of(m.identity)} {m.place.value} {m.holder}"
            for m in self.messages.values()
            if m.place in OPEN_PLACES
        ]


def _shown(hand_outs: list[HandOut]) -> str:
    if not hand_outs:
        return "nothing"
    return ", ".join(
        f"{key} to {session:x}/{consumer} as {message_id} ({acquired}, {failed})"
        for session, consumer, message_id, key, acquired, failed, _ in hand_outs
    )
