"""Every operation but PRODUCE: answers, permissions, refusals, names that are near."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from convoymq.edges.columnar import requests
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.columns import OFFSET, TIMESTAMP, VALUE
from convoymq.model.columnar import ErrorCode, Op
from convoymq.model.errors import Unavailable
from tests.unit.edges.columnar.support import TIME_MS, Peer, Rig, reader, values_frame, values_of


def rows(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


async def test_fetch_answers_rows_from_exactly_the_offset(rig: Rig, client: Peer) -> None:
    rig.stream("s", rows("a", "b", "c"), rows("d", "e"))
    columns = OFFSET | TIMESTAMP | VALUE
    answer = await client.ask(Op.FETCH, stream="s", offset=1, columns=columns)
    assert answer.status == 0, answer.map
    assert answer.map == {"first": 0, "high": 5}
    assert values_of(answer.payload) == rows("b", "c", "d", "e")
    frame = ColumnFrame(answer.payload)
    assert (frame.base, frame.next) == (1, 5)
    assert list(frame.offsets()) == [1, 2, 3, 4]
    assert set(frame.buffers(TIMESTAMP)[0].cast("q")) == {TIME_MS * 1000}
    assert rig.edge.counters.rows_out == 4


async def test_a_stream_of_another_group_is_refused_before_a_row_is_sent(tmp_path: Path) -> None:
    async with Rig(tmp_path, machine="here") as rig:
        client = await rig.client()
        stream = rig.stream("s", rows("a", "b"))
        stream.place = b"where it lies"
        for group in (0, stream.group):
            assert (await client.ask(Op.FETCH, stream="s", offset=0, group=group)).status == 0
        for machine in ("", "here"):
            answer = await client.ask(Op.FETCH, stream="s", offset=0, group=99, machine=machine)
            assert answer.status == ErrorCode.NOT_FOUND
            assert answer.map["group"] == stream.group
            assert "group 99 is gone, now it is group 100" in answer.map["text"]
            assert not answer.payload.nbytes


async def test_not_found_is_only_said_by_who_has_caught_up(rig: Rig, client: Peer) -> None:
    """The node's metadata is behind: it does not know the stream yet, or knows the one before."""
    asked = 0

    async def catch_up() -> None:
        nonlocal asked
        asked += 1
        rig.stream("s", rows("a")).group = 7

    rig.broker.metadata_reads.catch_up = catch_up  # type: ignore[method-assign]
    assert values_of((await client.ask(Op.FETCH, stream="s", offset=0)).payload) == rows("a")
    rig.stream("s", rows("old")).group = 6
    answer = await client.ask(Op.FETCH, stream="s", offset=0, group=7)
    assert values_of(answer.payload) == rows("a")
    assert asked == 2
    del rig.streams["s"]
    answer = await client.ask(Op.OFFSETS, queries=[["s", "earliest", None]])
    assert answer.status == 0
    await client.ask(Op.METADATA)
    assert asked == 3
    await client.ask(Op.METADATA, current=True)
    assert asked == 4


async def test_not_found_is_not_said_by_who_can_not_know(rig: Rig, client: Peer) -> None:
    async def catch_up() -> None:
        raise Unavailable("metadata may be stale")

    rig.broker.metadata_reads.catch_up = catch_up  # type: ignore[method-assign]
    for answer in (
        await client.ask(Op.FETCH, stream="s", offset=0),
        await client.ask(Op.METADATA, current=True),
    ):
        assert (answer.status, answer.map["text"]) == (
            ErrorCode.UNAVAILABLE,
            "metadata may be stale",
        )


async def test_only_clients_of_this_machine_are_told_of_files(tmp_path: Path) -> None:
    async with Rig(tmp_path, machine="here") as rig:
        client = await rig.client()
        stream = rig.stream("s", rows("a", "b", "c"))
        stream.place = b"where it lies"
        answer = await client.ask(Op.FETCH, stream="s", offset=1, machine="here")
        assert answer.map == {"first": 0, "high": 3, "excerpt": True}
        assert bytes(answer.payload) == b"where it lies"
        assert (rig.edge.counters.read_descriptors, rig.edge.counters.rows_out) == (1, 0)
        for machine in ("", "elsewhere"):
            answer = await client.ask(Op.FETCH, stream="s", offset=1, machine=machine)
            assert answer.map == {"first": 0, "high": 3}
            assert ColumnFrame(answer.payload).rows == 2
        stream.place = None
        answer = await client.ask(Op.FETCH, stream="s", offset=1, machine="here")
        assert answer.map == {"first": 0, "high": 3}
        assert rig.edge.counters.read_descriptors == 1


