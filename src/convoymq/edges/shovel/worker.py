"""A shovel at work on the node that runs it: connects both ends, moves messages, tries again.

starting ──both ends──▶ running ──a fault──▶ terminated ──after the delay──▶ starting
                           └──all is moved──▶ done: its parameter is deleted
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from convoymq.broker.shovel_uris import ShovelUri, uri_of, without_credentials
from convoymq.broker.shovels import AMQP_10, ON_CONFIRM, QUEUE_LENGTH, Shovel
from convoymq.edges.shovel.ends import Confirm, Destination, EndFailed, Inside, Source
from convoymq.edges.shovel.forwarding import Forwarding
from convoymq.edges.shovel.ledger import Ledger
from convoymq.model.errors import BrokerError
from convoymq.queues.interface import Row

log = structlog.get_logger()

E = TypeVar("E")
STARTING, RUNNING, TERMINATED = "starting", "running", "terminated"
BLOCKED = "blocked"


class _Done(Exception):
    """All that the shovel was to move is settled."""


@dataclass(slots=True)
class _Run:
    """One run, which is connected."""

    source: Source
    destination: Destination
    source_uri: str
    destination_uri: str
    forwarding: Forwarding
    ledger: Ledger
    room: asyncio.Event
    """Set when one more message may be wanted."""


class Worker:
    """See the module text.

    Args:
        cluster: name of the cluster.
        inside: connects to this node's own edges.
        finished: deletes the shovel's parameter.
    """

    def __init__(
        self,
        shovel: Shovel,
        cluster: str,
        inside: Inside,
        finished: Callable[[Shovel], Coroutine[object, object, object]],
    ) -> None:
        self.shovel = shovel
        self._cluster = cluster
        self._inside = inside
        self._finished = finished
        self._state = STARTING
        self._reason = ""
        self._since_s = time.time()
        self._run_now: _Run | None = None
        self._forwarded = 0

    async def run(self) -> None:
        """Moves messages until it is cancelled, or all is moved."""
        shovel = self.shovel
        while True:
            self._enter(STARTING, self._reason)
            try:
                if await self._run_once():
                    # Without its parameter it is cancelled.
                    log.info("shovel.finished", vhost=shovel.vhost, shovel=shovel.name)
                    await self._finished(shovel)
                    return
            except (EndFailed, BrokerError) as error:
                self._failed(str(error))
            except Exception:
                self._enter(TERMINATED, "internal error")
                log.exception("shovel.failed", vhost=shovel.vhost, shovel=shovel.name)
            if not shovel.reconnect_delay_s:
                return
            await asyncio.sleep(shovel.reconnect_delay_s)

    def _failed(self, reason: str) -> None:
        self._enter(TERMINATED, reason)
        log.warning(
            "shovel.failed", vhost=self.shovel.vhost, shovel=self.shovel.name, reason=reason
        )

    async def _run_once(self) -> bool:
        """Moves messages until all is moved, and returns True. Raises EndFailed."""
        source, source_uri = await self._connect(
            self.shovel.source.protocol, self.shovel.source.uris, self._source
        )
        try:
            destination, destination_uri = await self._connect(
                self.shovel.destination.protocol,
                self.shovel.destination.uris,
                self._destination,
            )
            try:
                await destination.open()
                ready = await source.open()
                forwarding = Forwarding(self.shovel, self._cluster, source_uri, destination_uri)
                wanted = ready if self.shovel.delete_after == QUEUE_LENGTH else None
                if isinstance(self.shovel.delete_after, int):
                    wanted = max(0, self.shovel.delete_after - self._forwarded)
                ledger = Ledger(wanted)
                self._run_now = _Run(
                    source, destination, source_uri, destination_uri, forwarding, ledger,
                    asyncio.Event(),
                )  # fmt: skip
                await self._move(self._run_now)
            except _Done:
                return True
            finally:
                await destination.peer.close()
        finally:
            self._run_now = None
            await source.peer.close()
        return False

    async def _move(self, run: _Run) -> None:
        if run.ledger.is_done:
            raise _Done
        await run.source.consume()
        self._enter(RUNNING, "")
        log.info(
            "shovel.running",
            vhost=self.shovel.vhost,
            shovel=self.shovel.name,
            source=without_credentials(run.source_uri),
            destination=without_credentials(run.destination_uri),
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(run))
                group.create_task(self._settle(run))
        except ExceptionGroup as failed:
            if failed.subgroup(_Done) is not None:
                raise _Done from None
            if failed.split((EndFailed, BrokerError))[1] is not None:
                raise
            reasons = dict.fromkeys(str(each) for each in failed.exceptions)
            raise EndFailed("; ".join(reasons)) from failed
        finally:
            self._forwarded += run.ledger.forwarded

    async def _forward(self, run: _Run) -> None:
        ledger, destination = run.ledger, run.destination
        while True:
            while ledger.is_full:
                run.room.clear()
                await run.room.wait()
            message = await run.source.next()
            outgoing = run.forwarding.forwarded(message, int(time.time() * 1000))
            # The confirm may come while the message is still being written.
            ledger.sent(destination.sequence, message.tag)
            sequence = destination.sequence
            await destination.publish(outgoing)
            if self.shovel.ack_mode != ON_CONFIRM:
                self._confirmed(run, Confirm(sequence, False, True))

    async def _settle(self, run: _Run) -> None:
        while True:
            self._confirmed(run, await run.destination.outcome())

    def _confirmed(self, run: _Run, confirm: Confirm) -> None:
        """Settles messages at the source. Raises _Done."""
        tags = run.ledger.confirmed(
            confirm.sequence, multiple=confirm.multiple, accepted=confirm.accepted
        )
        if tags:
            run.source.settle(tags, accepted=confirm.accepted)
        run.room.set()
        if run.ledger.is_done:
            raise _Done

    async def _connect(
        self,
        protocol: str,
        uris: Sequence[str],
        made: Callable[[str, ShovelUri], Coroutine[object, object, E]],
    ) -> tuple[E, str]:
        """Connects to the first broker that answers. Raises EndFailed."""
        reasons = []
        for uri in uris:
            try:
                return await made(protocol, uri_of(uri)), uri
            except EndFailed as error:
                reasons.append(f"{without_credentials(uri)}: {error}")
        raise EndFailed("; ".join(reasons))

    async def _source(self, protocol: str, uri: ShovelUri) -> Source:
        name = f"Shovel {self.shovel.name}"
        if protocol == AMQP_10:
            from convoymq.edges.shovel import amqp10

            return amqp10.Source10(await amqp10.Peer.connect(uri, self._inside, name), self.shovel)
        from convoymq.edges.shovel import amqp091

        return amqp091.Source091(await amqp091.Peer.connect(uri, self._inside, name), self.shovel)

    async def _destination(self, protocol: str, uri: ShovelUri) -> Destination:
        name = f"Shovel {self.shovel.name}"
        if protocol == AMQP_10:
            from convoymq.edges.shovel import amqp10

            peer = await amqp10.Peer.connect(uri, self._inside, name)
            return amqp10.Destination10(peer, self.shovel)
        from convoymq.edges.shovel import amqp091

        old = await amqp091.Peer.connect(uri, self._inside, name)
        return amqp091.Destination091(old, self.shovel)

    def _enter(self, state: str, reason: str) -> None:
        self._state, self._reason, self._since_s = state, reason, time.time()

    def row(self) -> Row:
        """Returns the shovel's status, under RabbitMQ's names."""
        row: Row = {
            "timestamp": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._since_s)),
            "name": self.shovel.name,
            "vhost": self.shovel.vhost,
            "type": "dynamic",
            "state": self._state,
        }
        if self._reason:
            row["reason"] = self._reason
        run = self._run_now
        if self._state != RUNNING or run is None:
            return row
        if run.destination.peer.blocked:
            row["state"] = BLOCKED
        ledger = run.ledger
        return {
            **row,
            "src_uri": without_credentials(run.source_uri),
            "src_protocol": self.shovel.source.protocol,
            **self.shovel.source.shown("src"),
            "dest_protocol": self.shovel.destination.protocol,
            "dest_uri": without_credentials(run.destination_uri),
            **self.shovel.destination.shown("dest"),
            "blocked_status": row["state"],
            "remaining": "unlimited" if ledger.remaining is None else ledger.remaining,
            "pending": ledger.pending,
            "forwarded": self._forwarded + ledger.forwarded,
        }
