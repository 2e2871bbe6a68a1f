"""A topic that scales by itself on a real cluster: it is split under load, and merged without."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.cli.ctl.command import TOPICS
from convoymq.cli.ctl.main import main
from tests.clusters import call, serving_cluster
from tests.faults.test_topics import metadata_leader, restart
from tests.faults.topic_traffic import (
    TopicTraffic,
    changed,
    create,
    leader_of,
    open_pids,
    path,
)
from tests.faults.traffic import until
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports
from tests.provocation import Observed

BASE_PORT = cluster_ports(__name__)
UNIT_MS = 300
SCALES = {
    "autoscale": "on",
    "autoscale-unit": UNIT_MS,
    "autoscale-target-messages": 5,
    "autoscale-changes-per-hour": 1000,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with serving_cluster(tmp_path_factory.mktemp("scaling"), BASE_PORT) as made:
        create(made, "first", 1)
        yield made


def explained(cluster: LocalCluster, topic: str) -> dict[str, Any]:
    found: list[Any] = []

    def answers() -> bool:
        status, row = call(cluster, "GET", path(topic, "autoscale"))
        found[:] = [row]
        return status == 200

    until(answers, f"nobody explains: {found}")
    row: dict[str, Any] = found[0]
    return row


def made_by_itself(cluster: LocalCluster, topic: str, kind: str) -> bool:
    """Whether the latest change was one that the autoscaler began."""
    status, rows = call(cluster, "GET", path(topic, "changes"))
    return status == 200 and rows and rows[0]["change_id"].startswith(f"auto-{kind}-")


def test_load_splits_a_topic_and_its_end_merges_it(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node that decides is killed between the first split and the second one."""
    create(cluster, "elastic", 1, **SCALES, **{"autoscale-partitions-max": 3})
    with TopicTraffic(cluster, "elastic") as traffic:
        traffic.goes_on()
        until(lambda: len(open_pids(cluster, "elastic")) >= 2, "no split")
        assert made_by_itself(cluster, "elastic", "split") or made_by_itself(
            cluster, "elastic", "move"
        )
        killed = metadata_leader(cluster)
        cluster.kill(killed)
        traffic.goes_on()
        # Replicas are missing: nothing is changed.
        until(
            lambda: (
                "under-replicated" in explained(cluster, "elastic")["held"]
                or len(open_pids(cluster, "elastic")) == 3
            ),
            "nothing holds changes back",
        )
        restart(cluster, killed)
        until(lambda: len(open_pids(cluster, "elastic")) == 3, "no second split")
        traffic.goes_on()
        row = explained(cluster, "elastic")
        assert row["policy"]["partitions_max"] == 3
        assert row["partitions"]
        traffic.finish()
    until(lambda: len(open_pids(cluster, "elastic")) == 1, "it is not merged")
    assert made_by_itself(cluster, "elastic", "merge")
    url = f"http://127.0.0.1:{cluster.nodes[0].http_port}"
    assert main(TOPICS, ("autoscale", "elastic", "explain", "--format", "json", "--url", url)) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["policy"]["autoscale"] == "on"
    assert shown["history"]
    assert main(TOPICS, ("autoscale", "elastic", "explain", "--url", url)) == 0
    assert "decision: " in capsys.readouterr().out
    off = ("autoscale", "elastic", "set", "--autoscale", "off", "--url", url)
    assert main(TOPICS, off) == 0
    assert explained(cluster, "elastic")["policy"]["autoscale"] == "off"
    assert call(cluster, "DELETE", path("elastic"))[0] == 204


def scrape(cluster: LocalCluster, observed: Observed) -> str:
    """What all nodes say about topics, which counts as seen."""
    texts = []
    for node in cluster.nodes:
        for form in ("metrics", "metrics/per-object"):
            url = f"http://127.0.0.1:{node.metrics_port}/{form}"
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                text = answer.read().decode()
            observed.exposition(text)
            texts += [line for line in text.splitlines() if line.startswith("convoy_topic")]
    return "\n".join(texts)


def total(text: str, name: str) -> float:
    """Sum of the samples of a metric."""
    lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
    return sum(float(line.rpartition(" ")[2]) for line in lines) / 2


