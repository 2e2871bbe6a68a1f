"""AMQP 0-9-1 methods and codes: one class a method, whose annotations say how its arguments are
encoded. Properties of messages: `messages/amqp091.py`.
"""

import re
from enum import Enum
from typing import Annotated, ClassVar, get_args

import msgspec

from convoymq.messages.amqp091 import Properties as Properties
from convoymq.model.tables import EMPTY, Table

# Without `from __future__ import annotations`: `_named` reads the annotations.

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

    # See `DestinationKind`: each argument of a method is looked up by it.
    __hash__ = object.__hash__

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


class ConnectionStart(Method, frozen=True, kw_only=True):
    """connection.start."""

    version_major: Octet = 0
    version_minor: Octet = 9
    server_properties: Arguments = EMPTY
    mechanisms: LongString = b"PLAIN"
    locales: LongString = b"en_US"


class ConnectionStartOk(Method, frozen=True, kw_only=True):
    """connection.start-ok."""

    client_properties: Arguments = EMPTY
    mechanism: ShortString = "PLAIN"
    response: LongString = b""
    locale: ShortString = "en_US"


class ConnectionSecure(Method, frozen=True, kw_only=True):
    """connection.secure."""

    challenge: LongString = b""


class ConnectionSecureOk(Method, frozen=True, kw_only=True):
    """connection.secure-ok."""

    response: LongString = b""


class ConnectionTune(Method, frozen=True, kw_only=True):
    """connection.tune."""

    channel_max: Short = 0
    frame_max: Long = 0
    heartbeat: Short = 0


class ConnectionTuneOk(Method, frozen=True, kw_only=True):
    """connection.tune-ok."""

    channel_max: Short = 0
    frame_max: Long = 0
    heartbeat: Short = 0


class ConnectionOpen(Method, frozen=True, kw_only=True):
    """connection.open."""

    virtual_host: ShortString = "/"
    reserved_1: ShortString = ""
    reserved_2: Bit = False


class ConnectionOpenOk(Method, frozen=True, kw_only=True):
    """connection.open-ok."""

    reserved_1: ShortString = ""


class ConnectionClose(Method, frozen=True, kw_only=True):
    """connection.close."""

    reply_code: Short = 0
    reply_text: ShortString = ""
    class_id: Short = 0
    method_id: Short = 0


class ConnectionCloseOk(Method, frozen=True, kw_only=True):
    """connection.close-ok."""


class ConnectionBlocked(Method, frozen=True, kw_only=True):
    """connection.blocked."""

    reason: ShortString = ""


class ConnectionUnblocked(Method, frozen=True, kw_only=True):
    """connection.unblocked."""


class ConnectionUpdateSecret(Method, frozen=True, kw_only=True):
    """connection.update-secret."""

    new_secret: LongString = b""
    reason: ShortString = ""


class ConnectionUpdateSecretOk(Method, frozen=True, kw_only=True):
    """connection.update-secret-ok."""


class ChannelOpen(Method, frozen=True, kw_only=True):
    """channel.open."""

    reserved_1: ShortString = ""


class ChannelOpenOk(Method, frozen=True, kw_only=True):
    """channel.open-ok."""

    reserved_1: LongString = b""


class ChannelFlow(Method, frozen=True, kw_only=True):
    """channel.flow."""

    active: Bit = False


class ChannelFlowOk(Method, frozen=True, kw_only=True):
    """channel.flow-ok."""

    active: Bit = False


class ChannelClose(Method, frozen=True, kw_only=True):
    """channel.close."""

    reply_code: Short = 0
    reply_text: ShortString = ""
    class_id: Short = 0
    method_id: Short = 0


class ChannelCloseOk(Method, frozen=True, kw_only=True):
    """channel.close-ok."""


class AccessRequest(Method, frozen=True, kw_only=True):
    """access.request."""

    realm: ShortString = ""
    exclusive: Bit = False
    passive: Bit = True
    active: Bit = True
    write: Bit = True
    read: Bit = True


class AccessRequestOk(Method, frozen=True, kw_only=True):
    """access.request-ok."""

    ticket: Short = 1


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


class ExchangeDeclareOk(Method, frozen=True, kw_only=True):
    """exchange.declare-ok."""


class ExchangeDelete(Method, frozen=True, kw_only=True):
    """exchange.delete."""

    ticket: Short = 0
    exchange: ShortString = ""
    if_unused: Bit = False
    nowait: Bit = False


class ExchangeDeleteOk(Method, frozen=True, kw_only=True):
    """exchange.delete-ok."""


