"""Frames of other nodes: to the owner of their kind, or kept until the node is open."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.kernels.link_frames import FRAME_APPEND, FRAME_CONTROL, HEADER_SIZE, frame
from convoymq.model.errors import InvariantViolated
from convoymq.transport import dispatch
from convoymq.transport.dispatch import HELD_BYTES_MAX, FrameDispatch
from convoymq.transport.frame_kinds import (
    FLAG_ANSWER,
    FREE,
    KIND_CLASSIC,
    KIND_JOIN,
    KIND_LIST,
    link_frame,
)
from tests.process_state import registries_restored

MIB = 1 << 20
PEER = 2


class Frames:
    """A dispatch whose owners keep what they take."""

    def __init__(self, *, holding: bool = False) -> None:
        self.reported: list[tuple[int, bytes, Exception]] = []
        self.dropped: list[int] = []
        self.taken: list[tuple[str, bytes]] = []
        self.dispatch = FrameDispatch(
            lambda *fault: self.reported.append(fault),
            lambda node, _reason: self.dropped.append(node),
            holding=holding,
        )

    def own(self, owner: str) -> None:
        self.dispatch.own(owner, lambda _node, data: self.taken.append((owner, data)))


def control(kind: int, body: bytes = b"", *, request: int = 0, flags: int = 0) -> bytes:
    return frame(FRAME_CONTROL, flags, 0, request, kind, 0, 0, body)


def test_a_frame_reaches_the_owner_of_its_type() -> None:
    frames = Frames()
    frames.own("control")
    frames.own("shells.groups")
    entry, note = frame(FRAME_APPEND, 0, 5, 0, 0, 0, 0), control(KIND_LIST)
    frames.dispatch.on_frame(PEER, entry)
    frames.dispatch.on_frame(PEER, note)
    assert frames.taken == [("shells.groups", entry), ("control", note)]


def test_another_room_owns_frames_by_one_row_and_one_call() -> None:
    with registries_restored():
        number = link_frame(FREE + 2, "TOY", "toy", waits=True)
        frames = Frames(holding=True)
        frames.own("toy")
        toy = frame(number, 0, 0, 1, 2, 3, 4, b"body")
        frames.dispatch.on_frame(PEER, toy)
        assert frames.taken == []
        frames.dispatch.open()
        assert frames.taken == [("toy", toy)]


def test_a_frame_without_an_owner_is_dropped() -> None:
    """It is of a later release, or this node has stopped."""
    frames = Frames(holding=True)
    frames.own("control")
    unknown = frame(FREE + 3, 0, 0, 0, 0, 0, 0)
    frames.dispatch.on_frame(PEER, unknown)
    frames.dispatch.on_frame(PEER, frame(FRAME_APPEND, 0, 0, 0, 0, 0, 0))
    frames.dispatch.close()
    frames.dispatch.on_frame(PEER, control(KIND_JOIN))
    assert frames.taken == []
    assert frames.reported == []


def test_frames_wait_until_the_node_is_open() -> None:
    """In their order, but for answers and the kinds that a node needs to open."""
    frames = Frames(holding=True)
    frames.own("control")
    frames.own("shells.groups")
    waiting = [control(kind, b"%d" % n) for n in range(3) for kind in (KIND_CLASSIC, KIND_LIST)]
    early = [
        control(KIND_JOIN, request=1),
        control(KIND_LIST, request=1, flags=FLAG_ANSWER),
        frame(FRAME_APPEND, 0, 5, 0, 0, 0, 0),
    ]
    for data in (*waiting, *early):
        frames.dispatch.on_frame(PEER, data)
    assert [data for _, data in frames.taken] == early
    frames.dispatch.open()
    assert [data for _, data in frames.taken] == early + waiting


def test_frames_that_wait_are_void_with_their_link() -> None:
    frames = Frames(holding=True)
    frames.own("control")
    frames.dispatch.on_frame(PEER, control(KIND_CLASSIC, b"before"))
    frames.dispatch.on_node_down(PEER)
    after = control(KIND_CLASSIC, b"after")
    frames.dispatch.on_frame(PEER, after)
    frames.dispatch.open()
    assert frames.taken == [("control", after)]


def test_a_node_that_sends_more_than_can_wait_loses_its_link() -> None:
    frames = Frames(holding=True)
    frames.own("control")
    for _ in range(HELD_BYTES_MAX // MIB):
        frames.dispatch.on_frame(PEER, control(KIND_CLASSIC, bytes(MIB - HEADER_SIZE)))
    assert frames.dropped == []
    frames.dispatch.on_frame(PEER, control(KIND_CLASSIC, b"one more"))
    assert frames.dropped == [PEER]
    frames.dispatch.open()
    assert frames.taken == []


def test_a_request_that_waited_for_too_long_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender has given it up. Notes and raw frames are carried out however late."""
    monkeypatch.setattr(dispatch, "HELD_S_MAX", -1.0)
    frames = Frames(holding=True)
    frames.own("control")
    note, raw = control(KIND_LIST), control(KIND_CLASSIC, request=7)
    for data in (control(KIND_LIST, request=1), note, raw):
        frames.dispatch.on_frame(PEER, data)
    frames.dispatch.open()
    assert [data for _, data in frames.taken] == [note, raw]


def test_a_fault_stops_what_the_frame_was_for_or_is_reported() -> None:
    frames = Frames()
    failed: list[bytes] = []
    raised: Any = KeyError("group")

    def take(_node: int, _data: bytes) -> None:
        raise raised

    frames.dispatch.own("shells.groups", take, lambda data, _: failed.append(data))
    frames.dispatch.own("control", take)
    entry, note = frame(FRAME_APPEND, 0, 5, 0, 0, 0, 0), control(KIND_LIST)
    frames.dispatch.on_frame(PEER, entry)
    frames.dispatch.on_frame(PEER, note)
    assert failed == [entry]
    assert frames.reported == [(PEER, note, raised)]
    raised = ValueError("malformed")
    frames.dispatch.on_frame(PEER, entry)
    assert frames.reported[1:] == [(PEER, entry, raised)]
    raised = InvariantViolated("broken")
    with pytest.raises(InvariantViolated):
        frames.dispatch.on_frame(PEER, note)
