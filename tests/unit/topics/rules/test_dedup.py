"""The duplicate table against a naive one: lists of what is stored."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convoymq.topics.rules.dedup import DedupTable, SourceSeal, seed_of
from convoymq.topics.rules.refusals import Code

REQUESTS = st.lists(
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(0, 3), st.integers(1, 5)),
    max_size=60,
)


@given(REQUESTS)
def test_sequences_are_contiguous_per_producer_and_logical_partition(
    requests: list[tuple[int, int, int, int]],
) -> None:
    table = DedupTable()
    stored: dict[tuple[int, int, int], int] = {}
    epochs: dict[int, int] = {}
    for producer, epoch, lp, seq in requests:
        code, expected = table.decide(producer, epoch, lp, seq, base=0)
        last = stored.get((producer, epoch, lp), 0)
        if epoch < epochs.get(producer, 0):
            assert code is Code.PRODUCER_FENCED
            continue
        assert expected == last + 1
        assert (code is Code.OK) == (seq == last + 1)
        assert (code is Code.DUPLICATE) == (seq <= last)
        assert (code is Code.OUT_OF_SEQ) == (seq > last + 1)
        if code is Code.OK:
            table.record(producer, epoch, lp, seq, 0, b"")
            stored[producer, epoch, lp] = seq
            epochs[producer] = max(epoch, epochs.get(producer, 0))
    assert DedupTable.load(table.pack()).pack() == table.pack()


def test_a_source_position_never_falls() -> None:
    table = DedupTable()
    for epoch, seq, position in ((1, 1, b"5"), (1, 2, b"3"), (1, 3, b""), (2, 1, b"4")):
        table.record(7, epoch, 0, seq, 0, position)
        assert table.rows[7, 0].source_pos == b"5"


def _table(*rows: tuple[int, int, int]) -> bytes:
    table = DedupTable()
    for producer, lp, seq in rows:
        table.record(producer, 1, lp, seq, 0, b"pos")
    return table.pack()


def test_a_seed_is_what_the_sources_know_of_the_targets_range() -> None:
    left = SourceSeal(0, 4, _table((1, 0, 7), (1, 3, 8)))
    right = SourceSeal(4, 8, _table((1, 4, 9), (2, 7, 5)))
    table = DedupTable.load(seed_of(2, 6, [left, right]))
    assert {key: row.last_seq for key, row in table.rows.items()} == {(1, 3): 8, (1, 4): 9}
    assert table.epochs == {1: 1, 2: 1}


def test_a_source_that_was_sealed_from_outside_leaves_its_range_without_a_seed() -> None:
    known = SourceSeal(4, 8, _table((1, 4, 9)))
    table = DedupTable.load(seed_of(2, 6, [SourceSeal(0, 4, None), known]))
    assert table.is_seedless(2)
    assert not table.is_seedless(4)
    assert table.decide(1, 1, 3, 5, base=5)[0] is Code.OK
    assert table.decide(1, 1, 3, 6, base=5) == (Code.OUT_OF_SEQ, 5)
    assert table.decide(1, 1, 4, 9, base=9)[0] is Code.DUPLICATE


def test_a_late_acknowledgement_of_a_dead_partition_moves_the_base() -> None:
    table = DedupTable.load(seed_of(0, 4, [SourceSeal(0, 4, None)]))
    assert table.decide(1, 1, 0, 3, base=3)[0] is Code.OK
    table.record(1, 1, 0, 3, 0, b"")
    # 4 was acknowledged by the dead partition: the producer goes on with 5.
    assert table.decide(1, 1, 0, 5, base=5)[0] is Code.OK


def test_a_range_without_a_seed_stays_so_in_later_targets() -> None:
    first = seed_of(0, 8, [SourceSeal(0, 8, None)])
    second = DedupTable.load(seed_of(4, 8, [SourceSeal(0, 8, first)]))
    assert second.seedless == [(4, 8)]


def test_rows_expire_by_time_and_producers_with_their_last_row() -> None:
    table = DedupTable()
    table.record(1, 3, 0, 1, 100, b"")
    table.record(2, 1, 0, 1, 200, b"")
    table.expire(150, 140)
    assert list(table.rows) == [(2, 0)]
    assert table.epochs == {2: 1}


def test_a_session_that_has_stored_nothing_fences_older_ones_for_as_long_as_rows_are_kept() -> None:
    table = DedupTable()
    assert table.fence(1, 2)
    table.expire(50, 1000)
    loaded = DedupTable.load(table.pack())
    assert loaded.pack() == table.pack()
    for each in (table, loaded, DedupTable.load(seed_of(0, 4, [SourceSeal(0, 8, table.pack())]))):
        assert each.decide(1, 1, 0, 1, base=0)[0] is Code.PRODUCER_FENCED
        each.expire(1000, 1950)
        assert each.decide(1, 1, 0, 1, base=0)[0] is Code.PRODUCER_FENCED
        each.expire(1001, 1951)
        assert not each.epochs
        assert not each.idle


def test_a_producer_that_comes_back_is_idle_anew() -> None:
    table = DedupTable()
    assert table.fence(1, 2)
    table.expire(50, 1000)
    table.record(1, 2, 0, 1, 1500, b"")
    table.expire(1400, 2350)
    table.expire(1600, 2550)
    assert (table.epochs, table.idle) == ({1: 2}, {1: 2550})


def test_a_newer_session_fences_the_older_ones() -> None:
    table = DedupTable()
    table.record(1, 1, 0, 4, 0, b"")
    assert table.fence(1, 2)
    assert not table.fence(1, 1)
    assert table.decide(1, 1, 0, 5, base=0)[0] is Code.PRODUCER_FENCED
    assert table.decide(1, 2, 0, 1, base=0)[0] is Code.OK
