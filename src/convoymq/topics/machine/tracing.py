# cython: annotation_typing=False
"""Rows of a partition's trace (ADR 0071): what its machine tells of the commands that it applied.

What was refused, or changed nothing, is not told. Groups, members and keys appear as the hashes of
their names (`kernels.trace.name_hash`), messages by their offsets in the partition.
"""

from __future__ import annotations

from collections.abc import Callable

from convoymq.kernels.trace import TraceRows, name_hash
from convoymq.model import trace as words
from convoymq.topics.machine.partition import GroupCursor, Outcome, PartitionMachine
from convoymq.topics.rules.answers import HandOverAnswer, LossAnswer, RunsAnswer
from convoymq.topics.rules.commands import (
    AcceptLoss,
    Ack,
    AckRanges,
    Command,
    DoneParked,
    DropGroup,
    HandOver,
    Lease,
    Open,
    OpenCursor,
    Park,
    ReplaceParked,
    ResumeParked,
    Seal,
    SkipParked,
    Trim,
)
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.refusals import Code


def applied(rows: TraceRows, state: PartitionMachine, command: Command) -> Outcome:
    """Applies a command, and records what it changed."""
    before = _State(state, command)
    outcome = state.apply(command)
    record = _RECORDS.get(type(command))
    if isinstance(outcome, RunsAnswer) or record is None:
        return outcome
    if outcome.code in (Code.OK, Code.SEALED_BY):
        record(rows, state, command, outcome, before)
    return outcome


def note_passed(rows: TraceRows, group: str, group_epoch: int, first: int, count: int) -> None:
    """Records second copies that count as acknowledged (`PartitionMachine.on_passed`)."""
    _add(rows, words.PASSED, group, group_epoch=group_epoch, first=first, count=count)


class _State:
    """State before a command that changes something only once."""

    __slots__ = ("group_epoch", "handed_over", "state")

    def __init__(self, state: PartitionMachine, command: Command) -> None:
        self.state = state.state
        own = _cursor(state, command)
        self.group_epoch = 0 if own is None else own.group_epoch
        self.handed_over = own is not None and own.handed_over


def _cursor(state: PartitionMachine, command: Command) -> GroupCursor | None:
    if isinstance(command, OpenCursor | HandOver):
        return state.groups.get(command.group)
    return None


def group_hash(group: str) -> int:
    """Returns the number of a group or member in the trace."""
    return name_hash(group.encode())


def _unsigned(number: int) -> int:
    return number & 0xFFFF_FFFF_FFFF_FFFF


def _add(
    rows: TraceRows,
    kind: int,
    group: str = "",
    *,
    flags: int = 0,
    reason: int = 0,
    epoch: int = 0,
    group_epoch: int = 0,
    first: int = 0,
    count: int = 0,
    detail: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
) -> None:
    """A row about a group; `detail` are the five last columns."""
    session = _unsigned(group_hash(group)) if group else 0
    rows.add(kind, flags, reason, session, epoch, group_epoch, first, count, *detail)


def _open(
    rows: TraceRows, state: PartitionMachine, command: Open, outcome: Outcome, before: _State
) -> None:
    if before.state is PartitionState.CREATING:
        _add(rows, words.OPENED, group_epoch=command.version, detail=_range(state))


def _seal(
    rows: TraceRows, state: PartitionMachine, command: Seal, outcome: Outcome, before: _State
) -> None:
    if before.state is PartitionState.OPEN:
        _add(
            rows,
            words.SEALED,
            flags=words.EXTERNAL if command.external else 0,
            group_epoch=command.to_version,
            first=state.close_offset,
            detail=_range(state),
        )


def _range(state: PartitionMachine) -> tuple[int, int, int, int, int]:
    return state.pid, state.lo, state.hi, state.created_version, 0


def _open_cursor(
    rows: TraceRows, state: PartitionMachine, command: OpenCursor, outcome: Outcome, before: _State
) -> None:
    if command.group_epoch > before.group_epoch:
        watermark = state.groups[command.group].cursor.watermark
        handed = len(command.states)
        if handed:
            # What is passed over from the first message on is told by rows of its own.
            watermark = min(watermark, 1)
        _add(rows, words.CURSOR, command.group, group_epoch=command.group_epoch, first=watermark,
             count=handed)  # fmt: skip


def _lease(
    rows: TraceRows, state: PartitionMachine, command: Lease, outcome: Outcome, before: _State
) -> None:
    node, _, _ = command.member.partition("-")
    _add(
        rows,
        words.LEASED,
        command.group,
        epoch=command.epoch,
        group_epoch=command.group_epoch,
        first=group_hash(command.member),
        detail=(int(node) if node.isdecimal() else 0, 0, 0, 0, 0),
    )


