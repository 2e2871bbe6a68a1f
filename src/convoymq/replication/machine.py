"""The contract of replicated state machines: what a replica calls, and the effects it carries out.

The shell (`groups`) and the simulator drive machines by it; machines import nothing of either.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

#: One effect of a machine: a tuple whose first item is one of the EFFECT_* constants.
Effect = tuple[Any, ...]

EFFECT_APPLIED = 1
"""(kind, session, seq, status, reply): the command was applied; status 0 = ok, 1 = rejected."""
EFFECT_DELIVER = 2
"""(kind, session, consumer, first message id, index, command offset in the entry, first record,
count, acquired count, failed delivery count[, annotations]): hand records [first, first + count)
to the consumer."""
EFFECT_ACTIVITY = 3
"""(kind, session, consumer, whether): the consumer of a queue with a single active one is served
from now on, or no more; 2: another consumer has its link, and what it held."""
EFFECT_GAP = 4
"""(kind, session, last seq): commands after `last seq` were lost; resend them."""
EFFECT_TIMER = 5
"""(kind, due ms): the leader proposes TICK at that time. Leader only."""
EFFECT_NOTE = 6
"""(kind, event name, fields dict): something for the log file. Leader only."""
EFFECT_REFUSING = 7
"""(kind, whether): publishers are to be refused from now on, or no more. Every replica."""
EFFECT_UNUSED = 8
"""(kind,): the queue was not used for as long as it may be, and is to be deleted. Leader only."""
EFFECT_DEAD_LETTERS = 9
"""(kind, strategy, reason, index, command offset in the entry, first record, count, annotations):
these messages left the queue other than by acknowledgement (`queues.quorum.dead_letters`). Leader
only."""
EFFECT_DEDUPLICATED = 13
"""(kind, count): so many messages were repeats by message-id, and dropped. Leader only."""

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
        """Returns the command types that exist in a version, as `supported.command_table` makes
        it."""

    def apply(self, index: int, time_ms: int, data: bytes) -> None:
        """Applies a `commands` entry (`data` = the whole entry); appends to `effects`. Raises
        UnknownCommand for a command that it does not know: none is ever skipped."""

    def snapshot(self) -> bytes:
        """Returns the state, without message bodies."""

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
        """Returns the first entry index of `live_ranges`, or one near it, found quickly; NEVER when
        there is none. Bodies below it are not expected to be read."""

    def session_nodes(self) -> frozenset[int]:
        """Nodes that have a session here: they want commit notices."""

    def next_due_ms(self) -> int | None:
        """Returns when a leader should propose TICK; None = nothing waits for a time."""

    def at_rest(self) -> bool:
        """Nobody waits for what a settle would free."""

    def state_hash(self) -> int:
        """Equal on replicas that applied the same index."""
