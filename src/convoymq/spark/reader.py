"""Reads of streams: format convoymq, batch and streaming.

The streaming reader lives in one process beside the driver as long as its query; a second instance,
which shares nothing with it, is pickled into the tasks. So the tasks get all they need in their
partitions, and nothing here depends on being called once: `initialOffset` is asked for twice and
again after a restart, `commit` never for the last batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from convoymq.client.errors import ClientError
from convoymq.model.errors import BrokerError
from convoymq.spark import offsets, planning, reading
from convoymq.spark.broker import Streams, StreamState
from convoymq.spark.errors import SourceError
from convoymq.spark.offsets import Partition, Positions
from convoymq.spark.triggers import Triggers

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from convoymq.spark.options import StreamReadOptions

log = logging.getLogger(__name__)


class BatchReader(DataSourceReader):
    """One read of ranges of streams."""

    def __init__(self, options: StreamReadOptions, schema: StructType) -> None:
        self._options = options
        self._source = source_of(options, schema)

    def partitions(self) -> list[InputPartition]:
        """Asks the broker where the ranges begin and end now, and cuts them into tasks."""
        states = self._source.states()
        ranges = self._ranges(states)
        groups = {key[0]: state.group for key, state in states.items()}
        return self._source.cut([(key, *ends) for key, ends in sorted(ranges.items())], groups)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        return self._source.read(partition)

    def _ranges(self, states: Mapping[Partition, StreamState]) -> dict[Partition, tuple[int, int]]:
        options = self._options
        starts = self._source.resolve(options.starting, states)
        ends = self._source.resolve(options.ending, states)
        explicit = options.starting.kind == "offsets"
        ranges = {}
        for key, state in states.items():
            subject = self._source.subject(key)
            start = _kept(options, subject, starts[key], state)
            end = _kept(options, subject, ends[key], state)
            if explicit and start > end:
                raise SourceError(
                    f"{subject}: the starting offset {start} is behind the end, {end}"
                )
            ranges[key] = (start, max(start, end))
        return ranges


class FilteringBatchReader(BatchReader):
    """The same, narrowed by filters. A class of its own: Spark refuses a reader that has
    `pushFilters` unless the session allows it."""

    def __init__(self, options: StreamReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._filters: list[Filter] = []

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Keeps the filters that narrow ranges; returns those that Spark still has to apply."""
        left = []
        for one in filters:
            used, exact = _usable(one)
            if used:
                self._filters.append(one)
            if not exact:
                left.append(one)
        return left

    def _ranges(self, states: Mapping[Partition, StreamState]) -> dict[Partition, tuple[int, int]]:
        ranges = super()._ranges(states)
        for one in self._filters:
            for key, (start, end) in list(ranges.items()):
                low, high = self._narrowed(one, key, start, end)
                start, end = max(start, low), min(end, high)
                ranges[key] = (start, max(start, end))
        return ranges

    def _narrowed(self, one: Filter, key: Partition, start: int, end: int) -> tuple[int, int]:
        """Returns the part of [start, end) in which rows can pass the filter."""
        (column,) = one.attribute  # type: ignore[attr-defined]
        if column == "offset":
            return _offset_range(one, start, end)
        if column == "timestamp":
            value = one.value  # type: ignore[attr-defined]
            return self._time_range(one, key, value, start, end)
        held = key[0] if column == "topic" else key[1]
        return (start, end) if _passes(one, held) else (start, start)

    def _time_range(
        self, one: Filter, key: Partition, value: datetime, start: int, end: int
    ) -> tuple[int, int]:
        """Times of a stream never fall, so a time is an offset. Whole milliseconds, rounded so that
        no row is lost: Spark applies the filter again."""
        time_ms = int(value.timestamp() * 1000)
        low, high = start, end
        if isinstance(one, GreaterThan | GreaterThanOrEqual | EqualTo | EqualNullSafe):
            low = self._first_at(key, max(time_ms - 1, 0), end)
        if isinstance(one, LessThan | LessThanOrEqual | EqualTo | EqualNullSafe):
            high = self._first_at(key, max(time_ms + 2, 0), end)
        return low, high

    def _first_at(self, key: Partition, time_ms: int, otherwise: int) -> int:
        (offset,) = self._source.first_at([(key, time_ms)])
        return otherwise if offset is None else offset


class MicroBatchReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read. Called in one process and thread, in this order: see `offsets` for what
    the checkpoint holds, and the trap that each of these avoids in docs/spark.md."""

    def __init__(self, options: StreamReadOptions, schema: StructType) -> None:
        self._options = options
        self._source = source_of(options, schema)
        self._triggers = Triggers(options)
        self._target: dict[Partition, int] | None = None
        self._latest: Positions | None = None
        self._stored: Mapping[str, object] | None = None

    def initialOffset(self) -> dict[str, object]:  # noqa: N802
        """Returns a word: what it means is pinned in the first end offset."""
        return offsets.symbol(self._options.starting.kind)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Returns the limit that Spark hands to `latestOffset`, unless a trigger overrides it."""
        return self._triggers.default_limit()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fixes the end of the query: later messages belong to the next run."""
        states = self._source.states()
        self._target = {key: state.latest for key, state in states.items()}

    def latestOffset(self, start: dict[str, object], limit: ReadLimit) -> dict[str, object]:  # noqa: N802
        """Returns the end of the next batch; `start` itself, unchanged, when there is none.

        Raises:
            DataLoss: see `failOnDataLoss`.
            SourceError: a stream is missing, or the checkpoint is not one of these streams.
            ClientError: the broker did not answer before the deadline, or refused.
        """
        self._triggers.pace(bounded=self._target is not None)
        begun = None if offsets.is_symbol(start) else self._parsed(start)
        if begun is not None:
            self._store(start)
        states = self._source.states(begun)
        if self._target is not None:
            states = _bounded(states, self._target, begun)
        self._latest = Positions(ends={key: state.latest for key, state in states.items()})
        if begun is None:
            begins = self._first(states)
            moved = dict(begins)
        else:
            begins, moved = self._follow(begun, states)
        shares = self._shares(begins, states, limit)
        same_streams = begun is not None and begins.keys() == begun.ends.keys()
        if same_streams and not moved and not any(shares.values()):
            self._triggers.note(idle=True)
            return start
        self._triggers.note(idle=False)
        return Positions(
            ends={key: begin + shares.get(key, 0) for key, begin in begins.items()},
            starts=moved,
            groups={key[0]: states[key].group for key in begins if states[key].group},
            rocketmq=self._source.rocketmq,
        ).to_json()

    def reportLatestOffset(self) -> dict[str, object] | None:  # noqa: N802
        """Returns the ends of the streams as `latestOffset` found them, for the query's
        progress."""
        return None if self._latest is None else self._latest.to_json()

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> list[InputPartition]:
        """Returns the tasks of a batch. Asks nobody: a repeated batch gets the same ranges.

        Raises:
            SourceError: the checkpoint is of other streams, or its offsets do not fit each other.
        """
        until = self._parsed(end)
        begun = {} if offsets.is_symbol(start) else self._source.parse(start).ends
        ranges = []
        for key, stop in sorted(until.ends.items()):
            begin = until.starts.get(key, begun.get(key))
            if begin is None or begin > stop:
                raise SourceError(
                    f"the checkpoint's batch ends at {stop} of {self._source.subject(key)} "
                    f"but begins {'nowhere' if begin is None else f'at {begin}'}"
                )
            ranges.append((key, begin, stop))
        return self._source.cut(ranges, until.groups)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task, on another instance."""
        return self._source.read(partition)

    def commit(self, end: dict[str, object]) -> None:
        """Stores progress for people to see; `latestOffset` does it as well, and in time."""
        if not offsets.is_symbol(end):
            self._store(end)

    def stop(self) -> None:
        """Nothing is held that the broker would miss."""

    # --- parts of latestOffset ---------------------------------------------------------------

    def _parsed(self, offset: Mapping[str, object]) -> Positions:
        """Reads an offset of the checkpoint. Raises SourceError: it has none of the streams that
        the options name."""
        found = self._source.parse(offset)
        known = {name for name, _ in found.ends}
        wanted = self._options.streams
        # Of a pattern, the streams that are missing are a loss.
        if known and wanted and known.isdisjoint(wanted):
            raise SourceError(
                f"the checkpoint is of stream {', '.join(sorted(known))}, not of "
                f"{', '.join(wanted)}: a query that reads other streams needs a checkpoint of its "
                "own"
            )
        return found

    def _first(self, states: Mapping[Partition, StreamState]) -> dict[Partition, int]:
        """Returns where a new query begins."""
        source = self._source
        found = source.resolve(self._options.starting, states)
        return {
            key: _kept(self._options, source.subject(key), found[key], state)
            for key, state in states.items()
        }

    def _follow(
        self, begun: Positions, states: Mapping[Partition, StreamState]
    ) -> tuple[dict[Partition, int], dict[Partition, int]]:
        """Returns where the batch behind `begun` begins: (all, those that are not where `begun`
        ended)."""
        options = self._options
        begins: dict[Partition, int] = {}
        moved: dict[Partition, int] = {}
        for key, state in states.items():
            at = begun.ends.get(key)
            if at is None:
                begins[key] = moved[key] = state.earliest
                continue
            known = begun.groups.get(key[0], 0)
            if known and state.group and known != state.group:
                subject = self._source.subject(key)
                lose(
                    options, f"{subject} was deleted and declared again since offset {at} was read"
                )
                begins[key] = moved[key] = state.earliest
            elif at < state.earliest or (state.is_final and at > state.latest):
                begins[key] = moved[key] = _kept(options, self._source.subject(key), at, state)
            else:
                # A new leader may not know its whole log as committed yet: then `latest` is below
                # what was read, and there is nothing new.
                begins[key] = at
        for key, at in begun.ends.items():
            still_wanted = options.pattern is not None or key[0] in options.streams
            if key not in states and still_wanted:
                lose(options, f"{self._source.subject(key)}, read up to offset {at}, was deleted")
        return begins, moved

    def _shares(
        self,
        begins: Mapping[Partition, int],
        states: Mapping[Partition, StreamState],
        limit: ReadLimit,
    ) -> dict[Partition, int]:
        """Returns the rows that each stream gives to the batch."""
        backlog = {key: max(0, states[key].latest - begin) for key, begin in begins.items()}
        allowed = self._triggers.allowed(
            sum(backlog.values()),
            lambda: self._bytes_of(backlog, begins, states),
            limit,
            bounded=self._target is not None,
        )
        return planning.share(allowed, backlog) if allowed else {}

    def _bytes_of(
        self,
        backlog: Mapping[Partition, int],
        begins: Mapping[Partition, int],
        states: Mapping[Partition, StreamState],
    ) -> int:
        total = 0.0
        for key, rows in backlog.items():
            mean = states[key].row_bytes
            if mean is None and rows:
                mean = self._source.row_bytes(key, begins[key])
            total += rows * (mean or 0.0)
        return int(total)

    def _store(self, start: Mapping[str, object]) -> None:
        """Stores what is done under `groupId`. For people: a failure must not end the query."""
        group_id = self._options.group_id
        if group_id is None or start == self._stored:
            return
        try:
            self._source.store(group_id, self._source.parse(start).ends)
        except (BrokerError, ClientError) as error:
            log.warning("progress of group %s is not stored: %s", group_id, error)
        self._stored = start


