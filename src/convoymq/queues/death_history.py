"""History of a message's deaths, to be read (`deaths` writes it).

Only what this cluster wrote counts: a publisher can send headers of the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from convoymq.model.tables import Field, Table
from convoymq.queues.deaths import CHANNEL, X_DEATH

_CHANNEL = CHANNEL.to_bytes(2, "big")


class Origin(NamedTuple):
    """Death of a message: the queue, why, and by what it had come there."""

    queue: str
    reason: str
    exchange: str
    routing_keys: tuple[str, ...]


class History(NamedTuple):
    """The first and the newest death."""

    first: Origin
    last: Origin


def history_of(content: bytes, headers: Table) -> History | None:
    """Returns the deaths of a message, by its content frames and headers; None = it did not die, or
    it is not known from whom the headers are."""
    if content[1:3] != _CHANNEL:
        return None
    found = headers.get(X_DEATH)
    items = found.value if found is not None and isinstance(found.value, tuple) else ()
    tables = [item.value for item in items if isinstance(item.value, Table)]
    first, last = (_origin(headers, which, tables) for which in ("first", "last"))
    if first is None or last is None:
        return None
    return History(first, last)


def _origin(headers: Table, which: str, tables: Sequence[Table]) -> Origin | None:
    queue, reason, exchange = (
        text_of(headers.get(f"x-{which}-death-{part}")) for part in ("queue", "reason", "exchange")
    )
    if not queue:
        return None
    keys: tuple[str, ...] = ()
    for table in tables:
        if (text_of(table.get("queue")), text_of(table.get("reason"))) == (queue, reason):
            field = table.get("routing-keys")
            if field is not None and isinstance(field.value, tuple):
                keys = tuple(text_of(item) for item in field.value)
    return Origin(queue, reason, exchange, keys)


def text_of(field: Field | None) -> str:
    """Returns the text of a field; "" when it is none."""
    if field is None or not isinstance(field.value, bytes):
        return ""
    return field.value.decode("utf-8", "replace")
