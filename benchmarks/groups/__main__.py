"""Broker groups beside RocketMQ's own broker: rates, processor time and memory, in one run.

    python -m benchmarks.groups                          everything, three rounds
    python -m benchmarks.groups --case flushed --runs 5  one question

Each case runs both systems in turn, with a master, a slave and a name server each, and RocketMQ's
Java client as the load. `replicated`: messages of 1 KiB, confirmed when the slave has them, written
to the disk later. `flushed`: confirmed when both have them on the disk. `backlog`: a consumer of
what `replicated` has left. `routes`: 10,000 topics are registered; how long a name server takes to
answer where one is. `killed`, `silent`: the master of a group with an acting slave is killed, or
stopped with all its connections open (heartbeats may be missing for 10 s); after which time its
messages can be read again, and by how much a timed message is late that falls due meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.groups import outage
from benchmarks.groups.systems import (
    BASE_PORT,
    JARS,
    System,
    anonymous_mib,
    cpu_seconds,
    wait_until,
)
from benchmarks.report import machine, number
from benchmarks.systems import SystemMissing
from convoymq.model.errors import Unavailable
from convoymq.rocketmq.remoting import json as remoting_json
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import request
from convoymq.rocketmq.remoting.values import RegisterBrokerBody, TopicConfig, TopicTable

TOPIC = "load"
SIZE = 1024
THREADS = 64
TOPICS = 10_000
ROUTE_QUERIES = 5_000
TIMEOUT_S = 30.0
Figures = dict[str, float]


@functools.cache
def _classes() -> tempfile.TemporaryDirectory[str]:
    """The compiled load."""
    directory = tempfile.TemporaryDirectory()
    source = Path(__file__).with_name("GroupLoad.java")
    subprocess.run(["javac", "-cp", f"{JARS}/*", "-d", directory.name, str(source)], check=True)
    return directory


def _load_command(*arguments: str) -> list[str]:
    return ["java", "-Xmx512m", "-cp", f"{JARS}/*:{_classes().name}", "GroupLoad", *arguments]


def load(arguments: list[str], pids: list[int]) -> Figures:
    """Runs the load; what it counted, and what the brokers took between its begin and end."""
    process = subprocess.Popen(_load_command(*arguments), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    marks: dict[str, tuple[float, float, float]] = {}
    counted: Figures = {}
    for line in process.stdout:
        word = line.strip()
        if word in ("begin", "end"):
            marks[word] = time.perf_counter(), cpu_seconds(pids), cpu_seconds([process.pid])
        elif word.startswith("{"):
            counted = json.loads(word)
    if process.wait() or len(marks) < 2:
        raise RuntimeError("the load failed")
    (began, cpu, client), (ended, cpu_then, client_then) = marks["begin"], marks["end"]
    messages = counted["sent"] if "sent" in counted else counted["consumed"]
    if not messages:
        raise RuntimeError("no message was confirmed: more --seconds are needed")
    figures = {
        "msg_s": messages / (ended - began),
        "cpu_us": (cpu_then - cpu) / messages * 1e6,
        "client_cpu_us": (client_then - client) / messages * 1e6,
        "anonymous_mib": anonymous_mib(pids),
    }
    return figures | {name: counted[name] for name in ("p50_ms", "p99_ms") if name in counted}


async def _ask(code: int, fields: dict[str, str], body: bytes = b"") -> int:
    client = RemotingClient()
    try:
        connection = await client.connected(f"127.0.0.1:{BASE_PORT}", TIMEOUT_S)
        return (await connection.request(request(code, fields, body), TIMEOUT_S)).code
    except (OSError, Unavailable):
        return -1
    finally:
        await client.stop()


def _is_replicated() -> bool:
    """Returns whether a message is confirmed by both: the topic is there, and the slave in sync."""
    tried = subprocess.run(
        _load_command("produce", f"127.0.0.1:{BASE_PORT}", TOPIC, "1", "10", "0", "5"),
        capture_output=True,
        text=True,
        check=False,
    )
    counted = [json.loads(line) for line in tried.stdout.splitlines() if line.startswith("{")]
    return any(each["sent"] and not each["failed"] for each in counted)


def produced(system: System, seconds: float, flush: str) -> dict[str, Figures]:
    """`replicated`, with the backlog that it leaves, or `flushed`."""
    with (
        tempfile.TemporaryDirectory() as directory,
        system.group(Path(directory), flushDiskType=flush) as pids,
    ):
        wait_until(_is_replicated)
        names = f"127.0.0.1:{BASE_PORT}"
        words = ["produce", names, TOPIC, str(THREADS), str(SIZE), str(seconds / 3), str(seconds)]
        figures = load(words, pids)
        if flush == "SYNC_FLUSH":
            return {"flushed": figures}
        wanted = int(figures["msg_s"] * seconds)
        return {
            "replicated": figures,
            "backlog": load(["consume", names, TOPIC, str(wanted)], pids),
        }


async def _routes() -> Figures:
    client = RemotingClient()
    topics = {f"topic-{n}": TopicConfig(topic_name=f"topic-{n}") for n in range(TOPICS)}
    body = RegisterBrokerBody(topic_config_serialize_wrapper=TopicTable(topic_config_table=topics))
    fields = {
        "brokerName": "many", "brokerAddr": "127.0.0.1:1", "clusterName": "c", "haServerAddr": "",
        "brokerId": "0", "compressed": "false", "bodyCrc32": "0",
    }  # fmt: skip
    connection = await client.connected(f"127.0.0.1:{BASE_PORT}", TIMEOUT_S)
    command = request(Request.REGISTER_BROKER, fields, remoting_json.dumps(body))
    assert (await connection.request(command, TIMEOUT_S)).code == Answer.SUCCESS
    took = []
    for n in range(2 * ROUTE_QUERIES):
        asked = request(Request.GET_ROUTEINFO_BY_TOPIC, {"topic": f"topic-{n * 7 % TOPICS}"})
        began = time.perf_counter()
        answer = await connection.request(asked, TIMEOUT_S)
        # The first half makes both warm.
        if n >= ROUTE_QUERIES:
            took.append(time.perf_counter() - began)
        assert answer.code == Answer.SUCCESS
    await client.stop()
    took.sort()
    return {"p50_ms": 1e3 * statistics.median(took), "p99_ms": 1e3 * took[len(took) * 99 // 100]}


def routes(system: System, _seconds: float) -> dict[str, Figures]:
    """`routes`."""
    settings = {"listenPort": BASE_PORT, "bindAddress": "127.0.0.1"}
    with (
        tempfile.TemporaryDirectory() as directory,
        system.process("namesrv", Path(directory) / "names", settings) as pid,
    ):
        wait_until(lambda: asyncio.run(_ask(Request.GET_BROKER_CLUSTER_INFO, {})) == 0)
        before = cpu_seconds([pid])
        figures = asyncio.run(_routes())
        return {
            "routes": figures
            | {"cpu_us": (cpu_seconds([pid]) - before) / (2 * ROUTE_QUERIES) * 1e6}
        }


CASES: dict[str, Callable[[System, float], dict[str, Figures]]] = {
    "replicated": lambda system, seconds: produced(system, seconds, "ASYNC_FLUSH"),
    "flushed": lambda system, seconds: produced(system, seconds, "SYNC_FLUSH"),
    "routes": routes,
    **outage.CASES,
}
HIGHER_IS_BETTER = {"msg_s"}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    console = Console(soft_wrap=True)
    try:
        systems = [System("convoy"), System("rocketmq")]
    except SystemMissing as error:
        console.print(str(error))
        return 1
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for _ in range(chosen.runs):
        for case in chosen.case or CASES:
            for system in systems:
                for row, figures in CASES[case](system, chosen.seconds).items():
                    console.print(f"{system.name} {row}: {figures}", highlight=False)
                    for name, value in figures.items():
                        found.setdefault(row, {}).setdefault(name, {}).setdefault(
                            system.name, []
                        ).append(value)
    table = Table("case", "figure", "ConvoyMQ", "RocketMQ", "ratio")
    for row, by_name in found.items():
        for name, values in by_name.items():
            ours, theirs = (statistics.median(values[system.name]) for system in systems)
            ratio = f"{ours / theirs:.2f}×" if theirs else ""
            table.add_row(row, name, number(ours), number(theirs), ratio)
    console.print(table)
    if chosen.json:
        report = {"machine": machine({"RocketMQ": "5.3.3"}), "rows": found}
        chosen.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
