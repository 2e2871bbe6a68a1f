"""PRODUCE into real queues: routing, confirms, repeats, flow, refusals that leave nothing."""

from __future__ import annotations

import asyncio
import itertools
import struct
from pathlib import Path
from typing import Any

import pytest

from convoymq.broker.access import AMQP
from convoymq.broker.spans import SpanRow, bound_of
from convoymq.edges.amqp091._spec import Properties
from convoymq.edges.amqp091.codec import ContentHeader, encode_header
from convoymq.edges.columnar import producing
from convoymq.kernels.column_frame import build_frame
from convoymq.kernels.columns import EXCHANGE, HEADERS, PROPERTIES, ROUTING_KEY, VALUE
from convoymq.metadata.access import SHA256, hash_sha256
from convoymq.metadata.commands import PutPermission, PutUser
from convoymq.model.columnar import ErrorCode, Frame, Op
from convoymq.model.tables import Table
from tests.unit.edges.columnar.support import Peer, Rig, values_frame
from tests.unit.queues.fake_cluster import queue_end, until


def texts(values: list[bytes]) -> list[bytes]:
    """Lengths and bytes of a text column."""
    ends = list(itertools.accumulate(map(len, values), initial=0))
    return [struct.pack(f"<{len(ends)}i", *ends), b"".join(values)]


def keyed(rows: list[tuple[str, str, str]]) -> bytes:
    """A frame of (exchange, routing key, value) rows."""
    exchanges, keys, values = ([row[i].encode() for row in rows] for i in range(3))
    buffers = [b"", *texts(values), *texts(exchanges), *texts(keys)]
    return build_frame(VALUE | EXCHANGE | ROUTING_KEY, len(rows), 0, 0, buffers)


def result(answer: Frame) -> tuple[int, int, int]:
    assert answer.status == 0, answer.map
    return answer.map["count"], answer.map["duplicates"], answer.map["unroutable"]


@pytest.mark.parametrize("kind", ["quorum", "classic"])
async def test_rows_are_in_the_queue_when_the_answer_comes(
    rig: Rig, client: Peer, kind: str
) -> None:
    await rig.queue("q", kind)
    frame = values_frame([b"%d" % i for i in range(1000)])
    assert result(await client.ask(Op.PRODUCE, frame, queue="q")) == (1000, 0, 0)
    assert await rig.count("q") == 1000
    assert rig.edge.messages.published == rig.edge.messages.confirmed == 1000
    assert not rig.broker.counters.of(AMQP).published
    assert rig.edge.counters.rows_in == 1000


