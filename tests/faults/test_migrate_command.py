"""`convoy queues migrate` in a process of its own, against nodes with queues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.cli.api import get_json
from convoymq.cli.cluster import LocalCluster
from tests.faults.traffic import connect
from tests.patience import PATIENCE_S

CLASSIC, QUORUM = {"x-queue-type": "classic"}, {"x-queue-type": "quorum"}
PERSISTENT = pika.BasicProperties(delivery_mode=2)
MESSAGES = 30


@pytest.fixture
def filled(cluster: LocalCluster) -> LocalCluster:
    """Queues with messages: the names say what they are."""
    connection = connect(cluster, 1)
    channel = connection.channel()
    channel.confirm_delivery()
    declared = {
        "one": CLASSIC,
        "many.a": CLASSIC,
        "many.b": QUORUM,
        "many.brief": CLASSIC,
        "many.c": CLASSIC,
        "full": {"x-overflow": "reject-publish", **CLASSIC},
    }
    for name, arguments in declared.items():
        channel.queue_declare(name, durable=name != "many.brief", arguments=arguments)
        for number in range(MESSAGES):
            channel.basic_publish("", name, str(number).encode(), PERSISTENT)
    connection.close()
    return cluster


def migrate(cluster: LocalCluster, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """Runs the command; returns its exit code, its rows and what it says beside them."""
    done = subprocess.run(
        [sys.executable, "-m", "convoymq.cli", "queues", "migrate", *words, "--formatter", "json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "CONVOY_DATA_DIR": str(cluster.data)},
        stdin=subprocess.DEVNULL,
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    rows = json.loads(done.stdout) if done.stdout.lstrip().startswith("[") else []
    return done.returncode, rows, said


def types(cluster: LocalCluster) -> dict[str, str]:
    rows = get_json(f"http://127.0.0.1:{cluster.nodes[1].http_port}/api/queues/%2F")
    return {row["name"]: row["type"] for row in rows}


def take(cluster: LocalCluster, name: str) -> list[bytes]:
    connection = connect(cluster, 3)
    channel = connection.channel()
    found = []
    while (got := channel.basic_get(name, auto_ack=True))[0] is not None:
        found.append(got[2])
    connection.close()
    return found


def test_the_command_migrates_what_it_is_asked_to(filled: LocalCluster) -> None:
    before = types(filled)
    code, rows, _ = migrate(filled, "full", "--to", "stream", "--dry-run")
    assert (code, len(rows)) == (0, 1)
    assert (rows[0]["state"], rows[0]["messages"]) == ("dry run", MESSAGES)
    assert rows[0]["dropped_arguments"] == "x-overflow"
    assert "retention takes the oldest" in rows[0]["notes"]
    code, rows, _ = migrate(filled, "^many", "--pattern", "--to", "quorum", "--dry-run")
    # The plan of many says which would be refused, and so does the exit code.
    states = {row["name"]: row["state"] for row in rows}
    assert states == {"many.a": "dry run", "many.brief": "refused", "many.c": "dry run"}
    assert code == 69
    assert "not durable" in next(row for row in rows if row["state"] == "refused")["reason"]
    assert types(filled) == before

    for words, expected, text in (
        (("none", "--to", "quorum"), 65, "not_found"),
        (("one", "--to", "other"), 64, "--to other is not supported"),
        (("one",), 64, "--to"),
        (("one", "--to", "classic"), 69, "is of type 'classic' already"),
        (("one", "--to", "mirrored"), 69, "a policy that has ha-mode"),
        (("many.brief", "--to", "quorum"), 69, "not durable"),
        (("full", "--to", "stream"), 69, "x-overflow"),
        (("(", "--to", "quorum", "--pattern"), 64, "pattern"),
        (("one", "--to", "quorum", "--rate", "-1"), 64, "--rate"),
        (("one", "--to", "quorum", "-p", "nowhere"), 65, "nowhere"),
    ):
        code, _, said = migrate(filled, *words)
        assert (code, text in said) == (expected, True), f"{words}: {code} {said}"
    assert types(filled) == before

    code, rows, _ = migrate(filled, "one", "--to", "quorum", "--rate", "20")
    assert code == 0
    assert (rows[0]["state"], rows[0]["messages"], rows[0]["copied"]) == (
        "migrated", MESSAGES, MESSAGES,
    )  # fmt: skip
    code, rows, _ = migrate(filled, "full", "--to", "stream", "--drop-arguments")
    assert (code, rows[0]["state"]) == (0, "migrated")
    code, rows, said = migrate(filled, "^many", "--pattern", "--to", "quorum")
    assert code == 69
    assert {row["name"]: row["state"] for row in rows} == {
        "many.a": "migrated", "many.brief": "refused", "many.c": "migrated",
    }  # fmt: skip
    assert types(filled) == {
        "one": "quorum",
        "many.a": "quorum",
        "many.b": "quorum",
        "many.brief": "classic",
        "many.c": "quorum",
        "full": "stream",
    }
    assert take(filled, "one") == [str(number).encode() for number in range(MESSAGES)]
    # Those that have the type are passed over.
    code, rows, _ = migrate(filled, r"^many\.[abc]$", "--pattern", "--to", "quorum")
    assert (code, rows) == (0, [])
