# cython: annotation_typing=False
"""One session: windows, delivery ids, dispositions, and what the queues say. Its links are in
`links`, `receiving` and `sending`. Its states are in `states`.

Transfers and the flows behind them leave in one order: a client whose window is closed holds up its
own session only. Source: OASIS AMQP 1.0 part 2 section 2.5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import structlog

from convoymq.edges.amqp10 import links, outcomes
from convoymq.edges.amqp10.dynamic import delete_temporary
from convoymq.edges.amqp10.errors import (
    FRAMING_ERROR,
    HANDLE_IN_USE,
    INTERNAL_ERROR,
    UNATTACHED_HANDLE,
    WINDOW_VIOLATION,
    Fault,
    Scope,
    fault_of,
    session_fault,
)
from convoymq.edges.amqp10.frames import FrameReader
from convoymq.edges.amqp10.incoming import Incoming
from convoymq.edges.amqp10.link import Link
from convoymq.edges.amqp10.outgoing import Outgoing, Pending
from convoymq.edges.amqp10.performatives import (
    Attach,
    Begin,
    Composite,
    Detach,
    Disposition,
    End,
    Flow,
    Transfer,
)
from convoymq.edges.amqp10.receiving import Publishes, Receiver
from convoymq.edges.amqp10.sending import Deliveries, Sender
from convoymq.edges.amqp10.serial import WINDOW_MAX, ahead, following
from convoymq.edges.amqp10.states import SESSION_MOVES, LinkState, SessionState
from convoymq.edges.amqp10.transactions import Transactions
from convoymq.edges.amqp10.unsettled import Unsettled
from convoymq.edges.permissions import Permissions
from convoymq.edges.queue_streams import QueueStreams
from convoymq.messages.amqp10.values import Value
from convoymq.model.errors import BrokerError
from convoymq.queues.interface import Delivery, GetResult, PublishOutcome, Queue, QueueClient

if TYPE_CHECKING:
    from convoymq.edges.amqp10.connection import Connection
    from convoymq.edges.amqp10.management import Pair

log = structlog.get_logger()


def link_flow(fields: tuple[int, ...]) -> Flow:
    """Returns the flow of a link with these fields, up to its credit."""
    incoming_id, incoming, outgoing_id, outgoing, handle, counted, credit = fields
    return Flow(
        next_incoming_id=incoming_id,
        incoming_window=incoming,
        next_outgoing_id=outgoing_id,
        outgoing_window=outgoing,
        handle=handle,
        delivery_count=counted,
        link_credit=credit,
    )


class Session(QueueStreams):
    """A session's rules. Implements `ClientEvents`; nothing here blocks."""

    __slots__ = (
        "_pumping", "broker", "by_number", "channel", "connection", "flowing", "handle_max",
        "hungry", "incoming_window", "is_over", "last_number", "links", "next_delivery_id",
        "next_incoming_id", "next_outgoing_id", "outgoing", "pairs", "permissions", "publishes",
        "remote_incoming_window", "remote_outgoing_window", "settings", "state", "subscriptions",
        "temporary", "transactions", "unsettled", "window_margin",
    )  # fmt: skip

    VERSION = "1.0"

    def __init__(self, connection: Connection, channel: int, begin: Begin) -> None:
        self.connection = connection
        self.broker = connection.broker
        self.channel = channel
        self.settings = connection.settings
        self.state = SessionState.OPENING
        super().__init__(self.broker, connection, self.settings.clients_max)
        self.handle_max = min(begin.handle_max, self.settings.link_max - 1)
        self.next_incoming_id = begin.next_outgoing_id
        self.incoming_window = 0
        self.window_margin = 0
        """Transfers that a client may have sent before it learns that its window is closed."""
        self.next_outgoing_id = 0
        self.next_delivery_id = 0
        self.remote_incoming_window = begin.incoming_window
        self.remote_outgoing_window = begin.outgoing_window
        self.links: dict[int, Link] = {}
        self.by_number: dict[int, Sender] = {}
        self.last_number = 0
        self.unsettled = Unsettled()
        self.outgoing: deque[Pending | Callable[[], None]] = deque()
        """Deliveries, and flows that go behind them."""
        self.hungry: set[Sender] = set()
        """Links whose queues may have to hand out more."""
        self.is_over = False
        self._pumping = False
        self.flowing: set[QueueClient] = set()
        self.permissions = Permissions(connection)
        self.publishes = Publishes(self)
        self.transactions = Transactions(self)
        self.pairs: dict[str, Pair] = {}
        """Links of the node /management, by name."""
        self.temporary: dict[int, str] = {}
        """Handle -> queue that goes with its link."""
        self.subscriptions: dict[int, str] = {}
        """Handle -> queue of a durable subscription, which goes when its link is closed."""

    def enter(self, state: SessionState) -> None:
        """Moves to another state."""
        assert state in SESSION_MOVES[self.state]
        self.state = state

    def start(self) -> None:
        """Answers the client's begin."""
        self.enter(SessionState.MAPPED)
        alarmed = self.is_alarmed
        self.incoming_window = 0 if alarmed else self.settings.incoming_window
        self.send(
            Begin(
                remote_channel=self.channel,
                next_outgoing_id=self.next_outgoing_id,
                incoming_window=self.incoming_window,
                outgoing_window=WINDOW_MAX,
                handle_max=self.handle_max,
            )
        )

    @property
    def is_alarmed(self) -> bool:
        """Returns whether no messages are taken."""
        return bool(self.broker.alarms.effective)

    @property
    def receivers(self) -> list[Incoming]:
        """Returns the links on which the client sends."""
        return [link for link in self.links.values() if isinstance(link, Incoming)]

    @property
    def senders(self) -> list[Sender]:
        """Returns the links of consumers."""
        return [link for link in self.links.values() if isinstance(link, Sender)]

    # --- input -------------------------------------------------------------------------------

    def handle(self, performative: Composite, payload: bytes) -> None:
        """Serves a performative. Raises Fault: it ends the connection."""
        if self.state is SessionState.ENDING:
            if isinstance(performative, End):
                self.enter(SessionState.ENDED)
            return
        self._guard(performative.NAME, lambda: self._serve(performative, payload))

    def _guard(self, name: str, work: Callable[[], None]) -> None:
        """Serves a performative, whose errors end the session. Raises Fault: it ends the
        connection."""
        try:
            work()
        except BrokerError as error:
            fault = fault_of(error, Scope.SESSION)
            if fault.scope is Scope.CONNECTION:
                raise
            self.fail(fault)
        except Exception:
            log.exception("amqp.method_failed", connection=self.connection.name, method=name)
            self.fail(session_fault(INTERNAL_ERROR, "internal error"))

    def _serve(self, performative: Composite, payload: bytes) -> None:
        if isinstance(performative, Attach | Flow | Detach) and self._waits(performative):
            return
        match performative:
            case Transfer():
                self._on_transfer(performative, payload)
            case Disposition():
                outcomes.on_disposition(self, performative)
            case Flow():
                self._on_flow(performative)
            case Attach():
                self._on_attach(performative)
            case Detach():
                self._on_detach(performative)
            case End():
                self._on_end()
            case _:
                raise session_fault(INTERNAL_ERROR, f"Unexpected frame {performative.NAME}")

    def _waits(self, performative: Attach | Flow | Detach) -> bool:
        """Keeps what comes for a handle whose link the client has detached: it may use the handle
        again before our detach."""
        handle = performative.handle
        link = None if handle is None else self.links.get(handle)
        if link is None or link.state is not LinkState.DETACHED:
            return False
        if not link.later and not isinstance(performative, Attach):
            raise session_fault(UNATTACHED_HANDLE, f"Unattached link handle: {handle}")
        if len(link.later) >= self.settings.waiting_max:
            raise session_fault(HANDLE_IN_USE, f"handle {handle} is still being detached")
        link.later = (*link.later, performative)
        return True

    def go_on(self, link: Link) -> None:
        """Serves what has come for the handle of a link, which is detached now."""
        for each in link.later:
            self.handle(each, b"")

    def _on_attach(self, attach: Attach) -> None:
        if attach.handle > self.handle_max:
            raise session_fault(
                FRAMING_ERROR,
                f"link handle value ({attach.handle}) exceeds maximum link handle value "
                f"({self.handle_max})",
            )
        if attach.handle in self.links:
            raise session_fault(
                HANDLE_IN_USE, f"handle {attach.handle} is already in use by another link"
            )
        links.attach(self, attach)

    def _on_flow(self, flow: Flow) -> None:
        if flow.next_incoming_id is not None:
            outstanding = ahead(self.next_outgoing_id, flow.next_incoming_id)
            if outstanding < 0:
                raise session_fault(
                    WINDOW_VIOLATION,
                    f"next-incoming-id from FLOW ({flow.next_incoming_id}) is ahead of "
                    f"next-outgoing-id ({self.next_outgoing_id})",
                )
        else:
            outstanding = self.next_outgoing_id
        self.remote_incoming_window = max(0, flow.incoming_window - outstanding)
        self.remote_outgoing_window = flow.outgoing_window
        if flow.handle is None:
            if flow.echo:
                self.send_flow()
        else:
            link = self.links.get(flow.handle)
            if link is None:
                raise session_fault(UNATTACHED_HANDLE, f"Unattached link handle: {flow.handle}")
            if link.state is not LinkState.DETACHING:
                self.within(link, lambda: link.on_flow(flow))
        self.pump()

    def _on_transfer(self, transfer: Transfer, payload: bytes) -> None:
        if self.incoming_window + self.window_margin <= 0:
            raise session_fault(
                WINDOW_VIOLATION,
                f"incoming window violation: transfer {self.next_incoming_id} of a session "
                "whose window is closed",
            )
        if self.incoming_window > 0:
            self.incoming_window -= 1
        else:
            self.window_margin -= 1
        self.next_incoming_id = following(self.next_incoming_id, 1)
        link = self.links.get(transfer.handle)
        if isinstance(link, Incoming) and link.state is not LinkState.DETACHING:
            self.within(link, lambda: link.on_transfer(transfer, payload))
        elif link is None or isinstance(link, Outgoing):
            raise session_fault(UNATTACHED_HANDLE, f"Unattached link handle: {transfer.handle}")
        self._renew_window()

    def take_plain(self, handle: int, reader: FrameReader) -> bool:
        """Publishes messages of one link that come next and need no closer look, up to the next
        flow of ours. Returns whether there were any."""
        link = self.links.get(handle)
        room = self.incoming_window - self.settings.incoming_window // 2
        if self.state is not SessionState.MAPPED or room <= 0 or not isinstance(link, Receiver):
            return False
        count = link.take_plain(reader, room)
        if not count:
            return False
        self.incoming_window -= count
        self.next_incoming_id = following(self.next_incoming_id, count)
        link.renew_credit()
        self._renew_window()
        return True

    def take_settlements(self, reader: FrameReader) -> bool:
        """Serves dispositions and flows that come next and need no closer look. Returns whether
        there were any."""
        if self.state is not SessionState.MAPPED:
            return False
        found = reader.settlements(self.channel, self.next_outgoing_id)
        if found is None:
            return False
        ranges, outcome, flow = found

        def settle() -> None:
            outcomes.settle_ranges(self, ranges, outcome)
            if flow is None:
                self.pump()

        if ranges:
            self._guard(Disposition.NAME, settle)
        if flow is not None:
            self.handle(link_flow(flow), b"")
        return True

    def _renew_window(self) -> None:
        window = self.settings.incoming_window
        if self.incoming_window <= window // 2 and not self.is_alarmed:
            self.incoming_window = window
            self.send_flow()

    def within(self, link: Link, work: Callable[[], None]) -> None:
        """Does something for a link, which an error ends."""
        try:
            work()
        except BrokerError as error:
            fault = fault_of(error, Scope.LINK)
            if fault.scope is not Scope.LINK:
                raise
            link.fail(fault)

    def _on_detach(self, detach: Detach) -> None:
        link = self.links.get(detach.handle)
        if link is None:
            raise session_fault(UNATTACHED_HANDLE, f"Unattached link handle: {detach.handle}")
        self.publishes.flush()
        link.on_detach(detach)

    def _on_end(self) -> None:
        self.terminate()
        self.send(End())
        self.enter(SessionState.ENDED)

    # --- output ------------------------------------------------------------------------------

    def send(self, performative: Composite) -> None:
        """Appends a performative to the output."""
        self.connection.send(self.channel, performative)

    def send_flow(self, **of_link: int | bool | dict[Value, Value] | None) -> None:
        """Sends the windows of the session, and the credit of a link."""
        self.send(
            Flow(
                next_incoming_id=self.next_incoming_id,
                incoming_window=self.incoming_window,
                next_outgoing_id=self.next_outgoing_id,
                outgoing_window=WINDOW_MAX,
                **of_link,  # type: ignore[arg-type]
            )
        )

    def count_transfers(self, count: int) -> None:
        """Transfers were sent."""
        self.remote_incoming_window -= count
        self.next_outgoing_id = following(self.next_outgoing_id, count)

    def pump(self) -> None:
        """Sends deliveries, and flows behind them, as far as the client takes them."""
        if self._pumping:
            # A queue has handed out more in the midst of it.
            return
        self._pumping = True
        try:
            while self.outgoing and not self.connection.output_full() and self._send_first():
                pass
        finally:
            self._pumping = False
        for sender in list(self.hungry):
            sender.top_up()

    def _send_first(self) -> bool:
        """Sends what goes first; False: the client takes no more."""
        first = self.outgoing[0]
        if not isinstance(first, Pending):
            self.outgoing.popleft()
            first()
            return True
        if not first.send():
            return False
        if self.outgoing and self.outgoing[0] is first:
            self.outgoing.popleft()
        return True

    def take_back(self, link: Outgoing) -> list[tuple[int, int]]:
        """Forgets the deliveries of a link that ends. Returns the ranges of their message ids."""
        ids = self.unsettled.take_of(link) if isinstance(link, Sender) else []
        if not link.waiting:
            return ids
        kept: deque[Pending | Callable[[], None]] = deque()
        for each in self.outgoing:
            if not isinstance(each, Pending) or each.link is not link:
                kept.append(each)
            elif isinstance(each, Deliveries):
                ids.append(each.message_ids)
        self.outgoing = kept
        return ids

    # --- ends --------------------------------------------------------------------------------

    def fail(self, fault: Fault) -> None:
        """Ends the session with an error."""
        if self.state is not SessionState.MAPPED:
            return
        log.info(
            "amqp.session_ended",
            connection=self.connection.name,
            channel=self.channel,
            code=fault.condition,
            reason=fault.text,
        )
        self.terminate()
        self.enter(SessionState.ENDING)
        self.send(End(error=fault.error()))

    def drop_temporary(self, handle: int) -> None:
        """A link is gone: its queue goes, if it has one of its own."""
        self.subscriptions.pop(handle, None)
        name = self.temporary.pop(handle, None)
        if name is not None:
            self.connection.shell.spawn(delete_temporary(self, name))

    def terminate(self) -> None:
        """Gives everything back: consumers go, what they hold returns. Safe to call twice."""
        if self.state is not SessionState.MAPPED or self.is_over:
            return
        self.publishes.flush()
        self.is_over = True
        self.transactions.close()
        for link in list(self.links.values()):
            link.end()
        self.links.clear()
        self.by_number.clear()
        self.outgoing.clear()
        self.unsettled.clear()
        self.hungry.clear()
        self.close_clients()
        for handle in list(self.temporary):
            self.drop_temporary(handle)
        self.flowing.clear()
        self.broker.counters.channels_closed += 1

    def set_alarms(self) -> None:
        """The node's alarms changed."""
        if self.state is not SessionState.MAPPED:
            return
        window = self.settings.incoming_window
        if self.is_alarmed:
            self.window_margin, self.incoming_window = self.incoming_window, 0
        elif self.incoming_window == 0:
            self.window_margin, self.incoming_window = 0, window
        else:
            return
        self.send_flow()
        for receiver in self.receivers:
            receiver.renew_credit()

    def check_access(self) -> None:
        """Asks for the permissions of all links again."""
        self.permissions.forget()
        for link in list(self.links.values()):
            if link.state is LinkState.ATTACHED:
                self.within(link, link.check_access)

    # --- queues ------------------------------------------------------------------------------

    def clients_in_use(self) -> set[QueueClient]:
        """See `QueueStreams`."""
        return {sender.client for sender in self.by_number.values()}

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """See `PublisherEvents`."""
        self.publishes.on_published(client.queue.name, tags, outcome)

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        """See `PublisherEvents`: publishers to that queue get no credit until it takes more."""
        if blocked:
            self.flowing.add(client)
            return
        self.flowing.discard(client)
        for receiver in self.receivers:
            receiver.renew_credit()

    def on_replaced(self, client: QueueClient, successor: Queue) -> QueueClient | None:
        """See `PublisherEvents`. Consumers attach again."""
        if self.state is not SessionState.MAPPED:
            return None
        self.forget_client(client)
        self.on_flow(client, False)
        for sender in self.senders:
            if sender.client is client:
                sender.on_cancelled("migrated to another type")
        return self.client_of(successor)

    def _sender(self, number: int) -> Iterator[Sender]:
        found = self.by_number.get(number)
        if found is not None and self.state is SessionState.MAPPED:
            yield found

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """See `ClientEvents`."""
        for sender in self._sender(delivery.consumer):
            sender.on_deliver(delivery)

    def on_subscribed(self, client: QueueClient, consumer: int, error: Exception | None) -> None:
        """See `ClientEvents`."""
        for sender in self._sender(consumer):
            sender.on_subscribed(error)

    def on_resumed(
        self, client: QueueClient, consumer: int, next_id: int, held: Sequence[int]
    ) -> None:
        """See `ClientEvents`."""
        for sender in self._sender(consumer):
            sender.on_resumed(next_id, held)

    def on_credit(self, client: QueueClient, consumer: int, granted: int, ready: int) -> None:
        """See `ClientEvents`."""
        for sender in self._sender(consumer):
            sender.on_credit(granted, ready)

    def on_activity(self, client: QueueClient, consumer: int, active: bool) -> None:
        """See `ClientEvents`."""
        for sender in self._sender(consumer):
            sender.on_activity(active)

    def on_cancel_ok(self, client: QueueClient, consumer: int) -> None:
        """See `ClientEvents`."""
        for sender in self._sender(consumer):
            sender.on_removed()

    def on_cancelled(self, client: QueueClient, consumer: int, reason: str) -> None:
        """See `ClientEvents`."""
        for sender in self._sender(consumer):
            sender.on_cancelled(reason)

    def on_get(self, client: QueueClient, result: GetResult) -> None:
        """See `ClientEvents`: nothing was asked."""

    def on_purged(self, client: QueueClient, count: int, error: Exception | None) -> None:
        """See `ClientEvents`: nothing was asked."""

    # --- lists -------------------------------------------------------------------------------

    def consumer_infos(self) -> list[dict[str, object]]:
        """Returns the rows of /api/consumers."""
        return [sender.info() for sender in self.senders if sender.state is LinkState.ATTACHED]