def _ack(
    rows: TraceRows, state: PartitionMachine, command: Ack, outcome: Outcome, before: _State
) -> None:
    for offset in command.offsets:
        _settled(rows, state, command, offset, offset + 1)


def _ack_ranges(
    rows: TraceRows, state: PartitionMachine, command: AckRanges, outcome: Outcome, before: _State
) -> None:
    ranges = command.ranges
    for first, last in zip(ranges[::2], ranges[1::2], strict=False):
        _settled(rows, state, command, first, last + 1)


def _settled(
    rows: TraceRows, state: PartitionMachine, command: Ack | AckRanges, first: int, end: int
) -> None:
    """Messages only: OPEN and CLOSE need no acknowledgement."""
    first = max(first, 1)
    end = min(end, state.end_offset if state.close_offset < 0 else state.close_offset)
    if first < end:
        _add(rows, words.SETTLED, command.group, epoch=command.epoch,
             group_epoch=command.group_epoch, first=first, count=end - first)  # fmt: skip


def _park(
    rows: TraceRows, state: PartitionMachine, command: Park, outcome: Outcome, before: _State
) -> None:
    reason = words.PARK_BEHIND if command.follow else words.PARK
    place = (name_hash(command.key), state.pid, state.created_version, command.lp, 0)
    _add(rows, words.PARKED, command.group, reason=reason, epoch=command.epoch,
         group_epoch=command.group_epoch, first=command.offset, count=1,
         detail=place)  # fmt: skip


def _done_parked(
    rows: TraceRows, state: PartitionMachine, command: DoneParked, outcome: Outcome, before: _State
) -> None:
    reason = words.PARK_STOPPED if command.failed else words.PARK_DONE
    _head(rows, command, reason, command.epoch)


def _skip_parked(
    rows: TraceRows, state: PartitionMachine, command: SkipParked, outcome: Outcome, before: _State
) -> None:
    _head(rows, command, words.PARK_SKIPPED, 0)


def _replace_parked(
    rows: TraceRows,
    state: PartitionMachine,
    command: ReplaceParked,
    outcome: Outcome,
    before: _State,
) -> None:
    _head(rows, command, words.PARK_REPLACED, 0)


def _head(
    rows: TraceRows, command: DoneParked | SkipParked | ReplaceParked, reason: int, epoch: int
) -> None:
    """The head of a parked key: where it was stored is in its token."""
    place = (name_hash(command.key), -1, command.token.created_version, -1, 0)
    _add(rows, words.PARKED, command.group, reason=reason, epoch=epoch,
         first=command.token.offset, count=1, detail=place)  # fmt: skip


def _resume_parked(
    rows: TraceRows,
    state: PartitionMachine,
    command: ResumeParked,
    outcome: Outcome,
    before: _State,
) -> None:
    place = (name_hash(command.key), -1, -1, -1, 0)
    _add(rows, words.PARKED, command.group, reason=words.PARK_RESUMED, detail=place)


def _hand_over(
    rows: TraceRows, state: PartitionMachine, command: HandOver, outcome: Outcome, before: _State
) -> None:
    if isinstance(outcome, HandOverAnswer) and not before.handed_over:
        watermark = state.groups[command.group].cursor.watermark
        _add(rows, words.HANDED_OVER, command.group, group_epoch=command.group_epoch,
             first=watermark)  # fmt: skip


def _losses(
    rows: TraceRows,
    state: PartitionMachine,
    command: Trim | AcceptLoss,
    outcome: Outcome,
    before: _State,
) -> None:
    if isinstance(outcome, LossAnswer):
        for group, first, end in outcome.losses:
            own = state.groups[group]
            _add(rows, words.LOST, group, group_epoch=own.group_epoch, first=max(first, 1),
                 count=end - max(first, 1))  # fmt: skip


def _drop_group(
    rows: TraceRows, state: PartitionMachine, command: DropGroup, outcome: Outcome, before: _State
) -> None:
    _add(rows, words.UNGROUPED, command.group)


_RECORDS: dict[type, Callable[..., None]] = {
    Open: _open,
    Seal: _seal,
    OpenCursor: _open_cursor,
    Lease: _lease,
    Ack: _ack,
    AckRanges: _ack_ranges,
    Park: _park,
    DoneParked: _done_parked,
    SkipParked: _skip_parked,
    ReplaceParked: _replace_parked,
    ResumeParked: _resume_parked,
    HandOver: _hand_over,
    Trim: _losses,
    AcceptLoss: _losses,
    DropGroup: _drop_group,
}
