"""What a monitoring system reads from brokers, name servers and containers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from convoymq.edges.http.exposition import Text
from convoymq.rocketmq.acting.container import Container, ContainerSettings
from convoymq.rocketmq.acting.roles import State
from convoymq.rocketmq.broker.metrics import HELP, faults_of, write_broker
from convoymq.rocketmq.broker.service import Broker
from convoymq.rocketmq.namesrv.service import NameServer
from convoymq.rocketmq.namesrv.settings import NamesrvSettings
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.values import TopicConfig
from convoymq.rocketmq.store.types import Draft, PutStatus
from tests.rocketmq.broker_client import Running
from tests.rocketmq.groups import Groups, eventually
from tests.rocketmq.test_acting import draft, lock, queue, route_of
from tests.rocketmq.test_container import broker_text
from tests.rocketmq.test_special import half, pop, properties
from tests.running import until


async def shown(broker: Broker, *, per_object: bool = False) -> str:
    text = Text(HELP, open_metrics=False)
    await write_broker(text, broker, per_object=per_object)
    return text.render()


async def got(port: int, path: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(f"http://127.0.0.1:{port}{path}")


@pytest.mark.moves(
    "rocketmq_messages_in_total", "rocketmq_throughput_in_total", "rocketmq_messages_out_total",
    "rocketmq_throughput_out_total", "rocketmq_topic_number", "rocketmq_consumer_group_number",
    "rocketmq_producer_connections", "rocketmq_consumer_connections", "rocketmq_storage_size",
    "rocketmq_consumer_lag_messages", "rocketmq_storage_flush_behind_bytes",
    "rocketmq_storage_dispatch_behind_bytes", "rocketmq_half_messages", "rocketmq_timing_messages",
    "rocketmq_delayed_messages", "rocketmq_broker_permission",
    "convoy_broker_group_log_end_offset", "convoy_broker_group_queue_locks",
    "convoy_broker_group_pulls_waiting", "convoy_broker_group_connections",
    "convoy_broker_group_pops_open", "convoy_broker_group_refused_requests_total",
)  # fmt: skip
async def test_what_clients_do_is_counted(tmp_path: Path) -> None:
    made = await Running.begin(tmp_path, flushIntervalCommitLog=60_000)
    await shown(made.broker)
    client = made.client
    await client.heartbeat("c", producer="p", orders="*")
    for i in ("", properties(DELAY=5), properties(TIMER_DELAY_MS=600_000)):
        assert (await client.send("orders", b"x", i=i)).code == Answer.SUCCESS
    await half(client, "orders", b"x")
    assert (await client.pull("orders")).code == Answer.SUCCESS
    made.broker.offsets.commit("g", "orders", 0, 0)
    await lock(client, "c", queue())
    assert (await pop(client, "orders", consumerGroup="g2")).code == Answer.SUCCESS
    assert (await client.ask(999)).code == Answer.REQUEST_CODE_NOT_SUPPORTED
    await client.send("empty", e=1)
    waits = asyncio.create_task(client.pull("empty", wait_ms=60_000))
    await until(lambda: made.broker.puller.held == 1)
    change = b"brokerPermission=4"
    assert (await client.ask(Request.UPDATE_BROKER_CONFIG, change)).code == Answer.SUCCESS
    # In the log, and not yet dispatched.
    made.broker.store.put([Draft("orders", 0, b"x")], made.broker.now_ms())
    text = await shown(made.broker)
    made.broker.store.kick()
    assert 'node_type="broker",node_id="b",broker_id="0",code="3"} 1' in text
    of_topic = await shown(made.broker, per_object=True)
    assert 'topic="orders",consumer_group="g2"} 1' in of_topic
    assert 'topic="orders",consumer_group="g"} 2' in of_topic
    assert 'topic="orders",consumer_group="g"' not in text
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    await made.stop()


@pytest.mark.moves(
    "convoy_broker_group_log_begin_offset", "convoy_broker_group_write_failures_total",
    "convoy_broker_group_takes_writes", "convoy_broker_group_damaged_records_total",
)  # fmt: skip
async def test_what_goes_wrong_is_counted_and_ends_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: dict[str, object] = {
        "metricsExporterType": "PROM", "metricsPromExporterPort": 0,
        "deleteWhen": ";".join(map(str, range(24))), "flushConsumerOffsetInterval": 3_600_000,
    }  # fmt: skip
    made = await Running.begin(tmp_path, **chosen)
    broker, port = made.broker, made.broker.exposition.port
    assert "convoy_broker_group_takes_writes" in (await got(port, "/metrics")).text
    answer = await got(port, "/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "reasons": []})
    assert (await got(port, "/other")).status_code == 404
    body = bytes(1 << 20)
    for _ in range(6):
        assert (await made.client.send("large", body)).code == Answer.SUCCESS
    await until(lambda: broker.store.flushed == broker.store.max_offset)
    assert broker.store.clean(broker.now_ms() + 100 * 3_600_000)
    broker.config_path.rename(tmp_path / "aside")
    broker.config_path.write_text("in the way")
    broker.offsets.commit("g", "large", 0, 1)
    broker.persist()
    broker.config_path.unlink()
    (tmp_path / "aside").rename(broker.config_path)
    await got(port, "/metrics")
    await made.stop()
    files = sorted((tmp_path / "commitlog").iterdir())
    with files[-1].open("r+b") as file:
        file.seek(90)
        file.write(b"\xff" * 8)
    made = await Running.begin(tmp_path, **chosen)
    for offset in range(6):
        await made.client.pull("large", offset)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    made.broker.store.clean(made.broker.now_ms())
    port = made.broker.exposition.port
    assert (await made.client.send("large")).code == Answer.SERVICE_NOT_AVAILABLE
    assert 'code="14"} 1' in (await got(port, "/metrics/per-object")).text
    answer = await got(port, "/health")
    assert answer.status_code == 503
    assert "the disk is full" in answer.json()["reasons"]
    await made.stop()


class Usage:
    total, used, free = 100, 99, 1


@pytest.mark.moves(
    "convoy_broker_group_role", "convoy_broker_group_special_services_run",
    "convoy_broker_group_replicas_listed", "convoy_broker_group_replicas_in_sync",
    "convoy_broker_group_slave_lag_bytes", "convoy_broker_group_escaped_messages_total",
    "convoy_broker_group_escape_failures_total",
)  # fmt: skip
async def test_a_group_shows_its_replicas_and_what_leaves_it(groups: Groups) -> None:
    slave = await groups.broker("n", 1)
    assert faults_of(slave)
    await shown(slave)
    await until(lambda: slave.group.state is State.ACTING)
    await shown(slave)
    assert (await slave.escape.put(draft(1))).status is PutStatus.PUT_TO_REMOTE_BROKER_FAIL
    target = await groups.online("m", 0, totalReplicas=1)
    target.topics.create(TopicConfig("orders", 4, 4, 6))
    await eventually(lambda: route_of(groups, "orders"))

    async def escapes() -> bool:
        return (await slave.escape.put(draft(2))).status is PutStatus.PUT_OK

    await eventually(escapes)
    await shown(slave)
    master = await groups.online("n", 0)
    await until(lambda: len(master.group.members) == 1 and bool(master.replication.links()))
    await shown(master)
    master.topics.create(TopicConfig("t", 1, 1, 6))
    master.put_now([Draft("t", 0, b"x")])
    text = await shown(master)
    assert (
        'slave_lag_bytes{cluster="c",node_type="broker",node_id="n",broker_id="0",slave="1"}'
        in text
    )
    assert faults_of(master) == []
    await groups.stop_broker(slave)
    await until(lambda: not master.replication.links())
    await shown(master)


@pytest.mark.moves(
    "convoy_namesrv_groups", "convoy_namesrv_groups_without_master", "convoy_namesrv_replicas",
    "convoy_namesrv_topics", "convoy_namesrv_connections", "convoy_namesrv_refused_requests_total",
)  # fmt: skip
@pytest.mark.provokes("rocketmq.metrics_listening")
async def test_a_name_server_and_a_container_show_theirs(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"metrics": "PROM", "metrics_port": 0, "port": 0, "host": "127.0.0.1"}
    now_ms = 0
    names = NameServer(
        NamesrvSettings(kv_path=str(tmp_path / "kv"), wait_for_service=True, **chosen),
        lambda: now_ms,
    )
    address = f"127.0.0.1:{await names.start()}"
    container = Container(ContainerSettings(name_servers=address, **chosen))
    await container.start()
    before = (await got(names.exposition.port, "/metrics")).text
    assert "convoy_namesrv_groups 0" in before
    assert (await got(names.exposition.port, "/health")).status_code == 503
    now_ms = 45_000
    assert (await got(names.exposition.port, "/health")).status_code == 200
    slave = broker_text(tmp_path, "s", 1)
    await container.add([(*line.split("=", 1), "test") for line in slave.decode().splitlines()])  # type: ignore[misc]
    await until(lambda: bool(names.tables.topics()))
    (broker,) = container.brokers.values()
    await broker.registrar.servers.route("absent")
    after = (await got(names.exposition.port, "/metrics")).text
    assert "convoy_namesrv_groups_without_master 1" in after
    assert 'convoy_namesrv_refused_requests_total{code="17"}' in after
    assert 'node_id="s",broker_id="1"' in (await got(container.exposition.port, "/metrics")).text
    # Its next look at the group would show it online again.
    broker.group._reflect = lambda: None  # type: ignore[method-assign]
    broker.role.is_isolated = True
    assert (await got(container.exposition.port, "/health")).json()["reasons"] == [
        "c:s:1: it is not online yet"
    ]
    broker.role.is_isolated = False
    await container.stop()
    await names.stop()
