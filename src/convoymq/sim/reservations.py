"""Reservations in the simulator: owners that take, read, settle and take over from each other, and
a referee that follows them in the log.

What the referee asserts, beyond what holds for every queue:

- ops are answered, or refused, as a model of the rules says (`ReservedModel`, ADR 0008);
- a reservation holds what the ops in the log say, in that order, under dense offsets, with the
  right
  counts, on every replica;
- an offset means one message for as long as its epoch lasts, on every node that shows it;
- a reserved message leaves by settle, release, close, or when nobody was heard of for the time to
  live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec

from convoymq.kernels import batch
from convoymq.model.errors import BrokerError, ReservationRefused
from convoymq.queues.quorum.client import QuorumClient
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.reservations import (
    FINISHED_KEPT_MAX,
    NO_RESERVATION,
    RESERVATION_EPOCH,
    RESERVATION_FENCED,
    RESERVATION_KIND,
    RESERVATION_LIMIT,
    RESERVATION_RANGE,
    RESERVATIONS_MAX,
    SINGLE_ACTIVE,
    Refusal,
)
from convoymq.queues.sessions import APPLIED_OK, APPLIED_REJECTED
from convoymq.replication.machine import Machine
from convoymq.sim.clients import ChannelParts
from convoymq.sim.command_bodies import ReservationOp
from convoymq.sim.delivery_model import DeliveryModel, InvariantBroken
from convoymq.sim.delivery_parts import Key, Place, Session
from convoymq.sim.owners import OwnerChannel
from convoymq.sim.quorum import QuorumLoad
from convoymq.sim.records import identity_of
from convoymq.sim.referee import Referee
from convoymq.sim.world import ChannelKind
from convoymq.storage.types import EntryGone, StorageFault

NAMES = ("s1", "s2")
TTLS_MS = (1_000, 3_000, 10_000)
#: Chances per turn of an owner that has a reservation.
TAKE_CHANCE = 0.5
SETTLE_CHANCE = 0.4
RELEASE_CHANCE = 0.05
CLOSE_CHANCE = 0.03
LEASE_CHANCE = 0.3
REPEAT_CHANCE = 0.2
LEAVE_CHANCE = 0.02
TAKE_MAX = 40
OWNER_SHARE = 0.4
"""Of the channels, those that own a reservation."""


class _Reservation:
    """Reservation as the log has it."""

    def __init__(self, epoch: int, owner: str, ttl_ms: int, *, is_lease: bool) -> None:
        self.epoch = epoch
        self.owner = owner
        self.fencing_token = 1
        self.ttl_ms = ttl_ms
        self.is_lease = is_lease
        self.heard_ms = 0
        self.first = 0
        self.next = 0
        self.keys: dict[int, Key] = {}
        """Offset -> message."""
        self.released: tuple[int, int] | None = None
        """(epoch before, from) of the latest release."""

    def answer(self) -> dict[str, int]:
        """Returns the answer of every op but close."""
        return {
            "epoch": self.epoch,
            "fencing_token": self.fencing_token,
            "first": self.first,
            "next": self.next,
        }


if TYPE_CHECKING:
    from convoymq.shells.groups.replica import Replica
    from convoymq.sim.group_node import GroupNode


class ReservedModel(DeliveryModel):
    """A queue with reservations, by the rules of ADR 0008."""

    def __init__(self, group: int, settings: Mapping[str, int]) -> None:
        super().__init__(group, settings)
        self.reservations: dict[str, _Reservation] = {}
        self.settled_leases: dict[str, tuple[int, int]] = {}
        """Name -> (epoch, next) of leases that were settled to their end, oldest first."""
        self.shown: dict[tuple[str, int, int], Key] = {}
        """(reservation, epoch, offset) -> message, for ever."""

    def reservation_count(self) -> int:
        """Reservations and leases of the queue."""
        return len(self.reservations)

    def _expire_reservations(self) -> None:
        for name, reservation in list(self.reservations.items()):
            if reservation.heard_ms + reservation.ttl_ms <= self.time_ms:
                self._give_back(reservation, 0, 1)
                del self.reservations[name]

    def _reservation(self, session: Session, op: ReservationOp) -> None:
        name, kind = op["reservation"], op["op"]
        reply: str | dict[str, int]
        if kind in ("open", "lease"):
            reply = self._begin(name, op)
        elif kind == "close" and name not in self.reservations:
            reply = {}
        elif kind == "settle" and name in self.settled_leases and name not in self.reservations:
            epoch, end = self.settled_leases[name]
            reply = _settled(epoch, end)
            if op["epoch"] != epoch:
                reply = RESERVATION_EPOCH
            elif op["upto"] > end:
                reply = RESERVATION_RANGE
        else:
            reply = self._act(name, op)
        status = APPLIED_REJECTED if isinstance(reply, str) else APPLIED_OK
        self._answer(session, status, reply)

    def _begin(self, name: str, op: ReservationOp) -> str | dict[str, int]:
        is_lease = op["op"] == "lease"
        owner = op.get("owner", "")
        reservation = self.reservations.get(name)
        if reservation is not None:
            if reservation.is_lease != is_lease:
                return RESERVATION_KIND
            reservation.heard_ms = self.time_ms
            if not is_lease:
                reservation.fencing_token += owner != reservation.owner
                reservation.owner = owner
                reservation.ttl_ms = op["ttl_ms"]
            return reservation.answer()
        if is_lease and name in self.settled_leases:
            return _settled(*self.settled_leases[name])
        if self.single_active and (self.active is not None or self.reservations):
            return SINGLE_ACTIVE
        if len(self.reservations) >= RESERVATIONS_MAX:
            return RESERVATION_LIMIT
        # A reservation has many messages at a time, and may give back the later ones first.
        self.in_order = False
        reservation = self.reservations[name] = _Reservation(
            self.index, owner, op["ttl_ms"], is_lease=is_lease
        )
        reservation.heard_ms = self.time_ms
        if is_lease:
            self._reservation_messages(name, reservation, op["max"])
            if not reservation.keys:
                del self.reservations[name]
        return reservation.answer()

    def _act(self, name: str, op: ReservationOp) -> str | dict[str, int]:
        """An op on a reservation that is there; a refused one changes nothing."""
        kind = op["op"]
        reservation = self.reservations.get(name)
        if reservation is None:
            return NO_RESERVATION
        fenced = op.get("fencing_token", None if reservation.is_lease or kind == "touch" else 0)
        fenced = fenced is not None and fenced != reservation.fencing_token
        if kind == "release" and reservation.released == (op["epoch"], op["from"]):
            if fenced:
                return RESERVATION_FENCED
            reservation.heard_ms = self.time_ms
            return reservation.answer()
        if op["epoch"] != reservation.epoch or reservation.epoch == self.index:
            return RESERVATION_EPOCH
        if fenced:
            return RESERVATION_FENCED
        after = op.get("after", reservation.next)
        if kind == "take" and reservation.is_lease:
            return RESERVATION_KIND
        if max(after, op.get("upto", 0), op.get("from", 0)) > reservation.next:
            return RESERVATION_RANGE
        reservation.heard_ms = self.time_ms
        if kind == "take" and after == reservation.next:
            self._reservation_messages(name, reservation, op["max"])
        elif kind == "settle":
            self._settle_reservation(name, reservation, op["upto"])
        elif kind == "release":
            self._release_reservation(name, reservation, op["from"], int(op.get("failed", False)))
        elif kind == "close":
            self._give_back(reservation, 0, int(op.get("failed", False)))
            del self.reservations[name]
            return {}
        return reservation.answer()

    def _reservation_messages(self, name: str, reservation: _Reservation, limit: int) -> None:
        """Takes ready messages, those that came back first, under the next offsets."""
        while limit and self._has_ready():
            limit -= 1
            message = self._take()
            self._move(message, Place.RESERVED)
            self._expire()
            reservation.keys[reservation.next] = message.key
            self._show(name, reservation, reservation.next)
            reservation.next += 1

    def _settle_reservation(self, name: str, reservation: _Reservation, upto: int) -> None:
        for offset in range(reservation.first, upto):
            self._move(self.messages[reservation.keys.pop(offset)], Place.SETTLED)
        reservation.first = max(reservation.first, upto)
        if reservation.is_lease and not reservation.keys:
            del self.reservations[name]
            self.settled_leases[name] = (reservation.epoch, reservation.next)
            if len(self.settled_leases) > FINISHED_KEPT_MAX:
                del self.settled_leases[next(iter(self.settled_leases))]

    def _release_reservation(
        self, name: str, reservation: _Reservation, start: int, failed: int
    ) -> None:
        reservation.released = (reservation.epoch, start)
        self._give_back(reservation, start, failed)
        reservation.epoch = self.index
        for offset in reservation.keys:
            self._show(name, reservation, offset)
        if reservation.is_lease and not reservation.keys:
            del self.reservations[name]

    def _give_back(self, reservation: _Reservation, start: int, failed: int) -> None:
        start = max(start, reservation.first)
        for offset in range(start, reservation.next):
            self._return(self.messages[reservation.keys.pop(offset)], failed, failed)
        reservation.next = start

    def _show(self, name: str, reservation: _Reservation, offset: int) -> None:
        key = reservation.keys[offset]
        if self.shown.setdefault((name, reservation.epoch, offset), key) != key:
            self.fail(f"offset {offset} of {name} in epoch {reservation.epoch} became {key}")


def _settled(epoch: int, end: int) -> dict[str, int]:
    return {"epoch": epoch, "fencing_token": 1, "first": end, "next": end}


class ReservedReferee(Referee):
    """The referee of one group's queue with reservations."""

    model: ReservedModel

    def _new_model(self, group: int, settings: Mapping[str, int]) -> DeliveryModel:
        return ReservedModel(group, settings)

    def check_machine(self, machine: Machine) -> None:
        """See `Referee`; and reservations hold what the log says, under the same offsets."""
        super().check_machine(machine)
        assert isinstance(machine, QuorumMachine)
        reservations = self.model.reservations
        if list(reservations) != list(machine.reservations.by_name):
            self.fail(
                f"reservations are {list(machine.reservations.by_name)}, not {list(reservations)}"
            )
        for name, reservation in reservations.items():
            known = machine.reservations.by_name[name]
            held: list[tuple[int, Key, int, int]] = []
            for offset, run in known.held.held():
                for k in range(run[3]):
                    held.append((offset + k, (run[0], run[1], run[2] + k), run[5], run[6]))
            expected = []
            for offset, key in reservation.keys.items():
                message = self.messages[key]
                expected.append((offset, key, message.acquired, message.failed))
            if held != expected or known.answer() != reservation.answer():
                self.fail(f"reservation {name} is {known.answer()} with {held}, not {expected}")

    def is_reserved(self, name: str, epoch: int, offset: int) -> bool:
        """Does the log still say so?"""
        reservation = self.model.reservations.get(name)
        return reservation is not None and reservation.epoch == epoch and offset in reservation.keys

    def on_shown(self, name: str, epoch: int, offset: int, identity: bytes) -> None:
        """A reader got a message of a reservation."""
        key = self.model.shown.get((name, epoch, offset))
        if key is None:
            self.fail(f"{name}:{offset} of epoch {epoch} was read, but no entry reserved it")
        elif self.messages[key].identity != identity:
            self.fail(f"{name}:{offset} of epoch {epoch} shows another message than was reserved")


