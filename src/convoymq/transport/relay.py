"""Reaches a node to which the own link is cut through one that is linked to both. Sans-IO.

Every node tells its neighbours (those it is linked to directly) who its neighbours are. A node that
is no neighbour but told by one is *relayed*: frames to it travel as the body of RELAY frames, which
the neighbour hands on. Never through two: a relay takes only its neighbours' own frames, and only
for other neighbours.

What happens to a pair of nodes, at each end:

    state    input                                     next      output
    -------  ----------------------------------------  --------  ---------------------------------
    direct   link lost                                 missing   (the owner of the link says down)
    direct   suspected for `wait_ms`, a relay is there  direct    Break: the owner drops the link
    missing  told by a neighbour for `wait_ms`         opening   Send OPEN
    missing  OPEN                                      opening   Send OPEN
    opening  tick                                      opening   Send OPEN again
    opening  OPEN or frame with the own session        up        Up
    up       frame in order                            up        Deliver
    up       frame missing, BROKEN, OPEN anew          opening   Down, Send OPEN (own session new)
    up       the relay or the node is suspected        up        Suspect; Unsuspect when it is over
    any      the relay lost, or it lost the node       missing   Down when it was up
    any      direct link                               direct    Down when it was up

Frames of one session arrive in the order of their kind (urgent or bulk), without a gap, or the pair
begins a new session: both ends see down and up, as with a connection that breaks.

RELAY frames: a = to, b = from, c = sender's session · 2^32 + receiver's (0 = not known),
d = number within the session and kind, from 1. Flags: 1 urgent, 2 OPEN (body: what the node says of
itself), 4 BROKEN (from the relay: a frame of session c was lost), 8 the sender of OPEN is up.

`linked`, `unlinked`, `suspected` and `heard` say what happens to direct links, `on_frame` takes
RELAY frames, `tick` is called about every 100 ms. All return outputs, to be carried out in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from convoymq.kernels.link_frames import (
    FRAME_HEARTBEAT,
    FRAME_HELLO,
    FRAME_RELAY,
    HEADER_SIZE,
    frame,
    frame_header,
)

FLAG_URGENT = 1
FLAG_OPEN = 2
FLAG_BROKEN = 4
FLAG_UP = 8
WAIT_MS = 1_000
BACKLOG_MAX_BYTES = 16 << 20
SESSION_MASK = 0xFFFFFFFF
#: Kinds that say something about one link are not carried over another.
NOT_RELAYED = frozenset({FRAME_HEARTBEAT, FRAME_HELLO, FRAME_RELAY})

Neighbours = list[list[int]]
"""[node, incarnation, 1 when suspected else 0] of every direct link."""


@dataclass(frozen=True, slots=True)
class Up:
    """The node is reached through a relay."""

    node: int
    incarnation: int
    hello: bytes


@dataclass(frozen=True, slots=True)
class Down:
    """The relayed node is not reached any more, or frames were lost."""

    node: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """The relayed node, or the relay, is silent."""

    node: int


@dataclass(frozen=True, slots=True)
class Unsuspect:
    """The node is heard again; nothing was lost."""

    node: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a frame on the direct link to `to`."""

    to: int
    data: bytes
    urgent: bool


@dataclass(frozen=True, slots=True)
class Deliver:
    """A frame of a relayed node arrived."""

    node: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Break:
    """The direct link is of no use, and there is a relay: drop it, then call `unlinked`."""

    node: int
    relay: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Send `neighbours()` on every direct link."""


Output = Up | Down | Suspect | Unsuspect | Send | Deliver | Break | Announce


@dataclass(slots=True)
class _Neighbour:
    """A node with a direct link."""

    incarnation: int
    suspected_since: int | None = None
    told: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """The node's neighbours: incarnation, suspected."""


@dataclass(slots=True)
class _Pair:
    """Pair of this node and one that is relayed."""

    node: int
    hop: int
    own: int
    """Session of this node; `theirs` is the other end's, 0 = not known."""
    theirs: int = 0
    incarnation: int = 0
    hello: bytes = b""
    up: bool = False
    suspected: bool = False
    hop_silent_since: int | None = None
    sent: list[int] = field(default_factory=lambda: [0, 0])
    received: list[int] = field(default_factory=lambda: [0, 0])
    """Numbers of the last frames: bulk, urgent."""


