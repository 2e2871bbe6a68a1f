"""A stock Celery worker: gossip, mingle, events and remote control over their expiring queues."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import kombu.pools
import pytest

from tests.clusters import Cluster
from tests.interop.celery_app import make_app
from tests.interop.conftest import Names
from tests.interop.helpers import eventually
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    # Celery and kombu keep sockets for their own reuse and leave them to the collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::celery.exceptions.CPendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


class Workers:
    """An application and the names of its workers."""

    def __init__(self, app: Any, hosts: list[str]) -> None:
        self.app = app
        self.hosts = hosts


@pytest.fixture
def workers(cluster: Cluster, names: Names, tmp_path: Path) -> Iterator[Workers]:
    """An application and two workers of it, started with nothing but their names and pool."""
    queue = names.queue("celery")
    names.exchanges.append(queue)
    settings = {
        "CELERY_TEST_QUEUE": queue,
        "CELERY_TEST_QUEUE_TYPE": "quorum",
        "CELERY_TEST_BROKER": ";".join(cluster.uris),
    }
    hosts = [f"{queue}-{k}@localhost" for k in range(2)]
    running: list[subprocess.Popen[bytes]] = []
    made = Workers(make_app(cluster.uris[0], queue, "quorum"), hosts)
    try:
        for host in hosts:
            log = tmp_path / f"{host}.log"
            command = [sys.executable, "-m", "celery", "-A", "tests.interop.celery_app", "worker"]
            with log.open("wb") as output:
                running.append(
                    subprocess.Popen(
                        [*command, "--pool", "solo", "-E", "-l", "info", "-n", host],
                        cwd=ROOT,
                        env=os.environ | settings,
                        stdout=output,
                        stderr=output,
                    )
                )
            worker = running[-1]

            def settled(log: Path = log, worker: subprocess.Popen[bytes] = worker) -> bool:
                return " ready." in log.read_text() or worker.poll() is not None

            eventually(settled)
            assert worker.poll() is None, log.read_text()[-3000:]
        # The second one has found the first.
        assert "mingle: sync with 1 nodes" in (tmp_path / f"{hosts[1]}.log").read_text()
        yield made
    finally:
        for worker in running:
            worker.kill()
            worker.wait()
        made.app.close()
        # What Celery leaves to the collector must not be charged to the next test.
        made.app = None
        kombu.pools.reset()  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def test_gossip_mingle_events_and_remote_control(workers: Workers) -> None:
    app, hosts = workers.app, workers.hosts
    answers = app.control.ping(destination=hosts, timeout=PATIENCE_S, limit=2)
    assert sorted(host for answer in answers for host in answer) == sorted(hosts)
    assert all(answer == {"ok": "pong"} for found in answers for answer in found.values())
    statistics = app.control.inspect(destination=hosts, timeout=PATIENCE_S, limit=2).stats()
    assert sorted(statistics) == sorted(hosts)

    seen: list[str] = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(
            connection, handlers={"task-succeeded": lambda event: seen.append(event["uuid"])}
        )
        with receiver.consumer_context() as (connection, _channel, _consumers):
            result = app.send_task("interop.square", args=(12,), queue=app.conf.task_default_queue)
            eventually(lambda: _heard(connection, seen, result.id))
            assert result.get(timeout=PATIENCE_S) == 144


def _heard(connection: Any, seen: list[str], task: str) -> bool:
    with suppress(TimeoutError):
        connection.drain_events(timeout=0.2)
    return task in seen
