"""Messages that leave a group without a master, each once: keys, the table of keys, targets.

A message *escapes* when a special service of an acting slave hands it to a broker of another name.
Its key is the record that it comes from: `broker:topic:queue:queue offset`, carried as a field of
the request (which makes the target look) and as a property (which makes the target's log the
durable table: every record of it that has the property enters its key, on slaves too, and after a
restart). A repeat is answered as stored, and nothing is written.

The logs of the targets are the only truth. A replica asks all targets for their keys before it
starts special services, and passes over those that one of them has (`learning.py`).

The question names a *generation*, larger than all that the targets know of its broker's name. From
then on a target refuses attempts of earlier generations: one that a dead slave has sent may still
be under way.

An attempt whose outcome is unknown binds its key to the target (`Targets`): another target could
not know of it. It waits until that target answers, or the group of that target does.

A checkpoint of pop has the key of a *position*: `topic@group`, queue, last offset given out. It
stands for all offsets up to it, and is never a repeat (docs/adr/0223).

RocketMQ's brokers have no such request and look at no key: they may store a repeat.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from convoymq.rocketmq.store.types import java_hash

HOME_MIN = 1000
"""Numbers of revive queues from here on stand for brokers."""
POSITION_MARK = "@"
"""Between topic and group; no name has it."""
KEY_FIELD = "escapeKey"
KEY_PROPERTY = "ESCAPE_KEY"
GENERATION_FIELD = "escapeGeneration"
RANGES_MAX = 65_536
"""Of one source queue; the lowest is dropped for one more. Queues that are read in order have one,
others have gaps for as long as messages wait in them."""


SOURCES_MAX = 65_536
"""Of the keys and generations that a broker holds; those of the source that was heard of least
recently go for one more. Programs that write may give each write a name of its own."""


class Key(NamedTuple):
    """The record that a message comes from."""

    broker: str
    topic: str
    queue: int
    offset: int

    def __str__(self) -> str:
        return f"{self.broker}:{self.topic}:{self.queue}:{self.offset}"

    @property
    def is_position(self) -> bool:
        """Returns whether the key stands for all offsets up to its own: a table has the last."""
        return POSITION_MARK in self.topic


def position_key(broker: str, topic: str, group: str, queue: int, last: int) -> Key:
    """Returns the key of a checkpoint of pop. `last`: offset of its last message."""
    return Key(broker, f"{topic}{POSITION_MARK}{group}", queue, last)


def positions_of(
    table: Mapping[str, Sequence[Sequence[int]]],
) -> Iterator[tuple[str, str, int, int]]:
    """Yields topic, group, queue and the offset behind the last message given out, of the result of
    `KeyTable.of`."""
    for source, ranges in table.items():
        name, _, queue = source.rpartition(":")
        topic, mark, group = name.partition(POSITION_MARK)
        if mark and ranges:
            yield topic, group, int(queue), ranges[-1][1]


def key_of(text: str) -> Key | None:
    """Returns a key of its text, None for another text. Names of topics have no colon."""
    head, _, offset = text.rpartition(":")
    head, _, queue = head.rpartition(":")
    broker, _, topic = head.rpartition(":")
    if not (broker and topic and queue.isdecimal() and offset.isdecimal()):
        return None
    return Key(broker, topic, int(queue), int(offset))


Ranges: TypeAlias = "list[tuple[int, int]]"
"""Of offsets: first, and one past the last; ascending."""


class OffsetSet:
    """A set of offsets, as ranges that do not touch.

    Args:
        ranges_max: the lowest range is dropped for one more; 0: there is no limit.
    """

    __slots__ = ("_ranges_max", "firsts", "lasts")

    def __init__(self, ranges_max: int = 0) -> None:
        self.firsts: list[int] = []
        self.lasts: list[int] = []
        self._ranges_max = ranges_max

    def has(self, offset: int) -> bool:
        """Returns whether an offset is in the set."""
        at = bisect_right(self.firsts, offset) - 1
        return at >= 0 and offset < self.lasts[at]

    def has_behind(self, offset: int) -> bool:
        """Returns whether an offset, or a later one, is in the set."""
        return bool(self.lasts) and self.lasts[-1] > offset

    def add(self, first: int, last: int) -> None:
        """Adds a range: what it overlaps or touches becomes one with it."""
        begin = bisect_left(self.lasts, first)
        end = bisect_right(self.firsts, last)
        if begin < end:
            first = min(first, self.firsts[begin])
            last = max(last, self.lasts[end - 1])
        self.firsts[begin:end] = [first]
        self.lasts[begin:end] = [last]
        if 0 < self._ranges_max < len(self.firsts):
            del self.firsts[0], self.lasts[0]


class Generations:
    """The generation of each broker's name whose attempts a target takes."""

    def __init__(self, known: Mapping[str, int] | None = None) -> None:
        self.known = dict(known or {})

    def raise_to(self, broker: str, generation: int) -> int:
        """Refuses earlier generations from now on; returns the one that holds."""
        found = max(generation, self.known.pop(broker, 0))
        if found:
            self.known[broker] = found
        if len(self.known) > SOURCES_MAX:
            del self.known[next(iter(self.known))]
        return found

    def of(self, broker: str) -> int:
        """Returns the generation of a broker's name."""
        return self.known.get(broker, 0)

    def takes(self, broker: str, generation: int) -> bool:
        """Returns whether attempts of a generation are taken."""
        return generation >= self.of(broker)


