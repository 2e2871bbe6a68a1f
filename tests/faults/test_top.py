"""`convoy top` as a process in a terminal, before three nodes of which one is killed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pika
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.patience import PATIENCE_S

CONVOY = [sys.executable, "-m", "convoymq.cli", "top"]


class Terminal:
    """A terminal of 30 lines of 140 characters, and what was written to it."""

    def __init__(self, master: int) -> None:
        self.master = master
        self.text = ""

    def press(self, keys: str) -> None:
        self.text = ""
        os.write(self.master, keys.encode())

    def wait_for(self, *texts: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not all(text in self.text for text in texts):
            assert time.monotonic() < deadline, (texts, self.text[-4000:])
            if select.select([self.master], [], [], 1)[0]:
                self.text += os.read(self.master, 65536).decode(errors="replace")


@contextmanager
def top(*words: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 140, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "30"}
    process = subprocess.Popen(
        [*CONVOY, *words], stdin=slave, stdout=slave, stderr=slave, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield Terminal(master), process
    finally:
        process.kill()
        process.wait()
        os.close(slave)
        os.close(master)


def test_lists_follow_keys_and_the_cluster(cluster: LocalCluster) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(cluster.nodes[0].uri))
    channel = connection.channel()
    for name in ("one", "two"):
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
    for _ in range(3):
        channel.basic_publish("", "two", b"body")
    with top("--data", str(cluster.data), "--interval", "0.2", "--sort", "ready") as (screen, run):
        screen.wait_for("queues by ready", "two", "3/3")
        assert screen.text.index("two") < screen.text.index("one ")
        screen.press("2")
        screen.wait_for("nodes by node", "running")
        cluster.kill(1)
        screen.press("r")
        screen.wait_for("down")
        screen.press("3")
        screen.wait_for("consumers by unacked")
        screen.press("q")
        assert run.wait(PATIENCE_S) == 0
    connection_is_gone = pytest.raises((pika.exceptions.AMQPError, OSError))
    with connection_is_gone:
        connection.process_data_events(PATIENCE_S)
        connection.close()


def test_a_signal_leaves_the_terminal_as_it_was(cluster: LocalCluster) -> None:
    with top("--data", str(cluster.data)) as (screen, run):
        before = termios.tcgetattr(screen.master)
        screen.wait_for("queues by in/s")
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE_S) == 0
        assert termios.tcgetattr(screen.master)[3] & termios.ICANON == before[3] & termios.ICANON


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--list", "queue"), 2, "there is no queue; did you mean queues?"),
        (("--list", "nodes", "--sort", "memori"), 2, "did you mean memory?"),
        (("--once", "--url", "http://127.0.0.1:1"), 1, "nothing listens there"),
        (("--url", "http://127.0.0.1:1"), 2, "a terminal is needed"),
        (("--once", "--url", "nonsense:x"), 1, "is no address of an HTTP API"),
    ],
)
def test_a_wrong_call_is_one_line(words: tuple[str, ...], code: int, text: str) -> None:
    ended = subprocess.run([*CONVOY, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended
    assert text in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_one_look_is_json(cluster: LocalCluster) -> None:
    words = ("--once", "--list", "nodes", "--data", str(cluster.data))
    ended = subprocess.run([*CONVOY, *words], capture_output=True, text=True, check=True)
    found = json.loads(ended.stdout)
    assert [row["state"] for row in found["nodes"]] == ["running"] * 3
    assert "0 queues" in found["cluster"]
