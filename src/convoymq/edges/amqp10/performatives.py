"""Performatives and the other composite types of AMQP 1.0, by one table: the classes below.

A class is a row: code, name, and its fields in their order, each with type, default, and whether it
has to be there. Source: OASIS AMQP 1.0 part 2 (transport), 3 (messaging), 5 (security).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar, cast, dataclass_transform

from convoymq.messages.amqp10.values import (
    Array,
    Described,
    Symbol,
    UByte,
    UInt,
    ULong,
    UShort,
    Value,
    decode,
    encode,
)
from convoymq.model.errors import SyntaxFault

T = TypeVar("T")
D = TypeVar("D")


class Composite:
    """Base of the rows."""

    CODE: ClassVar[int]
    NAME: ClassVar[str]
    FIELDS: ClassVar[tuple[_Field, ...]]

    __slots__ = ()

    def described(self) -> Described:
        """Returns the value as it is encoded, without nulls at its end."""
        items: list[Value] = []
        filled = 0
        for each in self.FIELDS:
            value = getattr(self, each.name)
            if value is None or (value == each.default and not each.must):
                items.append(None)
            else:
                items.append(each.kind.write(value))
                filled = len(items)
        return Described(ULong(self.CODE), items[:filled])

    def encoded(self) -> bytes:
        """Returns the bytes."""
        return encode(self.described())


def _same(value: Value) -> Value:
    return value


@dataclass(frozen=True, slots=True)
class _Kind(Generic[T]):
    """Type of a field."""

    name: str
    fits: Callable[[Value], bool]
    read: Callable[[Value], Value] = _same
    write: Callable[[Value], Value] = _same


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    kind: _Kind[Value]
    default: Value
    must: bool


def _plain(kind: type[T]) -> _Kind[T]:
    return _Kind(kind.__name__.lower(), lambda value: type(value) is kind, write=kind)


def _composites(name: str) -> _Kind[Value]:
    """A field that holds a composite value: one of an unknown type stays as it is."""
    return _Kind(
        name,
        lambda value: isinstance(value, Described),
        lambda value: composite_of(value) if _row_of(value) is not None else value,
        lambda value: value.described() if isinstance(value, Composite) else value,
    )


def _symbols_in(value: Value) -> tuple[Value, ...]:
    return value.items if isinstance(value, Array) else (value,)


def _symbols_out(value: Value) -> Array:
    assert isinstance(value, tuple)
    return Array(Symbol, tuple(Symbol(each) for each in value))


_ANY: _Kind[Value] = _Kind("value", lambda value: True)
_BINARY = _plain(bytes)
_BOOLEAN = _plain(bool)
_MAP: _Kind[dict[Value, Value]] = _plain(dict)
_STRING = _plain(str)
_SYMBOL = _plain(Symbol)
_UBYTE = _plain(UByte)
_UINT = _plain(UInt)
_ULONG = _plain(ULong)
_USHORT = _plain(UShort)
_STATE = _composites("delivery state")
_STATES: _Kind[dict[Value, Value]] = _Kind(
    "map of delivery states",
    lambda value: (
        type(value) is dict and all(state is None or _STATE.fits(state) for state in value.values())
    ),
    lambda value: _each_state(value, _STATE.read),
    lambda value: _each_state(value, _STATE.write),
)
_TERMINUS = _composites("terminus")
_ERROR = _composites("error")
_SYMBOLS: _Kind[tuple[str, ...]] = _Kind(
    "symbols",
    lambda value: all(type(each) is Symbol for each in _symbols_in(value)),
    _symbols_in,
    _symbols_out,
)


def _each_state(value: Value, convert: Callable[[Value], Value]) -> Value:
    assert isinstance(value, dict)
    return {tag: None if state is None else convert(state) for tag, state in value.items()}


def _may(kind: _Kind[T], default: D) -> T | D:
    return cast("T | D", field(default=default, metadata={"kind": kind, "must": False}))


def _must(kind: _Kind[T]) -> T:
    return cast("T", field(metadata={"kind": kind, "must": True}))


C = TypeVar("C", bound=Composite)
_BY_DESCRIPTOR: dict[int | str, type[Composite]] = {}


@dataclass_transform(kw_only_default=True)
def _row(code: int, name: str) -> Callable[[type[C]], type[C]]:
    def made(cls: type[C]) -> type[C]:
        row = dataclass(kw_only=True, slots=True)(cls)
        row.CODE, row.NAME = code, name
        row.FIELDS = tuple(
            _Field(
                each.name,
                each.metadata["kind"],
                None if each.default is dataclasses.MISSING else each.default,
                each.metadata["must"],
            )
            for each in dataclasses.fields(row)  # type: ignore[arg-type]
        )
        _BY_DESCRIPTOR[code] = _BY_DESCRIPTOR[f"amqp:{name}"] = row
        return row

    return made


def _row_of(value: Value) -> type[Composite] | None:
    descriptor = value.descriptor if isinstance(value, Described) else None
    return _BY_DESCRIPTOR.get(descriptor) if isinstance(descriptor, int | str) else None


def composite_of(value: Value) -> Composite:
    """Returns the composite that a value stands for. Raises SyntaxFault."""
    row = _row_of(value)
    if row is None:
        raise SyntaxFault("no performative that is known")
    assert isinstance(value, Described)
    items = value.value
    if not isinstance(items, list) or len(items) > len(row.FIELDS):
        raise SyntaxFault(f"{row.NAME} has other fields than the standard gives it")
    found: dict[str, Value] = {}
    for each, item in zip(row.FIELDS, items, strict=False):
        if item is None:
            continue
        if not each.kind.fits(item):
            raise SyntaxFault(f"field {each.name} of {row.NAME} is no {each.kind.name}")
        found[each.name] = each.kind.read(item)
    missing = [each.name for each in row.FIELDS if each.must and each.name not in found]
    if missing:
        raise SyntaxFault(f"{row.NAME} lacks its field {missing[0]}")
    return row(**found)


def read(body: bytes) -> tuple[Composite, bytes]:
    """Returns the performative of a frame and the payload behind it. Raises PeerError."""
    value, at = decode(body, 0, len(body))
    found = composite_of(value)
    if at != len(body) and not isinstance(found, Transfer):
        raise SyntaxFault(f"{len(body) - at} bytes behind {found.NAME}")
    return found, body[at:]


# Transport


@_row(0x10, "open:list")
class Open(Composite):
    """Opens a connection."""

    container_id: str = _must(_STRING)
    hostname: str | None = _may(_STRING, None)
    max_frame_size: int = _may(_UINT, 0xFFFFFFFF)
    channel_max: int = _may(_USHORT, 0xFFFF)
    idle_time_out: int | None = _may(_UINT, None)
    outgoing_locales: tuple[str, ...] = _may(_SYMBOLS, ())
    incoming_locales: tuple[str, ...] = _may(_SYMBOLS, ())
    offered_capabilities: tuple[str, ...] = _may(_SYMBOLS, ())
    desired_capabilities: tuple[str, ...] = _may(_SYMBOLS, ())
    properties: dict[Value, Value] | None = _may(_MAP, None)


@_row(0x11, "begin:list")
class Begin(Composite):
    """Begins a session."""

    remote_channel: int | None = _may(_USHORT, None)
    next_outgoing_id: int = _must(_UINT)
    incoming_window: int = _must(_UINT)
    outgoing_window: int = _must(_UINT)
    handle_max: int = _may(_UINT, 0xFFFFFFFF)
    offered_capabilities: tuple[str, ...] = _may(_SYMBOLS, ())
    desired_capabilities: tuple[str, ...] = _may(_SYMBOLS, ())
    properties: dict[Value, Value] | None = _may(_MAP, None)


@_row(0x12, "attach:list")
class Attach(Composite):
    """Attaches a link to a session."""

    name: str = _must(_STRING)
    handle: int = _must(_UINT)
    role: bool = _must(_BOOLEAN)
    """True: receiver."""
    snd_settle_mode: int = _may(_UBYTE, 2)
    rcv_settle_mode: int = _may(_UBYTE, 0)
    source: Value = _may(_TERMINUS, None)
    target: Value = _may(_TERMINUS, None)
    unsettled: dict[Value, Value] | None = _may(_STATES, None)
    incomplete_unsettled: bool = _may(_BOOLEAN, False)
    initial_delivery_count: int | None = _may(_UINT, None)
    max_message_size: int | None = _may(_ULONG, None)
    offered_capabilities: tuple[str, ...] = _may(_SYMBOLS, ())
    desired_capabilities: tuple[str, ...] = _may(_SYMBOLS, ())
    properties: dict[Value, Value] | None = _may(_MAP, None)


@_row(0x13, "flow:list")
class Flow(Composite):
    """Tells windows of a session, and credit of a link."""

    next_incoming_id: int | None = _may(_UINT, None)
    incoming_window: int = _must(_UINT)
    next_outgoing_id: int = _must(_UINT)
    outgoing_window: int = _must(_UINT)
    handle: int | None = _may(_UINT, None)
    delivery_count: int | None = _may(_UINT, None)
    link_credit: int | None = _may(_UINT, None)
    available: int | None = _may(_UINT, None)
    drain: bool = _may(_BOOLEAN, False)
    echo: bool = _may(_BOOLEAN, False)
    properties: dict[Value, Value] | None = _may(_MAP, None)


@_row(0x14, "transfer:list")
class Transfer(Composite):
    """Transfers a message, or a part of one."""

    handle: int = _must(_UINT)
    delivery_id: int | None = _may(_UINT, None)
    delivery_tag: bytes | None = _may(_BINARY, None)
    message_format: int | None = _may(_UINT, None)
    settled: bool | None = _may(_BOOLEAN, None)
    more: bool = _may(_BOOLEAN, False)
    rcv_settle_mode: int | None = _may(_UBYTE, None)
    state: Value = _may(_STATE, None)
    resume: bool = _may(_BOOLEAN, False)
    aborted: bool = _may(_BOOLEAN, False)
    batchable: bool = _may(_BOOLEAN, False)


@_row(0x15, "disposition:list")
class Disposition(Composite):
    """Tells the state of deliveries."""

    role: bool = _must(_BOOLEAN)
    """True: receiver."""
    first: int = _must(_UINT)
    last: int | None = _may(_UINT, None)
    settled: bool = _may(_BOOLEAN, False)
    state: Value = _may(_STATE, None)
    batchable: bool = _may(_BOOLEAN, False)


@_row(0x16, "detach:list")
class Detach(Composite):
    """Detaches a link."""

    handle: int = _must(_UINT)
    closed: bool = _may(_BOOLEAN, False)
    error: Value = _may(_ERROR, None)


@_row(0x17, "end:list")
class End(Composite):
    """Ends a session."""

    error: Value = _may(_ERROR, None)


@_row(0x18, "close:list")
class Close(Composite):
    """Closes a connection."""

    error: Value = _may(_ERROR, None)


@_row(0x1D, "error:list")
class Error(Composite):
    """Tells why something ended."""

    condition: str = _must(_SYMBOL)
    description: str | None = _may(_STRING, None)
    info: dict[Value, Value] | None = _may(_MAP, None)


# Messaging


@_row(0x24, "accepted:list")
class Accepted(Composite):
    """Outcome: the message was taken."""


@_row(0x25, "rejected:list")
class Rejected(Composite):
    """Outcome: the message is not acceptable."""

    error: Value = _may(_ERROR, None)


@_row(0x26, "released:list")
class Released(Composite):
    """Outcome: the message was not looked at."""


@_row(0x27, "modified:list")
class Modified(Composite):
    """Outcome: the message comes again, changed."""

    delivery_failed: bool = _may(_BOOLEAN, False)
    undeliverable_here: bool = _may(_BOOLEAN, False)
    message_annotations: dict[Value, Value] | None = _may(_MAP, None)


def accepted(first: int, last: int) -> bytes:
    """Returns the bytes of a disposition that tells a publisher that messages were taken: those of
    `Disposition`, without its table."""
    numbers = first.to_bytes(4, "big") + (
        b"\x40" if first == last else b"\x70" + last.to_bytes(4, "big")
    )
    return b"\0\x53\x15\xc0%c\x05\x41\x70%b\x41\0\x53\x24\x45" % (8 + len(numbers), numbers)


OUTCOMES = ("amqp:accepted:list", "amqp:rejected:list", "amqp:released:list", "amqp:modified:list")
"""Symbols of the outcomes that consumers may use."""


@_row(0x28, "source:list")
class Source(Composite):
    """Place from which a link takes messages."""

    address: Value = _may(_ANY, None)
    durable: int = _may(_UINT, 0)
    expiry_policy: str = _may(_SYMBOL, "session-end")
    timeout: int = _may(_UINT, 0)
    dynamic: bool = _may(_BOOLEAN, False)
    dynamic_node_properties: dict[Value, Value] | None = _may(_MAP, None)
    distribution_mode: str | None = _may(_SYMBOL, None)
    filter: dict[Value, Value] | None = _may(_MAP, None)
    default_outcome: Value = _may(_STATE, None)
    outcomes: tuple[str, ...] = _may(_SYMBOLS, ())
    capabilities: tuple[str, ...] = _may(_SYMBOLS, ())


@_row(0x29, "target:list")
class Target(Composite):
    """Place to which a link sends messages."""

    address: Value = _may(_ANY, None)
    durable: int = _may(_UINT, 0)
    expiry_policy: str = _may(_SYMBOL, "session-end")
    timeout: int = _may(_UINT, 0)
    dynamic: bool = _may(_BOOLEAN, False)
    dynamic_node_properties: dict[Value, Value] | None = _may(_MAP, None)
    capabilities: tuple[str, ...] = _may(_SYMBOLS, ())


@_row(0x30, "coordinator:list")
class Coordinator(Composite):
    """Target of a link that controls transactions."""

    capabilities: tuple[str, ...] = _may(_SYMBOLS, ())


@_row(0x31, "declare:list")
class Declare(Composite):
    """Request to a coordinator: begins a transaction."""

    global_id: Value = _may(_ANY, None)


@_row(0x32, "discharge:list")
class Discharge(Composite):
    """Request to a coordinator: commits a transaction, or rolls it back."""

    txn_id: bytes = _must(_BINARY)
    fail: bool = _may(_BOOLEAN, False)


@_row(0x33, "declared:list")
class Declared(Composite):
    """Outcome: a transaction has begun."""

    txn_id: bytes = _must(_BINARY)


@_row(0x34, "transactional-state:list")
class TransactionalState(Composite):
    """Delivery state: it belongs to a transaction, and has an outcome when that is committed."""

    txn_id: bytes = _must(_BINARY)
    outcome: Value = _may(_STATE, None)


# Security


@_row(0x40, "sasl-mechanisms:list")
class SaslMechanisms(Composite):
    """Tells the mechanisms that are offered."""

    mechanisms: tuple[str, ...] = _must(_SYMBOLS)


@_row(0x41, "sasl-init:list")
class SaslInit(Composite):
    """Chooses a mechanism."""

    mechanism: str = _must(_SYMBOL)
    initial_response: bytes | None = _may(_BINARY, None)
    hostname: str | None = _may(_STRING, None)


@_row(0x44, "sasl-outcome:list")
class SaslOutcome(Composite):
    """Ends the dialog."""

    code: int = _must(_UBYTE)
    additional_data: bytes | None = _may(_BINARY, None)


SASL = (SaslMechanisms, SaslInit, SaslOutcome)
"""Performatives of frames of type 1."""


def address_of_terminus(terminus: object) -> Value:
    """Returns the address of a link's source or target; None: it has none."""
    return terminus.address if isinstance(terminus, Source | Target) else None
