"""Celery: a worker process, tasks and results, and a leader killed between them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kombu.pools
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from tests.clusters import Cluster
from tests.interop.celery_app import make_app
from tests.interop.conftest import Names, given_names
from tests.interop.failover import LEADER, leader_killed, uris_from
from tests.interop.helpers import eventually
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
TASKS = 120
LADDER = [f"celery_delayed_{level}" for level in range(28)]
DELAY_S = 3

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

    def send(self, name: str, *arguments: Any, **options: Any) -> Any:
        return self.app.send_task(name, args=arguments, queue=self.queue, **options)


Start = Callable[..., Celery]


@contextmanager
def celeries(cluster: Cluster, names: Names, directory: Path) -> Iterator[Start]:
    """Starts Celery on a queue of the given type: the worker's first node is the leader."""
    # With quorum queues a worker declares what it needs for native delayed delivery.
    names.queues += LADDER
    names.exchanges += [*LADDER, "celery_delayed_delivery"]
    workers: list[subprocess.Popen[bytes]] = []
    apps: list[Any] = []

    def start(kind: str, exchange_type: str = "direct") -> Celery:
        queue = names.queue(kind)
        names.exchanges.append(queue)
        log = directory / "worker.log"
        settings = {
            "CELERY_TEST_QUEUE": queue,
            "CELERY_TEST_QUEUE_TYPE": kind,
            "CELERY_TEST_EXCHANGE_TYPE": exchange_type,
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
        eventually(
            lambda: " ready." in log.read_text() or workers[-1].poll() is not None,
            timeout_s=PATIENCE_S,
        )
        assert workers[-1].poll() is None, log.read_text()[-3000:]
        apps.append(make_app(";".join(uris_from(cluster, 0)), queue, kind, exchange_type))
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


@pytest.fixture
def celery(cluster: Cluster, names: Names, tmp_path: Path) -> Iterator[Start]:
    """Starts a worker for one test."""
    with celeries(cluster, names, tmp_path) as start:
        yield start


@pytest.fixture(scope="module", params=["quorum", "classic"])
def started(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Celery]:
    """The worker of all tests that leave it as it was, on a queue of each type."""
    directory = tmp_path_factory.mktemp("celery")
    with given_names(cluster) as names, celeries(cluster, names, directory) as start:
        yield start(request.param)


def test_tasks_and_results(started: Celery) -> None:
    results = [started.send("interop.square", number) for number in range(20)]
    assert [result.get(timeout=PATIENCE_S) for result in results] == [
        number * number for number in range(20)
    ], started.log.read_text()[-3000:]
    with pytest.raises(ValueError, match="on purpose"):
        started.send("interop.fail").get(timeout=PATIENCE_S)


def test_tasks_survive_the_death_of_the_leader(celery: Start, cluster: Cluster) -> None:
    started = celery("quorum")
    with leader_killed(cluster, True) as strike:
        results = []
        for number in range(TASKS):
            if number == TASKS // 3:
                strike()
            results.append(started.send("interop.square", number))
        answers = [result.get(timeout=PATIENCE_S) for result in results]
    assert answers == [number * number for number in range(TASKS)]


def test_a_task_with_an_eta_waits_in_the_worker(started: Celery) -> None:
    """Behind a direct exchange the worker takes the task at once and holds it until its time."""
    began = time.monotonic()
    late = started.send("interop.square", 3, countdown=DELAY_S)
    assert started.send("interop.square", 4).get(timeout=PATIENCE_S) == 16
    assert late.get(timeout=PATIENCE_S) == 9, started.log.read_text()[-3000:]
    assert time.monotonic() - began >= DELAY_S


def test_the_broker_delays_tasks_with_an_eta(celery: Start, channel: Any, names: Names) -> None:
    """Behind a topic exchange Celery's native delayed delivery has the message go down a ladder of
    quorum queues, by time to live and dead letters."""
    skip_where_refused(
        channel,
        names.queue("probe"),
        {"x-message-ttl": 1000, "x-dead-letter-exchange": "x", "x-overflow": "reject-publish"},
    )
    started = celery("quorum", "topic")
    assert "Failed to" not in started.log.read_text()
    began = time.monotonic()
    late = started.send("interop.square", 3, countdown=DELAY_S)
    assert late.get(timeout=PATIENCE_S) == 9, started.log.read_text()[-3000:]
    assert time.monotonic() - began >= DELAY_S - 1


def test_tasks_with_a_priority(started: Celery) -> None:
    """Celery sends a priority with every task, 0 where nobody has said one."""
    results = [started.send("interop.square", level, priority=level) for level in range(5)]
    answers = [result.get(timeout=PATIENCE_S) for result in results]
    assert answers == [level * level for level in range(5)]


def skip_where_refused(channel: Any, queue: str, arguments: dict[str, Any]) -> None:
    """Skips the test where quorum queues do not serve these arguments, by the broker's words."""
    probe = channel.connection.channel()
    try:
        probe.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"} | arguments)
    except pika.exceptions.ChannelClosedByBroker as error:
        pytest.skip(error.reply_text)
    probe.close()