async def test_a_machine_without_a_name_has_no_files(rig: Rig, client: Peer) -> None:
    rig.stream("s", rows("a")).place = b"where it lies"
    answer = await client.ask(Op.FETCH, stream="s", offset=0, machine="")
    assert answer.map == {"first": 0, "high": 1}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_rows": 2}, rows("a", "b")),
        ({"end": 4}, rows("a", "b", "c", "d")),
        ({"end": 0}, []),
        ({"max_bytes": 1}, rows("a")),
        ({"offset": 5}, []),
    ],
)
async def test_fetch_keeps_to_its_bounds(
    rig: Rig, client: Peer, fields: dict[str, Any], expected: list[bytes]
) -> None:
    rig.stream("s", rows("a", "b", "c"), rows("d", "e"))
    answer = await client.ask(Op.FETCH, **({"stream": "s", "offset": 0, "columns": 8} | fields))
    assert answer.status == 0, answer.map
    assert values_of(answer.payload) == expected
    assert ColumnFrame(answer.payload).next == fields.get("offset", 0) + len(expected)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
async def test_fetch_compresses_on_request(rig: Rig, client: Peer, compression: str) -> None:
    rig.stream("s", [b"very much the same " * 20] * 100)
    plain = await client.ask(Op.FETCH, stream="s", offset=0)
    small = await client.ask(Op.FETCH, stream="s", offset=0, compression=compression)
    assert small.payload.nbytes < plain.payload.nbytes // 4
    assert values_of(small.payload) == values_of(plain.payload)


async def test_large_answers_are_built_in_many_turns(tmp_path: Path) -> None:
    async with Rig(tmp_path, slice_us=0, step_bytes=128 << 10) as rig:
        values = [b"%06d" % i * 40 for i in range(12_000)]
        rig.stream("s", values)
        peer = await rig.client()
        answer = await peer.ask(Op.FETCH, stream="s", offset=0)
        assert values_of(answer.payload) == values
        # 2.9 MB in steps of 128 KiB, once to build and once to write.
        assert rig.edge.turns.given > 2 * 22


async def test_answers_are_smaller_while_others_are_active(tmp_path: Path) -> None:
    async with Rig(tmp_path, answer_bytes_beside=100_000) as rig:
        values = [b"%06d" % i * 40 for i in range(2_000)]
        rig.stream("s", values)
        peer = await rig.client()
        answer = await peer.ask(Op.FETCH, stream="s", offset=0)
        assert values_of(answer.payload) == values
        rig.edge.turns.others_active = lambda: True  # type: ignore[method-assign]
        at, found = 0, []
        while at < len(values):
            answer = await peer.ask(Op.FETCH, stream="s", offset=at)
            assert answer.payload.nbytes <= 100_000
            found += values_of(answer.payload)
            at = ColumnFrame(answer.payload).next
        assert found == values


async def test_answers_end_at_the_server_s_bound(rig: Rig, client: Peer) -> None:
    rig.stream("s", [bytes(1000)] * 9000)
    answer = await client.ask(Op.FETCH, stream="s", offset=0, max_bytes=1 << 40)
    assert answer.payload.nbytes <= rig.settings.answer_max
    assert 0 < ColumnFrame(answer.payload).next < 9000


async def test_a_node_without_replica_reads_once_unless_it_waits(rig: Rig, client: Peer) -> None:
    stream = rig.stream("s", rows("a", "b"))
    stream.local = False
    answer = await client.ask(Op.FETCH, stream="s", offset=0)
    assert values_of(answer.payload) == rows("a", "b")
    assert stream.reads == 1
    assert (await client.ask(Op.FETCH, stream="s", offset=1, wait_ms=5)).map["high"] == 2
    assert stream.reads == 3


async def test_refusals_of_the_stream_come_through(rig: Rig, client: Peer) -> None:
    stream = rig.stream("s", rows("a"))
    stream.error = Unavailable("stream 's' has no leader")
    code, text = await client.refusal(Op.FETCH, stream="s", offset=0)
    assert code == ErrorCode.UNAVAILABLE
    assert "no leader" in text


async def test_a_stream_that_says_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "BEHIND_WAIT_MS", 0)
    async with Rig(tmp_path, request_timeout_ms=20) as rig:
        rig.stream("s", rows("a")).hold = asyncio.Event()
        peer = await rig.client()
        for offset in (0, 1):
            code, text = await peer.refusal(Op.FETCH, stream="s", offset=offset)
            assert code == ErrorCode.UNAVAILABLE
            assert "in time" in text


