"""Work that goes on beside the callers of the broker, and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class Tasks:
    """Coroutines under way."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Runs a coroutine that `stop` cancels and awaits."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """Cancels all and waits for them."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
