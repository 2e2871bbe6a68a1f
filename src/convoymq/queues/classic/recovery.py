"""Recovers a classic queue from the files of its log.

Nothing of a message comes into memory but of those that compaction moved: the rest becomes spans,
at most a few for each file and priority.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise

from convoymq.queues.classic.backing import Backing, Item, Recovered, Span, Stored, position_of
from convoymq.queues.classic.file_index import Copy, FileIndex, LineIndex
from convoymq.queues.classic.log import ClassicLog
from convoymq.queues.classic.machine import ClassicMachine
from convoymq.queues.classic.notes import Note, unpack_note
from convoymq.queues.classic.positions import PositionSet
from convoymq.queues.classic.runs import RECORD_HEADER, Run


def recover(
    log: ClassicLog, machine: ClassicMachine, now_ms: int, *, keeps_transient: bool = False
) -> tuple[int, array[int]]:
    """Fills a new machine; the time of its messages counts from when they came.

    Args:
        keeps_transient: transient messages stay.
    Returns:
        Number of messages whose header is damaged, or whose file is missing. Positions
        (first, last, …) that are gone because they are transient or damaged, which the log does
        not say.
    Raises:
        StorageFault, OSError.
    """
    backing = machine.backing
    indexes = list(log.recover(backing.level_max))
    gone, upto, handed_out, unreadable = _merge(indexes, keeps_transient=keeps_transient)
    for index in log.without_file:
        lost = _living(index, gone, [copy for other in indexes for copy in other.copies])
        if lost:
            log.note_missing(index.number)
            unreadable += lost
    backing.recovered = Recovered(upto, gone, handed_out, now_ms, _notes(indexes, gone, upto))
    machine.noted_count = len(backing.recovered.notes)
    if log.is_older and log.times.at(0) == (0, None):
        # Before 0.4.0 the time of a restart counted for all.
        log.set_time_to_live(0, machine.limits.message_ttl_ms)
        backing.may_expire = backing.may_expire or machine.limits.message_ttl_ms is not None
    machine.next_position = upto
    for level, position in handed_out.items():
        backing.lines[level].delivered_to = position
        if indexes[-1].handed_out.get(level, 0) < position:
            # Before 0.4.0 only older files may say it, which go before their messages do.
            log.add_handed_out(position, level)
    items: dict[int, list[Item]] = {}
    cuts: dict[int, list[int]] = {}
    absent = gone.copy()
    for run in _load_copies(log, backing, indexes):
        items.setdefault(run.block.level, []).append(run)
        cuts.setdefault(run.block.level, []).append(run.position)
        log.keep(run.block.place().file, run.count)
        absent.add(run.position, run.position + run.count - 1)
    for index in indexes:
        timed = any(ttl_ms is not None for _, ttl_ms in index.times.entries)
        backing.may_expire = backing.may_expire or index.expires or timed
        for level, line in index.lines.items():
            for span in _spans(index.number, line, absent, sorted(cuts.get(level, []))):
                items.setdefault(level, []).append(span)
                log.keep(index.number, span.count)
    for level, found in items.items():
        found.sort(key=position_of)
        size = sum(i.bytes if isinstance(i, Span) else i.body_bytes() for i in found)
        backing.extend(level, found, sum(item.count for item in found), size)
    log.collect()
    unsaid = array("Q")
    for index in indexes if not keeps_transient else ():
        unsaid += index.transient
    return unreadable, unsaid


def _merge(
    indexes: Iterable[FileIndex], *, keeps_transient: bool
) -> tuple[PositionSet, int, dict[int, int], int]:
    """Returns the positions that are gone, the position behind all, those that were handed out, and
    the messages that cannot be read."""
    gone = PositionSet()
    upto = 0
    unreadable = 0
    handed_out: dict[int, int] = {}
    for index in indexes:
        unreadable += index.unreadable
        # Positions are never used twice: an old record must not settle a new message.
        upto = max(upto, index.next_position, *index.handed_out.values())
        for pairs in (index.settled, *([] if keeps_transient else [index.transient])):
            for i in range(0, len(pairs), 2):
                gone.add(pairs[i], pairs[i + 1])
                upto = max(upto, pairs[i + 1] + 1)
        for level, position in index.handed_out.items():
            handed_out[level] = max(handed_out.get(level, 0), position)
    return gone, upto, handed_out, unreadable


def _notes(indexes: Iterable[FileIndex], gone: PositionSet, upto: int) -> dict[int, Note]:
    """Returns position -> note of the messages that are not gone; a malformed one is left out."""
    found: dict[int, Note] = {}
    for index in indexes:
        for first, last, body in index.notes:
            with suppress(ValueError):
                note = unpack_note(body)
                found.update(dict.fromkeys(range(first, min(last + 1, upto)), note))
    return {at: note for at, note in found.items() if not gone.count(at, at)}


def _living(index: FileIndex, gone: PositionSet, copies: list[Copy]) -> int:
    """Returns how many persistent messages of a file are not gone, and nowhere else."""
    dead = gone.copy()
    for pairs in (index.transient, index.settled):
        for i in range(0, len(pairs), 2):
            dead.add(pairs[i], pairs[i + 1])
    for copy in copies:
        dead.add(copy.position, copy.position + copy.count - 1)
    return sum(
        line.pairs[i + 1] - line.pairs[i] + 1 - dead.count(line.pairs[i], line.pairs[i + 1])
        for line in index.lines.values()
        for i in range(0, len(line.pairs), 2)
    )


def _load_copies(log: ClassicLog, backing: Backing, indexes: Iterable[FileIndex]) -> list[Run]:
    """Returns what lives of the blocks that compaction moved; the last copy counts."""
    copies: dict[int, tuple[int, Copy]] = {}
    for index in indexes:
        for copy in index.copies:
            copies[copy.position] = index.number, copy
    runs: list[Run] = []
    for number, copy in copies.values():
        known = backing.recovered
        assert known.gone is not None
        if known.gone.count(copy.position, copy.position + copy.count - 1) == copy.count:
            continue
        start = copy.offset - RECORD_HEADER
        found: list[Stored] = []
        while not found and start < copy.offset + copy.length:
            found, start = log.read_batch(number, start, copy.offset + copy.length)
        if not found:
            # It is damaged, which the log has noted.
            continue
        made = backing.recovered_runs(found[0], copy.count, copy.level)
        for run in made:
            run.block.data = None
        runs += made
    return runs


def _spans(number: int, line: LineIndex, absent: PositionSet, cuts: list[int]) -> list[Span]:
    """Returns the living messages of a line in a file, cut where copies stand between them. Those,
    and what is gone, are `absent`."""
    first, last = line.pairs[0], line.pairs[-1]
    edges = [first, *(cut for cut in cuts if first < cut <= last), last + 1]
    made: list[Span] = []
    for low, after in pairwise(edges):
        count = 0
        begin: int | None = None
        end = 0
        for i in range(0, len(line.pairs), 2):
            lower, upper = max(line.pairs[i], low), min(line.pairs[i + 1], after - 1)
            if lower > upper:
                continue
            alive = upper - lower + 1 - absent.count(lower, upper)
            if not alive:
                continue
            count += alive
            if begin is None:
                begin = absent.first_missing(lower, upper)
            found = absent.last_missing(lower, upper)
            assert found is not None
            end = found
        if begin is not None:
            size = line.bytes * count // line.count
            made.append(Span(number, line.start, line.end, begin, end, count, size))
    return made
