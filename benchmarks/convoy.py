"""A ConvoyMQ cluster of real node processes on loopback, for benchmarks and interop tests.

Run as a program it keeps one up for the interop tests, as `benchmarks/rabbitmq.py` does.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.load import CHOSEN_PERF
from benchmarks.systems import USABLE_S, LocalCluster, NotUsable, keep_up

NODE_COMMAND = (sys.executable, "-m", "convoymq.cli", "node", "--config")


POLL_S = 0.02
HTTP_S = 30.0


class ConvoyCluster(LocalCluster):
    """Three `convoy node` processes.

    Ports: base_port + n AMQP, base_port + 10 + n links between the nodes, base_port + 20 + n HTTP,
    base_port + 30 + n metrics.

    Args: `settings`: more lines for every node's `convoy.conf`.
    """

    system = "convoy"

    def __init__(
        self, *, base_port: int, count: int = 3, settings: dict[str, str] | None = None
    ) -> None:
        super().__init__(base_port=base_port, count=count)
        self._secret = secrets.token_hex(16)
        for index, node in enumerate(self.nodes):
            lines = self._configuration(index) | (settings or {})
            text = "".join(f"{key} = {value}\n" for key, value in lines.items())
            (self.directory / f"{node.name}.conf").write_text(text)

    def _configuration(self, index: int) -> dict[str, str]:
        number = index + 1
        link = self.base_port + 10
        peers = range(1, len(self.nodes) + 1)
        return {
            "node.id": str(number),
            "node.name": self.node_name(number),
            "data_dir": str(self.directory / self.node_name(number)),
            "listeners.tcp.default": f"127.0.0.1:{self.base_port + number}",
            "cluster.listen": f"127.0.0.1:{link + number}",
            "cluster.peers": ",".join(f"{peer}@127.0.0.1:{link + peer}" for peer in peers),
            "cluster.secret": self._secret,
            "management.tcp.port": str(self.base_port + 20 + number),
            "prometheus.tcp.port": str(self.base_port + 30 + number),
        }

    def node_name(self, number: int) -> str:
        return f"convoy{number}"

    def version(self) -> str:
        return importlib.metadata.version("convoymq")

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.base_port + 21}"

    def add_user(self, name: str, *, configure: str, write: str, read: str) -> None:
        add_user(self.api, name, configure=configure, write=write, read=read)

    def delete_user(self, name: str) -> None:
        delete_user(self.api, name)

    def mirror(self, pattern: str, definition: Mapping[str, str | int]) -> None:
        body = {"pattern": pattern, "definition": definition, "apply-to": "queues"}
        with self.http() as http:
            http.put("/api/policies/%2F/mirror", json=body).raise_for_status()

    def wait_synchronised(self, queue: str) -> None:
        deadline = time.monotonic() + USABLE_S
        with self.http() as http:
            while not http.get(f"/api/queues/%2F/{queue}").json().get("synchronised_slave_nodes"):
                if time.monotonic() > deadline:
                    raise NotUsable(f"{queue} has no synchronised mirror")
                time.sleep(POLL_S)

    def http(self) -> httpx.Client:
        """Opens a client of the first node's HTTP API."""
        return httpx.Client(base_url=self.api, auth=("guest", "guest"), timeout=HTTP_S)

    def spawn(self, index: int) -> subprocess.Popen[bytes]:
        node = self.nodes[index]
        # Nodes refuse variables that begin as theirs and are not.
        kept = {name: value for name, value in os.environ.items() if name != CHOSEN_PERF}
        with self.log_path(node).open("ab") as output:
            return subprocess.Popen(
                [*NODE_COMMAND, str(self.directory / f"{node.name}.conf")],
                env=kept | {"PYTHONFAULTHANDLER": "1"},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )


def add_user(api: str, name: str, *, configure: str, write: str, read: str) -> None:
    """Make a user through the HTTP API at `api`. Raises httpx.HTTPError."""
    with httpx.Client(base_url=api, auth=("guest", "guest"), timeout=30) as http:
        http.put(f"/api/users/{name}", json={"password": name, "tags": ""}).raise_for_status()
        http.put(
            f"/api/permissions/%2F/{name}",
            json={"configure": configure, "write": write, "read": read},
        ).raise_for_status()


def delete_user(api: str, name: str) -> None:
    """Remove a user through the HTTP API at `api`. Raises httpx.HTTPError."""
    httpx.delete(f"{api}/api/users/{name}", auth=("guest", "guest"), timeout=30).raise_for_status()


def convoy_cluster(*, base_port: int, settings: dict[str, str] | None = None) -> ConvoyCluster:
    """Make a three-node ConvoyMQ cluster; `start()` starts it, `stop()` removes every trace."""
    return ConvoyCluster(base_port=base_port, settings=settings)


def main() -> None:
    """Keep a cluster up until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description="A ConvoyMQ cluster on loopback")
    parser.add_argument("--base-port", type=int, default=5600)
    keep_up(ConvoyCluster(base_port=parser.parse_args().base_port))


if __name__ == "__main__":
    main()