def _bounded(
    states: Mapping[Partition, StreamState],
    target: Mapping[Partition, int],
    begun: Positions | None,
) -> dict[Partition, StreamState]:
    """Returns the streams as they were when AvailableNow began."""
    known = begun.ends if begun is not None else {}
    bounded = {}
    for key, state in states.items():
        # Declared since: the next run reads it. Unless this query reads it already.
        if key in target or key in known:
            latest = max(min(state.latest, target.get(key, 0)), state.earliest)
            cut_off = state.is_final and latest == state.latest
            bounded[key] = replace(state, latest=latest, is_final=cut_off)
    return bounded


def _kept(options: StreamReadOptions, subject: str, wanted: int, state: StreamState) -> int:
    """Returns the offset itself, or where to go on when it is gone or never was. Raises
    DataLoss."""
    if wanted < state.earliest:
        lose(
            options,
            f"{subject}: offset {wanted} is wanted, the earliest kept is {state.earliest}",
        )
        return state.earliest
    if wanted > state.latest:
        lose(options, f"{subject}: offset {wanted} is wanted, but its end is {state.latest}")
        return state.latest
    return wanted


def source_of(options: StreamReadOptions, schema: StructType) -> Streams:
    """Returns what is read, with the columns of a schema. Raises SchemaError."""
    if options.connection.namesrv:
        from convoymq.spark.rocket_reading import RocketQueues

        return RocketQueues(options, schema)
    return Streams(options, schema)


