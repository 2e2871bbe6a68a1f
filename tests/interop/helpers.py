"""Waiting, collecting and checking, shared by the interop tests."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from tests.clusters import Cluster, answered
from tests.patience import PATIENCE_S, pause_s


def eventually(
    condition: Callable[[], bool], *, connection: Any = None, timeout_s: float = PATIENCE_S
) -> None:
    """Wait until the condition holds, serving the pika connection meanwhile.

    Raises: AssertionError when the time is over.
    """
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + timeout_s, "the awaited condition did not come true"
        if connection is None:
            time.sleep(pause_s(began))
        else:
            connection.process_data_events(time_limit=0.05)


class Inbox:
    """Collects what a pika consumer receives; acknowledges only when told to."""

    def __init__(self, channel: Any, queue: str, **consume: Any) -> None:
        self.channel = channel
        self.queue = queue
        self.deliveries: list[tuple[Any, Any, bytes]] = []
        self.cancelled = False
        self.tag = channel.basic_consume(queue, self._on_message, **consume)
        channel.add_on_cancel_callback(self._on_cancel)

    def _on_message(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self.deliveries.append((method, properties, body))

    def _on_cancel(self, _frame: Any) -> None:
        self.cancelled = True

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.deliveries]

    @property
    def redelivered(self) -> list[bool]:
        return [method.redelivered for method, _, _ in self.deliveries]

    def wait(self, count: int) -> list[bytes]:
        """Wait until `count` messages are here. Returns: their bodies."""
        eventually(lambda: len(self.deliveries) >= count, connection=self.channel.connection)
        return self.bodies

    def settle(self) -> None:
        """Give the broker the chance to send more than it should: two full round trips."""
        for _ in range(2):
            self.channel.queue_declare(self.queue, passive=True)
            self.channel.connection.process_data_events(time_limit=0)


def fetch_all(channel: Any, queue: str) -> list[bytes]:
    """Take everything that is ready, with basic.get."""
    bodies: list[bytes] = []
    while True:
        method, _, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return bodies
        bodies.append(body)


def publish_confirmed(channel: Any, queue: str, bodies: Iterable[bytes], **more: Any) -> None:
    """Publish to the queue and wait for each confirm."""
    channel.confirm_delivery()
    for body in bodies:
        channel.basic_publish("", queue, body, mandatory=True, **more)


def numbered(count: int, start: int = 0) -> list[bytes]:
    """Bodies `b"0"`, `b"1"`, …"""
    return [str(number).encode() for number in range(start, start + count)]


def assert_in_order_without_loss(
    confirmed: Iterable[int], delivered: Iterable[tuple[int, bool]]
) -> None:
    """Check what an application was promised after any failure.

    Args: `confirmed`: numbers whose publish was confirmed, in publishing order. `delivered`: number
    and redelivered flag (or "published again") of every delivery of one queue to one consumer.
    Every confirmed number arrives; first arrivals are in order; a repeat needs its flag.
    """
    seen: set[int] = set()
    last = -1
    for number, excused in delivered:
        if number in seen:
            assert excused, f"{number} came twice without the redelivered flag"
            continue
        assert excused or number > last, f"{number} came after {last}"
        seen.add(number)
        last = max(last, number)
    lost = [number for number in confirmed if number not in seen]
    assert not lost, f"{len(lost)} confirmed messages are lost, first {lost[:5]}"


def api(cluster: Cluster, method: str, path: str, body: object = None) -> Any:
    """A request to ConvoyMQ's HTTP API, on the first node."""
    port = (urlsplit(cluster.uris[0]).port or 0) + 20
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/{path}",
        data=None if body is None else json.dumps(body).encode(),
        method=method,
        headers={"content-type": "application/json", "authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="},
    )
    with answered(request) as answer:
        return json.loads(answer.read() or b"null")


def set_policy(cluster: Cluster, path: str, body: object) -> None:
    """Sets a policy; None removes it."""
    api(cluster, "DELETE" if body is None else "PUT", path, body)
