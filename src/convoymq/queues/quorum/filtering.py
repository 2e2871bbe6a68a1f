"""Messages of a quorum queue for consumers with a filter (ADR 0216).

The machine has no bodies, so it cannot evaluate a filter. The node of the consumer has a replica
examine the ready messages, and names those that match in a command PICK: what of them is ready
still goes to the consumer, as far as it has credit. What no consumer wants stays where it is.

A scan goes on behind the places that it has examined: fresh messages and priority levels lie in the
order of the log. What came back lies elsewhere, and is examined anew when the machine says that
something did (`stirred_at`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from convoymq.kernels import batch
from convoymq.kernels.entries import Entry
from convoymq.model.errors import PeerError
from convoymq.queues.quorum import selection
from convoymq.queues.quorum.backlog import EXPIRED, Backlog
from convoymq.queues.quorum.consumers import UP, Consumer, QueueSession
from convoymq.queues.quorum.levels import LEVEL_DEFAULT, due_of
from convoymq.queues.quorum.operations import RANGES_MAX, checked_ranges
from convoymq.queues.quorum.runs import Fifo, Run
from convoymq.queues.reservations import MALFORMED, Refusal

if TYPE_CHECKING:
    from convoymq.queues.quorum.machine import QuorumMachine

PICK = "pick"
"""Op that names the messages which a consumer gets."""
ROOM_MAX = 4096
"""Messages of one PICK."""
EXAMINED_MAX = 16_384
"""Messages that were not handed out before, of one scan."""
RUNS_MAX = 4096
YIELD_MESSAGES = 64

Place = tuple[int, int, int]
"""(entry index, command offset, record)"""


# --- the machine's part ------------------------------------------------------------------------


def pick(
    machine: QuorumMachine, session: QueueSession, op: Mapping[str, object]
) -> tuple[str | None, object]:
    """PICK: hands out chosen messages. Returns (None, {next: the consumer's next message id}), or
    (reason, None) when it is refused and nothing has changed."""
    number = op.get("consumer")
    consumer = session.consumers.get(number) if type(number) is int else None
    if consumer is None or not consumer.filtered:
        return MALFORMED, None
    try:
        wanted = _within(consumer, machine, checked_ranges(op.get("ranges")))
        found = selection.remove(machine.backlog, wanted)
    except (Refusal, selection.Overlapping):
        return MALFORMED, None
    if machine.backlog.notes.avoided.messages:
        found += _avoided(machine.backlog, consumer, wanted)
    for run in found:
        if 0 < due_of(run[7]) <= machine.time_ms and not machine.backlog.keeps_all:
            machine.dead_letters.leave(run, EXPIRED)
            continue
        machine.backlog.delivered += run[3]
        if run[5]:
            machine.backlog.redelivered += run[3]
        machine.deliveries._give(consumer, run, True)
    return None, {"next": consumer.next_id}


def _within(
    consumer: Consumer, machine: QuorumMachine, ranges: list[selection.Range]
) -> list[selection.Range]:
    """Returns as much of the ranges as the consumer may get."""
    room = consumer.room()
    if consumer.state != UP or consumer.session.node in machine.down_nodes:
        room = 0
    made: list[selection.Range] = []
    for index, offset, first, last in ranges:
        if room <= 0:
            break
        end = min(last, first + room - 1)
        made.append((index, offset, first, end))
        room -= end - first + 1
    return made


def _avoided(backlog: Backlog, consumer: Consumer, wanted: list[selection.Range]) -> list[Run]:
    """Takes wanted messages out of those that other consumers do not get."""
    avoided, key = backlog.notes.avoided, (consumer.session.id, consumer.number)
    found: list[Run] = []
    for came, run in list(avoided.rows()):
        if key in backlog.notes.of(run)[1]:
            continue
        for record in range(run[2], run[2] + run[3]):
            if any(
                (index, offset) == run[:2] and first <= record <= last
                for index, offset, first, last in wanted
            ):
                taken = avoided.remove(came, run[0], run[1], record)
                assert taken is not None, "a message is not where it is avoided"
                found.append(taken)
    return found


# --- looking for messages ----------------------------------------------------------------------


class Cursor(NamedTuple):
    """Place where a scan goes on."""

    seen: int = 0
    """Entry up to which what came back was examined."""
    places: dict[int, Place] = {}  # noqa: RUF012
    """Level -> place behind what was examined there."""


class Found(NamedTuple):
    """Result of a scan."""

    ranges: list[int]
    """Entry, command, first and last record of each, in the order of delivery."""
    messages: int
    """Number of these messages."""
    cursor: Cursor
    is_complete: bool
    """All that was ready was examined."""


def found_of(packed: object) -> Found:
    """Returns what another node has found. Raises PeerError."""
    try:
        return msgspec.convert(packed, Found, strict=False)
    except msgspec.ValidationError as error:
        raise PeerError(f"malformed answer about messages: {error}") from error


def cursor_of(packed: object) -> Cursor:
    """Returns the cursor of another node's request. Raises PeerError."""
    try:
        return msgspec.convert(packed, Cursor, strict=False)
    except msgspec.ValidationError as error:
        raise PeerError(f"malformed request for messages: {error}") from error


class _Scan:
    """Examines messages, and keeps the places of those that are wanted."""

    def __init__(
        self, read: Callable[[int], Entry | None], wants: Callable[[bytes], bool], room: int
    ) -> None:
        self._read, self._wants = read, wants
        self._room = min(room, ROOM_MAX)
        self._entry: Entry | None = None
        self.ranges: list[int] = []
        self.count = 0
        self.examined = 0

    @property
    def is_full(self) -> bool:
        """Returns whether nothing more is kept."""
        return self.count >= self._room or len(self.ranges) >= 4 * RANGES_MAX

    def look_at(self, index: int, offset: int, record: int) -> None:
        """Examines one message."""
        self.examined += 1
        if self._entry is None or self._entry.index != index:
            self._entry = self._read(index)
        # Without its entry, it has left meanwhile.
        if self._entry is None or not self._wants(batch.record(self._entry.data, offset, record)):
            return
        ranges = self.ranges
        self.count += 1
        if ranges and (*ranges[-4:-2], ranges[-1] + 1) == (index, offset, record):
            ranges[-1] = record
        else:
            ranges += (index, offset, record, record)


async def find(
    machine: QuorumMachine,
    read: Callable[[int], Entry | None],
    wants: Callable[[bytes], bool],
    cursor: Cursor,
    room: int,
) -> Found:
    """Looks for at most `room` messages that are wanted, behind a cursor. What leaves meanwhile may
    be found nevertheless.

    Args:
        read: returns an entry of the log.
    """
    scan = _Scan(read, wants, room)
    index, is_stirred = machine.index, machine.stirred_at > cursor.seen
    seen, places = (cursor.seen if is_stirred else index), dict(cursor.places)
    fresh = 0
    for level, runs in _sources(machine.backlog, cursor, is_stirred):
        for run in runs:
            for record in range(run[2], run[2] + run[3]):
                if scan.is_full or (level >= 0 and fresh >= EXAMINED_MAX):
                    return Found(scan.ranges, scan.count, Cursor(seen, places), False)
                scan.look_at(run[0], run[1], record)
                if level >= 0:
                    fresh += 1
                    places[level] = (run[0], run[1], record + 1)
                if not scan.examined % YIELD_MESSAGES:
                    await asyncio.sleep(0)
        if level >= 0 and len(runs) >= RUNS_MAX:
            return Found(scan.ranges, scan.count, Cursor(seen, places), False)
    return Found(scan.ranges, scan.count, Cursor(index, places), True)


CAME_BACK = -1
"""Level of sources that are examined as a whole."""


def _sources(backlog: Backlog, cursor: Cursor, is_stirred: bool) -> Iterator[tuple[int, list[Run]]]:
    """Returns (level, runs) of what is to be examined, in the order of delivery; priorities and
    what came back to its place count one by one."""
    levels = {**backlog.levels.by_level(), LEVEL_DEFAULT: backlog.fresh}
    made = [(level, _behind(levels[level], cursor.places.get(level))) for level in levels]
    made.sort(key=lambda each: -each[0])
    if is_stirred:
        back = [*backlog.returned.runs(), *backlog.levels.restored.all_runs()]
        made.insert(0, (CAME_BACK, back))
        made.append((CAME_BACK, [*backlog.requeued.runs(), *backlog.notes.avoided.runs()]))
    return iter(made)


def _behind(fifo: Fifo, place: Place | None) -> list[Run]:
    """Returns the next runs behind a place."""
    at = place or (0, 0, 0)
    made: list[Run] = []
    for run in fifo.runs_from(*at, fifo.messages, RUNS_MAX):
        skip = at[2] - run[2] if run[:2] == at[:2] else 0
        if skip < run[3]:
            made.append(run if skip <= 0 else (*run[:2], at[2], run[3] - skip, *run[4:]))
    return made