class ExchangeBind(Method, frozen=True, kw_only=True):
    """exchange.bind."""

    ticket: Short = 0
    destination: ShortString = ""
    source: ShortString = ""
    routing_key: ShortString = ""
    nowait: Bit = False
    arguments: Arguments = EMPTY


class ExchangeBindOk(Method, frozen=True, kw_only=True):
    """exchange.bind-ok."""


class ExchangeUnbind(Method, frozen=True, kw_only=True):
    """exchange.unbind."""

    ticket: Short = 0
    destination: ShortString = ""
    source: ShortString = ""
    routing_key: ShortString = ""
    nowait: Bit = False
    arguments: Arguments = EMPTY


class ExchangeUnbindOk(Method, frozen=True, kw_only=True):
    """exchange.unbind-ok."""


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


class QueueDeclareOk(Method, frozen=True, kw_only=True):
    """queue.declare-ok."""

    queue: ShortString = ""
    message_count: Long = 0
    consumer_count: Long = 0


class QueueBind(Method, frozen=True, kw_only=True):
    """queue.bind."""

    ticket: Short = 0
    queue: ShortString = ""
    exchange: ShortString = ""
    routing_key: ShortString = ""
    nowait: Bit = False
    arguments: Arguments = EMPTY


class QueueBindOk(Method, frozen=True, kw_only=True):
    """queue.bind-ok."""


class QueuePurge(Method, frozen=True, kw_only=True):
    """queue.purge."""

    ticket: Short = 0
    queue: ShortString = ""
    nowait: Bit = False


class QueuePurgeOk(Method, frozen=True, kw_only=True):
    """queue.purge-ok."""

    message_count: Long = 0


class QueueDelete(Method, frozen=True, kw_only=True):
    """queue.delete."""

    ticket: Short = 0
    queue: ShortString = ""
    if_unused: Bit = False
    if_empty: Bit = False
    nowait: Bit = False


class QueueDeleteOk(Method, frozen=True, kw_only=True):
    """queue.delete-ok."""

    message_count: Long = 0


class QueueUnbind(Method, frozen=True, kw_only=True):
    """queue.unbind."""

    ticket: Short = 0
    queue: ShortString = ""
    exchange: ShortString = ""
    routing_key: ShortString = ""
    arguments: Arguments = EMPTY


class QueueUnbindOk(Method, frozen=True, kw_only=True):
    """queue.unbind-ok."""


class BasicQos(Method, frozen=True, kw_only=True):
    """basic.qos."""

    prefetch_size: Long = 0
    prefetch_count: Short = 0
    global_: Bit = False


class BasicQosOk(Method, frozen=True, kw_only=True):
    """basic.qos-ok."""


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


class BasicConsumeOk(Method, frozen=True, kw_only=True):
    """basic.consume-ok."""

    consumer_tag: ShortString = ""


class BasicCancel(Method, frozen=True, kw_only=True):
    """basic.cancel."""

    consumer_tag: ShortString = ""
    nowait: Bit = False


class BasicCancelOk(Method, frozen=True, kw_only=True):
    """basic.cancel-ok."""

    consumer_tag: ShortString = ""


class BasicPublish(Method, frozen=True, kw_only=True):
    """basic.publish."""

    ticket: Short = 0
    exchange: ShortString = ""
    routing_key: ShortString = ""
    mandatory: Bit = False
    immediate: Bit = False


class BasicReturn(Method, frozen=True, kw_only=True):
    """basic.return."""

    reply_code: Short = 0
    reply_text: ShortString = ""
    exchange: ShortString = ""
    routing_key: ShortString = ""


class BasicDeliver(Method, frozen=True, kw_only=True):
    """basic.deliver."""

    consumer_tag: ShortString = ""
    delivery_tag: LongLong = 0
    redelivered: Bit = False
    exchange: ShortString = ""
    routing_key: ShortString = ""


class BasicGet(Method, frozen=True, kw_only=True):
    """basic.get."""

    ticket: Short = 0
    queue: ShortString = ""
    no_ack: Bit = False


class BasicGetOk(Method, frozen=True, kw_only=True):
    """basic.get-ok."""

    delivery_tag: LongLong = 0
    redelivered: Bit = False
    exchange: ShortString = ""
    routing_key: ShortString = ""
    message_count: Long = 0


class BasicGetEmpty(Method, frozen=True, kw_only=True):
    """basic.get-empty."""

    reserved_1: ShortString = ""


class BasicAck(Method, frozen=True, kw_only=True):
    """basic.ack."""

    delivery_tag: LongLong = 0
    multiple: Bit = False


class BasicReject(Method, frozen=True, kw_only=True):
    """basic.reject."""

    delivery_tag: LongLong = 0
    requeue: Bit = True


