"""Parked keys of consumer groups, for operators.

A group's park set lies in the partitions that it has before it, and in those that it skipped: what
it has left behind was handed over to the partitions after it. One that was skipped and does not
answer is left out where there is something else to say: the group goes on without it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext, suppress
from typing import TypedDict

from convoymq.kernels import batch
from convoymq.kernels.batch import CommandBuilder, PublishTarget
from convoymq.messages import record as records
from convoymq.messages.record import read_record
from convoymq.metadata.machine import MetadataMachine, User
from convoymq.metadata.records import TopicRecord
from convoymq.metadata.topics import get_group, get_topic
from convoymq.model.errors import Unavailable
from convoymq.queues.message_checks import check_message
from convoymq.topics.machine.queue import PartitionQueue
from convoymq.topics.machine.reads import ParkedRow
from convoymq.topics.rules.answers import ParkAnswer
from convoymq.topics.rules.commands import ReplaceParked, ResumeParked, SkipParked
from convoymq.topics.rules.group import GroupState
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.lineage import Partition
from convoymq.topics.rules.refusals import Code, NotParked
from convoymq.topics.shell.partitions import TopicPartitions

ELSEWHERE = frozenset((Code.NOT_PARKED, Code.NOT_VISIBLE))
"""Answers of a partition that has no such key, or has handed it over."""


FLAGS_AT = 5
"""Place of the flags in a command."""
SAME_SIZE = 1
"""Flag of an ENQUEUE command: its records have one size."""


class ParkedKeyRow(TypedDict):
    """A parked key of a group."""

    key: bytes
    lp: int
    pid: int
    resuming: bool
    messages: int
    messages_bytes: int
    order_token: str
    """Of its first message."""


class ParkedKeys:
    """See the module text. One per node."""

    def __init__(self, tree: MetadataMachine, partitions: TopicPartitions) -> None:
        self._tree = tree
        self._partitions = partitions

    async def list(self, vhost: str, name: str, group: str) -> list[ParkedKeyRow]:
        """Returns the parked keys of a group, by partition and key; those of skipped partitions
        last, as far as these answer.

        Raises:
            NotFound: no such topic or group.
            Unavailable: a partition that was not skipped does not answer.
        """
        record = get_topic(self._tree, vhost, name)
        state = get_group(record, group)
        found: list[ParkedKeyRow] = []
        for each in _places(record, state):
            with suppress(Unavailable) if each.pid in state.skipped else nullcontext():
                found += await _listed(self._partitions.get(record, each.pid), group, each.pid)
        return found

    async def resume(
        self, vhost: str, name: str, group: str, key: bytes, *, once: bool = False
    ) -> None:
        """Has the messages of a key delivered again, in order; with `once` the first one, and the
        others wait on.

        Raises:
            NotFound: no such topic or group.
            NotParked: no such key.
            Unavailable: a partition does not answer.
        """
        for partition in self._that_may_have(vhost, name, group, key):
            if _is_done(await partition.ask(ResumeParked(group, key, once))):
                return
        raise NotParked(group, key)

    async def skip(self, vhost: str, name: str, group: str, key: bytes) -> None:
        """Gives the first message of a key up. Raises as `resume` does."""
        await self._change_head(
            vhost, name, group, key, lambda row: SkipParked(group, key, row.head)
        )

    async def replace(
        self, vhost: str, name: str, group: str, key: bytes, body: bytes, user: User
    ) -> None:
        """Gives the first message of a key another body; what else it has stays. It waits on.
        Raises as `resume` does; PreconditionFailed: the user may not publish it so."""
        await self._change_head(
            vhost,
            name,
            group,
            key,
            lambda row: ReplaceParked(group, key, row.head, with_body(row.message, body, user)),
        )

    async def _change_head(
        self,
        vhost: str,
        name: str,
        group: str,
        key: bytes,
        command: Callable[[ParkedRow], SkipParked | ReplaceParked],
    ) -> None:
        for partition in self._that_may_have(vhost, name, group, key):
            async for row in _rows(partition, group):
                if row.key == key and _is_done(await partition.ask(command(row))):
                    return
        raise NotParked(group, key)

    def _that_may_have(
        self, vhost: str, name: str, group: str, key: bytes
    ) -> Iterator[PartitionQueue]:
        """Yields the partitions in which a group may have parked a key. Raises NotFound,
        Unavailable."""
        record = get_topic(self._tree, vhost, name)
        lp = logical_partition(key, record.logical, record.hash_seed) if key else -1
        for each in _places(record, get_group(record, group)):
            if not key or each.lo <= lp < each.hi:
                yield self._partitions.get(record, each.pid)


def with_body(message: bytes, body: bytes, user: User) -> bytes:
    """Returns an ENQUEUE command of one message with another body, which passes the checks of a
    publish by this user. Raises PreconditionFailed."""
    record = read_record(batch.record(message, 0, 0))
    checked = check_message(records.with_body(record.content, body), record.routing_key, user=user)
    builder = CommandBuilder()
    target = PublishTarget(builder, 0, None)
    flags = message[FLAGS_AT] & ~SAME_SIZE
    names = records.names_of(record.exchange, record.routing_key)
    target.publish((names, checked.content), len(body), 0, flags)
    builder.discard_unsent()
    return batch.slice_records(bytes(target.pending[0].bytes()), 0, 0, 1)


def _places(record: TopicRecord, group: GroupState) -> list[Partition]:
    """Returns the partitions in which a group may have parked keys, the oldest first; those that it
    skipped, which may not answer, come last."""
    found = [
        each
        for each in record.state.lineage.oldest_first()
        if not each.is_deleted and (each.pid in group.skipped or not each.is_behind(group.cv))
    ]
    return sorted(found, key=lambda each: each.pid in group.skipped)


async def _listed(partition: PartitionQueue, group: str, pid: int) -> list[ParkedKeyRow]:
    return [
        {
            "key": row.key,
            "lp": row.lp,
            "pid": pid,
            "resuming": row.resuming,
            "messages": row.messages,
            "messages_bytes": row.messages_bytes,
            "order_token": str(row.head),
        }
        async for row in _rows(partition, group)
    ]


async def _rows(partition: PartitionQueue, group: str) -> AsyncIterator[ParkedRow]:
    after = b""
    while rows := await partition.parked(group, after):
        for row in rows:
            yield row
        if rows[-1].key == after:
            return
        after = rows[-1].key


def _is_done(answer: object) -> bool:
    """Returns whether the partition had the key. Raises Unavailable for what it cannot do now."""
    assert isinstance(answer, ParkAnswer), answer
    if answer.code in ELSEWHERE:
        return False
    if answer.code is not Code.OK:
        raise Unavailable(f"the partition answers {answer.code.value}")
    return True
