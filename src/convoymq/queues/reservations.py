"""Reservations and leases: messages checked out of a queue under a name that no connection owns.

A reservation is what a batch engine reads a queue through: it takes messages, reads them as often
as it likes from any node, and settles them later (ADR 0008). The rules are here, once for all queue
types; what holding a message means is the queue's (`Holder`).

States of a reservation's offset:   beyond next --take--> reserved --settle--> below first
                                    ^---- release (epoch rises) ---+

| op      | needs                 | refused with                     | a repeat          |
|---------|-----------------------|----------------------------------|-------------------|
| open    | owner, ttl_ms         | limit, kind, queue's own         | the same answer   |
| take    | epoch, token, max, after | gone, epoch, fenced, range, kind | takes nothing     |
| settle  | epoch, token, upto    | gone, epoch, fenced, range       | settles nothing   |
| release | epoch, token, from    | gone, epoch, fenced, range       | the same answer   |
| close   | epoch, token          | epoch, fenced                    | nothing is there  |
| lease   | ttl_ms, max           | limit, kind, queue's own         | the same answer   |
| touch   | epoch                 | gone, epoch, fenced              | hears of it again |

Every answer but that of close is a map of epoch, fencing_token, first (the oldest unsettled offset)
and next. A lease is a reservation that is filled once: nobody fights over it, so its fencing token
need not be named. One that is settled to its end is over; the latest of these are remembered, so
that a repeat of the last settle is no error. An empty lease is answered (next = 0) and not kept.

Invariants (`check`): a reservation holds exactly the offsets first … next - 1; epochs rise; with a
queue that serves one consumer at a time there is at most one reservation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from convoymq.model.errors import ReservationRefused, Subject

NO_RESERVATION = "no_reservation"
RESERVATION_EPOCH = "reservation_epoch"
RESERVATION_FENCED = "reservation_fenced"
RESERVATION_LIMIT = "reservation_limit"
RESERVATION_KIND = "reservation_kind"
RESERVATION_RANGE = "reservation_range"
RESERVATION_SETTLED = "reservation_settled"
SINGLE_ACTIVE = "single_active"
EXCLUSIVE = "exclusive"
MALFORMED = "malformed"

#: Reason of a refusal -> what a person reads.
REASONS = {
    NO_RESERVATION: "the reservation does not exist: it was never opened, was closed, or was not"
    " heard of for its time to live, and its messages are back in the queue",
    RESERVATION_EPOCH: "the reservation was released or opened anew since: the offsets of this"
    " epoch are gone",
    RESERVATION_FENCED: "another owner has taken the reservation over",
    RESERVATION_LIMIT: "the queue has too many reservations",
    RESERVATION_KIND: "a lease cannot be used as a reservation, nor a reservation as a lease",
    RESERVATION_RANGE: "the offset lies beyond what was taken",
    RESERVATION_SETTLED: "the offset was settled: these messages are gone",
    SINGLE_ACTIVE: "another consumer of the queue is active, and it serves one at a time",
    EXCLUSIVE: "a consumer has the queue for itself",
    MALFORMED: "the operation lacks a field or has one of a wrong type or size",
}

#: Reservations and leases of one queue; settled leases that are remembered.
RESERVATIONS_MAX = 1024
FINISHED_KEPT_MAX = 256
NAME_BYTES_MAX = 255
TTL_MS_MIN = 1_000
TTL_MS_MAX = 7 * 24 * 3600 * 1000
TTL_MS_DEFAULT = 3600 * 1000
#: Runs that one take moves: what is applied at once must stay short. More takes get more.
TAKE_RUNS_MAX = 16_384
_U63 = (1 << 63) - 1


Answer = dict[str, int]
"""Answer of every op: epoch, fencing_token, first, next; nothing after close."""


class Reservation:
    """One reservation or lease."""

    __slots__ = (
        "epoch", "fencing_token", "first", "heard_ms", "held", "is_lease", "name", "next", "owner",
        "released", "ttl_ms",
    )  # fmt: skip

    def __init__(self, name: str, *, is_lease: bool, held: Any) -> None:
        self.name = name
        self.is_lease = is_lease
        self.held = held
        """Reserved messages, in the queue's own form."""
        self.epoch = 0
        self.fencing_token = 1
        self.owner = ""
        self.ttl_ms = TTL_MS_DEFAULT
        self.heard_ms = 0
        self.first = 0
        """Oldest offset that is not settled."""
        self.next = 0
        """Offset that the next message gets."""
        self.released: tuple[int, int] | None = None
        """(epoch before, from) of the latest release: its repeat is answered, not refused."""

    @property
    def due_ms(self) -> int:
        """Returns when it expires, unless it is heard of."""
        return self.heard_ms + self.ttl_ms

    def answer(self) -> Answer:
        """Returns the answer of every op."""
        return {
            "epoch": self.epoch,
            "fencing_token": self.fencing_token,
            "first": self.first,
            "next": self.next,
        }


