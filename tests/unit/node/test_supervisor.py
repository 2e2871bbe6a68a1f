"""The supervisor starts processes again, passes signals on, and ends with the last of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.unit.node import supervisor_program

Starter = Callable[[str], "Machine"]


class Machine:
    """A running machine of the program."""

    def __init__(self, what: str, starts: Path) -> None:
        self._starts = starts
        command = [sys.executable, "-m", supervisor_program.__name__, what, str(starts)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def lines(self) -> list[list[str]]:
        text = self._starts.read_text() if self._starts.exists() else ""
        return [line.split() for line in text.splitlines()]

    def starts(self) -> list[tuple[int, int]]:
        """(node, process id) of each start."""
        return [(int(a), int(b)) for a, b in (x for x in self.lines() if len(x) == 2)]

    def ends(self) -> list[list[str]]:
        return sorted(line[1:] for line in self.lines() if line[0] == "end")

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    made: list[Machine] = []

    def begin(what: str) -> Machine:
        made.append(Machine(what, tmp_path / "starts"))
        return made[-1]

    yield begin
    for machine in made:
        machine.process.kill()
        machine.process.wait()


def test_sigterm_ends_all_processes_and_then_the_supervisor(start: Starter) -> None:
    machine = start("serve")
    machine.until(lambda: len(machine.starts()) == 2)
    assert sorted(node for node, _ in machine.starts()) == [1, 33]
    machine.process.terminate()
    assert machine.process.wait(PATIENCE_S) == 0
    assert machine.ends() == [["1", "15"], ["33", "15"]]


def test_a_process_that_is_killed_or_fails_starts_again(start: Starter) -> None:
    machine = start("serve")
    machine.until(lambda: len(machine.starts()) == 2)
    second = dict(machine.starts())[33]
    os.kill(second, signal.SIGKILL)
    machine.until(lambda: len(machine.starts()) == 3)
    os.kill(machine.starts()[-1][1], signal.SIGHUP)
    machine.until(lambda: len(machine.starts()) == 4)
    assert [node for node, _ in machine.starts()].count(33) == 3
    machine.process.terminate()
    assert machine.process.wait(PATIENCE_S) == 0


def test_a_process_that_ended_in_order_stays_away_and_the_last_ends_the_supervisor(
    start: Starter,
) -> None:
    machine = start("serve")
    machine.until(lambda: len(machine.starts()) == 2)
    for number, (_, pid) in enumerate(machine.starts(), 1):
        os.kill(pid, signal.SIGTERM)
        machine.until(lambda n=number: len(machine.ends()) == n)  # type: ignore[misc]
    assert machine.process.wait(PATIENCE_S) == 0
    assert len(machine.starts()) == 2


def test_processes_end_when_their_supervisor_is_killed(start: Starter) -> None:
    machine = start("serve")
    machine.until(lambda: len(machine.starts()) == 2)
    machine.process.kill()
    machine.until(lambda: machine.ends() == [["1", "alone"], ["33", "alone"]])


def test_a_refusal_before_any_process_serves_ends_the_machine(start: Starter) -> None:
    machine = start("refuse")
    # Process 1 may have been ready before: then the supervisor goes on trying.
    machine.until(lambda: machine.process.poll() is not None or len(machine.starts()) > 3)
    if machine.process.poll() is None:
        machine.process.terminate()
    assert machine.process.wait(PATIENCE_S) in (0, 1)
