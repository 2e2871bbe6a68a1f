"""Commands that wait until the link to a node takes bulk again (ADR 0025)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from convoymq.shells.capacity import Waiting
    from convoymq.transport.interfaces import Transport


Item = TypeVar("Item")


class HeldBack(Generic[Item]):
    """Items by node, in order. While one waits for a node, later ones wait behind it.

    Args:
        await_room: has `owner.on_room(node)` or `owner.on_lost(node)` called, once
            (`ReplicaHost.await_room`).
        owner: passes `on_room` on to `send`; what a lost node means is its own matter.
    """

    __slots__ = ("_await_room", "_items", "_links", "_owner")

    def __init__(
        self, links: Transport, await_room: Callable[[int, Waiting], None], owner: Waiting
    ) -> None:
        self._links = links
        self._await_room = await_room
        self._owner = owner
        self._items: dict[int, deque[Item]] = {}

    def __contains__(self, node: int) -> bool:
        return node in self._items

    def add(self, node: int, item: Item) -> bool:
        """Keeps an item when the link is full or others wait; False: it is to be sent now."""
        waiting = self._items.get(node)
        if waiting is None:
            if node not in self._links.full:
                return False
            waiting = self._items[node] = deque()
            self._await_room(node, self._owner)
        waiting.append(item)
        return True

    def send(self, node: int, send: Callable[[Item], object]) -> None:
        """Sends in order until the link is full again."""
        waiting = self._items.pop(node, None)
        while waiting and node not in self._links.full:
            send(waiting.popleft())
        if waiting:
            self._items[node] = waiting
            self._await_room(node, self._owner)

    def forget(self, node: int) -> None:
        """Drops what waits for a node."""
        self._items.pop(node, None)

    def clear(self) -> None:
        """Drops everything."""
        self._items.clear()
