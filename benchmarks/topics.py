"""Ordered topics beside plain streams, and what a change of partitions costs its publishers.

    python benchmarks/topics.py                     everything, three rounds
    python benchmarks/topics.py --case throughput   one question

Three nodes of ConvoyMQ on loopback. `throughput`: eight publishers to a topic of eight partitions,
and to eight streams, in turn; `cpu`: processor time of all nodes for each message of one publisher;
`changes`: a publisher that waits for each confirm, in the range that is split, merged and moved, and
one outside of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pika

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks.convoy import ConvoyCluster
from benchmarks.load import Load
from benchmarks.systems import connect
from convoymq.topics.hashing import logical_partition

TOPIC = "bench"
PARTITIONS = 8
LOGICAL = 1024
SETTLE_S = 1.0
CHANGE_TIMEOUT_S = 30.0
AUTH = ("guest", "guest")


@dataclass(slots=True)
class Publishing:
    """A publisher of one key that waits for each confirm; times in seconds."""

    uri: str
    key: str
    confirms: list[tuple[float, float]] = field(default_factory=list)
    """(publish, confirm)."""
    error: str = ""
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Publishes until it is stopped."""
        try:
            connection = connect(self.uri, timeout_s=30)
            channel = connection.channel()
            channel.confirm_delivery()
            properties = pika.BasicProperties(delivery_mode=2)
            while not self._stopped.is_set():
                begin = time.monotonic()
                channel.basic_publish(TOPIC, self.key, b"x" * 100, properties)
                self.confirms.append((begin, time.monotonic()))
            connection.close()
        except (pika.exceptions.AMQPError, OSError) as error:
            self.error = f"{type(error).__name__}: {error}"

    def stop(self) -> None:
        """Ends `run` after the publish that is under way."""
        self._stopped.set()

    def longest_ms(self, since: float, until: float) -> float:
        """Longest wait for a confirm of what was published, or under way, in a time."""
        waits = [end - begin for begin, end in self.confirms if end >= since and begin <= until]
        return max(waits, default=0.0) * 1000

    def typical_ms(self) -> float:
        """Median wait for a confirm."""
        return statistics.median(end - begin for begin, end in self.confirms) * 1000


def key_in(seed: int, lo: int, hi: int) -> str:
    """Returns a key whose logical partition lies in a range."""
    return next(
        key
        for key in (f"key-{number}" for number in range(1_000_000))
        if lo <= logical_partition(key.encode(), LOGICAL, seed) < hi
    )


class Topics:
    """The HTTP API of topics."""

    def __init__(self, api: str) -> None:
        self._url = f"{api}/api/topics/%2F/{TOPIC}"

    def create(self, partitions: int) -> None:
        """Creates the topic."""
        body = {"partitions": partitions, "logical": LOGICAL}
        httpx.put(self._url, json=body, auth=AUTH, timeout=60).raise_for_status()

    def delete(self) -> None:
        """Deletes the topic."""
        httpx.delete(self._url, auth=AUTH, timeout=60).raise_for_status()

    def seed(self) -> int:
        """Seed of the topic's hash."""
        found = httpx.get(self._url, auth=AUTH, timeout=30).raise_for_status().json()
        return int(found["hash_seed"])

    def route(self) -> list[dict[str, object]]:
        """Returns the partitions of the newest version."""
        found = httpx.get(f"{self._url}/route", auth=AUTH, timeout=30).raise_for_status().json()
        rows: list[dict[str, object]] = found["partitions"] if isinstance(found, dict) else found
        return rows

    def change(self, kind: str, body: object) -> float:
        """Carries a change out; returns its time in ms."""
        begin = time.monotonic()
        httpx.post(
            f"{self._url}/{kind}", json=body, auth=AUTH, timeout=CHANGE_TIMEOUT_S
        ).raise_for_status()
        return (time.monotonic() - begin) * 1000
