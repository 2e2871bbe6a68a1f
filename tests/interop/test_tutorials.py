"""The programs in examples/tutorials, run as a reader would run them, on different nodes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks.systems import connect

from tests.clusters import Cluster
from tests.patience import PATIENCE_S

TUTORIALS = Path(__file__).resolve().parents[2] / "examples" / "tutorials"
QUEUES = ("tutorial.hello", "tutorial.tasks", "tutorial.square")
EXCHANGES = ("tutorial.news", "tutorial.logs", "tutorial.weather")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(cluster: Cluster) -> Iterator[Start]:
    """Starts a program against a node: `start("hello", 0, "send", "text")`."""
    running: list[subprocess.Popen[str]] = []

    def start_one(program: str, node: int, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(TUTORIALS / f"{program}.py"), "--uri", cluster.uris[node]]
        running.append(
            subprocess.Popen(
                [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return running[-1]

    yield start_one
    for process in running:
        process.kill()
        process.communicate()
    connection = connect(cluster.uris[0])
    channel = connection.channel()
    for queue in QUEUES:
        channel.queue_delete(queue)
    for exchange in EXCHANGES:
        channel.exchange_delete(exchange)
    connection.close()


def lines(process: subprocess.Popen[str]) -> list[str]:
    """What the program printed until its end, which must be a good one."""
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    return output.splitlines()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    """Read up to the line by which a listener says that it is ready."""
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


def test_hello(start: Start) -> None:
    assert lines(start("hello", 0, "send", "Hello", "again")) == ["sent Hello", "sent again"]
    assert lines(start("hello", 2, "--count", "2", "receive")) == [
        "received Hello",
        "received again",
    ]


def test_work_queues(start: Start) -> None:
    lines(start("work_queues", 0, "submit", "10", "11", "12"))
    done = lines(start("work_queues", 1, "--count", "2", "work", "--name", "anna"))
    assert done == ["anna: fibonacci(10) = 55", "anna: fibonacci(11) = 89"]
    rest = lines(start("work_queues", 2, "--count", "1", "work", "--name", "ben"))
    assert [line.removesuffix(" (again)") for line in rest] == ["ben: fibonacci(12) = 144"]


def test_publish_subscribe(start: Start) -> None:
    subscribers = [start("publish_subscribe", node, "--count", "2", "subscribe") for node in (0, 2)]
    for subscriber in subscribers:
        wait_for(subscriber, "listening")
    lines(start("publish_subscribe", 1, "publish", "one", "two"))
    for subscriber in subscribers:
        assert lines(subscriber) == ["heard one", "heard two"]


def test_routing(start: Start) -> None:
    listener = start("routing", 2, "--count", "2", "listen", "error", "warning")
    wait_for(listener, "listening")
    for level, text in (("info", "quiet"), ("error", "loud"), ("warning", "odd")):
        lines(start("routing", 0, "log", level, text))
    assert lines(listener) == ["error: loud", "warning: odd"]


def test_topics(start: Start) -> None:
    listener = start("topics", 1, "--count", "3", "listen", "berlin.*", "#.storm")
    wait_for(listener, "listening")
    for key in ("berlin.rain", "paris.rain", "paris.nord.storm", "berlin.mitte.rain", "storm"):
        lines(start("topics", 0, "report", key, "now"))
    assert lines(listener) == ["berlin.rain: now", "paris.nord.storm: now", "storm: now"]


def test_rpc(start: Start) -> None:
    server = start("rpc", 2, "--count", "2", "serve")
    wait_for(server, "serving")
    assert lines(start("rpc", 0, "call", "7", "12")) == ["7 squared is 49", "12 squared is 144"]
    assert lines(server) == []
