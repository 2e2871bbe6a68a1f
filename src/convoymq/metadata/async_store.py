"""The store of the replicated tree for coroutines."""

from __future__ import annotations

import asyncio

from convoymq.kernels.batch import CommandBuilder
from convoymq.metadata.commands import Command
from convoymq.metadata.machine import MetadataMachine
from convoymq.metadata.store import MetadataStore, too_slow
from convoymq.model.clock import Clock
from convoymq.model.errors import BrokerError, Unavailable

DEADLINE_S = 30.0


class AsyncMetadataStore(MetadataStore):
    """A `MetadataStore` whose answers can be awaited."""

    def __init__(
        self, machine: MetadataMachine, builder: CommandBuilder, session: int, clock: Clock
    ) -> None:
        super().__init__(machine, builder, session, clock)
        self._leader_known = asyncio.Event()

    async def execute(self, command: Command, timeout: float = DEADLINE_S) -> object:
        """Applies a command in the whole cluster and returns its reply.

        Raises:
            Refused: the tree says no.
            Unavailable: no answer in time; the command may still be applied later.
            ResourceExhausted: too many commands wait.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[object, BrokerError | None]] = loop.create_future()

        def done(reply: object, error: BrokerError | None) -> None:
            if not answer.done():
                answer.set_result((reply, error))

        submitted = self.submit(command, done)
        timer = loop.call_later(timeout, lambda: done(None, too_slow()))
        try:
            reply, error = await answer
        finally:
            timer.cancel()
            submitted.abandon()
        if error is not None:
            raise error
        return reply

    async def wait_for_leader(self, timeout: float) -> None:
        """Waits until a leader of the tree is known. Raises Unavailable."""
        try:
            async with asyncio.timeout(timeout):
                await self._leader_known.wait()
        except TimeoutError:
            raise Unavailable("the metadata store has no leader") from None

    def on_leader(self, group: int, leader: int | None, term: int) -> None:
        """See `MetadataStore`."""
        if leader is None:
            self._leader_known.clear()
        else:
            self._leader_known.set()
        super().on_leader(group, leader, term)
