"""Runs at their places, and runs that are put in front, against lists of messages."""

from __future__ import annotations

from array import array
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.model.words import words_to_bytes
from convoymq.queues.quorum.levels import mark_of
from convoymq.queues.quorum.restored import Restored, place_of
from convoymq.queues.quorum.runs import Fifo, Run
from tests.unit.queues.quorum.support import expand

LEVELS = (0, 4, 9)

made = st.tuples(
    st.just("add"), st.integers(1, 40), st.integers(1, 5), st.sampled_from(LEVELS),
    st.integers(0, 3), st.sampled_from((0, 70_000)),
)  # fmt: skip
steps = st.lists(
    st.one_of(
        made,
        made,
        st.tuples(st.just("take"), st.sampled_from(LEVELS), st.integers(1, 7)),
        st.tuples(st.just("restore")),
    ),
    min_size=5,
    max_size=40,
)


def a_run(index: int, count: int, level: int, acquired: int, due: int) -> Run:
    return (index, 48, 0, count, 10 * count, acquired, 0, mark_of(level, due))


@given(steps)
def test_the_oldest_of_a_level_is_next(taken: list[tuple[object, ...]]) -> None:
    restored = Restored()
    naive: dict[int, list[tuple[int, int, int]]] = {level: [] for level in LEVELS}
    used: set[int] = set()
    for step in taken:
        if step[0] == "add":
            index, count, level, acquired, due = (int(str(part)) for part in step[1:])
            if index not in used:
                used.add(index)
                run = a_run(index, count, level, acquired, due)
                restored.add(level, run)
                naive[level] = sorted(naive[level] + expand([run]))
        elif step[0] == "take":
            level, limit = int(str(step[1])), int(str(step[2]))
            if naive[level]:
                head = restored.head(level)
                assert head is not None
                assert place_of(head) == restored.head_place(level)
                run = restored.take(level, limit)
                found = expand([run])
                assert len(found) == min(limit, head[3])
                assert found == naive[level][: len(found)]
                assert run[4] == 10 * run[3]
                del naive[level][: len(found)]
        else:
            copy = Restored()
            copy.unpack(restored.pack())
            assert copy.pack() == restored.pack()
            assert (copy.messages, copy.size, copy.again) == (
                restored.messages, restored.size, restored.again,
            )  # fmt: skip
            restored = copy
        for level in LEVELS:
            assert expand(restored.runs(level)) == naive[level]
            assert restored.count(level) == len(naive[level])
            assert (restored.head(level) is None) == (not naive[level])
        assert restored.messages == sum(map(len, naive.values()))
        assert restored.size == 10 * restored.messages
        assert set(restored.levels()) == {level for level in LEVELS if naive[level]}
        assert expand(restored.all_runs()) == sorted(chain(*naive.values()))
    restored.clear()
    assert not restored.messages
    assert restored.run_count() == restored.memory_bytes() == 0


def test_packed_runs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="length"):
        Restored().unpack([(4, b"1234")])
    with pytest.raises(ValueError, match="empty"):
        Restored().unpack([(4, words_to_bytes(array("Q", (1, 2, 0, 0, 0))))])


fronts = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(("front", "back")), st.integers(1, 5), st.sampled_from((0, 99))),
        st.tuples(st.just("take"), st.integers(1, 7), st.just(0)),
    ),
    max_size=80,
)


@given(fronts)
def test_a_queue_takes_runs_at_both_ends(taken: list[tuple[str, int, int]]) -> None:
    fifo, naive = Fifo(True), []
    for index, (what, count, mark) in enumerate(taken, 1):
        run = (index, 48, 0, count, 10 * count, 1, 0, mark)
        if what == "front":
            fifo.push_front(run)
            naive = expand([run]) + naive
        elif what == "back":
            fifo.push(*run)
            naive += expand([run])
        elif naive:
            assert fifo.head_place() == (naive[0][0], 48 << 32 | naive[0][2])
            found = expand([fifo.take(count)])
            assert found == naive[: len(found)]
            del naive[: len(found)]
        assert expand(fifo.runs()) == naive
        assert fifo.messages == len(naive)
        copy = Fifo(True)
        copy.unpack(fifo.pack())
        assert copy.runs() == fifo.runs()
