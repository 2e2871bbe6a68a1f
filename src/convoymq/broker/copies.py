"""Messages of queues for backups, and back into queues (ADR 0208): asked for on any node, read by
the node that decides about the queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from convoymq.broker.alarms import Alarms
from convoymq.broker.copier import Copier
from convoymq.broker.group_requests import AGAIN, DONE, Answer, GroupRequests
from convoymq.broker.local_queues import LocalQueues
from convoymq.kernels.batch import CMD_ENQUEUE
from convoymq.kernels.command_walk import CommandWalk
from convoymq.logformat.entry import ENTRY_HEADER_SIZE
from convoymq.metadata.machine import QueueRecord, TopicRecord
from convoymq.metadata.topics import partition_queue_name
from convoymq.model.errors import PeerError, Unavailable
from convoymq.model.refusals import queue_subject
from convoymq.queues.copying import CopiedPage
from convoymq.queues.interface import Queue
from convoymq.routing.queue_types import PlacementKind
from convoymq.topics.rules.lineage import PartitionState

TIMEOUT_S = 10.0


class Copied(NamedTuple):
    """A page, and whose positions it has."""

    source: int
    """Node whose positions these are; 0: those of all members of a Raft group."""
    page: CopiedPage


class Copies:
    """See the module text. One per node."""

    def __init__(self, local: LocalQueues, requests: GroupRequests, alarms: Alarms) -> None:
        self._local = local
        self._requests = requests
        self._alarms = alarms
        requests.serve("copy", self._on_copy)

    async def page(self, record: QueueRecord, after: int, upto: int) -> Copied:
        """Returns a page of a queue; see `Queue.copy_page`.

        Raises:
            PreconditionFailed: queues of its type cannot be copied.
            Unavailable: nobody decides about it, or it did not answer in time.
        """
        if record.placement is PlacementKind.RAFT:
            found = await self._requests.ask_leader(
                record.group, record.members, "copy", after, upto, timeout_s=TIMEOUT_S
            )
            return Copied(0, _page_of(found))
        leader = self._local.leader_of(record)
        if not leader:
            raise Unavailable(f"{queue_subject(record.vhost, record.name)} has no master")
        status, found = await self._requests.ask(
            leader, "copy", record.group, after, upto, timeout_s=TIMEOUT_S
        )
        if status != DONE:
            raise Unavailable(str(found))
        return Copied(leader, _page_of(found))

    @staticmethod
    def partitions(topic: TopicRecord) -> list[str]:
        """Returns the queues of a topic's partitions, in an order in which the messages of each key
        follow each other. Those that are not open yet have none."""
        kept = [
            each
            for each in topic.state.lineage.partitions.values()
            if not each.is_deleted and each.state is not PartitionState.CREATING
        ]
        kept.sort(key=lambda each: (each.created_version, each.pid))
        return [partition_queue_name(topic.name, each.pid) for each in kept]

    async def _on_copy(self, group: int, arguments: list[object]) -> Answer:
        after, upto = arguments
        queue = self._local.get(group)
        if queue is None or not isinstance(after, int) or not isinstance(upto, int):
            return AGAIN, "the queue is not open here"
        try:
            return DONE, list(await queue.copy_page(after, upto))
        except Unavailable as error:
            return AGAIN, error.text

    async def publish(self, queue: Queue, commands: bytes) -> int:
        """Publishes the ENQUEUE commands of a backup into a queue or a topic, and returns the
        number of messages when all are confirmed.

        Raises:
            ValueError: they are damaged; some may be published.
            Unavailable: not all are confirmed; some may be published.
        """
        found = list(_commands_in(commands))
        copier = Copier(queue, self._local.new_session(), 0, self._alarms.check, lambda _: None)
        try:
            for command, count in found:
                await copier.publish(command, count)
            await copier.confirmed()
        finally:
            copier.close()
        return copier.copied


def _page_of(found: object) -> CopiedPage:
    try:
        return msgspec.convert(found, CopiedPage)
    except msgspec.ValidationError as error:
        raise PeerError(f"malformed page of a queue: {error}") from None


def _commands_in(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yields (ENQUEUE command, records). Raises ValueError."""
    walk = CommandWalk(bytes(ENTRY_HEADER_SIZE) + data)
    while walk.next():
        if walk.type != CMD_ENQUEUE or not walk.count:
            raise ValueError(f"a command of type {walk.type} with {walk.count} records")
        at = walk.offset - ENTRY_HEADER_SIZE
        yield data[at : at + walk.length], walk.count
