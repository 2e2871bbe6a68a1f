"""TOPIC_PRODUCE and TOPIC_PRODUCER on a node whose topics are real and whose groups are fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from convoymq.client.rows import headers_of, routing_keys_of
from convoymq.client.topic_rows import TopicRow, frame_of_rows
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.columns import HEADERS, PROPERTIES, ROUTING_KEY, VALUE
from convoymq.metadata.commands import ChangeTopic
from convoymq.metadata.topic_codec import pack_command
from convoymq.model.columnar import ErrorCode, Frame, Op
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.topic import Delete, Retire
from tests.unit.edges.columnar.support import Peer, Rig, reader, values_of

LOGICAL = 8


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path, command_bytes=1000) as made:
        made.cluster.raise_versions()
        await made.broker.topics.create("/", "orders", partitions=2, logical=LOGICAL)
        yield made


def keys_in(lo: int, hi: int, count: int) -> list[bytes]:
    """Order keys whose logical partitions lie in a range, one each."""
    found: dict[int, bytes] = {}
    for number in range(10_000):
        lp = logical_partition(key := b"key-%d" % number, LOGICAL)
        if lo <= lp < hi and lp not in found:
            found[lp] = key
        if len(found) == count:
            break
    return list(found.values())


def run(key: bytes, seq: int, count: int = 1, pos: bytes = b"") -> list[object]:
    return [logical_partition(key, LOGICAL), seq, count, seq, pos]


async def produce(
    peer: Peer, pid: int, rows: list[TopicRow], runs: list[list[object]], **more: object
) -> Frame:
    fields = {"topic": "orders", "pid": pid, "producer": 7, "epoch": 1, "runs": runs, **more}
    return await peer.ask(Op.TOPIC_PRODUCE, frame_of_rows(rows), **fields)


async def wait_split(rig: Rig, pid: int) -> None:
    change = await rig.broker.topics.split("/", "orders", pid)
    await rig.broker.topics.wait_change("/", "orders", change["change_id"])


async def test_what_is_stored_is_that_of_an_amqp_publisher(rig: Rig, client: Peer) -> None:
    a, b = keys_in(0, 4, 2)
    rows = [TopicRow(a, b"1", {"n": "x"}), TopicRow(a, b"2"), TopicRow(b, b"3")]
    answer = await produce(client, 0, rows, [run(a, 1, 2), run(b, 1)])
    assert answer.status == 0, answer.map
    assert answer.map == {
        "runs": [["OK", 1, 2, 3], ["OK", 3, 1, 2]], "to_version": 0, "targets": [],
    }  # fmt: skip
    columns = VALUE | ROUTING_KEY | HEADERS
    found = await client.ask(Op.FETCH, stream="amq.partition.orders.0", offset=0, columns=columns)
    frame = ColumnFrame(found.payload)
    assert values_of(found.payload) == [b"1", b"2", b"3"]
    assert routing_keys_of(frame) == [a, a, b]
    assert headers_of(frame) == [{"n": b"x"}, {}, {}]
    # Sent again, from another connection.
    other = await rig.client()
    answer = await produce(other, 0, [*rows, TopicRow(b, b"4")], [run(a, 1, 2), run(b, 1, 2)])
    assert answer.map["runs"] == [["DUPLICATE", -1, 0, 3], ["OK", 4, 1, 3]]
    assert rig.edge.counters.rows_in == 4


async def test_keys_that_are_no_routing_keys_are_headers(rig: Rig, client: Peer) -> None:
    for key in (b"\xff\x00", b"k" * 300):
        lp = logical_partition(key, LOGICAL)
        answer = await produce(client, lp // 4, [TopicRow(key, b"v")], [run(key, 1)])
        assert answer.map["runs"][0][0] == "OK"
        name = f"amq.partition.orders.{lp // 4}"
        offset = answer.map["runs"][0][1] - 1
        found = await client.ask(Op.FETCH, stream=name, offset=offset, columns=HEADERS)
        assert headers_of(ColumnFrame(found.payload)) == [{"x-order-key": key}]


async def test_large_requests_become_commands_of_whole_runs(rig: Rig, client: Peer) -> None:
    keys = keys_in(0, 4, 4)
    rows = [TopicRow(key, bytes(90)) for key in keys for _ in range(9)]
    answer = await produce(client, 0, rows, [run(key, 1, 9) for key in keys])
    assert [each[:3] for each in answer.map["runs"]] == [["OK", 1 + 9 * i, 9] for i in range(4)]


async def test_a_resend_over_a_split_is_told_by_the_seed(rig: Rig, client: Peer) -> None:
    a, b = keys_in(0, 2, 1) + keys_in(2, 4, 1)
    rows = [TopicRow(a, b"1"), TopicRow(b, b"2")]
    await produce(client, 0, rows, [run(a, 1, pos=b"p1"), run(b, 1)])
    await wait_split(rig, 0)
    answer = await produce(client, 0, rows, [run(a, 1), run(b, 1)])
    assert answer.map == {
        "runs": [["CLOSED", -1, 0, 0]] * 2,
        "to_version": 1,
        "targets": [[0, 2, 2], [2, 4, 3]],
    }
    answer = await produce(client, 2, [rows[0], TopicRow(a, b"3")], [run(a, 1, 2, b"p3")])
    assert answer.map["runs"] == [["OK", 1, 1, 3]]
    answer = await produce(client, 3, rows[1:], [run(b, 1)])
    assert answer.map["runs"] == [["DUPLICATE", -1, 0, 2]]
    answer = await produce(client, 3, rows[:1], [run(a, 3)])
    assert answer.map["runs"] == [["WRONG_RANGE", -1, 0, 0]]
    answer = await produce(client, 2, rows[:1], [run(a, 4)])
    assert answer.map["runs"] == [["OUT_OF_SEQ", -1, 0, 3]]
    for pid, code in ((77, "STALE_ROUTE"), (4, "STALE_ROUTE")):
        answer = await produce(client, pid, rows[:1], [run(a, 4)])
        assert answer.map["runs"] == [[code, -1, 0, 0]]
    answer = await client.ask(Op.TOPIC_PRODUCER, topic="orders", producer=7, query=True)
    lps = [logical_partition(key, LOGICAL) for key in (a, b)]
    assert answer.map == {"epoch": 1, "stored": [[lps[0], 2, b"p3"], [lps[1], 1, b""]]}


async def test_a_partition_that_was_deleted_answers_closed_with_the_latest_version(
    rig: Rig, client: Peer
) -> None:
    """A client with a very old route asks for the new one, as behind any CLOSE."""
    (a,) = keys_in(0, 4, 1)
    await wait_split(rig, 0)
    await wait_split(rig, 1)
    for command in (Retire(), Delete(frozenset({0}))):
        change = ChangeTopic(vhost="/", name="orders", command=pack_command(command))
        await rig.broker.metadata.execute(change)
    answer = await produce(client, 0, [TopicRow(a, b"1")], [run(a, 1)])
    assert answer.map == {"runs": [["CLOSED", -1, 0, 0]], "to_version": 2, "targets": []}
    # The other one is retired, and answers itself.
    answer = await produce(client, 1, [TopicRow(a, b"1")], [run(a, 1)])
    assert (answer.map["runs"], answer.map["to_version"]) == ([["CLOSED", -1, 0, 0]], 2)


async def test_a_session_fences_those_before_it(rig: Rig, client: Peer) -> None:
    (a,) = keys_in(0, 4, 1)
    first = await client.ask(Op.TOPIC_PRODUCER, topic="orders", producer=7)
    assert first.map == {"epoch": 1, "stored": []}
    await produce(client, 0, [TopicRow(a, b"1")], [run(a, 1, pos=b"here")])
    second = await client.ask(Op.TOPIC_PRODUCER, topic="orders", producer=7)
    lp = logical_partition(a, LOGICAL)
    assert second.map == {"epoch": 2, "stored": [[lp, 1, b"here"]]}
    answer = await produce(client, 0, [TopicRow(a, b"2")], [run(a, 2)])
    assert answer.map["runs"][0][0] == "PRODUCER_FENCED"
    answer = await client.ask(Op.TOPIC_PRODUCER, topic="orders", producer=7, epoch=1)
    assert (answer.status, answer.map["topic_code"]) == (
        ErrorCode.PRECONDITION_FAILED,
        "PRODUCER_FENCED",
    )
    answer = await produce(client, 0, [TopicRow(a, b"2")], [run(a, 1)], epoch=2)
    assert answer.map["runs"][0][0] == "OK"


async def test_wrong_requests_store_nothing(rig: Rig, client: Peer) -> None:
    (a,) = keys_in(0, 4, 1)
    (elsewhere,) = keys_in(4, 8, 1)
    row = TopicRow(a, b"v")
    answer = await produce(client, 0, [row, TopicRow(elsewhere, b"v")], [run(a, 1, 2)])
    assert answer.status == ErrorCode.PRECONDITION_FAILED
    lp = logical_partition(a, LOGICAL)
    assert (answer.map["topic_code"], answer.map["row"], answer.map["lp"]) == ("BAD_HASH", 1, lp)
    assert "belongs to logical partition" in str(answer.map["text"])
    answer = await produce(client, 0, [TopicRow(b"", b"v")], [run(a, 1)])
    assert answer.map["topic_code"] == "NO_KEY"
    for runs, text in (
        ([], "0 runs"),
        ([run(a, 1, 2)], "runs of 2 messages, 1 rows"),
        ([run(a, 0)], "runs"),
        ([[*run(a, 1)[:4], bytes(256)]], "runs"),
    ):
        answer = await produce(client, 0, [row], runs)
        assert answer.status == ErrorCode.PRECONDITION_FAILED
        assert text in str(answer.map["text"])
    answer = await produce(client, 0, [row], [run(a, 1)], topic="nobody")
    assert answer.status == ErrorCode.NOT_FOUND
    for name in ("topic", "producer", "epoch"):
        answer = await produce(client, 0, [row], [run(a, 1)], **{name: 0})
        assert answer.status == ErrorCode.PRECONDITION_FAILED
    found = await client.ask(Op.TOPIC_PRODUCER, topic="orders", producer=7, query=True)
    assert found.map == {"epoch": 0, "stored": []}


async def test_properties_that_a_log_does_not_serve_are_refused(rig: Rig, client: Peer) -> None:
    from array import array
    from itertools import accumulate

    from convoymq.kernels.column_frame import build_frame

    (a,) = keys_in(0, 4, 1)
    # An expiration.
    properties = b"\x00\x3c\x00\x00" + bytes(8) + b"\x01\x00" + b"\x0260"
    texts = [array("i", accumulate([0, len(text)])).tobytes() for text in (a, properties)]
    frame = build_frame(ROUTING_KEY | PROPERTIES, 1, 0, 1, [texts[0], a, texts[1], properties])
    fields = {"topic": "orders", "pid": 0, "producer": 7, "epoch": 1, "runs": [run(a, 1)]}
    answer = await client.ask(Op.TOPIC_PRODUCE, frame, **fields)
    assert answer.status == ErrorCode.PRECONDITION_FAILED
    assert "expiration" in str(answer.map["text"])


async def test_who_may_not_write_the_exchange_is_refused(rig: Rig) -> None:
    (a,) = keys_in(0, 4, 1)
    peer = await reader(rig, read=".*", write="other")
    answer = await produce(peer, 0, [TopicRow(a, b"v")], [run(a, 1)])
    assert answer.status == ErrorCode.ACCESS_REFUSED
    assert (await peer.refusal(Op.TOPIC_PRODUCER, topic="orders", producer=7))[0] == (
        ErrorCode.ACCESS_REFUSED
    )
    writer = await reader(rig, write="orders")
    answer = await produce(writer, 0, [TopicRow(a, b"v")], [run(a, 1)])
    assert answer.status == 0
