"""Comparing the tails of two logs, and deciding what the difference means.

A message has its offset and the time at which its master stored it in itself, so two logs that have
one message in common at an offset agree on all before it. `common_end` halves the distance until
it has the last message on which they agree. What each has beyond is its *surplus*:

| own surplus | other's surplus | a slave, to its master | a master that returns, to a slave |
|---|---|---|---|
| no | any | is sent the rest | fetches it |
| yes | no | waits until the master has fetched it; cuts it, if the master takes writes without it | nothing to do |
| yes | yes | the same | the later life wins: the slave cuts its surplus later, or the master cuts its own and fetches |

What is cut was acknowledged to nobody, because the life that goes on without it is proven
(`lives.py`). Where it is not, nothing is cut: the member stops and says so.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum

from convoymq.replication.group.lives import is_cut_by, life_at
from convoymq.replication.group.types import Ask, Life, Log, Tail

STEP_BYTES = 64 << 10
"""First distance from the end that is tried; it doubles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Result of a comparison: how far two logs agree."""

    end: int
    other: Tail
    """As it was at the begin of the comparison: it may grow meanwhile."""
    is_known: bool = True
    """The logs have a message in common, or begin at the same place, or one of them is empty."""


class Step(Enum):
    """Action of a member about the difference."""

    STREAM = "stream"
    """A slave: its log is the beginning of its master's."""
    WAIT = "wait"
    """A slave: the master may yet fetch what it lacks."""
    CUT = "cut"
    """End the own log at `Common.end`, and compare again."""
    FETCH = "fetch"
    """A master: copy what the slave has from `Common.end` on."""
    NOTHING = "nothing"
    """A master: the slave has nothing that it lacks, or will cut what it has."""
    FORKED = "both logs may have acknowledged messages at the same offsets"
    UNRELATED = "the logs have no message in common"


STOPS = (Step.FORKED, Step.UNRELATED)


def whole_end(log: Log) -> int:
    """Returns the end of a log's last whole message."""
    found = log.record_before(log.max_offset)
    return log.min_offset if found is None else found[1]


def common_end(log: Log) -> Generator[Ask, Tail, Common]:
    """Yields questions, is sent the answers, and returns how far the logs agree. The log ends with
    a whole message."""
    other = yield Ask(start=0, end=0)
    if log.max_offset == log.min_offset:
        return Common(end=other.min_offset, other=other)
    if other.max_offset == other.min_offset:
        return Common(end=log.min_offset, other=other)
    low = max(log.min_offset, other.min_offset)
    is_known = log.min_offset == other.min_offset
    # They agree up to `end`, no other message ends in (end, floor], and none that ends at `bad` or
    # later agrees. The first targets are near the end, where most differences are.
    end, floor, bad, step = low, low, min(log.max_offset, other.max_offset) + 1, 0
    while floor < bad - 1:
        target = max(bad - 1 - step, (floor + bad) // 2)
        step = 2 * step or STEP_BYTES
        found = log.record_before(target)
        if found is None or found[0] < low or found[1] <= floor:
            floor = target
            continue
        answer = yield Ask(start=found[0], end=found[1])
        if answer.checksum == log.crc32c(*found):
            end, floor, is_known = found[1], target, True
        else:
            bad = found[1]
    return Common(end=end, other=other, is_known=is_known)


def slave_step(log: Log, lives: tuple[Life, ...], common: Common) -> Step:
    """Returns what a slave does about its master's log."""
    if log.max_offset == log.min_offset:
        return Step.STREAM
    if not common.is_known:
        return Step.UNRELATED
    if common.end == log.max_offset:
        return Step.STREAM
    if not common.other.takes_writes:
        return Step.WAIT
    own = life_at(lives, common.end)
    return Step.CUT if is_cut_by(common.other.lives, own) else Step.FORKED


def master_step(log: Log, lives: tuple[Life, ...], common: Common) -> Step:
    """Returns what a master that does not take writes yet does about a slave's log."""
    slave = common.other
    if slave.max_offset == slave.min_offset:
        return Step.NOTHING
    if not common.is_known:
        return Step.UNRELATED
    if log.max_offset in (log.min_offset, common.end):
        return Step.FETCH if slave.max_offset > log.max_offset else Step.NOTHING
    if slave.max_offset == common.end:
        return Step.NOTHING
    own, its = life_at(lives, common.end), life_at(slave.lives, common.end)
    if own.number < its.number:
        return Step.CUT if is_cut_by(slave.lives, own) else Step.FORKED
    return Step.NOTHING if is_cut_by(lives, its) else Step.FORKED
