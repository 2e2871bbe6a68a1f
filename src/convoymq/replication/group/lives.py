"""Lives of a group's master: which run of it wrote what part of the log.

Two logs that differ from an offset on were continued there by two lives. The later one wins where
it is *proven*: when it began it had compared its log with so many slaves that nothing that was
acknowledged is missing in it. Otherwise both sides may have acknowledged messages, and nobody
decides but an operator.

A member persists the list before it has the first message of a life. A log that RocketMQ's broker
wrote has none: that part is of life 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from convoymq.model.errors import PeerError
from convoymq.replication.group.types import Life

LIVES_MAX = 1_000
"""The oldest ones are forgotten: nobody is that far behind."""
UNKNOWN = Life(number=0, begin=0, is_proven=False)

_Row = tuple[int, int, bool]


def life_at(lives: Iterable[Life], offset: int) -> Life:
    """Returns the life that wrote the message at an offset."""
    found = UNKNOWN
    for life in lives:
        if life.begin <= offset:
            found = life
    return found


def is_cut_by(lives: Iterable[Life], life: Life) -> bool:
    """Returns whether what a life wrote, and a log with these lives lacks, was acknowledged to
    nobody: the first later life began without it, and is proven."""
    later = next((each for each in lives if each.number > life.number), None)
    return later is not None and later.is_proven


def next_life(lives: tuple[Life, ...], now_ms: int, begin: int, is_proven: bool) -> Life:
    """Returns a new life. The wall clock keeps two that do not know each other apart."""
    last = lives[-1].number if lives else 0
    return Life(number=max(last + 1, now_ms), begin=begin, is_proven=is_proven)


def with_life(lives: tuple[Life, ...], life: Life) -> tuple[Life, ...]:
    """Returns the list with a new life, without those that wrote nothing."""
    kept = [each for each in lives if each.begin < life.begin]
    return (*kept[1 - LIVES_MAX :], life)


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """Facts that a member persists beside its log."""

    lives: tuple[Life, ...] = ()
    is_whole: bool = False
    """The log had all that was acknowledged when the last life began, and lost nothing since; only
    a master's can be."""
    master: str = ""
    """Address of the master that a slave follows."""

    def encode(self) -> bytes:
        """Returns the book as its file has it."""
        page = {"lives": _rows(self.lives), "isWhole": self.is_whole, "master": self.master}
        return msgspec.json.encode(page)

    @classmethod
    def decode(cls, data: bytes) -> Book:
        """Returns a book. Raises PeerError."""
        try:
            found = msgspec.json.decode(data, type=_Page)
        except msgspec.MsgspecError as error:
            raise PeerError(f"list of lives: {error}") from None
        return cls(lives=_lives(found.lives), is_whole=found.is_whole, master=found.master)


class _Page(msgspec.Struct, rename="camel"):
    lives: list[_Row]
    is_whole: bool
    master: str = ""


def encode_lives(lives: Iterable[Life]) -> bytes:
    """Returns a list as it is sent."""
    return msgspec.json.encode(_rows(lives))


def decode_lives(data: bytes | str) -> tuple[Life, ...]:
    """Returns a list. Raises PeerError."""
    try:
        return _lives(msgspec.json.decode(data, type=list[_Row]))
    except msgspec.MsgspecError as error:
        raise PeerError(f"list of lives: {error}") from None


def _rows(lives: Iterable[Life]) -> list[_Row]:
    return [(each.number, each.begin, each.is_proven) for each in lives]


def _lives(rows: list[_Row]) -> tuple[Life, ...]:
    lives = tuple(Life(number=n, begin=b, is_proven=p) for n, b, p in rows[-LIVES_MAX:])
    for one, other in pairwise(lives):
        if other.number <= one.number or other.begin < one.begin:
            raise PeerError("list of lives: not in order")
    return lives
