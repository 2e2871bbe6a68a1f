"""Exclusive queues of many connections leave nothing behind."""

from __future__ import annotations

from benchmarks.convoy import ConvoyCluster
from benchmarks.reply_queues import use_reply_queues

from tests.ports import cluster_ports

GROWTH_MIB_MAX = 100
"""Ten times what the second and third thousand queues were seen to add for good."""


def test_reply_queues_leave_nothing_behind() -> None:
    """The full size is a benchmark: `benchmarks/compare.py --case replies`."""
    with ConvoyCluster(base_port=cluster_ports(__name__), count=1) as cluster:
        cluster.start()
        left = use_reply_queues(cluster, connections=100, queues=10)
    assert left["growth"] < GROWTH_MIB_MAX
    assert (left["queues"], left["bindings"], left["rows"]) == (0, 0, 0)
    # The node's own log may have dropped a file.
    assert left["files"] <= 0
