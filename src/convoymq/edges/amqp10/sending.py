# cython: annotation_typing=False
"""Links of consumers: credit, drain, echo, and transfers of what queues hand out.

The queue gets an absolute limit: so many messages in all. It is a part ahead of what was sent, so
that a client with much credit that reads slowly has little lying here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from convoymq.broker.firehose import Origin
from convoymq.edges.amqp10 import outcomes
from convoymq.edges.amqp10.dynamic import delete_temporary
from convoymq.edges.amqp10.errors import (
    ILLEGAL_STATE,
    INTERNAL_ERROR,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    RESOURCE_DELETED,
    Fault,
    Scope,
    fault_of,
    link_fault,
)
from convoymq.edges.amqp10.link import SETTLED, UNSETTLED, refuse, stolen
from convoymq.edges.amqp10.outgoing import Outgoing, Pending
from convoymq.edges.amqp10.performatives import (
    OUTCOMES,
    Attach,
    Detach,
    Flow,
    Released,
    Source,
)
from convoymq.edges.amqp10.recovery import Resumed, is_resumable, key_of, resume, resumes
from convoymq.edges.amqp10.serial import messages_ahead
from convoymq.edges.amqp10.states import LinkState, SessionState
from convoymq.edges.amqp10.timeouts import SettleTimeout, timeout_ms_of
from convoymq.kernels.amqp10_delivery import plain_transfers
from convoymq.kernels.batch import record
from convoymq.kernels.content import split_record
from convoymq.messages.amqp10.filters import Wanted, encoded
from convoymq.messages.amqp10.message import transfer_of
from convoymq.messages.amqp10.values import Symbol, Value
from convoymq.messages.record import read_names
from convoymq.model.errors import BrokerError, as_broker_error
from convoymq.model.tables import Field
from convoymq.queues.interface import LINK_TAKEN, ConsumerSpec, Delivery, Queue

if TYPE_CHECKING:
    from convoymq.edges.amqp10.session import Session

log = structlog.get_logger()

SHORT_TAG_MAX = (1 << 32) - 1
ASKS_MAX = 4
"""Requests to a queue for more messages that may wait for their answers; each is a command in its
log. A request is made when that part of what the queue may hand out is used."""

FILTERS = ("AMQP_FILTEX_PROP_V1_0", "AMQP_FILTEX_SQL_V1_0")
"""Capabilities of a link whose queue serves filters."""
ACTIVE = Symbol("rabbitmq:active")
"""Property of flows: whether the queue serves this consumer, of those that it has."""


class Sender(Outgoing):
    """A consumer's link.

    Args:
        filters: those that are in force.
    """

    __slots__ = (
        "_active", "_again", "_asked", "_detach", "_drains", "_early", "_echoes", "_got", "_held",
        "_is_taken", "_limit", "_sent", "_tells", "_timeout", "client", "number", "queue", "ready",
        "resumable", "resumed", "size", "timeout_ms",
    )  # fmt: skip

    def __init__(
        self, session: Session, attach: Attach, queue: Queue, filters: dict[Value, Value]
    ) -> None:
        super().__init__(session, attach)
        self.queue = queue
        self.client = session.client_of(queue)
        session.last_number += 1
        self.number = session.last_number
        self.ready = 0
        """Messages in the queue, by its last answer."""
        if filters:
            self.filters = filters
        self.resumable = is_resumable(attach, queue)
        self.resumed = Resumed(self)
        self._held: Sequence[int] = ()
        """Message ids that the queue had given this link before, while it is being attached."""
        self._is_taken = False
        self._sent = 0
        self._got = 0
        self._limit = 0
        """Messages that the queue may hand out, in all."""
        self._asked = 0
        """Answers of the queue that are due."""
        self._tells = False
        """The client is told of the answer that is due: of a drain or an echo."""
        self._drains = False
        self._echoes = False
        self._again = False
        self.size = 0
        """Bytes of a message of those that were sent last; 0: none was."""
        self._early: Flow | None = None
        self._active: bool | None = None
        self.timeout_ms = 0 if self.settled else timeout_ms_of(attach, queue)
        """Time that the client has to settle a delivery; 0: as long as it takes."""
        self._timeout: SettleTimeout | None = None
        self._detach: Detach | None = None

    def enter(self, state: LinkState) -> None:
        """See `Link`."""
        super().enter(state)
        if self._timeout is not None:
            self._timeout.stop()
            self._timeout = None
        if state is LinkState.ATTACHED and self.timeout_ms:
            self._timeout = SettleTimeout(self, self.timeout_ms)

    # --- attaching -----------------------------------------------------------------------------

    def subscribe(self, priority: int, offset: Field | None, wants: Wanted | None = None) -> None:
        """Registers the consumer at its queue."""
        session = self.session
        session.links[self.handle] = self
        session.by_number[self.number] = self
        attach = self._attach
        assert attach is not None
        key = key_of(session, attach)
        self.take_name(key)
        self.client.subscribe(
            ConsumerSpec(
                number=self.number,
                tag=str(self.handle),
                prefetch=0,
                no_ack=self.settled,
                priority=priority,
                arguments={},
                hears_cancel=True,
                stream_offset=offset,
                credited=True,
                link=key if self.resumable else b"",
                resumes=resumes(attach),
                wants=wants,
                filters=encoded(self.filters) if wants is not None else b"",
            )
        )

    def on_resumed(self, next_id: int, held: Sequence[int]) -> None:
        """The queue has given the link what an older one held."""
        self._sent = self._got = self._limit = next_id
        self._held = held

    def on_subscribed(self, error: Exception | None) -> None:
        """The queue has taken the consumer, or refused it."""
        if self.state is not LinkState.ATTACHING:
            return
        if error is not None:
            self.session.by_number.pop(self.number, None)
            self.enter(LinkState.DETACHED)
            assert self._attach is not None
            refuse(self.session, self._attach, fault_of(as_broker_error(error), Scope.LINK))
            self._attach = None
            return
        assert self._attach is not None
        try:
            unsettled = resume(self, self._attach, self._held)
        except Fault as fault:
            self.client.remove(self.number)
            self.on_subscribed(fault)
            return
        self.enter(LinkState.ATTACHED)
        self._answer_attach(unsettled)
        if self._active is not None:
            self.behind(self.send_echo)
            self.session.pump()
        if self._early is not None:
            self.on_flow(self._early)
        if self._detach is not None:
            self.on_detach(self._detach)

    def _answer_attach(self, unsettled: dict[Value, Value] | None) -> None:
        attach, self._attach = self._attach, None
        assert attach is not None
        source = attach.source
        assert isinstance(source, Source)
        streams = self.queue.features.reads_by_offset
        self.session.send(
            Attach(
                name=attach.name,
                handle=attach.handle,
                role=False,
                snd_settle_mode=SETTLED if self.settled else UNSETTLED,
                rcv_settle_mode=attach.rcv_settle_mode,
                source=replace(
                    source,
                    capabilities=source.capabilities if source.dynamic else (),
                    distribution_mode="copy" if streams else "move",
                    filter={Symbol(name): value for name, value in self.filters.items()} or None,
                    default_outcome=Released(),
                    outcomes=OUTCOMES,
                ),
                target=attach.target,
                unsettled=unsettled,
                initial_delivery_count=0,
                max_message_size=attach.max_message_size,
                offered_capabilities=FILTERS if self.queue.features.filters else (),
            )
        )

    def check_access(self) -> None:
        """Raises AccessRefused: the user may not consume any more."""
        self.session.permissions.check("read", "queue", self.queue.name)

    # --- credit --------------------------------------------------------------------------------

    def on_flow(self, flow: Flow) -> None:
        """Takes the client's credit."""
        if flow.properties and "txn-id" in flow.properties:
            raise link_fault(NOT_IMPLEMENTED, "Transactional acquisition not supported")
        if self.state is LinkState.ATTACHING:
            self._early = flow
            return
        self.take_credit(flow)
        drained, self._drains = self._drains, flow.drain
        self._echoes |= flow.echo
        if drained or flow.drain or self._echoes or self._limit - self._sent > self.credit:
            self.ask()
        else:
            self.top_up()

    def ask(self) -> None:
        """Tells the queue how many messages it may hand out, behind those that are resumed."""
        if self.resumed.want() and self.credit:
            return
        tells = self._drains or self._echoes
        if self._asked and (tells or self._tells or self._asked >= ASKS_MAX):
            # The newest credit goes when the answer is there.
            self._again = True
            return
        limit = self._sent
        if self._is_full():
            # `top_up` goes on when the client has settled.
            self.session.hungry.add(self)
        else:
            limit += min(self.credit, self._ahead_max)
        if limit == self._limit and not tells:
            return
        self._limit = limit
        self._asked += 1
        self._tells = tells
        self.client.grant(self.number, limit, drain=self._drains)

    def top_up(self) -> None:
        """Lets the queue hand out more when a part of what it may is used."""
        session = self.session
        ahead_of, most = self._limit - self._sent, min(self.credit, self._ahead_max)
        if (
            self.state is LinkState.ATTACHED
            and self._asked < ASKS_MAX
            and not self._tells
            and ahead_of * ASKS_MAX <= most * (ASKS_MAX - 1)
            and ahead_of < self.credit
        ):
            if self._is_full():
                return
            self.ask()
        session.hungry.discard(self)

    @property
    def _ahead_max(self) -> int:
        """Returns how many messages the queue may hand out ahead of what was sent."""
        settings = self.session.settings
        return messages_ahead(settings.queue_credit_large, settings.queue_credit, self.size)

    def _is_full(self) -> bool:
        """Returns whether the session's client has to settle before it gets more."""
        session = self.session
        return not self.settled and len(session.unsettled) >= session.settings.unsettled_max

    @property
    def waiting(self) -> int:
        """Returns how many messages the queue has handed out that are not sent."""
        return self._got - self._sent

    def on_credit(self, granted: int, ready: int) -> None:
        """The queue has handed out what it had, up to the limit that it was told."""
        self._asked -= 1
        self._tells = self._tells and self._asked > 0
        self.ready = ready
        self.session.hungry.add(self)
        if self.state is not LinkState.ATTACHED:
            return
        drained = self._drains and not self._again
        echoes, self._echoes = self._echoes and not self._again, self._echoes and self._again
        if drained:
            if granted == self._limit and self._sent + self.credit > granted:
                # A part of the credit was used up; `top_up` goes on when it is sent.
                self._echoes = self._echoes or echoes
            else:
                self._drains = False
                self._limit = granted
                self.behind(self.send_drained)
                echoes = False
        if echoes:
            self.behind(self.send_echo)
        if self._again:
            self._again = False
            self.ask()
        self.session.pump()

    @property
    def available(self) -> int:
        """Returns how many messages wait for credit, as far as is known."""
        return self.ready + self.waiting

    def on_activity(self, active: bool) -> None:
        """The queue serves this consumer, or serves it no more for now."""
        changed, self._active = self._active is not active, active
        if changed and self.state is LinkState.ATTACHED:
            self.behind(self.send_echo)
            self.session.pump()

    @property
    def flow_properties(self) -> dict[Value, Value]:
        """See `OutgoingLink`: whether the queue serves this consumer."""
        return {ACTIVE: self._active is not False}

    # --- deliveries ----------------------------------------------------------------------------

    def on_deliver(self, delivery: Delivery) -> None:
        """Sends messages, now or when the client takes them."""
        if self.state is not LinkState.ATTACHED:
            return
        counters, count = self.session.connection.counters, delivery.messages
        self._got += count
        if self.settled:
            counters.delivered_no_ack += count
        else:
            counters.delivered += count
        if delivery.acquired_count:
            counters.redelivered += count
        self.session.outgoing.append(Deliveries(self, delivery))
        self.session.pump()

    def on_sent(self, first: int, count: int) -> None:
        """Messages with succeeding ids were sent."""
        self._sent += count
        session = self.session
        if self.settled:
            self.client.settle(self.number, (first, first + count - 1))
        else:
            session.unsettled.add(session.next_delivery_id, self, first, count)
        session.hungry.add(self)
        self.count_sent(count)

    # --- ends ----------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Returns what the link has of its queue."""
        session = self.session
        ids = session.take_back(self)
        if self._is_taken:
            return
        ids += [(each, each) for each in self.resumed.ids]
        if session.by_number.get(self.number) is self:
            self.client.remove(self.number)
        elif ids:
            # The queue has ended the consumer, and what it holds is still its own.
            self.client.return_(self.number, outcomes.ranges_of(ids), failed=False, untried=True)

    def end(self) -> None:
        """Ends without a word."""
        if self.state is not LinkState.DETACHED:
            was_attached = self.state is LinkState.ATTACHED
            self.enter(LinkState.DETACHED)
            if was_attached and not self.resumable:
                self.client.remove(self.number)

    def lose_name(self) -> None:
        """See `Link`: the queue gives what the link holds to the other one, if it may resume."""
        self._is_taken = self.resumable
        if self.state is not LinkState.ATTACHING:
            self.fail(stolen())
            return
        if not self._is_taken:
            self.client.remove(self.number)
        self.on_subscribed(stolen())

    def on_detach(self, detach: Detach) -> None:
        """Answers the client's detach when the queue has got back what the link had."""
        if self.state is LinkState.ATTACHING:
            self._detach = detach
            return
        if self.state is LinkState.DETACHING:
            self.forget()
            return
        self._detach = detach
        self.enter(LinkState.DETACHED)
        if detach.closed or not self.resumable:
            self.give_back()
        else:
            self.session.take_back(self)
            self.client.suspend(self.number)

    def on_removed(self) -> None:
        """The queue has ended the consumer."""
        self.session.by_number.pop(self.number, None)
        if self.state is not LinkState.DETACHED or self._detach is None:
            return
        subscription = self.session.subscriptions.pop(self.handle, None)
        if subscription is not None and self._detach.closed:
            self.session.connection.shell.spawn(self._unsubscribe(subscription, self._detach))
        else:
            self._answer_detach(self._detach)

    async def _unsubscribe(self, queue: str, detach: Detach) -> None:
        """Answers a detach when the queue of the link's subscription is gone."""
        await delete_temporary(self.session, queue)
        if self.session.state is SessionState.MAPPED:
            self._answer_detach(detach)

    def _answer_detach(self, detach: Detach) -> None:
        self.forget()
        self.session.publishes.flush()
        self.session.send(Detach(handle=self.handle, closed=detach.closed))
        self.session.go_on(self)

    def on_cancelled(self, reason: str) -> None:
        """The queue has ended the consumer by itself."""
        self.session.by_number.pop(self.number, None)
        name, vhost = self.queue.name, self.queue.vhost
        if self.state is LinkState.ATTACHING:
            self.on_subscribed(link_fault(NOT_FOUND, f"no {self.queue.subject}"))
        elif self.state is LinkState.DETACHED:
            self.on_removed()
        elif reason == LINK_TAKEN:
            self._is_taken = True
            self.fail(stolen())
        elif reason == "deleted":
            self.session.take_back(self)
            self.fail(link_fault(RESOURCE_DELETED, f"queue '{name}' in vhost '{vhost}' deleted"))
        else:
            self.fail(link_fault(ILLEGAL_STATE, f"queue '{name}' in vhost '{vhost}': {reason}"))

    def tag_of(self, message_id: int) -> bytes:
        """Returns the tag of a delivery: its number among those to links of this name."""
        if self.settled:
            return b""
        return message_id.to_bytes(4 if message_id <= SHORT_TAG_MAX else 8, "big")

    # --- lists ---------------------------------------------------------------------------------

    def info(self) -> dict[str, object]:
        """Returns a row of the list of consumers."""
        session = self.session
        return {
            "consumer_tag": str(self.handle),
            "queue": {"name": self.queue.name, "vhost": self.queue.vhost},
            "channel_details": session.connection.channel_details(session.channel),
            "session": self.client.session,
            "number": self.number,
            "ack_required": not self.settled,
            "prefetch_count": 0,
            "exclusive": False,
            "active": self._active is not False,
            "consumer_timeout": self.timeout_ms or None,
            "activity_status": "up",
            "arguments": {},
            "ignored_arguments": [],
        }


