"""The thread that writes traces: it takes rows over and never holds the event loop up.

What goes wrong with a queue's files (a full disk) ends the coverage there: rows are dropped until
the recorder has heard of it and says `resume`, so that no mark can claim rows that are not there.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from convoymq.trace import segments
from convoymq.trace.segments import Origin, Segment

log = structlog.get_logger()

NICENESS = 10
"""The thread yields to the broker's own work where cores are scarce."""


class Feed:
    """One queue's way to the thread. Attributes are written by one side and read by the other."""

    def __init__(self, origin: Origin, directory: Path) -> None:
        self.origin = origin
        self.directory = directory
        self.segment: Segment | None = None
        self.failed = False
        """Rows are being dropped; set by the thread, cleared by it at `resume`."""
        self.journal_bytes = 0
        """Size of the open journal."""


class Writer:
    """See the module text. Methods are called on the event loop, and return at once.

    Args:
        root: the node's trace directory.
        retention_bytes: segments that are kept, oldest go first.
        backlog_max_bytes: rows that may wait for the thread.
    """

    def __init__(self, root: Path, *, retention_bytes: int, backlog_max_bytes: int) -> None:
        self.root = root
        self.retention_bytes = retention_bytes
        self.backlog_max_bytes = backlog_max_bytes
        self.errors = 0
        """Files that could not be written."""
        self._handed = 0
        self._done = 0
        self._closing = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    @property
    def overloaded(self) -> bool:
        """Returns whether more rows wait than may."""
        return self._handed - self._done > self.backlog_max_bytes

    def open(self, feed: Feed) -> None:
        """Begins a queue: what its earlier incarnations left as journals becomes segments."""
        self._work.put(lambda: self._open(feed))

    def write(self, feed: Feed, rows: int, data: bytes) -> None:
        """Takes rows over."""
        size = len(data)
        self._handed += size
        self._work.put(lambda: self._write(feed, rows, data))

    def rotate(self, feed: Feed) -> None:
        """Completes the open segment."""
        self._work.put(lambda: self._rotate(feed))

    def resume(self, feed: Feed) -> None:
        """Allows what comes from now on to be written again, to a new segment."""
        self._work.put(lambda: self._resume(feed))

    def close(self, timeout_s: float) -> bool:
        """Does what was given and ends the thread; False when that took too long (what is left is
        completed when the node starts again). The caller's thread takes over behind what the other
        one is at: that one has a low priority, and a busy machine would let it wait."""
        deadline = time.monotonic() + timeout_s
        self._closing = True
        self._work.put(None)
        self._thread.join(timeout_s)
        while not (self._thread.is_alive() or self._work.empty()):
            if time.monotonic() > deadline:
                return False
            self._do(self._work.get())
        return not self._thread.is_alive()

    # --- on the thread, and on the caller at the end ----------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._closing:
            self._do(self._work.get())

    def _do(self, work: Callable[[], None] | None) -> None:
        try:
            if work is not None:
                work()
        except Exception:
            # The top of the thread: a fault here must not end the traces of all queues.
            self.errors += 1
            log.exception("trace.fault")

    def _open(self, feed: Feed) -> None:
        for file in segments.files_of(feed.directory, feed.origin):
            if file.is_journal and file.incarnation != feed.origin.incarnation:
                origin = Origin(
                    vhost=feed.origin.vhost,
                    queue=feed.origin.queue,
                    type=feed.origin.type,
                    group=feed.origin.group,
                    node=feed.origin.node,
                    incarnation=file.incarnation,
                )
                try:
                    segments.convert(file.path, origin)
                except OSError as error:
                    self._note(feed, error)

    def _write(self, feed: Feed, rows: int, data: bytes) -> None:
        self._done += len(data)
        if feed.failed:
            return
        try:
            if feed.segment is None:
                feed.segment = Segment(feed.directory, feed.origin)
            feed.segment.write(rows, data)
            feed.journal_bytes = feed.segment.bytes
        except OSError as error:
            self._fail(feed, error)

    def _rotate(self, feed: Feed) -> None:
        if feed.failed or feed.segment is None:
            return
        feed.journal_bytes = 0
        try:
            feed.segment.finish()
            segments.trim(self.root, self.retention_bytes)
        except OSError as error:
            self._fail(feed, error)

    def _resume(self, feed: Feed) -> None:
        feed.failed = False
        feed.journal_bytes = 0

    def _fail(self, feed: Feed, error: OSError) -> None:
        self._note(feed, error)
        if feed.segment is not None:
            feed.segment.abandon()
        feed.failed = True

    def _note(self, feed: Feed, error: OSError) -> None:
        self.errors += 1
        origin = feed.origin
        log.error("trace.not_written", vhost=origin.vhost, queue=origin.queue, reason=str(error))
