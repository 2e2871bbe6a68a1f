"""Words of the ring core: frames between neighbours, and effects that a shell carries out."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Part of a frame about one sender's broadcasts. Numbers of a sender begin at 1, without gaps.

    Once it is taken in, the receiver has the broadcasts up to `last`, of which `payloads` are the
    newest, and forgets those up to `complete`.
    """

    sender: int
    complete: int
    last: int
    payloads: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Frame from a member to its right neighbour: several publish and acknowledgement rounds in one
    hop. `catch_up` marks the first frame to a new neighbour, which names every sender."""

    version: int
    catch_up: bool
    progress: tuple[Progress, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Deliver:
    """A broadcast of another member, in that sender's order."""

    sender: int
    number: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Complete:
    """Every member of the view has this member's broadcasts up to `number`."""

    number: int


@dataclass(frozen=True, slots=True)
class AskCatchUp:
    """Tell the left neighbour that its state is needed (`RingCore.on_ask`)."""

    member: int
    version: int


@dataclass(frozen=True, slots=True)
class Erase:
    """Propose the view without this failed member: its broadcasts are complete. May repeat."""

    member: int


@dataclass(frozen=True, slots=True)
class Expelled:
    """The newest view does not have this member as a live one: its copy is void."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Propose the view in which this newcomer is a full member: it has its neighbour's state. May
    repeat."""


Effect = Deliver | Complete | AskCatchUp | Erase | Expelled | CaughtUp
