"""Whether a process is gone, from what the machine says of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from convoymq.transport.processes import ProcessId, ProcessWatch, own_process, read_start

OWN = ProcessId("m", 1, 5)


@pytest.mark.parametrize(
    ("peer", "first", "later", "gone"),
    [
        (ProcessId("m", 7, 9), 9, 9, False),
        (ProcessId("m", 7, 9), 9, 0, True),
        # The number was given to another process.
        (ProcessId("m", 7, 9), 9, 10, True),
        # Never seen: perhaps the system hides it.
        (ProcessId("m", 7, 9), 0, 0, False),
        (ProcessId("m", 7, 9), 8, 0, False),
        (ProcessId("other", 7, 9), 9, 0, False),
        (ProcessId(), 0, 0, False),
    ],
)
def test_only_what_was_seen_can_be_gone(
    peer: ProcessId, first: int, later: int, gone: bool
) -> None:
    now = first
    watch = ProcessWatch(OWN, peer, lambda pid: now)
    assert not watch.is_gone()
    now = later
    assert watch.is_gone() is gone


def test_an_unknown_machine_is_not_this_one() -> None:
    assert not ProcessWatch(ProcessId(), ProcessId("", 7, 9), lambda pid: 9).sees


def test_a_process_of_this_machine_is_seen_until_it_ends() -> None:
    own = own_process()
    if not own.machine:
        pytest.skip("this system does not show its processes")
    assert (own.pid, own.started) == (os.getpid(), read_start(os.getpid()))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        peer = ProcessId(own.machine, child.pid, read_start(child.pid))
        watch = ProcessWatch(own, peer)
        assert watch.sees
        assert not watch.is_gone()
        child.kill()
        # Ended and not yet waited for.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert watch.is_gone()
    finally:
        child.kill()
        child.communicate()
    assert watch.is_gone()
