"""A node that has no file descriptor left: it goes on, its alarms see, and nothing spins."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from contextlib import ExitStack

import pika

from convoymq.cli.cluster import LocalCluster, resident_bytes
from tests.faults.conftest import StartCluster
from tests.faults.traffic import declare, log_has, until
from tests.raw_amqp import BODY, RawPeer, content_header, frame, method_bytes

SPARE = 8
"""Descriptors that the node may still open when the limit falls."""
MIB = 1 << 20
LIMIT = 160 * MIB
CHUNK = 131_072 - 8


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_without_descriptors_alarms_see_and_nothing_spins(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2, {"vm_memory_high_watermark.absolute": str(LIMIT)}, forked=False)
    declare(cluster, 1, "orders")
    until(lambda: cluster.api("convoy/node", 1), "the node does not come up")
    node = cluster.nodes[0]
    pid = node.pid
    assert pid is not None
    assert resident_bytes(pid) < LIMIT - 40 * MIB
    with ExitStack() as held:
        publisher = held.enter_context(RawPeer(node.uri, timeout_s=2)).handshake()
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + SPARE, before[1]))
        for port in (node.link_port, node.amqp_port, node.http_port, node.metrics_port):
            for _ in range(2 * SPARE):
                held.enter_context(socket.create_connection(("127.0.0.1", port)))
        until(lambda: log_has(cluster, 1, "amqp.accept_failed"), "descriptors do not run out")
        until(lambda: log_has(cluster, 1, "link.accept_failed"), "links still find descriptors")
        start, cpu = time.monotonic(), cpu_seconds(pid)
        until(lambda: time.monotonic() > start + 2.0, "time does not pass")
        share = (cpu_seconds(pid) - cpu) / (time.monotonic() - start)
        assert share < 0.5, f"without descriptors a node takes {share:.0%} of a core"
        # Messages that never become whole stay in memory, until the watch sees it.
        channels = range(1, 11)
        for channel in channels:
            # Before the first body: from then on the node may say at any time that it blocks.
            publisher.open_channel(channel)
        with contextlib.suppress(TimeoutError):
            for channel in channels:
                method = pika.spec.Basic.Publish(exchange="", routing_key="orders")
                head = method_bytes(channel, method) + content_header(channel, 16 * MIB)
                publisher.send_bytes(head)
                for _ in range(15 * MIB // CHUNK):
                    publisher.send_bytes(frame(BODY, channel, bytes(CHUNK)))
        until(lambda: log_has(cluster, 1, "alarm.memory"), "nobody sees that memory is short")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    # The blocked publisher is gone, and with it what it left in memory.
    until(lambda: cluster.api("convoy/node", 1)["alarms"] == [], "the alarm does not end")
    declare(cluster, 1, "later")


def test_a_cluster_forms_again_when_descriptors_are_back(start_cluster: StartCluster) -> None:
    """The links' listener pauses while there are none, and then goes on."""
    cluster: LocalCluster = start_cluster(2, forked=False)
    node = cluster.nodes[0]
    until(lambda: cluster.api("convoy/node", 1), "the node does not come up")
    assert node.pid is not None
    before = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
    used = len(os.listdir(f"/proc/{node.pid}/fd"))
    with ExitStack() as held:
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (used + 1, before[1]))
        for _ in range(2 * SPARE):
            held.enter_context(socket.create_connection(("127.0.0.1", node.link_port)))
        until(lambda: log_has(cluster, 1, "link.accept_failed"), "links still find descriptors")
        cluster.kill(2)
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, before)
    cluster.start_node(2)
    cluster.wait_ready()
