"""Reads of a topic of broker groups by RocketMQ's protocol: format convoymq with `namesrv`.

A queue is a log with offsets, which are the same on all replicas of its broker, so that a query
goes on at the slave that acts for a lost master. Its key in offsets is its broker and its number.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from convoymq.model.errors import Unavailable
from convoymq.rocketmq.bridge.mapping import SHARDING_KEY, TOMBSTONE
from convoymq.rocketmq.client.client import NoTopic, Pulled, Queue, RocketClient, content_of
from convoymq.rocketmq.remoting.codes import Answer
from convoymq.rocketmq.remoting.values import MASTER_ID, PERM_READ, PERM_WRITE
from convoymq.spark import clients
from convoymq.spark.broker import Streams, StreamState
from convoymq.spark.errors import SourceError
from convoymq.spark.frames import BATCH_BYTES_MAX, BATCH_ROWS_MAX
from convoymq.spark.partition import RocketRange
from convoymq.spark.reading import ahead, lose
from convoymq.spark.schema import LOG_APPEND_TIME, ROCKETMQ_COLUMNS, check_schema

if TYPE_CHECKING:
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

    from convoymq.rocketmq.client.blocking import Blocking
    from convoymq.rocketmq.store.types import Message
    from convoymq.spark.offsets import Partition, Positions
    from convoymq.spark.options import Place, StreamReadOptions

log = logging.getLogger(__name__)

RETRY_S = 0.1
SAMPLE_ROWS = 100
TIME_MS_MAX = 253_402_300_799_999
"""The end of the year 9999. Senders choose the born time."""


class RocketQueues(Streams):
    """The queues of one topic."""

    def __init__(self, options: StreamReadOptions, schema: StructType) -> None:
        check_schema(ROCKETMQ_COLUMNS, schema)
        assert options.topic is not None
        self._options = options
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self.rocketmq = options.topic

    @property
    def _rocket(self) -> Blocking:
        return clients.rocket(self._options.connection, self._options.group_id)

    def subject(self, key: Partition) -> str:
        """Returns what is read, for texts."""
        return f"topic {self.rocketmq}, broker {key[0]}, queue {key[1]}"

    # --- in the driver ----------------------------------------------------------------------

    def states(self, begun: Positions | None = None) -> dict[Partition, StreamState]:
        """Returns all queues of the topic.

        Args:
            begun: what was read before. Of it, a queue that nobody serves is waited for; with
                failOnDataLoss=false it stays where it is.

        Raises:
            SourceError: there is no such topic, or nobody serves a queue.
        """
        wanted = set() if begun is None else begun.ends.keys()
        waits = begun is not None and self._options.fail_on_data_loss

        async def look(client: RocketClient) -> dict[Partition, StreamState]:
            try:
                found = await _states(client, self.rocketmq)
            except NoTopic:
                if begun is None:
                    return {}
                raise
            if waits and (missing := sorted(wanted - found.keys())):
                raise Unavailable(f"nobody serves {self.subject(missing[0])}")
            return found

        try:
            found = self._rocket.call(look)
        except Unavailable as error:
            raise SourceError(f"topic {self.rocketmq}: {error.text}") from error
        if not found:
            raise SourceError(f"no name server knows a topic {self.rocketmq} that may be read")
        for key in wanted - found.keys():
            assert begun is not None
            at = begun.ends[key]
            log.warning("nobody serves %s, read up to offset %d", self.subject(key), at)
            found[key] = StreamState(group=0, earliest=at, latest=at, row_bytes=0.0)
        return found

    def resolve(
        self, place: Place, states: Mapping[Partition, StreamState]
    ) -> dict[Partition, int]:
        """Returns the offsets that a place stands for. Raises SourceError: it names other queues
        than the topic has."""
        if place.by_partition and place.by_partition.keys() != states.keys():
            raise SourceError(
                f"offsets are for {_listed(place.by_partition)}, but topic {self.rocketmq} has the "
                f"queues {_listed(states)}"
            )
        return super().resolve(place, states)

    def first_at(self, asked: Sequence[tuple[Partition, int]]) -> list[int | None]:
        """Returns the first offset at or after a time in ms; None = there is none."""

        async def one(client: RocketClient, key: Partition, ms: int) -> int | None:
            found = await client.offset_at(self.rocketmq, Queue(*key), ms)
            # RocketMQ answers with the last message where all are older.
            got = await client.pull(
                self.rocketmq, Queue(*key), found, count=1, bytes_max=1, hold_ms=0
            )
            return found if got.messages and got.messages[0].stored_ms >= ms else None

        async def all_of(client: RocketClient) -> list[int | None]:
            return list(await asyncio.gather(*(one(client, key, ms) for key, ms in asked)))

        return self._rocket.call(all_of)

    def row_bytes(self, key: Partition, offset: int) -> float:
        """Returns the mean size of the messages from an offset on."""
        got = self._rocket.call(
            lambda client: client.pull(
                self.rocketmq, Queue(*key), offset, count=SAMPLE_ROWS, bytes_max=1 << 20, hold_ms=0
            )
        )
        sizes = [message.size for message in got.messages]
        return float(sum(sizes)) / max(1, len(sizes))

    def store(self, group_id: str, ends: Mapping[Partition, int]) -> None:
        """Stores progress for people to see."""

        async def all_of(client: RocketClient) -> None:
            await asyncio.gather(*(
                client.commit(self.rocketmq, Queue(*key), end) for key, end in ends.items()
            ))  # fmt: skip

        self._rocket.call(all_of, timeout_s=0.0)

    def cut(
        self, ranges: Iterable[tuple[Partition, int, int]], groups: Mapping[str, int]
    ) -> list[InputPartition]:
        """Returns the tasks of ranges."""
        return [
            RocketRange(self.rocketmq, *key, start, end) for key, start, end in self._split(ranges)
        ]

    # --- in a task --------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a task: all of them, in order."""
        # Spark invents a partition where a batch has none.
        if not isinstance(partition, RocketRange):
            return
        maker = _Rows(self._schema, partition)
        for pulled in ahead(self._pulled(partition), self._options.fetching):
            for message in pulled:
                maker.add(message)
                if maker.is_full:
                    yield maker.batch()
        if maker.rows:
            yield maker.batch()
        if maker.unread:
            log.warning(
                "%s: %d compressed values cannot be read, and are as they were sent",
                self._subject(partition), maker.unread,
            )  # fmt: skip

    def _subject(self, part: RocketRange) -> str:
        return self.subject((part.broker, part.queue))

    def _pulled(self, part: RocketRange) -> Iterator[list[Message]]:
        fetching, rocket = self._options.fetching, self._rocket
        queue, offset = Queue(part.broker, part.queue), part.start
        due_s = time.monotonic() + rocket.timeout_s
        while offset < part.end:
            begin, count = offset, min(fetching.rows_max, part.end - offset)
            got = rocket.call(
                lambda client, begin=begin, count=count: client.pull(  # type: ignore[misc]
                    part.topic, queue, begin, count=count, bytes_max=fetching.part_bytes
                )
            )
            found = [m for m in got.messages if offset <= m.queue_offset < part.end]
            following = found[0].queue_offset if found else self._gap(got, offset, due_s)
            if following is None:
                time.sleep(RETRY_S)
                continue
            if following > offset:
                end = min(following, part.end)
                lose(
                    f"{self._subject(part)}: messages {offset} to {end - 1} are gone; it has those "
                    f"from {got.min} to {got.max - 1}",
                    fails=self._options.fail_on_data_loss,
                )  # fmt: skip
                offset = end
            if found:
                yield found
                offset = found[-1].queue_offset + 1
            due_s = time.monotonic() + rocket.timeout_s

    def _gap(self, got: Pulled, offset: int, due_s: float) -> int | None:
        """Returns where messages go on, None: an acting slave may not have got them yet."""
        if offset < got.min:
            return got.min
        if time.monotonic() < due_s:
            return None
        if offset < got.max and got.code == Answer.PULL_RETRY_IMMEDIATELY and got.next > offset:
            return got.next
        return 1 << 62


