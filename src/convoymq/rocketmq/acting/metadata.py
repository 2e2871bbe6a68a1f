"""Metadata of a group's replicas: what a slave copies from its master, again and again, and what a
master that gets online takes over of a slave.

| code | what | a slave takes it | a master takes it over |
|---|---|---|---|
| 21 | topics | when the version differs | all of both (`merging.joined`) |
| 201 | groups | when the version differs | all of both |
| 43 | consumer offsets | as they are | the larger of each queue |
| 45, 60 | delay levels, timed messages | what is ahead of its own | what is ahead of its own |
| 29206 | users and their rules; between replicas of ours | when the version differs | all of both |

A table tells what was deleted. A topic goes with its queues and offsets, a group with its offsets;
a replica that has not seen the deletion brings nothing back. A slave that acts before it has copied
a new topic knows it by its messages.

A slave may have acted, and its master got online without it: it sends topics and groups that the
master lacks and nobody deleted (`TAKE_TABLES`), and offsets that clients committed here, before it
copies. RocketMQ's master gets the larger ones of those offsets as commits (15).

Without a master slaves take over what the others have, as a master does: the acting one may end
before the master returns. A slave's log may lack the end of another one's; its offsets end there.

A slave asks each second what has changed (`GET_METADATA_VERSIONS`), and copies that. RocketMQ's
master does not answer it, and is asked for everything each `COPY_S`; its own slaves do so once a
minute, and may act without a topic that is a minute old. RocketMQ's master takes neither topics nor
groups over, and offsets by their version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec
import structlog

from convoymq.model.errors import BrokerError, PeerError, Refused, Unavailable
from convoymq.rocketmq.acting.merging import after, is_outdated, joined, lacks
from convoymq.rocketmq.broker.users import UserTable
from convoymq.rocketmq.broker.values import GroupTable, OffsetTable, learn_deletions
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal, request
from convoymq.rocketmq.remoting.connection import Connection
from convoymq.rocketmq.remoting.values import DataVersion, TopicTable
from convoymq.rocketmq.store.store import is_queue
from convoymq.rocketmq.store.types import Run

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker
    from convoymq.rocketmq.special.service import SpecialServices

log = structlog.get_logger()

T = TypeVar("T")
TIMEOUT_S = 3.0
CHECK_POINT_BYTES = 56
LOGGED_MAX = 10


class DelayOffsets(msgspec.Struct, rename="camel"):
    """Offsets of delay levels: level -> offset."""

    offset_table: dict[int, int] = msgspec.field(default_factory=dict)
    data_version: DataVersion = DataVersion()


class Versions(msgspec.Struct, rename="camel", frozen=True):
    """Versions of a master's metadata; `commits`: of consumer offsets since its start."""

    topics: DataVersion = DataVersion()
    groups: DataVersion = DataVersion()
    commits: int = -1
    users: DataVersion = DataVersion()


class Tables(msgspec.Struct, rename="camel", frozen=True):
    """Topics and groups of a slave, and its unsent offsets."""

    topics: TopicTable
    groups: GroupTable
    offsets: OffsetTable = msgspec.field(default_factory=OffsetTable)


