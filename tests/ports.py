"""Ports that tests choose. Every process of pytest-xdist has ranges of its own."""

from __future__ import annotations

import itertools
import os

FIRST = 6000
PORTS_PER_CLUSTER = 44
CLUSTERS = 38
WORKERS_MAX = 4
"""Links listen 20,000 above the base port: all stay below 32,768, where the system's own choice for
outgoing connections begins."""

SINGLE_FIRST = FIRST + WORKERS_MAX * CLUSTERS * PORTS_PER_CLUSTER
SINGLE_PORTS = 500
"""Single ports lie between the base ports of clusters and what stands 10,000 above them."""

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
if WORKER >= WORKERS_MAX:
    raise RuntimeError(
        f"tests have ports for {WORKERS_MAX} processes: run pytest with -n {WORKERS_MAX}"
    )

_numbers = itertools.count()
_singles = itertools.count()


def cluster_ports() -> int:
    """Returns a base port, as of `LocalCluster`, that no other caller of any process gets.

    The 44 ports from there on belong to the caller, and those 10,000 and 20,000 above them.
    """
    number = next(_numbers)
    assert number < CLUSTERS, "more clusters than tests have ports for"
    return FIRST + (WORKER * CLUSTERS + number) * PORTS_PER_CLUSTER


def single_port() -> int:
    """Returns a port that no other caller of any process gets.

    A port that the system chooses is unlike that: as soon as it is closed, and in the other address
    family at any time, it may be given to another process.
    """
    number = next(_singles)
    assert number < SINGLE_PORTS, "more single ports than tests have"
    return SINGLE_FIRST + WORKER * SINGLE_PORTS + number
