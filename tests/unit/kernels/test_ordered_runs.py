"""Order keys of records, their hash, and the placing of records, against naive twins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.kernels.ordered_runs import (
    SLOT_NEW,
    SLOT_SEND,
    SLOT_WAIT,
    UNTAGGED,
    OrderedTarget,
    Slot,
    count_tags,
    find_misplaced,
    order_hash,
    order_key,
)
from convoymq.model.tables import Field, Table
from convoymq.topics.rules.hashing import logical_partition, murmur3
from tests.unit.kernels.records import record_of

LOGICAL = 64


class Owner:
    """Of a target: opens slots as it is told to, and counts the calls about flow."""

    def __init__(self) -> None:
        self.opened: list[Slot] = []
        self.opens: dict[Slot, batch.PublishTarget] = {}
        self.flow_checks = 0

    def open_slot(self, slot: Slot) -> None:
        self.opened.append(slot)
        sender = self.opens.get(slot)
        if sender is not None:
            slot.sender = sender
        slot.state = SLOT_WAIT if sender is None else SLOT_SEND

    def check_flow(self) -> None:
        self.flow_checks += 1


def sender() -> batch.PublishTarget:
    return batch.PublishTarget(batch.CommandBuilder(), 1 << 56, None)


def taken(target: batch.PublishTarget) -> list[tuple[bytes, int]]:
    """Records and tags of all commands of a target, which are sealed."""
    target.builder.discard_unsent()
    found = []
    for command in target.applied(target.seq):
        data = command.chunk.data
        assert data is not None
        tags = [
            tag
            for first, last in zip(
                (command.tags or [])[::2], (command.tags or [])[1::2], strict=True
            )
            for tag in range(first, last + 1)
        ]
        assert len(tags) == command.messages
        for i, tag in enumerate(tags):
            found.append((batch.record(data, command.offset, i), tag))
    return found


@given(st.binary(max_size=40), st.integers(0, 2**32 - 1))
def test_the_hash_is_that_of_the_topics(key: bytes, seed: int) -> None:
    assert order_hash(key, seed) == murmur3(key, seed)


@given(
    routing_key=st.text(max_size=20),
    header=st.none() | st.binary(max_size=20) | st.integers(0, 5),
    others=st.integers(0, 3),
    has_type=st.booleans(),
    bytes_code=st.booleans(),
)
def test_the_order_key_is_the_header_or_else_the_routing_key(
    *, routing_key: str, header: bytes | int | None, others: int, has_type: bool, bytes_code: bool
) -> None:
    fields = {f"x-{i}": Field("l", i) for i in range(others)}
    if isinstance(header, int):
        fields["x-order-key"] = Field("l", header)
    elif header is not None:
        fields["x-order-key"] = Field("x" if bytes_code else "S", header)
    headers = Table.from_fields(fields.items()) if fields else None
    record = record_of("orders", routing_key, b"body", headers, "text" if has_type else None)
    expected = header if isinstance(header, bytes) and header else routing_key.encode()
    assert order_key(record) == expected


@given(st.binary(max_size=60))
def test_a_damaged_record_is_read_within_its_bounds(data: bytes) -> None:
    assert order_key(data) in data


@given(
    keys=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, LOGICAL - 1), max_size=5, unique=True),
    tagged=st.booleans(),
    seed=st.integers(0, 3),
)
def test_each_record_goes_to_the_partition_of_its_key_in_order(
    keys: list[int], cuts: list[int], *, tagged: bool, seed: int
) -> None:
    owner = Owner()
    target = OrderedTarget(LOGICAL, seed, owner)
    starts = [0, *sorted(cuts)]
    slots = [Slot() for _ in starts]
    owner.opens = {slot: sender() for slot in slots}
    target.set_ranges(starts, slots)
    expected: dict[int, list[tuple[bytes, int]]] = {}
    for number, key in enumerate(keys):
        record = record_of("orders", f"key {key}", b"%d" % number)
        lp = logical_partition(b"key %d" % key, LOGICAL, seed)
        at = max(i for i, start in enumerate(starts) if start <= lp)
        assert target.slot_of(b"key %d" % key) is slots[at]
        target.publish([record], 1, number + 1 if tagged else 0)
        mine = expected.setdefault(at, [])
        mine.append((record, number + 1 if tagged else UNTAGGED + len(mine) + 1))
    for at, slot in enumerate(slots):
        assert slot.sent == len(expected.get(at, []))
        assert (slot.state == SLOT_NEW) == (at not in expected)
        if slot.sender is not None:
            assert taken(slot.sender) == expected[at]
    assert target.seq == len(keys)


def test_what_waits_is_placed_again_with_its_tags() -> None:
    owner = Owner()
    target = OrderedTarget(LOGICAL, 0, owner)
    old, new = Slot(), Slot()
    owner.opens[new] = sender()
    target.set_ranges([0], [old])
    records = [record_of("orders", f"key {i % 3}", b"%d" % i) for i in range(9)]
    for i, record in enumerate(records):
        target.publish([record], 1, (i + 1) * (i % 4 != 2), flags=batch_flags(i))
    assert owner.opened == [old]
    assert old.waiting_bytes == target.pending_bytes == sum(map(len, records))
    waiting = target.take_waiting(old)
    assert (old.waiting_bytes, target.pending_bytes) == (0, 0)
    assert sum(count_tags(command.tags or ()) for command in waiting) == 9
    target.set_ranges([0], [new])
    for command in waiting:
        target.append(command)
    assert new.sender is not None
    found = taken(new.sender)
    assert [record for record, _ in found] == records
    assert [tag if tag < UNTAGGED else 0 for _, tag in found] == [1, 2, 0, 4, 5, 6, 0, 8, 9]
    assert target.take_waiting(new) == []


def batch_flags(i: int) -> int:
    return 8 if i == 5 else 0


def test_an_owner_hears_once_that_too_much_waits() -> None:
    owner = Owner()
    target = OrderedTarget(LOGICAL, 0, owner)
    target.pending_bytes_max = 100
    target.budget = budget = batch.PendingBudget()
    target.set_ranges([0], [Slot()])
    record = record_of("orders", "key", b"x" * 30)
    for _ in range(100 // len(record)):
        target.publish([record], 30, 0)
    assert owner.flow_checks == 0
    for _ in range(3):
        target.publish([record], 30, 0)
    assert owner.flow_checks == 1
    assert target.over
    assert budget.bytes == target.pending_bytes == (100 // len(record) + 3) * len(record)


def test_a_target_without_ranges_or_with_damaged_records_refuses() -> None:
    target = OrderedTarget(LOGICAL, 0, Owner())
    record = record_of("orders", "key", b"x")
    with pytest.raises(ValueError, match="no ranges"):
        target.publish([record], 1, 1)
    with pytest.raises(ValueError, match="cover every"):
        target.set_ranges([1], [Slot()])
    target.set_ranges([0], [Slot()])
    with pytest.raises(ValueError, match="damaged"):
        target.publish([b"\x05ab"], 1, 1)
    with pytest.raises(ValueError, match="at least one"):
        OrderedTarget(0, 0, Owner())


def test_an_open_or_untagged_command_is_not_placed() -> None:
    target = OrderedTarget(LOGICAL, 0, Owner())
    target.set_ranges([0], [Slot()])
    other = sender()
    other.publish([record_of("orders", "key", b"x")], 1, 0)
    other.command(batch.CMD_SETTLE, 0, 0, 0)
    with pytest.raises(ValueError, match="not sealed"):
        target.append(other.pending[0])
    other.builder.discard_unsent()
    with pytest.raises(ValueError, match="has a tag"):
        target.append(other.pending[0])


@given(
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12),
    st.integers(0, 11),
    st.integers(0, 3),
)
def test_the_first_record_of_another_logical_partition_is_found(
    keys: list[bytes], broken: int, seed: int
) -> None:
    body, table = _enqueue_of(
        [record_of("t", "", b"", Table.of({"x-order-key": key})) for key in keys]
    )
    lps = [logical_partition(key, LOGICAL, seed) for key in keys]
    ones = [1] * len(keys)
    assert find_misplaced(body, table, lps, ones, LOGICAL, seed) is None
    if broken < len(keys):
        wrong = [(lp + (row == broken)) % LOGICAL for row, lp in enumerate(lps)]
        found = find_misplaced(body, table, wrong, ones, LOGICAL, seed)
        assert found == (broken, lps[broken])


def test_records_and_runs_have_to_fit() -> None:
    body, table = _enqueue_of([record_of("t", key, b"") for key in ("k", "k", "")])
    lp = logical_partition(b"k", LOGICAL)
    assert find_misplaced(body, table, [lp, 0], [2, 1], LOGICAL) == (2, -1)
    assert find_misplaced(body, table, [lp, 0], [2, 1], LOGICAL, keyless=True) is None
    for counts in ([2, 2], [2, 0], [-1, 4]):
        with pytest.raises(ValueError, match="runs of"):
            find_misplaced(body, table, [lp, lp], counts, LOGICAL)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        find_misplaced(body, table, [lp, lp], [2], LOGICAL)
    for bad in (0, 31, len(body) + 32):
        with pytest.raises(ValueError, match="no records"):
            find_misplaced(body, bad, [lp], [3], LOGICAL)
    with pytest.raises(ValueError, match="damaged"):
        find_misplaced(body[:-4] + b"\xff" * 4, table, [lp, lp, 0], [1, 1, 1], LOGICAL)


def _enqueue_of(records: list[bytes]) -> tuple[bytes, int]:
    """Body of an ENQUEUE, and where its offsets lie."""
    target = sender()
    for record in records:
        target.publish([record], 0, 0)
    data = target.builder.take_entry(1, 1, 1, 0).data
    ((_, _, _, _, count, table, offset, _),) = batch.commands(data)
    return data[offset + 32 : offset + table + 4 * (count + 1)], table
