"""The batch kernel against a naive reference, and against malformed input."""

from __future__ import annotations

import contextlib
import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels import batch, link_frames
from convoymq.kernels.entries import ENTRY_MEMBERSHIP, Entry, make_entry, split_entries
from tests.unit.kernels import reference

U64 = st.integers(0, 2**64 - 1)
RECORDS = st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=30)


def test_entry_is_header_and_commands_as_the_format_says() -> None:
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 7 << 56, None)
    target.publish([b"\x00", b"\x01q", b"header", b"body"], 4, 1)
    target.publish([b"\x00", b"\x01q", b"header", b"body!"], 5, 2)
    entry = builder.take_entry(3, 11, 2, 1234)
    expected = reference.enqueue(
        7 << 56, 1, [b"\x00\x01qheaderbody", b"\x00\x01qheaderbody!"], [4, 5], 0
    )
    assert reference.entry_body(entry.data) == expected
    assert struct.unpack("<IIQQQIBBHQ", entry.data[:48]) == (
        48 + len(expected), crc32c(entry.data[8:]), 11, 2, 1234, 3, 1, 1, 1, 0,
    )  # fmt: skip
    assert (entry.index, entry.term, entry.time_ms, entry.group, entry.kind) == (11, 2, 1234, 3, 1)


@given(
    script=st.lists(
        st.tuples(st.integers(0, 2), RECORDS, st.sampled_from([0, 2, 4])), min_size=1, max_size=8
    )
)
def test_interleaved_sessions_equal_the_reference(
    script: list[tuple[int, list[bytes], int]],
) -> None:
    builder = batch.CommandBuilder()
    targets = [batch.PublishTarget(builder, (k + 1) << 56, None) for k in range(3)]
    expected: list[tuple[int, list[bytes], int]] = []
    tag = 0
    for who, records, flags in script:
        for record in records:
            tag += 1
            targets[who].publish([record], len(record), tag, flags)
        if expected and expected[-1][0] == who:
            expected[-1] = (who, expected[-1][1] + records, expected[-1][2] | flags)
        else:
            expected.append((who, records, flags))
    entry = builder.take_entry(1, 1, 1, 0)
    seqs = [0, 0, 0]
    body = b""
    for who, records, flags in expected:
        seqs[who] += 1
        body += reference.enqueue(
            (who + 1) << 56, seqs[who], records, [len(r) for r in records], flags
        )
    assert reference.entry_body(entry.data) == body
    listed = batch.commands(entry.data)
    assert [c[2] >> 56 for c in listed] == [who + 1 for who, _, _ in expected]
    for found, (_, records, _) in zip(listed, expected, strict=True):
        offset = found[6]
        assert batch.enqueue_bytes(entry.data, offset) == sum(map(len, records))
        assert [batch.record(entry.data, offset, i) for i in range(len(records))] == records
        block = batch.slice_records(entry.data, offset, 0, len(records))
        assert [batch.record(block, 0, i) for i in range(len(records))] == records
    pending = [p for t in targets for p in t.pending]
    assert sorted(t for p in pending for t in p.tags) == sorted(t for p in pending for t in p.tags)
    covered = sorted(
        tag
        for p in pending
        for first, last in zip(p.tags[::2], p.tags[1::2], strict=True)
        for tag in range(first, last + 1)
    )
    assert covered == list(range(1, tag + 1))


@given(records=RECORDS, data=st.data())
def test_slices_hold_just_their_records(records: list[bytes], data: st.DataObject) -> None:
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1 << 56, None)
    for record in records:
        target.publish([record], 1, 0)
    entry = builder.take_entry(1, 1, 1, 0)
    first = data.draw(st.integers(0, len(records) - 1))
    count = data.draw(st.integers(1, len(records) - first))
    block = batch.slice_records(entry.data, 48, first, count)
    assert [batch.record(block, 0, i) for i in range(count)] == records[first : first + count]
    with pytest.raises(ValueError):
        batch.record(block, 0, count)


@given(values=st.lists(st.tuples(U64, U64), max_size=20))
def test_ranges_round_trip(values: list[tuple[int, int]]) -> None:
    builder = batch.CommandBuilder()
    flat = [v for pair in values for v in pair]
    builder.add(batch.CMD_SETTLE, 0, 1, 1, len(values), 5, batch.pack_ranges(flat))
    data = builder.take_entry(1, 1, 1, 0).data
    (found,) = batch.commands(data)
    assert batch.ranges(data, found[6], found[4]) == flat
    with pytest.raises(ValueError):
        batch.ranges(data, found[6], len(values) + 1)


