"""A flusher and a worker without threads: they do their work at once, or when a test says so."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence

from convoymq.storage.types import File, Job, StorageFault, T


class InlineFlusher:
    """Writes and syncs at once, answers when `run` is called (`automatic`: at once)."""

    def __init__(self, *, automatic: bool = False) -> None:
        self.on_completed: Callable[[object, int], None] | None = None
        self.automatic = automatic
        self.held: tuple[File, int, list[bytes], object] | None = None
        self._running = False

    def submit(self, file: File, offset: int, buffers: Sequence[bytes], token: object) -> None:
        assert self.held is None, "one flush at a time"
        self.held = (file, offset, list(buffers), token)
        if self.automatic and not self._running:
            self._running = True
            try:
                while self.run():
                    pass
            finally:
                self._running = False

    def run(self) -> bool:
        """Carries out the flush in flight; False when there is none."""
        if self.held is None:
            return False
        file, offset, buffers, token = self.held
        code = 0
        try:
            file.pwrite(buffers, offset)
            file.sync()
        except OSError as error:
            code = error.errno or errno.EIO
        self.held = None
        assert self.on_completed is not None
        self.on_completed(token, code)
        return True


class InlineWorker:
    """Runs work when `run` is called (`automatic`: at once, in the order of submission)."""

    def __init__(self, *, automatic: bool = False) -> None:
        self.automatic = automatic
        self._jobs: deque[Job] = deque()
        self._running = False

    def submit(
        self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        self._jobs.append((work, done))
        if self.automatic and not self._running:
            self._running = True
            try:
                while self.run():
                    pass
            finally:
                self._running = False

    @property
    def waiting(self) -> int:
        """Jobs not yet run."""
        return len(self._jobs)

    def close(self) -> None:
        """Runs what was submitted."""
        while self.run():
            pass

    def run(self) -> bool:
        """Runs the oldest job; False when there is none."""
        if not self._jobs:
            return False
        work, done = self._jobs.popleft()
        result: object = None
        failure: BaseException | None = None
        try:
            result = work()
        except (OSError, StorageFault) as error:
            failure = error
        done(result, failure)
        return True