class Deliveries(Pending):
    """Messages that a queue has handed out."""

    __slots__ = ("_next", "delivery")

    link: Sender

    def __init__(self, link: Sender, delivery: Delivery) -> None:
        super().__init__(link)
        self.delivery = delivery
        self._next = 0

    @property
    def message_ids(self) -> tuple[int, int]:
        """Returns the first and the last id of messages that are not sent."""
        first = self.delivery.first_id
        return first + self._next, first + self.delivery.messages - 1

    def send(self) -> bool:
        """See `Pending`."""
        link = self.link
        while self._next < self.delivery.messages and link.state is LinkState.ATTACHED:
            if self._message is None:
                if self._send_plain():
                    continue
                if not self._begin():
                    return True
            message_id = self.delivery.first_id + self._next
            if not self._send_parts(link.tag_of(message_id)):
                return False
            self._next += 1
            link.on_sent(message_id, 1)
        return True

    def _send_plain(self) -> bool:
        """Sends messages that are one frame each and need no closer look, by the rules of what
        follows here. Returns whether there were any."""
        link, session = self.link, self.link.session
        connection = session.connection
        if self.delivery.annotations or connection.vhost in session.broker.firehose.vhosts:
            return False
        delivery = self.delivery.without(self._next) if self._next else self.delivery
        first_id = delivery.first_id
        frames, count = plain_transfers(
            (
                session.channel,
                link.handle,
                session.next_delivery_id,
                link.settled,
                self._room,
                link.message_size_max,
            ),
            delivery[1:8],
            first_id if link.queue.features.reads_by_offset else -1,
            session.remote_incoming_window,
            connection.output_room,
        )
        if not count:
            return False
        connection.write(frames)
        session.count_transfers(count)
        link.size = len(frames) // count
        self._trace(count)
        self._next += count
        link.on_sent(first_id, count)
        return True

    def _begin(self) -> bool:
        """Makes the next message; False: it ends the link."""
        link, delivery = self.link, self.delivery
        try:
            data = record(delivery.block, delivery.command, delivery.first + self._next)
            names, content = split_record(data)
            exchange, routing_key = read_names(names)
            self._message = transfer_of(
                exchange,
                routing_key,
                content,
                acquired_count=delivery.acquired_count,
                failed_count=delivery.failed_delivery_count,
                annotations=delivery.annotations,
                stream_offset=self.message_ids[0] if link.queue.features.reads_by_offset else -1,
            )
        except (BrokerError, ValueError) as error:
            log.error("amqp.batch_damaged", queue=link.queue.name, reason=str(error))
            link.fail(link_fault(INTERNAL_ERROR, "stored message is damaged"))
            return False
        if len(self._message) > link.message_size_max:
            # It counts as a failed delivery, so that a delivery limit ends it.
            message_id = delivery.first_id + self._next
            link.client.return_(link.number, (message_id, message_id), failed=True)
            link.size_fault(len(self._message))
            return False
        link.size = len(self._message)
        self._trace(1)
        self._copy(data)
        return True

    def _trace(self, count: int) -> None:
        link, trace = self.link, self.link.queue.trace
        spans = link.session.spans
        if trace is None and spans is None:
            return
        sent = self.delivery.without(self._next).upto(count)
        if trace is not None:
            trace.sent(link.client.session, *sent[:8])
        if spans is not None:
            spans.delivered(link.client, sent, settles=not link.settled)

    def _copy(self, data: bytes) -> None:
        """Hands the firehose a message."""
        link, session = self.link, self.link.session
        connection, firehose = session.connection, session.broker.firehose
        if connection.vhost not in firehose.vhosts:
            return
        copy = firehose.delivered(
            connection.vhost,
            link.queue.name,
            data,
            Origin(connection.name, session.channel, connection.user.name),
            redelivered=self.delivery.acquired_count > 0,
        )
        if copy is not None:
            for queue in copy.queues:
                target = session.client_of(queue).target
                target.publish((copy.key, copy.content), copy.body_size, 0, 0)
