"""Requests of the driver to the broker about streams, and the errors that people get to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoymq.client.client import QUEUE_TYPES
from convoymq.client.errors import AccessRefused, ClientError, NotFound
from convoymq.kernels import columns as bits
from convoymq.model.columnar import ErrorCode
from convoymq.model.near_names import hint
from convoymq.spark import clients, offsets, planning, reading
from convoymq.spark.errors import SourceError
from convoymq.spark.frames import BatchMaker
from convoymq.spark.offsets import Partition, Positions
from convoymq.spark.option_values import EARLIEST, LATEST
from convoymq.spark.partition import StreamRange
from convoymq.spark.schema import STREAM_COLUMNS, check_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

    from convoymq.client import Client
    from convoymq.client.results import QueueInfo
    from convoymq.spark.options import Connection, Place, StreamReadOptions

_SAMPLE_ROWS = 1000
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """A stream, now."""

    group: int
    """Raft group of the stream: a stream that is deleted and declared again has another."""
    earliest: int
    latest: int
    """The offset that the next message gets, as the leader says."""
    row_bytes: float | None
    """Mean size of the messages that are kept; None where the node that was asked has none."""
    is_final: bool = False
    """Whoever answered has all messages: what was read behind `latest` was cut off."""


class Streams:
    """The streams of one read: pickled into its tasks.

    Args:
        schema: the columns that are read.
    """

    rocketmq = ""

    def __init__(self, options: StreamReadOptions, schema: StructType) -> None:
        check_schema(STREAM_COLUMNS, schema)
        self._options = options
        self._maker = BatchMaker(schema, STREAM_COLUMNS)

    @property
    def client(self) -> Client:
        """Returns the client of this process."""
        return clients.connect(self._options.connection)

    def states(self, begun: Positions | None = None) -> dict[Partition, StreamState]:
        """Returns all streams that are read, by (name, partition).

        Args:
            begun: what was read before, None in the beginning. Of these, what is gone is left out;
                with failOnDataLoss=false any other as well, once the query has begun.

        Raises:
            SourceError: a stream that the options name does not exist, is no stream or may not be
                read.
            AccessRefused: a stream that was read before may not be read any more: it is not gone.
        """
        options = self._options
        found = self._listed(begun)
        read = {} if begun is None else begun.ends
        for name in sorted({name for name, _ in read} - found.keys()):
            if options.pattern is not None or name in options.streams:
                self._check_gone(name)
        missing = [name for name in options.streams if name not in found and (name, 0) not in read]
        if missing and (begun is None or options.fail_on_data_loss):
            raise SourceError(explain_missing(self.client, missing))
        names = list(found)
        answers = self.client.offsets(
            [(name, what, None) for name in names for what in ("earliest", "latest")]
        )
        states = {}
        for i, name in enumerate(names):
            (earliest, _), (latest, _) = answers[2 * i], answers[2 * i + 1]
            first, end = earliest or 0, latest or 0
            info = found[name]
            kept = end - first
            states[name, 0] = StreamState(
                group=info.group,
                earliest=first,
                latest=max(end, first),
                row_bytes=None if info.bytes is None else info.bytes / max(kept, 1),
            )
        return states

    def _listed(self, begun: Positions | None) -> dict[str, QueueInfo]:
        """Returns the streams by name. The node that is asked may be behind: where what it says
        would mean that something is lost, it is asked for what is true now."""
        options = self._options
        names = None if options.pattern is not None else list(options.streams)
        for current in (False, True):
            infos = self.client.metadata(names=names, pattern=options.pattern, current=current)
            found = {info.name: info for info in infos}
            if names is None or begun is not None:
                known = {} if begun is None else {n: begun.groups.get(n, 0) for n, _ in begun.ends}
            else:
                known = dict.fromkeys(names, 0)
            if all(n in found and g in (0, found[n].group) for n, g in known.items()):
                break
        return found

    def _check_gone(self, name: str) -> None:
        """A list shows only what may be read. Raises AccessRefused when a stream is not in it for
        that reason."""
        refusal = read_refusal(self.client, name)
        if isinstance(refusal, AccessRefused):
            raise refusal

    def resolve(
        self, place: Place, states: Mapping[Partition, StreamState]
    ) -> dict[Partition, int]:
        """Returns the offsets that a place stands for.

        Streams that the place does not name, which only a pattern allows, are read from where
        Kafka's source reads them: the earliest.

        Raises:
            SourceError: no message is as young as the timestamp and the strategy is `error`.
        """
        if place.kind == "earliest":
            return {key: state.earliest for key, state in states.items()}
        if place.kind == "latest":
            return {key: state.latest for key, state in states.items()}
        if place.kind == "timestamps":
            return self._by_time(place, states)
        found = {}
        for key, state in states.items():
            offset = place.by_partition.get(key, EARLIEST)
            if offset == EARLIEST:
                offset = state.earliest
            elif offset == LATEST:
                offset = state.latest
            found[key] = offset
        return found

    def _by_time(
        self, place: Place, states: Mapping[Partition, StreamState]
    ) -> dict[Partition, int]:
        found = {}
        asked = []
        for key, state in states.items():
            time_ms = place.by_partition.get(key, place.timestamp_ms)
            if time_ms is None:
                found[key] = state.earliest
            else:
                asked.append((key, time_ms))
        for (key, time_ms), offset in zip(asked, self.first_at(asked), strict=True):
            if offset is not None:
                found[key] = min(offset, states[key].latest)
            elif place.late == "latest":
                found[key] = states[key].latest
            else:
                raise SourceError(
                    f"{self.subject(key)} has no message at or after the time {time_ms} ms; "
                    "startingOffsetsByTimestampStrategy=latest begins at its end"
                )
        return found

    def subject(self, key: Partition) -> str:
        """Returns what is read, for texts."""
        return f"stream {key[0]}"

    def parse(self, offset: Mapping[str, object]) -> Positions:
        """Reads an offset of the checkpoint. Raises SourceError."""
        return offsets.parse(offset, self.rocketmq)

    def row_bytes(self, key: Partition, offset: int) -> float:
        """Returns the mean size of the messages from an offset on."""
        return sample_row_bytes(self.client, key[0], offset)

    def first_at(self, asked: Sequence[tuple[Partition, int]]) -> list[int | None]:
        """Returns the first offset at or after a time in ms; None = there is none."""
        return [at for at, _ in self.client.offsets([(k[0], "timestamp", ms) for k, ms in asked])]

    def store(self, group_id: str, ends: Mapping[Partition, int]) -> None:
        """Stores progress for people to see."""
        for (stream, _), end in ends.items():
            if end:
                self.client.store_offset(stream, group_id, end - 1)

    def cut(
        self, ranges: Iterable[tuple[Partition, int, int]], groups: Mapping[str, int]
    ) -> list[InputPartition]:
        """Returns the tasks of ranges."""
        return [
            StreamRange(key[0], key[1], start, end, groups.get(key[0], 0))
            for key, start, end in self._split(ranges)
        ]

    def _split(
        self, ranges: Iterable[tuple[Partition, int, int]]
    ) -> list[tuple[Partition, int, int]]:
        fetching = self._options.fetching
        return planning.split(ranges, fetching.partitions_min, fetching.records_per_partition_max)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a task."""
        # Spark invents a partition where a batch has none.
        if not isinstance(partition, StreamRange):
            return iter(())
        options = self._options
        return reading.read_stream(
            options.connection, options.fetching, self._maker, partition,
            fail_on_data_loss=options.fail_on_data_loss,
        )  # fmt: skip


