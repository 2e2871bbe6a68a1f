# cython: annotation_typing=False
"""Groups of messages of a quorum queue: of each at most one message is ready or held (ADR 0051).

    published, its group has none in the queue --> ready
    published, its group has some ---------------> blocked, behind all others of the group
    the one that is ready or held leaves --------> the next one is ready, where it was published

The message of a group that is ready or held is its head. A head that comes back is ready again, at
its place: so a group keeps its order over retries, whatever its priorities and wherever others go
that come back. It leaves by an acknowledgement, when it is dropped or dead-lettered, expires, or is
purged. Messages of no group are in none of this.

A group is known for as long as it has a message in the queue.

Invariants: a group has one head, which is ready or held; what is blocked of a group was published
behind its head, and is in the order of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from convoymq.kernels.message_attributes import attribute_runs, header_runs
from convoymq.queues.quorum.levels import Levels, due_of
from convoymq.queues.quorum.restored import Place
from convoymq.queues.quorum.runs import Fifo, Run

if TYPE_CHECKING:
    from convoymq.queues.quorum.backlog import Backlog

KEY_BYTES_MAX = 64
"""Of a group's name; for a longer one its digest stands."""
GROUP_BYTES = 400
"""Of a group that has a head, about."""


class _Group:
    """One group."""

    __slots__ = ("blocked", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.blocked: Fifo | None = None


class Groups:
    """The groups of a queue.

    Args:
        levels: where a message goes that is not blocked any more.
    """

    __slots__ = ("_blocking", "_by_key", "_levels", "heads", "messages", "size")

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self._by_key: dict[bytes, _Group] = {}
        #: The groups by the places of their heads; empty = no message is in a group.
        self.heads: dict[Place, _Group] = {}
        #: Groups that have blocked messages, in the order in which they began to.
        self._blocking: dict[bytes, _Group] = {}
        #: Blocked ones.
        self.messages = 0
        self.size = 0

    # ---------------------------------------------------------------- they come

    def enter(self, name: bytes, run: Run) -> int:
        """Takes a run that is published in a group; returns how many messages of it are ready: 0,
        or 1 = the first. The others are blocked."""
        key = name if len(name) <= KEY_BYTES_MAX else blake2b(name).digest()
        group = self._by_key.get(key)
        ready = 0
        if group is None:
            group = self._by_key[key] = _Group(key)
            self.heads[run[0], run[1] << 32 | run[2]] = group
            ready = 1
        count, size = run[3] - ready, run[4] - run[4] // run[3] * ready
        if count:
            if group.blocked is None:
                group.blocked = Fifo(False)
                self._blocking[key] = group
            group.blocked.push(run[0], run[1], run[2] + ready, count, size, 0, 0, run[7])
            self.messages += count
            self.size += size
        return ready

    def parts(self, run: Run) -> Iterator[tuple[Run, bool]]:
        """Yields a run in parts: (part, its messages are in groups)."""
        index, place, count = run[0], run[1] << 32 | run[2], run[3]
        heads = self.heads
        begin = 0
        grouped = (index, place) in heads
        for i in range(1, count + 1):
            if i == count or ((index, place + i) in heads) != grouped:
                low, high = run[4] * begin // count, run[4] * i // count
                yield (*run[:2], run[2] + begin, i - begin, high - low, *run[5:]), grouped
                begin, grouped = i, not grouped

    # ---------------------------------------------------------------- they go

    def leave(self, run: Run) -> bool:
        """Messages are in the queue no more, after they were ready or held: those behind them in
        their groups are ready. Whether one of these expires. Cost: O(messages)."""
        index, place = run[0], run[1] << 32 | run[2]
        heads = self.heads
        expires = False
        for at in range(place, place + run[3]):
            group = heads.pop((index, at), None)
            if group is not None and self._next(group):
                expires = True
        return expires

    def _next(self, group: _Group) -> bool:
        """Makes the next message of a group its head; whether it expires."""
        blocked = group.blocked
        if blocked is None:
            del self._by_key[group.key]
            return False
        run = blocked.take(1)
        self._drop_empty(group, blocked)
        self.messages -= 1
        self.size -= run[4]
        self.heads[run[0], run[1] << 32 | run[2]] = group
        self._levels.restore(run)
        return due_of(run[7]) > 0

    def _drop_empty(self, group: _Group, blocked: Fifo) -> None:
        if not blocked.messages:
            group.blocked = None
            del self._blocking[group.key]

    def take_blocked(self, limit: int) -> Run:
        """Takes at most `limit` blocked messages out, the oldest of the group that has had some for
        the longest time. There must be some."""
        group = next(iter(self._blocking.values()))
        assert group.blocked is not None, "a group without blocked messages has some"
        run = group.blocked.take(limit)
        self._drop_empty(group, group.blocked)
        self.messages -= run[3]
        self.size -= run[4]
        return run

    def blocked_amount(self) -> tuple[int, int]:
        """Returns (messages, body bytes) of the run of `take_blocked`."""
        group = next(iter(self._blocking.values()))
        assert group.blocked is not None, "a group without blocked messages has some"
        return group.blocked.head_amount()

    def purge(self, held: Iterable[Run]) -> int:
        """Drops what is blocked, and knows only those heads that are `held`; returns how many
        messages it dropped."""
        count = self.messages
        kept = {
            (index, (offset << 32 | first) + i)
            for index, offset, first, messages, *_ in held
            for i in range(messages)
        }
        self.heads = {place: group for place, group in self.heads.items() if place in kept}
        self._by_key = {group.key: group for group in self.heads.values()}
        self._blocking.clear()
        for group in self._by_key.values():
            group.blocked = None
        self.messages = self.size = 0
        return count

    # ---------------------------------------------------------------- looking at it

    def blocked_runs(self) -> list[Run]:
        """Returns what is blocked, group by group. Cost: O(runs)."""
        return [run for fifo in self._fifos() for run in fifo.runs()]

    def blocked_by_key(self) -> dict[bytes, list[Run]]:
        """Returns what is blocked of each group that has something."""
        found = zip(self._blocking, self._fifos(), strict=True)
        return {key: fifo.runs() for key, fifo in found}

    def _fifos(self) -> list[Fifo]:
        return [group.blocked for group in self._blocking.values() if group.blocked is not None]

    def indexes(self) -> set[int]:
        """Returns the entries of what is blocked."""
        found: set[int] = set()
        for fifo in self._fifos():
            found.update(fifo.indexes())
        return found

    def oldest_index(self) -> int | None:
        """Nearly the first entry of what is blocked: that of the group that has had some for the
        longest time; None = nothing is."""
        for fifo in self._fifos():
            return fifo.first_index()
        return None

    def keys(self) -> dict[Place, bytes]:
        """Of each group, where its head was published, and its key."""
        return {place: group.key for place, group in self.heads.items()}

    def run_count(self) -> int:
        """Runs that are blocked, and heads."""
        return len(self.heads) + sum(fifo.run_count() for fifo in self._fifos())

    def memory_bytes(self) -> int:
        """About as many bytes as the groups and what is blocked take."""
        blocked = sum(fifo.memory_bytes() for fifo in self._fifos())
        return len(self.heads) * GROUP_BYTES + blocked

    # ---------------------------------------------------------------- snapshots

    def pack(self) -> list[object]:
        """Plain values, equal for equal content: the heads by their places, and the blocked
        messages of groups in the order in which these began to have some."""
        heads = sorted(self.keys().items())
        blocked = [
            [key, group.blocked.pack()]
            for key, group in self._blocking.items()
            if group.blocked is not None
        ]
        return [[[*place, key] for place, key in heads], blocked]

    def unpack(self, heads: list[list[Any]], blocked: list[list[Any]]) -> None:
        """Replaces the content by that of `pack`. Raises ValueError."""
        assert not self._by_key, "groups are restored over others"
        for index, place, key in heads:
            self.heads[index, place] = self._by_key[key] = _Group(key)
        for key, packed in blocked:
            group = self._by_key.get(key)
            if group is None:
                raise ValueError("messages are blocked in a group without a head")
            group.blocked = Fifo(False)
            group.blocked.unpack(packed)
            self._blocking[key] = group
            self.messages += group.blocked.messages
            self.size += group.blocked.size


def enqueue(
    backlog: Backlog,
    mark_for: Callable[[int, int], int],
    data: bytes,
    index: int,
    offset: int,
    first: int,
    count: int,
) -> None:
    """Takes records of an ENQUEUE of which some are in groups. `mark_for`: the mark for a level and
    an expiration. Cost: O(records), those of the same properties and no group in one piece."""
    groups = backlog.groups
    named = header_runs(data, offset, first, count)
    found = attribute_runs(data, offset, first, count)
    at = -5
    end = first
    # What is ready already, of records that follow each other and have one mark.
    began = ready = size = mark = 0
    for record, messages, _, _, name in named:
        while messages:
            if record >= end:
                at += 5
                low = found[at]
                length = found[at + 1]
                total = found[at + 2]
                end = low + length
                if ready:
                    backlog.enqueue(index, offset, began, ready, size, mark)
                    ready = size = 0
                mark = mark_for(found[at + 3], found[at + 4])
            piece = min(messages, end - record)
            part = total * (record + piece - low) // length - total * (record - low) // length
            if name is None:
                taken, own = piece, part
            else:
                taken = groups.enter(name, (index, offset, record, piece, part, 0, 0, mark))
                own = part // piece * taken
                backlog.beside += piece - taken
            if taken:
                if ready and began + ready != record:
                    backlog.enqueue(index, offset, began, ready, size, mark)
                    ready = size = 0
                if not ready:
                    began = record
                ready += taken
                size += own
            record += piece
            messages -= piece
    if ready:
        backlog.enqueue(index, offset, began, ready, size, mark)
