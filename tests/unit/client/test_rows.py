"""Python values to frames and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.client.rows import frame_of, keys_of, values_of
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.columns import KEY

BYTES = st.binary(max_size=20)


@given(st.lists(st.tuples(BYTES, st.none() | BYTES), max_size=40))
def test_what_goes_in_comes_out(rows: list[tuple[bytes, bytes | None]]) -> None:
    values = [value for value, _ in rows]
    keys = [key for _, key in rows]
    frame = ColumnFrame(frame_of(values, keys))
    assert frame.rows == len(rows)
    assert values_of(frame) == values
    assert keys_of(frame) == keys


@pytest.mark.parametrize("compression", ["", "zstd", "lz4"])
def test_frames_without_keys(compression: str) -> None:
    frame = ColumnFrame(frame_of([b"", b"x" * 1000], compression=compression))
    assert not frame.columns & KEY
    assert values_of(frame) == [b"", b"x" * 1000]
    with pytest.raises(ValueError, match="column"):
        keys_of(frame)


def test_every_value_has_its_key() -> None:
    with pytest.raises(ValueError, match="1 keys for 2 values"):
        frame_of([b"a", b"b"], [b"k"])
