"""Takes a backup of a running cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from convoymq import __version__
from convoymq.cli.backup.archive import (
    Archive,
    Chunk,
    LeftOut,
    Manifest,
    QueueCopy,
    TopicCopy,
    chunks_of,
)
from convoymq.cli.backup.cluster import Listing, Page, QueueRow, TopicRow
from convoymq.model.errors import Unavailable

IMMUTABLE = ("stream", "partition")
"""Types whose messages never change below the newest one."""
ATTEMPTS = 5
"""Copies of one queue, each from its beginning."""


class Source(Protocol):
    """The cluster, as a backup reads it."""

    def listing(self) -> Listing:
        """See `Cluster`."""

    def page(self, vhost: str, name: str, after: int, upto: int) -> Page:
        """See `Cluster`."""


class _Moved(Exception):
    """Other positions hold for the rest of a queue."""


class Name(NamedTuple):
    """A queue to copy."""

    vhost: str
    name: str
    type: str
    group: int


class Taking:
    """One backup. Earlier ones stay as they are, whatever happens."""

    def __init__(
        self,
        source: Source,
        archive: Archive,
        say: Callable[[str], None],
        *,
        skips: bool = False,
    ) -> None:
        """`skips`: a queue that cannot be read is left out; otherwise the backup fails."""
        self._source = source
        self._archive = archive
        self._say = say
        self._skips = skips
        self._before: dict[tuple[str, str, int], QueueCopy] = {}
        self._left_out: list[LeftOut] = []

    def run(self) -> Manifest:
        """Takes the backup, and returns its manifest, which is in the store then. Raises
        BrokerError: there is no such backup."""
        began_ms = _now_ms()
        found = self._source.listing()
        previous = self._archive.newest(found.cluster_id)
        if previous is not None:
            self._before = {(c.vhost, c.name, c.group): c for c in previous.copies()}
        manifest = Manifest(
            id=self._archive.new_id(),
            cluster=found.cluster,
            cluster_id=found.cluster_id,
            release=__version__,
            began_ms=began_ms,
            definitions=found.definitions,
            left_out=self._left_out,
        )
        for row in found.queues:
            reason = _reason_against(row)
            name = Name(row.vhost, row.name, row.type, row.group)
            if reason:
                self._left_out.append(LeftOut(name.vhost, name.name, reason))
            elif (copy := self._copy(name)) is not None:
                manifest.queues.append(copy)
        for topic in found.topics:
            manifest.topics.append(self._topic(topic))
        manifest.ended_ms = _now_ms()
        self._archive.finish(manifest)
        return manifest

    def _topic(self, row: TopicRow) -> TopicCopy:
        copies = [self._copy(Name(row.vhost, each, "partition", 0)) for each in row.queues]
        return TopicCopy(
            row.vhost, row.name, row.mode, row.logical, row.partitions, row.settings,
            [copy for copy in copies if copy is not None],
        )  # fmt: skip

    def _copy(self, name: Name) -> QueueCopy | None:
        """Copies a queue; None: it is left out, for the reason that is noted."""
        for _ in range(ATTEMPTS):
            try:
                copy = self._copy_once(name)
            except _Moved:
                continue
            except LookupError:
                self._leave_out(name, "it was deleted during the backup")
                return None
            except Unavailable as error:
                if not self._skips:
                    raise
                self._leave_out(name, error.text)
                return None
            self._say(f"{name.vhost} {name.name}: {copy.messages} messages")
            return copy
        text = f"queue '{name.name}' in vhost '{name.vhost}' changed its master again and again"
        if not self._skips:
            raise Unavailable(text)
        self._leave_out(name, text)
        return None

    def _leave_out(self, name: Name, reason: str) -> None:
        self._say(f"{name.vhost} {name.name}: left out: {reason}")
        self._left_out.append(LeftOut(name.vhost, name.name, reason))

    def _copy_once(self, name: Name) -> QueueCopy:
        """Raises _Moved, LookupError, Unavailable."""
        began_ms = _now_ms()
        page = self._source.page(name.vhost, name.name, -1, -1)
        kept: list[Chunk] = []
        if name.type in IMMUTABLE:
            kept = self._kept(name, page)
            if kept:
                # Not the beginning again: what follows the kept chunks.
                page = self._source.page(name.vhost, name.name, _end_of(kept[-1]), page.upto)
        pages = self._pages(name, page)
        chunks = kept + list(chunks_of(pages, self._archive.put))
        return QueueCopy(
            name.vhost, name.name, name.type, page.group, page.upto, began_ms,
            sum(chunk.messages for chunk in chunks), chunks,
        )  # fmt: skip

    def _kept(self, name: Name, page: Page) -> list[Chunk]:
        """Returns the chunks of the last backup that need not be read again: all but the last one,
        which may be short, from the first message on that the stream has."""
        before = self._before.get((name.vhost, name.name, page.group))
        if before is None:
            return []
        kept: list[Chunk] = []
        for chunk, behind in zip(before.chunks, before.chunks[1:], strict=False):
            if behind.first > page.first:
                if not self._archive.has(chunk.sha256):
                    break
                kept.append(chunk)
        return kept

    def _pages(self, name: Name, page: Page) -> Iterator[tuple[int, bytes]]:
        group, source = page.group, page.source
        while True:
            if (page.group, page.source) != (group, source):
                raise _Moved
            yield from page.commands
            if page.is_last:
                return
            page = self._source.page(name.vhost, name.name, page.after, page.upto)


def _end_of(chunk: Chunk) -> int:
    """Returns the position of the last message of a chunk of a stream, whose messages follow each
    other."""
    return chunk.first + chunk.messages - 1


def _reason_against(row: QueueRow) -> str:
    """Returns the reason for which a queue is in no backup."""
    if row.exclusive:
        return "it is exclusive: it ends with its connection"
    return "" if row.durable else "it is not durable"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
