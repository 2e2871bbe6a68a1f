"""Bodies of a broker's commands, and of its files: names as RocketMQ's JSON has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from convoymq.rocketmq.remoting.values import DataVersion

PERM_INHERIT = 1

TAG = "TAG"
BROADCASTING = "BROADCASTING"
CLUSTERING = "CLUSTERING"
CONSUME_ACTIVELY = "CONSUME_ACTIVELY"
CONSUME_PASSIVELY = "CONSUME_PASSIVELY"


class MessageQueue(msgspec.Struct, rename="camel", frozen=True, order=True):
    """One queue of a topic on one broker."""

    topic: str
    broker_name: str
    queue_id: int


def keyed(table: dict[MessageQueue, object]) -> bytes:
    """Returns a map whose keys are queues, as RocketMQ's JSON has it: objects are names."""
    return object_text((msgspec.json.encode(q), msgspec.json.encode(v)) for q, v in table.items())


def object_text(members: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns an object of names and values that are JSON text."""
    return b"{" + b",".join(name + b":" + value for name, value in members) + b"}"


def object_of(**members: bytes) -> bytes:
    """Returns an object of values that are JSON text."""
    return object_text((b'"' + name.encode() + b'"', value) for name, value in members.items())


def array_of(values: Iterable[bytes]) -> bytes:
    """Returns an array of values that are JSON text."""
    return b"[" + b",".join(values) + b"]"


class SubscriptionData(msgspec.Struct, rename="camel"):
    """Subscription of a group of consumers to a topic."""

    topic: str
    sub_string: str = "*"
    tags_set: list[str] = msgspec.field(default_factory=list)
    code_set: list[int] = msgspec.field(default_factory=list)
    sub_version: int = 0
    expression_type: str | None = TAG
    class_filter_mode: bool = False


class ConsumerData(msgspec.Struct, rename="camel"):
    """A consumer's part of a heartbeat."""

    group_name: str
    consume_type: str = CONSUME_PASSIVELY
    message_model: str = CLUSTERING
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    subscription_data_set: list[SubscriptionData] = msgspec.field(default_factory=list)
    unit_mode: bool = False


class ProducerData(msgspec.Struct, rename="camel"):
    """A producer's part of a heartbeat."""

    group_name: str


class HeartbeatData(msgspec.Struct, rename="camel"):
    """Groups of a client."""

    client_id: str = msgspec.field(name="clientID")
    producer_data_set: list[ProducerData] = msgspec.field(default_factory=list)
    consumer_data_set: list[ConsumerData] = msgspec.field(default_factory=list)
    heartbeat_fingerprint: int = 0
    without_sub: bool = False


class CheckClientBody(msgspec.Struct, rename="camel"):
    """A subscription that is to be checked."""

    subscription_data: SubscriptionData | None = None


class GroupConfig(msgspec.Struct, rename="camel"):
    """Settings of a group of consumers."""

    group_name: str = ""
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: int = 1
    retry_max_times: int = 16
    group_retry_policy: dict[str, object] = msgspec.field(
        default_factory=lambda: {"type": "CUSTOMIZED"}
    )
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: int = 0
    consume_timeout_minute: int = 15
    subscription_data_set: list[dict[str, object]] | None = None
    attributes: dict[str, str] = msgspec.field(default_factory=dict)


class GroupConfigList(msgspec.Struct, rename="camel"):
    """Settings of several groups."""

    group_config_list: list[GroupConfig]


class GroupTable(msgspec.Struct, rename="camel"):
    """All groups of consumers. `forbidden`: group -> topic -> bits; bit 2 forbids reads. `deleted`:
    group -> ms (`enter_deletion`)."""

    subscription_group_table: dict[str, GroupConfig] = msgspec.field(default_factory=dict)
    forbidden_table: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    data_version: DataVersion = DataVersion()
    deleted: dict[str, int] = msgspec.field(default_factory=dict)


class OffsetTable(msgspec.Struct, rename="camel"):
    """Offsets of consumers: `topic@group` -> queue -> offset. `resets`: how often an operator set
    it. `unsent`: offsets that a slave took from clients, and that no master is known to have.
    RocketMQ has neither."""

    offset_table: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)
    data_version: DataVersion = DataVersion()
    resets: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)
    unsent: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)


class LockBody(msgspec.Struct, rename="camel"):
    """Queues that a consumer wants to lock, or to unlock."""

    consumer_group: str
    client_id: str
    mq_set: list[MessageQueue] = msgspec.field(default_factory=list)
    only_this_broker: bool = False


class LockedBody(msgspec.Struct):
    """Queues that are locked."""

    locked: list[MessageQueue] = msgspec.field(name="lockOKMQSet", default_factory=list)


class RequestMode(msgspec.Struct, rename="camel"):
    """Mode in which the consumers of a group take the messages of a topic: PULL or POP."""

    topic: str
    consumer_group: str
    mode: str = "PULL"
    pop_share_queue_num: int = 0


class RequestModes(msgspec.Struct, rename="camel"):
    """Modes by topic and group."""

    message_request_mode_map: dict[str, dict[str, RequestMode]] = msgspec.field(
        default_factory=dict
    )


class AssignmentQuery(msgspec.Struct, rename="camel"):
    """A consumer asks which queues are its own."""

    topic: str
    consumer_group: str
    client_id: str
    strategy_name: str = "AVG"
    message_model: str = CLUSTERING


class ClientConnection(msgspec.Struct, rename="camel"):
    """One client."""

    client_id: str
    client_addr: str
    language: str
    version: int


class ConsumerConnections(msgspec.Struct, rename="camel"):
    """The clients of a group of consumers."""

    connection_set: list[ClientConnection]
    subscription_table: dict[str, SubscriptionData]
    consume_type: str
    message_model: str
    consume_from_where: str


def is_blank(text: str | None) -> bool:
    """Returns whether a text says nothing."""
    return text is None or not text.strip()


DELETED_MAX = 10_000
"""Deletions that a table remembers; the oldest goes first."""


def changed_attributes(known: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Returns the attributes of a topic or group after changes: `+name` or `name` sets one, `-name`
    removes it."""
    found = dict(known)
    for name, value in changes.items():
        if name.startswith("-"):
            found.pop(name[1:], None)
        else:
            found[name.removeprefix("+")] = value
    return found


def enter_deletion(deleted: dict[str, int], name: str, stamp: int) -> None:
    """Remembers a deletion: the entry of a replica that has not seen it is outdated."""
    deleted[name] = max(stamp, deleted.pop(name, -1))
    if len(deleted) > DELETED_MAX:
        del deleted[next(iter(deleted))]


def learn_deletions(own: dict[str, int], other: Mapping[str, int]) -> list[str]:
    """Enters the deletions of another replica; returns the names that were not known as deleted."""
    found = [name for name, stamp in other.items() if own.get(name, -1) < stamp]
    for name in found:
        enter_deletion(own, name, other[name])
    return found


def next_version(version: DataVersion, now_ms: int) -> DataVersion:
    """Returns the version of a table that has just changed."""
    return DataVersion(version.state_version, now_ms, version.counter + 1)
