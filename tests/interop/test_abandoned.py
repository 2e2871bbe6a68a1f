"""A connection that a test abandons leaves no socket to later tests."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pika  # type: ignore[import-untyped]

from tests import abandoned
from tests.clusters import Cluster

FILES = Path("/proc/self/fd")


def sockets() -> set[str]:
    links = (os.path.realpath(path) for path in FILES.iterdir())
    return {Path(link).name for link in links if "socket:" in link}


def test_it_is_closed_without_a_warning(cluster: Cluster) -> None:
    before = sockets()
    with abandoned.closed_at_the_end():
        connection = pika.BlockingConnection(pika.URLParameters(cluster.uris[0]))
        connection.channel().queue_declare("", exclusive=True)
        assert len(sockets() - before) == 3
    assert sockets() == before
    del connection
    gc.collect()
