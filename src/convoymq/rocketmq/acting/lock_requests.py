"""Requests for locks of ordered queues (41, 42), and the guard of pulls and commits.

A client's request is decided by this broker's table, or by a majority of the configured replicas
(`lockInStrictMode`). Among replicas a request has `onlyThisBroker`, and the epoch that is proposed,
or up to which leases end; answers of ours name epochs that were higher. RocketMQ's replicas pass
both over, and what they ask has no epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import msgspec
import structlog

from convoymq.model.errors import PeerError, Unavailable
from convoymq.rocketmq.acting.locks import Ballot, Queue, Vote
from convoymq.rocketmq.broker.values import LockBody, LockedBody, MessageQueue
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal, request
from convoymq.rocketmq.remoting.connection import Connection

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.clients import Client
    from convoymq.rocketmq.broker.service import Broker

log = structlog.get_logger()

VOTE_TIMEOUT_S = 1.0
RESERVED_MS = 3_600_000
"""So many epochs are reserved at once: a lock costs a write of a file once an hour."""
AHEAD_MS = 365 * 24 * RESERVED_MS
"""An epoch that is further ahead is nobody's: clocks do not differ by a year."""
HELD_BY_ANOTHER = "the queue is locked by another client of the group"


class _Ask(LockBody, rename="camel"):
    """Body of a request: as RocketMQ's, and an epoch."""

    epoch: int = 0


class _Answer(LockedBody, rename="camel"):
    """Body of an answer: as RocketMQ's, and the epochs of queues that were refused for theirs."""

    epochs: list[tuple[MessageQueue, int]] = msgspec.field(default_factory=list)


class _Reserved(msgspec.Struct):
    epoch: int = 0


