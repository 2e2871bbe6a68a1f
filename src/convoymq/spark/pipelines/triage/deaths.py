"""Deaths of a dead letter, and the form in which it is published again.

Source: the headers of docs/dead-letters.md. `x-death` is an array of tables, the newest first, one
for each queue and reason. A message that is published again begins a new history, so two headers
carry on what is known of the former ones: `x-republish-count`, how often a triage has republished
it, and `x-republish-deaths`, how often it had died by then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from convoymq.model.errors import BrokerError
from convoymq.model.tables import EMPTY, Field, Table, decode_table, encode_table
from convoymq.spark.properties import decode_properties, join_properties, split_properties

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

X_DEATH = "x-death"
FIRST = "x-first-death-"
LAST = "x-last-death-"
REPUBLISH_COUNT = "x-republish-count"
REPUBLISH_DEATHS = "x-republish-deaths"
HEADER_BYTES_MAX = 131_072 - 8
"""A content header is not larger: a frame's size without its framing."""
NUMBER_MAX = (1 << 62) - 1
MOMENT_US_MAX = 253_402_300_800 * 1_000_000
"""The year 10,000."""
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


def facts(content_header: bytes) -> dict[str, object]:
    """Returns the facts in a content header: a value for each column of FACTS. Of one that is
    damaged, nothing is known."""
    known: dict[str, object] = dict.fromkeys(FACTS)
    known |= {"deaths": 0, "republish_count": 0, "history": [], "headers": {}}
    try:
        properties = decode_properties(content_header)
        headers = _headers(split_properties(content_header))
    except (ValueError, BrokerError):
        return known
    known |= {name: properties.get(name) for name in (*_PROPERTIES, "priority")}
    known["sent_at"] = _moment(properties.get("timestamp"))
    history = _history(headers)
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
        known[name] = _word(headers, LAST + name, known[name])
        known[f"first_{name}"] = _word(
            headers, FIRST + name, history[-1][name] if history else None
        )
    known["headers"] = _plain(headers)
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
        values = split_properties(content_header)
        headers = _headers(values)
    except (ValueError, BrokerError):
        # Nothing can be said of a damaged one; the broker says what is wrong with it.
        return content_header
    values.pop("user_id", None)
    values.pop("expiration", None)
    if values.get("reply_to", b"")[1:].startswith(_DIRECT_REPLY_TO):
        del values["reply_to"]
    if republish:
        numbers = {
            REPUBLISH_COUNT: Field("l", min(count + 1, NUMBER_MAX)),
            REPUBLISH_DEATHS: Field("l", deaths),
        }
        rest = [pair for pair in headers.items() if pair[0] not in numbers]
        for kept in (keep_deaths, False):
            pairs = [pair for pair in rest if kept or not _tells_death(pair[0])]
            values["headers"] = encode_table(Table.from_fields([*pairs, *numbers.items()]))
            made = join_properties(values)
            if len(made) <= HEADER_BYTES_MAX:
                break
        return made
    return join_properties(values)


def explode(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Adds FACTS to the messages of record batches. `schema` is that of COLUMNS."""
    for batch in batches:
        rows = [facts(header) for header in batch.column("content_header").to_pylist()]
        arrays = [
            batch.column(field.name).cast(field.type)
            if field.name in MESSAGE_COLUMNS
            else pa.array([_cell(row[field.name], field.type) for row in rows], field.type)
            for field in schema
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Returns the schema of COLUMNS for `explode`."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def _cell(value: object, kind: pa.DataType) -> object:
    return list(value.items()) if isinstance(value, dict) and pa.types.is_map(kind) else value


def _headers(values: Mapping[str, bytes]) -> Table:
    encoded = values.get("headers")
    return EMPTY if encoded is None else decode_table(encoded, 0, len(encoded))[0]


def _history(headers: Table) -> list[dict[str, object]]:
    found = headers.get(X_DEATH)
    if found is None or not isinstance(found.value, tuple):
        return []
    return [_death(item.value) for item in found.value if isinstance(item.value, Table)]


def _death(table: Table) -> dict[str, object]:
    time = table.get("time")
    keys = table.get("routing-keys")
    items: Sequence[Field] = keys.value if keys and isinstance(keys.value, tuple) else ()
    return {
        "reason": _word(table, "reason", None),
        "queue": _word(table, "queue", None),
        "exchange": _word(table, "exchange", None),
        "routing_keys": [_text(item.value) for item in items if isinstance(item.value, bytes)],
        "count": max(_number(table, "count"), 1),
        "time": _moment(time.value * 1_000_000) if time and isinstance(time.value, int) else None,
        "original_expiration": _word(table, "original-expiration", None),
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


def _moment(us: object) -> int | None:
    """Returns a time that Spark can show; anybody may send any other."""
    return us if isinstance(us, int) and 0 <= us < MOMENT_US_MAX else None


def _word(table: Table, name: str, other: object) -> object:
    field = table.get(name)
    if field is None or not isinstance(field.value, bytes):
        return other
    return _text(field.value)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _tells_death(name: str) -> bool:
    return name == X_DEATH or name.startswith((FIRST, LAST))


def _plain(headers: Table) -> dict[str, str | None]:
    """Returns the other headers as text."""
    found: dict[str, str | None] = {}
    for name, value in headers.to_plain().items():
        if not _tells_death(name) and name not in (REPUBLISH_COUNT, REPUBLISH_DEATHS):
            if value is None or isinstance(value, str):
                found[name] = value
            else:
                found[name] = json.dumps(value, default=str)
    return found