def test_pending_commands_are_resent_in_order_and_only_those_asked_for() -> None:
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1 << 56, "me")
    target.publish([b"a"], 1, 1)
    assert target.command(batch.CMD_PURGE, 0, 0, 0, note="purge") == 2
    target.publish([b"b"], 1, 2)
    first = builder.take_entry(1, 1, 1, 0)
    assert [p.seq for p in target.pending] == [1, 2, 3]
    assert target.pending_bytes == len(first.data) - 48
    done = target.applied(1)
    assert [(p.seq, p.tags) for p in done] == [(1, [1, 1])]
    target.resend(1)
    again = builder.take_entry(1, 2, 2, 0)
    assert again.data[48:] == first.data[48 + done[0].length :]
    assert [p.seq for p in target.applied(9)] == [2, 3]
    assert target.pending_bytes == 0


def test_forward_frame_is_adopted_by_the_leader_unchanged() -> None:
    builder, leader = batch.CommandBuilder(), batch.CommandBuilder()
    target = batch.PublishTarget(builder, 2 << 56, None)
    target.publish([b"x" * 5000], 5000, 1)
    frame = builder.take_forward(9, 4)
    assert link_frames.frame_header(frame) == (
        len(frame),
        link_frames.FRAME_FORWARD,
        0,
        9,
        4,
        0,
        0,
        0,
    )
    leader.adopt(frame, 48, len(frame))
    assert leader.take_entry(9, 1, 4, 0).data[48:] == frame[48:]


def test_first_and_full_callbacks_come_once() -> None:
    calls: list[str] = []
    builder = batch.CommandBuilder(lambda: calls.append("first"))
    taken = []

    def full() -> None:
        calls.append("full")
        taken.append(builder.take_entry(1, len(taken) + 1, 1, 0))

    builder.on_full = full
    target = batch.PublishTarget(builder, 1 << 56, None)
    for tag in range(1, 7):
        target.publish([b"y" * (1 << 20)], 1 << 20, tag)
    assert calls == ["first", "full", "first"]
    taken.append(builder.take_entry(1, 2, 1, 0))
    assert sum(c[4] for e in taken for c in batch.commands(e.data)) == 6
    assert [p.tags for p in target.pending] == [[1, 4], [5, 6]]


def test_a_batch_of_settles_is_deferrable_and_what_follows_is_announced() -> None:
    calls: list[str] = []
    builder = batch.CommandBuilder(lambda: calls.append("first"))
    target = batch.PublishTarget(builder, 1 << 56, None)
    settle = (batch.CMD_SETTLE, 0, 1, 7, batch.pack_ranges((3, 3)))
    target.command(*settle)
    assert builder.deferrable
    target.command(*settle)
    assert builder.deferrable
    assert calls == ["first"]
    other = batch.CommandBuilder()
    builder.held = True
    data = builder.take_forward(1, 1)
    assert not builder.held
    other.adopt(data, 48, len(data))
    assert other.deferrable
    for follow in (
        lambda: target.command(*settle),
        lambda: target.publish([b"record"], 6, 1),
        lambda: builder.add(batch.CMD_TICK, 0, 0, 0, 0, 0),
        lambda: builder.adopt(data, 48, len(data)),
    ):
        builder.discard_unsent()
        target.command(*settle)
        builder.held = True
        calls.clear()
        follow()
        assert calls == ["first"]
        assert not builder.held


@pytest.mark.parametrize(
    "command",
    [
        # Settles nothing: who sends it wants the answer.
        (batch.CMD_SETTLE, 0, 0, 7, b""),
        (batch.CMD_RETURN, 0, 1, 7, batch.pack_ranges((3, 3))),
        (batch.CMD_DISCARD, 0, 1, 7, batch.pack_ranges((3, 3))),
        (batch.CMD_CANCEL, 0, 0, 7, b""),
    ],
)
def test_a_batch_with_any_other_command_is_not_deferrable(
    command: tuple[int, int, int, int, bytes],
) -> None:
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1 << 56, None)
    target.command(batch.CMD_SETTLE, 0, 1, 7, batch.pack_ranges((3, 3)))
    target.command(*command)
    assert not builder.deferrable
    data = builder.take_forward(1, 1)
    builder.adopt(data, 48, len(data))
    assert not builder.deferrable


