# cython: annotation_typing=False
"""One AMQP 1.0 connection: input and output, pauses, sessions, idle time, closing. Its states are
in `states`, the handshake in `opening`.

The object knows no socket: a `Shell` reads and writes for it. Source: OASIS AMQP 1.0 part 2, and
RabbitMQ 4.3 behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Protocol

import structlog

from convoymq.broker.access import AMQP_10
from convoymq.edges.amqp10 import opening
from convoymq.edges.amqp10.config import Amqp10Config
from convoymq.edges.amqp10.errors import (
    INTERNAL_ERROR,
    RESOURCE_LIMIT_EXCEEDED,
    UNAUTHORIZED_ACCESS,
    Fault,
    Scope,
    connection_fault,
    fault_of,
)
from convoymq.edges.amqp10.frames import (
    AMQP,
    HEADER_BYTES,
    SASL,
    SETTLES,
    Frame,
    FrameReader,
    frame,
)
from convoymq.edges.amqp10.link import Link
from convoymq.edges.amqp10.lists import session_row
from convoymq.edges.amqp10.performatives import (
    Begin,
    Close,
    Composite,
    Open,
    SaslInit,
    read,
)
from convoymq.edges.amqp10.serial import WINDOW_MAX
from convoymq.edges.amqp10.session import Session
from convoymq.edges.amqp10.states import ENDING, MOVES, SessionState, State
from convoymq.edges.connections import CREDENTIAL_EXPIRED, ClientConnection
from convoymq.edges.sasl import Login
from convoymq.model.clock import Timer
from convoymq.model.errors import BrokerError, FrameFault, NotAllowed, PeerError

if TYPE_CHECKING:
    from convoymq.broker.facade import Broker

log = structlog.get_logger()

_HEADERS = {State.HEADER: opening.greet, State.AMQP_HEADER: opening.begin_amqp}
"""Functions that take the 8 bytes of a protocol header, by state."""
_SILENT = frozenset(
    (State.HEADER, State.SASL, State.AUTHENTICATING, State.AMQP_HEADER, State.AWAITING_OPEN)
)
"""Errors end the connection without a close: there is no open yet."""
TICKS_MAX = 4
"""Half idle times of silence that end a connection."""


class Shell(Protocol):
    """Services that a connection needs of its socket and loop."""

    def set_reading(self, on: bool) -> None:
        """Starts or stops handing input over."""

    def want_flush(self) -> None:
        """Takes the output soon, by `take_output`."""

    def update_kept(self) -> None:
        """Reports the output that waits for the socket, by `on_kept`."""

    def close(self) -> None:
        """Writes what is left and closes the socket. `lost` follows unless it was called."""

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Calls back once."""

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Runs in a task that somebody owns."""


class Connection(ClientConnection):
    """A connection's rules. Implements the registry's handle."""

    __slots__ = (
        "_dirty", "_down", "_held_up", "_output", "_pauses", "_pumping", "_reader", "_registered",
        "_seen_moved", "_seen_sent", "_silent_ticks", "_timers", "_waiting_bytes", "broker",
        "certificate_name", "channel_max", "counters", "default_vhost", "kept_bytes", "login",
        "mechanism", "message_size_max", "names", "peer_frame_max", "peer_open", "received", "sent",
        "sessions_open", "settings", "shell", "state", "unfinished_bytes",
    )  # fmt: skip

    def __init__(
        self,
        *,
        id: int,
        broker: Broker,
        settings: Amqp10Config,
        login: Login,
        shell: Shell,
        peer: tuple[str, int] = ("", 0),
        local: tuple[str, int] = ("", 0),
        ssl: bool = False,
        certificate_name: str | None = None,
        handshake_left_s: float = 10.0,
        message_size_max: int = 16 << 20,
        default_vhost: str = "/",
        names: dict[bytes, Link] | None = None,
    ) -> None:
        """
        Args:
            handshake_left_s: until the connection is open.
            message_size_max: limit of messages, bytes.
            names: links of this node, by what identifies them (`recovery`).
        """
        self.begin(id, peer, local, ssl)
        self.broker = broker
        self.settings = settings
        self.login = login
        self.shell = shell
        self.certificate_name = certificate_name
        self.message_size_max = message_size_max
        self.default_vhost = default_vhost
        self.names = {} if names is None else names
        self.state = State.HEADER
        self.mechanism = ""
        self.sessions_open: dict[int, Session] = {}
        self.channel_max = settings.session_max - 1
        self.peer_open: Open | None = None
        self.peer_frame_max = settings.initial_frame_max
        self._output: list[bytes] = []
        self._waiting_bytes = 0
        """Of the output, which is joined when it is written."""
        self.kept_bytes = 0
        """Output that the shell keeps until the socket takes it."""
        self.unfinished_bytes = 0
        """Of messages whose last transfer has not come."""
        self.received = 0
        self.sent = 0
        self.counters = broker.counters.of(AMQP_10)
        self._reader = FrameReader(settings.initial_frame_max)
        self._pauses: set[str] = set()
        self._pumping = False
        self._down = False
        self._registered = False
        self._silent_ticks = 0
        self._seen_moved = 0
        self._seen_sent = 0
        self._dirty: set[Session] = set()
        self._held_up = False
        """Deliveries wait until the output has room."""
        self._timers = [shell.call_later(handshake_left_s, self._handshake_late)]

    def enter(self, state: State) -> None:
        """Moves to another state."""
        assert state in MOVES[self.state]
        self.state = state

    # --- what the shell calls ----------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Works through input."""
        self.received += len(data)
        if self.state in ENDING and self.state is not State.CLOSING:
            return
        self._reader.feed(data)
        self._pump()

    def lost(self) -> None:
        """The socket is gone, or the peer closed its side."""
        if self.state is State.OPEN:
            log.warning("amqp.closed_without_close", connection=self.name)
        self.tear_down()

    def take_output(self) -> bytes:
        """Returns the output, which is written now."""
        self.flush_outcomes()
        data = b"".join(self._output)
        self._output.clear()
        self._waiting_bytes = 0
        self.sent += len(data)
        return data

    def on_kept(self, count: int) -> None:
        """The shell keeps so much output that the socket does not take yet."""
        self.kept_bytes = count
        if self.output_bytes > self.settings.output_bytes_high:
            self.pause("output")
            return
        if "output" in self._pauses:
            if self.output_bytes > self.settings.output_bytes_low:
                return
            self.resume("output")
        if self._held_up:
            self._held_up = False
            for session in list(self.sessions_open.values()):
                session.pump()

    # --- output ------------------------------------------------------------------------------

    @property
    def output_bytes(self) -> int:
        """Returns how much output waits."""
        return self.kept_bytes + self._waiting_bytes

    @property
    def output_room(self) -> int:
        """Returns how much more output may wait; below 0: too much does."""
        return self.settings.output_bytes_high - self.output_bytes

    def output_full(self) -> bool:
        """Returns whether the client reads too slowly for more deliveries."""
        full = self.output_room < 0
        self._held_up |= full
        return full

    def write(self, data: bytes) -> None:
        """Appends bytes to the output."""
        if self._down:
            return
        if not self._output:
            self.shell.want_flush()
        self._output.append(data)
        self._waiting_bytes += len(data)

    def send_frame(self, channel: int, body: bytes, kind: int = AMQP) -> None:
        """Appends a frame to the output."""
        self.write(frame(channel, body, kind))

    def send(self, channel: int, performative: Composite) -> None:
        """Appends a performative to the output."""
        self.write(frame(channel, performative.encoded()))

    def want_outcomes(self, session: Session) -> None:
        """Has the outcomes of a session's publishes sent with the next output."""
        if not self._dirty and not self._output:
            self.shell.want_flush()
        self._dirty.add(session)

    def flush_outcomes(self) -> None:
        """Appends outcomes to the output, at the end of the round."""
        dirty, self._dirty = self._dirty, set()
        for session in dirty:
            session.publishes.flush()

    # --- pauses ------------------------------------------------------------------------------

    def pause(self, reason: str) -> None:
        """Stops reading, for one reason of possibly several."""
        self._pauses.add(reason)
        self.shell.set_reading(False)

    def resume(self, reason: str) -> None:
        """Ends one reason not to read; without any, reads on."""
        self._pauses.discard(reason)
        if not self._pauses and not self._down:
            self._pump()
            if not self._pauses and not self._down:
                self.shell.set_reading(True)

    # --- input -------------------------------------------------------------------------------

    def _pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        try:
            while not self._pauses and not self._down and self._step():
                pass
        except BrokerError as error:
            self.refuse(fault_of(error, Scope.CONNECTION))
        except Exception:
            log.exception("amqp.input_failed", connection=self.name)
            self.refuse(connection_fault(INTERNAL_ERROR, "internal error"))
        finally:
            self._pumping = False

    def _step(self) -> bool:
        """Works through one protocol header or frame; False: there is no whole one."""
        take_header = _HEADERS.get(self.state)
        if take_header is not None:
            header = self._reader.take(HEADER_BYTES)
            if header is None:
                return False
            take_header(self, header)
            return True
        if self.state is State.OPEN and self._take_plain():
            return True
        found = self._reader.frame()
        if found is None:
            return False
        self._on_frame(found)
        return True

    def _take_plain(self) -> bool:
        """Works through transfers to one link, or dispositions and flows, that need no closer look.
        Returns whether there were any."""
        found = self._reader.plain()
        session = self.sessions_open.get(found >> 33) if found >= 0 else None
        if session is None:
            return False
        if found & SETTLES:
            return session.take_settlements(self._reader)
        return session.take_plain(found & WINDOW_MAX, self._reader)

    def _on_frame(self, found: Frame) -> None:
        wanted = SASL if self.state is State.SASL else AMQP
        if found.type != wanted:
            raise FrameFault(f"frame type {found.type} where type {wanted} is due")
        if found.type == AMQP and found.channel > self.channel_max:
            raise FrameFault(
                f"channel number ({found.channel}) exceeds maximum channel number "
                f"({self.channel_max})"
            )
        if not found.body:
            return
        try:
            performative, payload = read(found.body)
        except PeerError as error:
            raise connection_fault(INTERNAL_ERROR, f"Reader error: {error.text}") from error
        self._dispatch(found.channel, performative, payload)

    def _dispatch(self, channel: int, performative: Composite, payload: bytes) -> None:
        state = self.state
        if state is State.CLOSING:
            if isinstance(performative, Close):
                self.finish()
        elif state is State.SASL and isinstance(performative, SaslInit):
            opening.log_in(self, performative)
        elif state is State.AWAITING_OPEN and isinstance(performative, Open):
            opening.open_connection(self, performative)
        elif state is State.OPEN and isinstance(performative, Close):
            self._closed_by_client()
        elif state is State.OPEN and not isinstance(performative, Open | SaslInit):
            self._on_session(channel, performative, payload)
        else:
            raise connection_fault(
                INTERNAL_ERROR, f"unexpected {performative.NAME} in state {state.value}"
            )

    def _on_session(self, channel: int, performative: Composite, payload: bytes) -> None:
        session = self.sessions_open.get(channel)
        if session is not None:
            session.handle(performative, payload)
            if session.state is SessionState.ENDED:
                self.sessions_open.pop(channel, None)
        elif isinstance(performative, Begin):
            self._begin(channel, performative)
        # What a client sends in a session that it has not begun is ignored.

    def _begin(self, channel: int, performative: Begin) -> None:
        if performative.remote_channel is not None:
            raise connection_fault(INTERNAL_ERROR, "begin answers no begin of the server")
        session = Session(self, channel, performative)
        limits = self.broker.limits
        if not limits.bound_channels(self.user.name):
            self._begun(session)
            return
        self.pause("limits")
        self.shell.spawn(self._within_limits(session))

    def _begun(self, session: Session) -> None:
        if self.state is State.OPEN:
            self.sessions_open[session.channel] = session
            self.broker.counters.channels_opened += 1
            session.start()

    async def _within_limits(self, session: Session) -> None:
        try:
            limits = self.broker.limits
            await limits.open_channel(self.user.name, lambda: self._begun(session))
        except BrokerError as error:
            self._begun(session)
            session.fail(Fault(Scope.SESSION, RESOURCE_LIMIT_EXCEEDED, error.text))
        except Exception:
            log.exception("amqp.method_failed", connection=self.name, method="begin")
            self.refuse(connection_fault(INTERNAL_ERROR, "internal error"))
        self.resume("limits")

    def forget_session(self, session: Session) -> None:
        """The session's channel number is free again."""
        if self.sessions_open.get(session.channel) is session:
            del self.sessions_open[session.channel]

    # --- opening -----------------------------------------------------------------------------

    def take_limits(self, performative: Open) -> None:
        """Takes the limits that the client announces."""
        settings = self.settings
        self.peer_open = performative
        self.channel_max = min(performative.channel_max, settings.session_max - 1)
        self.peer_frame_max = max(
            settings.frame_max_least, min(performative.max_frame_size, settings.output_bytes_low)
        )
        self._reader.frame_max = settings.frame_max

    def opened(self) -> None:
        """The virtual host is open."""
        if self.state is not State.OPENING:
            # It went away while others were asked.
            return
        assert self.peer_open is not None
        self.enter(State.OPEN)
        self._cancel_timers()
        self._registered = True
        self.broker.connections.add(self)
        self.broker.counters.connections_opened += 1
        opening.send_open(self)
        if self.settings.idle_timeout_ms:
            self.later(self.settings.idle_timeout_ms / 2000, self._look_for_silence)
        idle_ms = self.peer_open.idle_time_out
        if idle_ms:
            self._beat(idle_ms // 1000 / 2)
        log.info(
            "amqp.connection_opened",
            connection=self.name,
            user=self.user.name,
            vhost=self.vhost,
            client=self.client_property("product"),
        )

    def client_property(self, name: str) -> str:
        """Returns a property of the client as text; empty when it is absent or no text."""
        properties = self.peer_open.properties if self.peer_open is not None else None
        value = (properties or {}).get(name)
        return str(value) if isinstance(value, str) else ""

    def _handshake_late(self) -> None:
        if self.state is not State.OPEN and self.state not in ENDING:
            log.warning("amqp.handshake_timeout", connection=self.name, state=self.state.value)
            self.tear_down()

    # --- idle time ---------------------------------------------------------------------------

    def _look_for_silence(self) -> None:
        """Every half idle time: notices a silent peer."""
        if self.state is not State.OPEN:
            return
        self.shell.update_kept()
        # A client that does not read is not read either: what it takes is its sign of life.
        stuck = "output" in self._pauses
        moved = self.sent - self.kept_bytes if stuck else self.received
        silent = moved == self._seen_moved and self._pauses <= {"output"}
        self._silent_ticks = self._silent_ticks + 1 if silent else 0
        self._seen_moved = moved
        if self._silent_ticks >= TICKS_MAX:
            self.refuse(
                connection_fault(
                    RESOURCE_LIMIT_EXCEEDED,
                    "no frame received from client within idle timeout threshold",
                )
            )
            return
        self.later(self.settings.idle_timeout_ms / 2000, self._look_for_silence)

    def _beat(self, interval_s: float) -> None:
        """Sends a heartbeat where nothing else was sent."""
        if self.state is not State.OPEN:
            return
        sent = self.sent + self._waiting_bytes
        if sent == self._seen_sent:
            self.send_frame(0, b"")
            sent += HEADER_BYTES
        self._seen_sent = sent
        self.later(interval_s, lambda: self._beat(interval_s))

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Calls back once, unless the connection ends before."""
        # Two timers at most are ever due: of both peers' idle times, or one of the handshake's and
        # the close's.
        self._timers = [*self._timers[-1:], self.shell.call_later(delay_s, call)]

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    # --- errors and closing ------------------------------------------------------------------

    def refuse(self, fault: Fault) -> None:
        """Closes the connection with an error."""
        if self.state in ENDING:
            if self.state is State.CLOSING:
                # Nothing that it sends behind our close is understood any more.
                self.finish()
            return
        log.warning(
            "amqp.connection_error", connection=self.name, code=fault.condition, reason=fault.text
        )
        if self.state in _SILENT:
            self.end_silently()
            return
        self.enter(State.CLOSING)
        self._end_sessions()
        self.send(0, Close(error=fault.error()))
        self._cancel_timers()
        self.later(self.settings.close_timeout_s, self.tear_down)
        # What ends the connection would not be seen otherwise.
        self._pauses.clear()
        self.shell.set_reading(True)

    def end_silently(self) -> None:
        """Closes the socket after a while: so RabbitMQ ends what is not open yet."""
        self.pause("end")
        self.later(self.login.config.failed_login_delay_s, self.tear_down)

    def close(self, reason: str) -> None:
        """Closes on an operator's behalf."""
        if self.state is State.AWAITING_CLOSE:
            self.tear_down()
            return
        self.refuse(connection_fault(INTERNAL_ERROR, f"Connection forced: {reason}"))

    def expire(self) -> None:
        """See `ConnectionHandle`."""
        self.refuse(connection_fault(UNAUTHORIZED_ACCESS, CREDENTIAL_EXPIRED))

    def _closed_by_client(self) -> None:
        self.enter(State.LEAVING)
        self._end_sessions()
        self.shell.spawn(self._close_politely())

    async def _close_politely(self) -> None:
        """Exclusive queues go before our close."""
        try:
            await self._leave()
        finally:
            self.send(0, Close())
            if not self._down:
                self.enter(State.AWAITING_CLOSE)
                self._cancel_timers()
                self.later(self.settings.peer_close_timeout_s, self.tear_down)

    def finish(self) -> None:
        """Writes what is left and closes."""
        self.tear_down()

    def _end_sessions(self) -> None:
        for session in list(self.sessions_open.values()):
            session.terminate()
        self.sessions_open.clear()

    def tear_down(self) -> None:
        """Gives everything back and closes the socket. Safe to call twice."""
        if self._down:
            return
        self._end_sessions()
        self._down = True
        self.enter(State.CLOSED)
        self._cancel_timers()
        self.shell.close()
        if self._registered:
            self.shell.spawn(self._leave())

    async def _leave(self) -> None:
        """Tells the broker that this connection is over; exclusive queues are gone afterwards."""
        if not self._registered:
            return
        self._registered = False
        self.broker.connections.remove(self)
        self.broker.counters.connections_closed += 1
        try:
            await self.broker.queue_admin.connection_closed(self.id)
        except BrokerError as error:
            log.warning("amqp.exclusive_queues_left", connection=self.name, reason=error.text)

    # --- permissions -------------------------------------------------------------------------

    async def renew(self, secret: bytes) -> None:
        """Takes a user's new secret. A refused one ends the connection."""
        try:
            self.user = await self.login.renew(self.user, secret)
        except NotAllowed as error:
            text = f"credential update failed: {error.text}"
            self.refuse(connection_fault(UNAUTHORIZED_ACCESS, text))
            return
        self.check_access()

    def check_access(self) -> None:
        """Asks again whether the user may use the virtual host, and what its links lead to."""
        try:
            self.broker.access.open_vhost(self.user, self.vhost)
        except NotAllowed as error:
            self.refuse(connection_fault(UNAUTHORIZED_ACCESS, error.text))
            return
        for session in list(self.sessions_open.values()):
            session.check_access()

    # --- alarms ------------------------------------------------------------------------------

    def set_alarms(self) -> None:
        """The node's alarms changed: sessions take messages again, or none."""
        for session in list(self.sessions_open.values()):
            session.set_alarms()

    # --- lists -------------------------------------------------------------------------------

    def given_name(self) -> str:
        """See `ClientConnection`."""
        return self.client_property("connection_name")

    def info(self) -> dict[str, object]:
        """Returns one row of /api/connections."""
        client = self.peer_open
        blocked = bool(self.broker.alarms.effective) and any(
            session.receivers for session in self.sessions_open.values()
        )
        return self.row(
            container_id=client.container_id if client is not None else "",
            state="blocked" if blocked else self.state.value,
            channels=len(self.sessions_open),
            channel_max=self.channel_max,
            frame_max=client.max_frame_size if client is not None else 0,
            timeout=(client.idle_time_out or 0) // 1000 if client is not None else 0,
            protocol="AMQP 1-0",
            auth_mechanism=self.mechanism,
            client_properties={
                str(name): value if isinstance(value, bool | int | str) else str(value)
                for name, value in (
                    (client.properties if client is not None else None) or {}
                ).items()
            },
            recv_oct=self.received,
            send_oct=self.sent,
            send_pend=self.output_bytes,
        )

    def sessions(self) -> list[int]:
        """Returns the sessions by which queues know this connection."""
        return [session.queue_session for session in self.sessions_open.values()]

    def session_infos(self) -> list[dict[str, object]]:
        """Returns the rows of /api/connections/NAME/sessions."""
        return [session_row(each) for _, each in sorted(self.sessions_open.items())]

    def consumer_infos(self) -> list[dict[str, object]]:
        """Returns the rows of /api/consumers."""
        return [row for each in self.sessions_open.values() for row in each.consumer_infos()]
