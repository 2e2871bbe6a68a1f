"""Filters of AMQP 1.0 on the messages that a consumer gets, as RabbitMQ 4.2 has them.

| descriptor                                    | value                                          |
|-----------------------------------------------|------------------------------------------------|
| `amqp:properties-filter` (0x173)              | map of fields of the properties section        |
| `amqp:application-properties-filter` (0x174)  | map of application properties                  |
| `amqp:sql-filter` (0x120), under its own name | an expression, see `messages.amqp10.sql`       |
| `apache.org:selector-filter:string`           | a selector of JMS, see there                   |

A message is wanted when it has all values of a map. Texts `&p:…` and `&s:…` stand for what begins
or ends so, `&&…` for a text that begins with `&`; null for any value. Numbers are equal whatever
their types. An SQL filter takes the place of maps. A filter that cannot be served is left out, as
the standard has it: the answer to an attach names those in force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from uuid import UUID

from convoymq.kernels.content import content_parts, split_record
from convoymq.messages.amqp091 import decode_header
from convoymq.messages.amqp10.encoding import to_amqp10
from convoymq.messages.amqp10.sections import FIELDS, Sections, split
from convoymq.messages.amqp10.sql import Fields, compile_sql
from convoymq.messages.amqp10.values import (
    Described,
    Symbol,
    Timestamp,
    ULong,
    Value,
    decode,
    encode,
)
from convoymq.messages.encodings import AMQP_10, encoding_octet
from convoymq.messages.record import as_amqp091
from convoymq.model.errors import BrokerError, PeerError, SyntaxFault

PROPERTIES = ("amqp:properties-filter", 0x173)
APPLICATION_PROPERTIES = ("amqp:application-properties-filter", 0x174)
SQL = ("amqp:sql-filter", 0x120)
SQL_NAME = "sql-filter"
SELECTOR = ("apache.org:selector-filter:string", 0x468C00000004)
FIELDS_MAX = 16
FILTER_NAME_DIGITS = 16
PRIORITY = 4

Wanted = Callable[[bytes], bool]
"""Returns whether a consumer wants a record."""
_OCTET = encoding_octet(AMQP_10)


class RecordFields:
    """Fields of a record, for filters.

    Raises:
        BrokerError, ValueError: the record is damaged.
    """

    def __init__(self, record: bytes) -> None:
        _, content = split_record(record)
        is_own = content[:1] == bytes((_OCTET,))
        if not is_own:
            content = as_amqp091(content)
        header, body = content_parts(content)
        properties = decode_header(header).properties
        # The body of a message of AMQP 0-9-1 says nothing to filters.
        self._sections: Sections = split(body if is_own else to_amqp10(properties, b""))
        self._priority = properties.priority

    def application_property(self, name: str) -> object:
        """See `Fields`."""
        return self._sections.application_properties.get(name)

    def field(self, name: str) -> object:
        """See `Fields`."""
        return self._sections.properties.get(name)

    @property
    def priority(self) -> int:
        """See `Fields`."""
        return PRIORITY if self._priority is None else self._priority


def filters_in(
    asked: Mapping[Value, Value], utc_ms: Callable[[], int]
) -> tuple[dict[Value, Value], Wanted | None]:
    """Returns the filters of a source that are served, and what they want; None: everything.

    Args:
        utc_ms: returns the time, ms since 1970.
    """
    served: dict[Value, Value] = {}
    tests: dict[str, Callable[[Fields], bool]] = {}
    names: dict[str, Value] = {}
    for name, value in asked.items():
        kind = _kind_of(name, value)
        if kind is None or not isinstance(value, Described):
            continue
        try:
            tests[kind] = _TESTS[kind](value.value, utc_ms)
        except SyntaxFault:
            continue
        served.pop(names.get(kind), None)
        names[kind], served[name] = name, value
    if SQL[0] in tests:
        tests = {SQL[0]: tests[SQL[0]]}
        served = {names[SQL[0]]: served[names[SQL[0]]]}
    if not tests:
        return served, None
    wanted = tuple(tests.values())

    def matches(record: bytes) -> bool:
        try:
            fields = RecordFields(record)
        except (BrokerError, ValueError):
            # Its consumer is told that it is damaged.
            return True
        return all(test(fields) for test in wanted)

    return served, matches


def encoded(served: Mapping[Value, Value]) -> bytes:
    """Returns filters that are served, for another node; empty without any."""
    return encode(dict(served)) if served else b""


def filter_name(filters: bytes) -> str:
    """Returns a short text for `encoded` filters that differs where they do; empty without any."""
    if not filters:
        return ""
    asked, _ = decode(filters, 0, len(filters))
    return sha256(repr(_in_order(asked)).encode()).hexdigest()[:FILTER_NAME_DIGITS]


def _in_order(value: Value) -> object:
    """Returns a value whose maps are in an order that does not depend on its sender."""
    if isinstance(value, Described):
        return repr(value.descriptor), _in_order(value.value)
    if isinstance(value, Mapping):
        return sorted((repr(name), repr(_in_order(each))) for name, each in value.items())
    return value


def wanted_by(filters: bytes, utc_ms: Callable[[], int]) -> Wanted:
    """Returns what `encoded` filters want. Raises PeerError."""
    asked, _ = decode(filters, 0, len(filters))
    wanted = filters_in(asked, utc_ms)[1] if isinstance(asked, Mapping) else None
    if wanted is None:
        raise PeerError("malformed filters")
    return wanted


def _kind_of(name: Value, value: Value) -> str | None:
    """Returns which filter a described value is; None: none that is known here."""
    descriptor = value.descriptor if isinstance(value, Described) else None
    for kind in (PROPERTIES, APPLICATION_PROPERTIES, SQL, SELECTOR):
        is_code = isinstance(descriptor, ULong) and descriptor == kind[1]
        if is_code or (isinstance(descriptor, Symbol) and descriptor == kind[0]):
            return kind[0] if kind is not SQL or name == SQL_NAME else None
    return None


def _by_sql(
    value: Value, utc_ms: Callable[[], int], *, jms: bool = False
) -> Callable[[Fields], bool]:
    if not isinstance(value, str):
        raise SyntaxFault("an SQL filter that is no text")
    return compile_sql(value, utc_ms, jms=jms)


def _by_properties(value: Value, _utc_ms: Callable[[], int]) -> Callable[[Fields], bool]:
    wanted = _entries(value)
    if not wanted.keys() <= {*FIELDS}:
        raise SyntaxFault("a field that the properties section does not have")
    return lambda fields: all(test(fields.field(name)) for name, test in wanted.items())


def _by_application_properties(
    value: Value, _utc_ms: Callable[[], int]
) -> Callable[[Fields], bool]:
    wanted = _entries(value)
    return lambda fields: all(
        test(fields.application_property(name)) for name, test in wanted.items()
    )


_TESTS: dict[str, Callable[[Value, Callable[[], int]], Callable[[Fields], bool]]] = {
    PROPERTIES[0]: _by_properties,
    APPLICATION_PROPERTIES[0]: _by_application_properties,
    SQL[0]: _by_sql,
    SELECTOR[0]: partial(_by_sql, jms=True),
}


def _entries(value: Value) -> dict[str, Callable[[object], bool]]:
    """Returns name -> test of its value. Raises SyntaxFault."""
    if not isinstance(value, Mapping) or not 0 < len(value) <= FIELDS_MAX:
        raise SyntaxFault(f"a filter of 1 to {FIELDS_MAX} fields is expected")
    if not all(isinstance(name, str) for name in value):
        raise SyntaxFault("a field whose name is no text")
    return {str(name): _test(wanted) for name, wanted in value.items()}


def _test(wanted: Value) -> Callable[[object], bool]:
    """Returns a test of a value. Raises SyntaxFault: it is of no simple type."""
    if wanted is None:
        return lambda _value: True
    if isinstance(wanted, str) and wanted.startswith("&"):
        part = wanted[3:]
        if wanted.startswith("&p:"):
            return lambda value: isinstance(value, str) and value.startswith(part)
        if wanted.startswith("&s:"):
            return lambda value: isinstance(value, str) and value.endswith(part)
        if not wanted.startswith("&&"):
            raise SyntaxFault("a text whose & means nothing")
        wanted = wanted[1:]
    kind = _type_of(wanted)
    if kind is None:
        raise SyntaxFault("a value of no simple type")
    return lambda value: _type_of(value) is kind and value == wanted


def _type_of(value: object) -> type | None:
    """Returns what a value can equal; None: nothing."""
    for kind in (bool, Timestamp, str, bytes, UUID):
        if isinstance(value, kind):
            return kind
    return float if isinstance(value, int | float) else None