class RelayTable:
    """See the module docstring.

    Args:
        node: this node.
        first_session: a number in 1 .. 2^31 that no earlier incarnation of this node began with.
        own_hello: what this node says of itself.
        judge: reads what another node says of itself: its incarnation; 0 = it is not accepted.
        backlog_bytes: bytes queued on the direct link to a node.
        wait_ms: a pair is not relayed before its link was gone, or silent, for so long.
        backlog_max_bytes: beyond it frames of others are dropped.
    """

    def __init__(
        self,
        node: int,
        first_session: int,
        own_hello: Callable[[], bytes],
        judge: Callable[[int, bytes], int],
        backlog_bytes: Callable[[int], int],
        *,
        wait_ms: int = WAIT_MS,
        backlog_max_bytes: int = BACKLOG_MAX_BYTES,
    ) -> None:
        assert 0 < first_session < 1 << 31
        self.node = node
        self._session = first_session
        self._own_hello = own_hello
        self._judge = judge
        self._backlog_bytes = backlog_bytes
        self._wait_ms = wait_ms
        self._backlog_max = backlog_max_bytes
        self._direct: dict[int, _Neighbour] = {}
        self._pairs: dict[int, _Pair] = {}
        self._missing: dict[int, int] = {}
        """Nodes that neighbours tell and that are not reached, and since when."""
        self.dropped = 0
        """Frames of others that were not handed on."""

    # -- questions --------------------------------------------------------------------------

    def is_up(self, node: int) -> bool:
        """Returns whether a node is reached through a relay."""
        pair = self._pairs.get(node)
        return pair is not None and pair.up

    def is_suspected(self, node: int) -> bool:
        """Returns whether a relayed node, or its relay, is silent."""
        pair = self._pairs.get(node)
        return pair is not None and pair.up and pair.suspected

    def hop_of(self, node: int) -> int:
        """Returns the neighbour through which a node is reached; 0 = it is not relayed."""
        pair = self._pairs.get(node)
        return pair.hop if pair is not None and pair.up else 0

    def sessions_of(self, node: int) -> tuple[int, int]:
        """Returns (this node's session, the other end's) with a relayed node."""
        pair = self._pairs.get(node)
        return (pair.own, pair.theirs) if pair is not None else (0, 0)

    def nodes(self) -> list[int]:
        """Nodes that are reached through a relay, ascending."""
        return sorted(node for node, pair in self._pairs.items() if pair.up)

    def neighbours(self) -> Neighbours:
        """Returns what other nodes are told of this one's direct links."""
        return [
            [node, each.incarnation, int(each.suspected_since is not None)]
            for node, each in sorted(self._direct.items())
        ]

    def wrap(self, node: int, size: int, urgent: bool) -> tuple[int, bytes] | None:
        """Returns (neighbour, header) under which a frame of `size` bytes travels; None = not
        reached."""
        pair = self._pairs.get(node)
        if pair is None or not pair.up:
            return None
        pair.sent[urgent] += 1
        flags = FLAG_URGENT if urgent else 0
        return pair.hop, frame(
            FRAME_RELAY, flags, 0, node, self.node, _sessions(pair), pair.sent[urgent],
            body_length=size,
        )  # fmt: skip

    # -- direct links -----------------------------------------------------------------------

    def linked(self, node: int, incarnation: int, _now_ms: int) -> list[Output]:
        """A direct link stands. Comes before the node is used through it."""
        outputs = self._close(node)
        self._missing.pop(node, None)
        self._direct[node] = _Neighbour(incarnation)
        return [*outputs, Announce()]

    def unlinked(self, node: int, now_ms: int) -> list[Output]:
        """A direct link is gone."""
        gone = self._direct.pop(node, None)
        if gone is None:
            return []
        # Its silence counts as absence.
        since = gone.suspected_since
        self._missing[node] = now_ms if since is None else since
        return [*self._check_pairs(now_ms), Announce()]

    def suspected(self, node: int, is_suspected: bool, now_ms: int) -> list[Output]:
        """A direct link is silent, or was heard again."""
        neighbour = self._direct.get(node)
        if neighbour is None or is_suspected == (neighbour.suspected_since is not None):
            return []
        neighbour.suspected_since = now_ms if is_suspected else None
        return [*self._check_pairs(now_ms), Announce()]

    def heard(self, node: int, told: object, now_ms: int) -> list[Output]:
        """A neighbour's `neighbours()` arrived; what makes no sense is ignored."""
        neighbour = self._direct.get(node)
        if neighbour is None or not isinstance(told, list):
            return []
        neighbour.told = {
            row[0]: (row[1], bool(row[2]))
            for row in told[:255]
            if isinstance(row, list) and [type(v) for v in row] == [int, int, int]
        }
        return self._check_pairs(now_ms)

    def forget(self, node: int) -> list[Output]:
        """Ends the relaying to a node at once; it may begin anew."""
        return self._close(node)

    def tick(self, now_ms: int) -> list[Output]:
        """Does what is due."""
        outputs: list[Output] = []
        for node, neighbour in self._direct.items():
            since = neighbour.suspected_since
            if since is not None and now_ms - since >= self._wait_ms:
                relays = self._relays(node)
                if relays:
                    outputs.append(Break(node, relays[0]))
        told = {node for each in self._direct.values() for node in each.told}
        for node in told - self._direct.keys() - self._pairs.keys() - {self.node}:
            since = self._missing.setdefault(node, now_ms)
            if now_ms - since < self._wait_ms:
                continue
            relays = self._relays(node)
            if relays:
                self._pairs[node] = _Pair(node, relays[0], self._next_session())
        for node in self._missing.keys() - told:
            if node not in self._direct:
                del self._missing[node]
        for pair in list(self._pairs.values()):
            if pair.up and self._is_better_elsewhere(pair, now_ms):
                outputs += self._begin_anew(pair)
            elif not pair.up:
                pair.hop = next(iter(self._relays(pair.node)), pair.hop)
                outputs.append(self._open(pair))
        return outputs

    # -- frames -----------------------------------------------------------------------------

    def on_frame(self, source: int, data: bytes, now_ms: int) -> list[Output]:
        """Takes a RELAY frame that a neighbour sent. Raises ValueError when it is malformed."""
        _, _, flags, _, to, sender, sessions, number = frame_header(data)
        if source not in self._direct:
            return []
        if to != self.node:
            return self._hand_on(source, to, sender, flags, sessions, data)
        if sender in self._direct or sender == self.node:
            # The direct link stands here; the other end will see it at any time.
            return []
        if flags & FLAG_BROKEN:
            pair = self._pairs.get(sender)
            ends = (sessions >> 32, sessions & SESSION_MASK)
            if pair is None or (pair.own, pair.theirs) not in (ends, ends[::-1]):
                return []
            return self._begin_anew(pair)
        if flags & FLAG_OPEN:
            return self._on_open(source, sender, sessions, bool(flags & FLAG_UP), data)
        return self._on_data(sender, sessions, flags & FLAG_URGENT, number, data)

    def _hand_on(
        self, source: int, to: int, sender: int, flags: int, sessions: int, data: bytes
    ) -> list[Output]:
        if sender != source or flags & FLAG_BROKEN:
            return []
        if to in self._direct and self._backlog_bytes(to) <= self._backlog_max:
            return [Send(to, data, bool(flags & FLAG_URGENT))]
        self.dropped += 1
        if flags & FLAG_OPEN:
            return []
        outputs: list[Output] = [Send(source, _broken(source, to, sessions), True)]
        if to in self._direct:
            outputs.append(Send(to, _broken(to, source, sessions), True))
        return outputs

    def _on_open(
        self, source: int, sender: int, sessions: int, is_up: bool, data: bytes
    ) -> list[Output]:
        told = self._direct[source].told.get(sender)
        hello = data[HEADER_SIZE:]
        incarnation = self._judge(sender, hello) if told is not None else 0
        if told is None or not incarnation or told[0] != incarnation:
            return []
        theirs, echo = sessions >> 32, sessions & SESSION_MASK
        outputs: list[Output] = []
        pair = self._pairs.get(sender)
        if pair is None:
            self._missing.pop(sender, None)
            pair = self._pairs[sender] = _Pair(sender, source, self._next_session())
        elif pair.up and pair.theirs != theirs:
            outputs += self._stop(pair)
        pair.theirs, pair.incarnation, pair.hello = theirs, incarnation, hello
        if echo == pair.own and not pair.up:
            outputs += self._go_up(pair)
        if not is_up or echo != pair.own:
            outputs.append(self._open(pair))
        return outputs

    def _on_data(
        self, sender: int, sessions: int, urgent: int, number: int, data: bytes
    ) -> list[Output]:
        pair = self._pairs.get(sender)
        if pair is None or not pair.theirs or sessions != pair.theirs << 32 | pair.own:
            return []
        # Who sends in this node's session has heard of it.
        outputs = [] if pair.up else self._go_up(pair)
        if number != pair.received[urgent] + 1:
            return [*outputs, *self._begin_anew(pair)]
        pair.received[urgent] = number
        inner = data[HEADER_SIZE:]
        if len(inner) < HEADER_SIZE or inner[4] in NOT_RELAYED:
            raise ValueError(f"frame of node {sender} that is not relayed")
        return [*outputs, Deliver(sender, inner)]

    # -- pairs ------------------------------------------------------------------------------

    def _relays(self, node: int) -> list[int]:
        """Neighbours that reach the node; those where nobody is silent, ascending."""
        return [
            hop
            for hop, neighbour in sorted(self._direct.items())
            if hop != node
            and neighbour.suspected_since is None
            and not neighbour.told.get(node, (0, True))[1]
        ]

    def _check_pairs(self, now_ms: int) -> list[Output]:
        """Compares all pairs with what is known of direct links now."""
        outputs: list[Output] = []
        for pair in list(self._pairs.values()):
            neighbour = self._direct.get(pair.hop)
            told = neighbour.told.get(pair.node) if neighbour is not None else None
            if neighbour is None or told is None or (pair.up and told[0] != pair.incarnation):
                outputs += self._close(pair.node)
                # Another relay need not wait: it is the absence that counts.
                self._missing[pair.node] = now_ms - (self._wait_ms if self._others(pair) else 0)
                continue
            silent = neighbour.suspected_since is not None or told[1]
            if not silent:
                pair.hop_silent_since = None
            elif pair.hop_silent_since is None:
                pair.hop_silent_since = now_ms
            if pair.up and silent != pair.suspected:
                pair.suspected = silent
                outputs.append(Suspect(pair.node) if silent else Unsuspect(pair.node))
        return outputs

    def _others(self, pair: _Pair) -> Iterable[int]:
        return [hop for hop in self._relays(pair.node) if hop != pair.hop]

    def _is_better_elsewhere(self, pair: _Pair, now_ms: int) -> bool:
        since = pair.hop_silent_since
        return since is not None and now_ms - since >= self._wait_ms and bool(self._others(pair))

    def _go_up(self, pair: _Pair) -> list[Output]:
        pair.up = True
        outputs: list[Output] = [Up(pair.node, pair.incarnation, pair.hello)]
        pair.suspected = pair.hop_silent_since is not None
        if pair.suspected:
            outputs.append(Suspect(pair.node))
        return outputs

    def _stop(self, pair: _Pair) -> list[Output]:
        """Ends the session; the next one has another number."""
        was_up = pair.up
        pair.up = pair.suspected = False
        pair.own = self._next_session()
        pair.theirs = 0
        pair.sent = [0, 0]
        pair.received = [0, 0]
        return [Down(pair.node)] if was_up else []

    def _begin_anew(self, pair: _Pair) -> list[Output]:
        outputs = self._stop(pair)
        relays = self._relays(pair.node)
        if relays:
            pair.hop = relays[0]
            pair.hop_silent_since = None
        return [*outputs, self._open(pair)]

    def _close(self, node: int) -> list[Output]:
        pair = self._pairs.pop(node, None)
        return [Down(node)] if pair is not None and pair.up else []

    def _open(self, pair: _Pair) -> Output:
        flags = FLAG_URGENT | FLAG_OPEN | (FLAG_UP if pair.up else 0)
        data = frame(
            FRAME_RELAY, flags, 0, pair.node, self.node, _sessions(pair), 0, self._own_hello()
        )
        return Send(pair.hop, data, True)

    def _next_session(self) -> int:
        self._session += 1
        return self._session


def _sessions(pair: _Pair) -> int:
    return pair.own << 32 | pair.theirs


def _broken(to: int, other: int, sessions: int) -> bytes:
    return frame(FRAME_RELAY, FLAG_URGENT | FLAG_BROKEN, 0, to, other, sessions, 0)
