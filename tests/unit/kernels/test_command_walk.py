"""Commands of an entry, one after the other, as `batch.commands` lists them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels import batch
from convoymq.kernels.command_walk import CommandWalk

COMMANDS = st.lists(
    st.tuples(
        st.sampled_from((batch.CMD_SETTLE, batch.CMD_TICK, batch.CMD_CONFIG)),
        st.integers(0, 255),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
        st.binary(max_size=40),
    ),
    max_size=6,
)


def entry_of(commands: list[tuple[int, int, int, int, int, int, bytes]]) -> bytes:
    builder = batch.CommandBuilder()
    for kind, flags, session, seq, count, arg, body in commands:
        builder.add(kind, flags, session, seq, count, arg, body)
    return builder.take_entry(5, 1, 1, 1).data


@given(COMMANDS)
def test_a_walk_meets_every_command_in_order(
    commands: list[tuple[int, int, int, int, int, int, bytes]],
) -> None:
    data = entry_of(commands)
    walk = CommandWalk(data)
    met = []
    while walk.next():
        met.append((walk.type, walk.flags, walk.session, walk.seq, walk.count, walk.arg))
        assert (
            batch.command_body(data, walk.offset)[: len(commands[len(met) - 1][6])]
            == (commands[len(met) - 1][6])
        )
    assert met == [command[:6] for command in commands]
    assert not walk.next()
    assert [row[:6] for row in batch.commands(data)] == met


def test_nothing_is_met_of_an_entry_with_a_malformed_command() -> None:
    data = bytearray(entry_of([(batch.CMD_TICK, 0, 0, 0, 0, 0, b"")] * 3))
    data[-8:] = b"\xff" * 8
    cut = bytes(data[:-4])
    with pytest.raises(ValueError, match="malformed command"):
        CommandWalk(cut)
    with pytest.raises(ValueError, match="shorter than its header"):
        CommandWalk(b"")
