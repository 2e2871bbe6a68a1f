"""The columnar protocol on the real cluster, through the client library: streams, permissions, TLS,
lost leaders, slow and many clients."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pika.exceptions  # type: ignore[import-untyped]
import pytest
from benchmarks.systems import connect

from convoymq.client import Client, ClientConfig, errors
from convoymq.client.rows import frame_of, headers_of, values_of
from convoymq.kernels.column_frame import ColumnFrame, build_frame
from convoymq.kernels.columns import HEADERS, KEY, OFFSET, ROUTING_KEY, TIMESTAMP, VALUE
from convoymq.model.columnar import PREFACE, FrameReader, Op, encode_frame
from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.helpers import eventually
from tests.patience import PATIENCE_S, TEST_LIMIT_S

STREAM = {"x-queue-type": "stream"}
QUORUM = {"x-queue-type": "quorum"}


def server(cluster: Cluster, node: int) -> str:
    parts = urlsplit(cluster.uris[node])
    return f"{parts.hostname}:{parts.port}"


def config(cluster: Cluster, *nodes: int, **more: Any) -> ClientConfig:
    servers = tuple(server(cluster, node) for node in nodes or range(len(cluster.uris)))
    return ClientConfig(servers, **{"timeout": PATIENCE_S, **more})


def texts(values: Sequence[bytes]) -> list[bytes]:
    """Lengths and bytes of a text column."""
    ends = list(itertools.accumulate(map(len, values), initial=0))
    return [struct.pack(f"<{len(ends)}i", *ends), b"".join(values)]


def values_frame(values: Sequence[bytes]) -> bytes:
    return build_frame(VALUE, len(values), 0, len(values), [b"", *texts(values)])


def texts_of(frame: ColumnFrame, column: int) -> list[bytes]:
    ends, data = frame.buffers(column)[-2:]
    bounds = ends.cast("i") if len(ends) else []
    return [bytes(data[bounds[i] : bounds[i + 1]]) for i in range(frame.rows)]


def read_all(client: Client, stream: str, end: int, **more: Any) -> list[bytes]:
    """All values of a stream up to an offset."""
    found: list[bytes] = []
    while len(found) < end:
        result = client.fetch(stream, len(found), end=end, columns=VALUE, **more)
        assert result.frame.rows, "an answer without rows before the end"
        assert result.frame.base == len(found)
        found += texts_of(result.frame, VALUE)
        assert result.next == len(found)
    return found


@pytest.fixture(autouse=True)
def only_here(cluster: Cluster) -> None:
    if cluster.system != "convoy":
        pytest.skip("ConvoyMQ's own protocol")


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(config(cluster)) as made:
        yield made


@pytest.fixture
def declared(cluster: Cluster, names: Names) -> Callable[..., str]:
    """Declares a queue and returns its name."""

    def declare(name: str = "s", **arguments: Any) -> str:
        full = names.queue(name)
        connection = connect(cluster.uris[0])
        connection.channel().queue_declare(full, durable=True, arguments=arguments or STREAM)
        connection.close()
        return full

    return declare


def test_what_is_produced_is_fetched_from_every_node(
    cluster: Cluster, client: Client, declared: Callable[..., str]
) -> None:
    stream = declared()
    values = [b"%06d" % i * 20 for i in range(30_000)]
    for at in range(0, len(values), 10_000):
        result = client.produce(values_frame(values[at : at + 10_000]), stream=stream)
        assert (result.count, result.duplicates, result.unroutable) == (10_000, 0, 0)
    for node in range(3):
        with Client(config(cluster, node)) as one:
            assert read_all(one, stream, len(values)) == values
            assert read_all(one, stream, len(values), compression="zstd") == values
            (row,) = one.metadata([stream])
            assert (row.type, row.first, row.next) == ("stream", 0, len(values))
            assert len(row.members) == 3
            assert row.leader in row.members


def test_a_stream_of_one_replica_is_served_by_every_node(
    cluster: Cluster, client: Client, declared: Callable[..., str]
) -> None:
    stream = declared("one", **STREAM, **{"x-initial-cluster-size": 1})
    values = [b"%d" % i for i in range(500)]
    client.produce(values_frame(values), stream=stream)
    for node in range(3):
        with Client(config(cluster, node)) as one:
            (row,) = one.metadata([stream])
            assert (row.first, row.next) == (0, 500)
            assert read_all(one, stream, len(values)) == values
            assert one.offsets([(stream, "latest", None)]) == [(500, None)]


def test_rows_keep_key_headers_timestamp_and_what_amqp_published(
    client: Client, channel: Any, declared: Callable[..., str]
) -> None:
    stream = declared()
    before_ms = int(time.time() * 1000) - 5
    buffers = [
        *(b"\x01", *texts([b"k", b""])),
        *(b"", *texts([b"one", b"two"])),
        *(b"", struct.pack("<3i", 0, 1, 2), *texts([b"h", b"h"]), b"", *texts([b"x", b"y"])),
    ]
    client.produce(build_frame(KEY | VALUE | HEADERS, 2, 0, 2, buffers), stream=stream)
    channel.confirm_delivery()
    channel.basic_publish("", stream, b"three", pika.BasicProperties(headers={"n": 3}))
    result = client.fetch(stream, 0, end=3, columns=OFFSET | TIMESTAMP | KEY | VALUE | HEADERS)
    frame = result.frame
    assert texts_of(frame, VALUE) == [b"one", b"two", b"three"]
    assert texts_of(frame, KEY) == [b"k", b"", b""]
    assert frame.buffers(KEY)[0][0] & 7 == 1, "the second and third have no key"
    assert texts_of_headers(frame) == [(b"h", b"x"), (b"h", b"y"), (b"n", b"3")]
    assert list(frame.offsets()) == [0, 1, 2]
    for micros in frame.buffers(TIMESTAMP)[0].cast("q"):
        assert before_ms * 1000 <= micros <= (time.time() + 5) * 1_000_000
    # AMQP consumers see what was produced, too.
    channel.basic_qos(prefetch_count=10)
    seen = []
    for method, properties, body in channel.consume(
        stream, arguments={"x-stream-offset": "first"}, inactivity_timeout=PATIENCE_S
    ):
        assert method is not None
        seen.append((body, (properties.headers or {}).get("h")))
        channel.basic_ack(method.delivery_tag)
        if len(seen) == 3:
            break
    channel.cancel()
    assert seen == [(b"one", "x"), (b"two", "y"), (b"three", None)]


def test_a_tombstone_is_null_in_columns_and_an_empty_body_with_a_header_in_amqp(
    client: Client, channel: Any, declared: Callable[..., str]
) -> None:
    stream = declared()
    client.produce(frame_of([b"one", None, b""]), stream=stream)
    channel.confirm_delivery()
    for headers in ({"x-tombstone": True, "n": 3}, {"x-tombstone": "true"}):
        channel.basic_publish("", stream, b"", pika.BasicProperties(headers=headers))
    frame = client.fetch(stream, 0, end=5, columns=VALUE | HEADERS).frame
    assert values_of(frame) == [b"one", None, b"", None, b""]
    assert headers_of(frame) == [{}, {}, {}, {"n": b"3"}, {"x-tombstone": b"true"}]
    channel.basic_qos(prefetch_count=10)
    seen = []
    for method, properties, body in channel.consume(
        stream, arguments={"x-stream-offset": "first"}, inactivity_timeout=PATIENCE_S
    ):
        assert method is not None
        seen.append((body, (properties.headers or {}).get("x-tombstone")))
        channel.basic_ack(method.delivery_tag)
        if len(seen) == 5:
            break
    channel.cancel()
    assert seen == [(b"one", None), (b"", True), (b"", None), (b"", True), (b"", "true")]


def texts_of_headers(frame: ColumnFrame) -> list[tuple[bytes, bytes]]:
    """(name, text) of all headers of all rows."""
    _, lists, name_ends, names, _, text_ends, found = frame.buffers(HEADERS)
    ends, bounds = name_ends.cast("i"), text_ends.cast("i")
    count = lists.cast("i")[frame.rows]
    return [
        (bytes(names[ends[i] : ends[i + 1]]), bytes(found[bounds[i] : bounds[i + 1]]))
        for i in range(count)
    ]


def test_offsets_by_name_and_time(client: Client, declared: Callable[..., str]) -> None:
    stream, empty = declared(), declared("empty")
    client.produce(values_frame([b"a"] * 10), stream=stream)
    time.sleep(0.02)
    middle_ms = int(time.time() * 1000)
    time.sleep(0.02)
    client.produce(values_frame([b"b"] * 10), stream=stream)
    later_ms = int(time.time() * 1000) + 3_600_000
    queries = [
        (stream, "earliest", None),
        (stream, "latest", None),
        (stream, "timestamp", middle_ms),
        (stream, "timestamp", later_ms),
        (stream, "timestamp", 0),
        (empty, "latest", None),
        (empty, "timestamp", 0),
    ]
    found = client.offsets(queries)
    assert [row[0] for row in found] == [0, 20, 10, None, 0, 0, None]
    assert found[2][1] is not None
    assert found[2][1] >= middle_ms


def test_fetch_waits_for_the_next_message(client: Client, declared: Callable[..., str]) -> None:
    stream = declared()
    other = Client(client.config)
    writer = threading.Timer(0.3, lambda: other.produce(values_frame([b"late"]), stream=stream))
    writer.start()
    result = client.fetch(stream, 0, wait_ms=20_000)
    assert texts_of(result.frame, VALUE) == [b"late"]
    writer.join()
    other.close()
    empty = client.fetch(stream, 1, wait_ms=10)
    assert (empty.frame.rows, empty.next, empty.high) == (0, 1, 1)


def test_stored_offsets_are_seen_by_every_node(
    cluster: Cluster, declared: Callable[..., str]
) -> None:
    stream = declared()
    with closing(Client(config(cluster, 0))) as one, closing(Client(config(cluster, 2))) as other:
        assert other.query_offset(stream, "c") is None
        one.store_offset(stream, "c", 41)
        assert other.query_offset(stream, "c") == 41


def test_rows_are_routed_as_published_messages_are(
    client: Client, channel: Any, names: Names, declared: Callable[..., str]
) -> None:
    stream, queue = declared(), declared("q", **QUORUM)
    exchange = names.exchange()
    channel.exchange_declare(exchange, "direct")
    channel.queue_bind(stream, exchange, "to.stream")
    channel.queue_bind(queue, exchange, "to.queue")
    keys = [b"to.stream", b"to.queue", b"nowhere", b"to.queue"]
    buffers = [b"", *texts([b"1", b"2", b"3", b"4"]), *texts(keys)]
    frame = build_frame(VALUE | ROUTING_KEY, 4, 0, 4, buffers)
    result = client.produce(frame, exchange=exchange)
    assert (result.count, result.unroutable) == (4, 1)
    assert read_all(client, stream, 1) == [b"1"]
    assert [channel.basic_get(queue, auto_ack=True)[2] for _ in range(2)] == [b"2", b"4"]


def test_repeats_of_a_producer_are_dropped_on_whatever_node(
    cluster: Cluster, declared: Callable[..., str]
) -> None:
    stream = declared()
    frame = values_frame([b"%d" % i for i in range(100)])
    for node in range(3):
        with Client(config(cluster, node)) as one:
            result = one.produce(frame, stream=stream, producer="p", sequence=10)
            assert result.duplicates == (100 if node else 0)
            assert one.offsets([(stream, "latest", None)])[0][0] == 100


def test_what_is_not_there_is_told_with_names_near(
    client: Client, declared: Callable[..., str]
) -> None:
    stream = declared()
    with pytest.raises(errors.NotFound) as refused:
        client.fetch(stream + "x", 0)
    assert stream in refused.value.near
    assert stream in str(refused.value)
    with pytest.raises(errors.NotFound):
        client.produce(values_frame([b"a"]), exchange="no such exchange", routing_key="k")
    assert client.metadata([stream + "x"]) == []


def test_an_offset_that_is_not_kept_says_what_is(
    client: Client, declared: Callable[..., str]
) -> None:
    stream = declared(
        **STREAM,
        **{"x-max-length-bytes": 100_000, "x-stream-max-segment-size-bytes": 50_000},
    )
    for _ in range(60):
        client.produce(values_frame([bytes(1000)] * 10), stream=stream)
    # The replica that answers may be behind; it waits for what it is asked for.
    assert client.fetch(stream, 599, end=600).next == 600
    first = client.offsets([(stream, "earliest", None)])[0][0]
    assert first
    with pytest.raises(errors.OffsetOutOfRange) as refused:
        client.fetch(stream, 0)
    assert refused.value.first == first
    assert refused.value.high == 600
    assert client.fetch(stream, first).frame.base == first


def test_a_classic_queue_and_a_quorum_queue_are_no_streams(
    client: Client, declared: Callable[..., str]
) -> None:
    for kind in ("quorum", "classic"):
        queue = declared(kind, **{"x-queue-type": kind})
        with pytest.raises(errors.PreconditionFailed, match=f"type {kind}"):
            client.fetch(queue, 0)


# --- queues -------------------------------------------------------------------------------------


def test_a_queue_is_reserved_read_and_settled_through_any_node(
    cluster: Cluster, client: Client, channel: Any, declared: Callable[..., str]
) -> None:
    queue = declared("q", **QUORUM)
    values = [b"%04d" % i for i in range(1000)]
    client.produce(values_frame(values), queue=queue)
    with closing(Client(config(cluster, 0))) as one, closing(Client(config(cluster, 1))) as two:
        opened = one.reservation(queue, "open", reservation="x", owner="me", ttl_ms=60_000)
        known = {
            "reservation": "x",
            "epoch": opened["epoch"],
            "fencing_token": opened["fencing_token"],
        }
        taken = two.reservation(queue, "take", **known, max=600, after=0)
        assert (taken["first"], taken["next"]) == (0, 600)
        for reader in (one, two):
            for _ in range(2):
                found: list[bytes] = []
                while len(found) < 600:
                    result = reader.reservation_fetch(
                        queue, "x", opened["epoch"], len(found), end=600, max_rows=250
                    )
                    found += texts_of(result.frame, VALUE)
                assert found == values[:600]
        two.reservation(queue, "settle", **known, upto=400)
        with pytest.raises(errors.ReservationGone):
            one.reservation_fetch(queue, "x", opened["epoch"], 0, end=600)
        one.reservation(queue, "close", **known, failed=False)
        with pytest.raises(errors.ReservationGone) as gone:
            two.reservation(queue, "take", **known, max=1, after=400)
        assert gone.value.reason == "no_reservation"
    left = [channel.basic_get(queue, auto_ack=True)[2] for _ in range(600)]
    assert sorted(left) == values[400:]
    assert channel.basic_get(queue)[0] is None


def browse_all(client: Client, queue: str) -> list[bytes]:
    found: list[bytes] = []
    cursor = None
    while True:
        result, cursor = client.browse(queue, cursor, max_rows=300)
        found += texts_of(result.frame, VALUE)
        if cursor is None:
            return found


def test_browsing_takes_nothing(
    cluster: Cluster, client: Client, channel: Any, declared: Callable[..., str]
) -> None:
    queue = declared("q", **QUORUM)
    values = [b"%04d" % i for i in range(700)]
    client.produce(values_frame(values), queue=queue)
    for node in range(3):
        with Client(config(cluster, node)) as one:
            # What a node shows is its own replica, which may be a moment behind.
            while (found := browse_all(one, queue)) != values:
                assert found == values[: len(found)]
    assert channel.queue_declare(queue, passive=True).method.message_count == 700


# --- who may what -----------------------------------------------------------------------------


@pytest.fixture
def user(cluster: Cluster, names: Names) -> Iterator[str]:
    """A user that may only read and write what begins with `mine`."""
    name = "columnar-user"
    cluster.add_user(name, configure="", write="^mine|^amq.topic$", read="^mine")
    yield name
    cluster.delete_user(name)


def test_permissions_are_those_of_amqp(
    cluster: Cluster, user: str, declared: Callable[..., str], channel: Any
) -> None:
    theirs = declared()
    channel.queue_declare("mine.stream", durable=True, arguments=STREAM)
    frame = values_frame([b"a"])
    try:
        with Client(config(cluster, user=user, password=user)) as one:
            assert [row.name for row in one.metadata()] == ["mine.stream"]
            assert one.produce(frame, stream="mine.stream").count == 1
            assert one.fetch("mine.stream", 0, end=1).frame.rows == 1
            for refused in (
                lambda: one.fetch(theirs, 0),
                lambda: one.offsets([(theirs, "latest", None)]),
                lambda: one.query_offset(theirs, "c"),
                lambda: one.produce(frame, stream=theirs),
                lambda: one.produce(frame, exchange="", routing_key="mine.stream"),
                lambda: one.produce(frame, exchange="amq.direct", routing_key="k"),
            ):
                with pytest.raises(errors.AccessRefused, match=user):
                    refused()
            assert one.produce(frame, exchange="amq.topic", routing_key="k").unroutable == 1
    finally:
        channel.queue_delete("mine.stream")


@pytest.mark.parametrize(
    "wrong", [{"password": "wrong"}, {"user": "nobody"}, {"vhost": "/nowhere"}]
)
def test_a_wrong_login_is_refused_at_once(cluster: Cluster, wrong: dict[str, str]) -> None:
    # It is no reason to try again: a client that does would go on for longer than a test may.
    patient = config(cluster, timeout=2.0 * TEST_LIMIT_S, **wrong)
    with Client(patient) as one, pytest.raises(errors.AccessRefused) as refused:
        one.metadata()
    assert "wrong" not in str(refused.value)


# --- what goes wrong ----------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_named_when_time_is_over(cluster: Cluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
        with Client(ClientConfig((nowhere,), timeout=0.5)) as one:
            with pytest.raises(errors.Unavailable) as refused:
                one.metadata()
            assert nowhere in str(refused.value)
        with Client(ClientConfig((nowhere, server(cluster, 1)), timeout=PATIENCE_S)) as one:
            assert isinstance(one.metadata(), list)


def test_the_leader_dies_while_a_producer_sends(
    cluster: Cluster,
    client: Client,
    declared: Callable[..., str],
) -> None:
    """Goal: nothing is lost and nothing doubled. Method: small frames one after the other through
    all nodes, kill -9 of the stream's leader in the middle, then read everything."""
    stream = declared()
    leader = leader_of(client, stream)
    total, size = 400, 25
    sent = threading.Event()
    failures: list[Exception] = []

    def produce() -> None:
        with Client(
            config(
                cluster,
                leader,
                *(n for n in range(3) if n != leader),
                spread=False,
                timeout=PATIENCE_S,
            )
        ) as one:
            try:
                for at in range(0, total * size, size):
                    values = [b"%06d" % (at + i) for i in range(size)]
                    one.produce(values_frame(values), stream=stream, producer="p", sequence=at)
                    if at >= total * size // 4:
                        sent.set()
            except Exception as error:
                failures.append(error)
                sent.set()

    producer = threading.Thread(target=produce)
    producer.start()
    assert sent.wait(60)
    cluster.kill(leader)
    try:
        producer.join(120)
        assert not producer.is_alive()
        assert not failures
        survivor = (leader + 1) % 3
        with Client(config(cluster, survivor)) as one:
            assert one.offsets([(stream, "latest", None)])[0][0] == total * size
            expected = [b"%06d" % i for i in range(total * size)]
            assert read_all(one, stream, total * size) == expected
    finally:
        cluster.restart(leader)
    with Client(config(cluster, leader)) as one:
        assert read_all(one, stream, total * size) == expected


