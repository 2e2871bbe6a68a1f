"""Values of a store: drafts, answers, and a view of a stored message.

Layout of a record: docs/formats/rocketmq.md. Properties are `name \\x01 value \\x02`, repeated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from typing import TypeAlias

NAME_END = "\x01"
VALUE_END = "\x02"

_HEAD = struct.Struct(">IIIiiqqiq")
"""Size, magic, body CRC, queue, flag, queue offset, physical offset, system flag, born at."""
_LONG = struct.Struct(">q")
_INT = struct.Struct(">i")
_SHORT = struct.Struct(">H")
_TAIL = struct.Struct(">iqi")
"""Times consumed again, offset of the prepared message, length of the body."""

MAGIC_V2 = 0xDAA320AB
"""Of a record whose topic has more than 127 bytes; else DAA320A7."""


class SysFlag(IntFlag):
    """Bits of a record's system flag."""

    COMPRESSED = 0x1
    MULTI_TAGS = 0x2
    PREPARED = 0x4
    COMMIT = 0x8
    ROLLBACK = 0xC
    BORN_V6 = 0x10
    STORE_V6 = 0x20


class PutStatus(Enum):
    """Outcome of a put; names as RocketMQ's."""

    PUT_OK = 0
    FLUSH_DISK_TIMEOUT = 1
    FLUSH_SLAVE_TIMEOUT = 2
    SLAVE_NOT_AVAILABLE = 3
    SERVICE_NOT_AVAILABLE = 4
    CREATE_MAPPED_FILE_FAILED = 5
    MESSAGE_ILLEGAL = 6
    PROPERTIES_SIZE_EXCEEDED = 7
    OS_PAGE_CACHE_BUSY = 8
    UNKNOWN_ERROR = 9
    IN_SYNC_REPLICAS_NOT_ENOUGH = 10
    PUT_TO_REMOTE_BROKER_FAIL = 11


class GetStatus(Enum):
    """Outcome of a read of a queue; names as RocketMQ's."""

    FOUND = 0
    NO_MATCHED_MESSAGE = 1
    MESSAGE_WAS_REMOVING = 2
    OFFSET_FOUND_NULL = 3
    OFFSET_OVERFLOW_BADLY = 4
    OFFSET_OVERFLOW_ONE = 5
    OFFSET_TOO_SMALL = 6
    NO_MATCHED_LOGIC_QUEUE = 7
    NO_MESSAGE_IN_QUEUE = 8


class Boundary(Enum):
    """Choice between the messages that a time may stand for."""

    LOWER = 0
    """The first that was stored at that time or later."""
    UPPER = 1
    """The last that was stored at that time or earlier."""


RECONSUME_TIMES_MAX = 0x7FFF_FFFF


@dataclass(slots=True)
class Draft:
    """A message that is to be stored."""

    topic: str
    queue_id: int
    body: bytes
    properties: bytes = b""
    """Encoded, at most 32,767 bytes."""
    flag: int = 0
    sys_flag: int = 0
    """The bits for IPv6 hosts follow from the hosts."""
    born_ms: int = 0
    born_host: bytes = bytes(8)
    """Address (4 or 16 bytes) and port (4 bytes)."""
    reconsume_times: int = 0
    prepared_offset: int = 0
    is_batch: bool = False
    """The body holds several messages (SEND_BATCH_MESSAGE), each with a body and properties of its
    own; `properties` go to each of them."""

    def count_again(self) -> None:
        """The message is consumed once more."""
        self.reconsume_times = min(self.reconsume_times + 1, RECONSUME_TIMES_MAX)


@dataclass(slots=True)
class Placed:
    """Place of a draft in the log. Nothing but the status counts unless that is PUT_OK."""

    status: PutStatus
    physical: int = -1
    """Of its first byte in the commit log."""
    size: int = 0
    """In the commit log: `physical + size` is what has to be flushed and replicated."""
    queue_offset: int = -1
    stored_ms: int = 0
    message_id: str = ""
    """Host of the store and physical offset, in hexadecimal; of a batch one a message, with commas
    between."""
    count: int = 1
    """Messages: more than one for a batch."""


@dataclass(slots=True)
class Got:
    """A read of a queue."""

    status: GetStatus
    next: int
    """Queue offset to go on with."""
    min: int
    max: int
    """Queue offset of the next message to come."""
    records: list[memoryview] = field(default_factory=list)
    """Whole records: slices of the log, to be written out as they are."""


def decode_properties(encoded: bytes | memoryview) -> dict[str, str]:
    """Returns properties by name. The last separator may be missing; what has no name or no value
    is left out."""
    found = {}
    for pair in str(encoded, "utf-8", "replace").split(VALUE_END):
        name, _, value = pair.partition(NAME_END)
        if name and value:
            found[name] = value
    return found


def encode_properties(properties: dict[str, str]) -> bytes:
    """Returns properties as a record has them."""
    return "".join(
        f"{name}{NAME_END}{value}{VALUE_END}" for name, value in properties.items()
    ).encode()


CRC_NAME = b"__CRC32#\x01"
_CRC_PLACE = CRC_NAME + b"0000000000\x02"


def with_room_for_crc(properties: bytes, *, appends_crc: bool) -> bytes:
    """Returns properties without the checksum of another record; with room for one, if the record
    gets it."""
    if CRC_NAME in properties:
        parts = properties.split(b"\x02")
        properties = b"\x02".join(part for part in parts if not part.startswith(CRC_NAME))
    if not appends_crc:
        return properties
    separator = b"\x02" if properties and properties[-1] != 2 else b""
    return properties + separator + _CRC_PLACE


