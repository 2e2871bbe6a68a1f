"""A local cluster: every node a process on loopback, with a state file that other commands read."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from convoymq.cli.api import get_json
from convoymq.cli.starting import PROGRESS_CPU_S, STALLED_S, WAITS, reason, steps
from convoymq.model.config import Address, AlarmsConfig, NodeConfig, parse_listener
from convoymq.model.errors import Misuse, Unavailable
from convoymq.model.machines import processes_max
from convoymq.transport.listening import listen

STATE_FILE = "cluster.json"
DATA_DEFAULT = Path("convoy-data")
NODE_MODULE = "convoymq.cli.serve"
MEMORY_KEY = "vm_memory_high_watermark"
OFFSETS = (10_000, 10_020, 20_000)
"""HTTP, metrics and link ports above the AMQP port, as people know them from RabbitMQ."""
OFFSETS_CLOSE = (100, 200, 300)
"""The same where those would lie beyond the last port."""
OWN_PORTS = frozenset(
    ("listeners.tcp.default", "management.tcp.port", "prometheus.tcp.port", "cluster.listen")
)
"""Keys that each node has another value of."""
TLS_LISTENERS = "listeners.ssl."
BASE_PORT_MAX = 65_000
POLL_S = 0.01
NODES_MAX = 64


@dataclass(slots=True)
class LocalNode:
    """One node of a local cluster."""

    number: int
    amqp_port: int
    http_port: int
    metrics_port: int
    link_port: int
    pid: int | None = None
    """Of the node's process, or of the supervisor of several."""
    processes: int = 1

    def ports(self) -> dict[str, int]:
        """Returns the ports that it listens on, by what for."""
        found = {
            "AMQP": self.amqp_port,
            "HTTP": self.http_port,
            "metrics": self.metrics_port,
        }
        for above in range(self.processes):
            of_process = f" of process {above + 1}" if above else ""
            found["cluster" + of_process] = self.link_port + above
        return found

    def pids(self) -> list[int]:
        """Returns the process ids of the node, process by process."""
        if self.pid is None:
            return []
        return [self.pid] if self.processes == 1 else children(self.pid)

    @property
    def uri(self) -> str:
        """Returns the address for clients."""
        return f"amqp://guest:guest@127.0.0.1:{self.amqp_port}/"


@dataclass(slots=True)
class Traffic:
    """Sums over all running nodes since their starts."""

    delivered_local: int = 0
    delivered_proxied: int = 0
    link_bytes: int = 0


def offsets(base_port: int) -> tuple[int, int, int]:
    """Returns how far HTTP, metrics and link ports lie above AMQP ports."""
    return OFFSETS if base_port + OFFSETS[2] + NODES_MAX <= 65_535 else OFFSETS_CLOSE


