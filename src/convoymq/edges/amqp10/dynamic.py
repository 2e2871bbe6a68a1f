"""Dynamic termini: nodes that come with a link and go with it.

| capability                | node                                                             |
|---------------------------|------------------------------------------------------------------|
| `temporary-queue`         | an exclusive classic queue; of sources and targets               |
| `rabbitmq:volatile-queue` | direct replies: no queue, what the client has no credit for is   |
|                           | dropped; of sources whose messages come settled                  |
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from convoymq.broker.declarations import generated_name
from convoymq.edges.amqp10.addresses import address_of
from convoymq.edges.amqp10.errors import INVALID_FIELD, NOT_IMPLEMENTED, link_fault
from convoymq.edges.amqp10.link import SETTLED, attach_later
from convoymq.edges.amqp10.outgoing import Direct
from convoymq.edges.amqp10.performatives import Attach, Source, Target
from convoymq.edges.amqp10.states import SessionState
from convoymq.edges.declaring import Declaring
from convoymq.kernels.content import split_record
from convoymq.messages.amqp10.message import transfer_of
from convoymq.messages.amqp10.values import Array, Described, Symbol, ULong, Value
from convoymq.messages.record import read_names
from convoymq.model.errors import BrokerError
from convoymq.model.tables import Table
from convoymq.queues.message_checks import REPLY_PREFIX

if TYPE_CHECKING:
    from convoymq.edges.amqp10.session import Session

log = structlog.get_logger()

TEMPORARY, VOLATILE = "temporary-queue", "rabbitmq:volatile-queue"
LINK_DETACH = "link-detach"
_DELETE_ON_CLOSE = Described(ULong(0x2B), [])
_PROPERTIES: dict[Value, Value] = {
    Symbol("lifetime-policy"): _DELETE_ON_CLOSE,
    Symbol("supported-dist-modes"): Array(Symbol, (Symbol("move"),)),
}
_CLASSIC = Table.of({"x-queue-type": "classic"})
_NAMES_BYTES_MAX = 150


def attach_dynamic(
    session: Session, attach: Attach, then: Callable[[Session, Attach], None]
) -> None:
    """Attaches a link whose terminus is dynamic. Raises Fault: there is no such one.

    Args:
        then: attaches a link to a queue that exists.
    """
    own = attach.source if attach.role else attach.target
    assert isinstance(own, Source | Target)
    if own.address:
        raise link_fault(INVALID_FIELD, "Attach refused: a dynamic terminus has no address yet")
    if isinstance(own, Source) and VOLATILE in own.capabilities:
        if (attach.snd_settle_mode, own.durable, own.timeout) != (SETTLED, 0, 0):
            raise link_fault(
                NOT_IMPLEMENTED, f"{VOLATILE} needs settled messages, durable 0, timeout 0"
            )
        ReplyLink(session, attach).start()
    elif TEMPORARY in own.capabilities:
        name = _name(session, attach)
        made = _declare(session, attach, name)
        attach_later(
            session, attach, made, lambda: then(session, _answered(attach, name, TEMPORARY))
        )
    else:
        word = "source" if attach.role else "target"
        raise link_fault(
            NOT_IMPLEMENTED,
            f"Dynamic {word} not supported: {', '.join(own.capabilities) or 'no capability'}",
        )


# --- temporary queues --------------------------------------------------------------------------


async def _declare(session: Session, attach: Attach, name: str) -> None:
    """Declares the queue of a link."""
    await Declaring(session.connection, session.permissions).queue(
        "",
        durable=False,
        exclusive=True,
        auto_delete=False,
        arguments=_CLASSIC,
        generated=name,
    )
    session.temporary[attach.handle] = name
    if session.state is not SessionState.MAPPED:
        session.drop_temporary(attach.handle)


async def delete_temporary(session: Session, name: str) -> None:
    """Deletes the queue of a link that is gone; what cannot be deleted goes with its connection."""
    connection = session.connection
    with suppress(BrokerError):
        await session.broker.queue_admin.delete_queue(
            connection.vhost, name, if_unused=False, if_empty=False, owner=connection.id
        )


def _name(session: Session, attach: Attach) -> str:
    opened = session.connection.peer_open
    container = opened.container_id if opened is not None else ""
    if len(container.encode()) + len(attach.name.encode()) < _NAMES_BYTES_MAX:
        return generated_name(f"amq.dyn-{container}-{attach.name}-")
    return generated_name("amq.dyn.gen-")


def _answered(attach: Attach, name: str, capability: str) -> Attach:
    """Returns an attach whose terminus is the node that was made."""
    own = attach.source if attach.role else attach.target
    assert isinstance(own, Source | Target)
    made = replace(
        own,
        address=address_of(name),
        durable=0,
        expiry_policy=LINK_DETACH,
        timeout=0,
        dynamic_node_properties=_PROPERTIES,
        capabilities=(capability,),
    )
    return replace(attach, source=made) if attach.role else replace(attach, target=made)


# --- direct replies ----------------------------------------------------------------------------


class ReplyLink(Direct):
    """A link of a consumer of direct replies. What it has no credit for is dropped."""

    def __init__(self, session: Session, attach: Attach) -> None:
        self._token = session.broker.replies.register(self._on_reply)
        super().__init__(session, _answered(attach, REPLY_PREFIX + self._token, VOLATILE))

    def _on_reply(self, record: bytes) -> None:
        session = self.session
        try:
            names, content = split_record(bytes(record))
            message = transfer_of(*read_names(names), content)
        except (BrokerError, ValueError) as error:
            log.error("amqp.batch_damaged", queue=REPLY_PREFIX + self._token, reason=str(error))
            return
        if self.waiting < session.settings.queue_credit_large and self.push(message):
            session.connection.counters.delivered_no_ack += 1
        else:
            session.broker.counters.dropped_replies += 1

    def give_back(self) -> None:
        """Takes no more replies."""
        self.session.broker.replies.unregister(self._token)
        super().give_back()

    def end(self) -> None:
        """Ends without a word."""
        self.session.broker.replies.unregister(self._token)
        super().end()
