"""Reserved messages of a quorum queue: no session and no node owns them.

The rules of reservations are in `queues.reservations` (ADR 0008).
"""

from __future__ import annotations

from convoymq.model import trace as words
from convoymq.queues.group_machine import GroupMachine
from convoymq.queues.quorum import runs, tracing
from convoymq.queues.quorum.backlog import Backlog
from convoymq.queues.quorum.consumers import Consumers
from convoymq.queues.quorum.deliveries import Deliveries
from convoymq.queues.reservations import SINGLE_ACTIVE, TAKE_RUNS_MAX, Reservation


class ReservationHolder:
    """See `reservations.Holder`."""

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

    def reservation_refusal(self) -> str | None:
        """With single active consumer there is one consumer or one reservation."""
        consumers = self._consumers
        if consumers.single_active and (consumers.active is not None or consumers.is_reserved):
            return SINGLE_ACTIVE
        return None

    def reservation_opened(self, reservation: Reservation) -> None:
        """See `reservations.Holder`."""
        reservation.held = runs.CheckedOut()
        self._consumers.reservation_came()
        tracing.reservation(self._machine.trace, words.CAME, reservation)

    def reservation_closed(self, reservation: Reservation) -> None:
        """See `reservations.Holder`."""
        assert not reservation.held.messages, "a reservation that ends holds messages"
        tracing.reservation(self._machine.trace, words.GONE, reservation)
        self._consumers.reservation_went()

    def reservation_take(self, reservation: Reservation, limit: int) -> int:
        """See `reservations.Holder`: like a delivery, but nobody is told."""
        held = reservation.held
        size = held.size
        backlog = self._backlog
        if not backlog.timed:
            taken = backlog.take_into(held, reservation.next, limit, TAKE_RUNS_MAX)
        else:
            taken = self._take_unexpired(reservation, limit)
        assert taken <= limit, "more was reserved than was asked for"
        rows = self._machine.trace
        if rows is not None:
            owner = tracing.reservation_session(reservation.name)
            for message_id, run in held.held_from(reservation.next):
                tracing.delivered(rows, words.BY_RESERVATION, owner, 0, message_id, run)
        backlog.hold(taken, held.size - size)
        return taken

    def _take_unexpired(self, reservation: Reservation, limit: int) -> int:
        """Run by run: behind each one there may be some that have expired."""
        taken = pieces = 0
        while taken < limit and pieces < TAKE_RUNS_MAX and self._backlog.ready():
            first_id = reservation.next + taken
            taken += self._backlog.take_into(reservation.held, first_id, limit - taken, 1)
            pieces += 1
            self._deliveries.expire()
        return taken

    def reservation_settle(self, reservation: Reservation, first: int, last: int) -> None:
        """See `reservations.Holder`."""
        self._trace_held(reservation, first, last)
        heads = self._backlog.follows()
        left = reservation.held.between(first, last + 1, last + 1 - first) if heads else ()
        messages, size = reservation.held.drop_oldest(last)
        assert messages == last - first + 1, "a reservation has a gap"
        self._backlog.settle(messages, size)
        for _, run in left:
            self._backlog.gone(run)

    def _trace_held(self, reservation: Reservation, first: int, last: int) -> None:
        rows = self._machine.trace
        if rows is not None:
            owner = tracing.reservation_session(reservation.name)
            held = reservation.held
            for _, run in held.between(first, last + 1, held.run_count()):
                tracing.left(rows, words.ACKED, words.BY_RESERVATION, 0, owner, 0, run)

    def reservation_return(
        self, reservation: Reservation, first: int, last: int, failed: bool
    ) -> None:
        """See `reservations.Holder`."""
        rows = self._machine.trace
        for run in reservation.held.remove(first, last):
            if rows is not None:
                owner = tracing.reservation_session(reservation.name)
                flags = words.BY_RESERVATION | (words.FAILED if failed else 0)
                tracing.left(rows, words.RETURNED, flags, 0, owner, 0, run)
            self._deliveries.give_back(run, int(failed), int(failed))
