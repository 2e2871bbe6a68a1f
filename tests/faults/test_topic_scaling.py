"""A topic that scales by itself on a real cluster: it is split under load, and merged without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.cli.ctl.command import TOPICS
from convoymq.cli.ctl.main import main
from tests.clusters import call, serving_cluster
from tests.faults.test_topics import metadata_leader, restart
from tests.faults.topic_traffic import TopicTraffic, changed, create, open_pids, path
from tests.faults.traffic import until
from tests.ports import cluster_ports

BASE_PORT = cluster_ports()
UNIT_MS = 300
SCALED_S = 60.0
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
        until(lambda: len(open_pids(cluster, "elastic")) >= 2, "no split", SCALED_S)
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
        until(lambda: len(open_pids(cluster, "elastic")) == 3, "no second split", SCALED_S)
        traffic.goes_on()
        row = explained(cluster, "elastic")
        assert row["policy"]["partitions_max"] == 3
        assert row["partitions"]
        traffic.finish()
    until(lambda: len(open_pids(cluster, "elastic")) == 1, "it is not merged", SCALED_S)
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


def test_a_policy_makes_a_topic_scale_and_an_operator_changes_it_as_well(
    cluster: LocalCluster,
) -> None:
    create(cluster, "governed", 2, logical=64)
    body = {"pattern": "^governed$", "apply-to": "topics", "definition": {**SCALES}}
    body["definition"]["autoscale-partitions-min"] = 2  # type: ignore[index]
    assert call(cluster, "PUT", "policies/%2F/scale", body)[0] in (201, 204)
    until(lambda: explained(cluster, "governed")["at_ms"], "no look is taken")
    changed(cluster, "governed", "split", pid=0)
    until(lambda: len(open_pids(cluster, "governed")) == 2, "it is not merged", SCALED_S)
    assert made_by_itself(cluster, "governed", "merge")
    assert call(cluster, "DELETE", "policies/%2F/scale")[0] == 204
    until(lambda: explained(cluster, "governed")["at_ms"] is None, "it goes on")
