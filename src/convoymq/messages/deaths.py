"""Headers by which a message tells of its deaths, as RabbitMQ writes them: writer and reader.

| header                                  | content                                                |
|-----------------------------------------|--------------------------------------------------------|
| `x-death`                               | one table for each queue and reason, the newest first  |
| `x-first-death-queue`, `-reason`, `-exchange` | of the first death                               |
| `x-last-death-queue`, `-reason`, `-exchange`  | of the newest one                                |

A table has count `l`, reason, queue `S`, time `T` (of the first such death), exchange `S`,
routing-keys `A`, and original-expiration `S` when the message had an expiration.

What a publisher sends under these names means nothing (RabbitMQ 4.0): `record.tells_deaths` says
whether a dead-lettering queue wrote them. A body stays in its encoding when its message dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from convoymq.kernels.batch import PublishTarget
from convoymq.kernels.content import replace_header
from convoymq.kernels.dead_letters import FirstDeath
from convoymq.messages.amqp091 import (
    HEADER_BYTES_MAX,
    NO_PROPERTIES,
    ContentHeader,
    Properties,
    encode_header,
)
from convoymq.messages.attributes import DELAY, DELIVER_AT, flags_of
from convoymq.messages.copies import COPY, kept_keys
from convoymq.messages.record import names_of, read_stored, telling_deaths, tells_deaths
from convoymq.model.errors import BrokerError
from convoymq.model.tables import EMPTY, Field, Table, bytes_of, shown, text_of

REJECTED = "rejected"
EXPIRED = "expired"
OVER_LENGTH = "maxlen"
X_DEATH = "x-death"
_PARTS = ("reason", "queue", "exchange")
_FIRST = tuple(f"x-first-death-{part}" for part in _PARTS)
_LAST = tuple(f"x-last-death-{part}" for part in _PARTS)
_NAMES = frozenset((X_DEATH, *_FIRST, *_LAST))


@dataclass(frozen=True, slots=True)
class Death:
    """Death of a message: why and where, and where the message goes."""

    queue: str
    reason: str
    time_s: int
    exchange: str
    """The dead-letter exchange."""
    routing_key: str | None
    """None: its own keys."""


Deaths = tuple[tuple[str, str], ...]
"""(queue, reason), the newest first."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message as its dead-letter exchange gets it."""

    keys: tuple[str, ...]
    """By these it is routed."""
    properties: Properties
    headers: Table
    parts: tuple[bytes, bytes]
    """The record: exchange and routing key, content."""
    body_size: int
    flags: int
    """Of ENQUEUE."""
    deaths: Deaths

    @property
    def count(self) -> int:
        """As of a `DeadLetterRun`."""
        return 1

    @property
    def size(self) -> int:
        """Bytes of the record."""
        return len(self.parts[0]) + len(self.parts[1])

    def publish(self, target: PublishTarget, tag: int) -> None:
        """Sends it to a queue; tag 0: no confirm is waited for."""
        target.publish(self.parts, self.body_size, tag, self.flags)


@dataclass(frozen=True, slots=True)
class DeadLetterRun:
    """Neighbouring messages that died for the first time, as their dead-letter exchange gets them,
    for routes that depend on nothing but the routing key."""

    count: int
    keys: tuple[str, ...]
    records: bytes
    """An ENQUEUE command with them."""
    deaths: Deaths
    headers: Table = EMPTY
    properties: Properties = NO_PROPERTIES

    @property
    def size(self) -> int:
        """Bytes of the records."""
        return len(self.records)

    def publish(self, target: PublishTarget, tag: int) -> None:
        """Sends them to a queue, with tags from `tag` on; 0: no confirms are waited for."""
        target.publish_records(self.records, self.count, tag)


def is_cycle(deaths: Deaths, queue: str) -> bool:
    """Returns whether a message has died in a queue before, and nobody has rejected it since."""
    for i, (name, _reason) in enumerate(deaths):
        if name == queue:
            return all(reason != REJECTED for _, reason in deaths[: i + 1])
    return False


def first_death(death: Death) -> FirstDeath:
    """Returns the kernel of what `dead_letter` does to messages that have not died before."""
    words = {"reason": death.reason, "queue": death.queue}
    first, last = (
        Table.of({f"x-{which}-death-{part}": word for part, word in words.items()})
        for which in ("first", "last")
    )
    return FirstDeath(
        bytes_of(death.exchange),
        None if death.routing_key is None else bytes_of(death.routing_key),
        Table.from_fields(_entry(death)).encoded,
        first.encoded,
        last.encoded,
    )


def dead_letter_run(
    block: bytes, command: int, first: int, limit: int, death: Death, kernel: FirstDeath
) -> DeadLetterRun | None:
    """Returns what becomes of record `first` of a command and of those that follow it and go the
    same way, at most `limit`; None: the first is one for `dead_letter`.

    Args:
        kernel: `first_death` of the death.
    Raises:
        ValueError: there is no such record.
    """
    count, records, key = kernel.records(block, command, first, limit)
    if not count:
        return None
    return DeadLetterRun(count, (text_of(key),), records, ((death.queue, death.reason),))


