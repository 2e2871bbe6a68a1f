"""Reserved messages in a classic queue's machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.queues.classic.runs import Consumer
from convoymq.queues.reservations import EXCLUSIVE, SINGLE_ACTIVE, TAKE_RUNS_MAX, Reservation

if TYPE_CHECKING:
    from convoymq.queues.classic.machine import ClassicMachine


class ReservationHolder:
    """See `reservations.Holder`. A reservation holds what a consumer holds; what it gives back goes
    to its old place, and there is no delivery limit."""

    def __init__(self, machine: ClassicMachine) -> None:
        self._machine = machine

    def reservation_refusal(self) -> str | None:
        """Exclusive consumers and active ones keep reservations out."""
        machine = self._machine
        if machine.is_exclusive:
            return EXCLUSIVE
        if machine.limits.single_active and (machine.active is not None or machine.reservations):
            return SINGLE_ACTIVE
        return None

    def reservation_opened(self, reservation: Reservation) -> None:
        """The queue is used."""
        reservation.held = Consumer(0, 0, reservation.name, 0, False, False, 0)
        self._machine.had_consumer = True

    def reservation_closed(self, reservation: Reservation) -> None:
        """Others may become active; the queue may be unused."""
        self._machine.choose_active()
        self._machine.check_unused()

    def reservation_take(self, reservation: Reservation, limit: int) -> int:
        """Like a delivery that nobody is told of."""
        machine, held = self._machine, reservation.held
        taken = 0
        for _ in range(TAKE_RUNS_MAX):
            run = machine.take_head(limit - taken) if taken < limit else None
            if run is None:
                break
            held.hold(run)
            machine.unsettled_count += run.count
            machine.delivered += run.count
            taken += run.count
        return taken

    def reservation_settle(self, reservation: Reservation, first: int, last: int) -> None:
        """Gone."""
        machine = self._machine
        for run in reservation.held.release(first, last):
            machine.unsettled_count -= run.count
            machine.acknowledged += run.count
            machine.forget(run)

    def reservation_return(
        self, reservation: Reservation, first: int, last: int, failed: bool
    ) -> None:
        """Ready again."""
        self._machine.give_back(reservation.held.release(first, last))
        reservation.held.next_id = first