@given(cut=st.integers(0, 200), position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_damaged_entries_are_refused(cut: int, position: int, value: int) -> None:
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1 << 56, None)
    for i in range(5):
        target.publish([bytes([i]) * 20], 20, i + 1)
    good = builder.take_entry(1, 1, 1, 0).data
    damaged = bytearray(good)
    position %= len(damaged)
    changed = damaged[position] != value
    damaged[position] = value
    if changed:
        with pytest.raises(ValueError):
            Entry(bytes(damaged))
    if cut:
        with pytest.raises(ValueError):
            Entry(good[:-cut] if cut < len(good) else b"")


@given(data=st.binary(max_size=300))
def test_no_input_makes_a_reader_leave_its_buffer(data: bytes) -> None:
    """Goal: parsed or ValueError, nothing else, on arbitrary bytes and on mutated commands."""
    for call in (
        lambda: batch.commands(data),
        lambda: batch.ranges(data, 48, 3),
        lambda: batch.record(data, 48, 0),
        lambda: batch.record(data, 0, 2),
        lambda: batch.slice_records(data, 0, 0, 2),
        lambda: batch.command_body(data, 8),
        lambda: batch.enqueue_bytes(data, 8),
        lambda: split_entries(data, 0),
        lambda: link_frames.frame_header(data),
        lambda: batch.CommandBuilder().adopt(data, 0, len(data)),
    ):
        with contextlib.suppress(ValueError):
            call()


@given(records=RECORDS, changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255))))
def test_mutated_commands_are_adopted_whole_or_refused(
    records: list[bytes], changes: list[tuple[int, int]]
) -> None:
    data = bytearray(reference.enqueue(1, 1, records, [1] * len(records), 0))
    for position, value in changes:
        data[position % len(data)] = value
    mutated = bytes(data)
    builder = batch.CommandBuilder()
    try:
        builder.adopt(mutated, 0, len(mutated))
    except ValueError:
        assert builder.used == 0
        return
    entry = builder.take_entry(1, 1, 1, 0)
    for type_, _, _, _, count, _, offset, _ in batch.commands(entry.data):
        if type_ == batch.CMD_ENQUEUE:
            for i in range(count):
                batch.record(entry.data, offset, i)


@pytest.mark.parametrize("size", range(17))
def test_make_entry_pads_a_body_of_any_size(size: int) -> None:
    body = bytes(range(1, size + 1))
    entry = make_entry(5, 6, 7, 8, ENTRY_MEMBERSHIP, body)
    assert len(entry.data) % 8 == 0
    assert entry.data[48:].rstrip(b"\0") == body
    assert Entry(entry.data).index == 6


def test_adopted_commands_do_not_make_one_entry_of_any_size() -> None:
    """Clients that send much again at once, as after an election, fill several entries."""
    builder = batch.CommandBuilder()
    entries = []
    builder.on_full = lambda: entries.append(builder.take_entry(1, len(entries) + 1, 1, 0))
    source = batch.CommandBuilder()
    batch.PublishTarget(source, 1, None).publish([bytes(1 << 20)], 1 << 20, 1)
    data = source.take_forward(1, 1)
    for _ in range(20):
        builder.adopt(data, link_frames.HEADER_SIZE, len(data))
    assert len(entries) == 4
    assert max(entry.size for entry in entries) < 6 << 20


def test_one_large_message_takes_its_size_and_no_more_room() -> None:
    """Closing the command must not grow what was just reserved, nor the next batch begin large."""
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1, None)
    for size in (1 << 20, 1 << 20, 100):
        target.publish([bytes(size)], size, 1)
        assert size <= builder.used < size + 200
        assert size <= len(builder.take_forward(1, 1)) < size + 300


def test_pending_bytes_count_against_what_targets_share() -> None:
    builder = batch.CommandBuilder()
    budget = batch.PendingBudget(1000)
    asked = []

    class Owner:
        def check_flow(self) -> None:
            asked.append(budget.bytes)

    targets = [batch.PublishTarget(builder, session, Owner()) for session in (1, 2)]
    for target in targets:
        target.budget = budget
        target.publish([bytes(600)], 600, 1)
    builder.discard_unsent()
    assert len(asked) == 1
    assert budget.bytes == sum(target.pending_bytes for target in targets) > 1200
    targets[0].applied(1)
    assert budget.bytes == targets[1].pending_bytes
    targets.clear()
    del target
    assert budget.bytes == 0
