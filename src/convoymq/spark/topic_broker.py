"""Requests of the driver to the broker about one ordered topic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoymq.client.errors import AccessRefused, NotFound
from convoymq.spark import clients
from convoymq.spark.broker import read_refusal, sample_row_bytes
from convoymq.spark.errors import SourceError
from convoymq.spark.option_values import EARLIEST, LATEST
from convoymq.spark.topic_planning import Cut, History, check_vector, placed
from convoymq.topics.rules.lineage import FIRST_USER_OFFSET, Partition, PartitionState

if TYPE_CHECKING:
    from convoymq.client import Client
    from convoymq.client.topics import TopicPartition, TopicRoute
    from convoymq.spark.options import Place, StreamReadOptions

LOST = "lost"
"""State of a partition whose end nobody knows, and for which an operator has given it up."""
BEHIND_WAIT_MS = 5000
QUERIES_MAX = 500
"""Of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionNow:
    """A partition, now. Offsets are those of the partition."""

    group: int
    """Raft group."""
    first: int
    """The first that is kept."""
    end: int
    """Behind its last message."""
    row_bytes: float | None
    """Mean size of the messages that are kept; None where the node that was asked has none."""


class Topic:
    """The topic of one read."""

    def __init__(self, options: StreamReadOptions) -> None:
        assert options.topic is not None
        self._options = options
        self.name = options.topic

    @property
    def client(self) -> Client:
        """Returns the client of this process."""
        return clients.connect(self._options.connection)

    def history(self, version: int = 0) -> History:
        """Returns all partitions that the topic ever had.

        Args:
            version: a route version that it has had; a node that is behind is waited for.

        Raises:
            SourceError: there is no such topic, or the node does not come to know the version.
            AccessRefused: it may not be read.
        """
        try:
            found = self.client.topic_route(
                self.name, newer_than=version - 1, wait_ms=BEHIND_WAIT_MS
            )
        except NotFound as error:
            hint = "; option subscribe reads streams" if self._is_stream() else ""
            raise SourceError(f"{error.text}{hint}") from None
        return history_of(found)

    def _is_stream(self) -> bool:
        return bool(self.client.metadata(names=[self.name]))

    def now(self, history: History, pids: Collection[int]) -> dict[int, PartitionNow]:
        """Returns the state of partitions, those left out that are out of reach.

        Raises:
            AccessRefused: the user may not read one of them.
        """
        wanted = sorted(pid for pid in pids if not history.is_out_of_reach(pid))
        groups = self._groups(wanted)
        for pid in wanted:
            if pid not in groups:
                self._check_readable(pid)
        there = [pid for pid in wanted if pid in groups]
        asked = [(pid, "earliest") for pid in there]
        # The end of a closed partition is known; whoever leads it since then may not know it yet.
        asked += [(pid, "latest") for pid in there if history.partitions[pid].close_offset is None]
        found = dict(zip(asked, self._offsets([(*each, None) for each in asked]), strict=True))
        made = {}
        for pid in there:
            close = history.partitions[pid].close_offset
            first = found[pid, "earliest"] or FIRST_USER_OFFSET
            end = close if close is not None else found[pid, "latest"] or FIRST_USER_OFFSET
            group, size = groups[pid]
            kept = max(end - first, 1)
            made[pid] = PartitionNow(
                group=group,
                first=first,
                end=max(end, first),
                row_bytes=None if size is None else size / kept,
            )
        return made

    def _check_readable(self, pid: int) -> None:
        """Raises AccessRefused when a partition is not listed because the user may not read it."""
        refusal = read_refusal(self.client, partition_queue(self.name, pid))
        if isinstance(refusal, AccessRefused):
            raise AccessRefused(
                f"partition {pid} of topic {self.name} may not be read: {refusal.text}. Reading a "
                f"topic needs read on {self.name} and on the names amq.partition.{self.name}.PID "
                "of all partitions"
            ) from None

    def _groups(self, pids: Collection[int]) -> dict[int, tuple[int, int | None]]:
        """Returns Raft group and size of partitions. The node that is asked may be behind: when
        it lacks one, it is asked for what is true now."""
        names = {partition_queue(self.name, pid): pid for pid in pids}
        found: dict[int, tuple[int, int | None]] = {}
        for current in (False, True):
            missing = [name for name, pid in names.items() if pid not in found]
            for at in range(0, len(missing), QUERIES_MAX):
                part = missing[at : at + QUERIES_MAX]
                for info in self.client.metadata(part, types=("partition",), current=current):
                    found[names[info.name]] = (info.group, info.bytes)
        return found

    def _offsets(self, queries: list[tuple[int, str, int | None]]) -> list[int | None]:
        """Returns offsets of partitions: (partition, what, time in ms) each."""
        asked = [(partition_queue(self.name, pid), what, ms) for pid, what, ms in queries]
        found: list[int | None] = []
        for at in range(0, len(asked), QUERIES_MAX):
            for offset, _ in self.client.offsets(asked[at : at + QUERIES_MAX]):
                found.append(None if offset is None else offset + FIRST_USER_OFFSET)
        return found

    def at_time(self, now: Mapping[int, PartitionNow], ms: int) -> dict[int, int | None]:
        """Returns the first message at or after a time, by partition; None = there is none."""
        found = self._offsets([(pid, "timestamp", ms) for pid in now])
        return dict(zip(now, found, strict=True))

    # --- places ------------------------------------------------------------------------------

    def start(self, place: Place, history: History, now: Mapping[int, PartitionNow]) -> Cut:
        """Returns the cut that a place stands for.

        Args:
            now: of all partitions.

        Raises:
            SourceError: offsets by partition that are no cut; or no message is as young as the
                timestamp and the strategy is `error`.
        """
        if place.kind == "latest":
            return {pid: _end_of(now, pid) for pid in history.open_pids()}
        if place.kind == "offsets":
            offsets = self._given(place)
            check_vector(history, offsets)
            return {pid: _resolved(now, pid, offset) for pid, offset in offsets.items()}
        if place.kind == "earliest":
            return placed(history, lambda pid: _first_of(now, pid))
        return placed(history, self._by_time(place, history, now))

    def limits(
        self, place: Place, history: History, now: Mapping[int, PartitionNow]
    ) -> dict[int, int]:
        """Returns where a read of all partitions ends, by partition. Raises SourceError: offsets by
        partition that are no cut."""
        if place.kind == "offsets":
            offsets = self._given(place)
            check_vector(history, offsets)
            # What comes before them is read whole, and nothing of what comes after them.
            before = history.with_ancestors(offsets) - offsets.keys()
            whole = {pid: _end_of(now, pid) for pid in before}
            ends = {pid: _resolved(now, pid, offset) for pid, offset in offsets.items()}
            return whole | ends
        if place.kind == "timestamps":
            assert place.timestamp_ms is not None
            firsts = self.at_time(now, place.timestamp_ms)
            return {pid: _end_of(now, pid) if at is None else at for pid, at in firsts.items()}
        return {pid: each.end for pid, each in now.items()}

    def _given(self, place: Place) -> dict[int, int]:
        return {pid: offset for (_, pid), offset in place.by_partition.items()}

    def _by_time(
        self, place: Place, history: History, now: Mapping[int, PartitionNow]
    ) -> Callable[[int], int]:
        assert place.timestamp_ms is not None
        firsts = self.at_time(now, place.timestamp_ms)
        if place.late == "error" and all(at is None for at in firsts.values()):
            raise SourceError(
                f"topic {history.topic} has no message at or after the time {place.timestamp_ms} "
                "ms; startingOffsetsByTimestampStrategy=latest begins at its end"
            )

        def begin(pid: int) -> int:
            at = firsts.get(pid)
            return _end_of(now, pid) if at is None else at

        return begin

    def sample_row_bytes(self, pid: int, offset: int) -> float:
        """Mean size of the messages of a partition from an offset on, by reading some."""
        stream = partition_queue(self.name, pid)
        return sample_row_bytes(self.client, stream, offset - FIRST_USER_OFFSET)