class LocalCluster:
    """Nodes on this machine. As a context manager: started on entry, stopped on exit.

    Node k listens for AMQP on base_port + k - 1, and as far above as `offsets` says for the rest.
    A node of several processes has as many ports for links, one after the other.

    Args:
        data: directory of the cluster; node k's files lie in `node-k`.
        settings: further configuration keys, for all nodes.
        processes: processes of each node, which is a machine then.
    """

    def __init__(
        self,
        data: Path,
        nodes: int = 3,
        base_port: int = 5672,
        settings: dict[str, str] | None = None,
        processes: int = 1,
    ) -> None:
        if not 1 <= nodes <= NODES_MAX:
            raise Misuse(f"a local cluster has 1 to {NODES_MAX} nodes")
        if not 1024 <= base_port <= BASE_PORT_MAX:
            raise Misuse(f"the base port must lie between 1024 and {BASE_PORT_MAX}")
        self.data = Path(data).absolute()
        self.base_port = base_port
        self.settings = settings or {}
        if not 1 <= processes <= processes_max(nodes):
            raise Misuse(f"{nodes} nodes may have 1 to {processes_max(nodes)} processes each")
        taken = sorted(self.settings.keys() & OWN_PORTS) if nodes > 1 else ()
        if taken:
            raise Misuse(f"{taken[0]} would be the same of all nodes; --base-port moves all ports")
        http, metrics, link = offsets(base_port)
        self.nodes = [
            LocalNode(
                k + 1,
                base_port + k,
                base_port + http + k,
                base_port + metrics + k,
                base_port + link + k * processes,
                processes=processes,
            )
            for k in range(nodes)
        ]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._log_begins: dict[int, int] = {}
        """Size of each node's log file when the node was started."""
        self._lock: int | None = None

    # -- start and stop ---------------------------------------------------------------------

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts all nodes; does not wait. Raises Misuse when the directory is in use."""
        self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self.data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._unlock()
            raise Misuse(f"a cluster already runs in {self.data}") from None
        for node in self.nodes:
            for use, port in (*node.ports().items(), *self._tls_ports(node)):
                if not is_free(port):
                    self._unlock()
                    raise Misuse(
                        f"port {port} ({use} of node {node.number}) is in use; "
                        "choose another --base-port"
                    )
        for node in self.nodes:
            self._write_config(node)
        for node in self.nodes:
            self._spawn(node)
        self._save()

    def start_node(self, number: int) -> None:
        """Starts a node that is not running."""
        node = self._node(number)
        if self._running(number):
            raise Misuse(f"node {number} is running")
        self._spawn(node)
        self._save()

    def kill(self, number: int, sign: int = signal.SIGKILL) -> None:
        """Sends a node a signal; waits for its end when the signal is SIGKILL."""
        process = self._processes[number]
        process.send_signal(sign)
        if sign == signal.SIGKILL:
            process.wait()
        self.poll()

    def stop(self, allowed_s: float | None = None) -> None:
        """Ends all nodes: asks first, and kills those that need longer than `allowed_s`; None =
        twice the time of an orderly stop and ten seconds."""
        for process in self._processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                    process.terminate()
        if allowed_s is None:
            orderly = self.settings.get("node.stop_timeout", "")
            orderly_ms = int(orderly) if orderly.isdigit() else NodeConfig().stop_timeout_ms
            allowed_s = 10 + 2 * orderly_ms / 1000
        deadline = time.monotonic() + allowed_s
        for process in self._processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.poll()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self.data / STATE_FILE).unlink()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def poll(self) -> list[int]:
        """Notes which nodes have ended since the last call and returns their numbers."""
        ended = []
        for node in self.nodes:
            if node.pid is not None and not self._running(node.number):
                node.pid = None
                ended.append(node.number)
        if ended and self._lock is not None:
            self._save()
        return ended

    def wait_ready(
        self,
        tell: Callable[[str], object] = lambda _step: None,
        stopped: Callable[[], object] = lambda: False,
    ) -> None:
        """Waits until every running node serves AMQP clients, for as long as one makes progress.

        Args:
            tell: is called with a line for each step of a node.
            stopped: whether to wait no longer.

        Raises:
            Unavailable: no node makes progress, or one ended; the text says why.
        """
        waiting = [node for node in self.nodes if node.pid is not None]
        told = {node.number: 0 for node in waiting}
        progress, seen = time.monotonic(), dict[int, tuple[int, int]]()
        while not stopped():
            for node in waiting:
                done = steps(self._logged(node.number))
                for step in done[told[node.number] :]:
                    tell(f"node {node.number} {step}")
                told[node.number] = len(done)
            waiting = [node for node in waiting if not self._is_ready(node)]
            ended = self.poll()
            if ended:
                raise Unavailable(f"node {ended[0]} ended: {self.last_words(ended[0])}")
            if not waiting:
                return
            now = {node.number: self._progress(node) for node in waiting}
            if now != seen:
                progress, seen = time.monotonic(), now
            elif time.monotonic() - progress > STALLED_S:
                number = waiting[0].number
                raise Unavailable(
                    f"node {number} makes no progress for {STALLED_S:.0f} s: "
                    f"{self.last_words(number)} (log: {self.log_file(number)})"
                )
            time.sleep(POLL_S)

    def _progress(self, node: LocalNode) -> tuple[int, int]:
        """Returns what changes when a node does something: its log's size, its processor time."""
        busy = sum(map(cpu_seconds, node.pids()))
        return len(self._logged(node.number)), int(busy / PROGRESS_CPU_S)

    def _is_ready(self, node: LocalNode) -> bool:
        """Returns whether the node itself answers, and not another process that took its port
        first."""
        if not _answers(node.amqp_port):
            return False
        hides = self.settings.get("log.level", "info") not in ("debug", "info")
        if hides or "log.file" in self.settings:
            return True
        logged = self._logged(node.number)
        return b"node.ready" in logged if node.processes == 1 else b"machine.ready" in logged

    def _logged(self, number: int) -> bytes:
        """Returns the log output of a node since it was started."""
        try:
            with open(self.log_file(number), "rb") as log:
                log.seek(self._log_begins.get(number, 0))
                return log.read()
        except OSError:
            return b""

    def last_words(self, number: int) -> str:
        """Returns why a node ended or does not go on, by its log since it was started."""
        return reason(self._logged(number)) or "it has written nothing"

    def waiting(self) -> dict[int, str]:
        """Returns why running nodes wait before they found or join a cluster, by their logs."""
        last = {
            node.number: steps(self._logged(node.number))[-1:]
            for node in self.nodes
            if node.pid is not None
        }
        return {
            number: step.removeprefix(WAITS)
            for number, [step] in ((n, found) for n, found in last.items() if found)
            if step.startswith(WAITS)
        }

    def log_file(self, number: int) -> Path:
        """Returns the path of a node's log."""
        return self.data / f"node-{number}" / "convoy.log"

    # -- questions --------------------------------------------------------------------------

    def api(self, path: str, node: int | None = None, timeout: float = 5.0) -> Any:
        """GET of the HTTP API, from `node` or from the first one that answers.

        Raises:
            Unavailable: nobody answers. LookupError: there is no such thing.
        """
        reason = "no node is running"
        for candidate in self.nodes:
            if node is not None and candidate.number != node:
                continue
            if candidate.pid is None:
                continue
            try:
                return get_json(f"http://127.0.0.1:{candidate.http_port}/api/{path}", timeout)
            except Unavailable as error:
                reason = error.text
        raise Unavailable(reason)

    def leader_of(self, queue: str, vhost: str = "/") -> int:
        """Returns the number of the node that leads the queue."""
        found = self.api(f"queues/{_quote(vhost)}/{_quote(queue)}")
        name = str(found.get("leader") or found.get("node") or "")
        match = re.search(r"-(\d+)@", name)
        if match is None:
            raise Unavailable(f"nobody leads {queue}")
        return int(match[1])

    def messages_in(self, queue: str, vhost: str = "/") -> int:
        """Returns the number of messages ready and unacknowledged, as the leader counts them."""
        leader = self.leader_of(queue, vhost)
        found = self.api(f"queues/{_quote(vhost)}/{_quote(queue)}", leader)
        return int(found.get("messages", 0))

    def traffic(self) -> Traffic:
        """Deliveries and bytes between nodes, from the metrics of all running nodes."""
        total = Traffic()
        for node in self.nodes:
            if node.pid is None:
                continue
            with contextlib.suppress(OSError):
                url = f"http://127.0.0.1:{node.metrics_port}/metrics"
                with urllib.request.urlopen(url, timeout=5) as answer:
                    text = answer.read().decode()
                total.delivered_local += _metric(text, "convoy_deliveries_local_total")
                total.delivered_proxied += _metric(text, "convoy_deliveries_proxied_total")
                total.link_bytes += _metric(text, "convoy_link_sent_bytes_total")
        return total

    def pids(self) -> list[int]:
        """Process ids of the running nodes."""
        return [pid for node in self.nodes for pid in node.pids()]

    # -- inside -----------------------------------------------------------------------------

    def _node(self, number: int) -> LocalNode:
        if not 1 <= number <= len(self.nodes):
            raise Misuse(f"there is no node {number}")
        return self.nodes[number - 1]

    def _running(self, number: int) -> bool:
        process = self._processes.get(number)
        return process is not None and process.poll() is None

    def _command(self, node: LocalNode) -> list[str]:
        """Returns the program of a node, without its arguments."""
        return [sys.executable, "-m", NODE_MODULE]

    def _environment(self, node: LocalNode) -> dict[str, str]:
        """Returns the environment of a node."""
        return {k: v for k, v in os.environ.items() if not k.startswith("CONVOY_")}

    def _spawn(self, node: LocalNode) -> None:
        with open(self.log_file(node.number), "ab") as log:
            self._log_begins[node.number] = log.tell()
            process = self._start(node, log)
        self._processes[node.number] = process
        node.pid = process.pid

    def _start(self, node: LocalNode, log: BinaryIO) -> subprocess.Popen[bytes]:
        """Returns the process of a node, which has been started."""
        return subprocess.Popen(
            [*self._command(node), "--config", str(self._config(node))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self._environment(node),
            # Ctrl-C in the terminal reaches `convoy up`, which ends its nodes.
            process_group=0,
        )

    def _config(self, node: LocalNode) -> Path:
        return self.data / f"node-{node.number}" / "convoy.conf"

    def _write_config(self, node: LocalNode) -> None:
        directory = self.data / f"node-{node.number}"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = self.data / "secret"
        if not secret.exists():
            with open(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
        peers = ", ".join(f"{n.number}@127.0.0.1:{n.link_port}" for n in self.nodes)
        keys = {
            "node.id": str(node.number),
            "data_dir": str(directory / "data"),
            "listeners.tcp.default": f"localhost:{node.amqp_port}",
            "management.tcp.port": f"localhost:{node.http_port}",
            "prometheus.tcp.port": f"localhost:{node.metrics_port}",
            "cluster.listen": f"127.0.0.1:{node.link_port}",
            "cluster.peers": peers,
            "cluster.secret_file": str(secret),
            **({"node.processes": str(node.processes)} if node.processes > 1 else {}),
            **self._memory_share(),
            **self.settings,
            **self._tls_listeners(node),
        }
        text = "".join(f"{key} = {value}\n" for key, value in keys.items())
        self._config(node).write_text("# Written by convoy up.\n" + text)

    def _tls_listeners(self, node: LocalNode) -> dict[str, str]:
        """Returns the TLS listeners among the settings as they are for one node: each node has the
        port after the one of the node before."""
        return {key: str(address) for key, address in self._tls_addresses(node)}

    def _tls_addresses(self, node: LocalNode) -> list[tuple[str, Address]]:
        found = []
        for key, text in self.settings.items():
            # What is no address is refused by the nodes, which name the key.
            with contextlib.suppress(ValueError):
                if key.startswith(TLS_LISTENERS):
                    found += [
                        (key, replace(address, port=address.port + node.number - 1))
                        for address in parse_listener(text)
                    ]
        return found

    def _tls_ports(self, node: LocalNode) -> list[tuple[str, int]]:
        return [(key, address.port) for key, address in self._tls_addresses(node)]

    def _memory_share(self) -> dict[str, str]:
        """Returns the memory watermark of each node: all are on one machine, and together use no
        more of it than one node alone would."""
        if any(key.startswith(MEMORY_KEY) for key in self.settings):
            return {}
        share = AlarmsConfig().memory_relative / len(self.nodes)
        return {f"{MEMORY_KEY}.relative": f"{max(0.01, share):.3f}"}

    def _save(self) -> None:
        content = {
            "pid": os.getpid(),
            "base_port": self.base_port,
            "nodes": [asdict(node) for node in self.nodes],
        }
        fresh = self.data / (STATE_FILE + ".new")
        fresh.write_text(json.dumps(content, indent=1))
        os.replace(fresh, self.data / STATE_FILE)


def read_state(data: Path) -> list[LocalNode]:
    """Returns the nodes that a running `convoy up` in `data` has written down; empty without
    one."""
    try:
        content = json.loads((data / STATE_FILE).read_text())
        nodes = [LocalNode(**entry) for entry in content["nodes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    for node in nodes:
        if node.pid is not None and not Path(f"/proc/{node.pid}").exists():
            node.pid = None
    return nodes


def running_clusters() -> list[Path]:
    """Returns the directories of clusters that run on this machine, by their nodes' command
    lines."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, ValueError):
            words = os.fsdecode(path.read_bytes()).split("\0")
            if NODE_MODULE in words:
                # LocalCluster._config
                found.add(Path(words[words.index("--config") + 1]).parent.parent)
    return sorted(data for data in found if read_state(data))


def find_cluster(data: Path) -> Path:
    """Returns where the cluster that a command is about has its data: `data`, or the only cluster
    of this machine when nobody chose a directory.

    Raises:
        Misuse: none runs there; the text names those of this machine.
    """
    if read_state(data):
        return data
    others = running_clusters()
    if len(others) == 1 and data == DATA_DEFAULT:
        return others[0]
    hint = "start one with `convoy up`, or give --url"
    if others:
        hint += f", or --data with one of {', '.join(map(str, others))}"
    raise Misuse(f"no cluster runs in {data}; {hint}")


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started, the oldest first."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return sorted(map(int, text.split()))


def resident_bytes(pid: int) -> int:
    """Memory of a process in RAM; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _quote(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _metric(text: str, name: str) -> int:
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return int(sum(float(value) for value in found))


def is_free(port: int) -> bool:
    """Returns whether a node could listen on the port of the loopback addresses, IPv4 and IPv6."""
    try:
        sockets = listen("localhost", port)
    except OSError:
        return False
    for sock in sockets:
        sock.close()
    return True


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5):
            return True
    except OSError:
        return False