class BasicRecoverAsync(Method, frozen=True, kw_only=True):
    """basic.recover-async."""

    requeue: Bit = False


class BasicRecover(Method, frozen=True, kw_only=True):
    """basic.recover."""

    requeue: Bit = False


class BasicRecoverOk(Method, frozen=True, kw_only=True):
    """basic.recover-ok."""


class BasicNack(Method, frozen=True, kw_only=True):
    """basic.nack."""

    delivery_tag: LongLong = 0
    multiple: Bit = False
    requeue: Bit = True


class ConfirmSelect(Method, frozen=True, kw_only=True):
    """confirm.select."""

    nowait: Bit = False


class ConfirmSelectOk(Method, frozen=True, kw_only=True):
    """confirm.select-ok."""


class TxSelect(Method, frozen=True, kw_only=True):
    """tx.select."""


class TxSelectOk(Method, frozen=True, kw_only=True):
    """tx.select-ok."""


class TxCommit(Method, frozen=True, kw_only=True):
    """tx.commit."""


class TxCommitOk(Method, frozen=True, kw_only=True):
    """tx.commit-ok."""


class TxRollback(Method, frozen=True, kw_only=True):
    """tx.rollback."""


class TxRollbackOk(Method, frozen=True, kw_only=True):
    """tx.rollback-ok."""


_IDS: dict[int, dict[int, type[Method]]] = {
    CONNECTION: {
        10: ConnectionStart, 11: ConnectionStartOk, 20: ConnectionSecure, 21: ConnectionSecureOk,
        30: ConnectionTune, 31: ConnectionTuneOk, 40: ConnectionOpen, 41: ConnectionOpenOk,
        50: ConnectionClose, 51: ConnectionCloseOk, 60: ConnectionBlocked, 61: ConnectionUnblocked,
        70: ConnectionUpdateSecret, 71: ConnectionUpdateSecretOk,
    },
    CHANNEL: {
        10: ChannelOpen, 11: ChannelOpenOk, 20: ChannelFlow, 21: ChannelFlowOk, 40: ChannelClose,
        41: ChannelCloseOk,
    },
    ACCESS: {
        10: AccessRequest, 11: AccessRequestOk,
    },
    EXCHANGE: {
        10: ExchangeDeclare, 11: ExchangeDeclareOk, 20: ExchangeDelete, 21: ExchangeDeleteOk,
        30: ExchangeBind, 31: ExchangeBindOk, 40: ExchangeUnbind, 51: ExchangeUnbindOk,
    },
    QUEUE: {
        10: QueueDeclare, 11: QueueDeclareOk, 20: QueueBind, 21: QueueBindOk, 30: QueuePurge,
        31: QueuePurgeOk, 40: QueueDelete, 41: QueueDeleteOk, 50: QueueUnbind, 51: QueueUnbindOk,
    },
    BASIC: {
        10: BasicQos, 11: BasicQosOk, 20: BasicConsume, 21: BasicConsumeOk, 30: BasicCancel,
        31: BasicCancelOk, 40: BasicPublish, 50: BasicReturn, 60: BasicDeliver, 70: BasicGet,
        71: BasicGetOk, 72: BasicGetEmpty, 80: BasicAck, 90: BasicReject, 100: BasicRecoverAsync,
        110: BasicRecover, 111: BasicRecoverOk, 120: BasicNack,
    },
    CONFIRM: {
        10: ConfirmSelect, 11: ConfirmSelectOk,
    },
    TX: {
        10: TxSelect, 11: TxSelectOk, 20: TxCommit, 21: TxCommitOk, 30: TxRollback,
        31: TxRollbackOk,
    },
}  # fmt: skip
"""Methods by class id and method id."""
_WITH_CONTENT = (BasicPublish, BasicReturn, BasicDeliver, BasicGetOk)
"""Methods that a message follows."""


def _named(class_id: int, method_id: int, cls: type[Method]) -> type[Method]:
    group, *words = re.findall("[A-Z][a-z]*", cls.__name__)
    cls.CLASS_ID, cls.METHOD_ID, cls.HAS_CONTENT = class_id, method_id, cls in _WITH_CONTENT
    cls.NAME = f"{group}.{'-'.join(words)}".lower()
    cls.ARGUMENTS = tuple((name, get_args(hint)[1]) for name, hint in cls.__annotations__.items())
    return cls


METHODS = {
    (class_id, method_id): _named(class_id, method_id, cls)
    for class_id, methods in _IDS.items()
    for method_id, cls in methods.items()
}
"""Classes of methods by class and method id."""

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