class LockRequests:
    """See the module text.

    Args:
        replicas: `totalReplicas`
        members: other replicas that name servers list.
    """

    def __init__(
        self,
        parts: Broker,
        replicas: int,
        members: Callable[[], Mapping[int, str]],
        *,
        is_strict: bool,
    ) -> None:
        self._parts = parts
        self._replicas = replicas
        self._is_strict = is_strict and replicas > 1
        self._members = members
        self._file = parts.file("lockEpochs.json")
        self._reserved = parts.locks.floor = (self._file.read(_Reserved) or _Reserved()).epoch
        parts.register(Request.LOCK_BATCH_MQ, self._lock)
        parts.register(Request.UNLOCK_BATCH_MQ, self._unlock)

    # --- requests -----------------------------------------------------------------------------

    def _lock(self, connection: Connection, command: Command) -> Command | asyncio.Future[Command]:
        ask = json.loads(command.body, _Ask)
        role = self._parts.role
        if ask.only_this_broker:
            return command.answer(body=json.dumps(self._vote(ask)))
        if not role.is_master and not role.is_acting:
            # Its master, or another slave, decides.
            return command.answer(body=json.dumps(LockedBody([])))
        if not self._is_strict:
            return command.answer(body=json.dumps(LockedBody(self._vote(ask).locked)))
        return asyncio.ensure_future(self._lock_strictly(command, ask))

    def _reserve(self, epoch: int) -> None:
        """Makes sure that a later life of this replica votes for later epochs. Raises Refusal,
        StorageFault."""
        if epoch <= self._reserved:
            return
        if epoch > max(self._reserved, self._parts.now_ms()) + AHEAD_MS:
            raise Refusal(Answer.INVALID_PARAMETER, f"epoch {epoch} of a lock is years ahead")
        self._file.write(_Reserved(epoch + RESERVED_MS))
        self._reserved = epoch + RESERVED_MS

    def _vote(self, ask: _Ask) -> _Answer:
        """Locks in this broker's table. Raises Refusal, StorageFault."""
        self._reserve(ask.epoch)
        locks, now_ms = self._parts.locks, self._parts.steady_ms()
        group = ask.consumer_group
        epoch = ask.epoch or locks.propose(group, self._parts.now_ms())
        locked: list[MessageQueue] = []
        epochs: list[tuple[MessageQueue, int]] = []
        for queue in ask.mq_set:
            place = place_of(queue)
            if locks.lock(group, ask.client_id, place, epoch, now_ms):
                locked.append(queue)
            elif locks.holder(group, place, now_ms) in (None, ask.client_id):
                epochs.append((queue, locks.epoch(group, place)))
        return _Answer(locked, epochs)

    async def _lock_strictly(self, command: Command, ask: _Ask) -> Command:
        locks, now_ms = self._parts.locks, self._parts.steady_ms()
        places = set(map(place_of, ask.mq_set))
        before = {p for p in places if locks.holder(ask.consumer_group, p, now_ms) == ask.client_id}
        ballot = await self._ballot(ask, 0)
        if ballot.above:
            # A replica knows of a higher epoch. Nobody else has the lock.
            ballot = await self._ballot(ask, ballot.above)
        if lost := ballot.lost() - before:
            await self._give_back(ask, lost, ballot.epoch)
        granted = ballot.granted()
        queues = [queue for queue in ask.mq_set if place_of(queue) in granted]
        return command.answer(body=json.dumps(LockedBody(queues)))

    async def _ballot(self, ask: _Ask, above: int) -> Ballot:
        parts = self._parts
        epoch = parts.locks.propose(ask.consumer_group, parts.now_ms(), above)
        own = _Ask(
            consumer_group=ask.consumer_group, client_id=ask.client_id, mq_set=ask.mq_set,
            only_this_broker=True, epoch=epoch,
        )  # fmt: skip
        won = self._vote(own).locked
        ballot = Ballot(self._replicas, map(place_of, won), epoch)
        if ballot.needs_votes:
            own.mq_set = won
            answers = await self._ask_all(Request.LOCK_BATCH_MQ, own)
            for answer in answers:
                found = json.loads(answer.body, _Answer)
                epochs = {place_of(queue): epoch for queue, epoch in found.epochs}
                ballot.on_vote(Vote(frozenset(map(place_of, found.locked)), epochs))
        return ballot

    async def _give_back(self, ask: _Ask, places: Collection[Queue], epoch: int) -> None:
        """Frees queues that were locked without a majority up to an epoch, here and elsewhere."""
        queues = [queue for queue in ask.mq_set if place_of(queue) in places]
        for place in places:
            self._parts.locks.unlock(ask.consumer_group, ask.client_id, place, epoch)
        own = _Ask(
            consumer_group=ask.consumer_group, client_id=ask.client_id, mq_set=queues,
            only_this_broker=True, epoch=epoch,
        )  # fmt: skip
        await self._ask_all(Request.UNLOCK_BATCH_MQ, own)

    def _unlock(self, connection: Connection, command: Command) -> Command:
        ask = json.loads(command.body, _Ask)
        locks, group = self._parts.locks, ask.consumer_group
        if not ask.only_this_broker:
            ask.epoch = locks.propose(group, self._parts.now_ms())
        for queue in ask.mq_set:
            locks.unlock(group, ask.client_id, place_of(queue), ask.epoch)
        if self._is_strict and not ask.only_this_broker:
            ask.only_this_broker = True
            self._parts.tasks.spawn(self._forward_unlock(ask))
        return command.answer()

    async def _forward_unlock(self, ask: _Ask) -> None:
        await self._ask_all(Request.UNLOCK_BATCH_MQ, ask)

    async def _ask_all(self, code: int, ask: _Ask) -> list[Command]:
        body = json.dumps(ask)

        async def one(address: str) -> Command | None:
            try:
                connection = await self._parts.remoting.connected(address, VOTE_TIMEOUT_S)
                return await connection.request(request(code, body=body), VOTE_TIMEOUT_S)
            except (Unavailable, PeerError) as error:
                log.info("rocketmq.member_silent", address=address, reason=error.text)
                return None

        answers = await asyncio.gather(*map(one, self._members().values()))
        return [a for a in answers if a is not None and a.code == Answer.SUCCESS]

    # --- the guard ----------------------------------------------------------------------------

    def guard(self, connection: Connection, group: str, topic: str, queue: int) -> None:
        """Refuses the pull of a client while another one has the queue's lock. Raises Refusal:
        clients try again some seconds later."""
        client = self._client(connection, group)
        if client is None:
            return
        place = Queue(topic, self._parts.role.name, queue)
        if not self._parts.locks.may_consume(group, client.id, place, self._parts.steady_ms()):
            raise Refusal(Answer.SYSTEM_BUSY, HELD_BY_ANOTHER)

    def _client(self, connection: Connection, group: str) -> Client | None:
        consumers = self._parts.clients.consumers.get(group)
        return None if consumers is None else consumers.members.get(connection)


def place_of(queue: MessageQueue) -> Queue:
    """Returns a queue as locks have it."""
    return Queue(queue.topic, queue.broker_name, queue.queue_id)
