"""Nodes whose wall clocks are wrong, by a library that stands before the C library's clock."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pika
import pytest

from convoymq.cli.cluster import LocalCluster, LocalNode
from tests.faults.conftest import BASE_PORT
from tests.faults.traffic import connect, counter, log_has, until
from tests.patience import PATIENCE_S

STREAM = "events"
DAY_S = 86_400
HOUR_S = 3_600
SOURCE = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset_s(void) {
    const char *text = getenv("TEST_CLOCK_OFFSET_S");
    return text ? atol(text) : 0;
}
int clock_gettime(clockid_t clock, struct timespec *found) {
    int result = (int)syscall(SYS_clock_gettime, clock, found);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        found->tv_sec += offset_s();
    return result;
}
int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""


class SkewedCluster(LocalCluster):
    """The wall clocks of some nodes are wrong by so many seconds."""

    def __init__(self, data: Path, library: Path, offsets_s: dict[int, int]) -> None:
        super().__init__(data, 3, BASE_PORT)
        self.library = library
        self.offsets_s = offsets_s

    def _spawn(self, node: LocalNode) -> None:
        names = {"LD_PRELOAD": str(self.library)}
        names["TEST_CLOCK_OFFSET_S"] = str(self.offsets_s.get(node.number, 0))
        os.environ.update(names)
        try:
            super()._spawn(node)
        finally:
            for name in names:
                del os.environ[name]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None or "LD_PRELOAD" in os.environ:
        pytest.skip("needs a C compiler, and LD_PRELOAD for itself")
    source, made = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source], check=True)
    shown = subprocess.run(
        [shutil.which("python3") or "python3", "-c", "import time; print(int(time.time()))"],
        env={**os.environ, "LD_PRELOAD": str(made), "TEST_CLOCK_OFFSET_S": str(DAY_S)},
        capture_output=True,
        check=True,
    )
    if abs(int(shown.stdout) - time.time() - DAY_S) > HOUR_S:
        pytest.skip("this system's clock cannot be offset for one process")
    return made


@pytest.fixture
def cluster(tmp_path: Path, library: Path) -> Iterator[SkewedCluster]:
    with SkewedCluster(tmp_path / "cluster", library, {1: DAY_S}) as made:
        made.wait_ready()
        yield made


def publish(connection: pika.BlockingConnection, count: int) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    for _ in range(count):
        channel.basic_publish("", STREAM, b"x", pika.BasicProperties(delivery_mode=2))
    channel.close()


def first_offset(connection: pika.BlockingConnection, seconds_ahead: int) -> int:
    """Offset of the first message that a reader from that time gets; publishes until one comes."""
    channel = connection.channel()
    channel.basic_qos(prefetch_count=10)
    start = datetime.fromtimestamp(int(time.time()) + seconds_ahead, UTC)
    found: list[int] = []

    def on_message(_channel: Any, _method: Any, properties: Any, _body: bytes) -> None:
        found.append(properties.headers["x-stream-offset"])

    channel.basic_consume(STREAM, on_message, arguments={"x-stream-offset": start})
    deadline = time.monotonic() + PATIENCE_S
    while not found:
        assert time.monotonic() < deadline, "nothing comes"
        connection.process_data_events(0.05)
        publish(connection, 1)
    channel.close()
    return found[0]


def test_a_leader_a_day_ahead_stamps_entries_with_the_time_of_the_others(
    cluster: SkewedCluster,
) -> None:
    until(lambda: log_has(cluster, 1, "clock.skewed"), "nobody sees that the clock is wrong")
    assert not log_has(cluster, 2, "clock.skewed")
    until(
        lambda: abs(counter(cluster, 1, "clock_skew_ms") - DAY_S * 1000) < 10_000,
        "the skew is not shown",
    )
    until(lambda: abs(counter(cluster, 2, "clock_skew_ms")) < 10_000, "node 2 shows a skew")
    assert cluster.api("convoy/node", 1)["alarms"] == ["clock"]
    assert cluster.api("convoy/node", 2)["alarms"] == []
    with closing(connect(cluster, 1)) as connection:
        arguments = {"x-queue-type": "stream"}
        connection.channel().queue_declare(STREAM, durable=True, arguments=arguments)
        assert cluster.leader_of(STREAM) == 1
        publish(connection, 10)
        assert first_offset(connection, -HOUR_S) == 0
        # Were the entries stamped a day ahead, this reader would begin with the first one.
        assert first_offset(connection, HOUR_S) >= 10
    # Nor does the next leader go on from a time that is a day ahead.
    cluster.kill(1)
    until(lambda: cluster.leader_of(STREAM) != 1, "nobody takes over")
    with closing(connect(cluster, 2)) as connection:
        assert first_offset(connection, HOUR_S) >= 10