def sample_row_bytes(client: Client, stream: str, offset: int) -> float:
    """Returns the mean size of the messages from an offset on, by reading some. Works on any
    node."""
    sample = client.fetch(
        stream, offset, max_rows=_SAMPLE_ROWS, max_bytes=_SAMPLE_BYTES, columns=bits.VALUE
    ).frame
    if not sample.rows:
        return 0.0
    ends = sample.buffers(bits.VALUE)[1].cast("i")
    return (ends[sample.rows] - ends[0]) / sample.rows


def is_topic(client: Client, name: str) -> bool:
    """Returns whether the user may read or write an ordered topic of this name."""
    try:
        client.topic_route(name, lineage=False)
    except (AccessRefused, NotFound):
        return False
    except ClientError as error:
        # A server of release 0.3 has no topics.
        if error.code == ErrorCode.NOT_IMPLEMENTED:
            return False
        raise
    return True


def check_target(connection: Connection, name: str, *, stream: bool) -> bool:
    """Returns whether it is an ordered topic. Raises SourceError when there is no such topic or
    stream, or queue that is no stream."""
    client = clients.connect(connection)
    types = ("stream",) if stream else QUEUE_TYPES
    # A user who may write but not read sees nothing here: then the broker's own answer decides.
    if client.metadata(names=[name], types=types):
        return False
    if stream and is_topic(client, name):
        return True
    if client.metadata(names=[name], types=QUEUE_TYPES):
        raise SourceError(explain_missing(client, [name]))
    return False


def explain_missing(client: Client, names: Iterable[str]) -> str:
    """Returns why streams were not found, with the names near them."""
    readable = {info.name: info.type for info in client.metadata(types=QUEUE_TYPES)}
    texts = []
    for name in names:
        if name in readable:
            texts.append(
                f"{name} is a {readable[name]} queue, no stream: format convoymq_queue reads it"
            )
            continue
        streams = [known for known, kind in readable.items() if kind == "stream"]
        refusal = read_refusal(client, name)
        if isinstance(refusal, AccessRefused):
            texts.append(f"stream {name} may not be read: {refusal.text}")
        elif refusal is not None and is_topic(client, name):
            texts.append(f"{name} is an ordered topic, no stream: option topic reads it")
        elif refusal is not None:
            texts.append(f"there is no stream {name}{hint(name, streams, 0.5)}")
        else:
            texts.append(f"stream {name} was not there a moment ago")
    return ". ".join(texts)


def read_refusal(client: Client, name: str) -> AccessRefused | NotFound | None:
    """Returns the error with which a node refuses to read a stream; None when it may be read.

    A list of streams leaves out what the user may not read, and so cannot tell it from what is not
    there. A node checks the permission before the existence.
    """
    try:
        client.offsets([(name, "earliest", None)])
    except (AccessRefused, NotFound) as error:
        return error
    return None
