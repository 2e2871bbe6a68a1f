"""The CC and BCC headers: more routing keys that a message brings along."""

from __future__ import annotations

from convoymq.model.refusals import invalid_copy_header
from convoymq.model.tables import Table, text_of

COPY = "CC"
BLIND_COPY = "BCC"


def extra_keys(headers: Table) -> tuple[str, ...]:
    """Returns the routing keys in CC and BCC, in that order.

    Raises:
        PreconditionFailed: one of them is not an array of strings.
    """
    return _keys(headers, COPY) + _keys(headers, BLIND_COPY)


def kept_keys(headers: Table) -> tuple[str, ...]:
    """Returns the routing keys in CC of a message that is stored: BCC was taken out when it was
    published. A header that is no array of strings has none."""
    field = headers.get(COPY)
    items = field.value if field is not None and isinstance(field.value, tuple) else ()
    return tuple(
        text_of(item.value) for item in items if item.code == "S" and isinstance(item.value, bytes)
    )


def without_blind_copies(headers: Table) -> Table:
    """Returns the headers as receivers may see them."""
    return headers.without(BLIND_COPY)


def _keys(headers: Table, name: str) -> tuple[str, ...]:
    field = headers.get(name)
    if field is None:
        return ()
    if not isinstance(field.value, tuple):
        raise invalid_copy_header(name, field.type_name)
    keys = []
    for item in field.value:
        if item.code != "S" or not isinstance(item.value, bytes):
            raise invalid_copy_header(name, item.type_name)
        # A key that is not text can't equal any binding key, and must not become one.
        keys.append(text_of(item.value))
    return tuple(keys)
