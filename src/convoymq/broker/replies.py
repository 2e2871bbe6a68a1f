"""Direct reply-to across nodes: tokens, and one-way delivery to the channel that made one.

A token is node id, incarnation, a counter and random bytes, in URL-safe base64, so any node
knows where to send, and nobody can guess one. Replies to a channel that is gone are dropped; so are
those to a node that does not take them: nobody keeps replies, and they must not break its link.
"""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Callable

from convoymq.broker.registry import Counters
from convoymq.kernels.link_frames import HEADER_SIZE, frame_header
from convoymq.model.errors import BrokerError
from convoymq.transport.control import ControlPlane
from convoymq.transport.frame_kinds import KIND_REPLY, KIND_REPLY_EXISTS

_TOKEN = struct.Struct(">BIQ")
RANDOM_BYTES = 8
EXISTS_TIMEOUT_S = 5.0


class ReplyRoutes:
    """The direct reply-to consumers of this node, and the way to those of others.

    `backlog_bytes_max`: replies are dropped while more waits to be written to their node.
    """

    def __init__(
        self,
        control: ControlPlane,
        incarnation: int,
        backlog_bytes_max: int,
        counters: Counters,
    ) -> None:
        self._control = control
        self._counters = counters
        self.backlog_bytes_max = backlog_bytes_max
        self._incarnation = incarnation
        self._next = 0
        self._routes: dict[str, Callable[[bytes], None]] = {}
        control.handle_raw(KIND_REPLY, self._on_frame)
        control.handle(KIND_REPLY_EXISTS, self._on_exists)

    def register(self, deliver: Callable[[bytes], None]) -> str:
        """Returns a new token; `deliver` gets each record that is published to it."""
        self._next += 1
        raw = _TOKEN.pack(self._control.node_id, self._incarnation, self._next)
        token = base64.urlsafe_b64encode(raw + os.urandom(RANDOM_BYTES)).decode().rstrip("=")
        self._routes[token] = deliver
        return token

    def unregister(self, token: str) -> None:
        """The consumer is gone."""
        self._routes.pop(token, None)

    def publish(self, token: str, record: bytes) -> bool:
        """Hands a record to the consumer, wherever it is; False when it is known to be gone."""
        node = _node_of(token)
        if node == self._control.node_id:
            deliver = self._routes.get(token)
            if deliver is None:
                self._counters.dropped_replies += 1
                return False
            deliver(record)
            return True
        links = self._control.transport
        if node is None or not links.is_connected(node):
            self._counters.dropped_replies += 1
            return False
        if links.backlog_bytes(node) > self.backlog_bytes_max:
            # As for a client that reads too slowly.
            self._counters.dropped_replies += 1
            return True
        encoded = token.encode()
        self._control.send_raw(node, KIND_REPLY, (encoded, record), c=len(encoded))
        return True

    async def exists(self, token: str) -> bool:
        """Returns whether the consumer exists."""
        node = _node_of(token)
        if node is None:
            return False
        try:
            answer = await self._control.request(node, KIND_REPLY_EXISTS, token, EXISTS_TIMEOUT_S)
        except BrokerError:
            return False
        return bool(answer)

    def _on_frame(self, node: int, data: bytes) -> None:
        length = frame_header(data)[6]
        middle = HEADER_SIZE + length
        deliver = self._routes.get(data[HEADER_SIZE:middle].decode("ascii", "replace"))
        if deliver is None:
            self._counters.dropped_replies += 1
        else:
            deliver(data[middle:])

    async def _on_exists(self, node: int, token: object) -> bool:
        return token in self._routes


def _node_of(token: str) -> int | None:
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    except ValueError:
        return None
    return raw[0] if len(raw) == _TOKEN.size + RANDOM_BYTES else None
