"""Effects that wait for the disk."""

from __future__ import annotations

from convoymq.queues.classic.gates import Gates
from convoymq.queues.classic.machine import APPLIED, DELIVER, UNUSED, Effect


def make() -> tuple[Gates, list[Effect], list[tuple[int, int]]]:
    gone: list[Effect] = []
    refused: list[tuple[int, int]] = []
    return Gates(gone.append, lambda *ends: refused.append(ends)), gone, refused


def test_effects_go_in_their_order_whichever_gate_opens_first() -> None:
    gates, gone, _ = make()
    first, second = [False], [True]
    gates.add(first, [(APPLIED, 1, 1, ())])
    gates.add(second, [(DELIVER, 1)], holds=True)
    gates.open()
    assert not gone
    assert gates.holds
    first[0] = True
    gates.open()
    assert gone == [(APPLIED, 1, 1, ()), (DELIVER, 1)]
    assert not gates.holds


def test_a_disk_that_fails_refuses_commands_and_lets_the_rest_go() -> None:
    gates, gone, refused = make()
    gate = [False]
    gates.add(gate, [(DELIVER, 1), (APPLIED, 2, 7, ())], holds=True)
    gates.refuse()
    assert gone == [(DELIVER, 1)]
    assert refused == [(2, 7)]
    assert gate == [True]
    assert not gates.holds


def test_what_waits_for_a_session_is_dropped() -> None:
    gates, gone, _ = make()
    gates.add([True], [(APPLIED, 1, 1, ()), (UNUSED,), (DELIVER, 2)])
    gates.forget(1)
    gates.open()
    assert gone == [(UNUSED,), (DELIVER, 2)]
