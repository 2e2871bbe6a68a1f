"""The index of a mirror's copy, against a naive model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.model.errors import PeerError
from convoymq.queues.classic.runs import Place
from convoymq.queues.mirrored.copy_index import CopyIndex

BLOCKS = st.lists(st.integers(1, 6), min_size=1, max_size=12)
RANGES = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 12)), max_size=25)


@given(BLOCKS, RANGES, st.data())
def test_what_is_alive_is_what_came_and_was_not_settled(
    counts: list[int], ranges: list[tuple[int, int]], data: st.DataObject
) -> None:
    index = CopyIndex()
    alive: set[int] = set()
    blocks = []
    at = 0
    for count in counts:
        at += data.draw(st.integers(0, 3))
        blocks.append((at, count))
        at += count
    for position, count in data.draw(st.permutations(blocks)):
        index.add(position, count, Place(1, position, 8), 5, [True])
        alive |= set(range(position, position + count))
    for first, more in ranges:
        gone, free = index.settle(first, first + more)
        settled = alive & set(range(first, first + more + 1))
        assert gone == len(settled)
        alive -= settled
        assert free == [
            (1, len(set(range(position, position + count)) & settled))
            for position, count in blocks
            if set(range(position, position + count)) & settled
        ]
        index.check_invariants()
    assert index.messages == len(alive)
    kept = [block.position for block in index.blocks_in(1)]
    assert kept == [p for p, count in blocks if alive & set(range(p, p + count))]
    assert index.blocks_in(2) == []


@given(BLOCKS, RANGES, st.data())
def test_a_block_that_overlaps_another_one_is_refused(
    counts: list[int], ranges: list[tuple[int, int]], data: st.DataObject
) -> None:
    """What is asked for is known, new, or overlaps a block of which something is alive."""
    index = CopyIndex()
    blocks = {}
    at = 0
    for count in counts:
        at += data.draw(st.integers(0, 3))
        blocks[at] = count
        at += count
    for position in data.draw(st.permutations(list(blocks))):
        assert not index.has(position, blocks[position])
        index.add(position, blocks[position], Place(1, position, 8), 5, [True])
        assert index.has(position, blocks[position])
    for first, more in ranges:
        index.settle(first, first + more)
    left = {block.position: block.count for block in index.blocks_in(1)}
    for position in range(at + 2):
        for count in range(1, 8):
            overlaps = any(p < position + count and position < p + n for p, n in left.items())
            if left.get(position) == count:
                assert index.has(position, count)
            elif overlaps:
                with pytest.raises(PeerError, match=rf"^messages {position} to .* overlap "):
                    index.has(position, count)
            else:
                assert not index.has(position, count)
