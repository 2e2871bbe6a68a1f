"""Large answers to other nodes: made one after another, as the links take them (ADR 0025)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from convoymq.model.clock import Clock
from convoymq.model.errors import Unavailable

if TYPE_CHECKING:
    from convoymq.shells.capacity import Waiting
    from convoymq.transport.interfaces import Transport


class _Request(NamedTuple):
    """One that waits for its turn."""

    until_ms: int
    answer: Callable[[], bool]
    """Makes the answer and sends it; False: it is still being made, `_go_on` is called then."""
    drop: Callable[[], None]


class LargeAnswers:
    """Requests of other nodes whose answers are large; by node, in order.

    Requests wait for room on the link, not answers: nothing is read before it can be sent, and one
    answer to a node is made at a time. Whoever asks gives up after a while, and may ask again: what
    has waited for longer is dropped, as is everything for a node that is lost. So what is kept are
    the requests that other nodes have open, which they bound (`control.OUTSTANDING_MAX`).

    Args:
        await_room: has `on_room(node)` or `on_lost(node)` called, once (`ReplicaHost.await_room`).
    """

    def __init__(
        self, links: Transport, await_room: Callable[[int, Waiting], None], clock: Clock
    ) -> None:
        self._links = links
        self._await_room = await_room
        self._clock = clock
        self._waiting: dict[int, deque[_Request]] = {}
        self._making: set[int] = set()
        """Nodes to which an answer is being made, over several turns of the loop."""

    @property
    def waiting(self) -> int:
        """Requests that are kept."""
        return sum(map(len, self._waiting.values()))

    def when_room(self, node: int, answer: Callable[[], object], until_ms: int) -> None:
        """Calls `answer`, which sends at once, when it is its turn; not any more after `until_ms`
        by the monotonic clock."""

        def made() -> bool:
            answer()
            return True

        self._add(node, _Request(until_ms, made, lambda: None))

    @asynccontextmanager
    async def room(self, node: int, until_ms: int) -> AsyncIterator[None]:
        """Waits likewise. The turn lasts until the block ends; the answer is to be sent in it.

        Raises:
            Unavailable: it waited for too long, or the node is lost.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def begin() -> bool:
            if turn.done():
                return True
            turn.set_result(None)
            return False

        def drop() -> None:
            if not turn.done():
                turn.set_exception(Unavailable("the link to the node that asks has no room"))

        self._add(node, _Request(until_ms, begin, drop))
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._making.discard(node)
                self._go_on(node)

    def on_room(self, node: int) -> None:
        """The link to a node takes bulk again."""
        self._go_on(node)

    def on_lost(self, node: int) -> None:
        """A node for which requests wait is away: it asks again when it is back."""
        for request in self._waiting.pop(node, ()):
            request.drop()

    def _add(self, node: int, request: _Request) -> None:
        waiting = self._waiting.setdefault(node, deque())
        now_ms = self._clock.monotonic_ms()
        while waiting and waiting[0].until_ms <= now_ms:
            waiting.popleft().drop()
        waiting.append(request)
        self._go_on(node)

    def _go_on(self, node: int) -> None:
        if not self._links.is_connected(node):
            self.on_lost(node)
        waiting = self._waiting.get(node)
        while waiting and node not in self._making:
            if node in self._links.full:
                self._await_room(node, self)
                return
            request = waiting.popleft()
            if request.until_ms <= self._clock.monotonic_ms():
                request.drop()
            elif not request.answer():
                self._making.add(node)
        if not waiting:
            self._waiting.pop(node, None)
