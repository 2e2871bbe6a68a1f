"""Requests and one-way notes between nodes, in CONTROL link frames.

    a  request id; 0 = a note that expects no answer
    b  kind of request; with flag 1 the frame is the answer to request `a`
    flags  1 answer, 2 the answer is a refusal (`model.errors.refusal_to_builtins`)
    c, d   free for the kind (raw kinds put numbers there)

The body is msgpack, except for raw kinds, whose handler gets the frame as it came. Nothing here is
ordered against bulk traffic; within one link frames keep their order.

Links are up before the node has opened its queues. A plane made with `holding` keeps all frames but
answers and those of `EARLY_KINDS` until `open`, in their order; they are void with their link.
"""

from __future__ import annotations

import asyncio
from collections import Counter
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
from convoymq.transport.interfaces import Transport

FLAG_ANSWER = 1
FLAG_REFUSED = 2
OUTSTANDING_MAX = 10_000

KIND_CLASSIC = 1
"""Raw: commands for a classic queue's home node, and events back."""
KIND_REPLY = 2
"""Raw: a message for a direct reply-to consumer."""
KIND_REPLY_EXISTS = 3
KIND_LIST = 4
KIND_CLOSE_CONNECTION = 5
KIND_ALARM = 6
KIND_QUEUE_COUNTS = 7
KIND_CLASSIC_COUNTS = 8
KIND_JOIN = 9
KIND_RESERVATION = 10
KIND_STREAM = 11
KIND_SESSIONS = 12
"""Question to a node about its sessions: those that are not live."""
KIND_FOUND = 13
KIND_RECOVERY = 14
"""Requests of a recovery from a lost majority to other nodes (`convoymq.node.recovery`)."""
KIND_METADATA_END = 15
"""Question for the end of a node's metadata log (`convoymq.metadata.reads`)."""
KIND_GROUP_ADMIN = 20
"""Operations on a group: its leadership and its members (`broker.group_requests`)."""
#: Changes the prefetch of consumers that run: [vhost, queue, consumer tag, prefetch].
KIND_PREFETCH = 22
KIND_TOPIC_GROUP = 23
"""Between members of topics' groups and their coordinators (`broker.topics.group_messages`)."""
KIND_TOPIC_SCALING = 24
"""Question for what the autoscaler of a topic decides: [vhost, topic], to the metadata leader."""
KIND_OPERATOR = 21
"""Requests of an operator to another node than the one on the own machine (`operator_access`)."""
KIND_FREE = 32
"""Kinds from here on belong to other rooms."""
EARLY_KINDS = frozenset((KIND_JOIN, KIND_FOUND, KIND_RECOVERY, KIND_OPERATOR))
"""Kinds that are answered before a node has opened its queues."""
HELD_BYTES_MAX = 16 << 20
"""Bytes of frames that wait for `open`, of one node. Beyond them its link is dropped."""
HELD_S_MAX = 5.0
"""A request that waited for longer is not answered any more: nobody waits for that."""
SINCE_0_3 = frozenset((KIND_GROUP_ADMIN, KIND_OPERATOR, KIND_PREFETCH))
"""Nodes of earlier releases do not answer these."""

Body: TypeAlias = Any
"""Body of a request or its answer: the two ends of its kind agree on what it is."""
Handler = Callable[[int, Body], Awaitable[object]]
Reply = Callable[[object], None]
ReplyingHandler = Callable[[int, Body, Reply], Awaitable[None]]
RawHandler = Callable[[int, bytes], None]