class Message:
    """A view of one record. Fields are read when asked for; a record is whole and was checked."""

    __slots__ = (
        "_at",
        "_properties",
        "_properties_at",
        "flag",
        "physical",
        "queue_id",
        "queue_offset",
        "record",
        "size",
        "sys_flag",
        "topic",
    )

    def __init__(self, record: memoryview) -> None:
        self.record = record
        (
            self.size, magic, _, self.queue_id, self.flag, self.queue_offset, self.physical,
            self.sys_flag, _,
        ) = _HEAD.unpack_from(record)  # fmt: skip
        self._properties: dict[str, str] | None = None
        at = self._born_end + 8 + (20 if self.sys_flag & SysFlag.STORE_V6 else 8) + 12
        self._at = at
        """Of the length of the body."""
        at += 4 + _INT.unpack_from(record, at)[0]
        if magic == MAGIC_V2:
            length, at = _SHORT.unpack_from(record, at)[0], at + 2
        else:
            length, at = record[at], at + 1
        self.topic = str(record[at : at + length], "utf-8", "replace")
        self._properties_at = at + length

    @property
    def _born_end(self) -> int:
        return 68 if self.sys_flag & SysFlag.BORN_V6 else 56

    @property
    def born_ms(self) -> int:
        """Returns when its producer made it."""
        return int(_LONG.unpack_from(self.record, 40)[0])

    @property
    def born_host(self) -> bytes:
        """Returns its producer's address and port."""
        return bytes(self.record[48 : self._born_end])

    @property
    def stored_ms(self) -> int:
        """Returns when it was stored."""
        return stored_ms_of(self.record)

    @property
    def store_host(self) -> bytes:
        """Returns address and port of the broker that stored it first."""
        return bytes(self.record[self._born_end + 8 : self._at - 12])

    @property
    def message_id(self) -> str:
        """Returns host and physical offset, as `Placed.message_id`."""
        return (self.store_host + _LONG.pack(self.physical)).hex().upper()

    @property
    def reconsume_times(self) -> int:
        """Returns how often it came back from a consumer."""
        return int(_TAIL.unpack_from(self.record, self._at - 12)[0])

    @property
    def prepared_offset(self) -> int:
        """Returns the physical offset of the half message that it commits."""
        return int(_TAIL.unpack_from(self.record, self._at - 12)[1])

    @property
    def body(self) -> memoryview:
        """Returns the body, maybe compressed."""
        start = self._at + 4
        return self.record[start : start + _INT.unpack_from(self.record, self._at)[0]]

    @property
    def properties_bytes(self) -> memoryview:
        """Returns the properties as they are encoded."""
        at = self._properties_at
        return self.record[at + 2 : at + 2 + _SHORT.unpack_from(self.record, at)[0]]

    @property
    def properties(self) -> dict[str, str]:
        """Returns the properties by name; the same dictionary each time."""
        if self._properties is None:
            self._properties = decode_properties(self.properties_bytes)
        return self._properties

    @property
    def keys(self) -> list[str]:
        """Returns the keys that it is found by."""
        found = self.properties
        return [*found.get("KEYS", "").split(" "), found.get("UNIQ_KEY", "")]

    @property
    def tags_code(self) -> int:
        """Returns the hash of its tag, as consume queues have it; 0 without one."""
        return java_hash(self.properties.get("TAGS", ""))

    def draft(self) -> Draft:
        """Returns a draft of the same message, to be changed and put again."""
        return Draft(
            self.topic, self.queue_id, bytes(self.body), bytes(self.properties_bytes), self.flag,
            self.sys_flag, self.born_ms, self.born_host, self.reconsume_times,
            self.prepared_offset,
        )  # fmt: skip


def stored_ms_of(record: memoryview | bytes) -> int:
    """Returns when a record was stored; the head of one will do."""
    at = 68 if _INT.unpack_from(record, 36)[0] & SysFlag.BORN_V6 else 56
    return int(_LONG.unpack_from(record, at)[0])


def java_hash(text: str) -> int:
    """Returns what Java's `String.hashCode` does."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for (unit,) in struct.iter_unpack(">H", units):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


@dataclass(slots=True)
class Run:
    """Messages that arrived one after the other in one queue. `store.messages(run)` has them."""

    topic: str
    queue_id: int
    queue_offset: int
    """Of the first."""
    count: int
    entries: bytes
    """As the consume queue has them: physical offset 8, size 4, tags code 8."""
    stored_ms: int
    """Of the last."""


Matches: TypeAlias = Callable[[int, "Message | None"], bool]
"""Returns whether a reader wants a message. It is asked with the tags code alone, and, where that
agreed, with the message: a filter that looks at tags only answers True then."""


@dataclass(slots=True, kw_only=True)
class Damage:
    """A damaged place of a store's files."""

    file: str
    offset: int
    """In the file."""
    reason: str


@dataclass(slots=True, kw_only=True)
class StoreReport:
    """Report of a recovery."""

    is_fresh: bool = False
    """The directory was empty."""
    was_aborted: bool = False
    """The last run did not end in order."""
    records_checked: int = 0
    damages: list[Damage] = field(default_factory=list)
