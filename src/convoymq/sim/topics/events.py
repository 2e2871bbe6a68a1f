"""The trace of a topic: what happened, in one order. The referee reads nothing else.

The words and their fields are those that nodes and clients write: specification, section 16. `t` is
the time in ms; the order of events is that of the list.
"""

from __future__ import annotations

from typing import NamedTuple


class Send(NamedTuple):
    """A producer was given a message."""

    t: int
    key: bytes
    lp: int
    producer: int
    epoch: int
    seq: int
    msg: int


class Confirmed(NamedTuple):
    """A producer was told that a message is stored."""

    t: int
    msg: int


class Abandoned(NamedTuple):
    """A producer gave a logical partition up."""

    t: int
    producer: int
    lp: int
    code: str


class Stored(NamedTuple):
    """A message was appended."""

    t: int
    msg: int
    pid: int
    created_v: int
    offset: int


class Rejected(NamedTuple):
    """A message was refused."""

    t: int
    msg: int
    pid: int
    code: str


class Sealed(NamedTuple):
    """CLOSE was appended."""

    t: int
    pid: int
    close_offset: int


class Published(NamedTuple):
    """A route version; `external`: sources that were sealed from outside."""

    t: int
    v: int
    spans: tuple[tuple[int, int, int], ...]
    kind: str
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    external: tuple[int, ...]


class Opened(NamedTuple):
    """OPEN was appended."""

    t: int
    pid: int
    v: int


class Grant(NamedTuple):
    """A lease is in force at its partition."""

    t: int
    group: str
    pid: int
    member: str
    epoch: int


class Release(NamedTuple):
    """A lease ended; `expired`: the member did not say so."""

    t: int
    group: str
    pid: int
    member: str
    epoch: int
    expired: bool


class Deliver(NamedTuple):
    """A handler was started. `lease_pid`: the partition whose lease it runs under, which is another
    one for a parked message that was handed over."""

    t: int
    group: str
    gen: int
    pid: int
    offset: int
    created_v: int
    key: bytes
    msg: int
    member: str
    epoch: int
    lease_pid: int
    parked: bool


class Ack(NamedTuple):
    """An acknowledgement is in force."""

    t: int
    group: str
    gen: int
    pid: int
    offset: int
    member: str
    epoch: int


class Passed(NamedTuple):
    """A second copy of what a group has read counts as acknowledged."""

    t: int
    group: str
    gen: int
    pid: int
    offset: int


class Park(NamedTuple):
    """A message is in the park log, and acknowledged."""

    t: int
    group: str
    gen: int
    pid: int
    offset: int
    key: bytes
    msg: int
    epoch: int


class Unpark(NamedTuple):
    """A message left the park log; `skipped`: an operator gave it up. `created_v`: of the partition
    that it was parked in, which tells copies apart."""

    t: int
    group: str
    gen: int
    created_v: int
    key: bytes
    msg: int
    skipped: bool


class Advance(NamedTuple):
    """A group moved to the next version."""

    t: int
    group: str
    gen: int
    from_v: int
    to_v: int


class Effect(NamedTuple):
    """A handler's effect reached the sink, which ignores tokens that are not greater."""

    t: int
    group: str
    gen: int
    key: bytes
    msg: int
    created_v: int
    offset: int
    applied: bool


class Loss(NamedTuple):
    """A group goes on without messages from `first` to `end` (exclusive, -1: all)."""

    t: int
    group: str
    gen: int
    pid: int
    first: int
    end: int
    reason: str


class Weak(NamedTuple):
    """The topic is a weak one. `retries`: messages that fail go to a retry topic."""

    t: int
    retries: bool


class Retried(NamedTuple):
    """A copy of a message that a group could not process is stored in its retry topic."""

    t: int
    group: str
    gen: int
    pid: int
    offset: int
    msg: int


class Skipped(NamedTuple):
    """A group goes on without a partition for which nobody answers."""

    t: int
    group: str
    gen: int
    pid: int


class Recovered(NamedTuple):
    """A partition that was skipped has been read to its end."""

    t: int
    group: str
    gen: int
    pid: int


class Seek(NamedTuple):
    """A group begins at a version; also when it is created."""

    t: int
    group: str
    gen: int
    v: int
    mode: str


class Deleted(NamedTuple):
    """Retention deleted a partition."""

    t: int
    pid: int


class Fault(NamedTuple):
    """The simulator did something; no trace of a real system has it."""

    t: int
    kind: str
    what: str


Event = (
    Send
    | Confirmed
    | Abandoned
    | Stored
    | Rejected
    | Sealed
    | Published
    | Opened
    | Grant
    | Release
    | Deliver
    | Ack
    | Passed
    | Park
    | Unpark
    | Advance
    | Effect
    | Loss
    | Weak
    | Retried
    | Skipped
    | Recovered
    | Seek
    | Deleted
    | Fault
)


def line_of(event: Event) -> str:
    """An event as a line of a trace."""
    fields = zip(event._fields[1:], event[1:], strict=True)
    text = " ".join(f"{name}={value!r}" for name, value in fields)
    return f"{event.t / 1000:9.3f} {type(event).__name__.lower():<9} {text}"