class Holder(Protocol):
    """The queue's side: where messages are, and who may have them."""

    def reservation_refusal(self) -> str | None:
        """Returns why a new reservation cannot be opened; None when it can."""

    def reservation_opened(self, reservation: Reservation) -> None:
        """A reservation is new: its `held` has to be made."""

    def reservation_closed(self, reservation: Reservation) -> None:
        """A reservation is no more; it holds nothing."""

    def reservation_take(self, reservation: Reservation, limit: int) -> int:
        """Moves ready messages to the reservation, from offset `reservation.next` on; returns how
        many, at most `limit` and what lies in TAKE_RUNS_MAX runs."""

    def reservation_settle(self, reservation: Reservation, first: int, last: int) -> None:
        """Acknowledges offsets first … last, all of which are reserved."""

    def reservation_return(
        self, reservation: Reservation, first: int, last: int, failed: bool
    ) -> None:
        """Gives offsets first … last, up to the youngest, back to the queue in their order."""


def reservation_refused(reason: str, subject: Subject | None = None) -> ReservationRefused:
    """Returns the refusal as those outside a machine see it."""
    return ReservationRefused(reason, REASONS.get(reason, reason), subject=subject)


def checked_op(op: Mapping[str, object]) -> dict[str, object]:
    """Returns the fields of an op that the rules know, with values that they take: what goes into a
    log. Raises ReservationRefused."""
    made: dict[str, object] = {}
    try:
        for key, read in _FIELDS.items():
            if op.get(key) is not None:
                made[key] = read(op, key)
    except Refusal as refusal:
        raise reservation_refused(refusal.reason) from None
    return made


