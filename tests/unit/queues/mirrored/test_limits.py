"""Limits of mirrored queues that a policy changes while messages wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoymq.queues.driver import Answer
from tests.unit.queues.mirrored.support import MIRRORED, Cluster

GROUP = 1
TTLS_MS: tuple[int | None, ...] = (None, 1_000, 30_000, None)


def set_policy(cluster: Cluster, **settings: object) -> None:
    cluster.settings = {**cluster.settings, **settings}
    cluster.settings = {name: value for name, value in cluster.settings.items() if value}
    for node in cluster.nodes.values():
        queue = node.host.get(GROUP)
        if queue is not None:
            queue.configure(cluster.settings)
    cluster._tell()
    cluster.settle()


@pytest.mark.parametrize("mirrors", ["from the begin", "synchronised later"])
@pytest.mark.parametrize("failovers", [0, 1, 2])
def test_a_message_keeps_its_time_to_live_whichever_copy_is_the_master(
    cluster: Cluster, mirrors: str, failovers: int
) -> None:
    """A policy that changes counts for later messages. A mirror that took over once gave all that
    waited the time of the day."""
    if mirrors == "from the begin":
        cluster.declare()
    else:
        cluster.declare_plain(settings={})
    channel = cluster.channel(1)
    for ttl_ms in TTLS_MS:
        set_policy(cluster, **{"message-ttl": ttl_ms})
        channel.publish(b"%d" % (ttl_ms or 0))
        cluster.settle()
    if mirrors != "from the begin":
        set_policy(cluster, **MIRRORED, **{"ha-sync-mode": "automatic"})
        cluster.until(cluster.is_synchronised)
    set_policy(cluster, **{"message-ttl": 200})
    for _ in range(failovers):
        cluster.fail()
    cluster.pass_by(1_000)
    # The first message has no limit: expiry is looked at from the head on.
    assert cluster.master.machine.ready_count == len(TTLS_MS)
    reader = cluster.channel(cluster.queue.home)
    reader.client.get(no_ack=True)
    cluster.settle()
    assert cluster.master.machine.ready_count == 2
    cluster.pass_by(30_000)
    assert cluster.master.machine.ready_count == 1
    cluster.pass_by(30_000)
    assert cluster.master.machine.ready_count == 1


def test_a_policy_that_changes_while_a_node_is_paused_counts_when_its_queues_go_on(
    cluster: Cluster,
) -> None:
    """It was forgotten: a paused queue carries nothing out, and nobody told it again."""
    cluster.declare_plain(settings={})
    for body in (b"a", b"b", b"c"):
        cluster.channel(1).publish(body)
    cluster.settle()
    host = cluster.nodes[1].host
    parts, has_majority = host._parts, False
    host._parts = replace(parts, has_majority=lambda: has_majority)
    cluster.pass_by(5_000)
    assert host.is_paused
    set_policy(cluster, **{"max-length": 1, "expires": 60_000})
    assert cluster.master.machine.ready_count == 3
    has_majority = True
    cluster.pass_by(5_000)
    assert not host.is_paused
    assert cluster.master.machine.ready_count == 1
    assert cluster.master.machine.limits.expires_ms == 60_000


def test_a_policy_reaches_a_master_that_was_opened_while_its_node_is_paused(
    cluster: Cluster,
) -> None:
    """Its handle does not have it before the node has read the tree, and kept the policy."""
    cluster.declare()
    host = cluster.nodes[2].host
    parts = host._parts
    has_majority = False
    waiting: list[Answer] = []
    host._parts = replace(parts, has_majority=lambda: has_majority, read_tree=waiting.append)
    cluster.pass_by(5_000)
    has_majority = True
    cluster.until(lambda: bool(waiting))
    cluster.nodes[1].host.hand_over(GROUP, 2)
    cluster.until(lambda: host.master_of(GROUP) is not None)
    assert host.is_paused
    set_policy(cluster, **{"ha-mode": "exactly", "ha-params": 2})
    waiting[-1](True, None)
    cluster.until(lambda: cluster.queue.view is not None and len(cluster.queue.view.live) == 2)
