# cython: annotation_typing=False
"""Links on which a client receives: credit, and transfers as far as the client takes them.

A link that has no queue (`Direct`) hands on what is given to it, settled: nobody keeps it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from convoymq.edges.amqp10.errors import MESSAGE_SIZE_EXCEEDED, link_fault
from convoymq.edges.amqp10.frames import HEADER_BYTES
from convoymq.edges.amqp10.link import SETTLED, Link
from convoymq.edges.amqp10.performatives import Attach, Detach, Flow, address_of_terminus
from convoymq.edges.amqp10.serial import WINDOW_MAX, ahead, following
from convoymq.edges.amqp10.states import LinkState
from convoymq.kernels.amqp10_delivery import transfer_frame
from convoymq.messages.amqp10.values import Value

if TYPE_CHECKING:
    from convoymq.edges.amqp10.session import Session

TRANSFER_BYTES_MAX = 96
"""Of a transfer's performative with all fields that are used here."""
UNLIMITED = (1 << 64) - 1
NO_FILTERS: Mapping[Value, Value] = {}


class Outgoing(Link, ABC):
    """A link on which a client receives."""

    __slots__ = (
        "_attach", "_flows", "address", "credit", "delivery_count", "filters", "message_size_max",
        "settled",
    )  # fmt: skip

    def __init__(self, session: Session, attach: Attach) -> None:
        super().__init__(session, attach.handle, attach.name)
        self.address = address_of_terminus(attach.source)
        self.filters = NO_FILTERS
        """Filters in force."""
        self.settled = attach.snd_settle_mode == SETTLED
        self.message_size_max = attach.max_message_size or UNLIMITED
        self.delivery_count = 0
        self.credit = 0
        self._attach: Attach | None = attach
        """Until it is answered."""
        self._flows: tuple[Callable[[], None], ...] = ()
        """Flows that wait behind deliveries."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Returns how many messages the client has credit for, and has not got yet."""

    @property
    def available(self) -> int:
        """Returns how many messages wait for credit."""
        return 0

    @property
    def flow_properties(self) -> dict[Value, Value] | None:
        """Returns what flows say beside the credit."""
        return None

    def take_credit(self, flow: Flow) -> None:
        """Takes the credit that a client grants."""
        if flow.link_credit is not None:
            since = ahead(self.delivery_count, flow.delivery_count or 0)
            self.credit = min(max(0, flow.link_credit - since), WINDOW_MAX)
        if not flow.drain:
            self._flow_over(self.send_drained)

    def behind(self, send: Callable[[], None]) -> None:
        """Sends a flow behind the deliveries that wait, unless it does already."""
        if send not in self._flows:
            self._flows += (send,)
            self.session.outgoing.append(send)

    def _flow_over(self, send: Callable[[], None]) -> None:
        """A flow does not wait any more."""
        if send in self._flows:
            self._flows = tuple(each for each in self._flows if each != send)

    def send_echo(self) -> None:
        """Sends a flow that a client has asked for, or that tells of a change."""
        self._flow_over(self.send_echo)
        self.send_state()

    def send_drained(self) -> None:
        """Gives up the credit that is left, and says so."""
        if self.send_drained not in self._flows:
            # The client has granted anew.
            return
        self._flow_over(self.send_drained)
        if self.waiting:
            # They came after it.
            self.behind(self.send_drained)
        elif self.state is LinkState.ATTACHED:
            self.delivery_count = following(self.delivery_count, self.credit)
            self.credit = 0
            self.send_state(drain=True)

    def send_state(self, *, drain: bool = False) -> None:
        """Tells the client the link's credit, and what is there."""
        if self.state is LinkState.ATTACHED:
            self.session.send_flow(
                handle=self.handle,
                delivery_count=self.delivery_count,
                link_credit=self.credit,
                available=self.available,
                drain=drain,
                properties=self.flow_properties,
            )

    def count_sent(self, count: int) -> None:
        """Messages were sent."""
        self.delivery_count = following(self.delivery_count, count)
        self.credit = max(0, self.credit - count)
        self.session.next_delivery_id = following(self.session.next_delivery_id, count)

    def size_fault(self, size: int) -> None:
        """Detaches the link: a message is larger than the client takes."""
        self.fail(
            link_fault(
                MESSAGE_SIZE_EXCEEDED,
                f"message size ({size} bytes) exceeds maximum message size "
                f"({self.message_size_max} bytes)",
            )
        )


