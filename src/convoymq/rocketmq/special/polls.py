"""Pops that wait for messages, by topic, group and queue."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

ANY_QUEUE = -1


class Polls:
    """Each message that arrives wakes one pop of each group, the one that has waited longest.

    Args:
        each_max: of one topic, group and queue.
        all_max: of all.
    """

    def __init__(self, each_max: int, all_max: int) -> None:
        self._each_max = each_max
        self._all_max = all_max
        self._waiting: dict[tuple[str, str, int], deque[asyncio.Future[None]]] = {}
        self._groups: dict[str, dict[str, Counter[int]]] = {}
        """Topic -> group -> queue -> how many wait."""
        self.count = 0

    def counted(self, topic: str, group: str, queue: int) -> int:
        """Returns how many wait."""
        return len(self._waiting.get((topic, group, queue), ()))

    def is_full(self, topic: str, group: str, queue: int) -> bool:
        """Returns whether no more may wait."""
        return self.count >= self._all_max or self.counted(topic, group, queue) >= self._each_max

    async def wait(self, topic: str, group: str, queue: int, timeout_s: float) -> bool:
        """Waits for a message; returns whether there may be one."""
        place = (topic, group, queue)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(place, deque())
        line.append(future)
        self._groups.setdefault(topic, {}).setdefault(group, Counter())[queue] += 1
        self.count += 1
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        finally:
            self._leave(place, future)
        return True

    def _leave(self, place: tuple[str, str, int], future: asyncio.Future[None]) -> None:
        topic, group, queue = place
        line = self._waiting.get(place)
        if line is not None and future in line:
            line.remove(future)
        if not line:
            self._waiting.pop(place, None)
        groups = self._groups[topic]
        groups[group][queue] -= 1
        groups[group] += Counter()
        if not groups[group]:
            del groups[group]
        if not groups:
            del self._groups[topic]
        self.count -= 1

    def groups(self, topic: str) -> list[str]:
        """Returns the groups whose pops of a topic wait."""
        return list(self._groups.get(topic, ()))

    def wake(self, topic: str, group: str, queue: int) -> None:
        """A message arrived, or became visible, in a queue."""
        for place in {(topic, group, ANY_QUEUE), (topic, group, queue)}:
            line = self._waiting.get(place)
            while line:
                future = line.popleft()
                if not future.done():
                    future.set_result(None)
                    break

    def wake_any(self, topic: str, group: str) -> None:
        """A message came back, which a pop from any queue may have."""
        queues = self._groups.get(topic, {}).get(group)
        if queues:
            self.wake(topic, group, min(queues))

    def wake_all(self) -> None:
        """Ends all waits, so that each waiting request looks again."""
        for line in list(self._waiting.values()):
            for future in line:
                if not future.done():
                    future.set_result(None)
