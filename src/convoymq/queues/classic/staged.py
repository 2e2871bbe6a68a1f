"""What holding staged messages means in a classic queue's machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.queues.classic.runs import Consumer
from convoymq.queues.stages import EXCLUSIVE, SINGLE_ACTIVE, TAKE_RUNS_MAX, Stage

if TYPE_CHECKING:
    from convoymq.queues.classic.machine import ClassicMachine


class StageHolder:
    """See `stages.Holder`. A stage holds what a consumer holds; what it gives back goes to its old
    place, and there is no delivery limit."""

    def __init__(self, machine: ClassicMachine) -> None:
        self._machine = machine

    def stage_refusal(self) -> str | None:
        """Exclusive consumers and active ones keep stages out."""
        machine = self._machine
        if machine.is_exclusive:
            return EXCLUSIVE
        if machine.limits.single_active and (machine.active is not None or machine.stages):
            return SINGLE_ACTIVE
        return None

    def stage_opened(self, stage: Stage) -> None:
        """The queue is used."""
        stage.held = Consumer(0, 0, stage.name, 0, False, False, 0)
        self._machine.had_consumer = True

    def stage_closed(self, stage: Stage) -> None:
        """Others may become active; the queue may be unused."""
        self._machine.choose_active()
        self._machine.check_unused()

    def stage_take(self, stage: Stage, limit: int) -> int:
        """Like a delivery that nobody is told of."""
        machine, held = self._machine, stage.held
        taken = 0
        for _ in range(TAKE_RUNS_MAX):
            machine.drop_late()
            if taken >= limit or not machine.ready_count:
                break
            run = machine.take_head(limit - taken)
            held.hold(run)
            machine.unsettled_count += run.count
            machine.delivered += run.count
            taken += run.count
        return taken

    def stage_settle(self, stage: Stage, first: int, last: int) -> None:
        """Gone."""
        machine = self._machine
        for run in stage.held.release(first, last):
            machine.unsettled_count -= run.count
            machine.acknowledged += run.count
            machine.forget(run)

    def stage_return(self, stage: Stage, first: int, last: int, failed: bool) -> None:
        """Ready again."""
        self._machine.give_back(stage.held.release(first, last))
        stage.held.next_id = first
