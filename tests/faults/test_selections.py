"""Operations on chosen messages of quorum queues, by the tools and over HTTP on three nodes: what
they do, and that a bulk retry whose leader is killed moves every dead letter exactly once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.messages.amqp091 import encode_properties
from tests import hostile
from tests.clusters import call, serving_cluster
from tests.faults.conftest import BASE_PORT
from tests.faults.test_dead_letters import reject_all
from tests.faults.test_tools import Tools
from tests.faults.traffic import connect, drain, fill, until
from tests.patience import PATIENCE_S
from tests.raw_amqp import RawPeer

LETTERS = 4000
SIZE = 64
REJECTED_AT_ONCE = 1000
"""A channel holds no more than 2,000."""
WORK, DEAD, PARKED = "work", "dead", "parked"
QUORUM = {"x-queue-type": "quorum"}
LETTER = {
    **QUORUM,
    "x-dead-letter-exchange": "",
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes on which version 2 of the machines is in force."""
    settings = {"raft.wal_max_size_bytes": "16MiB", "alarms.interval": "200"}
    directory = tmp_path_factory.mktemp("selections")
    with serving_cluster(directory, BASE_PORT, settings, policies=True) as made:
        yield made


def dead_letters(cluster: LocalCluster, work: str, dead: str, count: int) -> None:
    """Declares two queues, and has as many messages of the first die into the second."""
    with contextlib.closing(connect(cluster, 1)) as connection:
        channel = connection.channel()
        channel.queue_declare(dead, durable=True, arguments=QUORUM)
        arguments = {**LETTER, "x-dead-letter-routing-key": dead}
        channel.queue_declare(work, durable=True, arguments=arguments)
        fill(cluster, 1, work, count, SIZE)
        for first in range(0, count, REJECTED_AT_ONCE):
            reject_all(channel, work, min(REJECTED_AT_ONCE, count - first))
    until(lambda: cluster.messages_in(dead) == count, "dead letters are missing")


def test_a_leader_that_is_killed_in_a_bulk_retry_leaves_nothing_out_and_nothing_twice(
    cluster: LocalCluster,
) -> None:
    dead_letters(cluster, WORK, DEAD, LETTERS)
    body = {"filter": {"first_death": {"queue": WORK}}, "operation": "again", "to": "first"}
    victim = cluster.leader_of(DEAD)
    other = next(node for node in cluster.nodes if node.number != victim)
    retry = f"convoy/queues/%2F/{DEAD}/messages/retry"
    status, begun = call(cluster, "POST", retry, body)
    assert (status, begun["selected"]) == (200, LETTERS), begun
    path = f"convoy/queues/%2F/{DEAD}/operations/again"

    def state() -> dict[str, Any]:
        found: dict[str, Any] = cluster.api(path, other.number)
        return found

    until(lambda: state()["moved"] > 0, "nothing is moved")
    at_kill = state()
    cluster.kill(victim, signal.SIGKILL)
    until(lambda: state()["state"] == "done", "the operation does not end")
    # Asked for again, it is answered and does nothing.
    until(
        lambda: call(cluster, "POST", retry, body)[1] == state(),
        "it is not answered again",
        PATIENCE_S,
    )
    ended = state()
    assert (ended["moved"], ended["returned"], ended["gone"]) == (LETTERS, 0, 0), at_kill
    found = Counter(drain(cluster, other.number, WORK, LETTERS, SIZE))
    assert found == Counter(range(LETTERS))
    assert cluster.messages_in(DEAD) == 0
    cluster.start_node(victim)
    cluster.wait_ready()


