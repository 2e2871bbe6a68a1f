"""The node /management: links in pairs, on which clients send requests and get responses.

A pair is two links of one name in one session, one in each direction, both with the property
`paired`. Its requests are worked through in their order (`requests`); responses wait for the
client's credit. Requests get credit when both links are there, and no more of it than responses
leave. Source: OASIS Link Pairing 1.0, HTTP over AMQP wd06, and RabbitMQ 4.3 behaviour.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from convoymq.edges.amqp10.errors import (
    DECODE_ERROR,
    INVALID_FIELD,
    PRECONDITION_FAILED,
    link_fault,
)
from convoymq.edges.amqp10.incoming import Incoming
from convoymq.edges.amqp10.link import SETTLED
from convoymq.edges.amqp10.outgoing import Direct
from convoymq.edges.amqp10.performatives import Attach, Source, Target, Transfer
from convoymq.edges.amqp10.requests import Request, Requests, Response
from convoymq.messages.amqp10.sections import (
    APPLICATION_PROPERTIES,
    DATA,
    FIELDS,
    PROPERTIES,
    VALUE,
    section,
    section_at,
    skip,
)
from convoymq.messages.amqp10.values import Symbol, Value, decode
from convoymq.model.errors import PeerError

if TYPE_CHECKING:
    from convoymq.edges.amqp10.session import Session

REQUESTS_MAX = 8
"""Requests of a pair whose responses are not sent."""
PAIRED = Symbol("paired")
_VERSION = {"http:response": "1.1"}


def attach_management(session: Session, attach: Attach) -> None:
    """Attaches a link of a pair. Raises Fault."""
    if (attach.properties or {}).get(PAIRED) is not True:
        raise link_fault(INVALID_FIELD, "a link with /management needs the property paired=true")
    if not attach.role and attach.snd_settle_mode != SETTLED:
        raise link_fault(INVALID_FIELD, "requests to /management have to be sent settled")
    if not attach.role and attach.initial_delivery_count is None:
        raise link_fault(
            INVALID_FIELD, "Attach refused: a sender's attach lacks its initial-delivery-count"
        )
    own = attach.target if attach.role else attach.source
    address = own.address if isinstance(own, Source | Target) else None
    pair = session.pairs.get(attach.name) or Pair(session, attach.name, address)
    pair.join(attach, address)


class Pair:
    """Two links of one name.

    Args:
        address: of the client's terminus, at both links.
    """

    def __init__(self, session: Session, name: str, address: Value) -> None:
        self.requests: RequestLink | None = None
        self.responses: ResponseLink | None = None
        self.owed = 0
        """Requests whose responses are not sent."""
        self._session = session
        self._name = name
        self._address = address
        self._asked: deque[Request] = deque()
        self._working = False

    def join(self, attach: Attach, address: Value) -> None:
        """Attaches a link. Raises Fault: it does not fit to the other one."""
        taken = self.responses if attach.role else self.requests
        if taken is not None or address != self._address:
            raise link_fault(
                PRECONDITION_FAILED,
                f"link '{attach.name}' does not pair: "
                + ("there is one already" if taken is not None else "its addresses differ"),
            )
        self._session.pairs[self._name] = self
        if attach.role:
            self.responses = ResponseLink(self._session, attach, self)
            self.responses.start()
            if self.requests is not None:
                self.requests.renew_credit()
        else:
            self.requests = RequestLink(self._session, attach, self)
            self.requests.start(attach)

    def leave(self, link: RequestLink | ResponseLink) -> None:
        """A link is detached."""
        if self.requests is link:
            self.requests = None
            self.owed -= len(self._asked)
            self._asked.clear()
        elif self.responses is link:
            self.responses = None
        if self.requests is None and self.responses is None:
            self._session.pairs.pop(self._name, None)

    def ask(self, request: Request) -> None:
        """Works through a request, behind those before it."""
        self.owed += 1
        self._asked.append(request)
        if not self._working:
            self._working = True
            self._session.connection.shell.spawn(self._work())

    async def _work(self) -> None:
        table = Requests(self._session)
        while self._asked:
            request = self._asked.popleft()
            response = await table.answer(request)
            if self.responses is None:
                self.sent(1)
            else:
                self.responses.answer(_encoded(request, response))
        self._working = False

    def sent(self, count: int) -> None:
        """Responses have left, or nobody takes them."""
        self.owed -= count
        if self.requests is not None:
            self.requests.unconfirmed = self.owed
            self.requests.renew_credit()


class RequestLink(Incoming):
    """The link of a pair on which requests come."""

    def __init__(self, session: Session, attach: Attach, pair: Pair) -> None:
        size_max = session.settings.request_bytes_max
        super().__init__(session, attach, credit_max=REQUESTS_MAX, message_size_max=size_max)
        self.properties = {PAIRED: True}
        self.unconfirmed = pair.owed
        self._pair = pair

    def is_held_up(self) -> bool:
        """Returns whether nothing is taken for now: an alarm is on, or nobody hears responses."""
        return self.session.is_alarmed or self._pair.responses is None

    def take(self, first: Transfer, message: bytes) -> None:
        """Takes a request. Raises Fault."""
        try:
            request = _request(message)
        except (PeerError, ValueError) as error:
            raise link_fault(DECODE_ERROR, f"failed to parse message: {error}") from error
        self.unconfirmed += 1
        self._pair.ask(request)

    def give_back(self) -> None:
        """Leaves the pair."""
        self._pair.leave(self)

    def end(self) -> None:
        """Ends without a word."""
        super().end()
        self._pair.leave(self)


class ResponseLink(Direct):
    """The link of a pair on which responses go."""

    def __init__(self, session: Session, attach: Attach, pair: Pair) -> None:
        super().__init__(session, attach, {PAIRED: True})
        self._pair = pair
        self._held: deque[bytes] = deque()

    @property
    def available(self) -> int:
        """Returns how many responses wait for credit."""
        return len(self._held)

    def answer(self, message: bytes) -> None:
        """Sends a response as soon as there is credit."""
        self._held.append(message)
        self.on_credit()

    def on_credit(self) -> None:
        """Sends what waits."""
        while self._held and self.push(self._held[0]):
            self._held.popleft()

    def count_sent(self, count: int) -> None:
        """Responses were sent."""
        super().count_sent(count)
        self._pair.sent(count)

    def give_back(self) -> None:
        """Leaves the pair."""
        super().give_back()
        self._leave()

    def end(self) -> None:
        """Ends without a word."""
        super().end()
        self._leave()

    def _leave(self) -> None:
        if self._pair.responses is self:
            self._pair.leave(self)
            self._pair.sent(len(self._held) + self.waiting)


def _request(message: bytes) -> Request:
    """Returns the request that a message is: Qpid Proton leaves a null body out, and sections may
    be in any order, as for RabbitMQ. Raises PeerError."""
    properties: dict[str, Value] = {}
    body: Value = None
    at, end = 0, len(message)
    while at < end:
        code, start = section_at(message, at, end)
        at = skip(message, start, end)
        if code in (PROPERTIES, VALUE, DATA):
            value, _ = decode(message, start, at)
            if code != PROPERTIES:
                body = value
            elif isinstance(value, list):
                properties = dict(zip(FIELDS, value, strict=False))
    if not properties:
        raise PeerError("a request without properties")
    return Request(
        str(properties.get("subject") or ""),
        str(properties.get("to") or ""),
        body,
        properties.get("message-id"),
    )


def _encoded(request: Request, response: Response) -> bytes:
    properties: list[Value] = [None, None, None, str(response.status), None, request.id]
    return (
        section(PROPERTIES, properties)
        + section(APPLICATION_PROPERTIES, _VERSION)
        + section(VALUE, response.body)
    )
