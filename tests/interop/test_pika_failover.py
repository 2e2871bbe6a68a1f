"""pika publishes and consumes while the leader of its queue is killed."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pika.exceptions  # type: ignore[import-untyped]
import pytest
from benchmarks.systems import connect

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.failover import LEADER, Ledger, declare_on_leader, leader_killed, uris_from
from tests.patience import PATIENCE_S

COUNT = 600
"""Messages, each of which is confirmed before the next one: other clients send more at a time."""
FAILURES = (pika.exceptions.AMQPError, OSError)


def keep_doing(uris: list[str], deadline: float, work: Callable[[Any], bool]) -> None:
    """Call `work(channel)` on one node after the other until it says that it is done."""
    for uri in itertools.cycle(uris):
        if time.monotonic() > deadline:
            return
        try:
            connection = connect(uri)
            try:
                if work(connection.channel()):
                    return
            finally:
                if connection.is_open:
                    connection.close()
        except FAILURES:
            time.sleep(0.05)


def publish(uris: list[str], queue: str, ledger: Ledger, deadline: float, third: Any) -> None:
    tried: set[int] = set()

    def work(channel: Any) -> bool:
        channel.confirm_delivery()
        while len(ledger.confirmed) < COUNT:
            number = len(ledger.confirmed)
            if number in tried:
                ledger.resent.add(number)
            tried.add(number)
            channel.basic_publish("", queue, str(number).encode(), mandatory=True)
            ledger.confirmed.append(number)
            if number == COUNT // 3:
                third.set()
        return True

    keep_doing(uris, deadline, work)


def consume(uris: list[str], queue: str, ledger: Ledger, deadline: float) -> None:
    seen: set[int] = set()

    def work(channel: Any) -> bool:
        channel.basic_qos(prefetch_count=100)
        for method, _, body in channel.consume(queue, inactivity_timeout=0.5):
            if time.monotonic() > deadline:
                return True
            if method is None:
                continue
            number = int(body)
            ledger.delivered.append((number, method.redelivered))
            channel.basic_ack(method.delivery_tag)
            seen.add(number)
            if len(seen) == COUNT:
                channel.cancel()
                return True
        return False

    keep_doing(uris, deadline, work)


@pytest.mark.parametrize("first", [0, LEADER], ids=["on a follower", "on the leader"])
@pytest.mark.parametrize("kill", [False, True], ids=["undisturbed", "leader killed"])
def test_nothing_is_lost_and_order_is_kept(
    cluster: Cluster, names: Names, first: int, kill: bool
) -> None:
    queue = names.queue()
    declare_on_leader(cluster, queue)
    ledger, third = Ledger(), threading.Event()
    deadline = time.monotonic() + PATIENCE_S
    uris = uris_from(cluster, first)
    with leader_killed(cluster, kill) as strike:
        threads = [
            threading.Thread(target=publish, args=(uris, queue, ledger, deadline, third)),
            threading.Thread(target=consume, args=(uris[::-1], queue, ledger, deadline)),
        ]
        for thread in threads:
            thread.start()
        assert third.wait(PATIENCE_S)
        strike()
        for thread in threads:
            thread.join()
    ledger.check(COUNT)
