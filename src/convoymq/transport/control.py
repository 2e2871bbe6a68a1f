"""Requests and one-way notes between nodes, in CONTROL link frames.

    a  request id; 0 = a note that expects no answer
    b  kind of request; with flag 1 the frame is the answer to request `a`
    flags  1 answer, 2 the answer is a refusal (`model.errors.refusal_to_builtins`)
    c, d   free for the kind (raw kinds put numbers there)

The body is msgpack, except for raw kinds, whose handler gets the frame as it came. Nothing here is
ordered against bulk traffic; within one link frames keep their order. The kinds, and which of them
wait until a node has opened its queues, are in `frame_kinds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from convoymq.kernels.link_frames import FRAME_CONTROL, HEADER_SIZE, frame, frame_header
from convoymq.model.errors import (
    BrokerError,
    PeerError,
    PreconditionFailed,
    Refused,
    Unavailable,
    refusal_from_builtins,
    refusal_to_builtins,
)
from convoymq.model.tasks import Tasks
from convoymq.transport.frame_kinds import CONTROL_KINDS, FLAG_ANSWER
from convoymq.transport.interfaces import Transport

FLAG_REFUSED = 2
OUTSTANDING_MAX = 10_000

Body: TypeAlias = Any
"""Body of a request or its answer: the two ends of its kind agree on what it is."""
Handler = Callable[[int, Body], Awaitable[object]]
Reply = Callable[[object], None]
ReplyingHandler = Callable[[int, Body, Reply], Awaitable[None]]
RawHandler = Callable[[int, bytes], None]


class ControlPlane:
    """One node's end of all control conversations."""

    def __init__(self, node_id: int, transport: Transport) -> None:
        self.node_id = node_id
        self._closed = False
        self._makers: dict[int, Callable[[], object]] = {}
        self.transport = transport
        self._handlers: dict[int, ReplyingHandler] = {}
        self._raw: dict[int, RawHandler] = {}
        self._next = 0
        self._waiting: dict[int, tuple[int, asyncio.Future[object]]] = {}
        self._tasks = Tasks()
        self.is_older: Callable[[int], bool] = lambda node: False
        """Returns whether a node's release does not know the kinds `since_0_3`. The broker sets it.
        """

    def handle(self, kind: int, handler: Handler) -> None:
        """Registers the handler of requests of a kind; called with (node, decoded body)."""

        async def answer(node: int, body: object, reply: Reply) -> None:
            reply(await handler(node, body))

        self.handle_replying(kind, answer)

    def handle_replying(self, kind: int, handler: ReplyingHandler) -> None:
        """Registers a handler that decides when the answer is sent; called with (node, decoded
        body, reply). `reply` sends the answer; it may be called later, or never."""
        assert kind in CONTROL_KINDS
        assert kind not in self._handlers
        self._handlers[kind] = handler

    def handle_raw(self, kind: int, handler: RawHandler) -> None:
        """Registers the handler of raw frames of a kind; called with (node, whole frame)."""
        assert CONTROL_KINDS[kind].raw
        assert kind not in self._raw
        self._raw[kind] = handler

    def handle_late(self, kind: int, make: Callable[[], object]) -> None:
        """Calls `make`, which registers the handler of a kind, when its first request arrives."""
        self._makers[kind] = make

    async def request(self, node: int, kind: int, body: object, timeout: float) -> Body:
        """Asks a node, itself included, and returns the answer.

        Raises:
            Refused: the node refused, or its release does not know the request.
            Unavailable: the node is not connected, or did not answer in time.
        """
        if node == self.node_id:
            own: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            await self._handlers[kind](node, body, own.set_result)
            return await own
        if not self.transport.is_connected(node):
            raise Unavailable(f"node {node} is not connected")
        if CONTROL_KINDS[kind].since_0_3:
            self.check_release(node)
        if len(self._waiting) >= OUTSTANDING_MAX:
            raise Unavailable("too many requests to other nodes are open")
        self._next += 1
        number = self._next
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (node, answer)
        try:
            self._send(node, 0, number, kind, body)
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise Unavailable(f"node {node} did not answer in time") from None
        finally:
            del self._waiting[number]

    def check_release(self, node: int) -> None:
        """Raises PreconditionFailed when a node does not know the kinds `since_0_3`."""
        if self.is_older(node):
            raise PreconditionFailed(f"node {node} has an older release, which does not do this")

    def tell(self, node: int, kind: int, body: object) -> None:
        """Sends a note, which is lost when the node is not connected."""
        if self.transport.is_connected(node):
            self._send(node, 0, 0, kind, body)

    def send_raw(
        self, node: int, kind: int, parts: Sequence[bytes], c: int = 0, d: int = 0, a: int = 0
    ) -> None:
        """Sends a raw frame whose body is `parts`, uncopied."""
        length = sum(len(part) for part in parts)
        self.transport.send(
            node, frame(FRAME_CONTROL, 0, 0, a, kind, c, d, body_length=length), parts
        )

    def on_frame(self, node: int, data: bytes) -> None:
        """Takes a CONTROL frame. Raises PeerError when it is malformed."""
        try:
            _, _, flags, _, number, kind, _, _ = frame_header(data)
            if kind in self._raw:
                self._raw[kind](node, data)
                return
            body = msgspec.msgpack.decode(memoryview(data)[HEADER_SIZE:])
        except (ValueError, msgspec.DecodeError) as error:
            raise PeerError(f"malformed control frame from node {node}: {error}") from error
        if flags & FLAG_ANSWER:
            self._on_answer(node, flags, number, body)
            return
        if kind in self._makers and kind not in self._handlers:
            self._makers.pop(kind)()
        handler = self._handlers.get(kind)
        if handler is None or self._closed:
            # The kind is of a later release; or this node stops, and its links end soon.
            return
        # Answers may take long; `close` ends them.
        self._tasks.spawn(self._answer(handler, node, number, kind, body))

    def on_node_down(self, node: int) -> None:
        """Fails the requests to a node whose link is gone."""
        for asked, answer in list(self._waiting.values()):
            if asked == node and not answer.done():
                answer.set_exception(Unavailable(f"node {node} is not connected"))

    async def close(self) -> None:
        """Ends the answers under way. Later requests get none."""
        self._closed = True
        await self._tasks.stop()

    async def _answer(
        self, handler: ReplyingHandler, node: int, number: int, kind: int, body: object
    ) -> None:
        def reply(found: object, flags: int = FLAG_ANSWER) -> None:
            if number and self.transport.is_connected(node):
                self._send(node, flags, number, kind, found)

        try:
            await handler(node, body, reply)
        except BrokerError as error:
            refusal = error if isinstance(error, Refused) else Refused(error.text)
            reply(refusal_to_builtins(refusal), FLAG_ANSWER | FLAG_REFUSED)

    def _on_answer(self, node: int, flags: int, number: int, body: Body) -> None:
        asked, answer = self._waiting.get(number, (0, None))
        if answer is None or asked != node or answer.done():
            return
        if flags & FLAG_REFUSED:
            answer.set_exception(refusal_from_builtins(list(body)))
        else:
            answer.set_result(body)

    def _send(self, node: int, flags: int, number: int, kind: int, body: object) -> None:
        encoded = msgspec.msgpack.encode(body, enc_hook=str)
        self.transport.send(
            node,
            frame(FRAME_CONTROL, flags, 0, number, kind, 0, 0, body_length=len(encoded)),
            (encoded,),
        )
