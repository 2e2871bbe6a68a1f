"""Writes of a task to a topic of broker groups: once with brokers of ours.

A row goes to the queue that its key chooses among all queues of the topic. Rows of one broker are
numbered, and each message carries its number as the key of an escaped message does (ADR 0159): the
broker looks into its log and stores it once. An attempt asks each broker what it has, and from
then on the broker refuses earlier attempts. The last message of these says how many rows its
attempt had got to, and their digest: where this attempt begins with the same rows, they keep their
numbers and are passed over; otherwise all rows get new ones, and may come twice (ADR 0181).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from convoymq.model.errors import Refused, Unavailable
from convoymq.rocketmq.acting.escape import Key
from convoymq.rocketmq.bridge.mapping import OWN, SHARDING_KEY, TOMBSTONE, TRANSLATED
from convoymq.rocketmq.client.client import Queue, RocketClient
from convoymq.rocketmq.remoting.values import PERM_WRITE
from convoymq.rocketmq.store.types import java_hash
from convoymq.spark import clients
from convoymq.spark.errors import SourceError

if TYPE_CHECKING:
    import pyarrow as pa

    from convoymq.rocketmq.client.blocking import Blocking
    from convoymq.spark.options import SinkOptions

WRITTEN = "SPARK_ROWS"
"""Property: first number, rows and digest of an attempt up to the end of this request."""
BATCH_BITS = 32


class _Row(NamedTuple):
    queue: int
    body: bytes
    properties: dict[str, str]


class _Stored(NamedTuple):
    """Progress of an earlier attempt at a broker."""

    last: int
    """The highest number."""
    first: int
    rows: int
    digest: str


class _Target:
    """A broker of the topic."""

    def __init__(
        self, rocket: Blocking, options: SinkOptions, broker: str, source: str, batch: int
    ) -> None:
        assert options.topic is not None
        self._rocket = rocket
        self._options = options
        self._topic = options.topic
        self._broker = broker
        self._source = source
        self._first = batch << BATCH_BITS
        self._sent = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._rows: list[_Row] = []
        self._bytes = 0
        self.duplicates = 0
        self._generation = int(time.time() * 1000)
        self._once, self._stored = False, None
        if options.idempotent:
            self._once, self._stored = rocket.call(lambda client: self._look_back(client, batch))

    async def _look_back(self, client: RocketClient, batch: int) -> tuple[bool, _Stored | None]:
        """Ends earlier attempts. Returns whether the broker looks at keys, and what it has."""
        while True:
            known = await client.keys(self._topic, self._broker, self._source, self._generation)
            if known is None:
                return False, None
            if known.generation <= self._generation:
                break
            # The clock of an earlier attempt was ahead.
            self._generation = known.generation + 1
        last = max((end - 1 for _, end in known.ranges.get(f"{self._topic}:0", ())), default=-1)
        if last >> BATCH_BITS > batch:
            raise SourceError(
                f"topic {self._topic} has rows of batch {last >> BATCH_BITS} of this query, which "
                f"is at batch {batch}: another driver has gone on, or the checkpoint is an older "
                "one. idempotent=false writes rows again"
            )
        if last >> BATCH_BITS < batch:
            return True, None
        for message in await client.with_key(self._topic, self._broker, self._key(last)):
            first, count, digest = message.properties.get(WRITTEN, "0:0:").split(":")
            return True, _Stored(last, int(first), int(count), digest)
        return True, _Stored(last, 0, 0, "")

    def _key(self, number: int) -> str:
        return str(Key(self._source, self._topic, 0, number))

    def add(self, row: _Row) -> None:
        """Takes a row."""
        self._rows.append(row)
        self._bytes += len(row.body)
        options = self._options
        if self._stored is not None:
            if len(self._rows) >= self._stored.rows:
                self._compare(self._stored)
        elif len(self._rows) >= options.request_rows_max or (
            self._bytes >= options.request_bytes_max
        ):
            self._send()

    def finish(self) -> None:
        """Returns when all rows are stored."""
        if self._stored is not None:
            self._compare(self._stored)
        self._send()

    def _compare(self, stored: _Stored) -> None:
        self._stored = None
        digest = hashlib.blake2b(digest_size=16)
        for row in self._rows:
            _update(digest, row)
        if (len(self._rows), digest.hexdigest()) == (stored.rows, stored.digest):
            self._first = stored.first
            self.duplicates = stored.last - stored.first + 1
        else:
            # Behind what may still be under way of that attempt.
            self._first = max(stored.last, stored.first + stored.rows) + (
                self._options.request_rows_max + 1
            )
        self._send()

    def _send(self) -> None:
        rows, self._rows = self._rows, []
        self._bytes = 0
        for row in rows:
            _update(self._digest, row)
        written = f"{self._first}:{self._sent + len(rows)}:{self._digest.hexdigest()}"
        lanes: dict[int, deque[tuple[int, _Row]]] = {}
        for number, row in enumerate(rows, self._first + self._sent):
            lanes.setdefault(row.queue, deque()).append((number, row))
        self._sent += len(rows)

        async def lane(client: RocketClient, waiting: deque[tuple[int, _Row]]) -> None:
            while waiting:
                number, row = waiting[0]
                properties, key = row.properties, None
                if self._once:
                    key = Key(self._source, self._topic, 0, number)
                    properties = {**properties, "UNIQ_KEY": str(key), WRITTEN: written}
                await client.send(
                    self._topic, Queue(self._broker, row.queue), row.body, properties, key=key,
                    once=self._once, generation=self._generation,
                )  # fmt: skip
                waiting.popleft()

        async def all_of(client: RocketClient) -> None:
            found = await asyncio.gather(
                *(lane(client, each) for each in lanes.values()), return_exceptions=True
            )
            for error in found:
                if error is not None:
                    raise error

        try:
            self._rocket.call(all_of)
        except (Refused, Unavailable) as error:
            raise SourceError(
                f"topic {self._topic}, broker {self._broker}: {error.text}"
            ) from error


def write_rocket(
    options: SinkOptions, batches: Iterator[pa.RecordBatch], name: str, batch_id: int
) -> tuple[int, int]:
    """Writes the rows of a task; returns their number, and how many were there already.

    Args:
        name: of the query or write, and of the task; the same for every attempt.
    """
    assert options.topic is not None
    topic = options.topic
    rocket = clients.rocket(options.connection, None)
    source = "spark." + name.replace(":", ".")
    try:
        queues = rocket.call(lambda client: _queues(client, topic))
    except Unavailable as error:
        raise SourceError(f"topic {topic}: {error.text}") from error
    targets: dict[str, _Target] = {}
    rows = 0
    for batch in batches:
        for found in batch.to_pylist():
            key = found.get("key")
            at = rows if key is None else java_hash(_bytes(key).decode("latin-1"))
            queue = queues[at % len(queues)]
            if queue.broker not in targets:
                targets[queue.broker] = _Target(rocket, options, queue.broker, source, batch_id)
            targets[queue.broker].add(_row(queue.number, found))
            rows += 1
    for target in targets.values():
        target.finish()
    return rows, sum(target.duplicates for target in targets.values())


async def _queues(client: RocketClient, topic: str) -> list[Queue]:
    """Returns the queues that rows go to. A group whose slave acts is waited for: what a row's key
    chooses does not depend on which master is away."""
    route = await client.route(topic)
    acting = {data.broker_name for data in route.broker_datas if data.enable_acting_master}
    found = [
        Queue(data.broker_name, number)
        for data in sorted(route.queue_datas, key=lambda data: data.broker_name)
        if data.perm & PERM_WRITE or data.broker_name in acting
        for number in range(data.write_queue_nums)
    ]
    if not found:
        raise Unavailable("it cannot be written to")
    return found


def _row(queue: int, found: Mapping[str, object]) -> _Row:
    """Returns a message of the columns key, value, tags, keys and properties."""
    properties: dict[str, str] = {}
    given = found.get("properties")
    for name, value in given if isinstance(given, list) else ():
        if name == "DELAY" or name.startswith("TIMER_"):
            raise SourceError(f"property {name}: rows are stored at once")
        if value and (name not in OWN or name in TRANSLATED - {"UNIQ_KEY"}):
            properties[name] = value
    if found.get("tags"):
        properties["TAGS"] = str(found["tags"])
    keys = found.get("keys")
    if isinstance(keys, list) and keys:
        properties["KEYS"] = " ".join(map(str, keys))
    if found.get("key") is not None:
        properties[SHARDING_KEY] = _bytes(found["key"]).decode("utf-8", "replace")
    if found["value"] is None:
        properties[TOMBSTONE] = "true"
    return _Row(queue, _bytes(found["value"] or b""), properties)


def _bytes(value: object) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)  # type: ignore[call-overload]


def _update(digest: hashlib.blake2b, row: _Row) -> None:
    for part in (row.body, repr((row.queue, sorted(row.properties.items()))).encode()):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
