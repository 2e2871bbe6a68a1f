"""Limits of the columnar protocol's server."""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.model.columnar import AUTHENTICATE_TIMEOUT_S, REQUESTS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """Offers and bounds of the server. Names in brackets are configuration keys."""

    frame_max: int = 64 << 20
    """[fetch.frame_max] Largest request or answer, bytes."""
    answer_bytes: int = 4 << 20
    """[fetch.answer_max] Rows are added to an answer up to this size, bytes."""
    answer_bytes_beside: int = 1 << 20
    """The same while others are active: putting an answer together can't be interrupted."""
    buffer_bytes: int = 256 << 20
    """[fetch.buffer_max] Answers under way, of all connections, bytes."""
    connections_max: int = 1000
    """[fetch.connections_max]"""
    write_timeout_s: float = 30.0
    """[fetch.write_timeout] A client that reads nothing for so long is dropped."""
    pressed_timeout_s: float = 2.0
    """The same while others wait for room in the node's buffer."""
    request_timeout_s: float = 60.0
    """[fetch.request_timeout] A request without an answer by then is answered with an error."""
    slice_s: float = 0.0005
    """[fetch.slice] How long the event loop is kept at a time."""
    rest_s: float = 0.001
    """[fetch.rest] How long it is left alone then while AMQP clients of the node are active."""
    machine: str = ""
    """Clients that name it read from the node's files what lies there; empty = none do
    [fetch.local_reads]."""
    message_size_max: int = 16 << 20
    """[max_message_size] Body limit of produced messages, bytes."""
    authenticate_timeout_s: float = AUTHENTICATE_TIMEOUT_S
    requests_max: int = REQUESTS_MAX
    """Requests of one connection that are worked on; more are not read."""
    alarm_wait_s: float = 10.0
    """Longest wait of PRODUCE for an alarm to end, before it is refused."""
    wait_ms_max: int = 60_000
    """The longest that FETCH waits for rows, whatever a client asks for."""
    pull_bytes: int = 1 << 20
    """Rows are taken from a queue in portions of about this size."""
    step_bytes: int = 256 << 10
    """Rows are copied, and output is written, in steps of about this size."""
    command_bytes: int = 512 << 10
    """Produced rows go to a queue in commands of about this size."""
    targets_max: int = 1024
    """Queues that a connection keeps a command stream to."""
    names_max: int = 10_000
    """Names or queries in one request."""
