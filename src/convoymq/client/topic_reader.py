"""A reader of an ordered topic without a group.

Partitions are read as streams, by any server. `topics.rules.reading.ReadPlan` says which may be
read: a partition that came from others comes after them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from convoymq.client import errors
from convoymq.client.client import MAX_BYTES, MAX_ROWS, Client, Start
from convoymq.client.topic_messages import (
    COLUMNS,
    Hashing,
    TopicMessage,
    contents_of,
    order_keys_of,
)
from convoymq.client.topics import TopicPartition, TopicRoute
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.columns import HEADERS, OFFSET, ROUTING_KEY
from convoymq.topics.rules.reading import DELETED, FIRST_OFFSET, LOST, Readable, ReadPlan
from convoymq.topics.rules.refusals import TopicRefused

REFRESH_S = 0.2
"""A route is looked at again after so long without messages."""
WAIT_MS = 200
"""Longest wait for messages of one partition while others may get some."""
CREATING = "creating"


@dataclass(frozen=True, slots=True)
class TopicRows:
    """Messages of one partition, in their order."""

    pid: int
    route_version: int
    """The route version that created the partition."""
    frame: ColumnFrame
    """Columns as they were asked for. Offsets are those of the stream: one less than those of the
    partition."""
    rows: Sequence[int]
    """Rows of the frame that are this reader's; others came with a merge."""
    hashing: Hashing

    @property
    def first_offset(self) -> int:
        """Returns the offset of the frame's first row, in the partition."""
        return int(self.frame.base) + FIRST_OFFSET

    def messages(self) -> list[TopicMessage]:
        """Returns the messages as objects. Raises ValueError without the columns of
        `topic_messages.COLUMNS`."""
        contents = contents_of(self.frame)
        offsets = self.frame.offsets()
        return [
            TopicMessage(
                contents[row],
                self.pid,
                offsets[row] + FIRST_OFFSET,
                self.route_version,
                self.hashing,
            )
            for row in self.rows
        ]


