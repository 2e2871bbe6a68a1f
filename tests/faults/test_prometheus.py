"""A real Prometheus reads three nodes: our dashboard, our alerts, and RabbitMQ's dashboards.

Debian's package (`make test-metrics` installs it). RabbitMQ's dashboards are not distributed here:
`CONVOY_DASHBOARDS` names files of them; without it the metrics that they use are looked up.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pika
import pytest
from tools.check_dashboard import expressions_of, query, variables_of

from tests.faults.conftest import StartCluster
from tests.faults.traffic import until
from tests.patience import PATIENCE_S
from tests.ports import single_port

pytestmark = [
    pytest.mark.optional,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="no Prometheus: make test-metrics"),
]

GRAFANA = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
RULE = re.compile(r"- alert: (\w+)\n +expr: (.+)")
METRIC = re.compile(r"\b(?:rabbitmq|convoy)_\w+(?=[\[{\s)>]|$)|\bup(?={)")
OF_RABBITMQ = re.findall(
    r"\w+",
    """
alarms_file_descriptor_limit build_info channels channels_closed_total channels_opened_total
connections connections_closed_total connections_opened_total disk_space_available_bytes
disk_space_available_limit_bytes erlang_uptime_seconds global_consumers
global_messages_acknowledged_total global_messages_confirmed_total
global_messages_delivered_consume_auto_ack_total global_messages_delivered_consume_manual_ack_total
global_messages_delivered_get_auto_ack_total global_messages_delivered_get_manual_ack_total
global_messages_delivered_total global_messages_get_empty_total
global_messages_received_confirm_total global_messages_received_total
global_messages_redelivered_total global_messages_routed_total
global_messages_unroutable_dropped_total global_messages_unroutable_returned_total
global_publishers identity_info message_size_bytes_bucket message_size_bytes_count
message_size_bytes_sum process_max_fds process_open_fds process_resident_memory_bytes
queue_messages_ready queue_messages_unacked queues queues_created_total queues_declared_total
queues_deleted_total raft_commit_index raft_commit_latency_seconds raft_last_written_index
raft_log_commit_index raft_log_last_written_index raft_log_snapshot_index raft_snapshot_index
raft_term resident_memory_limit_bytes
""",
)
"""Metrics of RabbitMQ's dashboards 10991 (overview) and 11340 (quorum queues)."""


@contextmanager
def prometheus(directory: Path, ports: list[int]) -> Iterator[str]:
    """Runs one that reads nodes every second, with our rules; gives its address."""
    config = (
        (GRAFANA / "prometheus.yaml").read_text().replace("15s", "1s\n  evaluation_interval: 1s")
    )
    config = config.replace("alerts.yaml", str(GRAFANA / "alerts.yaml"))
    for number, port in enumerate(ports):
        config = config.replace(f':{15692 + number}"', f':{port}"')
    directory.mkdir()
    file = directory / "prometheus.yaml"
    file.write_text(config)
    address = f"127.0.0.1:{single_port()}"
    words = (f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}")
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", *words, f"--web.listen-address={address}"], stderr=log, stdout=log
        )
    try:
        until(lambda: _is_ready(f"http://{address}/-/ready"))
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


@contextmanager
def load(uri: str) -> Iterator[None]:
    """A client that publishes, consumes, fetches and opens channels until the end."""
    ended = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            connection = pika.BlockingConnection(pika.URLParameters(uri))
            channel = connection.channel()
            arguments = {"x-queue-type": "quorum"}
            channel.queue_declare("metrics", durable=True, arguments=arguments)
            channel.confirm_delivery()
            while not ended.wait(0.01):
                channel.basic_publish("", "metrics", b"x" * 300)
                channel.basic_publish("", "nowhere", b"")
                channel.basic_get("metrics", auto_ack=True)
                connection.channel().close()
            connection.close()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PATIENCE_S)
    assert not errors, errors


def wait_for_all(base: str, wanted: dict[str, str]) -> None:
    """Waits until each expression has data."""
    deadline = time.monotonic() + PATIENCE_S / 4
    while True:
        empty = {name: text for name, text in wanted.items() if not query(base, text)}
        if not empty:
            return
        assert time.monotonic() < deadline, f"no data for {empty}"
        time.sleep(0.5)


def test_dashboards_have_data_and_alerts_fire(start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster(nodes=3)
    ports = [node.metrics_port for node in cluster.nodes]
    with prometheus(tmp_path / "prometheus", ports) as base:
        until(lambda: len(query(base, "up == 1")) == 3)
        with load(cluster.nodes[0].uri):
            paths = [GRAFANA / "convoymq.json"]
            paths += map(Path, os.environ.get("CONVOY_DASHBOARDS", "").split())
            for path in paths:
                found = expressions_of(path, variables_of(base))
                wait_for_all(base, {f"{each.panel}: {each.text}": each.text for each in found})
            wait_for_all(base, {name: f"rabbitmq_{name}" for name in OF_RABBITMQ})
        rules = dict(RULE.findall((GRAFANA / "alerts.yaml").read_text()))
        names = {name for expression in rules.values() for name in METRIC.findall(expression)}
        assert len(names) > 15
        wait_for_all(base, {name: name for name in sorted(names)})
        # No rule holds in a cluster where all is well; that of a node that is down does.
        down = rules["ConvoyNodeDown"]
        assert not query(base, down)
        cluster.kill(2)
        until(lambda: len(query(base, down)) == 1)
        until(lambda: query(base, 'ALERTS{alertname="ConvoyNodeDown"}'))


def test_promtool_accepts_rules_and_configuration() -> None:
    for words in (("check", "rules", "alerts.yaml"), ("check", "config", "prometheus.yaml")):
        ended = subprocess.run(
            ["promtool", *words], cwd=GRAFANA, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended
