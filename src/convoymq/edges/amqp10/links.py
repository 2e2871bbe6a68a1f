"""Attaching of links: what is refused, and to what links lead. Source: OASIS AMQP 1.0 part 2
section 2.6, and RabbitMQ 4.3 behaviour."""

from __future__ import annotations

from time import time
from typing import TYPE_CHECKING

from convoymq.edges.amqp10.addresses import MANAGEMENT, Destination, source_of, target_of
from convoymq.edges.amqp10.browsing import COPY, Browser
from convoymq.edges.amqp10.dynamic import attach_dynamic
from convoymq.edges.amqp10.errors import (
    INVALID_FIELD,
    NOT_IMPLEMENTED,
    Scope,
    fault_of,
    link_fault,
)
from convoymq.edges.amqp10.link import MIXED, SETTLED, attach_later, refuse
from convoymq.edges.amqp10.management import attach_management
from convoymq.edges.amqp10.performatives import (
    OUTCOMES,
    Attach,
    Coordinator,
    Source,
    Target,
)
from convoymq.edges.amqp10.receiving import Receiver, check_publish, only_queue
from convoymq.edges.amqp10.recovery import Claim, check_resumable, is_resumable, key_of
from convoymq.edges.amqp10.sending import Sender
from convoymq.edges.amqp10.subscriptions import attach_subscription, wants_subscription
from convoymq.edges.amqp10.transactions import attach_coordinator
from convoymq.messages.amqp10.filters import SELECTOR, Wanted, filters_in
from convoymq.messages.amqp10.values import Described, Int, Timestamp, Value
from convoymq.model.errors import BrokerError, PreconditionFailed
from convoymq.model.tables import Field
from convoymq.queues.interface import Queue

if TYPE_CHECKING:
    from convoymq.edges.amqp10.session import Session

SECOND = 1
"""rcv-settle-mode."""
OFFSET_FILTER = "rabbitmq:stream-offset-spec"


def attach(session: Session, attach: Attach) -> None:
    """Attaches a link, or refuses it: the reply has no terminus then, and a detach follows."""
    try:
        _check(attach)
        if isinstance(attach.target, Coordinator):
            check_resumable(attach, None)
            attach_coordinator(session, attach)
            return
        own = attach.source if attach.role else attach.target
        if wants_subscription(attach):
            _attach_subscriber(session, attach)
            return
        if not isinstance(own, Source | Target):
            raise link_fault(INVALID_FIELD, "Attach refused: a link without a terminus here")
        if own.address == MANAGEMENT or own.dynamic:
            check_resumable(attach, None)
        if own.address == MANAGEMENT:
            attach_management(session, attach)
        elif own.dynamic:
            attach_dynamic(session, attach, _attach_queue)
        else:
            _attach_queue(session, attach)
    except BrokerError as error:
        fault = fault_of(error, Scope.LINK)
        if fault.scope is not Scope.LINK:
            raise
        refuse(session, attach, fault)


def _attach_queue(session: Session, attach: Attach) -> None:
    if attach.role:
        _attach_consumer(session, attach)
    else:
        _attach_publisher(session, attach)


def _check(attach: Attach) -> None:
    """Raises Fault for what is refused whatever the link leads to."""
    for name, mode, most in (
        ("snd-settle-mode", attach.snd_settle_mode, MIXED),
        ("rcv-settle-mode", attach.rcv_settle_mode, SECOND),
    ):
        if mode > most:
            raise link_fault(INVALID_FIELD, f"Attach refused: there is no {name} {mode}")
    if attach.rcv_settle_mode == SECOND and attach.snd_settle_mode != SETTLED:
        raise link_fault(NOT_IMPLEMENTED, "rcv-settle-mode second not supported")


# Publishers


