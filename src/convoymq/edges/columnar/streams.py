"""Requirements of this server on queues beyond `queues.interface`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from convoymq.streamlog.read_descriptor import ReadDescriptor

Run: TypeAlias = (
    tuple[bytes, int, int, int, int, int] | tuple[bytes, int, int, int, int, int, int, int]
)
"""(block, command, first record, count, offset of it, time in ms) of rows; from a reservation or a
queue also (…, times acquired, failed deliveries)."""


class Chunks(Protocol):
    """Rows of a stream, where they lie."""

    first: int
    """The first offset that is kept."""
    high: int
    """The committed end as known here."""
    runs: Sequence[Run]


class Stream(Protocol):
    """A stream; see `queues.stream.queue.StreamQueue`."""

    group: int
    """Raft group of the stream: another stream of the same name has another."""

    def machine(self) -> object | None:
        """Returns the replica of this node; None = rows come from another node."""

    def bounds(self) -> tuple[int, int]:
        """Returns (first kept, next) as known here; (0, 0) without a replica."""

    async def where(self) -> tuple[int, int, int, int]:
        """Returns (first kept, next, bytes, offset of the last chunk), from whoever is near."""

    async def fetch_chunks(
        self, offset: int, end: int | None, max_rows: int, max_bytes: int, wait_ms: int
    ) -> Chunks:
        """Returns the rows from exactly `offset` on; none at the committed end."""

    def read_descriptor(self, offset: int, end: int | None) -> ReadDescriptor | None:
        """Returns the place of rows from `offset` on in a file of this node; None when there is
        none."""

    async def offsets(self, what: str, ms: int | None) -> tuple[int | None, int | None]:
        """Returns (offset, time in ms)."""

    async def store_offset(self, name: str, offset: int) -> None:
        """Remembers how far a named consumer is."""

    async def query_offset(self, name: str) -> int | None:
        """Returns the stored offset."""
