"""Contents of the bodies of commands: topics, routes, registrations. Names as RocketMQ's JSON has
them.

A registration can be compressed: a zlib stream of

    length 4 + data version (JSON) · number of topics 4 ·
    per topic: length 4 + text `name reads writes perm filter [attributes as JSON]` ·
    length 4 + filter servers (JSON) · number of mappings 4 · per mapping: length 4 + JSON
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from convoymq.model.errors import SyntaxFault
from convoymq.rocketmq.compression import uncompressed
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import VERSION_TOPIC_MAPPINGS

PERM_READ = 4
PERM_WRITE = 2

MASTER_ID = 0
MEMBER_TOPIC_PREFIX = "rmq_sys_SYNC_BROKER_MEMBER_"
"""Topics by which brokers ask old name servers for their replicas: always the true ids."""

_LENGTH = struct.Struct(">i")


class DataVersion(msgspec.Struct, rename="camel", frozen=True):
    """Version of a table; `counter` counts its changes."""

    state_version: int = 0
    timestamp: int = 0
    counter: int = 0


class TopicConfig(msgspec.Struct, rename="camel", omit_defaults=True):
    """Settings of a topic on one broker."""

    topic_name: str
    read_queue_nums: int = 16
    write_queue_nums: int = 16
    perm: int = PERM_READ | PERM_WRITE
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] = msgspec.field(default_factory=dict)


class TopicTable(msgspec.Struct, rename="camel"):
    """All topics of a broker. The mappings of static topics are passed over: brokers have them
    turned off unless they are told otherwise. `deleted`: topic -> end of the log then."""

    topic_config_table: dict[str, TopicConfig] = msgspec.field(default_factory=dict)
    data_version: DataVersion = DataVersion()
    deleted: dict[str, int] = msgspec.field(default_factory=dict)


class RegisterBrokerBody(msgspec.Struct, rename="camel"):
    """Body of a registration."""

    topic_config_serialize_wrapper: TopicTable
    filter_server_list: list[str] = msgspec.field(default_factory=list)


class QueueData(msgspec.Struct, rename="camel"):
    """Queues of a topic on one broker."""

    broker_name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_sys_flag: int = 0


class BrokerData(msgspec.Struct, rename="camel", omit_defaults=True):
    """The replicas of one broker: id -> address; id 0 is its master."""

    cluster: str
    broker_name: str
    broker_addrs: dict[int, str]
    zone_name: str | None = None
    enable_acting_master: bool = False


class RouteData(msgspec.Struct, rename="camel", omit_defaults=True):
    """Queues and brokers of a topic."""

    queue_datas: list[QueueData]
    broker_datas: list[BrokerData] = msgspec.field(default_factory=list)
    filter_server_table: dict[str, list[str]] = msgspec.field(default_factory=dict)
    order_topic_conf: str | None = None


class ClusterInfo(msgspec.Struct, rename="camel"):
    """All brokers and clusters."""

    broker_addr_table: dict[str, BrokerData]
    cluster_addr_table: dict[str, list[str]]


class MemberGroup(msgspec.Struct, rename="camel"):
    """The replicas of one broker that are alive."""

    cluster: str
    broker_name: str
    broker_addrs: dict[int, str] = msgspec.field(default_factory=dict)


class MemberGroupBody(msgspec.Struct, rename="camel"):
    """Answer about a member group."""

    broker_member_group: MemberGroup


class TopicList(msgspec.Struct, rename="camel", omit_defaults=True):
    """Names of topics."""

    topic_list: list[str]
    broker_addr: str | None = None


class KeyValues(msgspec.Struct):
    """Keys and values of a namespace."""

    table: dict[str, str]


class EscapeKeys(msgspec.Struct, rename="camel"):
    """Keys of stored messages of one source: `topic:queue` -> ranges of offsets. `targets`: the
    brokers that a slave has sent its group's messages to, `is_complete`: it is sure of all."""

    ranges: dict[str, list[tuple[int, int]]] = msgspec.field(default_factory=dict)
    generation: int = 0
    targets: list[str] | None = None
    is_complete: bool = True


def crc32(body: bytes | memoryview) -> int:
    """Returns the checksum of a registration's body, as its header has it."""
    return zlib.crc32(body) & 0x7FFFFFFF


def decode_registration(
    body: bytes | memoryview, *, compressed: bool, version: int
) -> RegisterBrokerBody:
    """Reads the body of a registration. `version`: of the broker. Raises SyntaxFault."""
    if not compressed:
        return json.loads(body, RegisterBrokerBody)
    try:
        return _decode_compressed(uncompressed(body), version)
    except (struct.error, ValueError, msgspec.MsgspecError) as error:
        raise SyntaxFault(f"the body of a registration cannot be read: {error}") from error


def _topic_of(text: str) -> TopicConfig:
    name, reads, writes, perm, filter_type, *attributes = text.split(" ", 5)
    return TopicConfig(
        topic_name=name,
        read_queue_nums=int(reads),
        write_queue_nums=int(writes),
        perm=int(perm),
        topic_filter_type=filter_type,
        attributes=json.loads(attributes[0].encode(), dict[str, str]) if attributes else {},
    )


def _decode_compressed(content: bytes, version: int) -> RegisterBrokerBody:
    parts = _Parts(content)
    data_version = json.loads(parts.content(), DataVersion)
    topics = {}
    for _ in range(parts.number()):
        topic = _topic_of(parts.content().decode())
        topics[topic.topic_name] = topic
    servers = json.loads(parts.content(), list[str])
    if version >= VERSION_TOPIC_MAPPINGS:
        for _ in range(parts.number()):
            parts.content()
    return RegisterBrokerBody(TopicTable(topics, data_version), servers)


class _Parts:
    """Reads numbers, and contents behind their lengths."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def number(self) -> int:
        (value,) = _LENGTH.unpack_from(self._content, self._at)
        self._at += 4
        if value < 0:
            raise ValueError("a number is negative")
        return int(value)

    def content(self) -> bytes:
        size = self.number()
        found = self._content[self._at : self._at + size]
        if len(found) != size:
            raise ValueError("a part is cut")
        self._at += size
        return found
