"""What the columnar server counts, and what it logs of a fault of its own."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from convoymq.model.columnar import Op, encode_frame
from convoymq.model.errors import InvariantViolated
from convoymq.transport import listening
from tests.loop_faults import loop_faults
from tests.unit.edges.columnar.support import Rig, values_frame
from tests.unit.queues.fake_cluster import until


async def test_a_fault_in_a_task_ends_no_server(rig: Rig) -> None:
    faults = loop_faults()

    async def broken() -> None:
        raise RuntimeError("a fault")

    rig.edge.spawn(broken())
    await until(lambda: bool(faults))
    assert (await (await rig.client()).ask(Op.METADATA)).status == 0


async def test_a_violated_invariant_in_a_request_ends_the_process(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one request with an internal error, as if the others could go on."""
    faults = loop_faults()
    client = await rig.client()

    async def violated(_frame: object) -> None:
        raise InvariantViolated("a test says so")

    monkeypatch.setattr(client.connection.requests, "serve", violated)
    client.send(Op.METADATA, {})
    await until(lambda: bool(faults))
    assert isinstance(faults[0], InvariantViolated)
    assert not client.heard()[1:]


@pytest.mark.moves(
    "convoy_fetch_buffered_bytes",
    "convoy_fetch_connections",
    "convoy_fetch_connections_refused_total",
    "convoy_fetch_errors_total",
    "convoy_fetch_read_descriptors_total",
    "convoy_fetch_input_bytes",
    "convoy_fetch_malformed_total",
    "convoy_fetch_received_bytes_total",
    "convoy_fetch_requests_total",
    "convoy_fetch_rows_received_total",
    "convoy_fetch_rows_sent_total",
    "convoy_fetch_sent_bytes_total",
    "convoy_fetch_slow_readers_dropped_total",
)
async def test_what_clients_do_is_counted(tmp_path: Path) -> None:
    async with Rig(tmp_path / "1", machine="here", connections_max=2) as rig:
        await rig.show()
        await rig.queue("q")
        stream = rig.stream("s", [bytes(1000)] * 10)
        client = await rig.client()
        await client.ask(Op.PRODUCE, values_frame([b"row"]), queue="q")
        await client.refusal(99)
        await client.ask(Op.FETCH, stream="s", offset=0)
        stream.place = b"where it lies"
        await client.ask(Op.FETCH, stream="s", offset=0, machine="here")
        unknown = rig.peer()
        rig.peer()
        unknown.feed(b"no frame at all, but long enough to be the head of one")
        await until(lambda: len(rig.edge.connections) == 1)
        large = b"".join(
            encode_frame(Op.PRODUCE, 0, 9, {"queue": "q"}, values_frame([bytes(1000)] * 800))
        )
        client.feed(large[:1000])
        await until(lambda: rig.edge.input.used)
        await rig.show()
    async with Rig(tmp_path / "2", write_timeout_ms=500, step_bytes=1 << 16) as rig:
        rig.stream("s", [bytes(1000)] * 3000)
        client = await rig.client()
        client.transport.stuck = True
        for _ in range(20):
            client.send(Op.FETCH, {"stream": "s", "offset": 0})
        await until(lambda: rig.edge.budget.used)
        await rig.show()
        await until(lambda: client.transport.aborted)
        await rig.show()


async def test_the_end_of_a_blocked_client_is_noticed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HANG_UP_CHECK_S", 0.01)
    await rig.queue("q")
    client = await rig.client()
    ours, theirs = socket.socketpair()
    client.transport._extra["socket"] = ours
    rig.broker.alarms.set("memory", True)
    client.send(Op.PRODUCE, {"queue": "q"}, values_frame([b"row"]))
    await until(lambda: client.connection.blocked)
    theirs.sendall(b"unread")
    theirs.close()
    await until(lambda: not rig.edge.connections)
    ours.close()
