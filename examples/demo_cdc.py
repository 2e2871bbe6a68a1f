"""The demo of ordered topics: Delta tables equal a database's tables, whatever happens between.

    MariaDB ──binary log──▶ reader ──▶ topic, key = primary key ──▶ Spark `apply` ──▶ Delta tables
                                            └──▶ a consumer group that checks the order of each row

While sysbench writes, the topic splits a partition by itself, another one is split by hand,
partitions are moved and merged, a broker, the reader and the Spark driver are killed with SIGKILL,
a row's changes are parked and resumed, and a node is drained of partitions. In the end every table
is compared with the database row by row. Then the same changes go through an exchange that hashes
modulo the number of its queues, and two queues are added half-way: how many of them arrive out of
order is counted. Exit code 1 if a promise broke.

    python examples/demo_cdc.py [--base-port 27600] [--directory DIR] [--out FILE] [--seconds N]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cdc.database import MariaDb, Missing, Sysbench, execute
from cdc.order import GroupChecker, ModuloRun, Order
from cdc.report import ORDER_COLUMNS, Difference, Event, Found, order_rows, pauses_of, write_report
from convoymq.capture.messages import sequence_of
from convoymq.cli.cluster import LocalCluster

TOPIC = "changes"
GROUP = "checker"
TABLES = ("sbtest1", "sbtest2")
SCHEMA = "id int, k int, c string, pad string"
ROWS = 1_000
RATE = 60
"""Transactions a second; each updates two rows, and deletes and inserts a third."""
MODULO_EVENTS = 2_000
QUEUES = (3, 5)
WAIT_S = 600.0
"""Longer than anything takes, on a busy machine as well."""
LOAD_S_MAX = 3_600
"""Sysbench writes until the last step is done, whatever the machine takes for it."""
REST_S = 3600.0
"""For what Spark has not applied yet when sysbench ends."""
AUTHORIZATION = "Basic Z3Vlc3Q6Z3Vlc3Q="
STEP_PAUSE_S = 2.0
PARKED_RANK = 40
"""The messages of a parked key are handled one by one: of the busiest key more may come than that
on a busy machine, as long as sysbench writes."""
SCALES = {
    "autoscale": "on",
    "autoscale-unit": 1_000,
    "autoscale-target-messages": 25,
    "autoscale-partitions-max": 3,
    "autoscale-changes-per-hour": 100,
}
"""A tenth of the load is enough for a split. What is split by hand does not count as a limit."""
AUDIT_WAIT_S = 3600.0


def until(condition: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
    """Waits for a condition. Raises RuntimeError: it did not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {seconds:g} s: {what}")
        time.sleep(0.1)


@dataclass(slots=True)
class Events:
    """What was done, and when."""

    console: Console
    rows: list[Event] = field(default_factory=list)
    _begin: float = field(default_factory=time.time)

    def note(self, text: str, *, fault: bool = False) -> None:
        """Adds an event and shows it."""
        now = time.time()
        self.rows.append(Event(now, text, fault))
        self.console.print(f"{now - self._begin:6.1f} s  {text}", highlight=False)


class Api:
    """HTTP API of the cluster: the first node that answers."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def __call__(self, method: str, path: str, body: object = None) -> object:
        """Returns the answer's JSON. Raises RuntimeError: refused, or nobody answers."""
        deadline = time.monotonic() + WAIT_S
        while True:
            for node in self._cluster.nodes:
                if node.pid is None:
                    continue
                request = urllib.request.Request(
                    f"http://127.0.0.1:{node.http_port}/api/{path}",
                    data=None if body is None else json.dumps(body).encode(),
                    method=method,
                    headers={"authorization": AUTHORIZATION, "content-type": "application/json"},
                )
                try:
                    with urllib.request.urlopen(request, timeout=30) as answer:
                        return json.loads(answer.read() or b"null")
                except urllib.error.HTTPError as error:
                    text = error.read().decode(errors="replace")
                    if error.code < 500 or time.monotonic() > deadline:
                        raise Refused(f"{method} {path}: {error.code} {text}") from None
                except OSError:
                    continue
            if time.monotonic() > deadline:
                raise RuntimeError(f"{method} {path}: no node answers")
            time.sleep(0.2)

    def rows(self, path: str) -> list[dict[str, object]]:
        """Returns the rows of a listing."""
        found = self("GET", path)
        assert isinstance(found, list)
        return found


