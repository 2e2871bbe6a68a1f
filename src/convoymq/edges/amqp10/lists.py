"""Sessions and links in the lists of operators, with RabbitMQ's field names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.edges.amqp10.incoming import Incoming
from convoymq.edges.amqp10.link import Link
from convoymq.edges.amqp10.outgoing import UNLIMITED, Outgoing
from convoymq.edges.amqp10.sending import Sender
from convoymq.edges.amqp10.states import LinkState
from convoymq.messages.amqp10.values import Described, Value

if TYPE_CHECKING:
    from convoymq.edges.amqp10.session import Session
    from convoymq.queues.interface import Row

_MODES = ("unsettled", "settled", "mixed")


def session_row(session: Session) -> Row:
    """Returns a session with its links: one row of /api/connections/NAME/sessions."""
    attached = [link for link in session.links.values() if link.state is LinkState.ATTACHED]
    return {
        "channel_number": session.channel,
        "handle_max": session.handle_max,
        "next_incoming_id": session.next_incoming_id,
        "incoming_window": session.incoming_window,
        "next_outgoing_id": session.next_outgoing_id,
        "remote_incoming_window": session.remote_incoming_window,
        "remote_outgoing_window": session.remote_outgoing_window,
        "outgoing_unsettled_deliveries": len(session.unsettled),
        "incoming_links": [_incoming(link) for link in attached if isinstance(link, Incoming)],
        "outgoing_links": [_outgoing(link) for link in attached if isinstance(link, Outgoing)],
    }


def _link(link: Link) -> Row:
    return {"handle": link.handle, "link_name": link.name}


def _incoming(link: Incoming) -> Row:
    return {
        **_link(link),
        "snd_settle_mode": _MODES[link.snd_settle_mode],
        "target_address": _text(link.address),
        "max_message_size": link.message_size_max,
        "delivery_count": link.delivery_count,
        "credit": link.credit,
        "unconfirmed_messages": link.unconfirmed,
    }


def _outgoing(link: Outgoing) -> Row:
    size_max = link.message_size_max
    return {
        **_link(link),
        "source_address": _text(link.address),
        "queue_name": link.queue.name if isinstance(link, Sender) else "",
        "send_settled": link.settled,
        "max_message_size": "unlimited" if size_max == UNLIMITED else size_max,
        "filter": [_filter(*each) for each in link.filters.items()],
        "delivery_count": link.delivery_count,
        "credit": link.credit,
        "consumer_timeout": isinstance(link, Sender) and link.timeout_ms > 0,
    }


def _filter(name: Value, filter_: Value) -> Row:
    assert isinstance(filter_, Described)
    return {
        "name": str(name),
        "descriptor": _text(filter_.descriptor),
        "value": _text(filter_.value),
    }


def _text(value: Value) -> object:
    """Returns a value as JSON has it."""
    return value if value is None or isinstance(value, bool | int | str) else str(value)
