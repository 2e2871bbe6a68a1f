"""Clients of AMQP 1.0 in other languages against the three-node cluster: go-amqp, rhea, Qpid JMS,
and RabbitMQ's Java client.

Each has a program in `clients`. It tries one behaviour after the other on queues that are declared
here, and prints a line of JSON for each: its name, and the fault that was found, or none. The table
of docs/amqp10.md says what each client does here. A second run of the program is `failover.py`'s
scenario.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from benchmarks.systems import connect

from tests.clusters import Cluster
from tests.interop.failover import declare_on_leader, leader_killed, run_client, uris_from
from tests.patience import PATIENCE_S

CLIENTS = Path(__file__).parent / "clients"
BUILT = Path(__file__).parents[3] / "build" / "amqp10"
DOCS = Path(__file__).parents[3] / "docs" / "amqp10.md"
JAVA = ["java", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx128m"]
COUNT = 900

COMMON = (
    *("accepted", "released", "rejected", "settled", "release", "reject", "modify", "credit"),
    *("drain", "large", "types", "bodies", "anonymous", "temporary", "stream", "refused"),
)
BEHAVIOURS = {
    "go-amqp": COMMON,
    "rhea": [*COMMON, "direct_reply"],
    "RabbitMQ Java": [
        *(each for each in COMMON if each not in ("drain", "bodies")),
        *("delay", "pause", "batch", "direct_reply", "declare"),
    ],
    "Qpid JMS": [
        *(each for each in COMMON if each not in ("reject", "modify", "credit", "stream")),
        *("recover", "individual", "listener", "transacted", "selector"),
    ],
}
"""Behaviours that a client's program tries; APIs differ."""
OR_REFUSED = {
    "durable": "Attach refused: bad address",
}
"""Behaviours of Qpid JMS that work, or are refused by this text."""
ROWS = {
    "accepted": "publish and accept",
    "released": "no route: released",
    "rejected": "full queue: rejected, with its reason",
    "settled": "settled messages",
    "release": "release: again, not counted as failed",
    "reject": "reject: dead-lettered",
    "modify": "modify: counted as failed, annotations kept",
    "delay": "modify with `x-opt-delivery-time`: later",
    "credit": "credit",
    "drain": "drain",
    "pause": "stop and go on (credit 0)",
    "batch": "outcomes of ranges",
    "large": "large messages",
    "types": "properties of every type",
    "bodies": "values, sequences, several data sections",
    "anonymous": "anonymous terminus",
    "temporary": "temporary queues",
    "direct_reply": "direct replies",
    "stream": "streams from an offset",
    "declare": "queues, exchanges, bindings: declare, show, purge, delete",
    "refused": "unknown queue is named, the session goes on",
    "recover": "`Session.recover`",
    "individual": "individual acknowledgements",
    "listener": "message listeners",
    "transacted": "transacted sessions",
    "selector": "selectors",
}
"""Behaviours in the table of docs/amqp10.md."""
QUORUM = {"x-queue-type": "quorum"}
SPECIAL: dict[str, dict[str, object]] = {
    "full": {**QUORUM, "x-max-length": 1, "x-overflow": "reject-publish"},
    "stream": {"x-queue-type": "stream"},
}


def queues(stem: str) -> dict[str, dict[str, object]]:
    """Returns the queues of a run, and their arguments: one for each behaviour."""
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{stem}.dead"}
    names = {name for tried in BEHAVIOURS.values() for name in tried}
    names |= {"dead", "full", "browse", *OR_REFUSED}
    found = {name: SPECIAL.get(name, QUORUM) for name in names}
    return found | {"reject": {**QUORUM, **dead}}


