"""Parked keys of consumer groups, for operators.

A group's park set lies in the partitions that it has before it, and in those that it skipped: what
it has left behind was handed over to the partitions after it. One that was skipped and does not
answer is left out where there is something else to say: the group goes on without it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TypedDict

from convoymq.kernels import batch
from convoymq.kernels.batch import CommandBuilder, PublishTarget
from convoymq.messages import record as records
from convoymq.messages.record import read_record
from convoymq.metadata.machine import MetadataMachine, User
from convoymq.metadata.records import TopicRecord
from convoymq.metadata.topics import find_topic, topic_missing
from convoymq.model.errors import NotFound, Unavailable
from convoymq.queues.message_checks import check_message
from convoymq.topics.machine.queue import PartitionQueue
from convoymq.topics.machine.reads import ParkedRow
from convoymq.topics.rules.answers import ParkAnswer
from convoymq.topics.rules.commands import ReplaceParked, ResumeParked, SkipParked
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.lineage import Partition, PartitionState
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
        record = self._topic(vhost, name, group)
        found: list[ParkedKeyRow] = []
        for pid in _ahead(record, group):
            found += await _listed(self._partition(record, pid), group, pid)
        for pid in _skipped(record, group):
            with suppress(Unavailable):
                found += await _listed(self._partition(record, pid), group, pid)
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
        record = self._topic(vhost, name, group)
        for pid in _that_may_have(record, group, key):
            answer = await self._partition(record, pid).ask(ResumeParked(group, key, once))
            if _is_done(answer):
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
        record = self._topic(vhost, name, group)
        for pid in _that_may_have(record, group, key):
            partition = self._partition(record, pid)
            async for row in _rows(partition, group):
                if row.key == key and _is_done(await partition.ask(command(row))):
                    return
        raise NotParked(group, key)

    def _topic(self, vhost: str, name: str, group: str) -> TopicRecord:
        record = find_topic(self._tree, vhost, name)
        if record is None:
            raise topic_missing(vhost, name)
        if group not in record.groups:
            raise NotFound(f"no group '{group}' of topic '{name}' in vhost '{vhost}'")
        return record

    def _partition(self, record: TopicRecord, pid: int) -> PartitionQueue:
        found = self._partitions.find(record.vhost, record.name, pid)
        if found is None:
            raise Unavailable(f"partition {pid} of topic '{record.name}' is not open here yet")
        return found


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


def _ahead(record: TopicRecord, group: str) -> list[int]:
    """Returns the partitions that a group has not left behind, the oldest first."""
    state = record.groups[group]

    def is_ahead(each: Partition) -> bool:
        left = each.sealed_version is not None and each.sealed_version <= state.cv
        return not left and each.pid not in state.skipped

    return _by_age(record, is_ahead)


def _skipped(record: TopicRecord, group: str) -> list[int]:
    """Returns the partitions that a group has skipped, the oldest first."""
    return _by_age(record, lambda each: each.pid in record.groups[group].skipped)


def _by_age(record: TopicRecord, wanted: Callable[[Partition], bool]) -> list[int]:
    there = (
        each
        for each in record.state.lineage.partitions.values()
        if each.state is not PartitionState.DELETED and wanted(each)
    )
    return [each.pid for each in sorted(there, key=lambda each: (each.created_version, each.lo))]


def _that_may_have(record: TopicRecord, group: str, key: bytes) -> list[int]:
    """Returns the partitions in which a group may have parked a key; those that it skipped, which
    may not answer, come last."""
    found = [*_ahead(record, group), *_skipped(record, group)]
    if not key:
        return found
    lp = logical_partition(key, record.logical, record.hash_seed)
    lineage = record.state.lineage
    return [pid for pid in found if lineage.partition(pid).lo <= lp < lineage.partition(pid).hi]


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
