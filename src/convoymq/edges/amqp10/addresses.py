"""Addresses of termini in RabbitMQ's format v2, pure.

    /queues/QUEUE            source, target (default exchange)
    /exchanges/EXCHANGE      target, empty routing key
    /exchanges/EXCHANGE/KEY  target

Every part is UTF-8, percent-encoded (RFC 3986).
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from convoymq.messages.amqp10.values import Value
from convoymq.model.errors import PreconditionFailed
from convoymq.queues.message_checks import REPLY_PREFIX

MANAGEMENT = "/management"
"""Address of the management node."""
_QUEUES = "/queues/"
_EXCHANGES = "/exchanges/"
_BAD_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")
_FORMS = "'/queues/QUEUE', '/exchanges/EXCHANGE' or '/exchanges/EXCHANGE/KEY'"


class Destination(NamedTuple):
    """Place that messages are published to."""

    exchange: str
    """Empty: the default exchange."""
    routing_key: str

    @property
    def is_reply(self) -> bool:
        """Returns whether it is a consumer of direct replies."""
        return not self.exchange and self.routing_key.startswith(REPLY_PREFIX)


def target_of(address: Value) -> Destination:
    """Returns the destination of an address. Raises PreconditionFailed: it has no such form."""
    if isinstance(address, str) and address.startswith(_QUEUES):
        return Destination("", _part(address, address[len(_QUEUES) :]))
    if isinstance(address, str) and address.startswith(_EXCHANGES):
        exchange, _, key = address[len(_EXCHANGES) :].partition("/")
        name = _part(address, exchange)
        if name != "amq.default" and "/" not in key:
            return Destination(name, unquoted(address, key))
    raise _bad(address)


def source_of(address: Value) -> str:
    """Returns the queue of an address. Raises PreconditionFailed: it has no such form."""
    if isinstance(address, str) and address.startswith(_QUEUES):
        return _part(address, address[len(_QUEUES) :])
    raise _bad(address)


def address_of(queue: str) -> str:
    """Returns the address of a queue."""
    return _QUEUES + quote(queue, safe="")


def exchange_address(exchange: str, key: str) -> str:
    """Returns the address of an exchange with a routing key."""
    return f"{_EXCHANGES}{quote(exchange, safe='')}/{quote(key, safe='')}"


def unquoted(address: str, part: str) -> str:
    """Returns a part of an address without its escapes. Raises PreconditionFailed."""
    if _BAD_ESCAPE.search(part):
        raise _bad(address)
    try:
        return unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise _bad(address) from None


def _part(address: str, part: str) -> str:
    """Returns a name, which must not be empty."""
    name = unquoted(address, part)
    if not name or "/" in part:
        raise _bad(address)
    return name


def _bad(address: Value) -> PreconditionFailed:
    return PreconditionFailed(
        f"bad address {str(address)[:255]!r}: an address is {_FORMS}, with percent-encoded names"
    )