class Metadata:
    """See the module text."""

    def __init__(self, parts: Broker, follower: SpecialServices | None) -> None:
        self._parts = parts
        self._follower = follower
        self._copied: dict[str, Versions] = {}
        """Address -> versions that were copied or taken over from there."""
        self._unknown: dict[str, int] = {}
        """Topics that only the log has: their queues."""
        parts.store.on_run.append(self._on_run)
        parts.register(Request.GET_METADATA_VERSIONS, self._versions)
        parts.register(Request.TAKE_TABLES, self._take_tables)

    def _versions(self, _connection: Connection, command: Command) -> Command:
        parts = self._parts
        versions = Versions(parts.topics.version, parts.groups.version, parts.offsets.commits,
                            parts.users.version)  # fmt: skip
        return command.answer(body=json.dumps(versions))

    async def _ask(self, address: str, code: int, body: bytes = b"") -> bytes:
        connection = await self._parts.remoting.connected(address, TIMEOUT_S)
        answer = await connection.request(request(code, body=body), TIMEOUT_S)
        if answer.code == Answer.SERVICE_NOT_AVAILABLE:
            raise Unavailable(f"{address}: {answer.remark}")
        if answer.code != Answer.SUCCESS:
            raise Refused(f"{address} answers {code} with {answer.code}: {answer.remark}")
        return bytes(answer.body)

    async def _read(self, address: str, code: int, kind: type[T]) -> T:
        return json.loads(await self._ask(address, code), kind)

    # --- a slave copies -----------------------------------------------------------------------

    async def copy_changes(self, master: str) -> None:
        """Copies what has changed since the last copy. Raises as `copy`."""
        found = await self._changed(master)
        if found is not None:
            await self.copy(master)
            users = self._parts.users
            if found.users != users.version:
                users.replace(await self._read(master, Request.GET_USERS, UserTable))
            self._copied[master] = found

    async def _changed(self, address: str) -> Versions | None:
        """Returns the versions of a replica; None: there is nothing to copy, or it is RocketMQ's.
        Raises Unavailable, PeerError."""
        connection = await self._parts.remoting.connected(address, TIMEOUT_S)
        answer = await connection.request(request(Request.GET_METADATA_VERSIONS), TIMEOUT_S)
        if answer.code != Answer.SUCCESS:
            return None
        found = json.loads(answer.body, Versions)
        is_same = found == self._copied.get(address)
        return None if is_same and not (self._unknown or self._parts.offsets.unsent) else found

    async def join(self, slave: str) -> None:
        """Takes over what another slave knows, while no master is listed. Raises Unavailable,
        PeerError."""
        store = self._parts.store
        if store.dispatched < self._parts.replication.whole_end:
            return
        found = await self._changed(slave)
        if found is not None and await self.take_over(slave, store.queue_max):
            self._copied[slave] = found

    def on_cut(self) -> None:
        """The end of this slave's log was cut. Raises StorageFault."""
        self._parts.offsets.limit_unsent(self._parts.store.queue_max)

    async def copy(self, master: str) -> None:
        """Copies what the master has. Raises Unavailable, PeerError, StorageFault."""
        parts = self._parts
        known, self._unknown = self._unknown, {}
        try:
            topics, groups = await self._tables(master)
        except BrokerError:
            self._unknown = known | self._unknown
            raise
        if topics.data_version != parts.topics.version:
            parts.topics.replace(topics)
        if parts.topics.deleted:
            # A slave that copies the log from its begin gets messages of before, too.
            for topic in parts.topics.deleted.keys() & set(parts.store.topics()):
                parts.store.delete_topic(topic, parts.topics.deleted[topic])
        if groups.data_version != parts.groups.version:
            parts.groups.replace(groups)
        parts.offsets.replace(
            await self._read(master, Request.GET_ALL_CONSUMER_OFFSET, OffsetTable)
        )
        await self.copy_progress(master)

    async def _tables(self, master: str) -> tuple[TopicTable, GroupTable]:
        """Returns a master's topics and groups, which have those that only this slave had. Sends
        unsent offsets as well."""
        topics, groups = await self._read_tables(master)
        is_linked = self._parts.replication.master_silent_ms() is not None
        # Before that, the end of this log, to which they belong, may still be cut.
        offsets = self._parts.offsets.to_send() if is_linked else OffsetTable()
        own = Tables(self._parts.topics.content(), self._parts.groups.content(), offsets)
        lacking = lacks(
            own.topics.topic_config_table, own.topics.deleted,
            topics.topic_config_table, topics.deleted,
        ) - self._parts.topics.system | lacks(
            own.groups.subscription_group_table, own.groups.deleted,
            groups.subscription_group_table, groups.deleted,
        )  # fmt: skip
        if not lacking and not offsets.offset_table:
            return topics, groups
        try:
            await self._ask(master, Request.TAKE_TABLES, json.dumps(own))
        except Refused:
            # One of RocketMQ's.
            await self._commit(master, offsets)
            return topics, groups
        self._parts.offsets.sent(offsets.offset_table)
        if not lacking:
            return topics, groups
        log.info("rocketmq.tables_sent", master=master, lacking=sorted(lacking)[:LOGGED_MAX])
        return await self._read_tables(master)

    async def _commit(self, master: str, offsets: OffsetTable) -> None:
        """Commits unsent offsets at RocketMQ's master, where they are larger than its own. Raises
        Unavailable, PeerError."""
        if not offsets.offset_table:
            return
        known = await self._read(master, Request.GET_ALL_CONSUMER_OFFSET, OffsetTable)
        connection = await self._parts.remoting.connected(master, TIMEOUT_S)
        for key, found in offsets.offset_table.items():
            topic, _, group = key.partition("@")
            for queue, offset in found.items():
                if offset > known.offset_table.get(key, {}).get(queue, -1):
                    fields = {
                        "consumerGroup": group, "topic": topic, "queueId": str(queue),
                        "commitOffset": str(offset),
                    }  # fmt: skip
                    await connection.request(
                        request(Request.UPDATE_CONSUMER_OFFSET, fields), TIMEOUT_S
                    )
        self._parts.offsets.sent(offsets.offset_table)

    async def _read_tables(self, master: str) -> tuple[TopicTable, GroupTable]:
        topics = await self._read(master, Request.GET_ALL_TOPIC_CONFIG, TopicTable)
        groups = await self._read(master, Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, GroupTable)
        return topics, groups

    def _take_tables(self, _connection: Connection, command: Command) -> Command:
        if not self._parts.role.is_master:
            raise Refusal(Answer.SERVICE_NOT_AVAILABLE, "this replica is no master")
        found = json.loads(command.body, Tables)
        self._take_topics(found.topics)
        self._take_groups(found.groups)
        offsets = _without_deleted(found.offsets, found.topics, found.groups, self._parts)
        self._parts.offsets.merge(offsets)
        self._parts.offsets.persist()
        return command.answer()

    def _on_run(self, run: Run) -> None:
        if run.topic not in self._parts.topics.table and is_queue(run):
            queues = max(run.queue_id + 1, self._unknown.get(run.topic, 0))
            self._unknown[run.topic] = queues

    def assume_topics(self) -> None:
        """Enters topics that the master made shortly before its end: this slave acts."""
        self._parts.topics.assume(self._unknown)
        self._unknown.clear()

    async def _users_of(self, address: str) -> UserTable | None:
        """Returns the users of a replica; None: it is one of RocketMQ's, which keeps its own, or
        there are no users here."""
        if not (self._parts.settings.authentication or self._parts.users.table):
            return None
        try:
            return await self._read(address, Request.GET_USERS, UserTable)
        except Refused:
            return None

    async def copy_progress(self, master: str) -> None:
        """Copies how far special services are. Raises Unavailable, PeerError."""
        if self._follower is None:
            return
        levels = await self._read(master, Request.GET_ALL_DELAY_OFFSET, DelayOffsets)
        try:
            check_point = await self._ask(master, Request.GET_TIMER_CHECK_POINT)
        except Refused:
            # It has no timed messages (`timerWheelEnable`).
            check_point = bytes(CHECK_POINT_BYTES)
        self._follower.follow(levels.offset_table, check_point)

    # --- a master takes over --------------------------------------------------------------------

    async def take_over(self, member: str, end: Callable[[str, int], int] | None = None) -> bool:
        """Takes over what a slave knows; returns whether it was there to tell. `end`: as
        `Offsets.merge` has it."""
        parts = self._parts
        try:
            await self.copy_progress(member)
            offsets = await self._read(member, Request.GET_ALL_CONSUMER_OFFSET, OffsetTable)
            topics = await self._read(member, Request.GET_ALL_TOPIC_CONFIG, TopicTable)
            groups = await self._read(member, Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, GroupTable)
            users = await self._users_of(member)
        except (Unavailable, Refused, PeerError) as error:
            log.info("rocketmq.member_silent", address=member, reason=error.text)
            return False
        self._take_topics(topics)
        self._take_groups(groups)
        if users is not None:
            self._take_users(users)
        parts.offsets.merge(_without_deleted(offsets, topics, groups, parts), end)
        return True

    def _take_topics(self, other: TopicTable) -> None:
        topics, own = self._parts.topics, self._parts.topics.content()
        table = joined(
            own.topic_config_table, own.data_version, other.topic_config_table, other.data_version,
            own.deleted, other.deleted,
        )  # fmt: skip
        if table != own.topic_config_table:
            version = after(own.data_version, other.data_version, self._parts.now_ms())
            topics.replace(TopicTable(table, version, other.deleted))

    def _take_groups(self, other: GroupTable) -> None:
        groups, own = self._parts.groups, self._parts.groups.content()
        versions = own.data_version, other.data_version
        table = joined(
            own.subscription_group_table, versions[0], other.subscription_group_table, versions[1],
            own.deleted, other.deleted,
        )  # fmt: skip
        if table != own.subscription_group_table:
            forbidden = joined(
                own.forbidden_table, versions[0], other.forbidden_table, versions[1],
                own.deleted, other.deleted,
            )  # fmt: skip
            version = after(*versions, self._parts.now_ms())
            groups.replace(GroupTable(table, forbidden, version, other.deleted))

    def _take_users(self, other: UserTable) -> None:
        parts, own = self._parts, self._parts.users.content()
        versions = own.data_version, other.data_version
        users = joined(own.users, versions[0], other.users, versions[1], own.deleted, other.deleted)
        policies = joined(
            own.policies, versions[0], other.policies, versions[1],
            own.deleted_policies, other.deleted_policies,
        )  # fmt: skip
        if users != own.users or policies != own.policies:
            learn_deletions(own.deleted, other.deleted)
            learn_deletions(own.deleted_policies, other.deleted_policies)
            parts.users.replace(
                UserTable(users, policies, after(*versions, parts.now_ms()), own.deleted,
                          own.deleted_policies)
            )  # fmt: skip


def _without_deleted(
    offsets: OffsetTable, topics: TopicTable, groups: GroupTable, parts: Broker
) -> OffsetTable:
    """Returns a slave's offsets without those of topics and groups that were deleted, and whose
    deletion it has not seen."""
    table = {}
    for name, found in offsets.offset_table.items():
        topic, _, group = name.partition("@")
        if not (
            is_outdated(topic, topics.deleted, parts.topics.deleted)
            or is_outdated(group, groups.deleted, parts.groups.deleted)
        ):
            table[name] = found
    return msgspec.structs.replace(offsets, offset_table=table)
