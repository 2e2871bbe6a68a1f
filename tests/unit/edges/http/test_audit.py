"""The log of administrative acts, over HTTP and the administration socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from convoymq.broker.audit import TEXT_CHARACTERS_MAX, Act, AuditLog
from convoymq.node.logs import LogOutput
from tests.provocation import Observed
from tests.unit.edges.http.test_api import api, client, cluster, ok
from tests.unit.queues.fake_cluster import FakeCluster

__all__ = ["api", "cluster"]


@pytest.fixture
def log(cluster: FakeCluster, tmp_path: Path) -> Any:
    output = LogOutput(str(tmp_path / "audit.log"))
    cluster.nodes[1].broker.audit = AuditLog(output, lambda: "one")
    yield tmp_path / "audit.log"
    output.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def short(path: Path) -> list[tuple[Any, ...]]:
    names = ("user", "method", "path", "status", "result")
    return [tuple(row[name] for name in names) for row in lines(path)]


async def test_acts_are_recorded_with_their_result(
    cluster: FakeCluster, api: httpx.AsyncClient, log: Path
) -> None:
    await ok(api.get("/users"))
    await ok(api.put("/users/ann", json={"password": "hidden-1", "tags": "management"}), 201)
    await ok(api.put("/vhosts/a%2Fb?secret=hidden-2", json={}), 201)
    await ok(api.delete("/queues/%2F/none"), 404)
    async with client(cluster, "ann", "hidden-1", peer="127.0.0.9") as ann:
        await ok(ann.delete("/users/ann"), 401)
        await ok(ann.post("/login", json={"username": "ann", "password": "hidden-1"}))
        await ok(ann.delete("/nothing/here"), 404)
    async with client(cluster, "ann", "hidden-3") as ann:
        await ok(ann.delete("/users/ann"), 401)
    await ok(api.post("/exchanges/%2F/amq.topic/publish", json={"routing_key": "k"}), 400)
    assert short(log) == [
        ("guest", "PUT", "/api/users/ann", 201, "done"),
        ("guest", "PUT", "/api/vhosts/a%2Fb", 201, "done"),
        ("guest", "DELETE", "/api/queues/%2F/none", 404, "refused"),
        ("ann", "DELETE", "/api/users/ann", 401, "refused"),
        ("ann", "POST", "/api/login", 200, "done"),
        ("", "DELETE", "/api/nothing/here", 404, "refused"),
        ("", "DELETE", "/api/users/ann", 401, "refused"),
    ]
    assert "hidden" not in log.read_text()
    row = lines(log)[3]
    assert (row["via"], row["peer"], row["node"]) == ("http", "127.0.0.9", "one")


class Full:
    """A file on a disk that is full."""

    path = "/full/audit.log"

    def write(self, text: str) -> None:
        raise OSError(28, "No space left on device")


def act(**more: Any) -> Act:
    fields: dict[str, Any] = {"via": "http", "user": "u", "peer": "", "method": "PUT"}
    return Act(**(fields | {"path": "/", "status": 500} | more))


@pytest.mark.provokes("audit.not_written")
def test_a_full_disk_is_reported_once(observed: Observed) -> None:
    audit = AuditLog(Full(), lambda: "one")
    with capture_logs() as logged:
        audit.record(act())
        audit.record(act())
    assert [row["event"] for row in logged] == ["audit.not_written"]
    for row in logged:
        observed.event(row["event"], row["log_level"])


def test_lines_are_bounded_and_stay_lines(tmp_path: Path) -> None:
    output = LogOutput(str(tmp_path / "audit.log"))
    audit = AuditLog(output, lambda: "one")
    audit.record(act(user="a\nb\u2028", path="x" * 5000))
    output.close()
    (row,) = lines(tmp_path / "audit.log")
    assert (row["user"], row["result"]) == ("a\nb\u2028", "failed")
    assert row["path"] == "x" * TEXT_CHARACTERS_MAX + "…"
    AuditLog(None, lambda: "one").record(act())
