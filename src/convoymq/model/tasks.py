"""Tasks of an object: coroutines that go on beside its callers, and end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class Tasks:
    """Coroutines under way. An error that leaves one is raised in the loop, whose handler names it,
    and ends the process for a violated invariant (ADR 0080)."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Runs a coroutine that `stop` cancels and awaits."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # At once, and not when the task's memory is freed.
            task.result()

    async def wait(self, timeout_s: float) -> None:
        """Waits until all have ended, for a time at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def cancel(self) -> None:
        """Cancels all."""
        for task in list(self._tasks):
            task.cancel()

    async def stop(self) -> None:
        """Cancels all and waits for them."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