class ReservationChannel(OwnerChannel):
    """One owner: opens a reservation or leases, takes, reads anywhere, settles, and dies now and
    then.

    Args:
        replicas: (node, replica) of the group on all nodes that run.
    """

    title = "owner"

    def __init__(
        self,
        parts: ChannelParts,
        *,
        replicas: Callable[[int], list[tuple[GroupNode, Replica]]],
    ) -> None:
        super().__init__(parts)
        assert isinstance(parts.referee, ReservedReferee)
        self._trace = parts.trace
        self._referee = parts.referee
        self._replicas = replicas
        # Only quorum queues have reservations here.
        self.client = cast(QuorumClient, parts.queue.client(parts.session, self))
        self._leases = 0
        self._reservation = ""
        self._epoch = 0
        self._fencing_token = 0
        self._first = 0
        self._next = 0
        self._read = 0
        self._asked: ReservationOp | None = None
        """The op under way."""
        self._again: ReservationOp | None = None
        """Operation to ask once more: its answer got lost, or to see that it does no harm."""
        self._next_turn()

    # Turns.

    def _turn(self) -> None:
        if self._closed:
            return
        # An op that was given up is still on its way: the next one waits for it.
        if self._asked is None and not self.client.target.pending:
            if self._again is not None:
                op, self._again = self._again, None
                self._ask(op)
            elif self._draining:
                self._drain()
            elif self._scheduler.chance(LEAVE_CHANCE):
                self._trace.add(self.name, "leaves")
                self._close()
            elif not self._epoch:
                self._begin()
            else:
                self._work()
        # First, as the node that is read may lose its power under the reader.
        self._next_turn()
        if self._epoch and not self._closed:
            self._look()

    def _begin(self) -> None:
        ttl_ms = self._scheduler.rng.choice(TTLS_MS)
        if self._scheduler.chance(LEASE_CHANCE):
            self._leases += 1
            self._reservation = f"{self.name}-{self._leases}"
            count = self._scheduler.between(1, TAKE_MAX)
            self._ask({"op": "lease", "owner": "x", "ttl_ms": ttl_ms, "max": count})
        else:
            self._reservation = self._scheduler.rng.choice(NAMES)
            self._ask({"op": "open", "owner": self.name, "ttl_ms": ttl_ms})

    def _work(self) -> None:
        chance, between = self._scheduler.chance, self._scheduler.between
        is_lease = self._reservation not in NAMES
        if chance(CLOSE_CHANCE):
            self._ask({**self._mine(), "op": "close", "failed": chance(0.5)})
        elif chance(RELEASE_CHANCE):
            start = between(0, self._next)
            self._ask({**self._mine(), "op": "release", "from": start, "failed": chance(0.5)})
        elif not is_lease and chance(TAKE_CHANCE):
            count = between(0, TAKE_MAX)
            self._ask({**self._mine(), "op": "take", "max": count, "after": self._next})
        elif self._read > self._first and chance(SETTLE_CHANCE):
            self._ask({**self._mine(), "op": "settle", "upto": between(self._first, self._read)})

    def _drain(self) -> None:
        if self._epoch:
            self._ask({**self._mine(), "op": "close", "failed": False})
        else:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self.client.close()
        self._parts.on_closed(self)

    def waits_for(self) -> str:
        """Returns what is still outstanding; empty when nothing is."""
        return f"the end of reservation {self._reservation}"

    # Ops.

    def _mine(self) -> ReservationOp:
        return {"epoch": self._epoch, "fencing_token": self._fencing_token}

    def _ask(self, op: ReservationOp) -> None:
        self._asked = op
        op = {"reservation": self._reservation, **op}
        self._trace.add(self.name, f"asks {op}")
        self.client.reservation(msgspec.msgpack.encode(op), self._on_answer)

    def _on_answer(self, reply: dict[str, int] | None, error: BrokerError | None) -> None:
        asked, self._asked = self._asked, None
        assert asked is not None
        if isinstance(error, ReservationRefused):
            self._trace.add(self.name, f"is refused: {error.reason}")
            if asked["op"] in ("take", "settle", "release") and error.reason == "reservation_range":
                raise InvariantBroken(f"{self.name}: {asked} is out of range after {self._next}")
            self._epoch = 0
        elif error is not None:
            self._trace.add(self.name, f"hears nothing: {error.text}")
            self._again = asked
        elif asked["op"] == "close":
            self._epoch = 0
        else:
            assert reply is not None
            self._learn(asked, reply)
            if self._scheduler.chance(REPEAT_CHANCE):
                self._again = asked

    def _learn(self, asked: ReservationOp, reply: dict[str, int]) -> None:
        op = asked["op"]
        if not self._epoch and op not in ("open", "lease"):
            # The repeat of what ended a lease.
            return
        same = reply["epoch"] == self._epoch and reply["fencing_token"] == self._fencing_token
        if op in ("open", "lease"):
            if not same:
                self._read = reply["first"]
            self._epoch, self._fencing_token = reply["epoch"], reply["fencing_token"]
        elif op == "release":
            self._epoch = reply["epoch"]
            self._read = min(self._read, reply["next"])
        elif not same:
            raise InvariantBroken(f"{self.name}: {asked} was answered {reply}")
        elif reply["first"] < self._first or reply["next"] < self._next:
            raise InvariantBroken(f"{self.name}: {reply} after {self._first}, {self._next}")
        self._first, self._next = reply["first"], reply["next"]
        self._read = max(self._read, self._first)
        if self._reservation not in NAMES and self._first == self._next:
            # A lease that is empty, or at its end.
            self._epoch = 0

    # Reading.

    def _look(self) -> None:
        """Reads some rows from the replica of some node, as a task of a batch does."""
        replicas = self._replicas(self.group)
        if not replicas or self._first == self._next:
            return
        node, replica = self._scheduler.rng.choice(replicas)
        machine = cast(QuorumMachine, replica.machine)
        start = self._scheduler.between(self._first, self._read)
        end = self._scheduler.between(start, self._next)
        if machine.index < self._epoch:
            return
        try:
            reservation = machine.reservations.reading(self._reservation, self._epoch, start)
        except Refusal:
            return
        if reservation.next < end:
            return
        at = start
        for offset, run in reservation.held.between(start, end, 1 << 20):
            index, command, first, count = run[:4]
            try:
                data = node.host.read_entry(self.group, index).data
            except (EntryGone, KeyError) as error:
                replaced = replica.log.snapshot_index > machine.index
                if replaced and not self._referee.is_reserved(
                    self._reservation, self._epoch, offset
                ):
                    # A snapshot has replaced the log, and the machine follows when that is durable.
                    # Until then it shows what is over, and readers are sent to other nodes.
                    return
                raise InvariantBroken(f"{self.name}: entry {index} is gone: {error}") from error
            except (StorageFault, OSError):
                return
            if offset != at:
                raise InvariantBroken(f"{self.name}: offset {offset} where {at} was next")
            for k in range(count):
                identity = identity_of(batch.record(data, command, first + k))
                self._referee.on_shown(self._reservation, self._epoch, offset + k, identity)
            at = offset + count
        if at != end:
            raise InvariantBroken(f"{self.name}: read {start} … {at}, not up to {end}")
        self._read = max(self._read, end)
        self._parts.workload.read += end - start


class ReservationLoad(QuorumLoad):
    """Quorum queues of which some channels own reservations."""

    text = "quorum queues; some channels read them through reservations"
    referee_class = ReservedReferee
    has_operations = False

    def channel_kind(self, group: int) -> ChannelKind:
        world = self.world
        if not world.quiet and world.scheduler.chance(OWNER_SHARE):
            return partial(ReservationChannel, replicas=world.replicas_of)
        return super().channel_kind(group)
