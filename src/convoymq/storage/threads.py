"""The worker of a real node, one thread for slow file work, and the pace of its bulk copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from convoymq.model.errors import InvariantViolated
from convoymq.storage.types import Job, T

COPY_RATE = 8 << 20
"""Bytes per second that may be copied beside small flushes without making them wait."""
LOG_SHARE = 4
WAITING_SHARE = 4
"""Factor by which it goes faster while other work waits for the worker."""
BULK_RATE = 16 << 20
"""Bytes per second of the log from which on nobody counts single milliseconds."""
RATE_WINDOW_S = 0.1


class ThreadWorker:
    """Runs work in order on a thread; answers on the caller's.

    Args:
        post: runs a callable soon on the caller's thread (an event loop's `call_soon_threadsafe`).
        name: of the thread.
    """

    def __init__(
        self, post: Callable[[Callable[[], None]], object], *, name: str = "storage"
    ) -> None:
        self._post = post
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.closing = False
        self._thread: threading.Thread | None = None
        """Started by the first job."""

    def submit(
        self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        """Runs `work()`, then `done(result, error)`."""
        self._jobs.put((work, done))
        if self._thread is None and not self.closing:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    @property
    def others_wait(self) -> bool:
        """Returns whether work waits for the one that runs."""
        return not self._jobs.empty()

    def close(self) -> None:
        """Finishes what was submitted and ends the thread. The last answers may never arrive."""
        self.closing = True
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            work, done = job
            result: object = None
            failure: BaseException | None = None
            try:
                result = work()
            except Exception as error:  # the top of this thread: the loop must hear of everything
                failure = error
            except InvariantViolated as error:
                done = partial(_raise, error)
            try:
                self._post(lambda d=done, r=result, f=failure: d(r, f))  # type: ignore[misc]
            except RuntimeError:
                return  # the loop is closed: nobody is left to hear it


def _raise(violated: InvariantViolated, _result: object, _failure: object) -> None:
    """Answers a job that found what must not be: the process ends where its loop is."""
    raise violated


class DiskPace:
    """Bulk copies at a rate that leaves the disk to the log's flushes.

    A quiet disk takes COPY_RATE; beside a busy log it is LOG_SHARE times the log's own rate, so
    what is copied never falls behind; a log that is filled in bulk wants speed, not short flushes.

    Args:
        worker: whose thread copies.
        logged: bytes that the log has written so far.
        pressed: whether full log files pile up.
    """

    def __init__(
        self, worker: ThreadWorker, logged: Callable[[], int], pressed: Callable[[], bool]
    ) -> None:
        self._worker = worker
        self._logged = logged
        self._pressed = pressed
        self._seen = logged()
        self._seen_at = time.monotonic()
        self._log_rate = 0.0

    def is_urgent(self) -> bool:
        """See `Pace`."""
        now = time.monotonic()
        passed = now - self._seen_at
        if passed >= RATE_WINDOW_S:
            logged = self._logged()
            self._log_rate = (logged - self._seen) / passed
            self._seen, self._seen_at = logged, now
        return self._worker.closing or self._pressed() or self._log_rate > BULK_RATE

    def rest(self, count: int) -> None:
        """See `Pace`."""
        rate = max(COPY_RATE, LOG_SHARE * self._log_rate)
        if self._worker.others_wait:
            rate *= WAITING_SHARE
        time.sleep(count / rate)