class ControlPlane:
    """One node's end of all control conversations."""

    def __init__(
        self,
        node_id: int,
        transport: Transport,
        *,
        holding: bool = False,
        drop_link: Callable[[int, str], None] = lambda node, reason: None,
    ) -> None:
        """
        Args:
            holding: frames wait for `open`.
            drop_link: breaks the link to a node, for a reason.
        """
        self.node_id = node_id
        self._holding = holding
        self._closed = False
        self._drop_link = drop_link
        #: Node -> (when it came, frame).
        self._held: dict[int, list[tuple[float, bytes]]] = {}
        self._held_bytes: Counter[int] = Counter()
        self._makers: dict[int, Callable[[], object]] = {}
        self.transport = transport
        self._handlers: dict[int, ReplyingHandler] = {}
        self._raw: dict[int, RawHandler] = {}
        self._next = 0
        self._waiting: dict[int, tuple[int, asyncio.Future[object]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_older: Callable[[int], bool] = lambda node: False
        """True for a node whose release does not know `SINCE_0_3`; set by who knows."""

    def handle(self, kind: int, handler: Handler) -> None:
        """Registers who answers requests of a kind; called with (node, decoded body)."""

        async def answer(node: int, body: object, reply: Reply) -> None:
            reply(await handler(node, body))

        self.handle_replying(kind, answer)

    def handle_replying(self, kind: int, handler: ReplyingHandler) -> None:
        """The same for who decides when the answer is sent; called with (node, decoded body,
        reply). The answer leaves in `reply`, which may be called later, or never."""
        assert kind not in self._handlers
        self._handlers[kind] = handler

    def handle_raw(self, kind: int, handler: RawHandler) -> None:
        """Registers who takes raw frames of a kind; called with (node, whole frame)."""
        assert kind not in self._raw
        self._raw[kind] = handler

    def handle_late(self, kind: int, make: Callable[[], object]) -> None:
        """Has `make` register who answers requests of a kind when the first one comes."""
        self._makers[kind] = make

    def open(self, take: Callable[[int, bytes], None]) -> None:
        """Ends the hold: everything that a frame may be about is open. `take` gets what waited."""
        self._holding = False
        held, self._held = self._held, {}
        self._held_bytes.clear()
        now = asyncio.get_running_loop().time()
        for node, frames in held.items():
            for came, data in frames:
                number, kind = frame_header(data)[4:6]
                is_late = bool(number) and kind not in self._raw and now - came > HELD_S_MAX
                if not is_late:
                    take(node, data)

    async def request(self, node: int, kind: int, body: object, timeout: float) -> Body:
        """Asks a node, itself included, and returns the answer.

        Raises:
            Refused: the node said no, or its release does not know the request.
            Unavailable: it is away, or did not answer in time.
        """
        if node == self.node_id:
            own: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            await self._handlers[kind](node, body, own.set_result)
            return await own
        if not self.transport.is_connected(node):
            raise Unavailable(f"node {node} is not connected")
        if kind in SINCE_0_3:
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
        """Raises PreconditionFailed when a node does not know the requests of `SINCE_0_3`."""
        if self.is_older(node):
            raise PreconditionFailed(f"node {node} has an older release, which does not do this")

    def tell(self, node: int, kind: int, body: object) -> None:
        """Sends a note; lost when the node is away."""
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
        """A CONTROL frame came in. Raises PeerError when it is malformed."""
        try:
            _, _, flags, _, number, kind, _, _ = frame_header(data)
            if self._holding and not flags & FLAG_ANSWER and kind not in EARLY_KINDS:
                self._hold(node, data)
                return
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
            # Of a later release; or the node stops, and its links end soon.
            return
        # Answers may take long; the set keeps the tasks until they are done, `close` ends them.
        task = asyncio.get_running_loop().create_task(
            self._answer(handler, node, number, kind, body)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _hold(self, node: int, data: bytes) -> None:
        held = self._held.setdefault(node, [])
        held.append((asyncio.get_running_loop().time(), data))
        self._held_bytes[node] += len(data)
        if self._held_bytes[node] > HELD_BYTES_MAX:
            # Nothing is lost in silence: with the link both ends give up what hangs on it.
            self._forget_held(node)
            self._drop_link(
                node, "it sends more than can wait until this node has opened its queues"
            )

    def _forget_held(self, node: int) -> None:
        self._held.pop(node, None)
        self._held_bytes.pop(node, None)

    def on_node_down(self, node: int) -> None:
        """The link is gone: nobody answers from there, nor waits for an answer."""
        self._forget_held(node)
        for asked, answer in list(self._waiting.values()):
            if asked == node and not answer.done():
                answer.set_exception(Unavailable(f"node {node} is not connected"))

    async def close(self) -> None:
        """Ends answers under way; nothing is answered any more."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