class Refused(RuntimeError):
    """A node has said no."""


class Topic:
    """The topic of changes."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.path = f"topics/%2F/{TOPIC}"

    def route(self) -> list[dict[str, object]]:
        """Returns the open partitions, by range."""
        return self._api.rows(f"{self.path}/route")

    def change(
        self, kind: str, body: Callable[[list[dict[str, object]]], dict[str, object]]
    ) -> dict[str, object]:
        """Carries a change out and returns its body, which is made from the open partitions. The
        autoscaler's changes may come first."""
        asked: list[dict[str, object]] = []
        begun: list[object] = []

        def is_begun() -> bool:
            asked[:] = [body(self.route())]
            try:
                begun[:] = [self._api("POST", f"{self.path}/{kind}", asked[0])]
            except Refused as error:
                begun[:] = [error]
            return isinstance(begun[0], dict)

        try:
            until(is_begun, f"no {kind}")
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {begun}") from None
        found = begun[0]
        assert isinstance(found, dict)
        id = found["change_id"]

        def is_finished() -> bool:
            now = self._api("GET", f"{self.path}/changes/{id}")
            return isinstance(now, dict) and bool(now["is_finished"])

        until(is_finished, f"{kind} {id} goes on")
        return asked[0]

    def widest(self) -> dict[str, object]:
        """Returns the open partition with the most logical partitions."""
        return widest_of(self.route())


def widest_of(rows: list[dict[str, object]]) -> dict[str, object]:
    """Returns the partition with the most logical partitions."""
    return max(rows, key=lambda row: int(str(row["hi"])) - int(str(row["lo"])))


@dataclass(frozen=True, slots=True)
class Scaled:
    """A change that the autoscaler has begun."""

    change_id: str
    decision: str
    rule: str


