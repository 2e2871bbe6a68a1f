"""A running cluster takes another configuration, another level of its logs and another secret."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.faults.conftest import StartCluster
from tests.faults.traffic import Traffic, declare, in_step, log_has, until
from tests.patience import PATIENCE_S
from tests.provocation import Observed


def convoy(cluster: LocalCluster, number: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command about a node."""
    url = f"http://127.0.0.1:{cluster.nodes[number - 1].http_port}"
    return subprocess.run(
        [sys.executable, "-m", "convoymq.cli", *words, "--url", url],
        capture_output=True, text=True, timeout=PATIENCE_S, env=dict(os.environ),
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def change(cluster: LocalCluster, number: int, **settings: str) -> None:
    """Sets keys in the file of a node, as an editor does."""
    path = cluster.data / f"node-{number}" / "convoy.conf"
    text = path.read_text()
    for name, value in settings.items():
        key = name.replace("__", ".")
        kept = [line for line in text.splitlines() if not line.startswith(f"{key} ")]
        text = "\n".join([*kept, f"{key} = {value}"]) + "\n"
    path.write_text(text)


@pytest.mark.provokes("config.reloaded", "config.not_reloaded", "log.level_changed")
def test_what_is_live_is_applied_and_the_rest_is_named(
    start_cluster: StartCluster, observed: Observed
) -> None:
    cluster = start_cluster(nodes=1)
    change(
        cluster, 1, log__level="debug", vm_memory_high_watermark__absolute="3GiB",
        channel_max="17",
    )  # fmt: skip
    done = convoy(cluster, 1, "config", "reload", "--formatter", "json")
    assert done.returncode == 0, done.stderr
    assert {row["key"]: row["state"] for row in json.loads(done.stdout)} == {
        "log.level": "applied",
        "vm_memory_high_watermark.absolute": "applied",
        "channel_max": "needs a restart",
    }
    (node,) = cluster.api("nodes")
    assert node["mem_limit"] == 3 << 30
    # Once more: the restart is still needed, nothing else has changed.
    done = convoy(cluster, 1, "config", "reload", "--formatter", "json")
    assert [row["key"] for row in json.loads(done.stdout)] == ["channel_max"]
    change(cluster, 1, log__level="loud")
    done = convoy(cluster, 1, "config", "reload")
    assert done.returncode != 0
    assert "log.level" in done.stderr + done.stdout
    cluster.kill(1, signal.SIGHUP)
    until(lambda: log_has(cluster, 1, "config.not_reloaded"), "SIGHUP read nothing")
    assert convoy(cluster, 1, "ctl", "set_log_level", "notice").returncode == 0
    assert convoy(cluster, 1, "ctl", "set_log_level", "loud").returncode != 0
    assert convoy(cluster, 1, "ctl", "set_log_level", "info").returncode == 0
    assert convoy(cluster, 1, "ctl", "rotate_logs").returncode == 0
    until(lambda: log_has(cluster, 1, "log.reopened"), "the log was not opened again")


def test_the_secret_is_replaced_under_load(start_cluster: StartCluster) -> None:
    """Every step of docs/operations.md, and a restart of a node between them."""
    cluster = start_cluster()
    numbers = [node.number for node in cluster.nodes]
    files = {n: (cluster.data / f"s{n}", cluster.data / f"t{n}") for n in numbers}
    old = (cluster.data / "secret").read_text()

    def write(first: str, second: str) -> None:
        for number, pair in files.items():
            for path, text in zip(pair, (first, second), strict=True):
                path.touch(mode=0o600)
                path.write_text(text)
            done = convoy(cluster, number, "config", "reload")
            assert done.returncode == 0, done.stderr

    def restart(number: int) -> None:
        cluster.kill(number)
        cluster.start_node(number)
        cluster.wait_ready()
        in_step(cluster)

    for number, (first, second) in files.items():
        first.touch(mode=0o600)
        first.write_text(old)
        second.touch(mode=0o600)
        change(
            cluster, number, cluster__secret_file=str(first),
            cluster__accepted_secret_file=str(second),
        )  # fmt: skip
        assert convoy(cluster, number, "config", "reload").returncode == 0
    declare(cluster, 1, "q")
    with Traffic(cluster, "q", publish_at=(1, 2, 3), consume_at=((1, 2, 3),)) as traffic:
        for at, (first, second) in enumerate(((old, "new"), ("new", old), ("new", ""))):
            write(first, second)
            restart(numbers[at])
            traffic.goes_on()
        traffic.finish()
