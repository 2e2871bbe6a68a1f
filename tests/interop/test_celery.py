"""Celery: a worker process, tasks and results, and a leader killed between them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kombu.pools
import pytest

from tests.clusters import Cluster
from tests.interop.celery_app import make_app
from tests.interop.conftest import Names
from tests.interop.failover import LEADER, leader_killed, uris_from
from tests.interop.helpers import eventually

ROOT = Path(__file__).resolve().parents[2]
TASKS = 300
RESULT_LIMIT_S = 40

pytestmark = [
    # Celery and kombu keep sockets for their own reuse and leave them to the collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::celery.exceptions.CPendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


class Celery:
    """An application and its worker on one queue."""

    def __init__(self, app: Any, queue: str, worker: subprocess.Popen[bytes], log: Path) -> None:
        self.app = app
        self.queue = queue
        self.worker = worker
        self.log = log

    def send(self, name: str, *arguments: Any) -> Any:
        return self.app.send_task(name, args=arguments, queue=self.queue)


@pytest.fixture
def celery(cluster: Cluster, names: Names, tmp_path: Path) -> Iterator[Callable[[str], Celery]]:
    """Starts Celery on a queue of the given type: the worker's first node is the leader."""
    workers: list[subprocess.Popen[bytes]] = []
    apps: list[Any] = []

    def start(kind: str) -> Celery:
        queue = names.queue(kind)
        names.exchanges.append(queue)
        log = tmp_path / "worker.log"
        settings = {
            "CELERY_TEST_QUEUE": queue,
            "CELERY_TEST_QUEUE_TYPE": kind,
            "CELERY_TEST_BROKER": ";".join(uris_from(cluster, LEADER)),
        }
        command = [sys.executable, "-m", "celery", "-A", "tests.interop.celery_app", "worker"]
        options = ["--pool", "solo", "--without-gossip", "--without-mingle", "-l", "info"]
        with log.open("wb") as output:
            workers.append(
                subprocess.Popen(
                    [*command, *options, "-n", f"{queue}@localhost"],
                    cwd=ROOT,
                    env=os.environ | settings,
                    stdout=output,
                    stderr=output,
                )
            )
        eventually(lambda: " ready." in log.read_text() or workers[-1].poll() is not None)
        assert workers[-1].poll() is None, log.read_text()[-3000:]
        apps.append(make_app(";".join(uris_from(cluster, 0)), queue, kind))
        return Celery(apps[-1], queue, workers[-1], log)

    yield start
    for worker in workers:
        worker.kill()
        worker.wait()
    for app in apps:
        answers = app.backend.result_consumer
        if answers._connection is not None and answers._consumer is not None:
            answers.stop()
        app.close()
    # What Celery leaves to the collector must not be charged to the next test.
    apps.clear()
    kombu.pools.reset()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_tasks_and_results(celery: Callable[[str], Celery], kind: str) -> None:
    started = celery(kind)
    results = [started.send("interop.square", number) for number in range(20)]
    assert [result.get(timeout=RESULT_LIMIT_S) for result in results] == [
        number * number for number in range(20)
    ], started.log.read_text()[-3000:]
    with pytest.raises(ValueError, match="on purpose"):
        started.send("interop.fail").get(timeout=RESULT_LIMIT_S)


def test_tasks_survive_the_death_of_the_leader(
    celery: Callable[[str], Celery], cluster: Cluster
) -> None:
    started = celery("quorum")
    with leader_killed(cluster, True) as strike:
        results = []
        for number in range(TASKS):
            if number == TASKS // 3:
                strike()
            results.append(started.send("interop.square", number))
        answers = [result.get(timeout=RESULT_LIMIT_S) for result in results]
    assert answers == [number * number for number in range(TASKS)]
