"""Requests between nodes: answers, refusals, silence, nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from convoymq.kernels.link_frames import FRAME_CONTROL, frame
from convoymq.model.errors import NotFound, PeerError, PreconditionFailed, Unavailable
from convoymq.transport.control import ControlPlane
from convoymq.transport.frame_kinds import FREE, KIND_PREFETCH, control_kind
from tests.process_state import registries_restored

KIND = FREE + 1


@pytest.fixture(autouse=True)
def _kind() -> Iterator[None]:
    with registries_restored():
        control_kind(KIND, "test of requests", "tests")
        yield


class Wire:
    """Delivers at once, or not at all."""

    def __init__(self) -> None:
        self.planes: dict[int, ControlPlane] = {}
        self.silent = False

    def of(self, node: int) -> Wire._End:
        return Wire._End(self, node)

    class _End:
        def __init__(self, wire: Wire, node: int) -> None:
            self.full: set[int] = set()
            self.wire = wire
            self.node = node

        def send(self, node: int, frame: bytes, body: Sequence[bytes] = ()) -> None:
            if not self.wire.silent:
                data = b"".join([frame, *body])
                loop = asyncio.get_running_loop()
                loop.call_soon(self.wire.planes[node].on_frame, self.node, data)

        def is_connected(self, node: int) -> bool:
            return node in self.wire.planes

        def backlog_bytes(self, node: int) -> int:
            return 0


@pytest.fixture
def wire() -> Wire:
    made = Wire()
    for node in (1, 2):
        made.planes[node] = ControlPlane(node, made.of(node))
    return made


async def test_a_request_is_answered_by_the_other_node_or_by_itself(wire: Wire) -> None:
    async def double(node: int, body: Any) -> Any:
        return [node, body * 2]

    for plane in wire.planes.values():
        plane.handle(KIND, double)
    assert await wire.planes[1].request(2, KIND, 21, 5) == [1, 42]
    assert await wire.planes[1].request(1, KIND, 21, 5) == [1, 42]


async def test_a_refusal_keeps_its_class_and_text(wire: Wire) -> None:
    async def refuse(node: int, body: Any) -> Any:
        raise NotFound("not here")

    wire.planes[2].handle(KIND, refuse)
    with pytest.raises(NotFound, match="not here"):
        await wire.planes[1].request(2, KIND, None, 5)


async def test_silence_a_lost_link_and_an_unknown_node_are_unavailable(wire: Wire) -> None:
    wire.silent = True
    with pytest.raises(Unavailable, match="did not answer in time"):
        await wire.planes[1].request(2, KIND, None, 0)
    task = asyncio.create_task(wire.planes[1].request(2, KIND, None, 30))
    await asyncio.sleep(0)
    wire.planes[1].on_node_down(2)
    with pytest.raises(Unavailable, match="not connected"):
        await task
    with pytest.raises(Unavailable, match="not connected"):
        await wire.planes[1].request(3, KIND, None, 30)


async def test_a_malformed_frame_is_the_peers_error(wire: Wire) -> None:
    for data in (b"", frame(FRAME_CONTROL, 0, 0, 1, KIND, 0, 0, b"\xc1")):
        with pytest.raises(PeerError):
            wire.planes[1].on_frame(2, data)


async def test_an_answer_from_somebody_else_is_ignored(wire: Wire) -> None:
    wire.silent = True
    task = asyncio.create_task(wire.planes[1].request(2, KIND, None, 0.05))
    await asyncio.sleep(0)
    wire.planes[1].on_frame(3, frame(FRAME_CONTROL, 1, 0, 1, KIND, 0, 0, b"\x01"))
    with pytest.raises(Unavailable):
        await task


async def test_a_node_that_does_not_know_a_request_is_not_asked(wire: Wire) -> None:
    async def answer(node: int, body: Any) -> Any:
        return body

    for kind in (KIND, KIND_PREFETCH):
        wire.planes[2].handle(kind, answer)
    wire.planes[1].is_older = lambda node: node == 2
    with pytest.raises(PreconditionFailed, match="node 2 has an older release"):
        await wire.planes[1].request(2, KIND_PREFETCH, 1, 30)
    assert await wire.planes[1].request(2, KIND, 1, 30) == 1


async def test_who_answers_a_kind_may_be_made_for_the_first_request(wire: Wire) -> None:
    async def answer(node: int, body: Any) -> Any:
        return body

    wire.planes[2].handle_late(KIND, lambda: wire.planes[2].handle(KIND, answer))
    assert await wire.planes[1].request(2, KIND, 1, 5) == 1
    assert await wire.planes[1].request(2, KIND, 2, 5) == 2


async def test_a_closed_plane_answers_nothing(wire: Wire) -> None:
    async def answer(node: int, body: Any) -> Any:
        raise AssertionError("what it is about is closed")

    wire.planes[2].handle(KIND, answer)
    await wire.planes[2].close()
    asked = asyncio.create_task(wire.planes[1].request(2, KIND, 1, 30))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    wire.planes[1].on_node_down(2)
    with pytest.raises(Unavailable):
        await asked
