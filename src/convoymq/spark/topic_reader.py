"""Reads of an ordered topic: format convoymq with the option `topic`, batch and streaming.

The places of a query are cuts (`topic_planning`), so it runs on through splits, merges and moves:
each trigger asks for the lineage and for the ends of the partitions in the cut, and what comes
after a partition is read when the partition itself is read to its end. One task reads one
partition. What was said of processes in `reader` holds here as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from convoymq.spark import offsets, planning, reading, topic_planning
from convoymq.spark.errors import SourceError
from convoymq.spark.offsets import TopicPositions
from convoymq.spark.options import Place
from convoymq.spark.partition import TopicRange
from convoymq.spark.reader import lose
from convoymq.spark.schema import TOPIC_COLUMNS, check_schema
from convoymq.spark.topic_broker import PartitionNow, Topic, partition_queue
from convoymq.spark.topic_frames import TopicBatchMaker
from convoymq.spark.topic_planning import Cut, History, Plan, advanced
from convoymq.spark.triggers import Triggers
from convoymq.topics.rules.lineage import FIRST_USER_OFFSET

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from convoymq.spark.options import StreamReadOptions

Now = Mapping[int, PartitionNow]
_EARLIEST = Place(kind="earliest")


class TopicBatchReader(DataSourceReader):
    """One read of a topic, between two cuts."""

    def __init__(self, options: StreamReadOptions, schema: StructType) -> None:
        check_schema(TOPIC_COLUMNS, schema)
        self._options = options
        self._maker = TopicBatchMaker(schema)

    def partitions(self) -> list[InputPartition]:
        """Asks the broker where the read begins and ends now: a task for each partition.

        Raises:
            SourceError: offsets that are no cut, or a start behind the end.
            DataLoss: see `failOnDataLoss`.
        """
        options = self._options
        topic = Topic(options)
        history = topic.history()
        now = topic.now(history, history.partitions)
        begin = topic.start(options.starting, history, now)
        begin = _kept(options, history, now, begin, explicit=True)
        limits = topic.limits(options.ending, history, now)
        if options.starting.kind == "offsets":
            for pid, start in begin.items():
                if start > limits.get(pid, FIRST_USER_OFFSET):
                    raise SourceError(
                        f"topic {history.topic}, partition {pid}: the starting offset {start} is "
                        "behind the end"
                    )
        plan = topic_planning.planned(history, begin, limits, same_batch=True)
        return _cut(options, _positions(history, None, plan, now), plan.ranges)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        return _read(self._options, self._maker, partition)


class TopicMicroBatchReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read of a topic."""

    def __init__(self, options: StreamReadOptions, schema: StructType) -> None:
        check_schema(TOPIC_COLUMNS, schema)
        self._options = options
        self._maker = TopicBatchMaker(schema)
        self._topic = Topic(options)
        self._triggers = Triggers(options)
        self._target: tuple[History, Now] | None = None
        self._latest: TopicPositions | None = None

    def initialOffset(self) -> dict[str, object]:  # noqa: N802
        """Returns a word: what it means is pinned in the first end offset."""
        return offsets.symbol(self._options.starting.kind)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Returns the limit that Spark hands to `latestOffset`, unless a trigger overrides it."""
        return self._triggers.default_limit()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fixes the end of the query: later messages belong to the next run, and so do changes."""
        self._pin(0)

    def _pin(self, version: int) -> History:
        history = self._topic.history(version)
        self._target = (history, self._topic.now(history, history.partitions))
        return history

    def latestOffset(self, start: dict[str, object], limit: ReadLimit) -> dict[str, object]:  # noqa: N802
        """Returns the end of the next batch; `start` itself, unchanged, when there is none.

        Raises:
            DataLoss: see `failOnDataLoss`.
            SourceError: the topic is missing, or the checkpoint is not one of this topic.
            ClientError: the broker did not answer before the deadline, or refused.
        """
        bounded = self._target is not None
        self._triggers.pace(bounded=bounded)
        begun = None
        if not offsets.is_symbol(start):
            begun = offsets.parse_topic(start, self._topic.name)
        history = self._known(0 if begun is None else begun.version)
        if begun is not None and begun.created_ms != history.created_ms:
            text = f"topic {history.topic} was deleted and created again since it was read"
            lose(self._options, text)
            begun, cut, now = None, *self._begin(history, _EARLIEST)
        elif begun is None:
            cut, now = self._begin(history, self._options.starting)
        else:
            cut, now = self._follow(history, begun)
        ends = {pid: each.end for pid, each in now.items()}
        plan = self._plan(history, cut, ends, now, limit, bounded=bounded)
        self._latest = _positions(history, None, Plan({}, {**plan.cut, **ends}), now)
        if begun is not None and not plan.ranges and plan.cut == begun.cut:
            self._triggers.note(idle=True)
            return start
        self._triggers.note(idle=False)
        return _positions(history, begun, plan, now).to_json()

    def reportLatestOffset(self) -> dict[str, object] | None:  # noqa: N802
        """Returns the ends of the partitions as `latestOffset` found them, for the query's
        progress."""
        return None if self._latest is None else self._latest.to_json()

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> list[InputPartition]:
        """Returns the tasks of a batch; a repeated batch gets the same ranges.

        Raises:
            SourceError: the checkpoint's offsets do not fit each other.
        """
        until = offsets.parse_topic(end, self._topic.name)
        begun: Mapping[int, int] = {}
        if not offsets.is_symbol(start):
            begun = offsets.parse_topic(start, self._topic.name).cut
        ranges = {}
        for pid, stop in sorted({**until.cut, **until.done}.items()):
            begin = until.starts.get(pid, begun.get(pid))
            if begin is None or begin > stop:
                raise SourceError(
                    f"the checkpoint's batch ends at {stop} of partition {pid} of topic "
                    f"{until.topic} but begins {'nowhere' if begin is None else f'at {begin}'}"
                )
            if begin < stop:
                ranges[pid] = (begin, stop)
        return _cut(self._options, until, ranges)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task, on another instance."""
        return _read(self._options, self._maker, partition)

    def commit(self, end: dict[str, object]) -> None:
        """Nothing is held for the query."""

    def stop(self) -> None:
        """Nothing is held that the broker would miss."""

    # --- parts of latestOffset ---------------------------------------------------------------

    def _known(self, version: int) -> History:
        """Returns the topic: now, or when AvailableNow began."""
        if self._target is None:
            return self._topic.history(version)
        history, _ = self._target
        return history if history.version >= version else self._pin(version)

    def _begin(self, history: History, place: Place) -> tuple[Cut, Now]:
        """Returns where a new query begins."""
        now = self._now(history, history.partitions)
        cut = self._topic.start(place, history, now)
        return _kept(self._options, history, now, cut, explicit=True), now

    def _follow(self, history: History, begun: TopicPositions) -> tuple[Cut, Now]:
        """Returns where the batch behind `begun` begins. Raises SourceError."""
        unknown = sorted(begun.cut.keys() - history.partitions.keys())
        if unknown:
            raise SourceError(
                f"topic {history.topic}: partition {unknown[0]} of the checkpoint is not known"
            )
        now = self._now(history, self._reachable(history, advanced(history, begun.cut)))
        return _kept(self._options, history, now, begun.cut), now

    def _reachable(self, history: History, cut: Cut) -> Collection[int]:
        return history.with_descendants(cut) if self._options.same_batch else cut

    def _now(self, history: History, pids: Collection[int]) -> Now:
        if self._target is not None:
            return {pid: each for pid, each in self._target[1].items() if pid in pids}
        return self._topic.now(history, pids)

    def _plan(
        self,
        history: History,
        cut: Cut,
        ends: Mapping[int, int],
        now: Now,
        limit: ReadLimit,
        *,
        bounded: bool,
    ) -> Plan:
        same_batch = self._options.same_batch
        whole = topic_planning.planned(history, cut, ends, same_batch=same_batch)
        allowed = self._triggers.allowed(
            whole.rows, lambda: self._bytes_of(whole, now), limit, bounded=bounded
        )
        if allowed == whole.rows:
            return whole
        return topic_planning.planned(history, cut, ends, allowed, same_batch=same_batch)

    def _bytes_of(self, plan: Plan, now: Now) -> int:
        total = 0.0
        for pid, (start, end) in plan.ranges.items():
            mean = now[pid].row_bytes
            if mean is None:
                mean = self._topic.sample_row_bytes(pid, start)
            total += (end - start) * mean
        return int(total)


def _kept(
    options: StreamReadOptions,
    history: History,
    now: Now,
    cut: Mapping[int, int],
    *,
    explicit: bool = False,
) -> Cut:
    """Returns a cut without what is gone.

    Args:
        explicit: whether the offsets were given, not read up to: then they may be wrong. Otherwise
            a new leader may not know its whole log as committed yet.

    Raises:
        DataLoss: see `failOnDataLoss`.
    """
    made = dict(cut)
    for pid, offset in cut.items():
        subject = f"topic {history.topic}, partition {pid}"
        close = history.partitions[pid].close_offset
        found = now.get(pid)
        if history.is_gone(pid):
            how = "declared lost" if pid in history.lost else "deleted"
            if close is None or offset < close:
                lose(options, f"{subject}: it was {how}, and is read up to offset {offset}")
        elif found is None:
            continue
        elif offset < found.first:
            kept = f"the earliest kept is {found.first}"
            lose(options, f"{subject}: offset {offset} is wanted, {kept}")
            made[pid] = found.first
        elif explicit and offset > found.end:
            lose(options, f"{subject}: offset {offset} is wanted, but its end is {found.end}")
            made[pid] = found.end
    return made


def _positions(
    history: History, begun: TopicPositions | None, plan: Plan, now: Now
) -> TopicPositions:
    """Returns a batch as the checkpoint has it."""
    before = {} if begun is None else begun.cut
    begins = {**plan.cut, **{pid: start for pid, (start, _) in plan.ranges.items()}}
    return TopicPositions(
        topic=history.topic,
        created_ms=history.created_ms,
        logical=history.logical,
        hash_seed=history.hash_seed,
        cut=plan.cut,
        done={pid: end for pid, (_, end) in plan.ranges.items() if pid not in plan.cut},
        starts={pid: begin for pid, begin in begins.items() if before.get(pid) != begin},
        origins={
            pid: (now[pid].group if pid in now else 0, history.partitions[pid].created_version)
            for pid in begins
        },
    )


def _cut(
    options: StreamReadOptions, positions: TopicPositions, ranges: Mapping[int, tuple[int, int]]
) -> list[InputPartition]:
    fetching = options.fetching
    parts = planning.split(
        [(pid, start, end) for pid, (start, end) in sorted(ranges.items())],
        fetching.partitions_min,
        fetching.records_per_partition_max,
    )
    return [
        TopicRange(
            partition_queue(positions.topic, pid),
            pid,
            start - FIRST_USER_OFFSET,
            end - FIRST_USER_OFFSET,
            positions.origins[pid][0],
            topic=positions.topic,
            logical=positions.logical,
            hash_seed=positions.hash_seed,
            created_version=positions.origins[pid][1],
        )
        for pid, start, end in parts
    ]


def _read(
    options: StreamReadOptions, maker: TopicBatchMaker, partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    # Spark invents a partition where a batch has none.
    if not isinstance(partition, TopicRange):
        return iter(())
    return reading.read_stream(
        options.connection,
        options.fetching,
        maker.of(partition),
        partition,
        fail_on_data_loss=options.fail_on_data_loss,
    )
