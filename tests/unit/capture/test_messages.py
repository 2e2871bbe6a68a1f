"""Places, keys and bodies of a capture's messages."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from convoymq.capture.messages import Source, body_of, key_of, log_place, snapshot_place

NUMBER = st.integers(0, (1 << 64) - 1)
VALUE = st.integers() | st.text(max_size=40) | st.floats(allow_nan=False, allow_infinity=False)


@given(st.tuples(NUMBER, NUMBER), st.tuples(NUMBER, NUMBER))
def test_places_are_in_the_order_of_the_source(a: tuple[int, int], b: tuple[int, int]) -> None:
    for place in (snapshot_place, log_place):
        assert (place(1, *a) < place(1, *b)) == (a < b)
    assert snapshot_place(1, *a) < log_place(1, *b) < snapshot_place(2, *a)


@given(st.lists(VALUE, min_size=1, max_size=3), st.lists(VALUE, min_size=1, max_size=3))
def test_rows_have_a_key_of_their_own(a: list[object], b: list[object]) -> None:
    def key(values: list[object]) -> bytes:
        columns = [str(place) for place in range(len(values))]
        return key_of("t", columns, dict(zip(columns, values, strict=True)))  # type: ignore[arg-type]

    texts = [[x if isinstance(x, str) else json.dumps(x) for x in each] for each in (a, b)]
    assert (key(a) == key(b)) == (texts[0] == texts[1])
    assert 0 < len(key(a)) <= 255


def test_keys_are_readable() -> None:
    row = {"id": 5, "name": "a:b", "share": "100%", "long": "x" * 300}
    assert key_of("orders", ["id"], row) == b"orders:5"
    assert key_of("orders", ["id", "name"], row) == b"orders:5:a%3Ab"
    assert key_of("t:1", ["share"], row) == b"t%3A1:100%25"
    assert key_of("orders", ["long"], row).startswith(b"orders:%23")
    assert len(key_of("orders", ["long"], row)) == len("orders:%23") + 64
    assert key_of("orders", [], {}) == b"orders"


def test_an_event_keeps_the_row_apart() -> None:
    source = Source(
        database="shop", table="t", gtid="0-1-7", place=b"\x01\x02", is_snapshot=False, time_ms=5
    )
    row = {"op": "d", "table": "x", "source": None, "text": "é"}
    assert json.loads(body_of("c", None, row, source)) == {
        "op": "c",
        "before": None,
        "after": row,
        "source": {
            "db": "shop",
            "table": "t",
            "gtid": "0-1-7",
            "place": "0102",
            "snapshot": False,
        },
        "ts_ms": 5,
    }
