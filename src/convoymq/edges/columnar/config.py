"""Section of the configuration of the columnar protocol. Fields without a key are fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from convoymq.model.columnar import REQUESTS_MAX
from convoymq.model.config.keys import Section, key
from convoymq.model.config.values import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig(Section):
    """The columnar protocol on the AMQP port (`fetch.*`)."""

    NAME: ClassVar[str] = "fetch"

    enabled: bool = key(
        "fetch.enabled",
        True,
        """Whether connections that begin with the columnar protocol's preface are served. `false`:
        they are closed like those of an unknown protocol.""",
    )
    local_reads: bool = key(
        "fetch.local_reads",
        True,
        """Whether clients on this machine may be told in which files of this node a stream's
        messages lie, to read them there. Only who may open the files can; `false`: all rows go
        through the node.""",
    )
    frame_max: int = key(
        "fetch.frame_max", 64 << 20,
        """Largest request or answer. A message that does not fit cannot be fetched; a connection
        may cost twice as much memory.""",
        parse=parse_bytes, low=1 << 20, high=1 << 30,
    )  # fmt: skip
    answer_max: int = key(
        "fetch.answer_max", 4 << 20,
        """Rows are added to an answer up to this size, whatever a client asks for. Larger: fewer
        round trips, but longer pauses for the AMQP clients of this node while one is finished.""",
        parse=parse_bytes, low=64 << 10, high=1 << 30,
    )  # fmt: skip
    buffer_max: int = key(
        "fetch.buffer_max", 256 << 20,
        """Bytes of answers that are being built or not yet read by their clients, of all
        connections, and as many of large requests that are read or worked on; further ones wait for
        their turn.""",
        parse=parse_bytes, low=1 << 20, high=1 << 40,
    )  # fmt: skip
    connections_max: int = key(
        "fetch.connections_max", 1_000,
        "Connections of this protocol; more are refused with an error.",
        low=1, high=1_000_000,
    )  # fmt: skip
    write_timeout_ms: int = key(
        "fetch.write_timeout", 30_000,
        """A client that reads nothing of its answer for this long is dropped. Shorter: drivers in a
        long pause have to connect again.""",
        unit="ms", low=100, high=3_600_000,
    )  # fmt: skip
    request_timeout_ms: int = key(
        "fetch.request_timeout", 60_000,
        """A request that has no answer by then gets an error: a queue without a majority must not
        hold its clients for ever.""",
        unit="ms", low=1_000, high=3_600_000,
    )  # fmt: skip
    slice_us: int = key(
        "fetch.slice", 500,
        """How long work for this protocol may keep the event loop before AMQP has its turn; four
        times that while nobody else is active. Longer: more rows per second, higher latency of
        everything else.""",
        unit="µs", low=50, high=100_000,
    )  # fmt: skip
    rest_us: int = key(
        "fetch.rest", 1_000,
        """How long this protocol's work rests after each slice while AMQP clients are active, of
        this node or of others that it logs for. 0: one drain takes a whole core, and the system
        lets AMQP's bytes wait for it.""",
        unit="µs", low=0, high=100_000,
    )  # fmt: skip
    answer_bytes_beside: int = 1 << 20
    """As `answer_max` while others are active: putting an answer together can't be interrupted."""
    pressed_timeout_s: float = 2.0
    """As `write_timeout_ms` while others wait for room in the node's buffer."""
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

    @property
    def write_timeout_s(self) -> float:
        """`write_timeout_ms` in seconds."""
        return self.write_timeout_ms / 1000

    @property
    def request_timeout_s(self) -> float:
        """`request_timeout_ms` in seconds."""
        return self.request_timeout_ms / 1000

    def check(self) -> None:
        if self.answer_max > self.frame_max:
            raise ValueError("fetch.answer_max must not be larger than fetch.frame_max")


SECTION = FetchConfig
