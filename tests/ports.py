"""Ports of the clusters that tests start. Every process of pytest-xdist has a range of its own."""

from __future__ import annotations

import itertools
import os

FIRST = 6000
PORTS_PER_CLUSTER = 50
CLUSTERS = 30
WORKERS_MAX = 4
"""Links listen 20,000 above the base port: all stay below 32,768, where the system's own choice for
outgoing connections begins."""

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
if WORKER >= WORKERS_MAX:
    raise RuntimeError(
        f"tests have ports for {WORKERS_MAX} processes: run pytest with -n {WORKERS_MAX}"
    )

_numbers = itertools.count()


def cluster_ports() -> int:
    """Returns a base port, as of `LocalCluster`, that no other caller of any process gets.

    The 50 ports from there on belong to the caller, and those 10,000 and 20,000 above them.
    """
    number = next(_numbers)
    assert number < CLUSTERS, "more clusters than tests have ports for"
    return FIRST + (WORKER * CLUSTERS + number) * PORTS_PER_CLUSTER
