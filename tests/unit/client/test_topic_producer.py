"""The producer of topics against a server that answers by script."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest

from convoymq.client import Client, ClientConfig, errors
from convoymq.client.async_topic_producer import AsyncTopicProducer
from convoymq.client.rows import headers_of, routing_keys_of, values_of
from convoymq.client.topic_producer import (
    TopicProducer,
    TopicReceipt,
    producer_number,
)
from convoymq.client.topic_rows import RowBlock, RowChunk, Texts, TopicRow, frame_of_rows
from convoymq.client.topics import TopicPartition, route_of
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.model.columnar import ColumnarError, ErrorCode, Frame, Op
from tests.patience import PATIENCE_S
from tests.unit.client.test_client import CLOSE, SILENCE, Server

ROUTE = {
    "vhost": "/", "topic": "t", "version": 0, "logical": 1, "hash_id": 1, "hash_seed": 0,
    "mode": "strict", "created_ms": 5, "ranges": [[0, 1, 0]],
}  # fmt: skip
NEWER = {**ROUTE, "version": 1, "ranges": [[0, 1, 3]]}


class TopicServer(Server):
    """Stores what it gets, but for what `script` says: one answer for each TOPIC_PRODUCE."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.route: dict[str, Any] = ROUTE
        self.session: Any = {"epoch": 1, "stored": []}
        self.stored: list[tuple[int, bytes]] = []
        """(partition, body)."""
        self.pids: list[int] = []
        super().__init__({})

    def _encoded(self, frame: Frame, answer: Any) -> bytes:
        if frame.op == Op.TOPIC_ROUTE:
            answer = self.route
        elif frame.op == Op.TOPIC_PRODUCER:
            answer = self.session
        elif frame.op == Op.TOPIC_PRODUCE:
            answer = self._produced(frame)
        return super()._encoded(frame, answer)

    def _produced(self, frame: Frame) -> Any:
        fields: dict[str, Any] = frame.map
        bodies = [body or b"" for body in values_of(ColumnFrame(frame.payload))]
        self.pids.append(fields["pid"])
        scripted = self.script.pop(0) if self.script else None
        if callable(scripted):
            scripted = scripted(fields, bodies)
        if scripted is CLOSE:
            raise ConnectionResetError
        if scripted is not None:
            return b"" if scripted is SILENCE else scripted
        ((_, seq, count, _, _),) = fields["runs"]
        last = len(self.stored)
        code = "OK" if seq == last + 1 else "DUPLICATE" if seq + count - 1 <= last else "OUT_OF_SEQ"
        if code == "OK":
            self.stored += [(fields["pid"], body) for body in bodies]
        return runs(code, expected=len(self.stored) + 1)


def runs(code: str, *, expected: int = 0, version: int = 0, pid: int = 3) -> dict[str, Any]:
    targets = [[0, 1, pid]] if version else []
    return {"runs": [[code, -1, 0, expected]], "to_version": version, "targets": targets}


