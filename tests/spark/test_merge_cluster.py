"""`apply` on a standalone cluster of Spark with Delta Lake's extension, while its processes are
killed: `make test-spark-delta`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from convoymq.spark.pipelines import apply as pipeline
from tests.faults.topic_traffic import changed, create, open_pids
from tests.patience import PATIENCE_S
from tests.ports import single_port
from tests.spark import delta
from tests.spark.cluster import Broker
from tests.spark.test_apply import SCHEMA
from tests.spark.test_merging import batch_names
from tests.spark.test_processes import Programs, kill, worker_of
from tests.spark.test_topics import change

pytestmark = pytest.mark.skipif(not delta.is_used(), reason=delta.MISSING)

JOB = Path(__file__).with_name("apply_job.py")
MASTER_PORT, MASTER_WEB_PORT = single_port(), single_port()
WORKER_WEB_PORTS = (single_port(), single_port())
TABLES = ("orders", "users")
EVENTS = 3000
KEYS = 400
PER_BATCH = "400"


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with ExitStack() as stack:
        yield Programs(tmp_path, stack, PATIENCE_S)


def start_cluster(programs: Programs) -> str:
    """Starts a master and two workers from the package; returns the master's URL."""
    home = Path(pyspark.__file__).parent
    programs.environment |= {"SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "256m"}
    program, deploy = str(home / "bin" / "spark-class"), "org.apache.spark.deploy"
    here = ("--host", "127.0.0.1")
    url = f"spark://127.0.0.1:{MASTER_PORT}"
    programs.start(
        program, f"{deploy}.master.Master", *here, "--port", str(MASTER_PORT),
        "--webui-port", str(MASTER_WEB_PORT),
    )  # fmt: skip
    for number, port in enumerate(WORKER_WEB_PORTS):
        programs.start(
            program, f"{deploy}.worker.Worker", *here, "--cores", "1", "--memory", "1g",
            "--work-dir", str(programs.path / f"work-{number}"), "--webui-port", str(port), url,
        )  # fmt: skip
    return url


def executors() -> list[psutil.Process]:
    """The executors of this test's cluster."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "CoarseGrainedExecutorBackend" in " ".join(process.info["cmdline"] or ())
        and str(MASTER_PORT) in " ".join(worker_of(process))
    ]


class Source:
    """Two tables that change, and their changes in a topic."""

    def __init__(self, nodes: Broker) -> None:
        self.nodes = nodes
        self.rows: dict[str, dict[int, str]] = {name: {} for name in TABLES}
        self._rng = random.Random(15)
        self._count = 0
        create(nodes.cluster, "database", 2)

    def more(self, count: int) -> None:
        with self.nodes.channel() as channel:
            channel.confirm_delivery()
            for _ in range(count):
                self._count += 1
                key, table = self._rng.randrange(KEYS), self._rng.choice(TABLES)
                name = f"v{self._count}" if self._rng.random() > 0.25 else None
                held = self.rows[table]
                held.pop(key, None) if name is None else held.update({key: name})
                event = {**change(key, name), "source": {"table": table}}
                body = json.dumps(event).encode()
                channel.basic_publish("database", f"{table}/{key}", body)


def assert_equal(spark: SparkSession, path: Path, expected: dict[int, str]) -> None:
    """The table has the rows of its source: count, a digest of each row, and nothing on one side
    alone."""

    def digests(rows: DataFrame) -> DataFrame:
        return rows.select("id", f.xxhash64("id", "name").alias("digest"))

    found = digests(pipeline.rows(spark, str(path)))
    source = digests(spark.createDataFrame(list(expected.items()), SCHEMA))
    assert found.count() == len(expected)
    assert found.join(source, ["id", "digest"], "anti").count() == 0
    assert source.join(found, ["id", "digest"], "anti").count() == 0


def test_tables_equal_their_source_while_executors_and_drivers_are_killed(
    spark: SparkSession, nodes: Broker, programs: Programs
) -> None:
    """Goal: every batch is in each table once, and the tables equal their source. Method: all
    executors are killed in a MERGE, the driver in another one, a second driver between a MERGE and
    the checkpoint; the topic's partitions are split and merged meanwhile, and the last driver has
    its rows pass through itself."""
    source = Source(nodes)
    source.more(EVENTS // 2)
    changed(nodes.cluster, "database", "split", pid=open_pids(nodes.cluster, "database")[0])
    source.more(EVENTS // 4)
    url, marks = start_cluster(programs), programs.path / "marks"
    marks.touch()
    paths = {name: programs.path / name for name in TABLES}
    job: dict[str, Any] = {
        "servers": nodes.servers,
        "topic": "database",
        "tables": {name: str(path) for name, path in paths.items()},
        "schema": SCHEMA,
        "checkpoint": str(programs.path / "state"),
        "master": url,
        "conf": {
            "spark.executor.memory": "512m",
            "spark.driver.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            **delta.DELTA_SETTINGS,
        },
        "options": {"maxOffsetsPerTrigger": PER_BATCH},
        "mark": str(marks),
        "merge": "executors",
    }

    def run(**more: Any) -> subprocess.Popen[bytes]:
        return programs.start(sys.executable, str(JOB), json.dumps({**job, **more}))

    def has_come_to(batch: int) -> bool:
        return any(f"merging {name} {batch}\n" in marks.read_text() for name in TABLES)

    first = run()
    programs.until(lambda: has_come_to(1), first)
    victims = executors()
    assert len(victims) == 2
    for victim in victims:
        victim.kill()
    programs.until(lambda: has_come_to(3), first)
    kill(first)
    changed(nodes.cluster, "database", "merge", pids=open_pids(nodes.cluster, "database")[:2])
    source.more(EVENTS - EVENTS // 2 - EVENTS // 4)
    second = run(kill="merged users 4")
    assert second.wait(PATIENCE_S) == -signal.SIGKILL, programs.log
    # Java outlives its Python for a moment; its group goes with it.
    with suppress(ProcessLookupError):
        os.killpg(second.pid, signal.SIGKILL)
    programs.finished(run(merge="driver"))
    reported = (programs.path / "log").read_text(errors="replace").rpartition("\nreport ")[2]
    report = json.loads(reported.splitlines()[0])
    assert report["merge"] == "driver"
    assert report["tables"]["users"]["skipped"] == 1
    for name, path in paths.items():
        assert_equal(spark, path, source.rows[name])
        names = batch_names(path)
        assert len(names) == len(set(names))
    assert len({process.pid for process in victims}) == 2
    assert all(len(list((programs.path / f"work-{n}").glob("app-*/*"))) > 1 for n in (0, 1))