def test_a_client_that_does_not_read_harms_nobody(
    cluster: Cluster, client: Client, declared: Callable[..., str]
) -> None:
    stream = declared()
    for _ in range(8):
        client.produce(values_frame([os.urandom(1000)] * 2000), stream=stream)
    slow = log_in(cluster, 0)
    fields = {"stream": stream, "offset": 0, "max_rows": 100_000, "max_bytes": 1 << 30}
    for number in range(1, 60):
        slow.sendall(b"".join(encode_frame(Op.FETCH, 0, number, fields)))
    with Client(config(cluster, 0)) as one:
        for _ in range(20):
            assert one.fetch(stream, 0).frame.rows > 1000
    slow.close()


def leader_of(client: Client, stream: str) -> int:
    """Index of the node that leads a stream; a node may hear of it a little later."""
    while True:
        (row,) = client.metadata([stream])
        if row.leader is not None:
            return int(row.leader.removeprefix("convoy")) - 1
        time.sleep(0.01)


def log_in(cluster: Cluster, node: int) -> socket.socket:
    """A raw connection that has logged in."""
    host, port = server(cluster, node).split(":")
    raw = socket.create_connection((host, int(port)), 10)
    fields = {"mechanism": "PLAIN", "user": "guest", "password": "guest", "vhost": "/"}
    raw.sendall(PREFACE + b"".join(encode_frame(Op.AUTHENTICATE, 0, 1, fields)))
    reader = FrameReader()
    greeting = b""
    while len(greeting) < len(PREFACE):
        greeting += raw.recv(len(PREFACE) - len(greeting))
    assert greeting == PREFACE
    while not reader.feed(raw.recv(4096)):
        pass
    return raw


