"""The worker of a real node: one thread for slow file work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_Job = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]


class ThreadWorker:
    """Runs work in order on a thread; answers on the caller's.

    Args:
        post: runs a callable soon on the caller's thread (an event loop's `call_soon_threadsafe`).
    """

    def __init__(self, post: Callable[[Callable[[], None]], object]) -> None:
        self._post = post
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Runs `work()`, then `done(result, error)`."""
        self._jobs.put((work, done))

    def close(self) -> None:
        """Finishes what was submitted and ends the thread. The last answers may never arrive."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            work, done = job
            result: Any = None
            failure: BaseException | None = None
            try:
                result = work()
            except Exception as error:  # the top of this thread: the loop must hear of everything
                failure = error
            try:
                self._post(lambda d=done, r=result, f=failure: d(r, f))  # type: ignore[misc]
            except RuntimeError:
                return  # the loop is closed: nobody is left to hear it