async def test_unknown_names_are_told_with_those_near(rig: Rig, client: Peer) -> None:
    await rig.queue("orders")
    await rig.queue("invoices")
    answer = await client.ask(Op.FETCH, stream="order", offset=0)
    assert answer.status == ErrorCode.NOT_FOUND
    assert "order" in answer.map["text"]
    assert answer.map["near"] == ["orders"]


async def test_names_that_may_not_be_read_are_not_told(rig: Rig) -> None:
    await rig.queue("orders")
    peer = await reader(rig, read="^order$")
    answer = await peer.ask(Op.FETCH, stream="order", offset=0)
    assert answer.status == ErrorCode.NOT_FOUND
    assert answer.map["near"] == []


async def test_wrong_types_of_queues_are_refused(rig: Rig, client: Peer) -> None:
    await rig.queue("q")
    for op, fields in (
        (Op.FETCH, {"stream": "q", "offset": 0}),
        (Op.OFFSETS, {"queries": [["q", "latest", None]]}),
        (Op.STORE_OFFSET, {"stream": "q", "consumer": "c", "offset": 1}),
        (Op.QUERY_OFFSET, {"stream": "q", "consumer": "c"}),
        (Op.PRODUCE, {"stream": "q"}),
    ):
        payload = values_frame([b"x"]) if op is Op.PRODUCE else b""
        code, text = await client.refusal(op, payload, **fields)
        assert code == ErrorCode.PRECONDITION_FAILED
        assert "not a stream" in text


async def test_offsets_answers_in_the_order_of_the_queries(rig: Rig, client: Peer) -> None:
    rig.stream("s", rows("a", "b"))
    rig.stream("t", rows("c"))
    queries = [
        ["s", "latest", None],
        ["t", "earliest", None],
        ["t", "timestamp", TIME_MS],
        ["t", "timestamp", TIME_MS + 1],
        ["t", "latest", None],
    ]
    answer = await client.ask(Op.OFFSETS, queries=queries)
    assert answer.map["offsets"] == [[2, None], [0, TIME_MS], [0, TIME_MS], [None, None], [1, None]]
    code, _ = await client.refusal(Op.OFFSETS, queries=[["s", "timestamp", None]])
    assert code == ErrorCode.PRECONDITION_FAILED


async def test_stored_offsets_come_back(rig: Rig, client: Peer) -> None:
    rig.stream("s")
    assert (await client.ask(Op.QUERY_OFFSET, stream="s", consumer="c")).map == {"offset": None}
    assert (await client.ask(Op.STORE_OFFSET, stream="s", consumer="c", offset=9)).status == 0
    assert (await client.ask(Op.QUERY_OFFSET, stream="s", consumer="c")).map == {"offset": 9}


async def test_metadata_lists_what_the_user_may_read(rig: Rig) -> None:
    await rig.queue("a.quorum")
    await rig.queue("a.classic", "classic")
    await rig.queue("b.quorum")
    peer = await reader(rig, read="^a\\.")

    async def names(**fields: Any) -> list[str]:
        answer = await peer.ask(Op.METADATA, **fields)
        assert answer.status == 0, answer.map
        return sorted(row["name"] for row in answer.map["queues"])

    assert await names() == []
    both = ["quorum", "classic"]
    assert await names(types=both) == ["a.classic", "a.quorum"]
    assert await names(types=["quorum"]) == ["a.quorum"]
    assert await names(types=both, names=["a.quorum", "b.quorum", "none"]) == ["a.quorum"]
    (row,) = (await peer.ask(Op.METADATA, types=["quorum"])).map["queues"]
    assert row["leader"] == "n1"
    assert row["members"] == ["n1"]
    assert row["arguments"] == {"x-queue-type": "quorum"}


