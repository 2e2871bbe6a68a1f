"""Hands every frame of another node to the owner of its type (`frame_kinds`).

Links are up before a node has opened its queues. Frames of kinds that wait are kept until `open`,
in their order, at most `HELD_BYTES_MAX` of each node; they are void with their link. A frame
without an owner is of a later release, or comes when this node has stopped: it is dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from convoymq.kernels.link_frames import FRAME_CONTROL, frame_header
from convoymq.model.errors import BrokerError
from convoymq.transport.frame_kinds import (
    CONTROL_KINDS,
    FLAG_ANSWER,
    LINK_FRAMES,
    LINKS,
    NUMBER_MAX,
)

HELD_BYTES_MAX = 16 << 20
"""Bytes of frames of one node that wait for `open`. Beyond them its link is dropped."""
HELD_S_MAX = 5.0
"""A request that waited for longer is dropped: its sender has given it up."""

Take = Callable[[int, bytes], None]
"""Takes a frame: (node, data)."""
Fail = Callable[[bytes, Exception], None]
"""Stops the object that a frame was for."""


class FrameDispatch:
    """Frames that one node receives.

    Args:
        report: called with (node, data, error) for a malformed frame, and for a fault of this node
            in a frame whose owner cannot say which object it was for.
        drop_link: breaks the link to a node, for a reason.
        holding: frames of kinds that wait are kept until `open`.
    """

    def __init__(
        self,
        report: Callable[[int, bytes, Exception], None],
        drop_link: Callable[[int, str], None] = lambda node, reason: None,
        *,
        holding: bool = False,
    ) -> None:
        self._report = report
        self._drop_link = drop_link
        self._holding = holding
        self._owners: list[Take | None] = [None] * (NUMBER_MAX + 1)
        self._fails: dict[int, Fail] = {}
        #: Node -> (when it came, frame).
        self._held: dict[int, list[tuple[float, bytes]]] = {}
        self._held_bytes: Counter[int] = Counter()

    def own(self, owner: str, take: Take, fail: Fail | None = None) -> None:
        """Registers the handler of all types that `LINK_FRAMES` gives to an owner."""
        numbers = [kind.number for kind in LINK_FRAMES.values() if kind.owner == owner]
        assert numbers, f"no frames of {owner}"
        assert owner != LINKS
        for number in numbers:
            assert self._owners[number] is None
            self._owners[number] = take
            if fail is not None:
                self._fails[number] = fail

    def on_frame(self, node: int, data: bytes) -> None:
        """Takes a whole frame, of at least the size of a header. Raises InvariantViolated."""
        if self._holding and _waits(data):
            self._hold(node, data)
            return
        take = self._owners[data[4]]
        if take is None:
            return
        try:
            take(node, data)
        except Exception as error:
            self._failed(node, data, error)

    def _failed(self, node: int, data: bytes, error: Exception) -> None:
        fail = self._fails.get(data[4])
        if fail is None or isinstance(error, BrokerError | ValueError):
            self._report(node, data, error)
        else:
            fail(data, error)

    def open(self) -> None:
        """Ends the hold: the objects that a frame may be for are there."""
        self._holding = False
        held, self._held = self._held, {}
        self._held_bytes.clear()
        now = time.monotonic()
        for node, frames in held.items():
            for came, data in frames:
                if now - came <= HELD_S_MAX or not _is_request(data):
                    self.on_frame(node, data)

    def close(self) -> None:
        """Drops every frame from now on."""
        self._holding = False
        self._held.clear()
        self._owners = [None] * (NUMBER_MAX + 1)

    def on_node_down(self, node: int) -> None:
        """The link is gone, and with it the frames that wait."""
        self._held.pop(node, None)
        self._held_bytes.pop(node, None)

    def _hold(self, node: int, data: bytes) -> None:
        self._held.setdefault(node, []).append((time.monotonic(), data))
        self._held_bytes[node] += len(data)
        if self._held_bytes[node] > HELD_BYTES_MAX:
            # No frame is lost in silence: with the link both ends give up what hangs on it.
            self.on_node_down(node)
            self._drop_link(
                node, "it sends more than can wait until this node has opened its queues"
            )


def _waits(data: bytes) -> bool:
    if data[4] == FRAME_CONTROL:
        kind = CONTROL_KINDS.get(frame_header(data)[5])
        return kind is not None and kind.waits and not data[5] & FLAG_ANSWER
    row = LINK_FRAMES.get(data[4])
    return row is not None and row.waits


def _is_request(data: bytes) -> bool:
    if data[4] != FRAME_CONTROL:
        return False
    number, kind = frame_header(data)[4:6]
    return number != 0 and not CONTROL_KINDS[kind].raw