def partition_queue(topic: str, pid: int) -> str:
    """Returns the name under which a partition is read as a stream."""
    return f"amq.partition.{topic}.{pid}"


def history_of(route: TopicRoute) -> History:
    """Returns the history that a route with lineage has. Raises SourceError."""
    return History(
        topic=route.topic,
        created_ms=route.created_ms,
        version=route.version,
        logical=route.logical,
        hash_seed=route.hash_seed,
        partitions={row.pid: _line(row) for row in route.partitions},
        lost=frozenset(row.pid for row in route.partitions if row.state == LOST),
    )


def _line(row: TopicPartition) -> Partition:
    """Returns the line of the lineage. Raises SourceError: a state that is not known."""
    try:
        state = PartitionState("sealed" if row.state == LOST else row.state)
    except ValueError:
        raise SourceError(f"partition {row.pid} is {row.state}: this is not known") from None
    return Partition(
        row.pid,
        row.lo,
        row.hi,
        row.created_version,
        sealed_version=row.sealed_version,
        close_offset=row.close_offset,
        parents=row.parents,
        children=row.children,
        state=state,
    )


def _first_of(now: Mapping[int, PartitionNow], pid: int) -> int:
    return now[pid].first if pid in now else FIRST_USER_OFFSET


def _end_of(now: Mapping[int, PartitionNow], pid: int) -> int:
    return now[pid].end if pid in now else FIRST_USER_OFFSET


def _resolved(now: Mapping[int, PartitionNow], pid: int, offset: int) -> int:
    if offset == EARLIEST:
        return _first_of(now, pid)
    return _end_of(now, pid) if offset == LATEST else max(offset, FIRST_USER_OFFSET)
