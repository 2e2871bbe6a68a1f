"""Names in the first bytes of a published message, sans IO."""

from __future__ import annotations

from convoymq.model.errors import FrameFault


def names_of(key: bytes) -> tuple[str, str]:
    """Exchange and routing key of a record's first bytes.

    Raises:
        FrameFault: they are not UTF-8.
    """
    length = key[0]
    try:
        return key[1 : 1 + length].decode(), key[2 + length :].decode()
    except UnicodeDecodeError as error:
        raise FrameFault("Malformed UTF-8 in shortstr") from error