def scaled_changes(directory: Path) -> list[Scaled]:
    """Returns the autoscaler's changes, as the nodes have logged them, the first one first."""
    found: dict[str, tuple[str, Scaled]] = {}
    for path in directory.rglob("*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if '"topics.autoscaled"' not in line:
                continue
            try:
                said = json.loads(line)
            except ValueError:
                # A line that SIGKILL has cut.
                continue
            made = Scaled(said["change"], said["decision"], said["rule"])
            found[made.change_id] = (str(said["timestamp"]), made)
    return [each for _, each in sorted(found.values(), key=lambda row: row[0])]


class Part:
    """A process of the demo, that may be killed and started again."""

    def __init__(self, name: str, command: Sequence[str], directory: Path) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, in a session of its own: what it starts is killed with it."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        """SIGKILL to it and what it has started."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def check(self) -> None:
        """Raises RuntimeError: it has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(f"the {self.name} has ended: see {self.log}")

    def end(self, seconds: float) -> None:
        """SIGTERM, and `wait`."""
        assert self._process is not None
        self._process.terminate()
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        """Waits for its end. Raises RuntimeError: not in time, or it failed."""
        assert self._process is not None
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"the {self.name} does not end: see {self.log}") from None
        if code:
            raise RuntimeError(f"the {self.name} has failed: see {self.log}")


class Demo:
    """The whole run."""

    def __init__(
        self, cluster: LocalCluster, database: MariaDb, directory: Path, events: Events
    ) -> None:
        self.cluster = cluster
        self.database = database
        self.directory = directory
        self.events = events
        self.api = Api(cluster)
        self.topic = Topic(self.api)
        self.servers = ",".join(f"127.0.0.1:{node.amqp_port}" for node in cluster.nodes)
        self.order = Order()
        ports = [node.amqp_port for node in cluster.nodes]
        self.checker = GroupChecker(ports, f"{TOPIC}/{GROUP}", self.order)
        self.reader = Part("reader", self._reader_command(), directory)
        self.spark = Part("apply", self._apply_command("--every", "500 milliseconds"), directory)

    def _reader_command(self) -> list[str]:
        command = [sys.executable, "-m", "convoymq.cli", "pipeline", "capture", "--format", "json"]
        command += ["--database", self.database.url, "--servers", self.servers]
        command += ["--topic", TOPIC, "--state", str(self.directory / "capture")]
        return command + [each for table in TABLES for each in ("--table", table)]

    def _apply_command(self, *more: str) -> list[str]:
        command = [sys.executable, "-m", "convoymq.cli", "pipeline", "apply", "--topic", TOPIC]
        command += ["--servers", self.servers, "--master", "local[2]"]
        command += ["--checkpoint", str(self.directory / "checkpoint")]
        for table in TABLES:
            command += ["--table", f"{table}={self.directory / table}"]
            command += ["--schema", SCHEMA, "--key", "id"]
        return [*command, *more]

    # --- while sysbench writes ---------------------------------------------------------------

    def run(self, sysbench: Sysbench, seconds: int) -> None:
        """Everything up to the moment when the last change is in the tables."""
        self.api("PUT", self.topic.path, {"partitions": 2, **SCALES})
        self.reader.start()
        self.spark.start()
        self.checker.start()
        until(lambda: self.order.seen >= len(TABLES) * ROWS, "the snapshot is not in the topic")
        self.events.note(f"{self.order.seen} rows of the snapshot are in the topic")
        sysbench.start(LOAD_S_MAX, RATE)
        until_s = time.monotonic() + seconds
        for step in (
            self.await_split, self.kill_reader, self.split, self.kill_node, self.move,
            self.park, self.kill_spark, self.merge, self.drain,
        ):  # fmt: skip
            self.go_on()
            step()
        time.sleep(max(0.0, until_s - time.monotonic()))
        sysbench.end()
        self.finish()

    def go_on(self) -> None:
        """Waits until more changes have come through."""
        seen = self.order.seen
        until(lambda: self.order.seen > seen + RATE, "no changes arrive")
        time.sleep(STEP_PAUSE_S)
        self.reader.check()
        self.spark.check()

    def scaled(self) -> list[Scaled]:
        """Returns the changes that the autoscaler has begun so far."""
        return scaled_changes(self.directory / "cluster")

    def await_split(self) -> None:
        """Waits until the topic has split a partition by itself."""

        def is_split() -> bool:
            return any(each.decision.startswith("split") for each in self.scaled())

        until(is_split, "the topic does not split by itself")
        until(lambda: len(self.topic.route()) > 2, "its split does not end")
        first = next(each for each in self.scaled() if each.decision.startswith("split"))
        self.events.note(f"the autoscaler: {first.decision}, by rule {first.rule}")

    def split(self) -> None:
        """Splits the widest partition."""
        made = self.topic.change("split", lambda rows: {"pid": widest_of(rows)["pid"]})
        self.events.note(f"partition {made['pid']} is split")

    def move(self) -> None:
        """Moves a partition to another node."""
        names = [str(node["name"]) for node in self.api.rows("nodes")]

        def body(rows: list[dict[str, object]]) -> dict[str, object]:
            row = widest_of(rows)
            return {
                "pid": row["pid"],
                "node": next(name for name in names if name != row["node"]),
            }

        made = self.topic.change("move", body)
        self.events.note(f"partition {made['pid']} is moved to {made['node']}")

    def merge(self) -> None:
        """Merges the first two partitions."""
        made = self.topic.change("merge", lambda rows: {"pids": [row["pid"] for row in rows[:2]]})
        self.events.note(f"partitions {made['pids']} are merged")

    def kill_reader(self) -> None:
        """Kills the reader in the middle of what it does."""
        self.reader.kill()
        self.reader.start()
        self.events.note("the reader was killed, and goes on where it was", fault=True)

    def kill_node(self) -> None:
        """Kills the node that leads the widest partition, and starts it again."""
        name = str(self.topic.widest()["node"])
        node = next(node for node in self.cluster.nodes if f"-{node.number}@" in name)
        self.cluster.kill(node.number)
        self.go_on()
        self.cluster.start_node(node.number)
        self.cluster.wait_ready()
        self.events.note(
            f"node {node.number} was killed, others led its partitions, it is back", fault=True
        )

    def kill_spark(self) -> None:
        """Kills the Spark driver with its Java."""
        self.spark.kill()
        self.spark.start()
        self.events.note("the Spark driver was killed, and goes on from its checkpoint", fault=True)

    def park(self) -> None:
        """Rejects a row's change; the row's later ones wait behind it, other rows go on."""
        key = self.checker.poison = self.order.busy_key(PARKED_RANK)
        until(lambda: self.checker.rejected == key, f"no further change of {key}")
        group = f"{self.topic.path}/groups/{GROUP}"
        until(lambda: self.api.rows(f"{group}/park"), f"{key} is not parked")
        self.go_on()
        self.api("POST", f"{group}/park/resume", {"keys": [key]})
        until(lambda: not self.api.rows(f"{group}/park"), f"{key} is still parked")
        self.events.note(f"{key} was parked for a while, and resumed in order")

    def drain(self) -> None:
        """Has a node's partitions moved to the others, and takes the node back."""
        name = str(self.topic.widest()["node"])
        self.api("POST", "topics/drain", {"node": name})
        until(lambda: all(row["node"] != name for row in self.topic.route()), f"{name} has some")
        self.api("DELETE", f"convoy/topics/drains/{name}")
        self.events.note(f"{name} was drained of partitions")

    def finish(self) -> None:
        """The reader stores the last change, and Spark applies all there is."""
        self.api("PUT", f"{self.topic.path}/autoscale", {"autoscale": "off"})
        with self.database.connect() as connection:
            ((gtid,),) = execute(connection, "SELECT @@gtid_binlog_pos")
        until(lambda: self.captured() >= sequence_of(gtid), "the last change is not in the topic")
        self.reader.end(WAIT_S)
        self.spark.kill()
        last = Part("apply-rest", self._apply_command(), self.directory)
        last.start()
        last.wait(REST_S)
        self.events.note("the last change is in the tables")

    def captured(self) -> int:
        """Returns the number of the last transaction that is stored in the topic."""
        state = json.loads((self.directory / "capture" / "state.json").read_text())
        return sequence_of(str(state["gtid"]))

    def lag(self) -> int:
        """Returns how many messages the checker's group has not acknowledged."""
        rows = self.api.rows(f"{self.topic.path}/groups/{GROUP}/lag")
        return sum(int(str(row["lag"])) for row in rows)


def compare(database: MariaDb, directory: Path) -> list[Difference]:
    """Compares every table with its Delta table, row by row."""
    from deltalake import DeltaTable

    found = []
    with database.connect() as connection:
        for table in TABLES:
            rows = set(execute(connection, f"SELECT id, k, c, pad FROM {table}"))
            copy = DeltaTable(str(directory / table)).to_pyarrow_table()
            columns = [copy[name].to_pylist() for name in ("id", "k", "c", "pad", "_deleted")]
            copied = [tuple(row[:4]) for row in zip(*columns, strict=True) if not row[4]]
            different = len(rows ^ set(copied)) + len(copied) - len(set(copied))
            found.append(Difference(table, len(rows), len(copied), different))
    return found


def audit(directory: Path, nodes: int) -> bool:
    """Proves from the nodes' traces that nothing was lost, repeated or reordered."""
    command = [sys.executable, "-m", "convoymq.cli", "pipeline", "audit", "--master", "local[2]"]
    command += [str(directory / "cluster" / f"node-{number}") for number in range(1, nodes + 1)]
    part = Part("audit", command, directory)
    part.start()
    try:
        part.wait(AUDIT_WAIT_S)
    except RuntimeError:
        return False
    return True


def show(
    console: Console, demo: Demo, differences: Sequence[Difference], modulo: Order
) -> list[str]:
    """Prints what the run has found; returns the promises that broke."""
    table = Table("table", "rows in the database", "rows in Delta", "different")
    for each in differences:
        table.add_row(each.table, f"{each.rows:,}", f"{each.copied:,}", f"{each.different:,}")
    console.print(table)
    table = Table(*ORDER_COLUMNS)
    for row in order_rows(demo.order, modulo):
        table.add_row(*row)
    console.print(table)
    for finding in demo.order.findings:
        console.print(f"[red]{finding}[/]", highlight=False)
    scaled = demo.scaled()
    table = Table("change by the autoscaler", "rule", "id")
    for done in scaled:
        table.add_row(done.decision, done.rule, done.change_id)
    console.print(table)
    broken = [f"{each.table} differs" for each in differences if each.different]
    if demo.order.violations:
        broken.append("changes of a row were out of order in the topic")
    if demo.order.stored_twice:
        broken.append("changes are stored twice in the topic")
    if not any(each.decision.startswith("split") for each in scaled):
        broken.append("the topic has split nothing by itself")
    if not modulo.violations:
        broken.append("the comparison was in order as well, so it proves nothing")
    return broken


def run(directory: Path, out: Path, base_port: int, seconds: int, console: Console) -> int:
    """Exit code: 0 every promise was kept, 1 one broke."""
    events = Events(console)
    settings = {"trace.vhosts": "/"}
    with (
        MariaDb(directory / "database", base_port + 90) as database,
        LocalCluster(directory / "cluster", 3, base_port, settings) as cluster,
    ):
        sysbench = Sysbench(database.port, len(TABLES), ROWS, directory / "sysbench.log")
        sysbench.prepare()
        cluster.wait_ready()
        demo = Demo(cluster, database, directory, events)
        try:
            demo.run(sysbench, seconds)
            differences = compare(database, directory)
            until(lambda: demo.lag() == 0, "the group has not processed everything")
            changes = demo.order.changes[len(TABLES) * ROWS :][:MODULO_EVENTS]
            modulo = ModuloRun(cluster.nodes[0].amqp_port, QUEUES)
            modulo.run(changes)
            lineage = demo.api.rows(f"{demo.topic.path}/route?lineage=true")
        finally:
            sysbench.stop()
            demo.reader.kill()
            demo.spark.kill()
        demo.checker.stop()
        cluster.stop()
        is_proved = audit(directory, len(cluster.nodes))
        events.note("the traces are audited")
    broken = show(console, demo, differences, modulo.order)
    if not is_proved:
        broken.append(f"the audit of the traces found something: {directory / 'audit.log'}")
    pauses = pauses_of(demo.reader.log)
    scaled = [(each.decision, each.rule, each.change_id) for each in demo.scaled()]
    found = Found(differences, demo.order, modulo.order, len(changes) // 2, broken)
    page = write_report(out, found, events.rows, lineage, pauses, scaled)
    console.print(f"report: {page}", highlight=False)
    for text in broken:
        console.print(f"[bold red]{text}[/]")
    return 1 if broken else 0


def main() -> int:
    """Exit code: 0 every promise was kept, 1 one broke or the run failed, 2 MariaDB is missing."""
    parser = argparse.ArgumentParser(description="A database followed through a changing topic")
    parser.add_argument("--base-port", type=int, default=27600)
    parser.add_argument("--directory", type=Path, help="default: a temporary one")
    parser.add_argument("--out", type=Path, default=Path("demo-cdc.html"), help="the report")
    parser.add_argument("--seconds", type=int, default=75, help="of load, at least")
    parser.add_argument("--keep", action="store_true", help="keep the directory")
    options = parser.parse_args()
    console = Console()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="convoy-cdc-"))
    directory.mkdir(parents=True, exist_ok=True)
    code = 1
    try:
        code = run(directory.absolute(), options.out, options.base_port, options.seconds, console)
    except Missing as error:
        console.print(f"[bold yellow]{error}[/]", highlight=False)
        code = 2
    except RuntimeError as error:
        console.print(f"[bold red]{error}[/]", highlight=False)
    if code == 1:
        console.print(f"logs: {directory}", highlight=False)
    elif options.directory is None and not options.keep:
        shutil.rmtree(directory, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
