"""Families of metrics: sums, lines of objects, and what `/metrics/detailed` chooses."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from convoymq.broker.node_view import NodeView
from convoymq.edges.http.app import make_metrics
from convoymq.edges.http.metric_families import CLUSTER, FAMILIES, SOURCES, WITHOUT_MEANING
from convoymq.edges.http.metrics import render
from convoymq.routing.types import Destination, DestinationKind, ExchangeType
from tests.unit.queues.fake_cluster import FakeCluster, FakeConnection


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=1) as made:
        yield made


class Client(FakeConnection):
    """A connection with one channel, whose numbers all rise with each look."""

    def __init__(self, vhost: str = "/") -> None:
        self.name, self.vhost = f"client of {vhost}", vhost
        self.numbers = itertools.count(1)

    def info(self) -> dict[str, Any]:
        number = next(self.numbers)
        names = ("recv_oct", "send_oct", "send_pend", "channels")
        return {"name": self.name, **dict.fromkeys(names, number)}

    def channel_infos(self) -> list[dict[str, Any]]:
        number = next(self.numbers)
        gauges = ("consumer_count", "messages_unacknowledged", "messages_unconfirmed",
                  "prefetch_count", "global_prefetch_count")  # fmt: skip
        sent = ("confirmed", "returned_unroutable", "dropped_unroutable", "acknowledged")
        got = ("get", "get_no_ack", "get_empty", "delivered", "delivered_no_ack", "redelivered")
        return [
            {
                "name": f"{self.name} (1)", "vhost": self.vhost, **dict.fromkeys(gauges, number),
                "counters": dict.fromkeys(sent, number),
                "published_to": {"amq.topic": number},
                "delivered_from": {"q": dict.fromkeys(got, number)},
            }
        ]  # fmt: skip


async def detailed(cluster: FakeCluster, query: str) -> httpx.Response:
    transport = httpx.ASGITransport(make_metrics(cluster.nodes[1].broker))
    async with httpx.AsyncClient(transport=transport, base_url="http://m") as metrics:
        return await metrics.get(f"/metrics/detailed{query}")


def lines_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    named = ("rabbitmq_detailed_", "rabbitmq_cluster_", "convoy_detailed_")
    return [line for line in answer.text.splitlines() if line.startswith(named)]


@pytest.mark.moves(
    "convoy_connection_pending_bytes",
    "rabbitmq_channel_consumers",
    "rabbitmq_channel_get_ack_total",
    "rabbitmq_channel_get_empty_total",
    "rabbitmq_channel_get_total",
    "rabbitmq_channel_messages_acked_total",
    "rabbitmq_channel_messages_confirmed_total",
    "rabbitmq_channel_messages_delivered_ack_total",
    "rabbitmq_channel_messages_delivered_total",
    "rabbitmq_channel_messages_published_total",
    "rabbitmq_channel_messages_redelivered_total",
    "rabbitmq_channel_messages_unacked",
    "rabbitmq_channel_messages_unconfirmed",
    "rabbitmq_channel_messages_unroutable_dropped_total",
    "rabbitmq_channel_messages_unroutable_returned_total",
    "rabbitmq_channel_prefetch",
    "rabbitmq_connection_channels",
    "rabbitmq_connection_incoming_bytes_total",
    "rabbitmq_connection_outgoing_bytes_total",
    "rabbitmq_consumer_prefetch",
)
async def test_connections_and_channels_are_added_up_and_listed(cluster: FakeCluster) -> None:
    broker = cluster.nodes[1].broker
    broker.connections.add(Client())
    for _ in range(2):
        await render(broker)
    text = await render(broker, per_object=True)
    assert 'rabbitmq_connection_channels{connection="client of /"} ' in text
    assert 'rabbitmq_channel_consumers{channel="client of / (1)"} ' in text
    labels = 'channel="client of / (1)",vhost="/",exchange="amq.topic"'
    assert f"rabbitmq_channel_messages_published_total{{{labels}}} " in text


@pytest.mark.moves(
    "rabbitmq_erlang_gc_runs_total",
    "rabbitmq_erlang_processes_limit",
    "rabbitmq_erlang_processes_used",
    "rabbitmq_erlang_scheduler_context_switches_total",
    "rabbitmq_io_read_bytes_total",
    "rabbitmq_io_sync_ops_total",
    "rabbitmq_io_sync_time_seconds_total",
    "rabbitmq_io_write_bytes_total",
    "rabbitmq_io_write_ops_total",
    "rabbitmq_process_max_tcp_sockets",
    "rabbitmq_process_open_tcp_sockets",
)
async def test_figures_of_the_node_are_shown_where_it_knows_them(cluster: FakeCluster) -> None:
    broker = cluster.nodes[1].broker
    names = ("gc_num", "proc_total", "proc_used", "context_switches", "io_read_bytes", "fd_total",
             "io_sync_count", "io_sync_time", "io_write_bytes", "io_write_count")  # fmt: skip
    for number in (1_000_000, 3_000_000):
        info = dict.fromkeys(names, number)
        broker.cluster.node = NodeView(info=lambda info=info: dict(info))  # type: ignore[misc]
        text = await render(broker)
        broker.connections.add(Client())
    assert "rabbitmq_io_sync_time_seconds_total 3\n" in text
    broker.cluster.node = NodeView()
    assert "rabbitmq_io_" not in await render(broker)


@pytest.mark.moves(
    "rabbitmq_queue_consumer_capacity",
    "rabbitmq_queue_consumer_utilisation",
    "rabbitmq_queue_info",
    "rabbitmq_queue_messages_acked_total",
    "rabbitmq_queue_messages_delivered_total",
    "rabbitmq_queue_messages_paged_out",
    "rabbitmq_queue_messages_paged_out_bytes",
    "rabbitmq_queue_messages_published_total",
    "rabbitmq_queue_messages_ram",
    "rabbitmq_queue_messages_ram_bytes",
    "rabbitmq_queue_messages_ready_ram",
    "rabbitmq_queue_messages_redelivered_total",
    "rabbitmq_queue_messages_unacked_bytes",
    "rabbitmq_queue_messages_unacked_ram",
    "rabbitmq_stream_segments",
)
async def test_every_figure_of_a_queue_has_its_metric(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = cluster.nodes[1].broker
    await render(broker, per_object=True)
    for kind in ("quorum", "classic", "stream"):
        await cluster.queue(1, kind, arguments={"x-queue-type": kind})
    text = await render(broker, per_object=True)
    for kind in ("quorum", "classic", "stream"):
        labels = f'queue="{kind}",queue_type="rabbit_{kind}_queue",membership="leader"'
        assert f'rabbitmq_queue_info{{vhost="/",{labels}}} 1' in text
    # What only some types have is no line of the others.
    assert 'rabbitmq_queue_messages_ram{vhost="/",queue="classic"} 0' in text
    assert 'rabbitmq_queue_messages_ram{vhost="/",queue="quorum"}' not in text
    rows = list(broker.cluster.local_rows())
    assert {name for row in rows for name in row} >= {
        "messages_ram", "message_bytes_ram", "messages_ready_ram", "messages_unacknowledged_ram",
        "messages_paged_out", "message_bytes_paged_out", "consumer_capacity",
        "consumer_utilisation", "segments", "message_bytes_unacknowledged",
    }  # fmt: skip
    await render(broker)
    counted = {"published": 2, "delivered": 3, "acked": 4, "redelivered": 5}
    for row in rows:
        row |= {name: 7 for name, value in row.items() if name != "group" and value in (0, 0.0)}
        row["totals"] = counted
    monkeypatch.setattr(
        broker.cluster.sampler,
        "_queue_rows",
        lambda groups: iter([row for row in rows if row["group"] in groups]),
    )
    broker.local.changed.update(row["group"] for row in rows)
    text = await render(broker)
    assert "rabbitmq_queue_messages_delivered_total 9\n" in text
    assert "rabbitmq_queue_messages_ram 7\n" in text


async def test_detailed_metrics_have_the_families_that_are_asked_for(cluster: FakeCluster) -> None:
    broker = cluster.nodes[1].broker
    await cluster.queue(1, "a")
    await cluster.queue(1, "b")
    bare = await detailed(cluster, "")
    assert lines_of(bare) == []
    assert 'rabbitmq_endpoint="detailed"' in bare.text
    found = lines_of(await detailed(cluster, "?family=queue_coarse_metrics&queue=^a$"))
    queue = '{vhost="/",queue="a"}'
    info = 'queue_type="rabbit_quorum_queue",membership="leader"'
    assert found == [
        f"rabbitmq_detailed_queue_messages{queue} 0",
        f"rabbitmq_detailed_queue_messages_ready{queue} 0",
        f"rabbitmq_detailed_queue_messages_unacked{queue} 0",
        f'rabbitmq_detailed_queue_info{{vhost="/",queue="a",{info}}} 1',
    ]
    both = lines_of(
        await detailed(cluster, "?family=queue_consumer_count&family=queue_metrics&vhost=/")
    )
    assert len([line for line in both if line.startswith("rabbitmq_detailed_queue_con")]) == 2
    assert any(line.startswith("convoy_detailed_queue_messages_delayed") for line in both)
    assert lines_of(await detailed(cluster, "?family=queue_metrics&vhost=nowhere")) == []
    broker.connections.add(Client("other"))
    channels = "?family=channel_metrics&family=connection_metrics&vhost="
    assert lines_of(await detailed(cluster, channels + "/")) == []
    assert len(lines_of(await detailed(cluster, channels + "other"))) == 7


async def test_detailed_metrics_of_the_cluster_are_the_same_from_each_node(
    cluster: FakeCluster,
) -> None:
    place = cluster.nodes[1].machine.vhosts["/"].topology
    place.declare_exchange("mine", ExchangeType.FANOUT)
    await cluster.queue(1, "q")
    place.bind("mine", Destination(DestinationKind.QUEUE, "q"), "k")
    every = "".join(f"&family={name}" for name in CLUSTER)
    found = lines_of(await detailed(cluster, f"?{every[1:]}"))
    mine = '{vhost="/",exchange="mine",type="fanout"}'
    assert f"rabbitmq_cluster_exchange_bindings{mine} 1" in found
    assert f"rabbitmq_cluster_exchange_name{mine} 1" in found
    assert 'rabbitmq_cluster_vhost_status{vhost="/"} 1' in found
    assert not any('exchange=""' in line for line in found)


async def test_every_family_can_be_asked_for(cluster: FakeCluster) -> None:
    await cluster.queue(1, "q")
    for name in (*FAMILIES, *CLUSTER, *WITHOUT_MEANING):
        answer = await detailed(cluster, f"?family={name}")
        assert (answer.status_code, name) == (200, name)
        if name in WITHOUT_MEANING:
            assert lines_of(answer) == []
    subjects = {subject for family in (*FAMILIES.values(), *CLUSTER.values()) for subject in family}
    assert subjects == SOURCES.keys()


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("?family=queue_coarse_metric", "there is no queue_coarse_metric; did you mean queue_coa"),
        ("?family=", "family: there is no "),
        ("?family=queue_metrics&queue=(", "queue: "),
        ("?family=queue_metrics&queue=a&queue=b", "queue: one expression"),
        ("?family=queue_metrics&queue=" + "a" * 2001, "of at most 2000 characters"),
        ("?family=%00%ff", "family: there is no "),
    ],
)
async def test_a_wrong_request_for_details_is_one_line(
    cluster: FakeCluster, query: str, text: str
) -> None:
    answer = await detailed(cluster, query)
    assert answer.status_code == 400
    assert text in answer.text
    assert answer.text.count("\n") == 1