def lose(options: StreamReadOptions, text: str) -> None:
    """Raises DataLoss, or says that the read goes on."""
    reading.lose(text, fails=options.fail_on_data_loss)


# --- filters ---------------------------------------------------------------------------------

_NEVER_NULL = frozenset({"value", "topic", "partition", "offset", "timestamp", "timestampType"})
_COMPARISONS = (
    EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual,
)  # fmt: skip


def _usable(one: Filter) -> tuple[bool, bool]:
    """Returns (Whether the filter narrows ranges, whether nothing is left of it then)."""
    path: tuple[str, ...] = getattr(one, "attribute", ())
    if len(path) != 1:
        return False, False
    column = path[0]
    if isinstance(one, IsNotNull):
        return False, column in _NEVER_NULL
    value: object = getattr(one, "value", None)
    kinds: tuple[type, ...] = (*_COMPARISONS, In)
    match column:
        case "offset" | "partition":
            used = isinstance(one, kinds) and _all_are(value, int)
            return used, used and (column == "partition" or not isinstance(one, In))
        case "topic":
            used = isinstance(one, (*kinds, StringStartsWith)) and _all_are(value, str)
            return used, used
        case "timestamp":
            known = isinstance(value, datetime) and value.tzinfo is not None
            return isinstance(one, _COMPARISONS) and known, False
        case _:
            return False, False


def _all_are(value: object, kind: type) -> bool:
    values = value if isinstance(value, tuple | list) else (value,)
    return bool(values) and all(type(one) is kind for one in values)


def _offset_range(one: Filter, start: int, end: int) -> tuple[int, int]:
    match one:
        case EqualTo() | EqualNullSafe():
            return one.value, one.value + 1
        case GreaterThan():
            return one.value + 1, end
        case GreaterThanOrEqual():
            return one.value, end
        case LessThan():
            return start, one.value
        case LessThanOrEqual():
            return start, one.value + 1
        case In():
            return min(one.value), max(one.value) + 1
        case _:
            return start, end


def _passes(one: Filter, held: str | int) -> bool:
    match one:
        case EqualTo() | EqualNullSafe():
            return bool(held == one.value)
        case GreaterThan():
            return bool(held > one.value)
        case GreaterThanOrEqual():
            return bool(held >= one.value)
        case LessThan():
            return bool(held < one.value)
        case LessThanOrEqual():
            return bool(held <= one.value)
        case In():
            return held in one.value
        case StringStartsWith():
            return str(held).startswith(one.value)
        case _:
            return True