class Pending(ABC):
    """Messages of a link that are sent one after the other, as far as the client takes them."""

    __slots__ = ("_at", "_message", "link")

    def __init__(self, link: Outgoing, message: bytes | None = None) -> None:
        self.link = link
        self._message = message
        """Message that is being sent."""
        self._at = 0

    @abstractmethod
    def send(self) -> bool:
        """Sends transfers. Returns whether all are sent: else the client has to open its window, or
        to read."""

    @property
    def _room(self) -> int:
        """Returns how many bytes of a message one frame has."""
        return self.link.session.connection.peer_frame_max - HEADER_BYTES - TRANSFER_BYTES_MAX

    def _send_parts(self, tag: bytes) -> bool:
        """Sends transfers of the message that is under way; False: the client takes no more."""
        link, session, message = self.link, self.link.session, self._message
        assert message is not None
        connection, room = session.connection, self._room
        while True:
            if session.remote_incoming_window <= 0 or connection.output_full():
                return False
            connection.write(
                transfer_frame(
                    session.channel,
                    link.handle,
                    session.next_delivery_id,
                    tag,
                    link.settled,
                    message,
                    self._at,
                    room,
                )
            )
            self._at += room
            session.count_transfers(1)
            if self._at >= len(message):
                self._message = None
                self._at = 0
                return True


class Direct(Outgoing):
    """A link without a queue.

    Args:
        attach: the client's, with the source that it is answered with.
    """

    __slots__ = ("_waiting",)

    def __init__(
        self, session: Session, attach: Attach, properties: dict[Value, Value] | None = None
    ) -> None:
        super().__init__(session, attach)
        self.settled = True
        self._waiting = 0
        self.properties = properties

    @property
    def waiting(self) -> int:
        """See `Outgoing`."""
        return self._waiting

    def start(self) -> None:
        """Answers the client's attach."""
        attach, session, self._attach = self._attach, self.session, None
        assert attach is not None
        session.links[self.handle] = self
        self.enter(LinkState.ATTACHED)
        session.send(
            Attach(
                name=attach.name,
                handle=attach.handle,
                role=False,
                snd_settle_mode=SETTLED,
                rcv_settle_mode=attach.rcv_settle_mode,
                source=attach.source,
                target=attach.target,
                initial_delivery_count=0,
                max_message_size=attach.max_message_size,
                properties=self.properties,
            )
        )

    def on_flow(self, flow: Flow) -> None:
        """Takes the client's credit."""
        self.take_credit(flow)
        self.on_credit()
        if flow.drain:
            self.behind(self.send_drained)
        elif flow.echo:
            self.behind(self.send_echo)

    def on_credit(self) -> None:
        """The client has granted credit."""

    def push(self, message: bytes) -> bool:
        """Sends a message, now or when the client's window opens. Returns whether it has credit."""
        if self.state is not LinkState.ATTACHED or self.waiting >= self.credit:
            return False
        if len(message) > self.message_size_max:
            self.size_fault(len(message))
            return False
        self._waiting += 1
        self.session.outgoing.append(_Message(self, message))
        self.session.pump()
        return True

    def count_sent(self, count: int) -> None:
        """Messages were sent."""
        super().count_sent(count)
        self._waiting -= count

    def give_back(self) -> None:
        """Lets go what was not sent."""
        self.session.take_back(self)

    def end(self) -> None:
        """Ends without a word."""
        self.enter(LinkState.DETACHED)

    def on_detach(self, detach: Detach) -> None:
        """Answers the client's detach."""
        self.forget()
        if self.state is not LinkState.DETACHING:
            self.end()
            self.give_back()
            self.session.send(Detach(handle=self.handle, closed=detach.closed))


class _Message(Pending):
    """A message of a link without a queue."""

    link: Direct

    def send(self) -> bool:
        """See `Pending`."""
        if self.link.state is LinkState.ATTACHED:
            if not self._send_parts(b""):
                return False
            self.link.count_sent(1)
        return True