def _attach_publisher(session: Session, attach: Attach) -> None:
    target = attach.target
    if not isinstance(target, Target):
        raise link_fault(INVALID_FIELD, "Attach refused: a link to a target without a target")
    if attach.initial_delivery_count is None:
        raise link_fault(
            INVALID_FIELD, "Attach refused: a sender's attach lacks its initial-delivery-count"
        )
    destination = None
    if target.address is not None:
        destination = _destination(target.address)
        check_publish(session, destination.exchange, None)
        if not (destination.exchange or destination.is_reply):
            session.find_queue(destination.routing_key)
    queue = only_queue(session, destination)
    check_resumable(attach, queue)
    if queue is None or not is_resumable(attach, queue):
        Receiver(session, attach, destination).start(attach)
        return
    claim = Claim(queue, key_of(session, attach))
    made = Receiver(session, attach, destination, claim)
    attach_later(session, attach, claim.begin(attach), lambda: made.start(attach))


def _destination(address: Value) -> Destination:
    try:
        return target_of(address)
    except PreconditionFailed as error:
        raise link_fault(INVALID_FIELD, f"Attach refused: {error.text}") from error


# Consumers


def _attach_consumer(session: Session, attach: Attach) -> None:
    source = attach.source
    if not isinstance(source, Source) or source.address is None:
        raise link_fault(INVALID_FIELD, "Attach refused: a link from a source without an address")
    _check_outcomes(source)
    try:
        name = source_of(source.address)
    except PreconditionFailed as error:
        raise link_fault(INVALID_FIELD, f"Attach refused: {error.text}") from error
    _consume(session, attach, name)


def _attach_subscriber(session: Session, attach: Attach) -> None:
    if isinstance(attach.source, Source):
        # Nothing is made for a link that is refused.
        _check_outcomes(attach.source)
    attach_subscription(session, attach, _consume)


def _check_outcomes(source: Source) -> None:
    unknown = [each for each in source.outcomes if each not in OUTCOMES]
    if unknown:
        raise link_fault(NOT_IMPLEMENTED, f"Outcomes not supported: {', '.join(unknown)}")


def _consume(session: Session, attach: Attach, name: str) -> None:
    """Attaches a link to a queue."""
    source = attach.source
    assert isinstance(source, Source)
    session.permissions.check("read", "queue", name)
    queue = session.find_queue(name)
    streams = queue.features.reads_by_offset
    copies = source.distribution_mode == COPY and not streams
    check_resumable(attach, None if copies else queue)
    if copies:
        Browser(session, attach, queue).start()
        return
    offset, filters, wants = _filters(source, queue)
    Sender(session, attach, queue, filters).subscribe(_priority(attach), offset, wants)


def _priority(attach: Attach) -> int:
    value = (attach.properties or {}).get("rabbitmq:priority")
    # Of another type, it is none.
    return int(value) if isinstance(value, Int) else 0


def _filters(
    source: Source, queue: Queue
) -> tuple[Field | None, dict[Value, Value], Wanted | None]:
    """Returns the offset at which a stream is read, the filters that are served, and what they
    want. Others are left out: the answer names those in force. Raises Fault: what names an offset
    is none, or a selector of JMS is not served, whose clients do not look at the answer."""
    asked = source.filter or {}
    served: dict[Value, Value] = {}
    wants = offset = None
    if queue.features.filters:
        served, wants = filters_in(asked, _utc_ms)
    for name, value in asked.items():
        if not isinstance(value, Described) or name in served:
            continue
        if value.descriptor == OFFSET_FILTER and queue.features.reads_by_offset:
            offset = _offset(value.value)
            served[name] = value
        elif value.descriptor in SELECTOR:
            if queue.features.filters:
                raise link_fault(INVALID_FIELD, f"Attach refused: no selector: {value.value}")
            raise link_fault(NOT_IMPLEMENTED, f"Filters not supported: {value.descriptor}")
    return offset, served, wants


def _utc_ms() -> int:
    return int(time() * 1000)


def _offset(value: Value) -> Field:
    if isinstance(value, str):
        return Field("S", value.encode())
    if isinstance(value, Timestamp):
        return Field("T", int(value) // 1000)
    if isinstance(value, int) and not isinstance(value, bool):
        return Field("l", int(value))
    raise link_fault(INVALID_FIELD, f"Attach refused: {OFFSET_FILTER} is no offset")
