"""Opening of a connection: authentication, limits, virtual host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from convoymq.edges.amqp091 import _spec as spec
from convoymq.edges.amqp091.handshake import (
    ClientCapabilities,
    text_of,
    tuned,
)
from convoymq.edges.amqp091.states import State
from convoymq.edges.sasl import Credentials
from convoymq.model import refusals
from convoymq.model.errors import AccessRefused, BrokerError

if TYPE_CHECKING:
    from convoymq.edges.amqp091.connection import Connection

log = structlog.get_logger()


def ignore(
    _connection: Connection, _method: spec.ConnectionBlocked | spec.ConnectionUnblocked
) -> None:
    """Hear what a client says of itself, and do nothing."""


def start_ok(connection: Connection, method: spec.ConnectionStartOk) -> None:
    """Takes credentials, and lets the broker check them. Raises PeerError."""
    connection.client_properties = method.client_properties
    connection.capabilities = ClientCapabilities.of(method.client_properties)
    connection.mechanism = method.mechanism
    credentials = connection.login.credentials(
        method.mechanism, method.response, connection.certificate_name
    )
    connection.enter(State.AUTHENTICATING)
    connection.pause("authentication")
    connection.shell.spawn(_authenticate(connection, credentials))


async def _authenticate(connection: Connection, credentials: Credentials) -> None:
    try:
        connection.user = await connection.login.user(credentials, connection.peer[0])
    except BrokerError as error:
        _login_refused(connection, error, credentials.user)
        return
    except Exception:
        log.exception("amqp.authentication_failed", connection=connection.name)
        connection.refuse(BrokerError("internal error"), 0, 10, 11)
        return
    if connection.state is not State.AUTHENTICATING:
        return
    connection.enter(State.TUNE)
    settings = connection.settings
    connection.send(
        0,
        spec.ConnectionTune(
            channel_max=settings.channel_max,
            frame_max=settings.frame_max,
            heartbeat=settings.heartbeat_s,
        ),
    )
    connection.resume("authentication")


def _login_refused(connection: Connection, error: BrokerError, user: str) -> None:
    log.warning("amqp.login_refused", connection=connection.name, user=user, reason=error.text)
    if connection.state is not State.AUTHENTICATING:
        return
    if connection.capabilities.authentication_failure_close:
        if not isinstance(error, AccessRefused):
            connection.refuse(error, 0, 0, 0)
            return
        connection.refuse(refusals.login_refused(connection.mechanism), 0, 0, 0)
        return
    # Such a client takes a closed socket for the refusal; silence slows guessing down.
    connection.later(connection.login.config.failed_login_delay_s, connection.tear_down)


def tune_ok(connection: Connection, method: spec.ConnectionTuneOk) -> None:
    """Takes the limits that the client agrees to. Raises NotAllowed."""
    agreed = tuned(connection.settings, method.channel_max, method.frame_max, method.heartbeat)
    connection.channel_max = agreed.channel_max
    connection.heartbeat_s = agreed.heartbeat_s
    connection.buffer.frame_max = agreed.frame_max
    connection.enter(State.OPENING)
    if agreed.heartbeat_s:
        connection.heartbeats.start(agreed.heartbeat_s)


def open_vhost(connection: Connection, method: spec.ConnectionOpen) -> None:
    """Opens the connection's virtual host. Raises BrokerError."""
    vhost, user = method.virtual_host, connection.user.name
    connection.broker.access.open_vhost(connection.user, vhost)
    limits = connection.broker.limits
    if not limits.bound_connections(user, vhost):
        _opened(connection, method)
        return
    asked = limits.open_connection(user, vhost, lambda: _opened(connection, method))
    connection.within_limits(asked, 0, method)


def _opened(connection: Connection, method: spec.ConnectionOpen) -> None:
    if connection.state is not State.OPENING:
        # It went away while others were asked.
        return
    connection.vhost_open = True
    connection.vhost = method.virtual_host
    connection.enter(State.OPEN)
    connection.set_alarms(connection.broker.alarms.effective)
    connection.broker.connections.add(connection)
    connection.broker.counters.connections_opened += 1
    connection.start_scans()
    connection.send(0, spec.ConnectionOpenOk())
    log.info(
        "amqp.connection_opened",
        connection=connection.name,
        user=connection.user.name,
        vhost=connection.vhost,
        client=text_of(connection.client_properties, "product"),
    )


def update_secret(connection: Connection, method: spec.ConnectionUpdateSecret) -> None:
    """Takes a new token, or any secret of a user whose password does not expire: what the user may
    now is asked again."""
    connection.pause("authentication")
    connection.shell.spawn(_renew(connection, method))


async def _renew(connection: Connection, method: spec.ConnectionUpdateSecret) -> None:
    try:
        user = await connection.login.renew(connection.user, method.new_secret)
        connection.broker.access.open_vhost(user, connection.vhost)
    except BrokerError as error:
        connection.refuse(error, 0, method.CLASS_ID, method.METHOD_ID)
        return
    except Exception:
        log.exception("amqp.authentication_failed", connection=connection.name)
        connection.refuse(BrokerError("internal error"), 0, method.CLASS_ID, method.METHOD_ID)
        return
    if connection.state is State.OPEN:
        connection.user = user
        connection.check_access()
        connection.send(0, spec.ConnectionUpdateSecretOk())
    connection.resume("authentication")


HANDLERS: dict[tuple[State, type[spec.Method]], Callable[..., None]] = {
    (State.START, spec.ConnectionStartOk): start_ok,
    (State.TUNE, spec.ConnectionTuneOk): tune_ok,
    (State.OPENING, spec.ConnectionOpen): open_vhost,
    (State.OPEN, spec.ConnectionUpdateSecret): update_secret,
    (State.OPEN, spec.ConnectionBlocked): ignore,
    (State.OPEN, spec.ConnectionUnblocked): ignore,
}
"""Functions that serve a method on channel 0 in a state, called with the connection and the
method."""
