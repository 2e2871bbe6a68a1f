"""Messages that arrive out of the order of their keys when partitions are added half-way.

The same messages go through an exchange that hashes modulo the number of its queues, and through a
topic that is split. Consumers work for a moment on each message, so that what was published before
the change is not processed when what comes after it arrives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pika

from benchmarks.systems import NotUsable, connect

MESSAGES = 4_000
KEYS = 200
QUEUES = (2, 3)
"""Before and after the change."""
WORK_S = 0.001
PREFETCH = 50
TIMEOUT_S = 120.0
EXCHANGE = "bench-modulo"


class KeyOrder:
    """Counts messages whose key had a later one before. Every message counts once."""

    def __init__(self) -> None:
        self.violations = 0
        self._seen: set[int] = set()
        self._last: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Returns whether every message has come."""
        return len(self._seen) == MESSAGES

    def note(self, number: int) -> None:
        """A message was processed."""
        with self._lock:
            if number in self._seen:
                return
            self._seen.add(number)
            key = number % KEYS
            self.violations += number < self._last.get(key, -1)
            self._last[key] = max(number, self._last.get(key, -1))


def _publish(channel: Any, exchange: str, numbers: Iterable[int]) -> None:
    properties = pika.BasicProperties(delivery_mode=2)
    for number in numbers:
        channel.basic_publish(exchange, f"key-{number % KEYS}", b"%d" % number, properties)


@contextmanager
def _consumers(uri: str, order: KeyOrder) -> Iterator[Callable[[str], None]]:
    """Yields what starts a consumer of a queue; at the end all messages have come."""
    threads: list[threading.Thread] = []
    deadline = time.monotonic() + TIMEOUT_S

    def consume(queue: str) -> None:
        connection = connect(uri, timeout_s=30)
        channel = connection.channel()
        channel.basic_qos(prefetch_count=PREFETCH)
        for method, _, body in channel.consume(queue, inactivity_timeout=0.1):
            if method is not None:
                time.sleep(WORK_S)
                order.note(int(body))
                channel.basic_ack(method.delivery_tag)
            if order.is_complete or time.monotonic() > deadline:
                break
        connection.close()

    def start(queue: str) -> None:
        threads.append(threading.Thread(target=consume, args=(queue,), daemon=True))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()
    if not order.is_complete:
        raise NotUsable(f"not all of {MESSAGES} messages came within {TIMEOUT_S} s")


def through_modulo(uri: str) -> int:
    """Returns the violations behind `x-modulus-hash` whose queues become more half-way."""
    connection = connect(uri, timeout_s=30)
    channel = connection.channel()
    channel.exchange_declare(EXCHANGE, "x-modulus-hash", durable=True)
    queues = [f"{EXCHANGE}.{number}" for number in range(QUEUES[1])]
    order = KeyOrder()
    try:
        with _consumers(uri, order) as consume:
            for queue in queues:
                channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
                consume(queue)
            for queue in queues[: QUEUES[0]]:
                channel.queue_bind(queue, EXCHANGE)
            _publish(channel, EXCHANGE, range(MESSAGES // 2))
            for queue in queues[QUEUES[0] :]:
                channel.queue_bind(queue, EXCHANGE)
            _publish(channel, EXCHANGE, range(MESSAGES // 2, MESSAGES))
    finally:
        for queue in queues:
            channel.queue_delete(queue)
        channel.exchange_delete(EXCHANGE)
        connection.close()
    return order.violations


def through_topic(uri: str, topic: str, split: Callable[[], object]) -> int:
    """Returns the violations behind a topic that is split half-way, with as many members of a
    group as there are queues."""
    connection = connect(uri, timeout_s=30)
    channel = connection.channel()
    order = KeyOrder()
    with _consumers(uri, order) as consume:
        for _ in range(QUEUES[1]):
            consume(f"{topic}/order")
        _publish(channel, topic, range(MESSAGES // 2))
        split()
        _publish(channel, topic, range(MESSAGES // 2, MESSAGES))
    connection.close()
    return order.violations
