"""AMQP 0-9-1 methods and codes: one class a method, whose annotations say how its arguments are
encoded. Properties of messages: `messages/amqp091.py`.
"""

import re
from collections.abc import Callable
from enum import Enum
from typing import Annotated, ClassVar, TypeVar, get_args

import msgspec

from convoymq.messages.amqp091 import Properties as Properties
from convoymq.model.tables import EMPTY, Table

# Without `from __future__ import annotations`: `_method` reads the annotations.

FRAME_METHOD = 1
FRAME_HEADER = 2
FRAME_BODY = 3
FRAME_HEARTBEAT = 8
FRAME_END = 206
PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"

CONNECTION = 10
CHANNEL = 20
ACCESS = 30
EXCHANGE = 40
QUEUE = 50
BASIC = 60
CONFIRM = 85
TX = 90


class FieldType(Enum):
    """Encoding of an argument in a frame."""

    OCTET = "octet"
    SHORT = "short"
    LONG = "long"
    LONGLONG = "longlong"
    BIT = "bit"
    SHORTSTR = "shortstr"
    LONGSTR = "longstr"
    TABLE = "table"


Octet = Annotated[int, FieldType.OCTET]
Short = Annotated[int, FieldType.SHORT]
Long = Annotated[int, FieldType.LONG]
LongLong = Annotated[int, FieldType.LONGLONG]
Bit = Annotated[bool, FieldType.BIT]
ShortString = Annotated[str, FieldType.SHORTSTR]
LongString = Annotated[bytes, FieldType.LONGSTR]
Arguments = Annotated[Table, FieldType.TABLE]


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all methods."""

    # A dataclass for each would take 14 KB of a node's memory.

    CLASS_ID: ClassVar[int]
    METHOD_ID: ClassVar[int]
    NAME: ClassVar[str]
    HAS_CONTENT: ClassVar[bool]
    ARGUMENTS: ClassVar[tuple[tuple[str, FieldType], ...]]


METHODS: dict[tuple[int, int], type[Method]] = {}
"""Classes of methods by class and method id."""

_Method = TypeVar("_Method", bound=Method)


def _method(
    class_id: int, method_id: int, *, content: bool = False
) -> Callable[[type[_Method]], type[_Method]]:
    """Registers a method under its ids; `content` = a message follows it."""

    def register(cls: type[_Method]) -> type[_Method]:
        group, *words = re.findall("[A-Z][a-z]*", cls.__name__)
        cls.CLASS_ID, cls.METHOD_ID, cls.HAS_CONTENT = class_id, method_id, content
        cls.NAME = f"{group}.{'-'.join(words)}".lower()
        cls.ARGUMENTS = tuple(
            (name, get_args(hint)[1]) for name, hint in cls.__annotations__.items()
        )
        METHODS[class_id, method_id] = cls
        return cls

    return register


@_method(CONNECTION, 10)
class ConnectionStart(Method, frozen=True, kw_only=True):
    """connection.start."""

    version_major: Octet = 0
    version_minor: Octet = 9
    server_properties: Arguments = EMPTY
    mechanisms: LongString = b"PLAIN"
    locales: LongString = b"en_US"


@_method(CONNECTION, 11)
class ConnectionStartOk(Method, frozen=True, kw_only=True):
    """connection.start-ok."""

    client_properties: Arguments = EMPTY
    mechanism: ShortString = "PLAIN"
    response: LongString = b""
    locale: ShortString = "en_US"


@_method(CONNECTION, 20)
class ConnectionSecure(Method, frozen=True, kw_only=True):
    """connection.secure."""

    challenge: LongString = b""


@_method(CONNECTION, 21)
class ConnectionSecureOk(Method, frozen=True, kw_only=True):
    """connection.secure-ok."""

    response: LongString = b""


@_method(CONNECTION, 30)
class ConnectionTune(Method, frozen=True, kw_only=True):
    """connection.tune."""

    channel_max: Short = 0
    frame_max: Long = 0
    heartbeat: Short = 0


@_method(CONNECTION, 31)
class ConnectionTuneOk(Method, frozen=True, kw_only=True):
    """connection.tune-ok."""

    channel_max: Short = 0
    frame_max: Long = 0
    heartbeat: Short = 0


@_method(CONNECTION, 40)
class ConnectionOpen(Method, frozen=True, kw_only=True):
    """connection.open."""

    virtual_host: ShortString = "/"
    reserved_1: ShortString = ""
    reserved_2: Bit = False


@_method(CONNECTION, 41)
class ConnectionOpenOk(Method, frozen=True, kw_only=True):
    """connection.open-ok."""

    reserved_1: ShortString = ""


@_method(CONNECTION, 50)
class ConnectionClose(Method, frozen=True, kw_only=True):
    """connection.close."""

    reply_code: Short = 0
    reply_text: ShortString = ""
    class_id: Short = 0
    method_id: Short = 0


@_method(CONNECTION, 51)
class ConnectionCloseOk(Method, frozen=True, kw_only=True):
    """connection.close-ok."""


@_method(CONNECTION, 60)
class ConnectionBlocked(Method, frozen=True, kw_only=True):
    """connection.blocked."""

    reason: ShortString = ""


@_method(CONNECTION, 61)
class ConnectionUnblocked(Method, frozen=True, kw_only=True):
    """connection.unblocked."""


@_method(CONNECTION, 70)
class ConnectionUpdateSecret(Method, frozen=True, kw_only=True):
    """connection.update-secret."""

    new_secret: LongString = b""
    reason: ShortString = ""


@_method(CONNECTION, 71)
class ConnectionUpdateSecretOk(Method, frozen=True, kw_only=True):
    """connection.update-secret-ok."""


@_method(CHANNEL, 10)
class ChannelOpen(Method, frozen=True, kw_only=True):
    """channel.open."""

    reserved_1: ShortString = ""


@_method(CHANNEL, 11)
class ChannelOpenOk(Method, frozen=True, kw_only=True):
    """channel.open-ok."""

    reserved_1: LongString = b""


@_method(CHANNEL, 20)
class ChannelFlow(Method, frozen=True, kw_only=True):
    """channel.flow."""

    active: Bit = False


@_method(CHANNEL, 21)
class ChannelFlowOk(Method, frozen=True, kw_only=True):
    """channel.flow-ok."""

    active: Bit = False


@_method(CHANNEL, 40)
class ChannelClose(Method, frozen=True, kw_only=True):
    """channel.close."""

    reply_code: Short = 0
    reply_text: ShortString = ""
    class_id: Short = 0
    method_id: Short = 0


@_method(CHANNEL, 41)
class ChannelCloseOk(Method, frozen=True, kw_only=True):
    """channel.close-ok."""


@_method(ACCESS, 10)
class AccessRequest(Method, frozen=True, kw_only=True):
    """access.request."""

    realm: ShortString = ""
    exclusive: Bit = False
    passive: Bit = True
    active: Bit = True
    write: Bit = True
    read: Bit = True


@_method(ACCESS, 11)
class AccessRequestOk(Method, frozen=True, kw_only=True):
    """access.request-ok."""

    ticket: Short = 1


@_method(EXCHANGE, 10)
class ExchangeDeclare(Method, frozen=True, kw_only=True):
    """exchange.declare."""

    ticket: Short = 0
    exchange: ShortString = ""
    type: ShortString = "direct"
    passive: Bit = False
    durable: Bit = False
    auto_delete: Bit = False
    internal: Bit = False
    nowait: Bit = False
    arguments: Arguments = EMPTY


@_method(EXCHANGE, 11)
class ExchangeDeclareOk(Method, frozen=True, kw_only=True):
    """exchange.declare-ok."""


@_method(EXCHANGE, 20)
class ExchangeDelete(Method, frozen=True, kw_only=True):
    """exchange.delete."""

    ticket: Short = 0
    exchange: ShortString = ""
    if_unused: Bit = False
    nowait: Bit = False


@_method(EXCHANGE, 21)
class ExchangeDeleteOk(Method, frozen=True, kw_only=True):
    """exchange.delete-ok."""


@_method(EXCHANGE, 30)
class ExchangeBind(Method, frozen=True, kw_only=True):
    """exchange.bind."""

    ticket: Short = 0
    destination: ShortString = ""
    source: ShortString = ""
    routing_key: ShortString = ""
    nowait: Bit = False
    arguments: Arguments = EMPTY


@_method(EXCHANGE, 31)
class ExchangeBindOk(Method, frozen=True, kw_only=True):
    """exchange.bind-ok."""


@_method(EXCHANGE, 40)
class ExchangeUnbind(Method, frozen=True, kw_only=True):
    """exchange.unbind."""

    ticket: Short = 0
    destination: ShortString = ""
    source: ShortString = ""
    routing_key: ShortString = ""
    nowait: Bit = False
    arguments: Arguments = EMPTY


@_method(EXCHANGE, 51)
class ExchangeUnbindOk(Method, frozen=True, kw_only=True):
    """exchange.unbind-ok."""


@_method(QUEUE, 10)
class QueueDeclare(Method, frozen=True, kw_only=True):
    """queue.declare."""

    ticket: Short = 0
    queue: ShortString = ""
    passive: Bit = False
    durable: Bit = False
    exclusive: Bit = False
    auto_delete: Bit = False
    nowait: Bit = False
    arguments: Arguments = EMPTY


@_method(QUEUE, 11)
class QueueDeclareOk(Method, frozen=True, kw_only=True):
    """queue.declare-ok."""

    queue: ShortString = ""
    message_count: Long = 0
    consumer_count: Long = 0


@_method(QUEUE, 20)
class QueueBind(Method, frozen=True, kw_only=True):
    """queue.bind."""

    ticket: Short = 0
    queue: ShortString = ""
    exchange: ShortString = ""
    routing_key: ShortString = ""
    nowait: Bit = False
    arguments: Arguments = EMPTY


@_method(QUEUE, 21)
class QueueBindOk(Method, frozen=True, kw_only=True):
    """queue.bind-ok."""


@_method(QUEUE, 30)
class QueuePurge(Method, frozen=True, kw_only=True):
    """queue.purge."""

    ticket: Short = 0
    queue: ShortString = ""
    nowait: Bit = False


@_method(QUEUE, 31)
class QueuePurgeOk(Method, frozen=True, kw_only=True):
    """queue.purge-ok."""

    message_count: Long = 0


@_method(QUEUE, 40)
class QueueDelete(Method, frozen=True, kw_only=True):
    """queue.delete."""

    ticket: Short = 0
    queue: ShortString = ""
    if_unused: Bit = False
    if_empty: Bit = False
    nowait: Bit = False


@_method(QUEUE, 41)
class QueueDeleteOk(Method, frozen=True, kw_only=True):
    """queue.delete-ok."""

    message_count: Long = 0


@_method(QUEUE, 50)
class QueueUnbind(Method, frozen=True, kw_only=True):
    """queue.unbind."""

    ticket: Short = 0
    queue: ShortString = ""
    exchange: ShortString = ""
    routing_key: ShortString = ""
    arguments: Arguments = EMPTY


@_method(QUEUE, 51)
class QueueUnbindOk(Method, frozen=True, kw_only=True):
    """queue.unbind-ok."""


@_method(BASIC, 10)
class BasicQos(Method, frozen=True, kw_only=True):
    """basic.qos."""

    prefetch_size: Long = 0
    prefetch_count: Short = 0
    global_: Bit = False


@_method(BASIC, 11)
class BasicQosOk(Method, frozen=True, kw_only=True):
    """basic.qos-ok."""


@_method(BASIC, 20)
class BasicConsume(Method, frozen=True, kw_only=True):
    """basic.consume."""

    ticket: Short = 0
    queue: ShortString = ""
    consumer_tag: ShortString = ""
    no_local: Bit = False
    no_ack: Bit = False
    exclusive: Bit = False
    nowait: Bit = False
    arguments: Arguments = EMPTY


@_method(BASIC, 21)
class BasicConsumeOk(Method, frozen=True, kw_only=True):
    """basic.consume-ok."""

    consumer_tag: ShortString = ""


@_method(BASIC, 30)
class BasicCancel(Method, frozen=True, kw_only=True):
    """basic.cancel."""

    consumer_tag: ShortString = ""
    nowait: Bit = False


@_method(BASIC, 31)
class BasicCancelOk(Method, frozen=True, kw_only=True):
    """basic.cancel-ok."""

    consumer_tag: ShortString = ""


@_method(BASIC, 40, content=True)
class BasicPublish(Method, frozen=True, kw_only=True):
    """basic.publish."""

    ticket: Short = 0
    exchange: ShortString = ""
    routing_key: ShortString = ""
    mandatory: Bit = False
    immediate: Bit = False


@_method(BASIC, 50, content=True)
class BasicReturn(Method, frozen=True, kw_only=True):
    """basic.return."""

    reply_code: Short = 0
    reply_text: ShortString = ""
    exchange: ShortString = ""
    routing_key: ShortString = ""


@_method(BASIC, 60, content=True)
class BasicDeliver(Method, frozen=True, kw_only=True):
    """basic.deliver."""

    consumer_tag: ShortString = ""
    delivery_tag: LongLong = 0
    redelivered: Bit = False
    exchange: ShortString = ""
    routing_key: ShortString = ""


@_method(BASIC, 70)
class BasicGet(Method, frozen=True, kw_only=True):
    """basic.get."""

    ticket: Short = 0
    queue: ShortString = ""
    no_ack: Bit = False


@_method(BASIC, 71, content=True)
class BasicGetOk(Method, frozen=True, kw_only=True):
    """basic.get-ok."""

    delivery_tag: LongLong = 0
    redelivered: Bit = False
    exchange: ShortString = ""
    routing_key: ShortString = ""
    message_count: Long = 0


@_method(BASIC, 72)
class BasicGetEmpty(Method, frozen=True, kw_only=True):
    """basic.get-empty."""

    reserved_1: ShortString = ""


@_method(BASIC, 80)
class BasicAck(Method, frozen=True, kw_only=True):
    """basic.ack."""

    delivery_tag: LongLong = 0
    multiple: Bit = False


@_method(BASIC, 90)
class BasicReject(Method, frozen=True, kw_only=True):
    """basic.reject."""

    delivery_tag: LongLong = 0
    requeue: Bit = True


@_method(BASIC, 100)
class BasicRecoverAsync(Method, frozen=True, kw_only=True):
    """basic.recover-async."""

    requeue: Bit = False


@_method(BASIC, 110)
class BasicRecover(Method, frozen=True, kw_only=True):
    """basic.recover."""

    requeue: Bit = False


@_method(BASIC, 111)
class BasicRecoverOk(Method, frozen=True, kw_only=True):
    """basic.recover-ok."""


@_method(BASIC, 120)
class BasicNack(Method, frozen=True, kw_only=True):
    """basic.nack."""

    delivery_tag: LongLong = 0
    multiple: Bit = False
    requeue: Bit = True


@_method(CONFIRM, 10)
class ConfirmSelect(Method, frozen=True, kw_only=True):
    """confirm.select."""

    nowait: Bit = False


@_method(CONFIRM, 11)
class ConfirmSelectOk(Method, frozen=True, kw_only=True):
    """confirm.select-ok."""


@_method(TX, 10)
class TxSelect(Method, frozen=True, kw_only=True):
    """tx.select."""


@_method(TX, 11)
class TxSelectOk(Method, frozen=True, kw_only=True):
    """tx.select-ok."""


@_method(TX, 20)
class TxCommit(Method, frozen=True, kw_only=True):
    """tx.commit."""


@_method(TX, 21)
class TxCommitOk(Method, frozen=True, kw_only=True):
    """tx.commit-ok."""


@_method(TX, 30)
class TxRollback(Method, frozen=True, kw_only=True):
    """tx.rollback."""


@_method(TX, 31)
class TxRollbackOk(Method, frozen=True, kw_only=True):
    """tx.rollback-ok."""


CONTENT_TOO_LARGE = 311
NO_ROUTE = 312
NO_CONSUMERS = 313
CONNECTION_FORCED = 320
INVALID_PATH = 402
ACCESS_REFUSED = 403
NOT_FOUND = 404
RESOURCE_LOCKED = 405
PRECONDITION_FAILED = 406
FRAME_ERROR = 501
SYNTAX_ERROR = 502
COMMAND_INVALID = 503
CHANNEL_ERROR = 504
UNEXPECTED_FRAME = 505
RESOURCE_ERROR = 506
NOT_ALLOWED = 530
NOT_IMPLEMENTED = 540
INTERNAL_ERROR = 541
