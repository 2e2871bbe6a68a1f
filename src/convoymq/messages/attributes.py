"""Requests of a message to its queues: time limit, priority, delay, group, order key; sans IO.

| asks for       | by                                   | see                     |
|----------------|--------------------------------------|-------------------------|
| a time limit   | property expiration                  | ADR 0043                |
| a priority     | property priority                    | ADR 0043                |
| a later time   | header `x-delay` or `x-deliver-at`   | ADR 0049                |
| a group        | header `x-group-id`                  | ADR 0051                |
| an order key   | header `x-order-key`                 | ADR 0064, topics only   |

`queues.message_properties` says which queues serve it.
"""

from __future__ import annotations

import math

from convoymq.messages.amqp091 import Properties
from convoymq.model.refusals import invalid_delay, invalid_expiration
from convoymq.model.tables import INTEGER_CODES, Field, Table

PRIORITY_NORMAL_MAX = 4
"""Up to here a priority is that of a message without one: 0 is what many clients always send, and 4
is the default of JMS."""
EXPIRATION_MS_MAX = 315_360_000_000
RECORD_PRIORITY = 2
RECORD_EXPIRATION = 4
"""Flags of ENQUEUE: some record carries the property."""
RECORD_HEADERS = 8
"""Some record carries one of `QUEUE_HEADERS`."""
DELAY = "x-delay"
DELIVER_AT = "x-deliver-at"
GROUP_ID = "x-group-id"
ORDER_KEY = "x-order-key"
QUEUE_HEADERS = (DELAY, DELIVER_AT, GROUP_ID)
"""Headers that queues act on."""
DELAYS = (DELAY, DELIVER_AT)
NAME_CODES = ("S", "x")
"""Types of a header that names a group; one of another type is none."""
DELAY_MS_MAX = EXPIRATION_MS_MAX
DIGITS_MAX = 13
"""Of a delay as text."""
DELIVER_AT_MS_MAX = 253_402_300_799_999
"""The last millisecond of the year 9999."""


def asked_property(
    expiration: object, priority: int | None, headers: Table | None = None
) -> str | None:
    """Returns the property or header by which a message asks for what only some queues do, the
    rarest of them; None = none. Raises PreconditionFailed: a header is not acceptable."""
    waits = None if headers is None else asked_delay(headers)
    if waits is not None:
        return waits
    if expiration is not None:
        return "expiration"
    if priority is not None and priority > PRIORITY_NORMAL_MAX:
        return "priority"
    group = None if headers is None else headers.get(GROUP_ID)
    # What nobody refuses but for its version comes last.
    return GROUP_ID if group is not None and group.code in NAME_CODES else None


def flags_of(properties: Properties) -> int:
    """Returns the flags of an ENQUEUE with a message that has these properties."""
    flags = 0 if properties.priority is None else RECORD_PRIORITY
    if properties.expiration is not None:
        flags |= RECORD_EXPIRATION
    if properties.headers is not None and any(name in properties.headers for name in QUEUE_HEADERS):
        flags |= RECORD_HEADERS
    return flags


def with_integer_delay(headers: Table) -> Table:
    """Returns the headers with the delay as queues read it: a number that came as text, as clients
    of RabbitMQ's plugin send it, or with a fraction, is an integer then."""
    field = headers.get(DELAY)
    number = None if field is None else _whole_ms(field)
    return headers if number is None else headers.with_field(DELAY, number)


def _whole_ms(field: Field) -> int | None:
    """Returns the integer of text or of a float; None: it is none, or is one already."""
    match field.code, field.value:
        case "S", bytes(text) if text.removeprefix(b"-").isdigit() and len(text) <= DIGITS_MAX:
            return int(text)
        case "f" | "d", float(number) if math.isfinite(number) and abs(number) <= DELAY_MS_MAX:
            return int(number)
        case _:
            return None


def asked_delay(headers: Table) -> str | None:
    """Returns the header by which a message asks to be delivered later; None = it does not, or is
    to be delivered at once.

    Raises:
        PreconditionFailed: it is no integer or too large, or there are both.
    """
    asked = None
    if DELAY in headers and DELIVER_AT in headers:
        raise invalid_delay(DELIVER_AT, f"excludes header '{DELAY}'")
    for name, most in ((DELAY, DELAY_MS_MAX), (DELIVER_AT, DELIVER_AT_MS_MAX)):
        field = headers.get(name)
        if field is None:
            continue
        if field.code not in INTEGER_CODES or not isinstance(field.value, int):
            raise invalid_delay(name, "must be an integer, in milliseconds")
        if field.value > most:
            raise invalid_delay(name, f"must be at most {most} ms")
        if field.value > 0:
            if GROUP_ID in headers:
                raise invalid_delay(name, f"excludes header '{GROUP_ID}'")
            asked = name
    return asked


def check_expiration(text: str) -> None:
    """Checks the expiration property: milliseconds, not negative, at most ten years.

    Raises:
        PreconditionFailed: it is something else; the reason names what.
    """
    sign = 1 if text[:1] in ("-", "+") else 0
    end = sign
    while end < len(text) and text[end] in "0123456789":
        end += 1
    if end == sign:
        raise invalid_expiration(text, "no_integer")
    if end < len(text):
        raise invalid_expiration(text, f'{{leftover_string,"{text[end:]}"}}')
    value = int(text)
    if value < 0:
        raise invalid_expiration(text, f"{{value_negative,{value}}}")
    if value > EXPIRATION_MS_MAX:
        raise invalid_expiration(text, f"{{value_too_large,{value}}}")