@pytest.mark.moves(
    "convoy_topic_autoscaler_decisions_total",
    "convoy_topic_change_seconds_total",
    "convoy_topic_changes_total",
    "convoy_topic_consumer_stall_seconds_total",
    "convoy_topic_consumer_stalls_total",
    "convoy_topic_group_stall_seconds_total",
    "convoy_topic_group_stalls_total",
    "convoy_topic_group_versions_behind",
    "convoy_topic_group_versions_behind_max",
    "convoy_topic_group_wait_seconds",
    "convoy_topic_group_wait_seconds_max",
    "convoy_topic_hot_logical_partitions",
    "convoy_topic_parked_keys",
    "convoy_topic_producer_pause_seconds_total",
    "convoy_topic_producer_pauses_total",
    "convoy_topic_publishes_retried_total",
)
def test_what_changes_cost_is_measured_and_a_hot_key_is_named(
    cluster: LocalCluster, observed: Observed
) -> None:
    create(cluster, "measured", 1)
    create(cluster, "hot", 1, logical=1, **SCALES)
    begun = scrape(cluster, observed)
    late = {"position": "earliest"}
    assert call(cluster, "PUT", path("measured", "groups", "late"), late)[0] in (201, 204)
    with TopicTraffic(cluster, "measured") as traffic:
        traffic.goes_on()
        changed(cluster, "measured", "split", pid=0)
        traffic.goes_on()
        until(
            lambda: total(scrape(cluster, observed), "convoy_topic_consumer_stalls_total") > 0,
            "no group has passed the change",
        )
        paused = total(begun, "convoy_topic_producer_pauses_total")
        # A change that comes between two publishes makes nobody wait.
        while total(scrape(cluster, observed), "convoy_topic_producer_pauses_total") <= paused:
            pid = open_pids(cluster, "measured")[0]
            other = next(n for n in (1, 2, 3) if n != leader_of(cluster, "measured", pid))
            changed(cluster, "measured", "move", pid=pid, node=str(other))
            traffic.goes_on()
        traffic.finish()
    park_one(cluster, "measured/late")
    with TopicTraffic(cluster, "hot") as traffic:
        until(lambda: explained(cluster, "hot")["hot"], "no key is hot")
        until(
            lambda: total(scrape(cluster, observed), "convoy_topic_hot_logical_partitions") == 1,
            "no metric says it",
        )
        until(lambda: explained(cluster, "hot")["hot"][0]["keys"], "no keys are known")
        (row,) = explained(cluster, "hot")["hot"]
        traffic.finish()
    assert row["lp"] == 0
    assert row["keys"][0].startswith("key-")
    until(lambda: total(scrape(cluster, observed), "convoy_topic_parked_keys") == 1, "none parked")
    ended = scrape(cluster, observed)
    assert total(ended, "convoy_topic_changes_total") > total(begun, "convoy_topic_changes_total")
    pauses, paused_s = (
        total(ended, f"convoy_topic_producer_{name}_total") for name in ("pauses", "pause_seconds")
    )
    assert pauses >= 1
    print(f"{pauses:g} pauses, {paused_s:g} s")
    assert 0 < paused_s / pauses < 10


def park_one(cluster: LocalCluster, queue: str) -> None:
    """Rejects the first message that a group hands out."""
    parameters = pika.ConnectionParameters("127.0.0.1", cluster.nodes[0].amqp_port)
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1)
        for method, _, _ in channel.consume(queue, inactivity_timeout=PATIENCE_S):
            assert method is not None, "nothing is handed out"
            channel.basic_reject(method.delivery_tag, requeue=False)
            break
        channel.cancel()


def test_a_policy_makes_a_topic_scale_and_an_operator_changes_it_as_well(
    cluster: LocalCluster,
) -> None:
    create(cluster, "governed", 2, logical=64)
    body = {"pattern": "^governed$", "apply-to": "topics", "definition": {**SCALES}}
    body["definition"]["autoscale-partitions-min"] = 2  # type: ignore[index]
    assert call(cluster, "PUT", "policies/%2F/scale", body)[0] in (201, 204)
    until(lambda: explained(cluster, "governed")["at_ms"], "no look is taken")
    changed(cluster, "governed", "split", pid=0)
    until(lambda: len(open_pids(cluster, "governed")) == 2, "it is not merged")
    assert made_by_itself(cluster, "governed", "merge")
    assert call(cluster, "DELETE", "policies/%2F/scale")[0] == 204
    until(lambda: explained(cluster, "governed")["at_ms"] is None, "it goes on")
