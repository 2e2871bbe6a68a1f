"""The scenario of every failover test: numbers are published and consumed while a leader dies.

A client publishes 0, 1, 2, … one queue, with confirms, and consumes with acknowledgements. On any
failure it does what its user would: connects to the next node, publishes again what was not
confirmed, subscribes again. The ledger holds what the client saw; the promises are checked on it.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.systems import connect

from tests.clusters import Cluster
from tests.interop.helpers import assert_in_order_without_loss
from tests.patience import PATIENCE_S

LEADER = 1
"""The node where the queues of these tests are declared, so that it leads them at first."""
COUNT = 3000


@dataclass(slots=True)
class Ledger:
    """What one client did and saw."""

    confirmed: list[int] = field(default_factory=list)
    resent: set[int] = field(default_factory=set)
    delivered: list[tuple[int, bool]] = field(default_factory=list)

    def check(self, count: int = COUNT) -> None:
        """Everything was confirmed, nothing is lost, the order is kept. Raises AssertionError."""
        assert self.confirmed == list(range(count))
        assert_in_order_without_loss(
            self.confirmed,
            [(number, again or number in self.resent) for number, again in self.delivered],
        )


def declare_on_leader(cluster: Cluster, queue: str, kind: str = "quorum") -> None:
    """Declare the queue so that node `LEADER` leads it."""
    connection = connect(cluster.uris[LEADER])
    arguments = {"x-queue-type": kind}
    connection.channel().queue_declare(queue, durable=True, arguments=arguments)
    connection.close()


@contextmanager
def leader_killed(cluster: Cluster, kill: bool) -> Iterator[Callable[[], None]]:
    """Gives a function that kills the leader (once; never with `kill` false); restarts it after."""
    done = threading.Event()

    def strike() -> None:
        if kill and not done.is_set():
            done.set()
            cluster.kill(LEADER)

    try:
        yield strike
    finally:
        if done.is_set():
            cluster.restart(LEADER)


def uris_from(cluster: Cluster, first: int) -> list[str]:
    """The nodes in the order in which a client tries them."""
    return cluster.uris[first:] + cluster.uris[:first]


def run_client(
    command: list[str], environment: dict[str, str], at_a_third: Callable[[], None]
) -> Ledger:
    """Run a client program of another language.

    The program prints the line `third` when a third of its messages is confirmed, and at its end
    one JSON object: confirmed, resent (numbers), delivered (pairs of number and redelivered flag).
    """
    client = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    timer = threading.Timer(PATIENCE_S, client.kill)
    timer.start()
    try:
        assert client.stdout is not None
        line = client.stdout.readline()
        if line == "third\n":
            at_a_third()
        output, errors = client.communicate()
        assert client.returncode == 0, f"{line}{output[-500:]}{errors[-2000:]}"
        seen: dict[str, Any] = json.loads(output.splitlines()[-1])
    finally:
        timer.cancel()
        client.kill()
        client.wait()
    return Ledger(
        confirmed=seen["confirmed"] or [],
        resent=set(seen["resent"] or []),
        delivered=[(int(number), bool(again)) for number, again in seen["delivered"] or []],
    )