@pytest.mark.parametrize("compression", ["", "zstd", "lz4"])
async def test_large_frames_are_checked_on_a_thread(
    rig: Rig, client: Peer, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    monkeypatch.setattr(producing, "LARGE_PAYLOAD_BYTES", 1000)
    monkeypatch.setattr(producing, "LARGE_COMPRESSED_BYTES", 100)
    await rig.queue("q")
    buffers = [b"", *texts([b"%d" % i for i in range(2000)])]
    frame = build_frame(VALUE, 2000, 0, 0, buffers, compression)
    assert result(await client.ask(Op.PRODUCE, frame, queue="q")) == (2000, 0, 0)
    assert await rig.count("q") == 2000
    broken = frame[:-1] + bytes((frame[-1] ^ 1,))
    code, _ = await client.refusal(Op.PRODUCE, broken, queue="q")
    assert code == ErrorCode.PRECONDITION_FAILED
    assert await rig.count("q") == 2000


async def test_a_frame_without_rows_is_fine(rig: Rig, client: Peer) -> None:
    await rig.queue("q")
    assert result(await client.ask(Op.PRODUCE, values_frame([]), queue="q")) == (0, 0, 0)


async def test_large_frames_become_many_commands(tmp_path: Path) -> None:
    async with Rig(tmp_path, command_bytes=10_000) as rig:
        await rig.queue("q")
        peer = await rig.client()
        frame = values_frame([bytes(1000)] * 500)
        assert result(await peer.ask(Op.PRODUCE, frame, queue="q")) == (500, 0, 0)
        assert await rig.count("q") == 500
        client = next(iter(peer.connection.requests._producing._clients.values()))
        assert client.target.seq > 40


async def test_rows_are_routed_by_their_keys(rig: Rig, client: Peer) -> None:
    for name in ("a", "b", "both"):
        await rig.queue(name)
    broker = rig.broker
    flags: dict[str, Any] = {"durable": True, "auto_delete": False, "internal": False}
    await broker.declarations.declare_exchange("/", "x", "topic", **flags)
    await broker.declarations.bind("/", "x", queue_end("a"), "a.*")
    await broker.declarations.bind("/", "x", queue_end("b"), "b.*")
    await broker.declarations.bind("/", "x", queue_end("both"), "#.both")
    rows = [("x", "a.1", "1"), ("x", "a.2", "2"), ("x", "b.both", "3"), ("x", "none", "4")]
    assert result(await client.ask(Op.PRODUCE, keyed(rows), exchange="x")) == (4, 0, 1)
    assert [await rig.count(name) for name in ("a", "b", "both")] == [2, 1, 1]
    assert rig.edge.messages.dropped_unroutable == 1
    published = await rig.broker.cluster.published()
    assert published["/", "x"] == {"in": 4, "out": {"a": 2, "b": 1, "both": 1}}
    # One key for all rows, and the exchange of each row.
    answer = await client.ask(Op.PRODUCE, keyed(rows), exchange="x", routing_key="a.both")
    assert result(answer) == (4, 0, 0)
    assert [await rig.count(name) for name in ("a", "both")] == [6, 5]
    rows = [("", "a", "1"), ("x", "b.1", "2"), ("", "b", "3")]
    assert result(await client.ask(Op.PRODUCE, keyed(rows))) == (3, 0, 0)
    assert [await rig.count(name) for name in ("a", "b")] == [7, 3]


async def test_rows_may_not_change_their_targets_all_the_time(
    rig: Rig, client: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producing, "SEGMENTS_MAX", 4)
    monkeypatch.setattr(producing, "ROUTED_ROWS_MAX", 8)
    for name in ("a", "b"):
        await rig.queue(name)
    rows = [("", "ab"[i % 2], "v") for i in range(9)]
    code, text = await client.refusal(Op.PRODUCE, keyed(rows[:5]), exchange="")
    assert code == ErrorCode.PRECONDITION_FAILED
    assert "sort them" in text
    assert result(await client.ask(Op.PRODUCE, keyed(rows[:4]), exchange="")) == (4, 0, 0)
    assert result(await client.ask(Op.PRODUCE, keyed(sorted(rows[:8])), exchange="")) == (8, 0, 0)
    code, text = await client.refusal(Op.PRODUCE, keyed(rows), exchange="")
    assert "9 rows" in text


async def test_headers_exchanges_look_at_each_row(rig: Rig, client: Peer) -> None:
    await rig.queue("red")
    await rig.queue("blue")
    flags: dict[str, Any] = {"durable": True, "auto_delete": False, "internal": False}
    await rig.broker.declarations.declare_exchange("/", "h", "headers", **flags)
    for name in ("red", "blue"):
        await rig.broker.declarations.bind("/", "h", queue_end(name), "", Table.of({"color": name}))
    colors = [b"red", b"blue", b"red", b"green"]
    headers = [b"", struct.pack("<5i", *range(5)), *texts([b"color"] * 4), b"", *texts(colors)]
    buffers = [b"", *texts([b"v"] * 4), *headers]
    frame = build_frame(VALUE | HEADERS, 4, 0, 0, buffers)
    answer = await client.ask(Op.PRODUCE, frame, exchange="h", routing_key="")
    assert result(answer) == (4, 0, 1)
    assert [await rig.count(name) for name in ("red", "blue")] == [2, 1]


@pytest.mark.parametrize("asked", [{"expiration": "100"}, {"priority": 5}, {"priority": 4}])
@pytest.mark.parametrize("kind", ["quorum", "stream", "classic"])
async def test_what_a_replicated_queue_does_not_serve_is_refused_by_name(
    rig: Rig, client: Peer, kind: str, asked: dict[str, Any]
) -> None:
    await rig.queue("q", kind)
    headers = [
        encode_header(ContentHeader(body_size=1, properties=Properties(**found)))
        for found in ({}, {"priority": 0}, asked)
    ]
    buffers = [b"", *texts([b"a", b"b", b"c"]), *texts(headers)]
    frame = build_frame(VALUE | PROPERTIES, 3, 0, 0, buffers)
    if kind == "classic" or asked == {"priority": 4}:
        assert result(await client.ask(Op.PRODUCE, frame, queue="q")) == (3, 0, 0)
        return
    code, text = await client.refusal(Op.PRODUCE, frame, queue="q")
    assert code == ErrorCode.PRECONDITION_FAILED
    assert f"message property '{next(iter(asked))}' is not served by {kind} queues" in text
    assert await rig.count("q") == 0


async def test_repeats_of_a_producer_are_dropped_and_told(rig: Rig, client: Peer) -> None:
    await rig.queue("q")
    frame = values_frame([b"a", b"b", b"c"])

    async def produce(sequence: int) -> tuple[int, int, int]:
        return result(
            await client.ask(Op.PRODUCE, frame, queue="q", producer="p", sequence=sequence)
        )

    assert await produce(0) == (3, 0, 0)
    assert await produce(0) == (3, 3, 0)
    assert await produce(1) == (3, 2, 0)
    assert await produce(100) == (3, 0, 0)
    assert await rig.count("q") == 7


async def test_a_producer_s_rows_keep_their_numbers_over_targets_and_commands(
    tmp_path: Path,
) -> None:
    async with Rig(tmp_path, command_bytes=1) as rig:
        for name in ("a", "b"):
            await rig.queue(name)
        peer = await rig.client()
        rows = [("", "ab"[i % 2], str(i)) for i in range(20)]
        fields = {"exchange": "", "producer": "p", "sequence": 5}
        assert result(await peer.ask(Op.PRODUCE, keyed(rows), **fields)) == (20, 0, 0)
        other = await rig.client()
        assert result(await other.ask(Op.PRODUCE, keyed(rows), **fields)) == (20, 20, 0)
        assert [await rig.count(name) for name in ("a", "b")] == [10, 10]


async def test_rows_with_a_digest_are_known_by_it_and_not_by_their_numbers(tmp_path: Path) -> None:
    async with Rig(tmp_path, command_bytes=1) as rig:
        for name in ("a", "b"):
            await rig.queue(name)
        one = keyed([("", "ab"[i % 2], str(i)) for i in range(20)])
        two = keyed([("", "ab"[i % 2], str(19 - i)) for i in range(20)])
        fields = {"exchange": "", "producer": "p", "sequence": 5}
        for frame, digest, duplicates in (
            (one, b"1" * 16, 0),
            (one, b"1" * 16, 20),
            (two, b"2" * 16, 0),
            (one, b"1" * 16, 20),
        ):
            peer = await rig.client()
            answer = await peer.ask(Op.PRODUCE, frame, digest=digest, **fields)
            assert result(answer) == (20, duplicates, 0)
        assert [await rig.count(name) for name in ("a", "b")] == [20, 20]


async def test_classic_queues_cannot_tell_repeats(rig: Rig, client: Peer) -> None:
    await rig.queue("c", "classic")
    frame = values_frame([b"a"])
    for fields in ({"queue": "c"}, {"exchange": "", "routing_key": "c"}):
        code, text = await client.refusal(Op.PRODUCE, frame, producer="p", **fields)
        assert code == ErrorCode.PRECONDITION_FAILED
        assert "classic queue 'c'" in text
    assert await rig.count("c") == 0


async def test_one_request_of_a_producer_at_a_time(rig: Rig, client: Peer) -> None:
    await rig.queue("q")
    rig.broker.alarms.set("disk", True)
    frame = values_frame([b"a"])
    first = client.send(Op.PRODUCE, {"queue": "q", "producer": "p"}, frame)
    second = client.send(Op.PRODUCE, {"queue": "q", "producer": "p", "sequence": 1}, frame)
    await until(lambda: client.answer_to(second) is not None)
    refused = client.answer_to(second)
    assert refused is not None
    assert refused.status == ErrorCode.PRECONDITION_FAILED
    assert "under way" in refused.map["text"]
    rig.broker.alarms.set("disk", False)
    await until(lambda: client.answer_to(first) is not None)


async def test_requests_of_a_connection_are_published_in_their_order(
    rig: Rig, client: Peer
) -> None:
    await rig.queue("q")
    big = values_frame([b"%05d" % i * 100 for i in range(3000)])
    numbers = [client.send(Op.PRODUCE, {"queue": "q"}, big)]
    numbers += [client.send(Op.PRODUCE, {"queue": "q"}, values_frame([b"small"])) for _ in range(3)]
    await until(lambda: all(client.answer_to(number) for number in numbers))
    group = rig.cluster.groups[1]
    sizes = [entry.size for entry in group.entries]
    assert max(sizes[-1:]) < 1000, "the small ones come last"


async def test_an_alarm_makes_publishers_wait_and_then_says_so(tmp_path: Path) -> None:
    async with Rig(tmp_path, alarm_wait_s=0.03) as rig:
        await rig.queue("q")
        peer = await rig.client()
        rig.broker.alarms.set("memory", True)
        code, text = await peer.refusal(Op.PRODUCE, values_frame([b"a"]), queue="q")
        assert code == ErrorCode.RESOURCE_ALARM
        assert "memory" in text
        rig.broker.alarms.set("memory", False)
        assert result(await peer.ask(Op.PRODUCE, values_frame([b"a"]), queue="q")) == (1, 0, 0)


async def test_a_queue_without_leader_is_given_up_in_time(tmp_path: Path) -> None:
    async with Rig(tmp_path, request_timeout_ms=50) as rig:
        await rig.queue("q")
        peer = await rig.client()
        rig.cluster.has_leaders = False
        answer = await peer.ask(Op.PRODUCE, values_frame([b"a"]), queue="q")
        assert answer.status == ErrorCode.UNAVAILABLE
        assert answer.map["maybe"] is True
        rig.cluster.has_leaders = True
        rig.cluster.wake()
        assert result(await peer.ask(Op.PRODUCE, values_frame([b"b"]), queue="q")) == (1, 0, 0)
        assert await rig.count("q") == 2


class Rows:
    """Keeps spans."""

    below = bound_of(1)

    def __init__(self) -> None:
        self.rows: list[SpanRow] = []
        self.add = self.rows.append


async def test_spans_of_rows_end_with_the_answer(tmp_path: Path) -> None:
    context = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    ends = struct.pack("<2i", 0, 1)
    headers = [b"", ends, *texts([b"traceparent"]), b"", *texts([context])]
    frame = build_frame(VALUE | HEADERS, 1, 0, 0, [b"", *texts([b"a"]), *headers])
    async with Rig(tmp_path, request_timeout_ms=50) as rig:
        spans = Rows()
        rig.broker.spans = spans  # type: ignore[assignment]
        await rig.queue("q")
        peer = await rig.client()
        assert result(await peer.ask(Op.PRODUCE, frame, queue="q")) == (1, 0, 0)
        rig.cluster.has_leaders = False
        await peer.refusal(Op.PRODUCE, frame, queue="q")
        # What is only checked, or refused as a whole, was not published.
        await peer.ask(Op.CHECK_PRODUCE, frame, queue="q")
        await peer.refusal(Op.PRODUCE, frame, queue="none")
        kinds = {(row.kind.operation, row.kind.protocol) for row in spans.rows}
        assert kinds == {("publish", "columnar")}
        assert [row.failed for row in spans.rows] == [False, True]
        assert {row.routing_key for row in spans.rows} == {b"q"}


async def test_a_slow_queue_holds_the_publisher_back(rig: Rig, client: Peer) -> None:
    await rig.queue("q")
    rig.cluster.has_leaders = False
    frame = values_frame([bytes(100_000)] * 300)
    number = client.send(Op.PRODUCE, {"queue": "q"}, frame)
    producing = client.connection.requests._producing

    def pending() -> int:
        return sum(each.target.pending_bytes for each in producing._clients.values())

    await until(lambda: pending() > 16 << 20)
    for _ in range(20):
        await asyncio.sleep(0)
    assert pending() < 18 << 20
    assert client.answer_to(number) is None
    rig.cluster.has_leaders = True
    rig.cluster.wake()
    await until(lambda: client.answer_to(number) is not None)
    assert await rig.count("q") == 300


@pytest.mark.parametrize(
    ("fields", "write", "allowed"),
    [
        ({"queue": "q"}, "^q$", True),
        ({"queue": "q"}, "^amq.default$", False),
        ({"exchange": "", "routing_key": "q"}, "^amq.default$", True),
        ({"exchange": "", "routing_key": "q"}, "^q$", False),
        ({"exchange": "amq.topic", "routing_key": "q"}, "^amq.topic$", True),
        ({"exchange": "amq.topic", "routing_key": "q"}, "^q$", False),
    ],
)
async def test_producing_needs_the_permission_to_write(
    rig: Rig, fields: dict[str, Any], write: str, allowed: bool
) -> None:
    await rig.queue("q")
    store = rig.cluster.nodes[1].store
    await store.execute(PutUser(name="u", password_hash=hash_sha256(b"u"), algorithm=SHA256))
    await store.execute(PutPermission(user="u", vhost="/", configure="", write=write, read=".*"))
    peer = rig.peer()
    assert (await peer.log_in("u", "u")).status == 0
    answer = await peer.ask(Op.PRODUCE, values_frame([b"a"]), **fields)
    assert answer.status == (0 if allowed else ErrorCode.ACCESS_REFUSED), answer.map


@pytest.mark.parametrize(
    ("payload", "fields", "code", "what"),
    [
        (b"", {"queue": "q"}, ErrorCode.PRECONDITION_FAILED, "columnar frame"),
        (b"x" * 64, {"queue": "q"}, ErrorCode.PRECONDITION_FAILED, "columnar frame"),
        (values_frame([b"a"]), {}, ErrorCode.PRECONDITION_FAILED, "exchange"),
        (values_frame([b"a"]), {"exchange": "x"}, ErrorCode.PRECONDITION_FAILED, "routing_key"),
        (
            values_frame([b"a"]),
            {"exchange": "x", "routing_key": "k"},
            ErrorCode.NOT_FOUND,
            "exchange 'x'",
        ),
        (values_frame([b"a"]), {"queue": "nix"}, ErrorCode.NOT_FOUND, "nix"),
        (
            values_frame([b"a"]),
            {"queue": "q", "stream": "s"},
            ErrorCode.PRECONDITION_FAILED,
            "exclude",
        ),
        (
            values_frame([b"a"]),
            {"queue": "q", "sequence": -1},
            ErrorCode.PRECONDITION_FAILED,
            "sequence",
        ),
        (
            values_frame([b"a"]),
            {"queue": "q", "producer": "ü" * 200},
            ErrorCode.PRECONDITION_FAILED,
            "producer",
        ),
        (
            values_frame([b"a"]),
            {"queue": "q", "producer": "p", "digest": b"short"},
            ErrorCode.PRECONDITION_FAILED,
            "digest",
        ),
        (
            values_frame([b"a"]),
            {"queue": "q", "digest": bytes(16)},
            ErrorCode.PRECONDITION_FAILED,
            "a digest needs a producer",
        ),
        (
            values_frame([bytes(1 << 12)]),
            {"queue": "q"},
            ErrorCode.PRECONDITION_FAILED,
            "message size 4096",
        ),
    ],
)
async def test_refused_frames_leave_nothing_behind(
    tmp_path: Path, payload: bytes, fields: dict[str, Any], code: ErrorCode, what: str
) -> None:
    async with Rig(tmp_path, message_size_max=4095) as rig:
        await rig.queue("q")
        peer = await rig.client()
        answer = await peer.ask(Op.PRODUCE, payload, **fields)
        assert answer.status == code, answer.map
        assert what in answer.map["text"]
        assert "maybe" not in answer.map
        assert await rig.count("q") == 0
        assert rig.edge.messages.published == 0
        assert result(await peer.ask(Op.PRODUCE, values_frame([b"a"]), queue="q")) == (1, 0, 0)


async def test_a_row_that_cannot_be_a_message_refuses_the_whole_frame(
    rig: Rig, client: Peer
) -> None:
    await rig.queue("q")
    rows = [("", "q", "fine")] * 100 + [("", "\x00" * 300, "key too long")]
    code, _ = await client.refusal(Op.PRODUCE, keyed(rows), exchange="")
    assert code == ErrorCode.PRECONDITION_FAILED
    assert await rig.count("q") == 0


async def test_a_connection_that_goes_closes_its_sessions(rig: Rig, client: Peer) -> None:
    await rig.queue("q")
    await client.ask(Op.PRODUCE, values_frame([b"a"]), queue="q")
    assert len(client.connection.sessions()) == 1
    assert set(client.connection.sessions()) <= set(rig.broker.live_sessions())
    client.transport.close()
    await until(lambda: not rig.edge.connections)
    assert client.connection.sessions() == []


async def test_a_mandatory_frame_is_published_whole_or_not_at_all(rig: Rig, client: Peer) -> None:
    """Rows of a refused frame may be sent again: nothing of it counts for its producer."""
    await rig.queue("q")
    rows = [("", "q", "1"), ("", "none", "2"), ("", "q", "3")]
    named: dict[str, Any] = {"producer": "p", "sequence": 0, "mandatory": True}
    code, text = await client.refusal(Op.PRODUCE, keyed(rows), **named)
    assert code == ErrorCode.PRECONDITION_FAILED
    assert "exchange '' has no queue for routing key 'none'; nothing was published" in text
    assert await rig.count("q") == 0
    await rig.queue("none")
    assert result(await client.ask(Op.PRODUCE, keyed(rows), **named)) == (3, 0, 0)
    assert [await rig.count(name) for name in ("q", "none")] == [2, 1]


async def test_a_check_says_what_produce_would_say_and_publishes_nothing(
    rig: Rig, client: Peer
) -> None:
    await rig.queue("q")
    await rig.queue("plain", "classic")
    rows = [("", "q", "1"), ("", "none", "2")]
    answer = await client.ask(Op.CHECK_PRODUCE, keyed(rows), producer="p")
    assert (answer.status, answer.map["count"], answer.map["unroutable"]) == (0, 2, 1)
    for wanted, given, named in (
        ("no queue for routing key 'none'", rows, {"mandatory": True}),
        ("no exchange 'gone'", [("gone", "q", "1")], {}),
        ("cannot tell a producer's repeats", [("", "plain", "1")], {"producer": "p"}),
    ):
        _, text = await client.refusal(Op.CHECK_PRODUCE, keyed(given), **named)
        assert wanted in text
    assert [await rig.count(name) for name in ("q", "plain")] == [0, 0]
    assert rig.edge.messages.published == 0
    assert result(await client.ask(Op.PRODUCE, keyed(rows[:1]), producer="p")) == (1, 0, 0)
