"""Administration of ordered topics, on any node: every change goes through the replicated tree, and
whatever is to be done about it is done by the controller on the metadata leader.

Refusals are those of the topics (`topics.refusals`, each with its code), of the tree, and of
`broker.topics.refusals`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from convoymq.broker.topics.rows import (
    ChangeRow,
    DrainRow,
    GroupRow,
    LagRow,
    PartitionRow,
    TopicDetail,
    TopicRow,
)
from convoymq.topics.routes import LOGICAL_DEFAULT

Position = Literal["earliest", "latest"] | int | Mapping[int, int]
"""Begin of a group: at one end, at a time (ms since the epoch), or at an offset in each
partition of a vector."""
CHANGE_TIMEOUT_S = 30.0


class TopicAdmin:
    """See the module text. One per node."""

    # --- topics ----------------------------------------------------------------------------

    async def create(
        self,
        vhost: str,
        name: str,
        *,
        partitions: int,
        logical: int = LOGICAL_DEFAULT,
        mode: str = "strict",
    ) -> TopicRow:
        """Creates a topic and its exchange, and waits until its partitions serve.

        Raises:
            PreconditionFailed: the name is taken or not possible.
            BadTopic: the numbers make no topic.
            NotServed: a node of the cluster has a release without topics; a mode that is not
                served.
            Unavailable: no majority in time; nothing is left behind.
        """
        raise NotImplementedError

    async def delete(self, vhost: str, name: str) -> None:
        """Deletes a topic with its messages and groups. Raises NotFound."""
        raise NotImplementedError

    async def list(self, vhost: str | None = None) -> list[TopicRow]:
        """Returns the topics of a virtual host, or of all, by name. Raises NotFound."""
        raise NotImplementedError

    async def describe(self, vhost: str, name: str) -> TopicDetail:
        """Returns all about a topic. Raises NotFound."""
        raise NotImplementedError

    async def route(
        self, vhost: str, name: str, version: int | None = None, *, lineage: bool = False
    ) -> list[PartitionRow]:
        """Returns the partitions of a route version, by range; with `lineage` all that ever were,
        by version and range.

        Raises:
            NotFound: no such topic.
            StaleRoute: a version that is not kept, or not yet there.
        """
        raise NotImplementedError

    # --- changes ---------------------------------------------------------------------------

    async def split(self, vhost: str, name: str, pid: int, at: Sequence[int] = ()) -> ChangeRow:
        """Begins to split a partition: at these logical partitions, or in the middle.

        Raises:
            NotFound, UnknownPartition, BadCut, ChangeRunning: it cannot be.
        """
        raise NotImplementedError

    async def merge(self, vhost: str, name: str, pids: Sequence[int]) -> ChangeRow:
        """Begins to merge neighbours. Raises NotFound, UnknownPartition, NotAdjacent,
        ChangeRunning."""
        raise NotImplementedError

    async def move(self, vhost: str, name: str, pid: int, to_node: int) -> ChangeRow:
        """Begins to move a partition to a node, which leads it then.

        Raises:
            NotFound, UnknownPartition, ChangeRunning: it cannot be.
            PreconditionFailed: the node is not in the cluster, away or drained.
        """
        raise NotImplementedError

    async def change(self, vhost: str, name: str) -> ChangeRow | None:
        """Returns the running change, or the latest one; None when there was none yet. Raises
        NotFound."""
        raise NotImplementedError

    async def wait_change(
        self, vhost: str, name: str, change_id: str, timeout_s: float = CHANGE_TIMEOUT_S
    ) -> ChangeRow:
        """Waits until a change is done, and returns it.

        Raises:
            NotFound: no such topic, or the change is not known (any more).
            PreconditionFailed: it was aborted.
            Unavailable: it is not done in time; it goes on.
        """
        raise NotImplementedError

    async def abort(self, vhost: str, name: str, change_id: str) -> None:
        """Gives a change up that has sealed nothing. Raises NotFound, ChangePhase."""
        raise NotImplementedError

    async def drain(self, node: int) -> list[DrainRow]:
        """Moves every open partition that a node leads to others, in each topic one by one.

        Raises:
            NotFound: no such node.
            PreconditionFailed: no other node could take them.
        """
        raise NotImplementedError

    async def declare_lost(self, vhost: str, name: str, pid: int) -> None:
        """Gives up a partition whose majority is gone: its range goes on in a new partition, and
        groups go on without what it held.

        Raises:
            NotFound, UnknownPartition, ChangeRunning: it cannot be.
            PreconditionFailed: the partition answers.
        """
        raise NotImplementedError

    # --- groups ----------------------------------------------------------------------------

    async def groups(self, vhost: str, name: str) -> list[GroupRow]:
        """Returns the consumer groups, by name. Raises NotFound."""
        raise NotImplementedError

    async def lag(self, vhost: str, name: str, group: str) -> list[LagRow]:
        """Returns the positions of a group in the partitions that it has before it. Raises
        NotFound."""
        raise NotImplementedError

    async def create_group(
        self, vhost: str, name: str, group: str, position: Position = "earliest"
    ) -> bool:
        """Creates a consumer group; False when it exists.

        Raises:
            NotFound: no such topic.
            PreconditionFailed: a name that is not possible.
            BadPosition, DataExpired: a position that is not possible.
        """
        raise NotImplementedError

    async def delete_group(self, vhost: str, name: str, group: str) -> None:
        """Deletes a consumer group, with what it has parked.

        Raises:
            NotFound: no such group.
            PreconditionFailed: it has members.
        """
        raise NotImplementedError

    async def seek(self, vhost: str, name: str, group: str, position: Position) -> GroupRow:
        """Has a group read again, or skip, from a position.

        Raises:
            NotFound: no such group.
            PreconditionFailed: it has members.
            BadPosition, DataExpired: a position that is not possible.
        """
        raise NotImplementedError