def test_many_clients_at_once(
    cluster: Cluster, client: Client, declared: Callable[..., str]
) -> None:
    stream = declared()
    values = [b"%d" % i for i in range(2000)]
    client.produce(values_frame(values), stream=stream)
    found: list[bool] = []

    def read(node: int) -> None:
        with Client(config(cluster, node)) as one:
            found.append(read_all(one, stream, len(values), max_rows=300) == values)

    threads = [threading.Thread(target=read, args=(n % 3,)) for n in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True] * 60


@pytest.mark.parametrize(
    "garbage",
    [
        PREFACE + b"\xff" * 64,
        PREFACE + bytes(32),
        PREFACE[:6] + b"\x02\x00",
        PREFACE[:5],
        b"CNVX\x00\x00\x01\x00",
        PREFACE + b"".join(encode_frame(Op.FETCH, 0, 1, {"stream": "s"})),
    ],
)
def test_broken_greetings_are_closed_and_amqp_goes_on(
    cluster: Cluster, channel: Any, garbage: bytes
) -> None:
    host, port = server(cluster, 0).split(":")
    with socket.create_connection((host, int(port)), 15) as raw:
        raw.sendall(garbage)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(4096):
            pass
    assert channel.queue_declare("", exclusive=True).method.queue


def test_it_is_seen_and_closed_by_operators(cluster: Cluster, declared: Callable[..., str]) -> None:
    import httpx

    api = f"{cluster.api}/api"  # type: ignore[attr-defined]
    with (
        Client(config(cluster, 1, name="seen-by-operators")) as one,
        httpx.Client(auth=("guest", "guest"), timeout=PATIENCE_S) as http,
    ):
        one.metadata()
        own: list[dict[str, str]] = []

        def listed() -> bool:
            rows = http.get(f"{api}/connections").json()
            own[:] = [row for row in rows if row["user_provided_name"] == "seen-by-operators"]
            return bool(own)

        eventually(listed)
        (row,) = own
        assert row["protocol"] == "Columnar 1"
        name = row["name"].replace(" ", "%20").replace(">", "%3E")
        assert http.delete(f"{api}/connections/{name}").status_code == 204
        # The client comes back by itself.
        assert isinstance(one.metadata(), list)
