# cython: annotation_typing=False
"""Links on which a client sends: deliveries of several transfers, and credit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from convoymq.edges.amqp10.errors import (
    INVALID_FIELD,
    MESSAGE_SIZE_EXCEEDED,
    RESOURCE_LIMIT_EXCEEDED,
    TRANSFER_LIMIT_EXCEEDED,
    link_fault,
    session_fault,
)
from convoymq.edges.amqp10.link import SETTLED, UNSETTLED, Link
from convoymq.edges.amqp10.performatives import Attach, Detach, Flow, Transfer, address_of_terminus
from convoymq.edges.amqp10.serial import following
from convoymq.edges.amqp10.states import LinkState
from convoymq.messages.amqp10.values import Value

if TYPE_CHECKING:
    from convoymq.edges.amqp10.session import Session

TAG_BYTES_MAX = 32
"""Of a delivery-tag: the standard's."""


class Incoming(Link, ABC):
    """A link on which a client sends messages.

    Args:
        credit_max: messages that may be under way or in work.
        message_size_max: limit of one message, bytes.
    """

    __slots__ = (
        "_credit_max", "_delivery", "_parts", "_size", "address", "credit", "delivery_count",
        "message_size_max", "snd_settle_mode", "unconfirmed",
    )  # fmt: skip

    def __init__(
        self, session: Session, attach: Attach, *, credit_max: int, message_size_max: int
    ) -> None:
        super().__init__(session, attach.handle, attach.name)
        self.address = address_of_terminus(attach.target)
        self.snd_settle_mode = attach.snd_settle_mode
        self.delivery_count = attach.initial_delivery_count or 0
        self.credit = 0
        self.unconfirmed = 0
        """Messages that are in work."""
        self._credit_max = credit_max
        self._size = 0
        """Bytes of the latest message; 0: none came."""
        self.message_size_max = message_size_max
        self._delivery: Transfer | None = None
        """First transfer of the delivery that is under way."""
        self._parts: bytearray | None = None
        """Payloads of its transfers so far."""

    @abstractmethod
    def take(self, first: Transfer, message: bytes) -> None:
        """Takes a message, whose delivery began with that transfer. Raises BrokerError."""

    def is_held_up(self) -> bool:
        """Returns whether nothing more is taken for now."""
        return self.session.is_alarmed

    def start(self, attach: Attach, unsettled: dict[Value, Value] | None = None) -> None:
        """Answers the client's attach."""
        session = self.session
        session.links[self.handle] = self
        self.enter(LinkState.ATTACHED)
        session.send(
            Attach(
                name=attach.name,
                handle=attach.handle,
                role=True,
                snd_settle_mode=attach.snd_settle_mode,
                rcv_settle_mode=0,
                source=attach.source,
                target=attach.target,
                unsettled=unsettled,
                max_message_size=self.message_size_max,
                properties=self.properties,
            )
        )
        self.renew_credit()

    # --- credit --------------------------------------------------------------------------------

    def renew_credit(self) -> None:
        """Grants more credit, unless the client has enough, or nothing more is taken."""
        used = self.grantable()
        if self.state is not LinkState.ATTACHED or used * 2 < self._credit_max:
            return
        if not self.is_held_up():
            self._credit_max = self.window()
            self.credit += max(0, self.grantable())
            self.send_credit()

    def window(self) -> int:
        """Returns how many messages may be under way or in work from now on."""
        return self._credit_max

    def grantable(self) -> int:
        """Returns how much credit could be granted."""
        return self._credit_max - self.unconfirmed - self.credit

    def send_credit(self) -> None:
        """Tells the client its credit."""
        self.session.send_flow(
            handle=self.handle, delivery_count=self.delivery_count, link_credit=self.credit
        )

    def on_flow(self, flow: Flow) -> None:
        """Takes the client's view of the link, which changes nothing here."""
        if flow.echo:
            self.send_credit()

    # --- input ---------------------------------------------------------------------------------

    def on_transfer(self, transfer: Transfer, payload: bytes) -> None:
        """Takes a part of a message. Raises Fault."""
        first = self._delivery
        if first is None:
            first = self._begin(transfer)
        elif transfer.delivery_id not in (None, first.delivery_id):
            raise link_fault(INVALID_FIELD, "delivery-id differs within one delivery")
        elif not transfer.aborted and transfer.settled not in (None, bool(first.settled)):
            raise link_fault(INVALID_FIELD, "settled differs within one delivery")
        if transfer.aborted:
            self._reset()
            self.renew_credit()
            return
        size, most = self._begun_bytes + len(payload), self.message_size_max
        if size > most:
            raise session_fault(
                MESSAGE_SIZE_EXCEEDED,
                f"message size ({size} bytes) exceeds maximum message size ({most} bytes)",
            )
        if transfer.more:
            self._keep(payload)
            return
        message = payload if self._parts is None else bytes(self._parts) + payload
        self._reset()
        self._size = len(message)
        self.take(first, message)
        self.renew_credit()

    def _keep(self, payload: bytes) -> None:
        """Keeps a part of a message. Raises Fault: the client has begun too many."""
        connection, settings = self.session.connection, self.session.settings
        most = settings.unfinished_max * connection.message_size_max
        if connection.unfinished_bytes + len(payload) > most:
            raise link_fault(
                RESOURCE_LIMIT_EXCEEDED,
                f"messages without their last transfers exceed {most} bytes in this connection",
            )
        connection.unfinished_bytes += len(payload)
        if self._parts is None:
            self._parts = bytearray()
        self._parts += payload

    @property
    def _begun_bytes(self) -> int:
        """Returns how much of a message has come."""
        return 0 if self._parts is None else len(self._parts)

    def _begin(self, transfer: Transfer) -> Transfer:
        if self.credit <= 0:
            raise link_fault(TRANSFER_LIMIT_EXCEEDED, "insufficient credit (0) for this link")
        if transfer.delivery_id is None:
            raise link_fault(INVALID_FIELD, "the first transfer of a delivery lacks a delivery-id")
        if len(transfer.delivery_tag or b"") > TAG_BYTES_MAX:
            raise link_fault(INVALID_FIELD, f"delivery-tag has more than {TAG_BYTES_MAX} bytes")
        mode, settled = self.snd_settle_mode, bool(transfer.settled)
        told = mode in (UNSETTLED, SETTLED) and not (transfer.aborted or transfer.resume)
        if told and settled is not (mode == SETTLED):
            raise link_fault(
                INVALID_FIELD,
                f"transfer settled={str(settled).lower()} on a link of snd-settle-mode {mode}",
            )
        self.credit -= 1
        self.delivery_count = following(self.delivery_count, 1)
        self._delivery = transfer
        return transfer

    def _reset(self) -> None:
        self._delivery = None
        self.session.connection.unfinished_bytes -= self._begun_bytes
        self._parts = None

    def give_back(self) -> None:
        """Drops what has come of a message."""
        self._reset()

    # --- ends ----------------------------------------------------------------------------------

    def end(self) -> None:
        """Ends without a word."""
        self._reset()
        self.enter(LinkState.DETACHED)

    def on_detach(self, detach: Detach) -> None:
        """Answers the client's detach."""
        self.forget()
        if self.state is not LinkState.DETACHING:
            self.end()
            self.session.send(Detach(handle=self.handle, closed=detach.closed))
