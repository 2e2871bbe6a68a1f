"""Fences the partitions of this node: which of them may append what clients send, while they lead.

A node whose copy of the tree is old may not know that a partition was sealed from outside, and
that its keys are written elsewhere by now. So a leader appends under a lease of its node: a read of
the tree that a majority of its voters confirmed (`metadata.reads`), counted from when it was begun.
What was committed before that is known here. Whoever has not applied a decision within the time of
a lease and a margin appends nothing any more (`topics.rules.server_lease`).

| the tree says of the partition             | its leader                                       |
|--------------------------------------------|--------------------------------------------------|
| it is given up (`TopicState.given_up`)     | appends nothing                                  |
| sealed from outside, its end is not known  | appends CLOSE, then what comes: it is refused    |
| anything else                              | appends under the lease                          |

What waits without a lease is appended when there is one again. There is one lease for all
partitions of a node, and none on nodes without partitions.

Source: ordered topics, section 10.2 and 10.3; ADR 0074.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine

import structlog

from convoymq.metadata.machine import Change, ChangeKind, MetadataMachine
from convoymq.metadata.topics import find_topic, place_of_partition
from convoymq.model.clock import Clock
from convoymq.model.errors import BrokerError
from convoymq.queues.group_queue import GroupQueue
from convoymq.shells.groups.append_fence import ANY_TERM, NO_TERM, AppendFence
from convoymq.shells.groups.host import ReplicaHost
from convoymq.shells.groups.replica import Replica
from convoymq.topics.machine.codec import CMD_PARTITION, encode_command
from convoymq.topics.machine.group_machine import PartitionGroupMachine
from convoymq.topics.rules.controller import late_seal
from convoymq.topics.rules.server_lease import ServerLeases
from convoymq.topics.rules.topic import TopicState
from convoymq.topics.shell.leader_task import TopicKey

log = structlog.get_logger()

RENEW_MS = 1_000


class PartitionFence:
    """See the module text. One per node.

    Args:
        catch_up: returns when the tree has all that was committed before the call. Raises
            Unavailable.
        call_soon: runs a callback when the present one is done.
        spawn: runs a coroutine.
    """

    def __init__(
        self,
        *,
        node: int,
        tree: MetadataMachine,
        host: ReplicaHost,
        catch_up: Callable[[], Awaitable[None]],
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
        spawn: Callable[[Coroutine[object, object, None]], object],
    ) -> None:
        self._node = node
        self._tree = tree
        self._host = host
        self._catch_up = catch_up
        self._clock = clock
        self._call_soon = call_soon
        self._spawn = spawn
        self._leases = ServerLeases()
        self._queues: dict[TopicKey, dict[int, GroupQueue]] = {}
        self._renewing = False
        self._renewed_ms = -RENEW_MS
        self._restorations = 0
        self._is_without = True
        """The last thing that was said: there is no lease."""

    # --- partitions of this node -----------------------------------------------------------

    def follow(self, queue: GroupQueue) -> None:
        """See `queues.driver.Fence`."""
        replica = self._host.replica(queue.group)
        if replica is None:
            return
        if replica.fence is None:
            replica.fence = AppendFence(replica)
        topic, pid = place_of_partition(queue.name)
        key = TopicKey(queue.vhost, topic)
        self._queues.setdefault(key, {})[pid] = queue
        # The replica may be in the middle of something.
        self._call_soon(lambda: self._set_fence(key, pid))
        if not self.holds:
            self._renew()

    def forget(self, queue: GroupQueue) -> None:
        """See `queues.driver.Fence`."""
        topic, pid = place_of_partition(queue.name)
        key = TopicKey(queue.vhost, topic)
        partitions = self._queues.get(key, {})
        if partitions.get(pid) is queue:
            del partitions[pid]
            if not partitions:
                del self._queues[key]

    def on_change(self, change: Change) -> None:
        """The tree has changed."""
        if change.kind is ChangeKind.RESTORED:
            # It may be older than it was: what is known of it counts no more.
            self._restorations += 1
            self._leases = ServerLeases()
            self._host.lease_until_ms = 0
            for key in list(self._queues):
                self._set_fences(key)
            if self._queues:
                self._renew()
        elif change.kind is ChangeKind.TOPIC:
            self._set_fences(TopicKey(change.vhost, change.topic))

    def _set_fences(self, key: TopicKey) -> None:
        for pid in list(self._queues.get(key, ())):
            self._set_fence(key, pid)

    def _set_fence(self, key: TopicKey, pid: int) -> None:
        queue = self._queues.get(key, {}).get(pid)
        replica = None if queue is None else self._host.replica(queue.group)
        if queue is None or replica is None or replica.fence is None:
            return
        record = find_topic(self._tree, key.vhost, key.name)
        if record is None or pid in record.state.given_up:
            term = NO_TERM
        elif record.state.is_end_unknown(pid):
            term = self._close(key, pid, replica, replica.fence, record.state)
        else:
            term = ANY_TERM
        if term != replica.fence.term:
            replica.fence.term = term
            replica.fence.reconsider()

    def _close(
        self, key: TopicKey, pid: int, replica: Replica, fence: AppendFence, state: TopicState
    ) -> int:
        """Has CLOSE appended before anything else; returns the term in which that was done."""
        if replica.established_leader != self._node:
            return NO_TERM
        term = replica.term
        if fence.term != term:
            machine = replica.machine
            assert isinstance(machine, PartitionGroupMachine)
            command = late_seal(state, pid, machine.state.term)
            fence.append_first(CMD_PARTITION, encode_command(command))
            log.info("topics.partition_returned", vhost=key.vhost, topic=key.name, pid=pid)
        return term

    # --- the lease -------------------------------------------------------------------------

    @property
    def holds(self) -> bool:
        """Returns whether this node has a lease."""
        return self._leases.holds(self._node, self._clock.monotonic_ms())

    def tick(self) -> None:
        """Renews the lease when it is time; to be called a few times a second."""
        if not self._queues:
            return
        now_ms = self._clock.monotonic_ms()
        if not self._is_without and not self.holds:
            self._is_without = True
            partitions = sum(map(len, self._queues.values()))
            log.warning("topics.lease_lost", partitions=partitions)
        if now_ms >= self._renewed_ms + RENEW_MS:
            self._renew()

    def _renew(self) -> None:
        if not self._renewing:
            self._renewing = True
            self._renewed_ms = self._clock.monotonic_ms()
            self._spawn(self._ask(self._renewed_ms))

    async def _ask(self, asked_ms: int) -> None:
        restorations = self._restorations
        try:
            await self._catch_up()
        except BrokerError:
            # It is asked again with the next tick that is due.
            return
        finally:
            self._renewing = False
        if restorations != self._restorations:
            return
        was_without = not self.holds
        self._leases.renewed(self._node, asked_ms)
        self._host.lease_until_ms = asked_ms + self._leases.ttl_ms
        if was_without and self.holds:
            self._has_lease_again()

    def _has_lease_again(self) -> None:
        if self._is_without:
            self._is_without = False
            log.info("topics.lease_taken")
        for partitions in self._queues.values():
            for queue in partitions.values():
                replica = self._host.replica(queue.group)
                if replica is not None and replica.fence is not None:
                    replica.fence.reconsider()