def dead_letter(record: bytes, death: Death) -> DeadLetter:
    """Returns what becomes of a record. Raises BrokerError, ValueError when it is broken."""
    exchange, routing_key, header, content, _ = message = read_stored(record)
    # It has waited: a dead letter goes at once.
    own_headers = message.headers.without(DELAY).without(DELIVER_AT)
    properties = replace(header.properties, headers=own_headers)
    own = (routing_key, *kept_keys(own_headers))
    headers, deaths = _with_death(
        properties, death, exchange, own, written_here=tells_deaths(content)
    )
    keys = own
    if death.routing_key is not None:
        keys = (death.routing_key,)
        headers = headers.without(COPY)
    payload = _encoded(header, properties, headers)
    if len(payload) > HEADER_BYTES_MAX:
        # Better without its deaths than not at all.
        headers, deaths = own_headers, ()
        payload = _encoded(header, properties, headers)
    content = telling_deaths(replace_header(content, payload), bool(deaths))
    return DeadLetter(
        keys=tuple(dict.fromkeys(keys)),
        properties=properties,
        headers=headers,
        parts=(names_of(death.exchange, keys[0]), content),
        body_size=header.body_size,
        flags=flags_of(replace(properties, expiration=None)),
        deaths=deaths,
    )


class Origin(NamedTuple):
    """Death of a message: the queue, why, and by what it had come there."""

    queue: str
    reason: str
    exchange: str
    routing_keys: tuple[str, ...]

    def for_people(self) -> Origin:
        """Returns it as it can be shown: a copied message's routing keys need not be text."""
        queue, reason, exchange = shown(self.queue), shown(self.reason), shown(self.exchange)
        return Origin(queue, reason, exchange, tuple(shown(key) for key in self.routing_keys))


class History(NamedTuple):
    """The first and the newest death."""

    first: Origin
    last: Origin


def history_of(content: bytes, headers: Table) -> History | None:
    """Returns the deaths of a message, by its content frames and headers; None = it did not die, or
    it is not known from whom the headers are."""
    if not tells_deaths(content):
        return None
    entries = entries_of(headers)
    first, last = (_origin(headers, which, entries) for which in ("first", "last"))
    if first is None or last is None:
        return None
    return History(first, last)


def _encoded(header: ContentHeader, properties: Properties, headers: Table) -> bytes:
    """Returns the payload of a content header with these headers, and without an expiration."""
    changed = replace(properties, headers=headers, expiration=None)
    return encode_header(replace(header, properties=changed))


def _with_death(
    properties: Properties,
    death: Death,
    exchange: str,
    keys: Sequence[str],
    *,
    written_here: bool,
) -> tuple[Table, Deaths]:
    """Returns the headers with one more death, and (queue, reason) of all of them."""
    headers = properties.headers or EMPTY
    former: list[Table] = []
    first = None
    if written_here:
        former = entries_of(headers)
        first = [headers.get(name) for name in _FIRST]
    entry: Table | None = None
    rest: list[Table] = []
    for each in former:
        if entry is None and _kind(each) == (death.queue, death.reason):
            entry = each
        else:
            rest.append(each)
    newest = _again(entry) if entry is not None else _new(properties, death, exchange, keys)
    entries = [newest, *rest]
    kept = [(name, field) for name, field in headers.items() if name not in _NAMES]
    kept.append((X_DEATH, Field("A", tuple(Field("F", each) for each in entries))))
    words = [Field("S", bytes_of(word)) for word in (death.reason, death.queue, exchange)]
    known = first if first is not None and None not in first else words
    kept += [(name, field) for name, field in zip(_FIRST, known, strict=True) if field is not None]
    kept += list(zip(_LAST, words, strict=True))
    deaths = tuple(_kind(each) for each in entries)
    try:
        return Table.from_fields(kept), deaths
    except BrokerError:
        # The headers would be too large: better without its deaths than not at all.
        return headers, ()


def entries_of(headers: Table) -> list[Table]:
    """Returns the entries of x-death."""
    found = headers.get(X_DEATH)
    items = found.value if found is not None and isinstance(found.value, tuple) else ()
    return [item.value for item in items if isinstance(item.value, Table)]


def _entry(death: Death) -> list[tuple[str, Field]]:
    """Returns the fields that an entry of x-death begins with."""
    return [
        ("count", Field("l", 1)),
        ("reason", Field("S", bytes_of(death.reason))),
        ("queue", Field("S", bytes_of(death.queue))),
        ("time", Field("T", death.time_s)),
    ]


def _new(properties: Properties, death: Death, exchange: str, keys: Sequence[str]) -> Table:
    fields = [
        *_entry(death),
        ("exchange", Field("S", bytes_of(exchange))),
        ("routing-keys", Field("A", tuple(Field("S", bytes_of(key)) for key in keys))),
    ]
    if properties.expiration is not None:
        fields.append(("original-expiration", Field("S", bytes_of(properties.expiration))))
    return Table.from_fields(fields)


def _again(entry: Table) -> Table:
    """One more death of the same kind: in its place, with a higher count."""
    count = entry.get("count")
    number = count.value if count is not None and isinstance(count.value, int) else 0
    return entry.with_field("count", Field("l", number + 1))


def _text(field: Field | None) -> str:
    """Returns the text of a field; "" when it is none."""
    return text_of(field.value) if field is not None and isinstance(field.value, bytes) else ""


def _kind(entry: Table) -> tuple[str, str]:
    """Returns queue and reason of an entry of x-death."""
    return _text(entry.get("queue")), _text(entry.get("reason"))


def _origin(headers: Table, which: str, tables: Sequence[Table]) -> Origin | None:
    queue, reason, exchange = (
        _text(headers.get(f"x-{which}-death-{part}")) for part in ("queue", "reason", "exchange")
    )
    if not queue:
        return None
    keys: tuple[str, ...] = ()
    for table in tables:
        if _kind(table) == (queue, reason):
            field = table.get("routing-keys")
            if field is not None and isinstance(field.value, tuple):
                keys = tuple(_text(item) for item in field.value)
    return Origin(queue, reason, exchange, keys)
