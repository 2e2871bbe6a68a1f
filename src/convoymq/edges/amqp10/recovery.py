"""Links that go on where an older one of the same name ended (ADR 0202).

A link is the same when its client's container id, its name and its direction are, for one user of
one virtual host. Two of these are not attached at a time: the newer one takes the name, and the
older one is detached with `amqp:link:stolen`.

| delivery to a client, by its map | what the queue does                                           |
|----------------------------------|---------------------------------------------------------------|
| an outcome                       | takes it; the answer's map leaves the delivery out            |
| no state                         | the client has the message: the delivery is in the answer's   |
|                                  | map, and in a transfer with `resume`, without the message     |
| `received`, or not in the map    | returns it, as if it had not been sent                        |

| delivery of a client, by its map | answer's map                                                  |
|----------------------------------|---------------------------------------------------------------|
| the queue has it                 | `accepted`; its resumed transfer is answered and dropped      |
| the queue does not have it       | leaves it out; what is still on its way is refused            |

Source: OASIS AMQP 1.0 part 2 sections 2.6.1, 2.6.3 and 2.6.13.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from convoymq.edges.amqp10.errors import NOT_IMPLEMENTED, link_fault
from convoymq.edges.amqp10.link import SETTLED
from convoymq.edges.amqp10.outcomes import Settle, ranges_of, settle_of
from convoymq.edges.amqp10.outgoing import Pending
from convoymq.edges.amqp10.performatives import Accepted, Attach, Transfer
from convoymq.edges.amqp10.states import LinkState
from convoymq.messages.amqp10.values import Value, encode
from convoymq.queues.interface import Queue
from convoymq.queues.link_claims import KEY_BYTES, TAGGED, TAGS_MAX, digest_of

if TYPE_CHECKING:
    from convoymq.edges.amqp10.sending import Sender
    from convoymq.edges.amqp10.session import Session

TAG_BYTES = (4, 8)
ATTACH_BYTES_MAX = 4_096
"""Of an attach without its map."""


def key_of(session: Session, attach: Attach) -> bytes:
    """Returns what identifies a link in the cluster."""
    connection = session.connection
    opened = connection.peer_open
    container = opened.container_id if opened is not None else ""
    names = [connection.vhost, connection.user.name, container, attach.name, attach.role]
    return blake2b(encode(names), digest_size=KEY_BYTES).digest()


def resumes(attach: Attach) -> bool:
    """Returns whether a client says what it has of a link before."""
    return bool(attach.unsettled) or attach.incomplete_unsettled


def check_resumable(attach: Attach, queue: Queue | None) -> None:
    """Raises Fault: a link is to go on that leaves nothing behind."""
    if resumes(attach) and not is_resumable(attach, queue):
        raise link_fault(NOT_IMPLEMENTED, "Link recovery not supported")


def is_resumable(attach: Attach, queue: Queue | None) -> bool:
    """Returns whether a link to a queue may go on later."""
    return queue is not None and queue.link_resume_ms > 0 and attach.snd_settle_mode != SETTLED


class Reduced(NamedTuple):
    """Deliveries of a queue to a link, as its client's map has them."""

    kept: list[int]
    """Message ids that the client holds."""
    returned: list[tuple[int, int]]
    """Ranges of ids that it does not know."""
    settled: list[tuple[Settle, list[int]]]
    """Ids of messages with an outcome."""


