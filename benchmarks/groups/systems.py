"""A name server, a master and a slave of each system, as processes on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.systems import SystemMissing

JARS = Path(__file__).resolve().parents[2] / "build" / "rocketmq"
BASE_PORT = 21_000
OTHER = 2
"""Number of the broker to which messages of a group escape."""
HEAPS = {"namesrv.NamesrvStartup": "256m", "broker.BrokerStartup": "1g"}
STOP_S = 60.0
BROKER = {
    "brokerClusterName": "c",
    "brokerIP1": "127.0.0.1",
    "mappedFileSizeCommitLog": 256 << 20,
    "inSyncReplicas": 2,
    "autoCreateTopicEnable": True,
    "defaultTopicQueueNums": 8,
    "sendMessageThreadPoolNums": 4,
    "useReentrantLockWhenPutMessage": True,
    "waitTimeMillsInSendQueue": 20_000,
    "osPageCacheBusyTimeOutMills": 20_000,
    "diskMaxUsedSpaceRatio": 95,
}
"""Of both; of RocketMQ's, a thread pool and time-outs that a machine with two cores can keep."""


class System:
    """One system under test: `convoy` or `rocketmq`."""

    def __init__(self, name: str) -> None:
        if name == "rocketmq" and not (
            shutil.which("java") and any(JARS.glob("rocketmq-broker-*.jar"))
        ):
            raise SystemMissing("RocketMQ's jars are not there: tools/install_rocketmq.sh")
        self.name = name

    def _command(self, role: str, config: Path) -> list[str]:
        if self.name == "convoy":
            return [sys.executable, "-m", "convoymq.cli", role, "-c", str(config)]
        main = {"namesrv": "namesrv.NamesrvStartup", "broker": "broker.BrokerStartup"}[role]
        home = config.parent
        return [
            *("java", f"-Xmx{HEAPS[main]}", f"-Duser.home={home}", "-cp", f"{JARS}/*"),
            *(f"org.apache.rocketmq.{main}", "-c", str(config)),
        ]

    @contextlib.contextmanager
    def process(self, role: str, home: Path, settings: dict[str, Any]) -> Iterator[int]:
        """Runs a process; its pid."""
        home.mkdir(parents=True)
        config = home / f"{role}.conf"
        config.write_text("".join(
            f"{name}={str(value).lower() if isinstance(value, bool) else value}\n"
            for name, value in settings.items()
        ))  # fmt: skip
        with (home / "log").open("wb") as log:
            started = subprocess.Popen(
                self._command(role, config),
                env={**os.environ, "ROCKETMQ_HOME": str(home), "HOME": str(home)},
                stdout=log,
                stderr=log,
            )
        try:
            yield started.pid
        finally:
            started.send_signal(signal.SIGTERM)
            try:
                started.wait(STOP_S)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()

    @contextlib.contextmanager
    def group(
        self, directory: Path, *, acting: bool = False, **more: object
    ) -> Iterator[list[int]]:
        """Runs a group; pids of master and slave. The name server has the base port.

        Args:
            acting: name servers name acting slaves, and there is another broker.
        """
        roles = [("b", 0, "SYNC_MASTER"), ("b", 1, "SLAVE")]
        names: dict[str, Any] = {"listenPort": BASE_PORT, "bindAddress": "127.0.0.1"}
        if acting:
            roles.append(("m", 0, "ASYNC_MASTER"))
            names["supportActingMaster"] = True
        with contextlib.ExitStack() as running:
            running.enter_context(self.process("namesrv", directory / "names", names))
            pids = []
            for number, (name, broker_id, role) in enumerate(roles):
                home = directory / str(number)
                settings = {
                    "brokerName": name,
                    "brokerId": broker_id,
                    "brokerRole": role,
                    "listenPort": broker_port(number),
                    "haListenPort": broker_port(number) + 1,
                    "namesrvAddr": f"127.0.0.1:{BASE_PORT}",
                    "storePathRootDir": home / "store",
                    "storePathCommitLog": home / "store" / "commitlog",
                }
                made = {**BROKER, **more, **settings}
                if name == "m":
                    made |= {"inSyncReplicas": 1, "totalReplicas": 1}
                if self.name == "convoy":
                    made |= {"bindAddress": "127.0.0.1"}
                pids.append(running.enter_context(self.process("broker", home, made)))
            yield pids


def broker_port(number: int) -> int:
    """Returns the port of a broker of a group."""
    return BASE_PORT + 10 * (number + 1)


def cpu_seconds(pids: list[int]) -> float:
    """Returns the processor time that processes have taken."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def anonymous_mib(pids: list[int]) -> float:
    """Returns their resident memory without pages of files, which mapped logs are."""
    found = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                found += int(line.split()[1])
    return found / 1024


def wait_until(condition: Any, seconds: float = 300.0) -> None:
    """Waits for a condition. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)
