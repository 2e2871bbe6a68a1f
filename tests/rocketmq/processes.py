"""Roles of `convoy` as processes; the log of each is a file of the test's directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.faults.traffic import until
from tests.patience import PATIENCE_S
from tests.ports import single_port
from tests.rocketmq.upstream import ports


class RoleProcess:
    """A process of `convoy`. Another one of its name goes on in the same log."""

    environment: Mapping[str, str] = {}
    """Beyond that of this process."""

    def __init__(self, directory: Path, name: str, role: str, **settings: object) -> None:
        self.log = directory / f"{name}.log"
        self._begins = self.log.stat().st_size if self.log.exists() else 0
        config = directory / f"{name}.conf"
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "convoymq.cli", role, "-c", str(config)],
                stdout=out, stderr=out, env={**os.environ, **self.environment},
            )  # fmt: skip

    def events(self, event: str) -> list[dict[str, object]]:
        """What this process has logged of a kind, not one before it."""
        lines = self.log.read_bytes()[self._begins :].splitlines()
        said = [json.loads(line) for line in lines if line.startswith(b"{") and line[-1:] == b"}"]
        return [line for line in said if line["event"] == event]

    def wait_for(self, event: str) -> list[dict[str, object]]:
        """Waits until an event is in the log; returns all of its kind. A process that ended logs
        nothing more."""
        until(lambda: self.events(event) or self.process.poll() is not None)
        found = self.events(event)
        assert found, f"{event} is not in {self.log.read_text()}"
        return found

    def end(self) -> int:
        """Ends it in order: a signal before it is ready would kill it. Returns its exit code."""
        until(lambda: self.process.poll() is not None or self.events("role.ready"))
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(PATIENCE_S)


class Server(RoleProcess):
    """`convoy namesrv`."""

    def __init__(self, directory: Path, **more: object) -> None:
        self.port = single_port()
        super().__init__(
            directory, "namesrv", "namesrv", listenPort=self.port, bindAddress="127.0.0.1",
            supportActingMaster="true", kvConfigPath=directory / "kv.json", serverWorkerThreads=8,
            **more,
        )  # fmt: skip
        self.wait_for("role.ready")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        assert self.end() == 0


class BrokerProcess(RoleProcess):
    """`convoy broker`."""

    def __init__(self, directory: Path, names: str, **more: object) -> None:
        chosen = ports()
        self.port = chosen["listenPort"]
        settings = chosen | {
            "bindAddress": "127.0.0.1", "brokerIP1": "127.0.0.1", "namesrvAddr": names,
            "enablePropertyFilter": "true", "storePathRootDir": directory / "store",
            "mappedFileSizeCommitLog": 16 << 20, "sendMessageThreadPoolNums": 4,
        } | more  # fmt: skip
        super().__init__(directory, "broker", "broker", **settings)
        self.wait_for("rocketmq.registered")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        assert self.end() == 0
        assert "remoting.fault" not in self.log.read_text()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends what still runs."""
    process.kill()
    process.wait()
