# cython: annotation_typing=False
"""A node's handle of a physical partition: publishers, commands, and reads of groups.

Commands go through one session of this node, to whoever leads, and are repeated until they are
answered. Groups read what is applied: on a node with a replica from that one, once it has applied
the reader's lease, otherwise from another member. A fetch waits until there is something, or the
time is over.

Requests between nodes, beside those of `stream.queue` (CONTROL frames of kind KIND_STREAM):

| request                                     | answer                                              |
|---------------------------------------------|-----------------------------------------------------|
| fetch · group, the fields of `Fetch`        | fetched · code, runs, next offset, end, close, view |
| describe · group                            | described · the fields of `Description`             |
| parked · group, consumer group, after, limit| parked · rows                                       |

Offsets are those of the partition: the first message has offset 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from convoymq.model.errors import BrokerError
from convoymq.queues.interface import ClientEvents, QueueFeatures
from convoymq.queues.partition.client import PartitionClient, Told
from convoymq.queues.stream.queue import StreamQueue
from convoymq.streamlog.reader import Run
from convoymq.topics.answers import GroupView
from convoymq.topics.commands import Command
from convoymq.topics.order_token import OrderToken
from convoymq.topics.partition import Outcome
from convoymq.topics.refusals import Code

if TYPE_CHECKING:
    from convoymq.queues.partition.machine import PartitionGroupMachine

ASK_TIMEOUT_S = 5.0


class Fetch(NamedTuple):
    """Request of a group's member for messages of a partition that it has leased."""

    group: str
    group_epoch: int
    lease_epoch: int
    offset: int
    """The next offset to read; below 0: from the group's cursor on, with a view."""
    max_messages: int
    max_bytes: int
    park_version: int
    """Of the view that the member has; -1: none."""
    wait_ms: int = 0
    """Longest wait for messages, for a newer view or for the end of the partition."""


class Fetched(NamedTuple):
    """Answer to a fetch."""

    code: Code
    """OK, NOT_VISIBLE, LEASE_FENCED or DATA_EXPIRED."""
    runs: list[Run]
    """Messages that the group has not acknowledged; their offsets are those of the partition."""
    next_offset: int = 0
    """Offset to read on from."""
    end_offset: int = 0
    """Offset behind the last message of the partition, as far as known."""
    close_offset: int = -1
    """Offset of CLOSE; -1: the partition is not sealed, as far as known."""
    view: GroupView | None = None
    """When the one of the member is older."""


class GroupDescription(NamedTuple):
    """State of a group in a partition."""

    group_epoch: int
    watermark: int
    """All offsets below are acknowledged."""
    acknowledged_beyond: int
    """Number of acknowledged messages above it."""
    lease_epoch: int
    member: str
    parked_keys: int
    parked_bytes: int
    is_drained: bool
    is_expired: bool
    """It stands below the start of the log and has to accept the loss."""
    is_handed_over: bool


class Description(NamedTuple):
    """State of a partition."""

    state: str
    """Name of a `PartitionState`."""
    end_offset: int
    close_offset: int
    log_start: int
    messages: int
    bytes: int
    sealed_by: str
    to_version: int
    last_time_ms: int
    groups: dict[str, GroupDescription]


class ParkedRow(NamedTuple):
    """A parked key of a group."""

    key: bytes
    lp: int
    is_resuming: bool
    messages: int
    head: OrderToken
    head_message: bytes


FetchDone = Callable[["Fetched | None", "BrokerError | None"], None]
"""Gets the answer, or why there is none (Unavailable, NotFound); called once."""
DescribeDone = Callable[["Description | None", "BrokerError | None"], None]


class PartitionQueue(StreamQueue):
    """A physical partition on this node; see the module text and `StreamQueue`."""

    type = "partition"
    features = QueueFeatures(
        reads_by_offset=True,
        consumer_arguments=StreamQueue.features.consumer_arguments,
        unserved_consumer_arguments=StreamQueue.features.unserved_consumer_arguments,
    )

    # --- clients -------------------------------------------------------------------------

    def client(self, session: int, events: ClientEvents) -> PartitionClient:
        """Opens a publisher's or reader's command stream. `events` of a publisher are
        `PartitionPublisherEvents`."""
        made = super().client(session, events)
        assert isinstance(made, PartitionClient)
        return made

    def _new_client(self, session: int, events: ClientEvents) -> PartitionClient:
        return PartitionClient(self, session, events)

    # --- commands ------------------------------------------------------------------------

    def tell(self, command: Command, done: Told) -> None:
        """Has a command applied by whatever node leads, after those that this node told before.
        `done` gets its outcome, however long that takes; NotFound when the partition is
        deleted."""
        raise NotImplementedError

    async def ask(self, command: Command, timeout_s: float = ASK_TIMEOUT_S) -> Outcome:
        """Returns the outcome of a command.

        Raises:
            Unavailable: no answer in time; it may be applied later.
            NotFound: the partition is deleted.
        """
        raise NotImplementedError

    # --- reads ---------------------------------------------------------------------------

    def fetch(self, request: Fetch, done: FetchDone) -> None:
        """Reads for a group's member; `done` may be called at once."""
        raise NotImplementedError

    def describe(self, done: DescribeDone) -> None:
        """`done` gets the state as the leader knows it, or else a member near by."""
        raise NotImplementedError

    async def description(self, timeout_s: float = ASK_TIMEOUT_S) -> Description:
        """Returns what `describe` finds. Raises Unavailable."""
        raise NotImplementedError

    async def parked(self, group: str, after: bytes = b"", limit: int = 1000) -> list[ParkedRow]:
        """Returns the parked keys of a group, in the order of the keys, behind one. Raises
        Unavailable."""
        raise NotImplementedError

    # --- the local replica ---------------------------------------------------------------

    def machine(self) -> PartitionGroupMachine | None:
        """See `StreamQueue`."""
        found = super().machine()
        return found  # type: ignore[return-value]

    def _machine_settings(self, settings: Mapping[str, object]) -> dict[str, int]:
        return super()._machine_settings(settings)
