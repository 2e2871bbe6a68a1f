"""Events and metrics that only a whole node has; other tests provoke the others."""

from __future__ import annotations

import asyncio
import re
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.broker.alarms import Watermarks
from convoymq.broker.node_view import NodeView
from convoymq.broker.selection import Selection
from convoymq.edges.http.metrics import render
from convoymq.metadata.commands import PutSetting
from convoymq.node import resources
from convoymq.node.logs import LogOutput
from convoymq.node.process_info import process_info
from convoymq.storage.store import Storage
from convoymq.storage.types import Damage, RecoveryReport, StorageFault
from tests.patience import PATIENCE_S
from tests.provocation import Observed
from tests.running import Nodes, until

SLOW_S = 0.2


@pytest.mark.provokes(
    "amqp.listening",
    "cluster.forming",
    "node.ready",
    "node.stopped",
    "node.stopping",
    "raft.role_changed",
    "storage.recovered",
)
@pytest.mark.moves("rabbitmq_erlang_uptime_seconds")
async def test_a_node_starts_and_stops(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        first = await nodes.metrics()
        while await nodes.metrics() == first:
            pass


@pytest.mark.provokes("log.reopened", "log.not_reopened")
async def test_a_log_is_reopened_or_stays(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    directory = tmp_path / "logs"
    directory.mkdir()
    async with nodes:
        await nodes.stop(1)
        output = LogOutput(str(directory / "node.log"))
        node: Any = nodes.start(1, output)
        await nodes.ready()
        node.live.reopen_log()
        directory.rename(tmp_path / "away")
        node.live.reopen_log()
    output.close()


@pytest.mark.provokes("alarm.memory", "alarm.disk", "node.fault", "storage.blocked",
                      "storage.unblocked")  # fmt: skip
@pytest.mark.moves(
    "convoy_process_threads",
    "rabbitmq_alarms_file_descriptor_limit",
    "rabbitmq_alarms_free_disk_space_watermark",
    "rabbitmq_alarms_memory_used_watermark",
    "rabbitmq_disk_space_available_bytes",
    "rabbitmq_disk_space_available_limit_bytes",
    "rabbitmq_process_max_fds",
    "rabbitmq_process_open_fds",
    "rabbitmq_process_resident_memory_bytes",
    "rabbitmq_resident_memory_limit_bytes",
)
async def test_alarms_begin_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observed: Observed
) -> None:
    async with Nodes(tmp_path, alarms__interval="50") as nodes:
        node = nodes[1]
        await nodes.metrics()
        watch = node.resources
        limit, watch.watermarks.memory = watch.watermarks.memory, 1
        ballast = bytearray(b"x" * (16 << 20))
        (tmp_path / "ballast").write_bytes(ballast)
        with monkeypatch.context() as patch:
            patch.setattr(resources, "free_disk_bytes", lambda path: 0)
            await until(lambda: {"memory", "disk"} <= set(node.broker.alarms.of(1)))
            await nodes.metrics()
        watch.watermarks.memory = limit
        await until(lambda: not node.broker.alarms.of(1))
        node.storage.on_blocked(StorageFault("no space left"))
        node.storage.on_blocked(None)
        idle = threading.Event()
        threads = [threading.Thread(target=idle.wait) for _ in range(9)]
        for thread in threads:
            thread.start()
        marks = Watermarks(limit + 1, 0, limit + 1)
        try:
            with few_files():
                live = process_info(tmp_path, marks)
                node.broker.cluster.node = NodeView(info=lambda: live)
                await render(node.broker)
        finally:
            idle.set()
            for thread in threads:
                thread.join()

        def faulty() -> None:
            raise RuntimeError("a fault")

        asyncio.get_running_loop().call_soon(faulty)
        await until(lambda: "node.fault" in observed.events)


@contextmanager
def few_files() -> Iterator[None]:
    """No file can be opened: more than the limit are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.moves(
    "convoy_deliveries_local_total",
    "convoy_groups_led",
    "convoy_raft_bytes_appended_total",
    "convoy_raft_entries_appended_total",
    "rabbitmq_auth_attempts_failed_total",
    "rabbitmq_auth_attempts_succeeded_total",
    "rabbitmq_auth_attempts_total",
    "rabbitmq_build_info",
    "rabbitmq_channels",
    "rabbitmq_channels_closed_total",
    "rabbitmq_channels_opened_total",
    "rabbitmq_connections",
    "rabbitmq_connections_closed_total",
    "rabbitmq_connections_opened_total",
    "rabbitmq_consumers",
    "rabbitmq_exchange_messages_published_total",
    "rabbitmq_global_consumers",
    "rabbitmq_global_messages_acknowledged_total",
    "rabbitmq_global_messages_confirmed_total",
    "rabbitmq_global_messages_delivered_consume_auto_ack_total",
    "rabbitmq_global_messages_delivered_consume_manual_ack_total",
    "rabbitmq_global_messages_delivered_get_auto_ack_total",
    "rabbitmq_global_messages_delivered_get_manual_ack_total",
    "rabbitmq_global_messages_delivered_total",
    "rabbitmq_global_messages_get_empty_total",
    "rabbitmq_global_messages_received_confirm_total",
    "rabbitmq_global_messages_received_total",
    "rabbitmq_global_messages_redelivered_total",
    "rabbitmq_global_messages_routed_total",
    "rabbitmq_global_messages_unroutable_dropped_total",
    "rabbitmq_global_messages_unroutable_returned_total",
    "rabbitmq_global_publishers",
    "rabbitmq_identity_info",
    "rabbitmq_message_size_bytes",
    "rabbitmq_queue_consumers",
    "rabbitmq_queue_exchange_messages_published_total",
    "rabbitmq_queue_messages",
    "rabbitmq_queue_messages_bytes",
    "rabbitmq_queue_messages_ready",
    "rabbitmq_queue_messages_ready_bytes",
    "rabbitmq_queue_messages_unacked",
    "rabbitmq_queue_process_memory_bytes",
    "rabbitmq_queues",
    "rabbitmq_queues_created_total",
    "rabbitmq_queues_declared_total",
    "rabbitmq_queues_deleted_total",
)
async def test_what_clients_do_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Nodes(tmp_path) as nodes:
        parameters = pika.ConnectionParameters("127.0.0.1", nodes.amqp_port(), heartbeat=0)
        unknown = pika.PlainCredentials("guest", "wrong")

        def scrape() -> None:
            asyncio.run_coroutine_threadsafe(nodes.metrics(), loop).result()

        def work() -> None:
            wrong = pika.ConnectionParameters("127.0.0.1", nodes.amqp_port(), credentials=unknown)
            with pytest.raises(pika.exceptions.ProbableAuthenticationError):
                pika.BlockingConnection(wrong)
            connection = pika.BlockingConnection(parameters)
            channel = connection.channel()
            channel.queue_declare("q", durable=True, arguments={"x-queue-type": "quorum"})
            channel.basic_publish("", "nowhere", b"dropped")
            channel.confirm_delivery()
            with pytest.raises(pika.exceptions.UnroutableError):
                channel.basic_publish("", "nowhere", b"returned", mandatory=True)
            for _ in range(6):
                channel.basic_publish("", "q", b"body")
            scrape()
            assert channel.basic_get("q", auto_ack=True)[0]
            got, _, _ = channel.basic_get("q")
            channel.basic_nack(got.delivery_tag)
            seen: list[Any] = []

            def heard() -> None:
                deadline = time.monotonic() + PATIENCE_S
                while not seen:
                    assert time.monotonic() < deadline, "no delivery"
                    connection.process_data_events(0.01)

            channel.basic_qos(prefetch_count=2)
            tag = channel.basic_consume("q", lambda *message: seen.append(message[1]))
            heard()
            assert seen[0].redelivered
            channel.basic_ack(seen[0].delivery_tag)
            scrape()
            channel.basic_cancel(tag)
            channel.basic_publish("", "q", b"body")
            channel.basic_consume("q", lambda *message: seen.append(message[1]), auto_ack=True)
            del seen[:]
            heard()
            channel.queue_declare("empty")
            assert channel.basic_get("empty")[0] is None
            channel.queue_delete("empty")
            channel.close()
            connection.close()

        loop = asyncio.get_running_loop()
        await nodes.metrics()
        await asyncio.to_thread(work)
        monkeypatch.setattr("convoymq.edges.http.metrics.__version__", "9.9.9")
        await nodes[1].store.execute(PutSetting(name="cluster_name", value="another"))
        await nodes.metrics()


@pytest.mark.moves(
    "convoy_queue_deduplication_bytes",
    "convoy_queue_deduplication_ids",
    "convoy_queue_messages_blocked",
    "convoy_queue_messages_blocked_bytes",
    "convoy_queue_messages_delayed",
    "convoy_queue_messages_delayed_bytes",
)
async def test_what_queues_keep_beside_what_is_ready_is_measured(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        await nodes.metrics()

        def work() -> None:
            parameters = pika.ConnectionParameters("127.0.0.1", nodes.amqp_port(), heartbeat=0)
            connection = pika.BlockingConnection(parameters)
            channel = connection.channel()
            channel.confirm_delivery()
            window = {"x-queue-type": "quorum", "x-deduplication-count": 100}
            channel.queue_declare("q", durable=True, arguments=window)
            for number, headers in enumerate(
                ({"x-delay": 600_000}, {"x-group-id": "a"}, {"x-group-id": "a"})
            ):
                known = pika.BasicProperties(headers=headers, message_id=str(number))
                channel.basic_publish("", "q", b"body", known)
            connection.close()

        await asyncio.to_thread(work)
        text = await nodes.metrics()
        for name, value in (
            ("messages_delayed", 1),
            ("messages_delayed_bytes", 4),
            ("messages_blocked", 1),
            ("messages_blocked_bytes", 4),
            ("deduplication_ids", 3),
        ):
            assert f"convoy_queue_{name} {value}" in text, text


@pytest.mark.moves(
    "rabbitmq_raft_bytes_written",
    "rabbitmq_raft_commit_index",
    "rabbitmq_raft_commit_latency_seconds",
    "rabbitmq_raft_entries",
    "rabbitmq_raft_entry_commit_latency_seconds",
    "rabbitmq_raft_last_applied",
    "rabbitmq_raft_last_written_index",
    "rabbitmq_raft_log_commit_index",
    "rabbitmq_raft_log_last_applied_index",
    "rabbitmq_raft_log_last_written_index",
    "rabbitmq_raft_log_snapshot_index",
    "rabbitmq_raft_num_segments",
    "rabbitmq_raft_snapshot_index",
    "rabbitmq_raft_term",
    "rabbitmq_raft_term_total",
    "rabbitmq_raft_wal_files",
)
async def test_raft_groups_are_measured_under_the_names_of_rabbitmq(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        await nodes.metrics()
        loop = asyncio.get_running_loop()

        def work(count: int) -> None:
            parameters = pika.ConnectionParameters("127.0.0.1", nodes.amqp_port(), heartbeat=0)
            connection = pika.BlockingConnection(parameters)
            channel = connection.channel()
            channel.queue_declare("q", durable=True, arguments={"x-queue-type": "quorum"})
            channel.confirm_delivery()
            for _ in range(count):
                channel.basic_publish("", "q", b"body")
            connection.close()

        await asyncio.to_thread(work, 1)
        record = nodes[1].broker.metadata.tree.vhosts["/"].queues["q"]
        log = nodes[1].host.groups[record.group].log
        written = log.on_written
        # A slow disk.
        log.on_written = lambda *what: loop.call_later(SLOW_S, written, *what)
        await asyncio.to_thread(work, 5)
        text = await nodes.metrics()
        latency = re.search(r"^rabbitmq_raft_commit_latency_seconds (.+)$", text, re.MULTILINE)
        assert latency is not None
        # An entry that comes while another one is on its way is written with it, so takes less.
        assert float(latency[1]) >= SLOW_S / 2
        await nodes[1].broker.queue_logs.force_checkpoint(Selection())
        await nodes[1].broker.queue_logs.reclaim_memory(record)
        await nodes.metrics()


@pytest.mark.provokes("storage.damaged", "storage.repaired", "storage.torn_tail")
async def test_what_recovery_finds_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real damage is in `test_damage.py` and `tests/unit/storage`."""
    recover = Storage.recover

    def found(self: Storage) -> RecoveryReport:
        report = recover(self)
        report.damages.append(Damage(file="a.wal", offset=1, group=7, reason="wrong checksum"))
        report.notes.append("a.wal at byte 0: its header is damaged, its batches are not")
        report.torn_tail = ("a.wal", 100)
        return report

    monkeypatch.setattr(Storage, "recover", found)
    async with Nodes(tmp_path):
        pass


@pytest.mark.provokes("cluster.waiting", "clock.skewed", "clock.in_step")
@pytest.mark.moves("convoy_clock_skew_ms")
async def test_a_node_waits_for_another_whose_clock_is_off(
    tmp_path: Path, observed: Observed
) -> None:
    nodes = Nodes(tmp_path, 2)
    try:
        nodes.start(1)
        await until(lambda: "cluster.waiting" in observed.events)
        nodes.start(2)
        await nodes.ready()
        await nodes.metrics()
        clock = nodes[1].links.clock
        tick, off = clock.tick, 10_000
        clock.tick = lambda wall_ms, monotonic_ms: tick(wall_ms + off, monotonic_ms)
        await until(lambda: "clock.skewed" in observed.events)
        await nodes.metrics()
        off = 0
        await until(lambda: "clock.in_step" in observed.events)
    finally:
        await nodes.__aexit__()


@pytest.mark.provokes(
    "cluster.joining",
    "cluster.wiped_node",
    "recovery.done",
    "recovery.group",
    "recovery.started",
    "recovery.switched",
)
@pytest.mark.moves(
    "convoy_deliveries_proxied_total",
    "convoy_groups_followed",
    "convoy_link_received_bytes_total",
    "convoy_link_sent_bytes_total",
    "convoy_queues_leaderless",
    "convoy_raft_elections_total",
    "convoy_raft_leader_changes_total",
)
async def test_nodes_lose_their_data(tmp_path: Path) -> None:
    async with Nodes(tmp_path, 3) as nodes:
        for number in (1, 2, 3):
            await nodes.metrics(number)

        def work() -> None:
            connection = pika.BlockingConnection(
                pika.ConnectionParameters("127.0.0.1", nodes.amqp_port(2), heartbeat=0)
            )
            channel = connection.channel()
            there = {"x-queue-type": "quorum", "x-quorum-initial-group-size": 1}
            channel.queue_declare("alone", durable=True, arguments=there)
            channel.queue_declare("q", durable=True, arguments={"x-queue-type": "quorum"})
            channel.confirm_delivery()
            channel.basic_publish("", "alone", b"body")
            connection.close()
            connection = pika.BlockingConnection(
                pika.ConnectionParameters("127.0.0.1", nodes.amqp_port(1), heartbeat=0)
            )
            assert connection.channel().basic_get("alone", auto_ack=True)[0]
            connection.close()

        await asyncio.to_thread(work)
        for number in (1, 2, 3):
            await nodes.metrics(number)
        await nodes.stop(3)
        shutil.rmtree(nodes.data(3))
        nodes.start(3)
        await nodes.ready(3)
        for number in (2, 3):
            await nodes.stop(number)
        await until(lambda: all(r.established_leader == 0 for r in nodes[1].host.groups.values()))
        await nodes.metrics()
        plan = await nodes[1].recovery.plan({}, lambda text: None)
        await nodes[1].recovery.execute(plan, lambda text: None)
        await nodes.metrics()
