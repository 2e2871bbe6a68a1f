# cython: annotation_typing=False
"""Frames of AMQP 1.0: reading and writing, sans IO."""

from __future__ import annotations

import struct
from typing import NamedTuple

from convoymq.kernels.amqp10_frames import next_plain, publish_plain
from convoymq.kernels.amqp10_settlements import read_settlements
from convoymq.kernels.batch import PublishTarget
from convoymq.kernels.message_sizes import MessageSizes
from convoymq.model.errors import FrameFault

AMQP, SASL = 0, 1
"""Types of frames."""
HEADER_BYTES = 8
SETTLES = 1 << 32
"""Mark of dispositions and flows (`FrameReader.plain`)."""
DATA_OFFSET = 2
"""Size of the header of a frame that is written here, in words of 4 bytes."""

_HEAD = struct.Struct(">IBBH")


class Frame(NamedTuple):
    """A frame that was read."""

    type: int
    channel: int
    body: bytes
    """Empty: a heartbeat."""


class FrameReader:
    """Cuts input into protocol headers and frames.

    Args:
        frame_max: bytes of the largest frame.
    """

    def __init__(self, frame_max: int) -> None:
        self.frame_max = frame_max
        self._data = bytearray()
        self._at = 0

    def feed(self, data: bytes) -> None:
        """Takes input."""
        if self._at:
            del self._data[: self._at]
            self._at = 0
        self._data += data

    def take(self, count: int) -> bytes | None:
        """Returns the next bytes; None: there are fewer."""
        at, end = self._at, self._at + count
        if end > len(self._data):
            return None
        self._at = end
        return bytes(self._data[at:end])

    def frame(self) -> Frame | None:
        """Returns the next frame; None: it is not whole. Raises FrameFault: it is malformed."""
        if len(self._data) - self._at < HEADER_BYTES:
            return None
        size, offset, kind, channel = _HEAD.unpack_from(self._data, self._at)
        if size < HEADER_BYTES:
            raise FrameFault(
                f"frame size ({size} bytes) < minimum frame size ({HEADER_BYTES} bytes)"
            )
        if size > self.frame_max:
            raise FrameFault(
                f"frame size ({size} bytes) > maximum frame size ({self.frame_max} bytes)"
            )
        if offset < DATA_OFFSET:
            raise FrameFault(f"data offset ({offset} words) < minimum ({DATA_OFFSET} words)")
        if offset * 4 > size:
            raise FrameFault(f"data offset ({offset * 4} bytes) > frame size ({size} bytes)")
        data = self.take(size)
        return None if data is None else Frame(kind, channel, data[offset * 4 :])

    def plain(self) -> int:
        """Returns what comes next, as `next_plain` does."""
        return next_plain(self._data, self._at)

    def publish_plain(
        self,
        place: tuple[int, int, int],
        most: tuple[int, int, int],
        names: bytes,
        target: PublishTarget,
        tag: int,
        sizes: MessageSizes,
        below: bytes | None,
    ) -> tuple[int, int, bool]:
        """Takes messages that need no closer look into a queue's batch.

        Args:
            place: channel, handle and snd-settle-mode of the link.
            most: messages, messages when they are settled, bytes of a message.
            sizes: count the messages.
            below: see `amqp10_frames.publish_plain`.
        Returns:
            How many, the first delivery id, whether they are settled.
        """
        self._at, count, first, settled = publish_plain(
            self._data, self._at, self.frame_max, *place, *most, names, target, tag, sizes, below
        )
        return count, first, settled

    def settlements(
        self, channel: int, next_outgoing_id: int
    ) -> tuple[list[tuple[int, int]], bytes, tuple[int, ...] | None] | None:
        """Takes dispositions and flows that need no closer look. Returns ranges of delivery ids,
        the bytes of their outcome, and the fields of a link's flow; None: there are none."""
        found = read_settlements(self._data, self._at, self.frame_max, channel, next_outgoing_id)
        if found is None:
            return None
        self._at = found[0]
        return found[1:]

    @property
    def waiting(self) -> int:
        """Returns how many bytes are not taken yet."""
        return len(self._data) - self._at


def frame(channel: int, body: bytes, kind: int = AMQP) -> bytes:
    """Returns the bytes of a frame; without a body, a heartbeat."""
    return _HEAD.pack(HEADER_BYTES + len(body), DATA_OFFSET, kind, channel) + body