def reduce_map(held: Sequence[int], known: Mapping[Value, Value], bytes_max: int) -> Reduced:
    """Compares the ranges of message ids that a queue has given a link with a client's map; what
    does not fit into the answer is as if the client had not named it. Raises Fault."""
    kept: list[int] = []
    settled: list[tuple[Value, list[int]]] = []
    room = (bytes_max - ATTACH_BYTES_MAX) // (max(TAG_BYTES) + 3)
    for tag, state in known.items():
        message_id = _message_id(tag)
        at = bisect_right(held, message_id)
        # Between a first and a last one of a range, or on its last one.
        if not (at % 2 or (at and held[at - 1] == message_id)):
            continue
        if state is None and len(kept) < room:
            kept.append(message_id)
        elif settled and settled[-1][0] == state:
            settled[-1][1].append(message_id)
        else:
            settled.append((state, [message_id]))
    told = [(settle_of(state), ids) for state, ids in settled]
    outcomes = [(settle, ids) for settle, ids in told if settle is not None]
    ended = {each for _, ids in outcomes for each in ids} | set(kept)
    returned = [
        (each, each)
        for first, last in zip(held[::2], held[1::2], strict=True)
        for each in range(first, last + 1)
        if each not in ended
    ]
    return Reduced(sorted(kept), returned, outcomes)


def _message_id(tag: Value) -> int:
    if isinstance(tag, bytes) and len(tag) in TAG_BYTES:
        return int.from_bytes(tag, "big")
    return -1


def resume(link: Sender, attach: Attach, held: Sequence[int]) -> dict[Value, Value] | None:
    """Brings what a queue has given a link in line with what its client has. Returns the map of the
    answer. Raises Fault."""
    if not resumes(attach):
        return None
    most = link.session.connection.peer_frame_max
    found = reduce_map(held, attach.unsettled or {}, most)
    for settle, ids in found.settled:
        settle(link, ranges_of((each, each) for each in ids))
    if found.returned:
        link.client.return_(link.number, ranges_of(found.returned), failed=False, untried=True)
    link.resumed = Resumed(link, found.kept)
    return {link.tag_of(message_id): None for message_id in found.kept}


class Resumed(Pending):
    """Deliveries that a client has from before; their transfers use its credit."""

    __slots__ = ("ids", "is_queued")

    link: Sender

    def __init__(self, link: Sender, ids: Sequence[int] = ()) -> None:
        super().__init__(link)
        self.ids = list(ids)
        self.is_queued = False

    def want(self) -> bool:
        """Has transfers sent as far as there is credit; False: nothing is left to be sent."""
        if not self.ids:
            return False
        if not self.is_queued and self.link.credit:
            self.is_queued = True
            self.link.session.outgoing.append(self)
        return True

    def send(self) -> bool:
        """See `Pending`."""
        link, session = self.link, self.link.session
        while self.ids and link.credit and link.state is LinkState.ATTACHED:
            if session.remote_incoming_window <= 0 or session.connection.output_full():
                return False
            message_id = self.ids.pop(0)
            session.send(
                Transfer(
                    handle=link.handle,
                    delivery_id=session.next_delivery_id,
                    delivery_tag=link.tag_of(message_id),
                    message_format=0,
                    settled=False,
                    resume=True,
                )
            )
            session.count_transfers(1)
            session.unsettled.add(session.next_delivery_id, link, message_id)
            link.count_sent(1)
        self.is_queued = False
        if not self.ids and link.state is LinkState.ATTACHED:
            # Now it is the turn of others.
            link.ask()
        return True


class Claim:
    """A publisher's link, as its queue knows it.

    Args:
        key: what identifies it.
    """

    def __init__(self, queue: Queue, key: bytes) -> None:
        self.queue = queue
        self._key = key
        self._epoch = 0
        self.known: set[bytes] = set()
        """Tags that the queue has, of those that its client has asked about."""

    async def begin(self, attach: Attach) -> None:
        """Begins the link anew: what an older one still has on its way is not taken any more.
        Raises BrokerError."""
        tags = [tag for tag in attach.unsettled or {} if isinstance(tag, bytes)][:TAGS_MAX]
        self._epoch, known = await self.queue.claim_link(self._key, tags)
        self.known = {tags[at] for at in known}

    def map(self) -> dict[Value, Value] | None:
        """Returns the map of the answer."""
        return {tag: Accepted() for tag in sorted(self.known)} or None

    def name(self, tag: bytes) -> tuple[bytes, int]:
        """Returns what a queue knows a message by."""
        return self._key + digest_of(tag), TAGGED | self._epoch
