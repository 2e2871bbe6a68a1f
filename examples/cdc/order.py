"""Consumers that check the order of each row's changes, by their place in the source.

`GroupChecker` is a member of a group of a topic. `ModuloRun` sends the same changes through an
exchange that hashes modulo the number of its queues, and adds queues half-way.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pika
import pika.exceptions

PREFETCH = 50
RECONNECT_S = 0.2
WORK_S = 0.002
"""What a consumer of the comparison does for each message."""


@dataclass(slots=True)
class Order:
    """What consumers saw, of first deliveries: changes, and those that came after a later one."""

    seen: int = 0
    violations: int = 0
    changes: list[tuple[str, str]] = field(default_factory=list)
    """(key, place) as they came."""
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """(time, seconds since the message before)."""
    _last: dict[str, str] = field(default_factory=dict)
    _places: set[tuple[str, str]] = field(default_factory=set)
    _last_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, key: str, place: str) -> None:
        """A change was processed."""
        now = time.time()
        with self._lock:
            if (key, place) in self._places:
                # It comes again: the acknowledgement was lost with a node.
                return
            self._places.add((key, place))
            self.changes.append((key, place))
            self.seen += 1
            if place < self._last.get(key, ""):
                self.violations += 1
            else:
                self._last[key] = place
            if self._last_s:
                self.stalls.append((now, now - self._last_s))
            self._last_s = now

    def busy_key(self, rank: int) -> str:
        """Returns the key with so many others that have more changes."""
        with self._lock:
            return Counter(key for key, _ in self.changes).most_common(rank + 1)[-1][0]


class GroupChecker(threading.Thread):
    """A member of a group, that comes back on the next node when its own is lost.

    Args:
        poison: the key whose next change it rejects, once: the group parks it.
    """

    def __init__(self, ports: Sequence[int], queue: str, order: Order) -> None:
        super().__init__(name="checker", daemon=True)
        self.order = order
        self.poison = ""
        self.rejected = ""
        self.failure = ""
        self._ports = ports
        self._queue = queue
        self._stopped = threading.Event()

    def run(self) -> None:
        """Consumes until it is stopped."""
        attempt = 0
        while not self._stopped.is_set():
            port = self._ports[attempt % len(self._ports)]
            attempt += 1
            with contextlib.suppress(pika.exceptions.AMQPError, OSError):
                self._consume(port)
            self._stopped.wait(RECONNECT_S)

    def _consume(self, port: int) -> None:
        with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port)) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=PREFETCH)
            for method, properties, body in channel.consume(self._queue, inactivity_timeout=0.2):
                if self._stopped.is_set():
                    return
                if method is None:
                    continue
                key = key_of(properties, method)
                if key == self.poison:
                    self.poison, self.rejected = "", key
                    channel.basic_reject(method.delivery_tag, requeue=False)
                    continue
                self.order.note(key, json.loads(body)["place"])
                channel.basic_ack(method.delivery_tag)

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self.join()


def key_of(properties: Any, method: Any) -> str:
    """Returns the order key of a delivery."""
    return str((properties.headers or {}).get("x-order-key") or method.routing_key)


class ModuloRun:
    """The same changes through `x-modulus-hash`, whose queues become more half-way."""

    EXCHANGE = "changes-modulo"

    def __init__(self, port: int, queues: tuple[int, int]) -> None:
        self.order = Order()
        self._port = port
        self._queues = queues
        self._wanted = 0
        self._threads: list[threading.Thread] = []

    def run(self, events: Sequence[tuple[str, str]]) -> None:
        """Publishes (key, place), consumes everything, and returns.

        Faster than the consumers work: the new queues are empty when the old ones are not yet.
        """
        self._wanted = len(events)
        with pika.BlockingConnection(
            pika.ConnectionParameters("127.0.0.1", self._port)
        ) as connection:
            channel = connection.channel()
            channel.exchange_declare(self.EXCHANGE, "x-modulus-hash", durable=True)
            first, second = self._queues
            self._add(channel, range(first))
            for number, (key, place) in enumerate(events):
                if number == len(events) // 2:
                    self._add(channel, range(first, second))
                body = json.dumps({"place": place}).encode()
                channel.basic_publish(
                    self.EXCHANGE, key, body, pika.BasicProperties(delivery_mode=2)
                )
        for thread in self._threads:
            thread.join()

    def _add(self, channel: Any, numbers: range) -> None:
        for number in numbers:
            queue = f"{self.EXCHANGE}.{number}"
            channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
            channel.queue_bind(queue, self.EXCHANGE)
            thread = threading.Thread(target=self._consume, args=(queue,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _consume(self, queue: str) -> None:
        with pika.BlockingConnection(
            pika.ConnectionParameters("127.0.0.1", self._port)
        ) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=PREFETCH)
            for method, _, body in channel.consume(queue, inactivity_timeout=0.1):
                if method is not None:
                    time.sleep(WORK_S)
                    self.order.note(method.routing_key, json.loads(body)["place"])
                    channel.basic_ack(method.delivery_tag)
                elif self.order.seen >= self._wanted:
                    return