class KeyTable:
    """Keys of messages that were stored here, or that left: by source queue, as ranges."""

    def __init__(self) -> None:
        self._offsets: dict[tuple[str, str, int], OffsetSet] = {}

    def has(self, key: Key) -> bool:
        """Returns whether a key is in the table."""
        found = self._offsets.get(key[:3])
        return found is not None and not key.is_position and found.has(key.offset)

    def add(self, key: Key) -> None:
        """Enters a key."""
        found = self._find(key[:3])
        if not key.is_position:
            found.add(key.offset, key.offset + 1)
        elif not found.has_behind(key.offset):
            found.firsts, found.lasts = [key.offset], [key.offset + 1]

    def _find(self, source: tuple[str, str, int]) -> OffsetSet:
        found = self._offsets.pop(source, None)
        if found is None:
            found = OffsetSet(RANGES_MAX)
            if len(self._offsets) >= SOURCES_MAX:
                del self._offsets[next(iter(self._offsets))]
        self._offsets[source] = found
        return found

    def of(self, broker: str) -> dict[str, Ranges]:
        """Returns the keys of a broker's records: `topic:queue` -> ranges."""
        return {
            f"{topic}:{queue}": list(zip(found.firsts, found.lasts, strict=True))
            for (name, topic, queue), found in self._offsets.items()
            if name == broker
        }

    def brokers(self) -> list[str]:
        """Returns the names of brokers that something comes from."""
        return sorted({name for name, _, _ in self._offsets})

    def merge(self, broker: str, table: Mapping[str, Iterable[Sequence[int]]]) -> None:
        """Enters the result of `of` at another broker. Raises ValueError."""
        for source, ranges in table.items():
            topic, _, queue = source.rpartition(":")
            offsets = self._find((broker, topic, int(queue)))
            for first, last in ranges:
                if not 0 <= first < last:
                    raise ValueError(f"a range of keys from {first} to {last}")
                offsets.add(first, last)

    def check_invariants(self) -> None:
        """Raises AssertionError when ranges touch each other."""
        for offsets in self._offsets.values():
            assert len(offsets.firsts) == len(offsets.lasts) <= RANGES_MAX
            edges = [x for pair in zip(offsets.firsts, offsets.lasts, strict=True) for x in pair]
            assert all(a < b for a, b in pairwise(edges))


class Outcome(Enum):
    """The end of an attempt to store a message at a target."""

    STORED = "stored"
    REFUSED = "refused"
    """The target did not store it, and will not."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Target:
    """A queue that a message can escape to."""

    broker: str
    queue: int


class Targets:
    """Chooses the brokers that messages escape to."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._bound: dict[Key, str] = {}
        """Attempts that may have been stored."""

    def choose(self, key: Key | None, writable: Mapping[str, int]) -> Target | None:
        """Returns where a message goes, None: it has to wait.

        Args:
            writable: brokers of the topic's route that have a master -> number of queues.
        """
        bound = None if key is None else self._bound.get(key)
        if bound is not None:
            names = [bound] if bound in writable else []
        else:
            names = sorted(n for n, queues in writable.items() if n != self._own and queues > 0)
        if not names:
            return None
        # Neighbouring messages of one source go to one target: its table has one range then.
        source = self._own if key is None else f"{key.broker}{key.topic}{key.queue}"
        spread = java_hash(source)
        name = names[spread % len(names)]
        turn = 0 if key is None else key.offset
        return Target(name, turn % writable[name])

    def is_bound(self, key: Key | None) -> bool:
        """Returns whether an attempt may have been stored somewhere."""
        return key in self._bound

    def attempt(self, key: Key | None, target: Target) -> None:
        """A message is sent to a target."""
        if key is not None and not key.is_position:
            self._bound[key] = target.broker

    def ended(self, key: Key | None, outcome: Outcome) -> None:
        """An attempt has ended."""
        if key is not None and outcome is not Outcome.UNKNOWN:
            self._bound.pop(key, None)


def home_number(broker: str) -> int:
    """Returns the number that stands for a broker where receipts have a revive queue."""
    return HOME_MIN + zlib.crc32(broker.encode()) % ((1 << 31) - HOME_MIN)
