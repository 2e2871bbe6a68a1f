"""Parts that links of publishers and consumers share, and links that were refused."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING

import structlog

from convoymq.edges.amqp10.errors import LINK_STOLEN, Fault, Scope, fault_of, link_fault
from convoymq.edges.amqp10.performatives import Attach, Composite, Detach, Flow
from convoymq.edges.amqp10.states import LINK_MOVES, LinkState, SessionState
from convoymq.messages.amqp10.values import Value
from convoymq.model.errors import BrokerError

if TYPE_CHECKING:
    from convoymq.edges.amqp10.session import Session

log = structlog.get_logger()

UNSETTLED, SETTLED, MIXED = 0, 1, 2
"""Of snd-settle-mode."""
NAME_MAX = 255
"""Characters of a link's name that are kept: it is for the log."""


class Link:
    """A link; by itself, one that was refused and waits for the client's detach."""

    __slots__ = ("handle", "key", "later", "name", "properties", "session", "state")

    def __init__(self, session: Session, handle: int, name: str) -> None:
        self.session = session
        self.handle = handle
        self.name = name[:NAME_MAX]
        self.state = LinkState.ATTACHING
        self.key = b""
        """Identity of the link beyond its session (`recovery`); empty: it has no such name."""
        self.properties: dict[Value, Value] | None = None
        """Of our attach."""
        self.later: Sequence[Composite] = ()
        """Performatives of the link that has the handle next."""

    def enter(self, state: LinkState) -> None:
        """Moves to another state."""
        assert state in LINK_MOVES[self.state]
        self.state = state
        names = self.session.connection.names
        if state in (LinkState.DETACHING, LinkState.DETACHED) and names.get(self.key) is self:
            del names[self.key]

    def take_name(self, key: bytes) -> None:
        """Takes a name, and detaches the link that has it."""
        names = self.session.connection.names
        before, names[key] = names.get(key), self
        self.key = key
        if before is not None:
            before.lose_name()

    def lose_name(self) -> None:
        """Detaches the link: another one has its name now."""
        self.fail(stolen())

    def fail(self, fault: Fault) -> None:
        """Detaches the link with an error."""
        if self.state in (LinkState.DETACHING, LinkState.DETACHED):
            return
        session = self.session
        log.info(
            "amqp.link_detached",
            connection=session.connection.name,
            link=self.name,
            code=fault.condition,
            reason=fault.text,
        )
        self.enter(LinkState.DETACHING)
        self.give_back()
        session.publishes.flush()
        session.send(Detach(handle=self.handle, closed=True, error=fault.error()))

    def give_back(self) -> None:
        """Lets go what the link has of queues."""

    def check_access(self) -> None:
        """Raises AccessRefused: the user may not have the link any more."""

    def forget(self) -> None:
        """Frees the handle."""
        self.session.links.pop(self.handle, None)
        self.session.drop_temporary(self.handle)

    def on_flow(self, flow: Flow) -> None:
        """Takes the client's view of the link."""

    def on_detach(self, detach: Detach) -> None:
        """Answers the client's detach."""
        self.forget()

    def end(self) -> None:
        """Ends without a word."""
        self.enter(LinkState.DETACHED)


def stolen() -> Fault:
    """Returns the error of a link whose name another one has."""
    return link_fault(LINK_STOLEN, "another link has this name now")


def refuse(session: Session, attach: Attach, fault: Fault) -> None:
    """Refuses a link."""
    log.info(
        "amqp.link_refused",
        connection=session.connection.name,
        link=attach.name[:NAME_MAX],
        code=fault.condition,
        reason=fault.text,
    )
    refused = Link(session, attach.handle, attach.name)
    refused.enter(LinkState.DETACHING)
    session.links[attach.handle] = refused
    session.send(
        Attach(
            name=attach.name,
            handle=attach.handle,
            role=not attach.role,
            snd_settle_mode=attach.snd_settle_mode,
            rcv_settle_mode=attach.rcv_settle_mode,
            # The terminus of ours is missing.
            source=None if attach.role else attach.source,
            target=attach.target if attach.role else None,
            initial_delivery_count=0 if attach.role else None,
        )
    )
    session.send(Detach(handle=attach.handle, closed=True, error=fault.error()))


def attach_later(
    session: Session,
    attach: Attach,
    made: Coroutine[object, object, None],
    then: Callable[[], None],
) -> None:
    """Attaches a link when its node is made. The connection is not read meanwhile.

    Args:
        made: makes the node; raises BrokerError.
        then: attaches the link, unless the session has ended.
    """
    connection = session.connection

    async def wait() -> None:
        try:
            await made
            if session.state is SessionState.MAPPED:
                then()
        except BrokerError as error:
            if session.state is SessionState.MAPPED:
                refuse(session, attach, fault_of(error, Scope.LINK))
        except Exception:
            log.exception("amqp.method_failed", connection=connection.name, method="attach")
            session.fail(fault_of(BrokerError("internal error"), Scope.SESSION))
        finally:
            connection.resume("attach")

    connection.pause("attach")
    connection.shell.spawn(wait())
