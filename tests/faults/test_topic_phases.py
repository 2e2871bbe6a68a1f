"""The node that a step of a change depends on is killed at that step: section 5 of the rules.

Whoever dies, the change ends as it was planned, and the referee of the traffic finds every
confirmed message delivered and every key in order.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from convoymq.cli.api import NoAnswer, call
from tests.clusters import wait_http
from tests.faults.dying_node import FILE, FIRST_PARTITIONS
from tests.faults.test_topics import metadata_leader, restart
from tests.faults.topic_traffic import TopicTraffic, create, finished, leader_of, path
from tests.faults.traffic import until
from tests.forked_nodes import ForkedCluster
from tests.ports import cluster_ports

BASE_PORT = cluster_ports(__name__)

POINTS = {
    "prepared controller": "split",
    "prepared source": "merge",
    "targets_ready controller": "split",
    "targets_ready target": "move",
    "sealing controller": "merge",
    "sealing source": "split",
    "sealing target": "split",
    "seal controller": "split",
    "closed source": "merge",
    "publish controller": "split",
    "sealed controller": "merge",
    "sealed source": "move",
    "published controller": "split",
    "published target": "merge",
    "open controller": "merge",
    "opened target": "split",
    "done controller": "move",
    "advance coordinator": "split",
    "advanced coordinator": "merge",
    "grant coordinator": "split",
}
"""By point at which a node dies, see `dying_node`, the change."""

BODIES: dict[str, dict[str, object]] = {"split": {"pid": 0}, "merge": {"pids": [0, 1]}}


class DyingCluster(ForkedCluster):
    """Its nodes can be told to die."""

    changes = ("tests.faults.dying_node",)

    def arm(self, topic: str, point: str) -> None:
        """Has the node die that comes to a point of a topic first."""
        fresh = self.data / (FILE + ".new")
        fresh.write_text(f"{topic} {point}")
        fresh.rename(self.data / FILE)

    def die_in(self, topic: str, change: str, body: dict[str, object]) -> int:
        """Begins a change, and returns the node that it ends.

        The request may be what ends the node that is asked: one that refuses connections is not
        asked again and again.
        """
        found: list[int] = []
        url = f"http://127.0.0.1:{self.nodes[0].http_port}/api/{path(topic, change)}"
        content = json.dumps(body).encode()

        def died() -> bool:
            found.extend(self.poll())
            if not found and not changes(self, topic):
                with contextlib.suppress(OSError, NoAnswer):
                    call("POST", url, 5.0, "guest:guest", content)
            return bool(found)

        until(died, f"nobody came to the point of {change}")
        (number,) = found
        return number


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DyingCluster]:
    directory = tmp_path_factory.mktemp("phases")
    made = DyingCluster(directory, 3, BASE_PORT, {})
    with made:
        made.wait_ready()
        wait_http(made)
        yield made


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.replace(" ", "-"))
def test_a_change_outlives_the_node_of_its_step(cluster: DyingCluster, point: str) -> None:
    topic, change = point.replace(" ", "-"), POINTS[point]
    create(cluster, topic, FIRST_PARTITIONS)
    leads = leader_of(cluster, topic, 0)
    dies = leads if point.endswith("source") else metadata_leader(cluster)
    # Members elsewhere: nothing has to wait for the end of the lease of one that is gone.
    first, second = [n for n in (1, 2, 3) if n != dies]
    consume_at = ((first, second), (second, first))
    with TopicTraffic(cluster, topic, consume_at=consume_at) as traffic:
        traffic.goes_on()
        body = BODIES.get(change) or {"pid": 0, "node": str(min({1, 2, 3} - {leads}))}
        cluster.arm(topic, point)
        killed = cluster.die_in(topic, change, body)
        until(lambda: changes(cluster, topic), "the change is not known")
        finished(cluster, topic, changes(cluster, topic)[0])
        traffic.goes_on()
        restart(cluster, killed)
        traffic.finish()


def changes(cluster: DyingCluster, topic: str) -> list[str]:
    """The change that runs or ran last, as far as a node that runs knows."""
    running = next(n for n in cluster.nodes if n.pid is not None)
    url = f"http://127.0.0.1:{running.http_port}/api/{path(topic, 'changes')}"
    with contextlib.suppress(OSError, NoAnswer):
        return [row["change_id"] for row in json.loads(call("GET", url, 5.0, "guest:guest"))]
    return []
