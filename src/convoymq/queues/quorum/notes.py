# cython: annotation_typing=False
"""Notes on messages of a quorum queue: what their consumers have said when they gave them back.

A note has annotations, which deliveries and the dead letter carry, and the consumers that do not
get the message again. It is kept by the message's place in the log for as long as the message is in
the queue; of a dead letter that is kept, until that is published.

Messages that some consumers do not get are `avoided`: neither ready nor held, in the order in which
they came back. Each goes to the next consumer that may have it and has credit. When none is
subscribed that may, it leaves as rejected; when all that must not are gone, it is ready again. At
most AVOIDED_MAX are avoided at a time; more leave as rejected. They do not expire meanwhile, but
none is handed out after its time (ADR 0201).

Invariants: a note says something; what is avoided has consumers that do not get it.
"""

from __future__ import annotations

from collections.abc import Iterator

from convoymq.queues.quorum.runs import Run
from convoymq.queues.quorum.waiting import Waiting

NOTES_MAX = 65_536
"""Messages with notes. More come back without."""
AVOIDED_MAX = 256

Place = tuple[int, int, int]
"""(entry index, command offset, record)"""
Key = tuple[int, int]
"""(session, number) of a consumer."""
Note = tuple[bytes, tuple[Key, ...]]
"""(annotations, consumers that do not get the message)"""

PackedNote = tuple[int, int, int, bytes, list[list[int]]]
"""(entry index, command offset, record, annotations, consumers)"""

NOTHING: Note = (b"", ())


def cut(run: Run, start: int, count: int) -> Run:
    """Returns `count` messages of a run, from the one at `start` on; its bytes in proportion."""
    index, offset, first, whole, size, acquired, failed, mark = run
    assert 0 <= start < start + count <= whole, "a part lies outside its run"
    low, high = size * start // whole, size * (start + count) // whole
    return (index, offset, first + start, count, high - low, acquired, failed, mark)


class Notes:
    """Notes of a queue's messages, and those that are avoided."""

    __slots__ = ("avoided", "by_place", "came", "checked")

    def __init__(self) -> None:
        self.by_place: dict[Place, Note] = {}
        #: By the number under which each came back.
        self.avoided = Waiting()
        self.came = 1
        #: (consumers that came or went, `came`) when it was last seen who may get them.
        self.checked = (-1, -1)

    def of(self, run: Run) -> Note:
        """Returns the note of a run's first message."""
        return self.by_place.get((run[0], run[1], run[2]), NOTHING)

    def parts(self, run: Run) -> Iterator[tuple[Run, Note]]:
        """Yields a run in parts of messages with equal notes."""
        index, offset, first, count = run[:4]
        known = self.by_place
        start = 0
        while start < count:
            note = known.get((index, offset, first + start), NOTHING)
            end = start + 1
            while end < count and known.get((index, offset, first + end), NOTHING) == note:
                end += 1
            yield (run if end - start == count else cut(run, start, end - start)), note
            start = end

    def add(self, run: Run, annotations: bytes, avoids: Key | None) -> None:
        """Notes what a consumer has said of messages: `annotations` replace those of before, unless
        they are empty."""
        index, offset, first, count = run[:4]
        for record in range(first, first + count):
            place = (index, offset, record)
            said, avoiding = self.by_place.get(place, NOTHING)
            if avoids is not None and avoids not in avoiding:
                avoiding = (*avoiding, avoids)
            note = (annotations or said, avoiding)
            if note != NOTHING and (place in self.by_place or len(self.by_place) < NOTES_MAX):
                self.by_place[place] = note

    def let_in(self, run: Run, avoiding: tuple[Key, ...]) -> None:
        """Sets the consumers that do not get messages."""
        index, offset, first, count = run[:4]
        for record in range(first, first + count):
            place = (index, offset, record)
            said, _ = self.by_place.get(place, NOTHING)
            if said or avoiding:
                self.by_place[place] = (said, avoiding)
            else:
                self.by_place.pop(place, None)

    def forget(self, run: Run) -> None:
        """Messages are gone."""
        index, offset, first, count = run[:4]
        known = self.by_place
        if count > len(known):
            for place in [p for p in known if p[:2] == (index, offset)]:
                if first <= place[2] < first + count:
                    del known[place]
            return
        for record in range(first, first + count):
            known.pop((index, offset, record), None)

    def avoid(self, run: Run) -> None:
        """Has a run wait for a consumer that may get it."""
        self.avoided.add(self.came, run)
        self.came += 1

    # ---------------------------------------------------------------- snapshots

    def pack(self) -> list[object]:
        """Returns plain values, equal for equal content."""
        notes = [
            [*place, said, [list(key) for key in avoiding]]
            for place, (said, avoiding) in sorted(self.by_place.items())
        ]
        return [notes, self.avoided.pack(), self.came]

    def unpack(self, packed: tuple[list[PackedNote], bytes, int]) -> None:
        """Replaces the content by that of `pack`. Raises ValueError."""
        notes, avoided, self.came = packed
        self.by_place = {
            (index, offset, record): (said, tuple((key[0], key[1]) for key in avoiding))
            for index, offset, record, said, avoiding in notes
        }
        self.avoided.unpack(avoided)
        self.checked = (-1, -1)
