"""Consumers that check the order of each row's changes, by their place in the source.

`GroupChecker` is a member of a group of a topic. `ModuloRun` sends the same changes through an
exchange that hashes modulo the number of its queues, and adds queues half-way.

What is judged is every delivery as it came, repeats included:

| delivery of a key's change | class |
|---|---|
| behind all before it | in order |
| the same message again, marked `redelivered` | repeat, flagged |
| the same message again, without the mark: another member had it | repeat, unflagged |
| the same change, as another message | stored twice |
| of an earlier place, for the first time | out of order |
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pika
import pika.exceptions

PREFETCH = 50
RECONNECT_S = 0.2
WAIT_S = 0.2
WORK_S = 0.002
"""What a consumer of the comparison does for each message."""
FINDINGS_MAX = 20
"""More of a kind say nothing new."""
HAND_SHOWN_MAX = 8
OUT_OF_ORDER = "out of order"
STORED_TWICE = "stored twice"


@dataclass(frozen=True, slots=True)
class Change:
    """A change as a consumer got it."""

    key: str
    place: str
    partition: int
    offset: int = -1
    """-1: nothing tells two copies of it apart."""
    member: str = ""
    redelivered: bool = False

    def __str__(self) -> str:
        at = f"partition {self.partition}" + (f" offset {self.offset}" if self.offset >= 0 else "")
        mark = ", redelivered" if self.redelivered else ""
        return f"place {self.place} ({at}, member {self.member or '-'}{mark})"


@dataclass(frozen=True, slots=True)
class Finding:
    """A change that broke a promise, and what its member had beside it."""

    kind: str
    change: Change
    behind: Change
    """Of its key: the one with the latest place before it; of one that is stored twice, its first
    copy."""
    hand: tuple[Change, ...]

    def __str__(self) -> str:
        of_key = [f"place {each.place}" for each in self.hand if each.key == self.change.key]
        shown = ", ".join(of_key[:HAND_SHOWN_MAX]) or "nothing else of the key"
        return (
            f"{self.kind}: key {self.change.key}, {self.change} behind {self.behind}; its member "
            f"had {len(self.hand)} more in its hands, of the key {shown}"
        )


@dataclass(slots=True)
class Order:
    """What consumers saw: every delivery is judged as it came."""

    seen: int = 0
    """Changes that came for the first time."""
    violations: int = 0
    """Of these, how many came behind a later one of their key."""
    repeats_flagged: int = 0
    repeats_unflagged: int = 0
    stored_twice: int = 0
    changes: list[tuple[str, str]] = field(default_factory=list)
    """(key, place) as they came for the first time."""
    late: list[int] = field(default_factory=list)
    """Places in `changes` of those that were out of order."""
    findings: list[Finding] = field(default_factory=list)
    """The first ones of each kind."""
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """(time, seconds since the message before)."""
    _last: dict[str, Change] = field(default_factory=dict)
    _copies: dict[tuple[str, str], list[Change]] = field(default_factory=dict)
    _last_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, change: Change, hand: Iterable[Change] = ()) -> None:
        """A change was processed, while its member had others in its hands."""
        now = time.time()
        with self._lock:
            copies = self._copies.setdefault((change.key, change.place), [])
            if not copies:
                self._judge(change, hand)
            elif any(self._is_same(change, each) for each in copies):
                # The acknowledgement was lost with a node.
                self.repeats_flagged += change.redelivered
                self.repeats_unflagged += not change.redelivered
                return
            else:
                self.stored_twice += 1
                self._find(STORED_TWICE, self.stored_twice, change, copies[0], hand)
            copies.append(change)
            if self._last_s:
                self.stalls.append((now, now - self._last_s))
            self._last_s = now

    @staticmethod
    def _is_same(change: Change, other: Change) -> bool:
        places = (change.partition, change.offset), (other.partition, other.offset)
        return change.offset < 0 or places[0] == places[1]

    def _judge(self, change: Change, hand: Iterable[Change]) -> None:
        """A change came for the first time."""
        last = self._last.get(change.key)
        if last is not None and change.place < last.place:
            self.violations += 1
            self.late.append(self.seen)
            self._find(OUT_OF_ORDER, self.violations, change, last, hand)
        else:
            self._last[change.key] = change
        self.changes.append((change.key, change.place))
        self.seen += 1

    def _find(
        self, kind: str, number: int, change: Change, behind: Change, hand: Iterable[Change]
    ) -> None:
        if number <= FINDINGS_MAX:
            self.findings.append(Finding(kind, change, behind, tuple(hand)))

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
                self._consume(port, f"{attempt} at port {port}")
            self._stopped.wait(RECONNECT_S)

    def _consume(self, port: int, member: str) -> None:
        hand: deque[tuple[int, Change]] = deque()

        def take(_channel: Any, method: Any, properties: Any, body: bytes) -> None:
            hand.append((method.delivery_tag, change_of(method, properties, body, member)))

        with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port)) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=PREFETCH)
            channel.basic_consume(self._queue, take)
            while not self._stopped.is_set():
                connection.process_data_events(0 if hand else WAIT_S)
                if hand:
                    self._process(channel, hand)

    def _process(self, channel: Any, hand: deque[tuple[int, Change]]) -> None:
        tag, change = hand.popleft()
        if change.key == self.poison:
            self.poison, self.rejected = "", change.key
            channel.basic_reject(tag, requeue=False)
            return
        self.order.note(change, [each for _, each in hand])
        channel.basic_ack(tag)

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self.join()


def change_of(method: Any, properties: Any, body: bytes, member: str) -> Change:
    """Returns the change of a delivery."""
    headers = properties.headers or {}
    event = json.loads(body)
    return Change(
        str(headers.get("x-order-key") or method.routing_key),
        str(event["source"]["place"]),
        int(headers.get("x-pid", -1)),
        int(headers.get("x-offset", -1)),
        member,
        bool(method.redelivered),
    )


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
            thread = threading.Thread(target=self._consume, args=(queue, number), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _consume(self, queue: str, number: int) -> None:
        with pika.BlockingConnection(
            pika.ConnectionParameters("127.0.0.1", self._port)
        ) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=PREFETCH)
            for method, _, body in channel.consume(queue, inactivity_timeout=0.1):
                if method is not None:
                    time.sleep(WORK_S)
                    place = json.loads(body)["place"]
                    self.order.note(Change(method.routing_key, place, number, member=queue))
                    channel.basic_ack(method.delivery_tag)
                elif self.order.seen >= self._wanted:
                    return
