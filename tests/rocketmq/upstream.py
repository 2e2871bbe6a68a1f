"""RocketMQ's own processes on loopback, for tests that compare with them.

`make test-rocketmq` puts their jars beside the environment; without them these tests are skipped,
and say so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import single_port

JARS = Path(__file__).resolve().parents[2] / "build" / "rocketmq"
JAVA = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

_missing = "" if shutil.which("javac") and any(JARS.glob("rocketmq-broker-*.jar")) else (
    "RocketMQ's jars are not there: make test-rocketmq"
)  # fmt: skip
needs_rocketmq = pytest.mark.skipif(bool(_missing), reason=_missing or "RocketMQ is there")


def ports() -> dict[str, int]:
    """Ports of a broker, which has a second one, two below the first."""
    _, ha_port, port = (single_port() for _ in range(3))
    return {"listenPort": port, "haListenPort": ha_port}


def command(directory: Path, main: str, *arguments: str, heap: str = "128m") -> list[str]:
    """Returns the command line of one of RocketMQ's main classes, whose home is the directory."""
    return [
        *("java", *JAVA, f"-Xms{heap}", f"-Xmx{heap}", f"-Duser.home={directory}"),
        *("-cp", f"{JARS}/*", f"org.apache.rocketmq.{main}", *arguments),
    ]


def environment(directory: Path) -> dict[str, str]:
    """Returns the environment of RocketMQ's processes."""
    return {**os.environ, "ROCKETMQ_HOME": str(directory), "HOME": str(directory)}


def mqadmin(directory: Path, *arguments: str) -> str:
    """Returns what RocketMQ's tool of operators prints."""
    done = subprocess.run(
        command(directory, "tools.command.MQAdminStartup", *arguments),
        env=environment(directory),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def broker(directory: Path, **settings: object) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a broker; ended in order, or by the test."""
    directory.mkdir(parents=True, exist_ok=True)
    defaults = {
        "brokerClusterName": "c", "brokerIP1": "127.0.0.1", "mappedFileSizeCommitLog": 16 << 20,
        "mappedFileSizeConsumeQueue": 60_000, "storePathRootDir": directory / "store",
        "storePathCommitLog": directory / "store" / "commitlog", "timerWheelEnable": "false",
        "flushDiskType": "ASYNC_FLUSH",
    }  # fmt: skip
    lines = [f"{name}={value}\n" for name, value in (defaults | settings).items()]
    (directory / "broker.conf").write_text("".join(lines))
    config = str(directory / "broker.conf")
    with (directory / "broker.log").open("wb") as log:
        process = subprocess.Popen(
            command(directory, "broker.BrokerStartup", "-c", config, heap="256m"),
            env=environment(directory), stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
