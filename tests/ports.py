"""Ports that tests choose. Every process of pytest-xdist has ranges of its own."""

from __future__ import annotations

import itertools
import os

WORKERS_MAX = 4
PORTS_PER_CLUSTER = 44
REGIONS = ((6000, 38), (2800, 15))
"""First base port, and clusters of each process. Between them are the ports of examples, from 5672
on. Links listen 20,000 above the base port: all stay below 32,768, where the system's own choice
for outgoing connections begins; those of the second region stay below 25,672."""

SINGLE_FIRST = 1100
SINGLE_PORTS = 400
"""Single ports lie below the base ports of clusters."""

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
    for first, clusters in REGIONS:
        if number < clusters:
            return first + (WORKER * clusters + number) * PORTS_PER_CLUSTER
        number -= clusters
    raise AssertionError("more clusters than tests have ports for")


def single_port() -> int:
    """Returns a port that no other caller of any process gets.

    A port that the system chooses is unlike that: as soon as it is closed, and in the other address
    family at any time, it may be given to another process.
    """
    number = next(_singles)
    assert number < SINGLE_PORTS, "more single ports than tests have"
    return SINGLE_FIRST + WORKER * SINGLE_PORTS + number
