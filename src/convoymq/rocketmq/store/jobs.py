"""Work beside the loop that can be interrupted, so that files may be cut under it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from convoymq.model.errors import StorageFault
from convoymq.storage.types import Worker

T = TypeVar("T")


class Interrupted(StorageFault):
    """The work was not done, because the files that it was for were to be cut."""


class Jobs:
    """Jobs of a worker. Those that wait when they are interrupted are not carried out, and those
    whose answer is under way count as such."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._generation = 0

    def submit(
        self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        """Runs `work()` elsewhere, then `done(result, error)`; the error may be Interrupted."""
        generation = self._generation

        def run() -> T:
            with self._lock:
                if generation != self._generation:
                    raise Interrupted("the files were cut")
                return work()

        def answer(result: T | None, error: BaseException | None) -> None:
            if generation != self._generation:
                result, error = None, Interrupted("the files were cut")
            done(result, error)

        self._worker.submit(run, answer)

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Waits for the job under way; no other runs meanwhile, and those that wait never do."""
        with self._lock:
            self._generation += 1
            yield
