"""Preface, login, limits, backpressure and closing of columnar connections."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from convoymq.edges.columnar.connection import FetchConnection, State
from convoymq.metadata.commands import DeleteUser, PutUser
from convoymq.model.columnar import ANSWER, PREFACE, ErrorCode, Op, encode_frame
from tests.patience import PATIENCE_S
from tests.unit.edges.columnar.support import FakeTransport, Peer, Rig, values_frame, values_of
from tests.unit.queues.fake_cluster import until

LOGIN = {"mechanism": "PLAIN", "user": "guest", "password": "guest", "vhost": "/"}


async def test_the_preface_is_answered_with_the_version_that_is_spoken(rig: Rig) -> None:
    peer = rig.peer()
    assert bytes(peer.transport.written) == PREFACE
    assert peer.connection.state is State.LOGIN


async def test_another_version_gets_the_preface_and_the_end(rig: Rig) -> None:
    peer = Peer(rig.edge, b"CNVY\x00\x00\x07\x00")
    assert bytes(peer.transport.written) == PREFACE
    assert peer.transport.closed


async def test_login_tells_node_cluster_and_frame_max(rig: Rig) -> None:
    peer = rig.peer()
    answer = await peer.log_in()
    assert answer.status == 0
    assert answer.map["node"] == "n1"
    assert answer.map["cluster"] == "fake"
    assert answer.map["frame_max"] == rig.settings.frame_max
    assert [row.name for row in rig.broker.connections.all()] == [peer.connection.name]


async def test_preface_and_login_may_come_in_one_piece(rig: Rig) -> None:
    login = b"".join(encode_frame(Op.AUTHENTICATE, 0, 5, LOGIN))
    peer = Peer(rig.edge, PREFACE + login)
    await until(lambda: peer.answer_to(5) is not None)
    assert peer.connection.state is State.OPEN


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"password": "wrong"}, ErrorCode.ACCESS_REFUSED),
        ({"user": "nobody"}, ErrorCode.ACCESS_REFUSED),
        ({"vhost": "none"}, ErrorCode.ACCESS_REFUSED),
        ({"mechanism": "SCRAM"}, ErrorCode.PRECONDITION_FAILED),
        ({"password": 7}, ErrorCode.PRECONDITION_FAILED),
        ({"user": None}, ErrorCode.PRECONDITION_FAILED),
    ],
)
@pytest.mark.provokes("fetch.login_refused")
async def test_a_login_that_is_refused_is_told_why_and_closed(
    rig: Rig, fields: dict[str, Any], code: ErrorCode
) -> None:
    peer = rig.peer()
    with capture_logs() as logs:
        number = peer.send(Op.AUTHENTICATE, LOGIN | fields)
        await until(lambda: peer.transport.closed)
    (said,) = [row for row in logs if row["event"] == "fetch.login_refused"]
    # A request without a sound name and password names nobody.
    sound = all(isinstance(value, str) for value in fields.values())
    assert said["user"] == (fields.get("user", LOGIN["user"]) if sound else "")
    answer = peer.answer_to(number)
    assert answer is not None
    assert answer.status == code
    assert not rig.broker.connections.all()
    assert rig.edge.counters.errors[code] == 1


async def test_anything_before_the_login_is_refused(rig: Rig) -> None:
    peer = rig.peer()
    peer.send(Op.METADATA, {})
    assert peer.transport.closed
    assert peer.heard()[0].status == ErrorCode.FRAME_ERROR
    assert rig.edge.counters.malformed == 1


@pytest.mark.provokes("fetch.malformed")
async def test_an_unknown_client_may_not_send_large_frames(rig: Rig) -> None:
    peer = rig.peer()
    peer.send(Op.AUTHENTICATE, LOGIN, bytes(65536))
    assert peer.transport.closed
    assert peer.heard()[0].status == ErrorCode.FRAME_ERROR


@pytest.mark.provokes("fetch.login_timeout")
async def test_who_does_not_log_in_is_closed(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        transport = FakeTransport()

        def attach(connection: FetchConnection) -> None:
            transport.protocol = connection
            connection.connection_made(transport)

        incoming: Any = SimpleNamespace(
            head=PREFACE, id=1, peer=("::1", 9), local=("::1", 1), tls=False, attach=attach,
            handshake_left_s=lambda: 0.02,
        )  # fmt: skip
        rig.edge.connect(incoming)
        assert transport.protocol.name == "[::1]:9 -> [::1]:1"
        await until(lambda: not rig.edge.connections)
        assert transport.closed


@pytest.mark.provokes("fetch.connection_forced")
async def test_a_connection_that_is_closed_before_it_has_its_socket_closes_it(rig: Rig) -> None:
    """The event loop hands the socket over in a later turn."""
    made: list[FetchConnection] = []
    incoming: Any = SimpleNamespace(
        head=PREFACE, id=1, peer=("::1", 9), local=("::1", 1), tls=False, attach=made.append,
        handshake_left_s=lambda: PATIENCE_S,
    )  # fmt: skip
    rig.edge.connect(incoming)
    made[0].close("an operator closes it")
    transport = FakeTransport()
    transport.protocol = made[0]
    made[0].connection_made(transport)
    assert transport.aborted
    assert not transport.written


@pytest.mark.provokes(
    "fetch.connection_limit", "fetch.connection_opened", "fetch.connection_forced"
)
async def test_connections_beyond_the_limit_are_told_so(tmp_path: Path) -> None:
    async with Rig(tmp_path, connections_max=1) as rig:
        await rig.client()
        other = rig.peer()
        assert other.transport.closed
        assert other.heard()[0].status == ErrorCode.UNAVAILABLE
        assert "too many" in other.heard()[0].map["text"]
        assert rig.edge.counters.refused == 1


async def test_a_second_login_is_refused_and_the_connection_goes_on(client: Peer) -> None:
    assert (await client.refusal(Op.AUTHENTICATE, **LOGIN))[0] == ErrorCode.NOT_IMPLEMENTED
    assert (await client.ask(Op.METADATA)).status == 0


async def test_an_unknown_operation_is_refused_and_the_connection_goes_on(client: Peer) -> None:
    assert (await client.refusal(99))[0] == ErrorCode.NOT_IMPLEMENTED
    assert (await client.ask(Op.METADATA)).status == 0


async def test_an_answer_from_a_client_breaks_the_protocol(rig: Rig, client: Peer) -> None:
    client.send(Op.METADATA + ANSWER, {})
    assert client.transport.closed
    assert rig.edge.counters.malformed == 1


async def test_at_most_64_requests_are_under_way(rig: Rig, client: Peer) -> None:
    import asyncio

    stream = rig.stream("s", [b"a"])
    stream.hold = asyncio.Event()
    numbers = [client.send(Op.FETCH, {"stream": "s", "offset": 5}) for _ in range(64)]
    assert not client.transport.reading
    numbers.append(client.send(Op.METADATA, {}))
    await until(lambda: stream.reads == 64)
    assert not client.heard()[1:]
    stream.hold.set()
    await until(lambda: all(client.answer_to(number) for number in numbers))
    assert client.transport.reading


@pytest.mark.provokes("fetch.slow_reader_dropped")
async def test_a_client_that_does_not_read_costs_one_answer_and_is_dropped(tmp_path: Path) -> None:
    async with Rig(tmp_path, write_timeout_ms=50, step_bytes=1 << 16) as rig:
        rig.stream("s", [bytes(1000)] * 3000)
        peer = await rig.client()
        before = len(peer.transport.written)
        peer.transport.stuck = True
        for _ in range(20):
            peer.send(Op.FETCH, {"stream": "s", "offset": 0})
        await until(lambda: peer.transport.aborted)
        assert len(peer.transport.written) - before < 3_000_000
        assert rig.edge.counters.slow == 1
        await until(lambda: rig.edge.budget.used == 0)
        assert not rig.broker.connections.all()


async def test_answers_go_on_when_the_client_reads_again(rig: Rig) -> None:
    rig.stream("s", [b"%d" % i * 200 for i in range(2000)])
    peer = await rig.client()
    peer.transport.stuck = True
    numbers = [peer.send(Op.FETCH, {"stream": "s", "offset": 0}) for _ in range(5)]
    late = peer.send(Op.METADATA, {})
    await until(lambda: not peer.transport.reading)
    assert peer.connection.info()["send_pend"] > 0
    peer.transport.unstick()
    await until(lambda: all(peer.answer_to(number) for number in [*numbers, late]))
    for number in numbers:
        answer = peer.answer_to(number)
        assert answer is not None
        assert len(values_of(answer.payload)) == 2000
    assert peer.transport.reading


async def test_an_operator_can_close_it_and_the_client_hears_why(rig: Rig, client: Peer) -> None:
    assert await rig.broker.cluster.close_connection(client.connection.name, "maintenance")
    assert client.transport.closed
    last = client.heard()[-1]
    assert last.correlation == 0
    assert last.status == ErrorCode.UNAVAILABLE
    assert "maintenance" in last.map["text"]
    await until(lambda: not rig.edge.connections)
    assert not rig.broker.connections.all()


async def test_a_user_that_is_deleted_loses_the_connection(rig: Rig) -> None:
    from convoymq.metadata.access import SHA256, hash_sha256
    from convoymq.metadata.commands import PutPermission

    store = rig.cluster.nodes[1].store
    await store.execute(PutUser(name="u", password_hash=hash_sha256(b"pw"), algorithm=SHA256))
    await store.execute(PutPermission(user="u", vhost="/", configure="", write="", read=""))
    peer = rig.peer()
    assert (await peer.log_in("u", "pw")).status == 0
    await store.execute(DeleteUser(name="u"))
    await until(lambda: peer.transport.closed)


async def test_it_is_in_the_list_of_connections(rig: Rig) -> None:
    peer = rig.peer()
    await peer.ask(Op.AUTHENTICATE, **LOGIN, client="spark driver")
    (row,) = await rig.broker.cluster.list_connections()
    assert row["protocol"] == "Columnar 1"
    assert row["user"] == "guest"
    assert row["user_provided_name"] == "spark driver"
    assert row["recv_oct"] > 0
    assert row["send_oct"] > 0


async def test_stopping_closes_everything(rig: Rig, client: Peer) -> None:
    await rig.edge.stop()
    assert client.transport.closed
    assert rig.peer().transport.closed


async def test_the_node_s_budget_makes_requests_wait(tmp_path: Path) -> None:
    async with Rig(tmp_path, buffer_max=1 << 20, answer_max=1 << 20) as rig:
        rig.stream("s", [bytes(500)] * 1500)
        slow, other = await rig.client(), await rig.client()
        slow.transport.stuck = True
        slow.send(Op.FETCH, {"stream": "s", "offset": 0})
        await until(lambda: slow.transport.waiting > slow.transport.high)
        number = other.send(Op.FETCH, {"stream": "s", "offset": 0})
        assert (await other.ask(Op.METADATA)).status == 0
        assert other.answer_to(number) is None
        slow.transport.unstick()
        await until(lambda: other.answer_to(number) is not None)
        await until(lambda: rig.edge.budget.used == 0)


async def test_slow_readers_are_dropped_sooner_when_others_wait_for_their_room(
    tmp_path: Path,
) -> None:
    async with Rig(tmp_path, buffer_max=1 << 20, answer_max=1 << 19, pressed_timeout_s=0.05) as rig:
        rig.stream("s", [bytes(500)] * 900)
        slow = [await rig.client() for _ in range(5)]
        for peer in slow:
            peer.transport.stuck = True
            peer.send(Op.FETCH, {"stream": "s", "offset": 0})
        other = await rig.client()
        answer = await other.ask(Op.FETCH, stream="s", offset=0)
        assert len(values_of(answer.payload)) == 900
        assert rig.edge.counters.slow >= 3
        assert sum(not peer.transport.closed for peer in slow) >= 1, "nobody waits any more"
        assert rig.edge.budget.used <= 1 << 20


async def test_requests_of_much_payload_stop_reading(tmp_path: Path) -> None:
    async with Rig(tmp_path, frame_max=1 << 20, answer_max=1 << 20) as rig:
        await rig.queue("q")
        peer = await rig.client()
        rig.broker.alarms.set("memory", True)
        frame = values_frame([bytes(1000)] * 900)
        numbers = [peer.send(Op.PRODUCE, {"queue": "q"}, frame) for _ in range(3)]
        assert not peer.transport.reading
        await until(lambda: peer.connection.info()["state"] == "blocked")
        rig.broker.alarms.set("memory", False)
        await until(lambda: all(peer.answer_to(number) for number in numbers))
        assert peer.transport.reading


async def test_last_words_are_not_overtaken_by_a_reset(rig: Rig, client: Peer) -> None:
    client.transport.half = True
    client.feed(b"\xff" * 100)
    assert client.transport.ended
    assert not client.transport.closed
    assert client.heard()[-1].status == ErrorCode.FRAME_ERROR
    client.feed(b"\xff" * 100_000)
    assert len(client.heard()) == 2
    assert not rig.broker.connections.all()
    client.transport.close()
    await until(lambda: not rig.edge.connections)


async def test_large_requests_wait_for_room_before_they_are_read(tmp_path: Path) -> None:
    async with Rig(tmp_path, buffer_max=1 << 20) as rig:
        await rig.queue("q")
        one, two = await rig.client(), await rig.client()
        frame = values_frame([bytes(1000)] * 800)
        request = b"".join(encode_frame(Op.PRODUCE, 0, 9, {"queue": "q"}, frame))
        one.feed(request[:1000])
        assert not one.transport.reading
        await until(lambda: one.transport.reading)
        two.feed(request[:1000])
        assert not two.transport.reading
        assert rig.edge.input.used == len(request)
        assert (await one.connection.broker.queue_admin.find_queue("/", "q").counts())[0] == 0
        one.feed(request[1000:])
        await until(lambda: one.answer_to(9) is not None)
        await until(lambda: two.transport.reading)
        two.feed(request[1000:])
        await until(lambda: two.answer_to(9) is not None)
        await until(lambda: rig.edge.input.used == 0)
        assert await rig.count("q") == 1600


@pytest.mark.provokes("fetch.slow_writer_dropped")
async def test_who_has_room_and_does_not_write_is_dropped(tmp_path: Path) -> None:
    async with Rig(tmp_path, write_timeout_ms=50) as rig:
        peer = await rig.client()
        frame = values_frame([bytes(1000)] * 800)
        request = b"".join(encode_frame(Op.PRODUCE, 0, 9, {"queue": "q"}, frame))
        peer.feed(request[:1000])
        await until(lambda: peer.transport.aborted)
        assert rig.edge.counters.slow == 1
        assert rig.edge.input.used == 0


async def test_a_connection_that_goes_gives_its_room_back(tmp_path: Path) -> None:
    async with Rig(tmp_path, buffer_max=1 << 20) as rig:
        await rig.queue("q")
        frame = values_frame([bytes(1000)] * 800)
        request = b"".join(encode_frame(Op.PRODUCE, 0, 9, {"queue": "q"}, frame))
        peers = [await rig.client() for _ in range(3)]
        for peer in peers:
            peer.feed(request[:1000])
        await until(lambda: peers[0].transport.reading)
        peers[1].transport.close()
        peers[0].transport.close()
        await until(lambda: peers[2].transport.reading)
        rig.broker.alarms.set("disk", True)
        peers[2].feed(request[1000:])
        await until(lambda: peers[2].connection.blocked)
        peers[2].transport.close()
        await until(lambda: rig.edge.input.used == 0)
        rig.broker.alarms.set("disk", False)
