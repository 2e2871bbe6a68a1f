"""Deaths of a dead letter, and the form in which it is published again.

Source: the headers of docs/dead-letters.md. `x-death` is an array of tables, the newest first, one
for each queue and reason. A message that is published again begins a new history, so two headers
carry on what is known of the former ones: `x-republish-count`, how often a triage has republished
it, and `x-republish-deaths`, how often it had died by then.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from convoymq.messages.amqp091 import HEADER_BYTES_MAX, join_header, split_header
from convoymq.model.errors import BrokerError, PeerError
from convoymq.model.tables import EMPTY, Field, Table, decode_table, encode_table
from convoymq.spark.properties import (
    Mended,
    decode_properties,
    mended_text,
    shown_moment,
    shown_text,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)

X_DEATH = "x-death"
FIRST = "x-first-death-"
LAST = "x-last-death-"
REPUBLISH_COUNT = "x-republish-count"
REPUBLISH_DEATHS = "x-republish-deaths"
NUMBER_MAX = (1 << 62) - 1
_DIRECT_REPLY_TO = b"amq.rabbitmq.reply-to"

_HISTORY = (
    "array<struct<reason string, queue string, exchange string, routing_keys array<string>, "
    "count bigint, time timestamp, original_expiration string>>"
)
MESSAGE_COLUMNS: Mapping[str, str] = {
    "offset": "bigint",
    "received_at": "timestamp",
    "via_exchange": "string",
    "via_routing_key": "string",
    "delivery_count": "int",
    "value": "binary",
    "content_header": "binary",
}
"""As the queue's reader has them; `offset` counts in the reservation."""
FACTS: Mapping[str, str] = {
    "reason": "string",
    "queue": "string",
    "exchange": "string",
    "routing_key": "string",
    "died_at": "timestamp",
    "deaths": "bigint",
    "first_reason": "string",
    "first_queue": "string",
    "first_exchange": "string",
    "first_died_at": "timestamp",
    "origin_queue": "string",
    "origin_exchange": "string",
    "origin_routing_key": "string",
    "republish_count": "bigint",
    "history": _HISTORY,
    "headers": "map<string, string>",
    "content_type": "string",
    "message_id": "string",
    "correlation_id": "string",
    "type": "string",
    "app_id": "string",
    "user_id": "string",
    "priority": "int",
    "sent_at": "timestamp",
}
"""Facts that are read out of a content header. `reason`, `queue`, `exchange`, `routing_key` and
`died_at` are of the newest death, `origin_…` of the oldest one."""
COLUMNS: Mapping[str, str] = {**MESSAGE_COLUMNS, **FACTS}
_PROPERTIES = ("content_type", "message_id", "correlation_id", "type", "app_id", "user_id")


def ddl(columns: Mapping[str, str]) -> str:
    """Returns the columns as Spark writes a schema."""
    return ", ".join(f"`{name}` {kind}" for name, kind in columns.items())


def facts(content_header: bytes, mended: Mended | None = None) -> dict[str, object]:
    """Returns the facts in a content header: a value for each column of FACTS. Of one that is
    damaged, nothing is known.

    Args:
        mended: counts what can't be shown as it was sent.
    """
    mended = Counter() if mended is None else mended
    known: dict[str, object] = dict.fromkeys(FACTS)
    known |= {"deaths": 0, "republish_count": 0, "history": [], "headers": {}}
    properties = decode_properties(content_header, mended)
    if properties is None:
        return known
    known |= {name: properties.get(name) for name in (*_PROPERTIES, "priority")}
    known["sent_at"] = properties.get("timestamp")
    try:
        headers = _headers(split_header(content_header)[1])
    except BrokerError:
        mended["headers"] += 1
        return known
    history = _history(headers, mended)
    known["history"] = history
    former = _number(headers, REPUBLISH_DEATHS)
    died = former + sum(_count(death) for death in history)
    known["deaths"] = min(died, NUMBER_MAX)
    known["republish_count"] = _number(headers, REPUBLISH_COUNT)
    if history:
        newest, oldest = history[0], history[-1]
        known |= {name: newest[name] for name in ("reason", "queue", "exchange")}
        known |= {"routing_key": _first_key(newest), "died_at": newest["time"]}
        known |= {"origin_queue": oldest["queue"], "origin_exchange": oldest["exchange"]}
        known["origin_routing_key"] = _first_key(oldest)
        known["first_died_at"] = min(
            (death["time"] for death in history if isinstance(death["time"], int)), default=None
        )
    for name in ("reason", "queue", "exchange"):
        known[name] = _word(headers, LAST + name, known[name], mended)
        first = history[-1][name] if history else None
        known[f"first_{name}"] = _word(headers, FIRST + name, first, mended)
    known["headers"] = _plain(headers, mended)
    return known


