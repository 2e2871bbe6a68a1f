"""Moves messages from a source to a sink: read, store, and only then let go.

    source.next ──▶ sink.store ──▶ source.done
                        └─ refused ─▶ source.dead_letter

Nothing is remembered here: after a crash at any step the source gives again what it was not told to
let go, and the sink drops what it has. One batch is under way at a time, so that both stay bounded.
What cannot be reached is tried again for ever; a refusal is the source's to keep, or the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import structlog

from convoymq.client.errors import ClientError
from convoymq.model.errors import BrokerError
from convoymq.rocketmq.acting.escape import Key

log = structlog.get_logger()

M = TypeVar("M")
R = TypeVar("R")


class BridgeStopped(BrokerError):
    """An operator has to act."""


@dataclass(frozen=True, slots=True)
class Item(Generic[M]):
    """A message and the record that it comes from: the same each time it is read."""

    key: Key
    message: M


class Source(Protocol[M]):
    """Gives messages in order, and again until they are done."""

    async def next(self) -> Sequence[Item[M]]:
        """Returns messages behind those that are done; none when there are none yet."""

    async def done(self, items: Sequence[Item[M]]) -> None:
        """Lets go of what `next` returned."""

    async def dead_letter(self, item: Item[M], reason: str) -> None:
        """Keeps a message in the place for dead letters, once."""


class Sink(Protocol[M]):
    """Stores messages, each once as far as it can."""

    def lanes(self, items: Sequence[Item[M]]) -> Sequence[Sequence[Item[M]]]:
        """Returns messages in parts that need no order among each other."""

    async def store(self, items: Sequence[Item[M]]) -> tuple[int, str | None]:
        """Stores messages of a lane in order. Returns how many are safe, and the reason why the
        one behind them is refused, if it is. What is behind that was not sent, or is known."""


async def again(name: str, call: Callable[[], Awaitable[R]], retry_s: float) -> R:
    """Calls until that succeeds. Raises BridgeStopped."""
    waits = False
    while True:
        try:
            found = await call()
        except BridgeStopped:
            raise
        except (BrokerError, ClientError, OSError) as error:
            if not waits:
                log.warning("rocketmq.bridge_waits", bridge=name, reason=str(error))
            waits = True
            await asyncio.sleep(retry_s)
            continue
        if waits:
            log.info("rocketmq.bridge_goes_on", bridge=name)
        return found


class Pump(Generic[M]):
    """See the module text.

    Args:
        dead_letters: whether a refused message is kept by the source; else it ends the bridge.
    """

    def __init__(
        self, name: str, source: Source[M], sink: Sink[M], *, dead_letters: bool, retry_ms: int
    ) -> None:
        self._name = name
        self._source = source
        self._sink = sink
        self._dead_letters = dead_letters
        self._retry_s = retry_ms / 1000

    async def run(self) -> None:
        """Moves messages. Raises BridgeStopped."""
        while True:
            await self.step()

    async def step(self) -> None:
        """Moves what comes next."""
        items = await self._again(self._source.next)
        if not items:
            return
        await asyncio.gather(*map(self._move, self._sink.lanes(items)))
        await self._again(lambda: self._source.done(items))

    async def _move(self, items: Sequence[Item[M]]) -> None:
        while items:
            count, reason = await self._again(partial(self._sink.store, items))
            if reason is not None:
                await self._refuse(items[count], reason)
                count += 1
            items = items[count:]

    async def _refuse(self, item: Item[M], reason: str) -> None:
        log.warning("rocketmq.bridge_refused", bridge=self._name, key=str(item.key),
                    reason=reason, kept=self._dead_letters)  # fmt: skip
        if not self._dead_letters:
            raise BridgeStopped(f"message {item.key} is refused: {reason}")
        await self._again(lambda: self._source.dead_letter(item, reason))

    async def _again(self, call: Callable[[], Awaitable[R]]) -> R:
        return await again(self._name, call, self._retry_s)
