"""Ports that tests choose. Every process of pytest-xdist has ranges of its own.

The files of a process run one after the other, so each has the same ranges for the clusters that
end with it. Clusters that outlive a file have ranges of their own.
"""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Iterator

WORKERS_MAX = 8
PORTS_PER_CLUSTER = 64
FIRST = 6000
"""Above the ports of examples, from 5672 on. Links listen 20,000 above the base port: all stay
below 32,768, where the system's own choice for outgoing connections begins."""
PER_FILE = 3
LASTING = 6

SINGLE_FIRST = 1100
SINGLE_PORTS = 400
"""Single ports lie below the base ports of clusters."""

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
if WORKER >= WORKERS_MAX:
    raise RuntimeError(
        f"tests have ports for {WORKERS_MAX} processes: run pytest with -n {WORKERS_MAX} at most"
    )

_of_files: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
_lasting = itertools.count(PER_FILE)
_singles = itertools.count()


def cluster_ports(file: str) -> int:
    """Returns a base port, as of `LocalCluster`, for a cluster that ends with its file of tests.

    The 64 ports from there on belong to the caller, and those 10,000 and 20,000 above them.

    Args:
        file: `__name__` of the file.
    """
    number = next(_of_files[file])
    assert number < PER_FILE, "more clusters of a file than it has ports for"
    return _range(number)


def lasting_ports() -> int:
    """Returns a base port that no other caller of any process gets."""
    number = next(_lasting)
    assert number < PER_FILE + LASTING, "more lasting clusters than tests have ports for"
    return _range(number)


def _range(number: int) -> int:
    return FIRST + (WORKER * (PER_FILE + LASTING) + number) * PORTS_PER_CLUSTER


def single_port() -> int:
    """Returns a port that no other caller of any process gets.

    A port that the system chooses is unlike that: as soon as it is closed, and in the other address
    family at any time, it may be given to another process.
    """
    number = next(_singles)
    assert number < SINGLE_PORTS, "more single ports than tests have"
    return SINGLE_FIRST + WORKER * SINGLE_PORTS + number