async def _states(client: RocketClient, topic: str) -> dict[Partition, StreamState]:
    """Returns all queues of a topic."""
    route = await client.route(topic)
    masters = {d.broker_name for d in route.broker_datas if MASTER_ID in d.broker_addrs}
    queues = [
        (Queue(data.broker_name, number), bool(data.perm & PERM_WRITE))
        for data in route.queue_datas
        if data.perm & PERM_READ
        for number in range(data.read_queue_nums)
    ]
    ends = await asyncio.gather(*(client.ends(topic, queue) for queue, _ in queues))
    return {
        (queue.broker, queue.number): StreamState(
            # Name servers take the permission to write from a group whose slave acts.
            group=0, earliest=first, latest=end, row_bytes=None,
            is_final=is_writable and queue.broker in masters,
        )
        for (queue, is_writable), (first, end) in zip(queues, ends, strict=True)
    }  # fmt: skip


def _listed(keys: Iterable[Partition]) -> str:
    return ", ".join(f"{broker}:{number}" for broker, number in sorted(keys))


class _Rows:
    """Gathers messages of a queue for a batch."""

    _part: RocketRange

    VALUES: ClassVar[Mapping[str, Callable[[_Rows, Message], object]]] = {
        "key": lambda _, m: _encoded(m.properties.get(SHARDING_KEY)),
        "value": lambda self, m: self._value(m),
        "topic": lambda self, _: self._part.topic,
        "broker": lambda self, _: self._part.broker,
        "partition": lambda self, _: self._part.queue,
        "offset": lambda _, m: m.queue_offset,
        "timestamp": lambda _, m: m.stored_ms * 1000,
        "timestampType": lambda _, __: LOG_APPEND_TIME,
        "born_timestamp": lambda _, m: m.born_ms * 1000 if 0 <= m.born_ms <= TIME_MS_MAX else None,
        "tags": lambda _, m: m.properties.get("TAGS"),
        "keys": lambda _, m: m.properties.get("KEYS", "").split(),
        "message_id": lambda _, m: m.properties.get("UNIQ_KEY", m.message_id),
        "reconsume_times": lambda _, m: m.reconsume_times,
        "properties": lambda _, m: list(m.properties.items()),
    }

    def __init__(self, schema: pa.Schema, part: RocketRange) -> None:
        self._schema = schema
        self._part = part
        self._columns: list[list[object]] = [[] for _ in schema]
        self.rows = self._bytes = 0
        self.unread = 0
        """Values that stay compressed."""

    @property
    def is_full(self) -> bool:
        """Returns whether a batch for Spark is there."""
        return self.rows >= BATCH_ROWS_MAX or self._bytes >= BATCH_BYTES_MAX

    def add(self, message: Message) -> None:
        """Adds a row."""
        self.rows += 1
        self._bytes += message.size
        for field, column in zip(self._schema, self._columns, strict=True):
            column.append(self.VALUES[field.name](self, message))

    def batch(self) -> pa.RecordBatch:
        """Returns the rows, and begins anew."""
        columns, self._columns = self._columns, [[] for _ in self._schema]
        self.rows = self._bytes = 0
        arrays = [
            pa.array(column, field.type)
            for column, field in zip(columns, self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _value(self, message: Message) -> bytes | None:
        if not len(message.body) and message.properties.get(TOMBSTONE) == "true":
            return None
        try:
            found = content_of(message)
        except ValueError:
            self.unread += 1
            return bytes(message.body)
        self._bytes += len(found)
        return found


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "replace")