class Refusal(Exception):
    """An op is refused; `reason` is one of REASONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


Packed = tuple[
    list[tuple[str, bool, int, int, str, int, int, int, int, list[int] | None, object]],
    list[tuple[str, int, int]],
]
"""Form that `Reservations.pack` gives: (reservations, finished)."""


class Reservations:
    """All reservations of one queue."""

    def __init__(self, holder: Holder) -> None:
        self.by_name: dict[str, Reservation] = {}
        #: Leases that were settled to their end, oldest first: name -> (epoch, next).
        self.finished: dict[str, tuple[int, int]] = {}
        self._holder = holder

    def __len__(self) -> int:
        return len(self.by_name)

    # ---------------------------------------------------------------- ops

    def apply(
        self, op: Mapping[str, object], epoch: int, time_ms: int
    ) -> tuple[str | None, Answer | None]:
        """Carries out one op.

        Args:
            op: its fields, from outside: nothing about them is taken for granted.
            epoch: the epoch of a reservation that begins or is released now; higher than any
            before. time_ms: now.
        Returns: (None, answer), or (reason, None) when it is refused and nothing has changed.
        """
        try:
            return None, self._apply(op, epoch, time_ms)
        except Refusal as refusal:
            return refusal.reason, None

    def _apply(self, op: Mapping[str, object], epoch: int, time_ms: int) -> Answer:
        name = _text(op, "reservation")
        kind = op.get("op")
        if not name:
            raise Refusal(MALFORMED)
        if kind == "open":
            return self._open(name, op, epoch, time_ms)
        if kind == "lease":
            return self._lease(name, op, epoch, time_ms)
        if kind == "close" and name not in self.by_name:
            return {}
        if kind == "settle" and name in self.finished and name not in self.by_name:
            return self._settle_finished(name, op)
        # What an op needs is read before anything changes.
        if kind == "take":
            limit = _number(op, "max")
            after = -1 if op.get("after") is None else _number(op, "after")
            reservation = self._known(name, op, epoch)
            answer = self._take(reservation, limit, reservation.next if after < 0 else after)
            reservation.heard_ms = time_ms
            return answer
        if kind == "settle":
            upto = _number(op, "upto")
            reservation = self._known(name, op, epoch)
            answer = self._settle(reservation, upto)
            reservation.heard_ms = time_ms
            return answer
        if kind == "release":
            start, failed = _number(op, "from"), _truth(op, "failed")
            return self._release(name, op, start, failed, epoch, time_ms)
        if kind == "close":
            failed = _truth(op, "failed")
            self._end(self._known(name, op, epoch), failed)
            return {}
        if kind == "touch":
            reservation = self._known(name, op, epoch, fencing_token=False)
            reservation.heard_ms = time_ms
            return reservation.answer()
        raise Refusal(MALFORMED)

    def _open(self, name: str, op: Mapping[str, object], epoch: int, time_ms: int) -> Answer:
        owner, ttl_ms = _text(op, "owner"), _ttl(op)
        reservation = self.by_name.get(name)
        if reservation is None:
            reservation = self._begin(name, False)
            reservation.epoch = epoch
        elif reservation.is_lease:
            raise Refusal(RESERVATION_KIND)
        elif reservation.owner != owner:
            reservation.fencing_token += 1
        reservation.owner = owner
        reservation.ttl_ms = ttl_ms
        reservation.heard_ms = time_ms
        return reservation.answer()

    def _lease(self, name: str, op: Mapping[str, object], epoch: int, time_ms: int) -> Answer:
        owner, ttl_ms, limit = _text(op, "owner", ""), _ttl(op), _number(op, "max")
        reservation = self.by_name.get(name)
        if reservation is not None:
            if not reservation.is_lease:
                raise Refusal(RESERVATION_KIND)
            reservation.heard_ms = time_ms
            return reservation.answer()
        if name in self.finished:
            return self._finished_answer(name)
        reservation = self._begin(name, True)
        reservation.epoch = epoch
        reservation.owner = owner
        reservation.ttl_ms = ttl_ms
        reservation.heard_ms = time_ms
        if limit:
            reservation.next += self._holder.reservation_take(reservation, limit)
        if not reservation.next:
            self._forget(reservation)
        return reservation.answer()

    def _begin(self, name: str, is_lease: bool) -> Reservation:
        reason = self._holder.reservation_refusal()
        if reason is None and len(self.by_name) >= RESERVATIONS_MAX:
            reason = RESERVATION_LIMIT
        if reason is not None:
            raise Refusal(reason)
        reservation = Reservation(name, is_lease=is_lease, held=None)
        self.by_name[name] = reservation
        self._holder.reservation_opened(reservation)
        return reservation

    def _known(
        self, name: str, op: Mapping[str, object], epoch: int, *, fencing_token: bool = True
    ) -> Reservation:
        """Returns the reservation that an op names with its epoch and fencing token. Nothing has
        changed yet: the op may still be refused, and then it does not count as a sign of life."""
        given = _number(op, "epoch")
        reservation = self.by_name.get(name)
        if reservation is None:
            raise Refusal(NO_RESERVATION)
        # An epoch that begins in this very entry was told to nobody yet: it was guessed.
        if given != reservation.epoch or given >= epoch:
            raise Refusal(RESERVATION_EPOCH)
        self._check_fencing_token(reservation, op, fencing_token)
        return reservation

    @staticmethod
    def _check_fencing_token(
        reservation: Reservation, op: Mapping[str, object], needed: bool
    ) -> None:
        given = op.get("fencing_token")
        if given is None and (reservation.is_lease or not needed):
            return
        if _number(op, "fencing_token") != reservation.fencing_token:
            raise Refusal(RESERVATION_FENCED)

    def _take(self, reservation: Reservation, limit: int, after: int) -> Answer:
        if reservation.is_lease:
            raise Refusal(RESERVATION_KIND)
        if after > reservation.next:
            raise Refusal(RESERVATION_RANGE)
        if after == reservation.next and limit:
            reservation.next += self._holder.reservation_take(reservation, limit)
        return reservation.answer()

    def _settle(self, reservation: Reservation, upto: int) -> Answer:
        if upto > reservation.next:
            raise Refusal(RESERVATION_RANGE)
        if upto > reservation.first:
            self._holder.reservation_settle(reservation, reservation.first, upto - 1)
            reservation.first = upto
        if reservation.is_lease and reservation.first == reservation.next:
            self._forget(reservation)
            self.finished[reservation.name] = (reservation.epoch, reservation.next)
            if len(self.finished) > FINISHED_KEPT_MAX:
                del self.finished[next(iter(self.finished))]
        return reservation.answer()

    def _settle_finished(self, name: str, op: Mapping[str, object]) -> Answer:
        epoch, end = self.finished[name]
        if _number(op, "epoch") != epoch:
            raise Refusal(RESERVATION_EPOCH)
        if _number(op, "upto") > end:
            raise Refusal(RESERVATION_RANGE)
        return self._finished_answer(name)

    def _finished_answer(self, name: str) -> Answer:
        epoch, end = self.finished[name]
        return {"epoch": epoch, "fencing_token": 1, "first": end, "next": end}

    def _release(
        self,
        name: str,
        op: Mapping[str, object],
        start: int,
        failed: bool,
        epoch: int,
        time_ms: int,
    ) -> Answer:
        reservation = self.by_name.get(name)
        if reservation is not None and reservation.released == (_number(op, "epoch"), start):
            # Its owner did not hear the answer: nobody else can have used the new epoch.
            self._check_fencing_token(reservation, op, True)
            reservation.heard_ms = time_ms
            return reservation.answer()
        reservation = self._known(name, op, epoch)
        if start > reservation.next:
            raise Refusal(RESERVATION_RANGE)
        reservation.heard_ms = time_ms
        released = (reservation.epoch, start)
        start = max(start, reservation.first)
        self._return(reservation, start, failed)
        reservation.epoch = epoch
        reservation.released = released
        if reservation.is_lease and reservation.first == reservation.next:
            self._forget(reservation)
        return reservation.answer()

    def _return(self, reservation: Reservation, start: int, failed: bool) -> None:
        if start < reservation.next:
            self._holder.reservation_return(reservation, start, reservation.next - 1, failed)
            reservation.next = start

    def _end(self, reservation: Reservation, failed: bool) -> None:
        self._return(reservation, reservation.first, failed)
        self._forget(reservation)

    def _forget(self, reservation: Reservation) -> None:
        del self.by_name[reservation.name]
        self._holder.reservation_closed(reservation)

    # ---------------------------------------------------------------- time

    def next_due_ms(self) -> int | None:
        """Returns when the next reservation expires; None without reservations. Cost:
        O(reservations)."""
        return min((reservation.due_ms for reservation in self.by_name.values()), default=None)

    def expire(self, time_ms: int) -> list[Reservation]:
        """Ends the reservations that were not heard of for their time to live: failed
        deliveries."""
        expired = [
            reservation for reservation in self.by_name.values() if reservation.due_ms <= time_ms
        ]
        for reservation in expired:
            self._end(reservation, True)
        return expired

    def clear(self) -> None:
        """The queue is deleted."""
        self.by_name.clear()
        self.finished.clear()

    # ---------------------------------------------------------------- looking

    def reading(self, name: str, epoch: int, offset: int) -> Reservation:
        """Returns the reservation for a read from `offset` on. Raises Refusal when that cannot be
        read."""
        reservation = self.by_name.get(name)
        if reservation is None:
            known = self.finished.get(name)
            raise Refusal(
                RESERVATION_SETTLED if known is not None and known[0] == epoch else NO_RESERVATION
            )
        if epoch != reservation.epoch:
            raise Refusal(RESERVATION_EPOCH)
        if offset < reservation.first:
            raise Refusal(RESERVATION_SETTLED)
        return reservation

    def infos(self) -> list[dict[str, object]]:
        """Returns the fields of each reservation that the management API shows."""
        return [
            {
                "reservation": reservation.name,
                "kind": "lease" if reservation.is_lease else "reservation",
                "epoch": reservation.epoch,
                "fencing_token": reservation.fencing_token,
                "owner": reservation.owner,
                "first": reservation.first,
                "next": reservation.next,
                "unacked": reservation.next - reservation.first,
                "ttl_ms": reservation.ttl_ms,
                "heard_ms": reservation.heard_ms,
            }
            for reservation in self.by_name.values()
        ]

    # ---------------------------------------------------------------- snapshots

    def pack(self) -> list[object]:
        """Plain values: [reservations, finished]; `held` must have `pack`."""
        return [
            [
                [
                    reservation.name,
                    reservation.is_lease,
                    reservation.epoch,
                    reservation.fencing_token,
                    reservation.owner,
                    reservation.ttl_ms,
                    reservation.heard_ms,
                    reservation.first,
                    reservation.next,
                    reservation.released,
                    reservation.held.pack(),
                ]
                for reservation in self.by_name.values()
            ],
            [[name, *known] for name, known in self.finished.items()],
        ]

    def unpack(self, packed: Packed) -> None:
        """Replaces all by what `pack` gave. The holder hears of every reservation as of a new one,
        and `held.unpack` fills it."""
        reservations, finished = packed
        self.clear()
        for (
            name,
            is_lease,
            epoch,
            fencing_token,
            owner,
            ttl_ms,
            heard_ms,
            first,
            end,
            released,
            held,
        ) in reservations:
            reservation = Reservation(name, is_lease=is_lease, held=None)
            reservation.epoch = epoch
            reservation.fencing_token = fencing_token
            reservation.owner = owner
            reservation.ttl_ms = ttl_ms
            reservation.heard_ms = heard_ms
            reservation.first = first
            reservation.next = end
            reservation.released = (released[0], released[1]) if released is not None else None
            self.by_name[name] = reservation
            self._holder.reservation_opened(reservation)
            reservation.held.unpack(held)
        self.finished = {name: (epoch, end) for name, epoch, end in finished}

    def check(self) -> None:
        """Asserts what the module text promises of the table itself."""
        assert len(self.by_name) <= RESERVATIONS_MAX
        assert len(self.finished) <= FINISHED_KEPT_MAX
        for name, reservation in self.by_name.items():
            assert reservation.name == name
            assert 0 <= reservation.first <= reservation.next
            assert reservation.fencing_token >= 1
            assert reservation.released is None or reservation.released[0] < reservation.epoch
            assert not reservation.is_lease or reservation.first < reservation.next


def _number(op: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = op.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 <= value <= _U63:
        raise Refusal(MALFORMED)
    return value


def _text(op: Mapping[str, object], key: str, default: str | None = None) -> str:
    value = op.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not str or len(value.encode("utf-8", "replace")) > NAME_BYTES_MAX:
        raise Refusal(MALFORMED)
    return value


def _truth(op: Mapping[str, object], key: str) -> bool:
    value = op.get(key, False)
    if type(value) is not bool:
        raise Refusal(MALFORMED)
    return value


def _ttl(op: Mapping[str, object]) -> int:
    value = _number(op, "ttl_ms", TTL_MS_DEFAULT)
    if not TTL_MS_MIN <= value <= TTL_MS_MAX:
        raise Refusal(MALFORMED)
    return value


_FIELDS: dict[str, Callable[[Mapping[str, object], str], object]] = {
    "op": _text,
    "reservation": _text,
    "owner": _text,
    "ttl_ms": _number,
    "epoch": _number,
    "fencing_token": _number,
    "max": _number,
    "after": _number,
    "upto": _number,
    "from": _number,
    "failed": _truth,
}
