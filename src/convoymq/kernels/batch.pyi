"""Commands and the open batch that collects them: layout in docs/formats/entries-and-frames.md."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from convoymq.kernels.entries import Entry

COMMAND_SIZE: int  # 32, the header of a command

CMD_ENQUEUE: int
CMD_SETTLE: int
CMD_RETURN: int
CMD_DISCARD: int
CMD_CHECKOUT: int
CMD_CANCEL: int
CMD_CREDIT: int
CMD_GET: int
CMD_PURGE: int
CMD_SESSION_CLOSE: int
CMD_SESSION_DOWN: int
CMD_NODE_DOWN: int
CMD_NODE_UP: int
CMD_TICK: int
CMD_PRODUCER: int
CMD_RESERVATION: int
CMD_STORE_OFFSET: int
CMD_SESSION_OPEN: int
CMD_CONFIG: int
CMD_METADATA: int

class Chunk:
    """Owner of the bytes of one sealed builder; `data` is None until sealed."""

    data: bytes | None

class PendingCommand:
    """A command of a session that is not yet known to be applied."""

    seq: int
    type: int
    chunk: Chunk
    offset: int
    length: int
    messages: int
    """ENQUEUE: how many it publishes; 0 otherwise."""
    tags: list[int] | None
    """ENQUEUE: publish tags as ranges (first, last, …); None otherwise."""
    note: Any
    """For the client: what to do when it is applied."""
    def bytes(self) -> memoryview:
        """Returns the command as it stands in the sealed chunk. Raises ValueError before
        sealing."""

class CommandBuilder:
    """The open batch of one group on one node."""

    used: int
    """Bytes of commands so far (0 = nothing to send)."""
    full: bool
    deferrable: bool
    """All that is in it are settles, whose senders wait for no answer, and it is not full."""
    held: bool
    """Set by who leaves a deferrable batch for later: the next command calls `on_first` again."""
    on_first: Callable[[], None] | None
    """Called whenever the builder goes from empty to non-empty, and with the first command after
    `held` was set."""
    on_full: Callable[[], None] | None
    """Called before another record is added to a full builder: it has to be taken."""
    def __init__(
        self,
        on_first: Callable[[], None] | None = None,
        on_full: Callable[[], None] | None = None,
    ) -> None: ...
    def add(
        self, type: int, flags: int, session: int, seq: int, count: int, arg: int, body: bytes = b""
    ) -> None:
        """Appends a complete command that nobody tracks (leader's own commands)."""
    def adopt(self, data: bytes, start: int, end: int, allowed: bytes | None = None) -> None:
        """Copies complete commands (a FORWARD body, a pending command), all or none.

        Args:
            allowed: 256 bits, the command types that are taken; None = all.

        Raises ValueError if malformed or not allowed."""
    def take_entry(self, group: int, index: int, term: int, time_ms: int) -> Entry:
        """Seals the batch as an entry, without copying, and starts a new one."""
    def take_forward(self, group: int, term: int) -> bytes:
        """Seals the batch as a FORWARD frame, without copying, and starts a new one."""
    def discard_unsent(self) -> None:
        """Seals the batch for the pending lists only (no leader known)."""

class FlowOwner(Protocol):
    """A client whose channels stop while too much is pending."""

    def check_flow(self) -> object:
        """Checks whether what is pending went beyond its bounds, or is within them again."""

class PendingBudget:
    """Bytes pending in all targets that share the budget."""

    bytes: int
    bytes_max: int
    """Beyond it (default: never) targets ask their owners as beyond their own bounds."""
    waiting: set[FlowOwner]
    """Clients that stopped their channels for it."""
    def __init__(self, bytes_max: int = ...) -> None: ...

class PublishTarget:
    """One session's stream into one group: numbers its commands and remembers the pending ones."""

    builder: CommandBuilder
    session: int
    seq: int
    """Last seq given out."""
    pending: deque[PendingCommand]
    pending_bytes: int
    pending_messages: int
    pending_bytes_max: int
    pending_messages_max: int
    pending_commands_max: int
    """Beyond one of these (default: never) `owner.check_flow()` is called at every batch of
    publishes: within the round, so that one read is all that a channel can exceed them by."""
    budget: PendingBudget
    """Shared with other targets; to be set before the first command."""
    owner: object
    """The QueueClient."""
    serves: int
    """Of `content.RECORD_ASKS`, `RECORD_WAITS` and `RECORD_GROUPED`: which messages that ask for
    what not every queue does go the short way."""
    spreads: bool
    """True if it takes no records itself: each goes to another target
    (`ordered_runs.OrderedTarget`)."""
    def __init__(self, builder: CommandBuilder, session: int, owner: object) -> None: ...
    def publish(self, record: Sequence[bytes], body_size: int, tag: int, flags: int = 0) -> None:
        """Appends one message: the parts of `record` are joined (the frame scanner has a C twin of
        this)."""
    def publish_records(self, command: bytes, count: int, tag: int) -> None:
        """Appends the first records of an ENQUEUE command as messages of this session, with tags
        from `tag` on; 0 = none has one. Raises ValueError."""
    def name_next(self, producer: bytes, sequence: int) -> None:
        """The record that is appended next, at once, has this producer and this sequence. Those
        in succession share one ENQUEUE command behind one PRODUCER command; others never join."""
    def command(
        self, type: int, flags: int, count: int, arg: int, body: bytes = b"", note: object = None
    ) -> int:
        """Appends any other command and returns its seq."""
    def applied(self, seq: int) -> list[PendingCommand]:
        """Removes and returns the pending commands up to and including `seq`."""
    def resend(self, after: int) -> None:
        """Appends all sealed pending commands with seq > `after` to the builder once more."""

def commands(data: bytes) -> list[tuple[int, int, int, int, int, int, int, int]]:
    """Returns (type, flags, session, seq, count, arg, offset, length) of each command of an entry.

    Raises ValueError when anything does not fit; never reads outside `data`."""

def command_body(data: bytes, offset: int) -> bytes:
    """Returns the body (with padding) of the command at `offset`."""

def enqueue_bytes(data: bytes, offset: int) -> int:
    """Total body bytes of an ENQUEUE command."""

def ranges(data: bytes, offset: int, count: int) -> list[int]:
    """Returns (first, last, first, last, …) of a SETTLE, RETURN or DISCARD command. Raises
    ValueError."""

def pack_ranges(ranges: Sequence[int]) -> bytes: ...
def record(data: bytes, command: int, i: int) -> bytes:
    """Record i of the ENQUEUE command at offset `command`. Raises ValueError."""

def slice_records(data: bytes, command: int, first: int, count: int) -> bytes:
    """Returns a DELIVER body: an ENQUEUE command with just these records. Raises ValueError."""