async def test_metadata_asks_others_for_what_is_not_here(rig: Rig, client: Peer) -> None:
    await rig.cluster.queue(1, "s", arguments={"x-queue-type": "stream"})
    stream = rig.stream("s", rows("a", "b"))

    async def extent() -> tuple[Any, ...]:
        (row,) = (await client.ask(Op.METADATA)).map["queues"]
        return row["first"], row["next"], row["bytes"]

    assert await extent() == (0, 2, 77)
    stream.local = False
    assert await extent() == (0, 2, 55)
    stream.error = Unavailable("nobody is near")
    assert await extent() == (None, None, 77)


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        (Op.FETCH, {"stream": "s", "offset": 0}),
        (Op.OFFSETS, {"queries": [["s", "latest", None]]}),
        (
            Op.RESERVATION,
            {"queue": "s", "op": "open", "reservation": "x", "owner": "o", "ttl_ms": 9},
        ),
        (Op.RESERVATION_FETCH, {"queue": "s", "reservation": "x", "epoch": 1, "offset": 0}),
        (Op.BROWSE, {"queue": "s"}),
        (Op.STORE_OFFSET, {"stream": "s", "consumer": "c", "offset": 1}),
        (Op.QUERY_OFFSET, {"stream": "s", "consumer": "c"}),
    ],
)
async def test_reading_needs_the_permission_to_read(
    rig: Rig, op: Op, fields: dict[str, Any]
) -> None:
    rig.stream("s", rows("a"))
    peer = await reader(rig, read="^other$", write=".*")
    code, text = await peer.refusal(op, **fields)
    assert code == ErrorCode.ACCESS_REFUSED
    assert "read access" in text


@pytest.mark.parametrize(
    ("op", "fields", "what"),
    [
        (Op.FETCH, {"stream": "s"}, "offset"),
        (Op.FETCH, {"stream": "s", "offset": -1}, "offset"),
        (Op.FETCH, {"stream": "s", "offset": "0"}, "offset"),
        (Op.FETCH, {"stream": "s", "offset": 1 << 63}, "offset"),
        (Op.FETCH, {"stream": "s", "offset": 4, "end": 3}, "end 3"),
        (Op.FETCH, {"stream": "s", "offset": 0, "columns": 0}, "columns"),
        (Op.FETCH, {"stream": "s", "offset": 0, "columns": 1024}, "columns"),
        (Op.FETCH, {"stream": "s", "offset": 0, "max_rows": 0}, "max_rows"),
        (Op.FETCH, {"stream": "s", "offset": 0, "compression": "gzip"}, "compression"),
        (Op.FETCH, {"stream": ["s"], "offset": 0}, "stream"),
        (Op.FETCH, {"stream": "", "offset": 0}, "stream"),
        (Op.OFFSETS, {"queries": [["s", "newest", None]]}, "queries"),
        (Op.OFFSETS, {"queries": "s"}, "queries"),
        (Op.METADATA, {"types": ["table"]}, "types"),
        (Op.RESERVATION, {"queue": "q", "op": "steal", "reservation": "s"}, "op"),
        (Op.BROWSE, {}, "queue"),
    ],
)
async def test_wrong_fields_are_named(
    rig: Rig, client: Peer, op: Op, fields: dict[str, Any], what: str
) -> None:
    rig.stream("s", rows("a"))
    code, text = await client.refusal(op, **fields)
    assert code == ErrorCode.PRECONDITION_FAILED
    assert what in text


async def test_a_payload_where_none_belongs_is_refused(client: Peer) -> None:
    code, text = await client.refusal(Op.METADATA, b"12345678")
    assert code == ErrorCode.PRECONDITION_FAILED
    assert "payload" in text


@pytest.mark.provokes("fetch.request_failed")
async def test_a_damaged_message_is_an_error_of_its_own(rig: Rig, client: Peer) -> None:
    stream = rig.stream("s", rows("a" * 100, "b"))
    block, start, count = stream.blocks[0]
    broken = bytearray(block)
    broken[100:140] = b"\xff" * 40
    stream.blocks[0] = bytes(broken), start, count
    code, _ = await client.refusal(Op.FETCH, stream="s", offset=0)
    assert code == ErrorCode.INTERNAL_ERROR
    assert (await client.ask(Op.METADATA)).status == 0


async def test_every_request_and_error_is_counted(rig: Rig, client: Peer) -> None:
    rig.stream("s", rows("a"))
    await client.ask(Op.FETCH, stream="s", offset=0)
    await client.ask(Op.FETCH, stream="nix", offset=0)
    found = {(name, *labels.values()): value for _, name, labels, value in rig.edge.metrics()}
    assert found["convoy_fetch_requests_total", "fetch"] == 2
    assert found["convoy_fetch_requests_total", "authenticate"] == 1
    assert found["convoy_fetch_errors_total", "not_found"] == 1
    assert found["convoy_fetch_rows_sent_total",] == 1
    assert found["convoy_fetch_connections",] == 1
    assert found["convoy_fetch_sent_bytes_total",] > 100
    assert found["convoy_fetch_received_bytes_total",] > 100