def command(client: str) -> list[str]:
    """Returns how a client's program is run; skips the test where it is not installed."""
    programs: dict[str, tuple[Path, list[str]]] = {
        "go-amqp": (BUILT / "go" / "client", [str(BUILT / "go" / "client")]),
        "rhea": (BUILT / "rhea" / "node_modules", ["node", str(CLIENTS / "rhea.js")]),
        "Qpid JMS": (
            BUILT / "jms" / "artifacts",
            [*JAVA, "-cp", f"{BUILT}/jms/*", str(CLIENTS / "Jms.java")],
        ),
        "RabbitMQ Java": (
            BUILT / "rabbitmq" / "artifacts",
            [*JAVA, "-cp", f"{BUILT}/rabbitmq/*", str(CLIENTS / "Rabbit.java")],
        ),
    }
    needed, words = programs[client]
    # They take as long as all other tests of 1.0: `make test` leaves them out.
    if os.environ.get("CONVOY_TEST_CLIENTS") != "amqp10":
        pytest.skip(f"{client} has a target of its own: make test-amqp10")
    if not needed.exists() or shutil.which(words[0]) is None:
        pytest.skip(f"{client} is not installed: tools/install_amqp10.sh says why")
    return words


def environment() -> dict[str, str]:
    return {**os.environ, "NODE_PATH": str(BUILT / "rhea" / "node_modules")}


def uri(cluster: Cluster, node: int) -> str:
    return cluster.uris[node].replace("localhost", "127.0.0.1").removesuffix("/")


def run_probes(cluster: Cluster, client: str) -> dict[str, str]:
    """Runs a client's program and returns the fault of each behaviour; empty: none."""
    words, stem = command(client), f"probes-{client.replace(' ', '-')}"
    connection = connect(cluster.uris[0])
    channel = connection.channel()
    try:
        for name, arguments in queues(stem).items():
            channel.queue_declare(f"{stem}.{name}", durable=True, arguments=arguments)
        done = subprocess.run(
            [*words, "probe", uri(cluster, 0), stem],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    finally:
        for name in queues(stem):
            with suppress(Exception):
                channel.queue_delete(f"{stem}.{name}")
        connection.close()
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["fault"] for line in lines}


@pytest.fixture(scope="module")
def probes(cluster: Cluster) -> Callable[[str], dict[str, str]]:
    """Runs each client's program once."""
    found: dict[str, dict[str, str]] = {}

    def once(client: str) -> dict[str, str]:
        if client not in found:
            command(client)
            found[client] = {}
            found[client] = run_probes(cluster, client)
        return found[client]

    return once


@pytest.mark.optional
@pytest.mark.parametrize(
    ("client", "behaviour"), [(each, name) for each, names in BEHAVIOURS.items() for name in names]
)
def test_behaviour(probes: Callable[[str], dict[str, str]], client: str, behaviour: str) -> None:
    assert probes(client).get(behaviour, "not tried") == ""


@pytest.mark.optional
@pytest.mark.parametrize("behaviour", OR_REFUSED)
def test_jms_is_served_or_refused(probes: Callable[[str], dict[str, str]], behaviour: str) -> None:
    fault = probes("Qpid JMS").get(behaviour, "not tried")
    assert not fault or OR_REFUSED[behaviour] in fault


def test_the_docs_say_what_is_tried() -> None:
    lines = [line.strip("|").split("|") for line in DOCS.read_text().splitlines() if "|" in line]
    cells = [[cell.strip() for cell in line] for line in lines]
    head = next(each for each in cells if "rhea" in each)
    table = {each[0]: each for each in cells}
    for client, tried in BEHAVIOURS.items():
        column = head.index(client)
        for behaviour, row in ROWS.items():
            assert (table[row][column] == "yes") == (behaviour in tried), (client, row)


@pytest.mark.optional
@pytest.mark.parametrize("client", BEHAVIOURS)
def test_a_killed_leader_loses_nothing(cluster: Cluster, client: str) -> None:
    words, queue = command(client), f"failover-{client.replace(' ', '-')}"
    declare_on_leader(cluster, queue)
    uris = ",".join(each.replace("localhost", "127.0.0.1") for each in uris_from(cluster, 0))
    with leader_killed(cluster, True) as strike:
        ledger = run_client([*words, "failover", uris, queue, str(COUNT)], environment(), strike)
    ledger.check(COUNT)
