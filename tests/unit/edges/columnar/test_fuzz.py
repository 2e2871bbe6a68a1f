"""Malformed and hostile frames: refused, counted, harmless, whatever their bytes.

The rule: a connection either answers or closes, nothing is ever logged as an error of our own, and
another client is served as before.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convoymq.model.columnar import ANSWER, HEADER_SIZE, PREFACE, ErrorCode, Op, encode_frame
from tests.patience import PATIENCE_S
from tests.unit.edges.columnar.support import FakeStream, Peer, Rig, values_frame

FAST = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
HEADER = struct.Struct("<IBBHQIIQ")


class World:
    """A server that outlives the examples of one test, with its loop."""

    def __init__(self, directory: Path) -> None:
        self.runner = asyncio.Runner()
        self.rig = Rig(
            directory,
            request_timeout_ms=200,
            frame_max=1 << 20,
            answer_max=1 << 18,
            alarm_wait_s=0.05,
            wait_ms_max=5,
        )
        self.run(self.rig.__aenter__())
        self.run(self.rig.queue("q"))
        self.run(self.rig.queue("c", "classic"))
        self.stream: FakeStream = self.rig.stream("s", [b"a", b"b" * 100, b""])
        self.errors: list[Any] = []
        self.runner.get_loop().set_exception_handler(lambda _, context: self.errors.append(context))

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def close(self) -> None:
        self.run(self.rig.__aexit__())
        self.runner.close()

    async def settle(self, peer: Peer) -> None:
        """Until everything that was asked is answered, or the connection is closed."""
        async with asyncio.timeout(PATIENCE_S):
            while not peer.transport.closed and (
                peer.connection._tasks or peer.connection._waiting
            ):
                await asyncio.sleep(0.001)
        peer.transport.close()
        async with asyncio.timeout(PATIENCE_S):
            while peer.connection.id in self.rig.edge.connections:
                await asyncio.sleep(0.001)

    def check(self, peer: Peer) -> None:
        """Nothing broke, nothing leaked, and others are served."""
        peer.heard()
        for frame in peer.answers:
            assert frame.is_answer
            assert frame.status != ErrorCode.INTERNAL_ERROR, frame.map
            assert not frame.status or frame.map["text"]
        assert not self.errors
        assert self.rig.edge.budget.used == self.rig.edge.input.used == 0
        assert not self.rig.broker.connections.all()

        async def other() -> None:
            client = await self.rig.client()
            answer = await client.ask(Op.FETCH, stream="s", offset=0)
            assert answer.status == 0
            client.transport.close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        self.run(other())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.close()


def raw_frame(
    body: bytes,
    *,
    op: int = 4,
    length: int | None = None,
    map_length: int | None = None,
    version: int = 1,
    status: int = 0,
    spare: int = 0,
    correlation: int = 1,
    check: int | None = None,
) -> bytes:
    """A frame whose header may lie about everything."""
    padded = body + bytes(-len(body) % 8)
    size = HEADER_SIZE + len(padded) if length is None else length
    head = HEADER.pack(
        size & 0xFFFFFFFF,
        op & 255,
        version,
        status,
        correlation,
        len(body) if map_length is None else map_length,
        0,
        spare,
    )
    right = crc32c(padded, crc32c(head[:20]))
    return head[:20] + struct.pack("<IQ", right if check is None else check, spare) + padded


u32 = st.integers(0, 2**32 - 1)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=50),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=8,
)
names = st.sampled_from(["s", "q", "c", "", "nix", "amq.topic"])
known_fields = st.sampled_from(
    [
        "stream",
        "queue",
        "offset",
        "end",
        "max_rows",
        "max_bytes",
        "columns",
        "wait_ms",
        "compression",
        "queries",
        "names",
        "types",
        "exchange",
        "routing_key",
        "producer",
        "sequence",
        "op",
        "reservation",
        "owner",
        "ttl_ms",
        "epoch",
        "fencing_token",
        "max",
        "after",
        "upto",
        "from",
        "failed",
        "cursor",
        "consumer",
        "mechanism",
        "user",
        "password",
        "vhost",
        "client",
    ]
)
likely = st.fixed_dictionaries(
    {},
    optional={
        "stream": names,
        "queue": names,
        "exchange": names,
        "routing_key": names,
        "offset": st.integers(-2, 2**64 - 1) | st.integers(0, 5),
        "end": st.none() | st.integers(0, 2**63),
        "max_rows": st.integers(0, 2**63 - 1),
        "max_bytes": st.integers(0, 2**63 - 1),
        "columns": st.integers(0, 2048),
        "wait_ms": st.integers(0, 2**63 - 1),
        "compression": st.sampled_from(["", "zstd", "lz4", "xz"]),
        "queries": st.lists(
            st.tuples(
                names,
                st.sampled_from(["latest", "earliest", "timestamp", "x"]),
                st.none() | st.integers(0, 2**63 - 1),
            ),
            max_size=4,
        ),
        "names": st.lists(names, max_size=3),
        "types": st.lists(st.sampled_from(["stream", "quorum"])),
        "producer": st.none() | st.text(max_size=300),
        "sequence": st.integers(0, 2**63 - 1),
        "digest": st.none() | st.binary(min_size=15, max_size=17),
        "op": st.sampled_from(
            ["open", "take", "settle", "release", "close", "lease", "touch", "no"]
        ),
        "reservation": st.sampled_from(["x", "y", ""]),
        "owner": st.text(max_size=4),
        "ttl_ms": st.integers(0, 2**63 - 1),
        "epoch": st.integers(0, 2**63 - 1),
        "fencing_token": st.integers(0, 2**63 - 1),
        "max": st.integers(0, 2**63 - 1),
        "after": st.integers(0, 2**63 - 1),
        "upto": st.integers(0, 2**63 - 1),
        "from": st.integers(0, 2**63 - 1),
        "failed": st.booleans(),
        "cursor": st.none() | st.lists(st.integers(-5, 2**64 - 1), max_size=6) | values,
        "consumer": names,
    },
)
fields = likely | st.dictionaries(known_fields, values, max_size=8)
frames_of_rows = st.sampled_from([b"", values_frame([b"x"] * 3), values_frame([]), b"\xff" * 80])


@FAST
@given(data=st.binary(max_size=400), logged_in=st.booleans())
def test_any_bytes(world: World, data: bytes, logged_in: bool) -> None:
    async def run() -> Peer:
        peer = await world.rig.client() if logged_in else world.rig.peer()
        peer.feed(data)
        await world.settle(peer)
        return peer

    world.check(world.run(run()))


@FAST
@given(
    body=st.binary(max_size=60) | values.map(msgspec.msgpack.encode),
    length=st.none() | u32 | st.integers(0, 200),
    map_length=st.none() | u32 | st.integers(0, 200),
    op=st.integers(0, 255),
    version=st.sampled_from([0, 1, 1, 1, 2, 255]),
    status=st.sampled_from([0, 0, 1, 65535]),
    spare=st.sampled_from([0, 0, 1, 2**64 - 1]),
    check=st.none() | u32,
    logged_in=st.booleans(),
)
def test_lying_headers(world: World, logged_in: bool, **lies: Any) -> None:
    async def run() -> Peer:
        peer = await world.rig.client() if logged_in else world.rig.peer()
        # What follows shows whether the server has lost its place.
        peer.feed(raw_frame(**lies) + b"".join(encode_frame(Op.METADATA, 0, 99, {})))
        await world.settle(peer)
        return peer

    world.check(world.run(run()))


@FAST
@given(op=st.sampled_from(Op) | st.integers(1, 127), given=fields, payload=frames_of_rows)
def test_any_fields_of_any_operation(
    world: World, op: int, given: dict[str, Any], payload: bytes
) -> None:
    async def run() -> Peer:
        peer = await world.rig.client()
        number = peer.send(op, given, payload)
        await world.settle(peer)
        assert peer.answer_to(number) is not None, "neither an answer nor an error"
        return peer

    world.check(world.run(run()))


@FAST
@given(given=fields, op=st.sampled_from(Op) | st.integers(1, 127))
def test_nothing_is_done_without_a_login(world: World, given: dict[str, Any], op: int) -> None:
    before = dict(world.rig.edge.counters.requests)

    async def run() -> Peer:
        peer = world.rig.peer()
        peer.send(op, given)
        await world.settle(peer)
        return peer

    peer = world.run(run())
    assert peer.transport.closed
    assert all(frame.status for frame in peer.heard())
    before[Op.AUTHENTICATE] = world.rig.edge.counters.requests[Op.AUTHENTICATE]
    done = {k: v for k, v in world.rig.edge.counters.requests.items() if k != Op.FETCH}
    assert done == {k: v for k, v in before.items() if k != Op.FETCH}
    world.check(peer)


@FAST
@given(
    cut=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 7)), max_size=3),
    payload=frames_of_rows,
)
def test_flipped_bits_of_a_produce(
    world: World, cut: list[int], flips: list[tuple[int, int]], payload: bytes
) -> None:
    data = bytearray(
        b"".join(encode_frame(Op.PRODUCE, 0, 7, {"queue": "q", "producer": "p"}, payload))
    )
    for place, bit in flips:
        data[place % len(data)] ^= 1 << bit

    async def run() -> Peer:
        peer = await world.rig.client()
        rest = bytes(data)
        for size in cut:
            peer.feed(rest[:size])
            rest = rest[size:]
        peer.feed(rest)
        await world.settle(peer)
        return peer

    world.check(world.run(run()))


def test_malformed_connections_are_counted(world: World) -> None:
    assert world.rig.edge.counters.malformed > 50
    assert world.rig.edge.counters.errors[ErrorCode.FRAME_ERROR] > 50
    assert ANSWER == 128
    assert len(PREFACE) == 8
