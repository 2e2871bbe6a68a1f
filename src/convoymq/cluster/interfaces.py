"""What the replica host needs from the world: transport, clock, randomness, storage, machines.

The production shells (`links`, `node`) and the simulator implement these protocols; `host` and
`replica` know nothing else. Nothing here blocks and nothing here awaits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

#: One effect of a machine: a tuple whose first item is one of the EFFECT_* constants.
Effect = tuple[Any, ...]

EFFECT_APPLIED = 1
"""(kind, session, seq, status, reply): the command was applied; status 0 = ok, 1 = rejected."""
EFFECT_DELIVER = 2
"""(kind, session, consumer, first message id, index, command offset in the entry, first record,
count, acquired count, delivery count): hand records [first, first + count) to the consumer."""
EFFECT_GAP = 4
"""(kind, session, last seq): commands after `last seq` were lost; resend them."""
EFFECT_TIMER = 5
"""(kind, due ms): the leader proposes TICK at that time. Leader only."""
EFFECT_NOTE = 6
"""(kind, event name, fields dict): something for the log file. Leader only."""

NEVER = 1 << 62
"""An entry index that no log reaches."""

FLAG_NODE_GONE = 1
"""Of the command NODE_DOWN: the node's process is known to be gone, not only silent."""


class Machine(Protocol):
    """A replicated state machine: decides only from the log (DESIGN section 2).

    Its rules have a version, which only an entry of the log changes (ADR 0016). An exception out of
    `apply`, `set_version` or `restore` stops the replica.
    """

    KIND: str
    """Name of the machine's rules: replicas announce which versions of them they support."""
    VERSION: int
    """Newest version that this build supports."""
    OLDEST_VERSION: int
    """Oldest version that this build supports."""
    version: int
    """In force: 1 in a new group."""
    time_ms: int
    """The highest time of an entry that the state remembers; 0 = none."""
    effects: list[Effect]

    def set_version(self, version: int) -> None:
        """Carries out a `machine version` entry: `version` is in force from the next entry on.
        Raises UnsupportedVersion."""

    def command_types(self, version: int) -> bytes:
        """The command types that exist in a version, as `supported.command_table` makes it."""

    def apply(self, index: int, time_ms: int, data: bytes) -> None:
        """Applies a `commands` entry (`data` = the whole entry); appends to `effects`. Raises
        UnknownCommand for a command that it does not know: none is ever skipped."""

    def snapshot(self) -> bytes:
        """The state, without message bodies."""

    def restore(self, state: bytes) -> None:
        """Replaces the state by that of `snapshot()`. Produces no effects. Raises
        UnsupportedVersion, ValueError."""

    def resend(self, session_node: int) -> None:
        """Appends DELIVER effects for all that is checked out to sessions of that node, APPLIED for
        the last seq of each of its sessions: after a snapshot install, or when the leader takes
        over the sending for a node. Receivers drop repeats."""

    def live_ranges(self) -> Iterable[tuple[int, int]]:
        """Ascending, disjoint, inclusive ranges of entry indexes whose bodies are still needed."""

    def oldest_live(self) -> int:
        """The first entry index of `live_ranges`, or one near it, found quickly; NEVER when there
        is none. Bodies below it are not expected to be read."""

    def session_nodes(self) -> frozenset[int]:
        """Nodes that have a session here: they want commit notices."""

    def next_due_ms(self) -> int | None:
        """When a leader should propose TICK; None = nothing waits for a time."""

    def at_rest(self) -> bool:
        """Nobody waits for what a settle would free."""

    def state_hash(self) -> int:
        """Equal on replicas that applied the same index."""


class EffectSink(Protocol):
    """Executes a machine's effects on this node. Implemented by the queue shells."""

    def on_effects(self, effects: Sequence[Effect], replica: Any) -> None:
        """All effects of one apply, in order; the sink picks those for this node's sessions, and
        forwards those for nodes without a replica when `replica.is_leader`."""

    def on_leader(self, group: int, leader: int | None, term: int) -> None:
        """This node learned who leads the group (None: nobody known). For a leader: after the no-op
        of its term was applied here, and again when the link to it came back: whatever is
        pending is resent then."""

    def on_link_frame(
        self, node: int, kind: int, group: int, a: int, b: int, c: int, d: int, body: bytes
    ) -> None:
        """An APPLIED or DELIVER frame: an effect that another node's replica carries out for
        this one."""

    def on_restored(self) -> None:
        """The machine's state was replaced by a snapshot."""

    def on_replica_gone(self) -> None:
        """This node's replica left the group or stopped, possibly before it applied what the
        leader counted on it for: whatever clients here miss is to be asked for."""


class Transport(Protocol):
    """Frames to other nodes. FIFO per peer while connected; anything may be lost when a link
    breaks."""

    def send(self, node: int, frame: bytes, body: Sequence[bytes] = ()) -> None:
        """Queues a 48-byte-header frame; `body` parts follow it on the wire without being copied
        (the header's length covers them)."""

    def is_connected(self, node: int) -> bool:
        """True while the link to the node is up and the node is not suspected."""

    def backlog_bytes(self, node: int) -> int:
        """Bytes queued to that node and not yet written."""

    full: set[int]
    """Nodes that take no bulk for now: entries, forwarded commands, deliveries and snapshots wait
    for `ReplicaHost.on_room`. What is sent nevertheless is sent."""


class Clock(Protocol):
    """Time, handed in."""

    def now_ms(self) -> int:
        """Wall clock, ms since the epoch. May jump."""

    def monotonic_ms(self) -> int:
        """Never falls."""

    def call_later(self, delay_ms: int, callback: Any, *arguments: Any) -> Any:
        """Calls back once after the delay; the handle has `cancel()`."""

    def random(self) -> float:
        """Uniform in [0, 1): seeded in the simulator."""