Opened = Callable[..., TopicProducer]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Begins sessions at servers, and ends them."""
    made: list[TopicProducer] = []

    def open_one(*servers: Server, **more: Any) -> TopicProducer:
        config = ClientConfig(tuple(each.address for each in servers), spread=False)
        with Client(config) as client:
            made.append(TopicProducer(client, "t", **more))
        return made[-1]

    yield open_one
    for producer in made:
        producer.close(0.0)


@pytest.fixture
def serve() -> Iterator[Callable[..., TopicServer]]:
    made: list[TopicServer] = []

    def start(*script: Any) -> TopicServer:
        made.append(TopicServer(*script))
        return made[-1]

    yield start
    for server in made:
        server.stop()


def test_messages_are_stored_in_order_with_their_positions(serve: Any, opened: Opened) -> None:
    server = serve()
    server.session = {"epoch": 4, "stored": [[0, 9, b"p1"]]}
    with opened(server, producer_id=5) as producer:
        assert (producer.epoch, producer.last_positions()) == (4, {0: b"p1"})
        assert producer.is_stored(b"k", b"p0")
        assert not producer.is_stored("k", b"p2")
        futures = [producer.send(b"k", b"%d" % i, source_pos=b"q%d" % i) for i in range(9)]
        producer.flush(10.0)
        assert [each.result(0.0) for each in futures] == [TopicReceipt(0, i) for i in range(1, 10)]
        assert producer.last_positions() == {0: b"q8"}
        assert producer.pending == 0
    assert server.stored == [(0, b"%d" % i) for i in range(9)]
    asked = [each.map for each in server.requests if each.op == Op.TOPIC_PRODUCE]
    assert {(each["topic"], each["producer"], each["epoch"]) for each in asked} == {("t", 5, 4)}


def test_a_source_position_that_falls_is_refused_and_nothing_is_sent(
    serve: Any, opened: Opened
) -> None:
    server = serve()
    server.session = {"epoch": 4, "stored": [[0, 9, b"p4"]]}
    with opened(server, producer_id=5) as producer:
        for position in (b"p3", b"p"):
            with pytest.raises(ValueError, match=r"position b'p3?' falls: .* 0 has b'p4'"):
                producer.send(b"k", b"refused", source_pos=position)
        for position in (b"p4", b"p6", b"", b"p6"):
            producer.send(b"k", position, source_pos=position)
        with pytest.raises(ValueError, match="falls"):
            producer.send(b"k", b"refused", source_pos=b"p5")
        producer.flush(PATIENCE_S)
        assert producer.last_positions() == {0: b"p6"}
    assert [body for _, body in server.stored] == [b"p4", b"p6", b"", b"p6"]


def block_of(bodies: list[bytes]) -> RowBlock:
    def texts(values: list[bytes]) -> Texts:
        return Texts([*accumulate(map(len, values), initial=0)], b"".join(values))

    return RowBlock(texts([b"k"] * len(bodies)), texts(bodies))


def test_chunks_are_stored_in_order_and_once(serve: Any, opened: Opened) -> None:
    """Single messages between them; one of them has no answer, and the partition is closed under
    another."""
    server = serve(CLOSE, runs("CLOSED", version=1), runs("NOT_OPEN"))
    server.route = NEWER
    bodies = [b"%d" % number for number in range(30)]
    block = block_of(bodies)
    with opened(server) as producer:
        futures = [producer.send_chunk(0, RowChunk(block, 0, 7), b"p1")]
        futures.append(producer.send(b"k", b"single", source_pos=b"p2"))
        futures += [
            producer.send_chunk(0, RowChunk(block, start, start + 10), b"q%d" % start)
            for start in (10, 20)
        ]
        assert producer.pending == 28
        producer.flush(PATIENCE_S)
        assert [each.result(0.0).seq for each in futures] == [7, 8, 18, 28]
        assert producer.last_positions() == {0: b"q20"}
        assert producer.pending == 0
        for wrong in (RowChunk(block, 3, 3), RowChunk(block, 0, 1001)):
            with pytest.raises(ValueError, match="messages together"):
                producer.send_chunk(0, wrong)
    assert [body for _, body in server.stored] == [*bodies[:7], b"single", *bodies[10:]]


def test_tombstones_stand_in_frames_of_single_messages_and_of_chunks() -> None:
    bodies = [b"1", None, b"", None]
    ends, data = [0, 1, 1, 1, 1], b"1"
    block = RowBlock(Texts([0] * 5, b""), Texts(ends, data, frozenset({1, 3})))
    single = [TopicRow(b"k", body) for body in bodies]
    for rows, expected in (
        (single, bodies),
        ([RowChunk(block, 0, 4)], bodies),
        ([RowChunk(block, 1, 3), RowChunk(block, 3, 4), TopicRow(b"k", None)], [*bodies[1:], None]),
        ([RowChunk(block, 0, 1)], bodies[:1]),
    ):
        assert values_of(ColumnFrame(frame_of_rows(rows))) == expected


def test_what_has_no_answer_is_sent_again_elsewhere(serve: Any, opened: Opened) -> None:
    first, second = serve(CLOSE), serve()
    producer = opened(first, second)
    futures = [producer.send(b"k", b"%d" % i) for i in range(5)]
    assert [each.result(PATIENCE_S).seq for each in futures] == [1, 2, 3, 4, 5]
    assert second.stored == [(0, b"%d" % i) for i in range(5)]


@pytest.mark.parametrize(
    "refusal",
    [
        runs("NOT_OPEN"),
        ColumnarError(ErrorCode.UNAVAILABLE, "nobody leads", {"maybe": True}),
        ColumnarError(ErrorCode.RESOURCE_ALARM, "memory"),
    ],
)
def test_a_refusal_that_ends_is_tried_again(serve: Any, opened: Opened, refusal: Any) -> None:
    server = serve(refusal, refusal)
    assert opened(server).send(b"k", b"v").result(PATIENCE_S).seq == 1
    assert server.stored == [(0, b"v")]


def test_a_closed_partition_leads_to_its_targets(serve: Any, opened: Opened) -> None:
    server = serve(runs("CLOSED", version=1), runs("NOT_OPEN"))
    server.route = ROUTE
    producer = opened(server)
    server.route = NEWER
    producer.send(b"k", b"v").result(PATIENCE_S)
    assert server.pids == [0, 3, 3]
    assert server.stored == [(3, b"v")]


def test_a_wrong_range_asks_for_the_route(serve: Any, opened: Opened) -> None:
    server = serve(runs("WRONG_RANGE"))
    producer = opened(server)
    server.route = NEWER
    producer.send(b"k", b"v").result(PATIENCE_S)
    assert server.stored == [(3, b"v")]


def test_the_message_that_is_refused_fails_with_what_is_behind_it(
    serve: Any, opened: Opened
) -> None:
    def picky(fields: dict[str, Any], bodies: list[bytes]) -> Any:
        if b"bad" in bodies:
            return ColumnarError(ErrorCode.PRECONDITION_FAILED, "row of another kind")
        return None

    def slow(fields: dict[str, Any], bodies: list[bytes]) -> Any:
        time.sleep(0.2)
        return picky(fields, bodies)

    server = serve(slow, *[picky] * 50)
    producer = opened(server)
    first = producer.send(b"k", b"0")
    good = [producer.send(b"k", b"%d" % i) for i in range(1, 4)]
    bad = producer.send(b"k", b"bad")
    behind = producer.send(b"k", b"4")
    for each in (first, *good):
        each.result(PATIENCE_S)
    for each in (bad, behind, producer.send(b"k", b"5")):
        with pytest.raises(errors.PreconditionFailed, match="another kind"):
            each.result(PATIENCE_S)
    assert [body for _, body in server.stored] == [b"0", b"1", b"2", b"3"]
    producer.flush(1.0)


def test_a_partition_that_has_forgotten_is_not_written_to(serve: Any, opened: Opened) -> None:
    server = serve(None, runs("OUT_OF_SEQ", expected=1))
    producer = opened(server)
    producer.send(b"k", b"0").result(PATIENCE_S)
    with pytest.raises(errors.TopicRefused, match="has not what was stored") as raised:
        producer.send(b"k", b"1").result(PATIENCE_S)
    assert raised.value.topic_code == "OUT_OF_SEQ"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (ColumnarError(ErrorCode.NOT_FOUND, "no topic"), errors.NotFound),
        (ColumnarError(ErrorCode.ACCESS_REFUSED, "not you"), errors.AccessRefused),
        (runs("PRODUCER_FENCED"), errors.ProducerFenced),
        ({"runs": []}, errors.ProtocolError),
        ({"runs": [], "to_version": 0, "targets": []}, errors.ProtocolError),
        (runs("NEW_CODE"), errors.ProtocolError),
    ],
)
def test_what_no_other_try_changes_ends_the_producer(
    serve: Any, opened: Opened, answer: Any, kind: type[Exception]
) -> None:
    producer = opened(serve(answer))
    with pytest.raises(kind):
        producer.send(b"k", b"v").result(PATIENCE_S)
    with pytest.raises(kind):
        producer.flush(1.0)
    with pytest.raises(kind):
        producer.send(b"k", b"v")


def test_a_producer_waits_for_room_and_closes_in_time(serve: Any, opened: Opened) -> None:
    producer = opened(serve(*[SILENCE] * 9), pending_max=2)
    futures = [producer.send(b"k", b"v") for _ in range(2)]
    with pytest.raises(errors.Unavailable, match="2 messages have no answer"):
        producer.send(b"k", b"v", timeout=0.05)
    with pytest.raises(errors.Unavailable, match="2 messages have no answer"):
        producer.flush(0.05)
    with pytest.raises(errors.Unavailable, match="closed before"):
        producer.close(0.05)
    for future in futures:
        with pytest.raises(errors.Unavailable, match="is closed"):
            future.result(0.0)


def test_a_message_that_is_too_large_is_not_sent(serve: Any, opened: Opened) -> None:
    server = serve()
    producer = opened(server)
    with pytest.raises(errors.PreconditionFailed, match="too large"):
        producer.send(b"k", bytes(1 << 20)).result(PATIENCE_S)
    assert server.pids == []


async def test_asyncio(serve: Any) -> None:
    server = serve()
    with Client(ClientConfig((server.address,))) as client:
        async with await AsyncTopicProducer.open(client, "t", pending_max=2) as producer:
            futures = [await producer.send(b"k", b"%d" % i) for i in range(6)]
            assert [each.seq for each in await asyncio.gather(*futures)] == [1, 2, 3, 4, 5, 6]
            await producer.flush()
            assert (producer.epoch, producer.pending) == (1, 0)
            assert producer.last_positions() == {}
            assert not producer.is_stored("k", b"p")
    assert len(server.stored) == 6


def test_numbers_of_producers() -> None:
    assert producer_number("importer") == producer_number("importer") != producer_number("other")
    assert producer_number(7) == 7
    for wrong in ("", 0, 1 << 63):
        with pytest.raises(ValueError, match="producer"):
            producer_number(wrong)


def test_rows_of_keys_and_headers() -> None:
    rows = [
        TopicRow("schlüssel".encode(), b"1"),
        TopicRow(b"\xff", b"2", {"n": "x", "m": b"\x00"}),
        TopicRow(b"k" * 256, b""),
    ]
    frame = ColumnFrame(frame_of_rows(rows))
    assert routing_keys_of(frame) == ["schlüssel".encode(), b"", b""]
    assert values_of(frame) == [b"1", b"2", b""]
    assert headers_of(frame) == [
        {},
        {"n": b"x", "m": b"\x00", "x-order-key": b"\xff"},
        {"x-order-key": b"k" * 256},
    ]


def test_routes_of_answers() -> None:
    lines = [[0, 0, 1, "sealed", 0, 1, 4, [], [3]], [3, 0, 1, "open", 1, None, None, [0], []]]
    found = route_of({**NEWER, "partitions": lines})
    assert found.partitions[1] == TopicPartition(3, 0, 1, "open", 1, None, None, (0,), ())
    assert found.route.pid_of(found.lp_of(b"k")) == 3
    for name in ROUTE:
        with pytest.raises(errors.ProtocolError):
            route_of({key: value for key, value in ROUTE.items() if key != name})
    for name, value in (("version", "1"), ("ranges", [[0, 1]]), ("partitions", [[1]])):
        with pytest.raises(errors.ProtocolError):
            route_of({**ROUTE, name: value})
    with pytest.raises(errors.PreconditionFailed, match="hash 2"):
        route_of({**ROUTE, "hash_id": 2})
