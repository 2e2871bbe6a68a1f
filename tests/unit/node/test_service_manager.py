"""A node reports to systemd when it is ready, that its loop runs, and that it stops."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoymq.node.service_manager import ServiceManager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


def heard(listening: socket.socket) -> list[str]:
    texts = []
    while True:
        try:
            texts.append(listening.recv(4096).decode())
        except BlockingIOError:
            return texts


def test_states_are_reported(manager: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": manager.getsockname(), "HOME": "/"}
    service = ServiceManager(environment)
    service.starting("Opens queues")
    service.ready()
    service.beat()
    service.stopping()
    texts = heard(manager)
    assert [text.partition("\n")[0] for text in texts] == [
        "STATUS=Opens queues",
        "READY=1",
        "STOPPING=1",
    ]
    # Children of the node do not report in its name.
    assert environment == {"HOME": "/"}


def test_a_watchdog_is_fed_three_times_in_its_time(manager: socket.socket) -> None:
    service = ServiceManager(
        {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "3600000000"}
    )
    service.beat()
    service.beat()
    assert heard(manager) == ["WATCHDOG=1"]


def test_the_watchdog_of_another_process_is_not_fed(manager: socket.socket) -> None:
    service = ServiceManager(
        {
            "NOTIFY_SOCKET": manager.getsockname(),
            "WATCHDOG_USEC": "1",
            "WATCHDOG_PID": str(os.getpid() + 1),
        }
    )
    service.beat()
    assert heard(manager) == []


def test_an_abstract_address_is_understood() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0convoy-test-{os.getpid()}")
        listening.setblocking(False)
        ServiceManager({"NOTIFY_SOCKET": f"@convoy-test-{os.getpid()}"}).ready()
        assert len(heard(listening)) == 1


@pytest.mark.provokes("node.not_notified")
def test_a_manager_that_is_gone_stops_nobody(tmp_path: Path) -> None:
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
    ServiceManager({}).ready()
