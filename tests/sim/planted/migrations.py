"""Bugs of migrations."""

from __future__ import annotations

from typing import Any

from tests.sim.planted.registry import late, planting

plant = planting("migrations")
_migrations = late("convoymq.broker:migrations")


@plant("a quorum queue goes on while it is copied", "none")
def goes_on_while_it_is_copied() -> None:
    from convoymq.queues.quorum.machine import QuorumMachine

    follow: Any = QuorumMachine._follow_settings

    def planted(self: Any) -> None:
        follow(self)
        self.is_frozen = False

    QuorumMachine._follow_settings = planted  # type: ignore[method-assign]


@plant("the copy begins before the queue is frozen", "slow,spike")
def copied_before_it_is_frozen() -> None:
    from convoymq.queues.quorum.queue import QuorumQueue

    async def planted(self: Any, successor: int, timeout: float) -> None:
        self._propose_frozen(successor)

    QuorumQueue.freeze = planted  # type: ignore[method-assign]


@plant("unacknowledged messages are not copied", "none")
def unacknowledged_are_lost() -> None:
    from convoymq.queues.classic import migration

    def planted(machine: Any) -> Any:
        return ((run, False) for run in machine.backing.by_position())

    migration._stored = planted


@plant("what consumers hold is not marked in the successor", "none")
def held_is_fresh_again() -> None:
    async def planted(self: Any, count: int) -> None:
        return

    _migrations().Copier._mark = planted


@plant("the files of a queue stay after the switch", "none")
def both_are_left() -> None:
    from convoymq.queues.classic.log import ClassicLog

    ClassicLog.remove = lambda self: None  # type: ignore[method-assign]


@plant("publishes without an answer are confirmed at the switch", "none")
def confirmed_at_the_switch() -> None:
    from convoymq.queues.session_client import SessionClient

    replace = SessionClient.replace

    def planted(self: Any, successor: Any, known: int | None) -> None:
        replace(self, successor, self._target.seq)

    SessionClient.replace = planted  # type: ignore[method-assign]


@plant("pending publishes get into the successor in the wrong order", "none")
def order_turns_at_the_switch() -> None:
    from convoymq.queues import handing_over

    runs_of = handing_over._runs_of

    def planted(command: Any) -> Any:
        pieces = [(tag + i, 1) for tag, count in runs_of(command) for i in range(count)]
        slices = handing_over.slice_records
        handing_over.slice_records = lambda data, at, first, count: slices(
            data, at, command.messages - 1 - first, count
        )
        yield from pieces
        handing_over.slice_records = slices

    handing_over._runs_of = planted


@plant("a switch that is answered late is taken for undone", "none")
def late_switch_is_undone() -> None:
    async def planted(self: Any, record: Any, successor: int) -> bool:
        return False

    _migrations().Migrations._settle = planted


@plant("a queue thaws before its migration has ended", "none")
def thaws_too_early() -> None:
    found = _migrations().Migrations
    found._has_ended = lambda self, successor: True
    tick = found.tick

    def planted(self: Any) -> None:
        running, self._running = self._running, set()
        try:
            for queue in list(self._local.handles()):
                if queue.frozen:
                    self._thaw(queue.group, queue.frozen)
        finally:
            self._running = running
        tick(self)

    found.tick = planted
