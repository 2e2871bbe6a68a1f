"""A real RabbitMQ cluster on loopback, from Debian's package, as the system to compare with.

Three Erlang nodes with their own data directories, ports, cookie and epmd; the system's service is
neither used nor touched. Run as a program it keeps a cluster up in the foreground, starts
nodes again that are killed, and prints the variables by which the interop tests find it:

    python benchmarks/rabbitmq.py --base-port 5700
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

if __package__ in (None, ""):
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.systems import LocalCluster, NotUsable, SystemMissing, keep_up

SCRIPTS = Path("/usr/lib/rabbitmq/bin")
INSTALLED = Path("/usr/lib/rabbitmq/lib")
INSTALL_HINT = "RabbitMQ is not installed: run `make rabbitmq` (Debian and Ubuntu, needs root)"

CONFIG = """\
listeners.tcp.1 = 127.0.0.1:{port}
cluster_name = benchmark
cluster_formation.peer_discovery_backend = classic_config
{peers}
disk_free_limit.absolute = 100MB
log.file.level = warning
log.console = false
"""

MANAGEMENT = "rabbitmq_management"
COMMAND_S = 600
WAIT_SYNCHRONISED = """
Queue = rabbit_misc:r(<<"/">>, queue, <<"%s">>),
Wait = fun Wait() ->
    {ok, Record} = rabbit_amqqueue:lookup(Queue),
    case amqqueue:get_sync_slave_pids(Record) of
        [_ | _] -> ok;
        _ -> timer:sleep(10), Wait()
    end
end,
Wait().
"""
HTTP_CONFIG = """\
management.tcp.ip = 127.0.0.1
management.tcp.port = {port}
"""


class RabbitCluster(LocalCluster):
    """RabbitMQ nodes rabbit1@localhost, rabbit2@localhost, … with an epmd of their own.

    Ports: base_port is epmd's, base_port + n AMQP, base_port + 20 + n the Erlang distribution,
    base_port + 40 + n HTTP, where the management plugin is among the plugins.
    """

    system = "rabbitmq"

    def __init__(
        self,
        *,
        base_port: int,
        count: int = 3,
        plugins: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._epmd: subprocess.Popen[bytes] | None = None
        if not (SCRIPTS / "rabbitmq-server").exists() or shutil.which("epmd") is None:
            raise SystemMissing(INSTALL_HINT)
        super().__init__(base_port=base_port, count=count)
        home = self.directory / "home"
        home.mkdir()
        cookie = home / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(16))
        cookie.chmod(0o400)
        (self.directory / "env.conf").touch()
        (self.directory / "enabled_plugins").write_text(f"[{','.join(plugins)}].\n")
        peers = "\n".join(
            f"cluster_formation.classic_config.nodes.{number} = {node.name}"
            for number, node in enumerate(self.nodes, 1)
        )
        for number, node in enumerate(self.nodes, 1):
            text = CONFIG.format(port=node.port, peers=peers)
            if MANAGEMENT in plugins:
                text += HTTP_CONFIG.format(port=base_port + 40 + number)
            text += "".join(f"{key} = {value}\n" for key, value in (settings or {}).items())
            (self.directory / f"{node.name}.conf").write_text(text)

    def node_name(self, number: int) -> str:
        return f"rabbit{number}@localhost"

    def version(self) -> str:
        return installed_version()

    def environment(self, index: int) -> dict[str, str]:
        """The variables for RabbitMQ's scripts, so that they see this cluster and nothing else."""
        node = self.nodes[index]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RABBITMQ_")}
        return kept | {
            "HOME": str(self.directory / "home"),
            "ERL_EPMD_PORT": str(self.base_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "env.conf"),
            "RABBITMQ_NODENAME": node.name,
            "RABBITMQ_CONFIG_FILE": str(self.directory / f"{node.name}.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "data"),
            "RABBITMQ_LOG_BASE": str(self.directory / "logs"),
            "RABBITMQ_PID_FILE": str(self.directory / f"{node.name}.pid"),
            "RABBITMQ_DIST_PORT": str(self.base_port + 21 + index),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            # The start script then replaces itself with the Erlang process, whose pid we know.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def add_user(self, name: str, *, configure: str, write: str, read: str) -> None:
        self.control("add_user", name, name)
        self.control("set_permissions", name, configure, write, read)

    def delete_user(self, name: str) -> None:
        self.control("delete_user", name)

    def mirror(self, pattern: str, definition: Mapping[str, str | int]) -> None:
        self.control(
            "set_policy", "--apply-to", "queues", "mirror", pattern, json.dumps(definition)
        )

    def wait_synchronised(self, queue: str) -> None:
        # Waits within the node: a command takes seconds to start.
        self.control("eval", WAIT_SYNCHRONISED % queue)

    def control(self, *words: str) -> None:
        """Run rabbitmqctl against the first node. Raises CalledProcessError."""
        subprocess.run(
            [str(SCRIPTS / "rabbitmqctl"), "-n", self.nodes[0].name, *words],
            env=self.environment(0),
            cwd=self.directory,
            check=True,
            capture_output=True,
            timeout=COMMAND_S,
        )

    def spawn(self, index: int) -> subprocess.Popen[bytes]:
        self._start_epmd()
        with self.log_path(self.nodes[index]).open("ab") as output:
            return subprocess.Popen(
                [str(SCRIPTS / "rabbitmq-server")],
                env=self.environment(index),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _start_epmd(self) -> None:
        if self._epmd is not None:
            return
        self._epmd = subprocess.Popen(
            ["epmd", "-address", "127.0.0.1", "-port", str(self.base_port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.base_port), timeout=1).close()
            except OSError:
                time.sleep(0.01)
            else:
                return
        raise NotUsable(f"epmd does not listen on port {self.base_port}")

    def stop(self) -> None:
        super().stop()
        if self._epmd is not None:
            self._epmd.terminate()
            self._epmd.wait()
            self._epmd = None


def installed_version() -> str:
    """The version of the installed package. Raises SystemMissing."""
    for path in sorted(INSTALLED.glob("rabbitmq_server-*")):
        return path.name.removeprefix("rabbitmq_server-")
    raise SystemMissing(INSTALL_HINT)


def main() -> None:
    """Keep a cluster up until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description="A RabbitMQ cluster on loopback")
    parser.add_argument("--base-port", type=int, default=5700)
    options = parser.parse_args()
    try:
        keep_up(RabbitCluster(base_port=options.base_port))
    except SystemMissing as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