def test_the_tools_browse_delete_move_retry_and_edit(cluster: LocalCluster) -> None:
    tools = Tools(cluster)
    work, dead = "tasks", "tasks.dead"
    dead_letters(cluster, work, dead, 6)
    rows = tools.json("queues", "browse", dead)
    assert [row["payload"].strip() for row in rows] == [str(n) for n in range(6)]
    assert {row["first_death_queue"] for row in rows} == {work}
    assert tools.json("queues", "browse", dead, "--position-from", 6) == rows[5:]
    assert tools.json("queues", "browse", dead, "--first-queue", "other") == []
    table = tools.run("queues", "browse", dead, "--count", 1, "--columns", "id,position")
    assert table.splitlines()[-1].split("\t") == [rows[0]["id"], "1"]
    csv = tools.run("queues", "browse", dead, "--count", 1, "--formatter", "csv", "-q")
    assert csv.splitlines()[0].startswith('"position","id",')
    tools.run("queues", "cancel_operation", dead, "unknown", code=65)
    tools.run("queues", "delete_messages", dead, code=65)
    tools.run("queues", "move_messages", dead, "--all", code=65)
    tools.run("queues", "browse", "missing", code=65)
    act_on_all(cluster, tools, work, dead, [row["id"] for row in rows])
    assert cluster.messages_in(dead) == 0


def test_the_tools_show_hostile_messages_a_line_each(cluster: LocalCluster) -> None:
    """As processes, in every format; what a sender chose begins no line and moves no cursor."""
    queue = "hostile"
    with RawPeer(f"amqp://127.0.0.1:{cluster.nodes[0].amqp_port}") as peer:
        peer.handshake().open_channel(1)
        peer.call(1, pika.spec.Confirm.Select(), pika.spec.Confirm.SelectOk)
        declare = pika.spec.Queue.Declare(queue=queue, durable=True, arguments=QUORUM)
        peer.call(1, declare, pika.spec.Queue.DeclareOk)
        for properties in hostile.SEVERAL:
            sent = encode_properties(properties)
            peer.publish(1, b"\x1b[2J\r\nbody", routing_key=queue, properties=sent)
            peer.expect(pika.spec.Basic.Ack)

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "convoymq.cli", "queues", *words],
            env={**os.environ, "CONVOY_DATA_DIR": str(cluster.data), "PYTHONIOENCODING": "utf-8"},
            capture_output=True, timeout=PATIENCE_S, check=True,
        )  # fmt: skip
        return done.stdout.decode()

    count = len(hostile.SEVERAL)
    columns = ("--columns", "position,routing_key,payload,properties")
    rows = json.loads(run("browse", queue, *columns, "--formatter", "json"))
    assert len(rows) == count
    assert "Not UTF-8, base64 is: //4AAQ==" in rows[0]["properties"]
    for formatter, more in (("table", 1), ("csv", 1), ("pretty_table", count + 3)):
        shown = run("browse", queue, *columns, "--formatter", formatter, "-q")
        assert len(shown.splitlines()) == count + more, shown
        assert "\x1b" not in shown
    for position in range(1, count + 1):
        assert "payload" in run("peek", queue, str(position))


def act_on_all(cluster: LocalCluster, tools: Tools, work: str, dead: str, names: list[str]) -> None:
    """One goes, two are moved, one is edited and two go back."""

    def act(*words: object) -> dict[str, int]:
        (row,) = tools.json("queues", *words)
        assert row["state"] == "done"
        return {name: row[name] for name in ("gone", "deleted", "moved") if row[name]}

    with contextlib.closing(connect(cluster, 2)) as connection:
        channel = connection.channel()
        channel.queue_declare(PARKED, durable=True, arguments=QUORUM)
        assert act("delete_messages", dead, names[0], "9.9.9") == {"gone": 1, "deleted": 1}
        moved = act("move_messages", dead, names[2], names[1], "--to-queue", PARKED)
        assert moved == {"moved": 2}
        edited = ("--to-queue", PARKED, "--payload", "edited")
        assert act("republish_message", dead, names[3], *edited) == {"moved": 1}
        for _ in range(2):
            assert act("retry_messages", dead, "--all", "--operation", "all") == {"moved": 2}
        assert len(tools.json("queues", "list_operations", dead)) == 4
        bodies = []
        for queue, count in ((PARKED, 3), (work, 2)):
            for _ in range(count):
                _, properties, body = channel.basic_get(queue, auto_ack=True)
                bodies.append(body.strip().decode())
                assert properties.headers["x-first-death-queue"] == work
        assert bodies == ["2", "1", "edited", "4", "5"]
