"""Invariants of a classic queue's machine between any two inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoymq.queues.classic.machine import ClassicMachine
    from convoymq.queues.classic.runs import Block


def check_invariants(machine: ClassicMachine) -> None:
    """Asserts what the text of `classic.machine` promises. Cost: O(runs)."""
    machine.backing.check()
    places = [run for line in machine.backing.occupied() for run in line.runs()]
    held = list(machine.held_runs())
    for reservation in machine.reservations.by_name.values():
        assert reservation.held.outstanding == reservation.next - reservation.first
    machine.reservations.check()
    assert machine.unsettled_count == sum(run.count for run in held)
    live: dict[Block, int] = {}
    seen: set[int] = set()
    assert machine.leaving.count == sum(run.count for run in machine.leaving)
    assert machine.aside.count == sum(run.count for run in machine.aside)
    everything = [*places, *held, *machine.leaving, *machine.aside]
    for run in everything:
        live[run.block] = live.get(run.block, 0) + run.count
        span = range(run.position, run.position + run.count)
        assert seen.isdisjoint(span)
        seen.update(span)
    assert all(block.live == count for block, count in live.items())
    for run in machine.aside:
        assert run.note.avoiding or run.note.due_ms, "a message is set aside for nothing"
    for session in machine.sessions.values():
        for consumer in session.consumers.values():
            assert consumer.outstanding == sum(run.count for run in consumer.runs)