def outgoing(
    content_header: bytes, *, republish: bool, deaths: int, count: int, keep_deaths: bool
) -> bytes:
    """Returns the content header with which a message goes on: its properties as they are.

    What PRODUCE refuses is left out: user id, expiration, a reply-to of the direct reply queue.

    Args:
        republish: counts the republish; a parked message keeps its headers.
        deaths: how often the message has died.
        count: how often it was republished before.
        keep_deaths: whether a republished message shows its deaths to its consumer.
    """
    try:
        values = split_header(content_header)[1]
    except PeerError:
        # Nothing can be said of a damaged one; the broker says what is wrong with it.
        return content_header
    values.pop("user_id", None)
    values.pop("expiration", None)
    if values.get("reply_to", b"")[1:].startswith(_DIRECT_REPLY_TO):
        del values["reply_to"]
    try:
        headers = _headers(values)
    except BrokerError:
        # The table goes on as it is: what it says of deaths can't be told from the rest.
        return join_header(values)
    if republish:
        numbers = {
            REPUBLISH_COUNT: Field("l", min(count + 1, NUMBER_MAX)),
            REPUBLISH_DEATHS: Field("l", deaths),
        }
        rest = [pair for pair in headers.items() if pair[0] not in numbers]
        for kept in (keep_deaths, False):
            pairs = [pair for pair in rest if kept or not _tells_death(pair[0])]
            values["headers"] = encode_table(Table.from_fields([*pairs, *numbers.items()]))
            made = join_header(values)
            if len(made) <= HEADER_BYTES_MAX:
                break
        return made
    return join_header(values)


def explode(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Adds FACTS to the messages of record batches. `schema` is that of COLUMNS."""
    mended: Mended = Counter()
    for batch in batches:
        rows = [facts(header, mended) for header in batch.column("content_header").to_pylist()]
        arrays = [
            batch.column(field.name).cast(field.type)
            if field.name in MESSAGE_COLUMNS
            else pa.array([_cell(row[field.name], field.type) for row in rows], field.type)
            for field in schema
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
    if mended:
        log.warning("%s", mended_text({"triage": "of dead letters"}, mended))


def arrow_schema(schema: StructType) -> pa.Schema:
    """Returns the schema of COLUMNS for `explode`."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def _cell(value: object, kind: pa.DataType) -> object:
    return list(value.items()) if isinstance(value, dict) and pa.types.is_map(kind) else value


def _headers(values: Mapping[str, bytes]) -> Table:
    encoded = values.get("headers")
    return EMPTY if encoded is None else decode_table(encoded, 0, len(encoded))[0]


def _history(headers: Table, mended: Mended) -> list[dict[str, object]]:
    found = headers.get(X_DEATH)
    if found is None or not isinstance(found.value, tuple):
        return []
    return [_death(item.value, mended) for item in found.value if isinstance(item.value, Table)]


def _death(table: Table, mended: Mended) -> dict[str, object]:
    time = table.get("time")
    keys = table.get("routing-keys")
    items: Sequence[Field] = keys.value if keys and isinstance(keys.value, tuple) else ()
    return {
        "reason": _word(table, "reason", None, mended),
        "queue": _word(table, "queue", None, mended),
        "exchange": _word(table, "exchange", None, mended),
        "routing_keys": [
            shown_text(item.value, "routing-keys", mended)
            for item in items
            if isinstance(item.value, bytes)
        ],
        "count": max(_number(table, "count"), 1),
        "time": None if time is None else shown_moment(time.value, "time", mended),
        "original_expiration": _word(table, "original-expiration", None, mended),
    }


def _first_key(death: Mapping[str, object]) -> object:
    keys = death["routing_keys"]
    return keys[0] if isinstance(keys, list) and keys else None


def _count(death: Mapping[str, object]) -> int:
    count = death["count"]
    return count if isinstance(count, int) else 1


def _number(table: Table, name: str) -> int:
    field = table.get(name)
    value = None if field is None else field.value
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return min(max(value, 0), NUMBER_MAX)


def _word(table: Table, name: str, other: object, mended: Mended) -> object:
    field = table.get(name)
    if field is None or not isinstance(field.value, bytes):
        return other
    return shown_text(field.value, name, mended)


def _tells_death(name: str) -> bool:
    return name == X_DEATH or name.startswith((FIRST, LAST))


def _plain(headers: Table, mended: Mended) -> dict[str, str | None]:
    """Returns the other headers as text."""
    found: dict[str, str | None] = {}
    for name, value in headers.to_plain().items():
        if not _tells_death(name) and name not in (REPUBLISH_COUNT, REPUBLISH_DEATHS):
            shown = _without_surrogates(name, mended)
            if value is None:
                found[shown] = None
            elif isinstance(value, str):
                found[shown] = _without_surrogates(value, mended)
            else:
                found[shown] = json.dumps(value, default=str)
    return found


def _without_surrogates(text: str, mended: Mended) -> str:
    """Returns text as Arrow takes it: bytes that are not UTF-8 may be surrogates in it."""
    return shown_text(text.encode("utf-8", "surrogateescape"), "headers", mended)
