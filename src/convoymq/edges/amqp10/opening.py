"""Opening of a connection: protocol headers, SASL, virtual host and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from convoymq import __version__
from convoymq.edges.amqp10.errors import (
    FRAME_SIZE_TOO_SMALL,
    INTERNAL_ERROR,
    NOT_ALLOWED,
    RESOURCE_LIMIT_EXCEEDED,
    UNAUTHORIZED_ACCESS,
    Scope,
    connection_fault,
    fault_of,
)
from convoymq.edges.amqp10.frames import SASL
from convoymq.edges.amqp10.performatives import Open, SaslInit, SaslMechanisms, SaslOutcome
from convoymq.edges.amqp10.states import State
from convoymq.edges.sasl import Credentials
from convoymq.messages.amqp10.values import Symbol, Value
from convoymq.model.compatibility import COMPATIBLE_PRODUCT, COMPATIBLE_VERSION
from convoymq.model.errors import AccessRefused, BrokerError, FrameFault, NotAllowed

if TYPE_CHECKING:
    from convoymq.edges.amqp10.connection import Connection

log = structlog.get_logger()

PLAIN_HEADER = b"AMQP\x00\x01\x00\x00"
TLS_HEADER = b"AMQP\x02\x01\x00\x00"
SASL_HEADER = b"AMQP\x03\x01\x00\x00"
PROTOCOL_HEADERS = (SASL_HEADER, PLAIN_HEADER, TLS_HEADER)
CAPABILITIES = ("ANONYMOUS-RELAY",)
"""Capabilities of connections."""
_VHOST = "vhost:"
_OK, _AUTH_FAILED = 0, 1


def greet(connection: Connection, header: bytes) -> None:
    """Takes the first protocol header: a client has to log in, so another one than SASL's is
    answered by that, and the connection ends."""
    connection.write(SASL_HEADER)
    if header != SASL_HEADER:
        connection.finish()
        return
    connection.enter(State.SASL)
    offered = connection.login.mechanisms(connection.certificate_name)
    connection.send_frame(0, SaslMechanisms(mechanisms=offered).encoded(), SASL)


def log_in(connection: Connection, init: SaslInit) -> None:
    """Takes the client's mechanism and response, and lets the broker check them."""
    connection.mechanism = init.mechanism
    connection.enter(State.AUTHENTICATING)
    try:
        credentials = connection.login.credentials(
            init.mechanism, init.initial_response or b"", connection.certificate_name
        )
    except BrokerError as error:
        log.warning("amqp.login_refused", connection=connection.name, user="", reason=error.text)
        connection.end_silently()
        return
    connection.pause("authentication")
    connection.shell.spawn(_authenticate(connection, credentials))


async def _authenticate(connection: Connection, credentials: Credentials) -> None:
    try:
        connection.user = await connection.login.user(credentials, connection.peer[0])
    except AccessRefused as error:
        log.warning(
            "amqp.login_refused",
            connection=connection.name,
            user=credentials.user,
            reason=error.text,
        )
        # Silence slows guessing down.
        connection.later(connection.login.config.failed_login_delay_s, lambda: _refused(connection))
        return
    except Exception:
        log.exception("amqp.authentication_failed", connection=connection.name)
        connection.tear_down()
        return
    if connection.state is State.AUTHENTICATING:
        connection.send_frame(0, SaslOutcome(code=_OK).encoded(), SASL)
        connection.enter(State.AMQP_HEADER)
        connection.resume("authentication")


def _refused(connection: Connection) -> None:
    if connection.state is State.AUTHENTICATING:
        connection.send_frame(0, SaslOutcome(code=_AUTH_FAILED).encoded(), SASL)
        connection.finish()


def begin_amqp(connection: Connection, header: bytes) -> None:
    """Takes the protocol header behind the log-in. Raises FrameFault."""
    if header != PLAIN_HEADER:
        raise FrameFault(f"protocol header {header!r} behind the log-in")
    connection.write(PLAIN_HEADER)
    connection.enter(State.AWAITING_OPEN)


def open_connection(connection: Connection, performative: Open) -> None:
    """Takes the client's limits, and opens its virtual host. What is refused is refused by a close
    behind our open."""
    connection.enter(State.OPENING)
    connection.take_limits(performative)
    try:
        _check(connection, performative)
        _open_vhost(connection, performative.hostname or "")
    except BrokerError as error:
        refuse(connection, error)


def _check(connection: Connection, performative: Open) -> None:
    """Raises Fault for limits below those of the standard."""
    settings = connection.settings
    if performative.max_frame_size < settings.frame_max_least:
        raise connection_fault(
            FRAME_SIZE_TOO_SMALL,
            f"frame_max={performative.max_frame_size} < {settings.frame_max_least} min size",
        )
    idle = performative.idle_time_out or 0
    if 0 < idle < settings.client_idle_timeout_least_ms:
        raise connection_fault(
            NOT_ALLOWED,
            f"idle-time-out {idle} ms is below the minimum of "
            f"{settings.client_idle_timeout_least_ms} ms",
        )


def _open_vhost(connection: Connection, hostname: str) -> None:
    name = hostname.removeprefix(_VHOST)
    vhost = name if name != hostname else connection.default_vhost
    user = connection.user
    try:
        connection.broker.access.open_vhost(user, vhost)
    except NotAllowed as error:
        raise connection_fault(
            UNAUTHORIZED_ACCESS, f"AMQP 1.0 connection failed: {error.text}"
        ) from error
    connection.vhost = vhost
    limits = connection.broker.limits
    if not limits.bound_connections(user.name, vhost):
        connection.opened()
        return
    connection.pause("limits")
    connection.shell.spawn(_within_limits(connection))


async def _within_limits(connection: Connection) -> None:
    limits = connection.broker.limits
    try:
        await limits.open_connection(
            connection.user.name, connection.vhost, lambda: connection.opened()
        )
    except NotAllowed as error:
        refuse(connection, connection_fault(RESOURCE_LIMIT_EXCEEDED, error.text))
    except BrokerError as error:
        refuse(connection, error)
    except Exception:
        log.exception("amqp.method_failed", connection=connection.name, method="open")
        refuse(connection, connection_fault(INTERNAL_ERROR, "internal error"))
    connection.resume("limits")


def refuse(connection: Connection, error: BrokerError) -> None:
    """Closes a connection that is not open yet, behind our open: so the standard wants it."""
    if connection.state is State.OPENING:
        send_open(connection)
        connection.refuse(fault_of(error, Scope.CONNECTION))


def send_open(connection: Connection) -> None:
    """Sends our open."""
    settings = connection.settings
    connection.send(
        0,
        Open(
            container_id=connection.broker.cluster_name,
            max_frame_size=settings.frame_max,
            channel_max=connection.channel_max,
            idle_time_out=settings.idle_timeout_ms // 2 or None,
            offered_capabilities=CAPABILITIES,
            properties=_properties(connection),
        ),
    )


def _properties(connection: Connection) -> dict[Value, Value]:
    return {
        Symbol(name): value
        for name, value in (
            ("cluster_name", connection.broker.cluster_name),
            ("copyright", "The ConvoyMQ authors"),
            ("information", f"ConvoyMQ {__version__}, licensed under Apache-2.0"),
            ("node", connection.broker.node_name),
            ("platform", "Python"),
            ("product", COMPATIBLE_PRODUCT),
            ("version", COMPATIBLE_VERSION),
        )
    }
