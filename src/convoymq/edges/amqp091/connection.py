"""One AMQP connection: input and output, pauses, channels, closing. Its states are in `states`, the
handshake in `opening`.

A peer may still write when its close is answered: closing the socket under it would turn the
close-ok that it has not read yet into a reset.

The object knows no socket: a `Shell` reads and writes for it, the frame kernel scans for it.
Source: AMQP 0-9-1 and RabbitMQ 4.3 behaviour.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Protocol

import structlog

from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091.channel import Channel
from convoymq.edges.amqp091.codec import decode_method, encode_method
from convoymq.edges.amqp091.config import AmqpConfig
from convoymq.edges.amqp091.errors import REPLIES, Reply, Scope, reply_for, shortened
from convoymq.edges.amqp091.handshake import (
    CHANNEL_NUMBER_MAX,
    PROTOCOL_HEADERS,
    ClientCapabilities,
    server_properties,
    text_of,
)
from convoymq.edges.amqp091.heartbeats import Heartbeats
from convoymq.edges.amqp091.opening import HANDLERS
from convoymq.edges.amqp091.states import ENDING, MOVES, State
from convoymq.edges.connections import ClientConnection
from convoymq.edges.sasl import Login
from convoymq.kernels import channel_codec, connection_buffer
from convoymq.kernels.connection_buffer import ConnectionBuffer, Outbox
from convoymq.model import refusals
from convoymq.model.clock import Timer
from convoymq.model.errors import (
    BrokerError,
    ChannelFault,
    PeerError,
    UnexpectedFrame,
)
from convoymq.model.tables import EMPTY

if TYPE_CHECKING:
    from convoymq.broker.facade import Broker

log = structlog.get_logger()

SCAN_S = 60.0
SCAN_LEAST_S = 0.25
"""Longest time between two scans for late acknowledgements; a shorter time-out shortens it."""
_ALARM_WORDS = {"memory": "low on memory", "disk": "low on disk"}


class Shell(Protocol):
    """Services that a connection needs of its socket and loop."""

    def set_reading(self, on: bool) -> None:
        """Starts or stops handing input over."""

    def want_write(self) -> None:
        """Calls `on_writable` when the socket takes more."""

    def take_output(self, buffer: ConnectionBuffer) -> None:
        """Writes what waits in the buffer (only where that has no descriptor)."""

    def close(self) -> None:
        """Writes what the socket still takes and closes it. `lost` follows unless it was called."""

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Calls back once."""

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Runs in a task that somebody owns."""


class Connection(ClientConnection):
    """A connection's rules. Implements `ConnectionBufferOwner` and the registry's handle."""

    def __init__(
        self,
        *,
        id: int,
        broker: Broker,
        settings: AmqpConfig,
        login: Login,
        outbox: Outbox,
        shell: Shell,
        fd: int = -1,
        peer: tuple[str, int] = ("", 0),
        local: tuple[str, int] = ("", 0),
        ssl: bool = False,
        certificate_name: str | None = None,
        handshake_left_s: float = 10.0,
        message_size_max: int = 16 << 20,
    ) -> None:
        """
        Args:
            handshake_left_s: until `connection.open` is through.
            message_size_max: limit of bodies, bytes.
        """
        self.begin(id, peer, local, ssl)
        self.broker = broker
        self.settings = settings
        self.login = login
        self.message_size_max = message_size_max
        self.shell = shell
        self.certificate_name = certificate_name
        self.state = State.HEADER
        self.capabilities = ClientCapabilities()
        self.client_properties = EMPTY
        self.channels: dict[int, Channel] = {}
        self.channel_max = settings.channel_max
        self.heartbeat_s = 0
        self.buffer = ConnectionBuffer(
            self, outbox, fd, settings.initial_frame_max, message_size_max
        )
        self.buffer.backlog_max = settings.channel_backlog_bytes_max
        self._pauses: set[str] = set()
        self._flow: set[int] = set()
        self.mechanism = ""
        self._blocked_sent = False
        self._publishes = False
        self._down = False
        self._finishing = False
        self._may_await_close = True
        self.vhost_open = False
        self.heartbeats = Heartbeats(self)
        self._scan: Timer | None = None
        self._scan_s = 0.0
        self._scan_time_s = 0.0
        """Sum of the waits for scans: behind the clock, never ahead of it."""
        self._timers: list[Timer] = [shell.call_later(handshake_left_s, self._handshake_late)]

    def enter(self, state: State) -> None:
        """Moves to another state."""
        assert state in MOVES[self.state]
        self.state = state

    @property
    def is_down(self) -> bool:
        """Returns whether the socket is closed."""
        return self._down

    @property
    def is_paused(self) -> bool:
        """Returns whether reading is paused."""
        return bool(self._pauses)

    # --- what the shell calls --------------------------------------------------------------

    def lost(self) -> None:
        """The socket is gone."""
        self.tear_down()

    def on_writable(self) -> None:
        """The socket takes output again."""
        error = self.buffer.write()
        if error:
            self._socket_failed(error)
            return
        if self.buffer.output_bytes:
            self.shell.want_write()
        elif self._finishing:
            self.tear_down()
            return
        self._after_output()

    def eof(self) -> None:
        """The peer closed its side."""
        if self.state in (State.OPEN, State.OPENING):
            log.warning("amqp.closed_without_close", connection=self.name)
        self.tear_down()

    def failed(self) -> None:
        """Our own code failed while it worked through input; call inside `except`."""
        log.exception("amqp.input_failed", connection=self.name)
        self.refuse(BrokerError("internal error"), 0, 0, 0)

    def on_flush_failed(self, error: Exception) -> None:
        """See `ConnectionBufferOwner`: this connection ends, others go on."""
        log.error("amqp.output_failed", connection=self.name, exc_info=error)
        if self.state in ENDING:
            self.tear_down()
        else:
            self.refuse(BrokerError("internal error"), 0, 0, 0)

    def input_failed(self, code: int) -> None:
        """Reading failed with this errno."""
        self._socket_failed(code)

    # --- output ------------------------------------------------------------------------------

    def send(self, channel: int, method: spec.Method) -> None:
        """Appends a method to the output."""
        if not self._down:
            self.buffer.send_frame(spec.FRAME_METHOD, channel, encode_method(method))

    def output_full(self) -> bool:
        """Returns whether the client reads too slowly for more deliveries."""
        return self.buffer.corked or self.buffer.output_bytes > self.settings.output_bytes_high

    def on_output(self) -> None:
        """See `ConnectionBufferOwner`."""
        self.shell.take_output(self.buffer)
        self._after_output()

    def on_write_blocked(self, error: int) -> None:
        """See `ConnectionBufferOwner`."""
        if error:
            self._socket_failed(error)
            return
        self.shell.want_write()
        self._after_output()

    def _after_output(self) -> None:
        waiting = self.buffer.output_bytes
        if waiting > self.settings.output_bytes_high:
            if not self.buffer.corked:
                self.buffer.corked = True
                self.pause("output")
        elif self.buffer.corked and waiting <= self.settings.output_bytes_low:
            self.buffer.corked = False
            self.resume("output")
            self.buffer.flush_settles()
        if self.buffer.holding and not self.buffer.corked:
            self.on_drained()

    def on_drained(self) -> None:
        """See `ConnectionBufferOwner`."""
        self.buffer.holding = False
        for channel in list(self.channels.values()):
            channel.on_output_drained()

    def _socket_failed(self, code: int) -> None:
        if not self._down and code not in (errno.ECONNRESET, errno.EPIPE):
            log.warning(
                "amqp.socket_failed", connection=self.name, error=errno.errorcode.get(code, code)
            )
        self.tear_down()

    # --- pauses ------------------------------------------------------------------------------

    def pause(self, reason: str) -> None:
        """Stops reading, for one reason of possibly several."""
        self._pauses.add(reason)
        self.buffer.paused = True
        self.shell.set_reading(False)

    def resume(self, reason: str) -> None:
        """Ends one reason not to read; without any, reads on."""
        if reason not in self._pauses:
            return
        self._pauses.discard(reason)
        if not self._pauses and not self._down:
            self.buffer.paused = False
            self.buffer.pump()
            if not self._pauses and not self._down:
                self.shell.set_reading(True)

    def on_backlog_full(self, channel: int) -> None:
        """See `ConnectionBufferOwner`: go on when that channel has its answer."""
        self.pause("backlog")

    def codec_resumed(self) -> None:
        """A channel has worked off what was kept for it."""
        self.resume("backlog")

    def set_flow(self, channel: int, blocked: bool) -> None:
        """A queue of that channel asks not to be sent more, or takes more again."""
        if blocked:
            self._flow.add(channel)
        else:
            self._flow.discard(channel)
        (self.pause if self._flow else self.resume)("flow")

    @property
    def is_blocked(self) -> bool:
        """Returns whether reading is paused until an alarm ends."""
        return "alarm" in self._pauses

    def on_publish_blocked(self) -> None:
        """See `ConnectionBufferOwner`: a publish waits in front of an alarm."""
        self._publishes = True
        self.pause("alarm")
        self._send_blocked()

    def set_alarms(self, alarms: frozenset[str]) -> None:
        """The node's alarms changed."""
        self.buffer.alarmed = bool(alarms)
        if alarms:
            if self._publishes:
                self._send_blocked()
            return
        if self._blocked_sent:
            self._blocked_sent = False
            self.send(0, spec.ConnectionUnblocked())
        for channel in list(self.channels.values()):
            if channel.codec.state == channel_codec.CHANNEL_OPEN and channel.codec.backlog_bytes:
                channel.codec.state = channel_codec.CHANNEL_BUSY
                channel.codec.resume()
        self.resume("alarm")

    def _send_blocked(self) -> None:
        if self._blocked_sent or not self.capabilities.connection_blocked:
            return
        self._blocked_sent = True
        words = [
            _ALARM_WORDS.get(name, name)
            for name in sorted(self.broker.alarms.effective, reverse=True)
        ]
        reason = " & ".join(
            word if index == 0 else word.removeprefix("low on ") for index, word in enumerate(words)
        )
        self.send(0, spec.ConnectionBlocked(reason=reason))

    # --- input -------------------------------------------------------------------------------

    def on_protocol_header(self, data: bytes) -> None:
        """See `ConnectionBufferOwner`."""
        if data not in PROTOCOL_HEADERS:
            self.buffer.send_bytes(spec.PROTOCOL_HEADER)
            self.buffer.close()
            self._finish()
            return
        self.buffer.state = connection_buffer.CONNECTION_OPEN
        self.enter(State.START)
        self.send(
            0,
            spec.ConnectionStart(
                server_properties=server_properties(self.broker.cluster_name),
                mechanisms=" ".join(self.login.mechanisms(self.certificate_name)).encode(),
                locales=b"en_US",
            ),
        )

    def on_method(self, channel: int, payload: bytes) -> None:
        """See `ConnectionBufferOwner`."""
        try:
            method = decode_method(payload)
        except BrokerError as error:
            class_id = int.from_bytes(payload[:2], "big")
            self.refuse(error, channel, class_id, int.from_bytes(payload[2:4], "big"))
            return
        try:
            self._dispatch(channel, method)
        except BrokerError as error:
            self.refuse(error, channel, method.CLASS_ID, method.METHOD_ID)
        except Exception:
            log.exception("amqp.method_failed", connection=self.name, method=method.NAME)
            self.refuse(BrokerError("internal error"), channel, method.CLASS_ID, method.METHOD_ID)

    def on_fault(self, code: int, text: str, channel: int, class_id: int, method_id: int) -> None:
        """See `ConnectionBufferOwner`."""
        name = REPLIES[code][0]
        reply = Reply(code, f"{name} - {text}", Scope.CONNECTION)
        self._close_by_server(reply, class_id, method_id)

    def _dispatch(self, channel: int, method: spec.Method) -> None:
        if channel and self.state is State.OPEN:
            self._channel_method(channel, method)
            return
        if self.state is State.CLOSED:
            return
        if isinstance(method, spec.ConnectionClose) and channel == 0:
            self._closed_by_client()
            return
        if self.state in ENDING:
            if self.state is State.CLOSING and isinstance(method, spec.ConnectionCloseOk):
                self._finish()
            return
        if channel:
            raise UnexpectedFrame(f"channel {channel} before connection.open")
        handler = HANDLERS.get((self.state, type(method)))
        if handler is None:
            raise ChannelFault(f"unexpected method in connection state {self.state.value}")
        handler(self, method)

    def _channel_method(self, number: int, method: spec.Method) -> None:
        channel = self.channels.get(number)
        if channel is not None:
            channel.handle(method)
            return
        # It is the count that was agreed on; any number but the reserved one may be used.
        if number > CHANNEL_NUMBER_MAX:
            raise refusals.channel_reserved(number)
        if len(self.channels) >= self.channel_max:
            raise refusals.too_many_channels(len(self.channels), self.channel_max)
        if not isinstance(method, spec.ChannelOpen):
            raise ChannelFault("expected 'channel.open'")
        limits = self.broker.limits
        if not limits.bound_channels(self.user.name):
            self._open_channel(number)
            return
        asked = limits.open_channel(self.user.name, lambda: self._open_channel(number))
        self.within_limits(asked, number, method)

    def _open_channel(self, number: int) -> None:
        if self.state is not State.OPEN:
            # It went away while others were asked.
            return
        self.channels[number] = Channel(self, number)
        self.broker.counters.channels_opened += 1
        self.send(number, spec.ChannelOpenOk())

    def within_limits(
        self, asked: Coroutine[object, object, None], channel: int, method: spec.Method
    ) -> None:
        """Asks other nodes whether a limit lets the method through; then reads on, or closes."""

        async def wait() -> None:
            try:
                await asked
            except BrokerError as error:
                self.refuse(error, channel, method.CLASS_ID, method.METHOD_ID)
            except Exception:
                log.exception("amqp.method_failed", connection=self.name, method=method.NAME)
                failed = BrokerError("internal error")
                self.refuse(failed, channel, method.CLASS_ID, method.METHOD_ID)
            self.resume("limits")

        self.pause("limits")
        self.shell.spawn(wait())

    # --- handshake ---------------------------------------------------------------------------

    def _handshake_late(self) -> None:
        if self.state is not State.OPEN and self.state not in ENDING:
            log.warning("amqp.handshake_timeout", connection=self.name, state=self.state.value)
            self.tear_down()

    # --- late acknowledgements ---------------------------------------------------------------

    def start_scans(self) -> None:
        """Begins to look for late acknowledgements, where they are limited."""
        self.scan_within(self.settings.consumer_timeout_ms)

    def scan_within(self, timeout_ms: int | None) -> None:
        """Look often enough for acknowledgements that have so much time; None = any."""
        if timeout_ms is None or self._down:
            return
        wait_s = min(SCAN_S, max(SCAN_LEAST_S, timeout_ms / 2000))
        if self._scan is not None:
            if self._scan_s <= wait_s:
                return
            # What has passed of the longer wait does not count: nothing is late too early.
            self._scan.cancel()
        self._scan_s = wait_s
        self._scan = self.shell.call_later(wait_s, self._check_acknowledged)

    def _check_acknowledged(self) -> None:
        self._scan = None
        self._scan_time_s += self._scan_s
        for channel in list(self.channels.values()):
            channel.timeouts.scan(self._scan_time_s)
        shortest = [channel.timeouts.shortest_ms() for channel in self.channels.values()]
        for timeout_ms in (self.settings.consumer_timeout_ms, *shortest):
            self.scan_within(timeout_ms)

    # --- timers ------------------------------------------------------------------------------

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Calls back once, unless the connection ends before."""
        # Two timers at most are ever due: the handshake's or close's, and the heartbeat's.
        self._timers = [*self._timers[-1:], self.shell.call_later(delay_s, call)]

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._scan is not None:
            self._scan.cancel()
            self._scan = None

    # --- errors and closing ------------------------------------------------------------------

    def refuse(self, error: BrokerError, channel: int, class_id: int, method_id: int) -> None:
        """Closes the channel or the connection, as the error asks for."""
        if self.state in ENDING:
            return
        reply = reply_for(error)
        found = self.channels.get(channel)
        soft = reply.scope is Scope.CHANNEL and found is not None and self.state is State.OPEN
        if isinstance(error, PeerError) or not soft or found is None:
            self._close_by_server(reply, class_id, method_id)
            return
        if found.closed:
            return
        log.info("amqp.channel_closed", connection=self.name, channel=channel, reason=reply.text)
        found.terminate()
        self.send(
            channel,
            spec.ChannelClose(
                reply_code=reply.code,
                reply_text=reply.text,
                class_id=class_id,
                method_id=method_id,
            ),
        )
        found.codec.drain()
        self.codec_resumed()

    def forget_channel(self, channel: Channel) -> None:
        """The channel's number is free again."""
        channel.codec.detach()
        if self.channels.get(channel.number) is channel:
            del self.channels[channel.number]
        self.codec_resumed()

    def close(self, reason: str) -> None:
        """Closes on an operator's behalf: 320 CONNECTION_FORCED."""
        if self.state is State.AWAITING_CLOSE:
            self.tear_down()
            return
        self._may_await_close = False
        if self.state in ENDING:
            return
        self._close_by_server(
            Reply(320, shortened(f"CONNECTION_FORCED - {reason}"), Scope.CONNECTION), 0, 0
        )

    def check_access(self) -> None:
        """See `ConnectionHandle`."""
        for channel in list(self.channels.values()):
            channel.check_again()

    def _close_by_server(self, reply: Reply, class_id: int, method_id: int) -> None:
        if self.state in ENDING:
            return
        log.warning(
            "amqp.connection_error", connection=self.name, code=reply.code, reason=reply.text
        )
        if self.state is State.HEADER:
            self.tear_down()
            return
        self.enter(State.CLOSING)
        self.buffer.state = connection_buffer.CONNECTION_CLOSING
        self._end_channels()
        self.send(
            0,
            spec.ConnectionClose(
                reply_code=reply.code,
                reply_text=reply.text,
                class_id=class_id,
                method_id=method_id,
            ),
        )
        self.later(self.settings.close_timeout_s, self.tear_down)
        self._read_to_the_end()

    def _read_to_the_end(self) -> None:
        """Resumes reading, because what ends the connection would not be seen otherwise."""
        self._pauses.clear()
        self.buffer.paused = False
        self.buffer.alarmed = False
        self.shell.set_reading(True)

    def _closed_by_client(self) -> None:
        if self.state in (State.CLOSING, State.AWAITING_CLOSE):
            # Theirs crosses ours, or is repeated.
            self.send(0, spec.ConnectionCloseOk())
            return
        if self.state is State.LEAVING:
            return
        opened = self.state is State.OPEN
        self.enter(State.LEAVING)
        self.buffer.state = connection_buffer.CONNECTION_CLOSING
        self._end_channels()
        if opened:
            self.shell.spawn(self._close_politely())
        else:
            self.send(0, spec.ConnectionCloseOk())
            self._finish()

    async def _close_politely(self) -> None:
        """Exclusive queues go before close-ok: clients rely on it."""
        try:
            await self._leave()
        finally:
            self.send(0, spec.ConnectionCloseOk())
            self._await_close()

    def _await_close(self) -> None:
        """Waits for the peer to close the socket, and drops what it still sends."""
        if self._down:
            return
        if not self._may_await_close:
            self._finish()
            return
        self.enter(State.AWAITING_CLOSE)
        wait_s = self.settings.peer_close_timeout_s
        if self.heartbeat_s:
            wait_s = min(wait_s, self.heartbeat_s)
        self._cancel_timers()
        self.later(wait_s, self.tear_down)
        self._read_to_the_end()

    def _end_channels(self) -> None:
        for channel in list(self.channels.values()):
            channel.terminate()
            channel.codec.detach()
        self.channels.clear()

    def _finish(self) -> None:
        """Writes what is left, then closes; a client that does not read has its time limit."""
        if self._down or self._finishing:
            return
        self._finishing = True
        self.buffer.flush()
        if self.buffer.fd >= 0 and self.buffer.output_bytes:
            self.later(self.settings.close_timeout_s, self.tear_down)
        else:
            self.tear_down()

    def tear_down(self) -> None:
        """Gives everything back and closes the socket. Safe to call twice."""
        if self._down:
            return
        self._down = True
        self.enter(State.CLOSED)
        self._cancel_timers()
        self._end_channels()
        self.buffer.close()
        self.shell.close()
        if self.vhost_open:
            self.shell.spawn(self._leave())

    async def _leave(self) -> None:
        """Tells the broker that this connection is over; exclusive queues are gone afterwards."""
        if not self.vhost_open:
            return
        self.vhost_open = False
        self.broker.connections.remove(self)
        self.broker.counters.connections_closed += 1
        try:
            await self.broker.queue_admin.connection_closed(self.id)
        except BrokerError as error:
            log.warning("amqp.exclusive_queues_left", connection=self.name, reason=error.text)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Runs in a task that the shell owns."""
        self.shell.spawn(work)

    # --- for the management API --------------------------------------------------------------

    def given_name(self) -> str:
        """See `ClientConnection`."""
        return text_of(self.client_properties, "connection_name")

    def info(self) -> dict[str, object]:
        """Returns one row of /api/connections."""
        state = (
            "blocked" if self.is_blocked else "flow" if "flow" in self._pauses else self.state.value
        )
        return self.row(
            state=state,
            channels=len(self.channels),
            channel_max=self.channel_max,
            frame_max=self.buffer.frame_max,
            timeout=self.heartbeat_s,
            protocol="AMQP 0-9-1",
            auth_mechanism=self.mechanism,
            client_properties=self.client_properties.to_plain(),
            recv_oct=self.buffer.received,
            send_oct=self.buffer.sent,
            send_pend=self.buffer.output_bytes,
        )

    def traffic(self) -> int:
        """See `ConnectionHandle`."""
        return int(self.buffer.received + self.buffer.sent)

    def sessions(self) -> list[int]:
        """Returns the sessions of its channels."""
        return [channel.queue_session for channel in self.channels.values()]

    def channel_infos(self) -> list[dict[str, object]]:
        """Returns the rows of /api/channels."""
        return [channel.info() for channel in self.channels.values()]

    def set_prefetch(self, queue: str, tag: str, prefetch: int) -> int:
        """See `ConnectionHandle`."""
        channels = list(self.channels.values())
        return sum(channel.set_prefetch(queue, tag, prefetch) for channel in channels)

    def consumer_infos(self) -> list[dict[str, object]]:
        """Returns the rows of /api/consumers."""
        return [row for channel in self.channels.values() for row in channel.consumer_infos()]
