# cython: annotation_typing=False
"""Forwarding of sealed batches to the node that leads, in order, when its link takes bulk."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from convoymq.shells.capacity import CapacityQueues, Waiting
from convoymq.transport.interfaces import Transport


class Forwarder(Waiting, Protocol):
    """A node's end of a queue that others may lead."""

    late: deque[tuple[int, int, bytes]]
    """Batches that wait until the leader's link takes bulk: (leader, term, frame)."""


class Forwarding:
    """Sends FORWARD frames. A term numbers leaderships: a batch for a former one is dropped, since
    clients have sent everything again to the next."""

    __slots__ = ("_capacity", "_full", "_transport")

    def __init__(self, transport: Transport, capacity: CapacityQueues) -> None:
        self._transport = transport
        self._full = transport.full
        self._capacity = capacity

    def forward(self, item: Forwarder, node: int, term: int, data: bytes) -> None:
        """Sends a FORWARD frame to the leader, behind those that wait."""
        late = item.late
        if late and late[0][:2] != (node, term):
            late.clear()
        if late or node in self._full:
            late.append((node, term, data))
            self._capacity.wait(node, item)
        else:
            self._transport.send(node, data)

    def send_late(self, item: Forwarder, node: int, leader: int, term: int) -> None:
        """Sends frames that waited for a node, unless another one leads by now."""
        late = item.late
        while late and late[0][0] == node and node not in self._full:
            _, sent_in, data = late.popleft()
            if (leader, term) == (node, sent_in):
                self._transport.send(node, data)
        if late and late[0][0] == node:
            self._capacity.wait(node, item)
