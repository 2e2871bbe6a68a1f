"""Metadata of a group's replicas: what a slave copies from its master, again and again, and what a
master that gets online takes over of a slave.

| code | what | a slave takes it | a master takes it over |
|---|---|---|---|
| 21 | topics | when the version differs | all of both (`merging.joined`) |
| 43 | consumer offsets | as they are | the larger of each queue |
| 45, 60 | delay levels, timed messages | what is ahead of its own | what is ahead of its own |
| 201 | groups | when the version differs | all of both |
| 29206 | users and their rules; between replicas of ours | when the version differs | all of both |

A slave asks each second what has changed (`GET_METADATA_VERSIONS`), and copies that. RocketMQ's
master does not answer it, and is asked for everything each `COPY_S`; its own slaves do so once a
minute, and may act without a topic that is a minute old. RocketMQ's master takes neither topics nor
groups over, and offsets by their version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec
import structlog

from convoymq.model.errors import PeerError, Refused, Unavailable
from convoymq.rocketmq.acting.merging import after, joined
from convoymq.rocketmq.broker.users import UserTable
from convoymq.rocketmq.broker.values import GroupTable, OffsetTable
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.remoting.connection import Connection
from convoymq.rocketmq.remoting.values import DataVersion, TopicTable

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker
    from convoymq.rocketmq.special.service import SpecialServices

log = structlog.get_logger()

T = TypeVar("T")
TIMEOUT_S = 3.0
CHECK_POINT_BYTES = 56


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


class Metadata:
    """See the module text."""

    def __init__(self, parts: Broker, follower: SpecialServices | None) -> None:
        self._parts = parts
        self._follower = follower
        self._copied = Versions()
        parts.register(Request.GET_METADATA_VERSIONS, self._versions)

    def _versions(self, _connection: Connection, command: Command) -> Command:
        parts = self._parts
        versions = Versions(parts.topics.version, parts.groups.version, parts.offsets.commits,
                            parts.users.version)  # fmt: skip
        return command.answer(body=json.dumps(versions))

    async def _ask(self, address: str, code: int) -> bytes:
        connection = await self._parts.remoting.connected(address, TIMEOUT_S)
        answer = await connection.request(request(code), TIMEOUT_S)
        if answer.code != Answer.SUCCESS:
            raise Refused(f"{address} answers {code} with {answer.code}: {answer.remark}")
        return bytes(answer.body)

    async def _read(self, address: str, code: int, kind: type[T]) -> T:
        return json.loads(await self._ask(address, code), kind)

    # --- a slave copies -----------------------------------------------------------------------

    async def copy_changes(self, master: str) -> None:
        """Copies what has changed since the last copy. Raises as `copy`."""
        connection = await self._parts.remoting.connected(master, TIMEOUT_S)
        answer = await connection.request(request(Request.GET_METADATA_VERSIONS), TIMEOUT_S)
        if answer.code == Answer.SUCCESS:
            found = json.loads(answer.body, Versions)
            if found != self._copied:
                await self.copy(master)
                users = self._parts.users
                if found.users != users.version:
                    users.replace(await self._read(master, Request.GET_USERS, UserTable))
                self._copied = found

    async def copy(self, master: str) -> None:
        """Copies what the master has. Raises Unavailable, PeerError, StorageFault."""
        parts = self._parts
        topics = await self._read(master, Request.GET_ALL_TOPIC_CONFIG, TopicTable)
        if topics.data_version != parts.topics.version:
            parts.topics.replace(topics)
        parts.offsets.replace(
            await self._read(master, Request.GET_ALL_CONSUMER_OFFSET, OffsetTable)
        )
        groups = await self._read(master, Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, GroupTable)
        if groups.data_version != parts.groups.version:
            parts.groups.replace(groups)
        await self.copy_progress(master)

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

    async def take_over(self, member: str) -> bool:
        """Takes over what a slave knows; returns whether it was there to tell."""
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
        parts.offsets.merge(offsets)
        own = parts.topics.content()
        table = joined(
            own.topic_config_table, own.data_version, topics.topic_config_table, topics.data_version
        )
        if table != own.topic_config_table:
            version = after(own.data_version, topics.data_version, parts.now_ms())
            parts.topics.replace(TopicTable(table, version))
        known = parts.groups.content()
        joined_groups = joined(
            known.subscription_group_table, known.data_version,
            groups.subscription_group_table, groups.data_version,
        )  # fmt: skip
        if joined_groups != known.subscription_group_table:
            version = after(known.data_version, groups.data_version, parts.now_ms())
            forbidden = joined(
                known.forbidden_table, known.data_version,
                groups.forbidden_table, groups.data_version,
            )  # fmt: skip
            parts.groups.replace(GroupTable(joined_groups, forbidden, version))
        if users is not None:
            self._take_users(users)
        return True

    def _take_users(self, other: UserTable) -> None:
        parts, own = self._parts, self._parts.users.content()
        users = joined(own.users, own.data_version, other.users, other.data_version)
        policies = joined(own.policies, own.data_version, other.policies, other.data_version)
        if users != own.users or policies != own.policies:
            version = after(own.data_version, other.data_version, parts.now_ms())
            parts.users.replace(UserTable(users, policies, version))
