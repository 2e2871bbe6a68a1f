"""History of a message's deaths, to be read (`deaths` writes it).

Only what this cluster wrote counts: a publisher can send headers of the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from convoymq.model.tables import Field, Table, shown, text_of
from convoymq.queues.deaths import CHANNEL, X_DEATH

_CHANNEL = CHANNEL.to_bytes(2, "big")


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
        _text(headers.get(f"x-{which}-death-{part}")) for part in ("queue", "reason", "exchange")
    )
    if not queue:
        return None
    keys: tuple[str, ...] = ()
    for table in tables:
        if (_text(table.get("queue")), _text(table.get("reason"))) == (queue, reason):
            field = table.get("routing-keys")
            if field is not None and isinstance(field.value, tuple):
                keys = tuple(_text(item) for item in field.value)
    return Origin(queue, reason, exchange, keys)


def _text(field: Field | None) -> str:
    """Returns the text of a field; "" when it is none."""
    return text_of(field.value) if field is not None and isinstance(field.value, bytes) else ""