class TopicReader:
    """See the module text. For one thread.

    Args:
        start: an end, a time (ms since the epoch), or the vector of partitions and offsets of an
            earlier `position`, which gives every logical partition one place.
        at: instead of `start`: begins in these partitions, and reads their logical partitions only.
        ranges: with `at`, the logical partitions to read: `ranges` of an earlier reader.
        columns: bits of `convoymq.kernels.columns`.

    Raises:
        NotFound: no such topic.
        BadPosition: a logical partition has two places, or none though it needs one.
        UnknownPartition: no such partition.
        DataExpired: what is to be read is not kept any more.
    """

    def __init__(
        self,
        client: Client,
        topic: str,
        start: Start = "earliest",
        *,
        at: Mapping[int, int] | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
        columns: int = COLUMNS,
    ) -> None:
        self.topic = topic
        self._client = client
        self._columns = columns
        self._route = client.topic_route(topic)
        self._refreshed_at = time.monotonic()
        self._hashing = Hashing(self._route.logical, self._route.hash_seed)
        self._turn = 0
        try:
            self._plan = self._begin(start, at, ranges)
        except TopicRefused as error:
            raise errors.of_refusal(error) from None

    # --- where it begins -------------------------------------------------------------------

    def _begin(
        self,
        start: Start,
        at: Mapping[int, int] | None,
        ranges: Sequence[tuple[int, int]] | None,
    ) -> ReadPlan:
        route = self._route
        lines = route.partitions
        if at is not None:
            return ReadPlan(lines, at, ranges=ranges)
        if isinstance(start, Mapping):
            return ReadPlan(lines, start, route.logical)
        if start == "latest":
            ends = self._offsets([pid for _, _, pid in route.ranges], "latest")
            return ReadPlan(lines, ends, route.logical)
        # Whatever is gone counts as read; messages of one key are never older in a later partition.
        kept = [line.pid for line in lines if line.state not in (DELETED, LOST, CREATING)]
        if start == "earliest":
            starts = self._offsets(kept, "earliest")
        elif isinstance(start, int):
            starts = self._offsets(kept, "timestamp", start)
        else:
            raise errors.BadPosition(
                f"a position is earliest, latest, a time or a vector, not {start!r}",
                "BAD_POSITION",
            )
        roots = {
            line.pid: starts.get(line.pid, line.close_offset or FIRST_OFFSET)
            for line in lines
            if not line.parents
        }
        return ReadPlan(lines, roots, route.logical, starts=starts)

    def _offsets(self, pids: Sequence[int], what: str, ms: int | None = None) -> dict[int, int]:
        """Returns offsets in partitions; their ends where no message is so young."""
        queries = [(self._stream(pid), what, ms) for pid in pids]
        found = dict(zip(pids, self._client.offsets(queries), strict=True))
        missing = [pid for pid, (offset, _) in found.items() if offset is None]
        ends = self._client.offsets([(self._stream(pid), "latest", None) for pid in missing])
        found.update(zip(missing, ends, strict=True))
        return {pid: (offset or 0) + FIRST_OFFSET for pid, (offset, _) in found.items()}

    def _stream(self, pid: int) -> str:
        return f"amq.partition.{self.topic}.{pid}"

    # --- reading ---------------------------------------------------------------------------

    def read(
        self, wait_s: float = 0.0, *, max_rows: int = MAX_ROWS, max_bytes: int = MAX_BYTES
    ) -> TopicRows | None:
        """Returns the next messages of some partition; None when there were none in time. Raises
        DataExpired, NotFound."""
        until = time.monotonic() + wait_s
        while True:
            found = self._look(0, max_rows, max_bytes)
            if found is None and self._refresh():
                found = self._look(0, max_rows, max_bytes)
            left = until - time.monotonic()
            if found is not None or left <= 0:
                return found
            found = self._look(min(WAIT_MS, int(left * 1000) + 1), max_rows, max_bytes)
            if found is not None:
                return found

    def __iter__(self) -> Iterator[TopicRows]:
        """Yields what there is now, until nothing is left."""
        while (found := self.read()) is not None:
            yield found

    def _look(self, wait_ms: int, max_rows: int, max_bytes: int) -> TopicRows | None:
        """Asks the partitions that may be read, one after the other; waits for the first one."""
        readable = self._plan.readable()
        self._turn += 1
        at = self._turn % max(1, len(readable))
        for place in readable[at:] + readable[:at]:
            found = self._fetch(place, wait_ms, max_rows, max_bytes)
            if found is not None:
                return found
            wait_ms = 0
        return None

    def _fetch(
        self, place: Readable, wait_ms: int, max_rows: int, max_bytes: int
    ) -> TopicRows | None:
        try:
            result = self._client.fetch(
                self._stream(place.pid),
                place.offset - FIRST_OFFSET,
                end=None if place.end is None else place.end - FIRST_OFFSET,
                max_rows=max_rows,
                max_bytes=max_bytes,
                columns=self._wanted(place.pid),
                wait_ms=0 if place.end is not None else wait_ms,
            )
        except errors.OffsetOutOfRange as error:
            raise errors.DataExpired(
                f"offset {place.offset} of partition {place.pid} is not kept: it begins at offset "
                f"{error.first + FIRST_OFFSET}",
                "DATA_EXPIRED",
            ) from None
        except errors.NotFound:
            # It is not open yet, or deleted: the route says which.
            self._refresh(now=True)
            return None
        frame = result.frame
        if not frame.rows:
            return None
        rows = self._mine(place.pid, frame)
        self._advance(place.pid, result.next + FIRST_OFFSET)
        return TopicRows(place.pid, place.created_version, frame, rows, self._hashing)

    def _wanted(self, pid: int) -> int:
        if self._plan.is_partial(pid):
            return self._columns | OFFSET | HEADERS | ROUTING_KEY
        return self._columns | OFFSET

    def _mine(self, pid: int, frame: ColumnFrame) -> Sequence[int]:
        if not self._plan.is_partial(pid):
            return range(frame.rows)
        return [
            row
            for row, key in enumerate(order_keys_of(frame))
            if not key or self._plan.is_mine(self._route.lp_of(key))
        ]

    def _advance(self, pid: int, offset: int) -> None:
        try:
            self._plan.advance(pid, offset)
        except TopicRefused as error:
            raise errors.of_refusal(error) from None

    def _refresh(self, *, now: bool = False) -> bool:
        """Asks for the route again, if that is due; returns whether it has changed."""
        if not now and time.monotonic() < self._refreshed_at + REFRESH_S:
            return False
        known: TopicRoute = self._route
        self._route = self._client.topic_route(self.topic)
        self._refreshed_at = time.monotonic()
        try:
            self._plan.update(self._route.partitions)
        except TopicRefused as error:
            raise errors.of_refusal(error) from None
        before: tuple[TopicPartition, ...] = known.partitions
        return before != self._route.partitions

    # --- where it is -----------------------------------------------------------------------

    @property
    def position(self) -> dict[int, int]:
        """Returns the place to go on from: a vector for `start`, or for `at` with `ranges`."""
        return self._plan.position

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Returns the logical partitions that it reads, as (first, the one behind the last)."""
        return self._plan.ranges
