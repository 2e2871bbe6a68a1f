"""Parts of a node that serve ordered topics; made when the first topic is there."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from convoymq.metadata.machine import Change, ChangeKind
from convoymq.metadata.topics import find_topic
from convoymq.topics.machine.queue import PartitionQueue
from convoymq.topics.shell.admin import TopicAdmin
from convoymq.topics.shell.change_times import ChangeTimes
from convoymq.topics.shell.controller_loop import ControllerLoop
from convoymq.topics.shell.coordinator_loop import GroupCoordinators
from convoymq.topics.shell.fence import PartitionFence
from convoymq.topics.shell.group_handle import TopicGroups
from convoymq.topics.shell.leader_task import TopicNode
from convoymq.topics.shell.measures import PartitionCounts
from convoymq.topics.shell.member import MemberParts
from convoymq.topics.shell.partitions import TopicPartitions
from convoymq.topics.shell.retries import Retries
from convoymq.topics.shell.scaling_loop import ScalingLoop
from convoymq.topics.shell.scaling_question import ScalingQuestion
from convoymq.topics.shell.silence import SilentPartitions
from convoymq.topics.shell.upkeep_loop import UpkeepLoop
from convoymq.topics.shell.weak_loop import WeakLoop

if TYPE_CHECKING:
    from convoymq.broker.facade import Broker
    from convoymq.model.clock import Clock


class TopicParts:
    """One per node."""

    def __init__(
        self,
        broker: Broker,
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
        spawn: Callable[[Coroutine[object, object, None]], object],
    ) -> None:
        metadata = broker.metadata
        self._tree = metadata.tree
        self._placement = broker.placement
        self.partitions = TopicPartitions(metadata.tree, broker.local.find, broker.local.leader_of)
        own = TopicNode(
            node=broker.node_id,
            store=metadata,
            partitions=self.partitions,
            clock=clock,
            call_soon=call_soon,
            spawn=spawn,
        )
        self.admin = TopicAdmin(
            own,
            nodes=broker.nodes,
            placement=broker.placement,
            timeout_s=broker.settings.operation_timeout_s,
            queues_max=broker.settings.cluster_queues_max,
        )
        self.controller = ControllerLoop(own, self._place)
        self.change_times = ChangeTimes(metadata.tree, clock)
        """Durations of the last changes, whoever drove them."""
        self._make_guards(broker, own)
        self.upkeep = UpkeepLoop(
            own,
            group_ttl_ms=broker.settings.topic_group_ttl_ms,
            producer_ttl_ms=broker.settings.topic_producer_ttl_ms,
        )
        self._make_deciders(broker, own)
        self._retries = _retries(broker, clock)
        members = MemberParts(
            node=broker.node_id,
            incarnation=broker.nodes.incarnation,
            store=metadata,
            control=broker.control,
            partitions=self.partitions,
            clock=clock,
            spawn=spawn,
            retries=self._retries,
        )
        self.coordinators = GroupCoordinators(
            own,
            control=broker.control,
            wake=members.wake,
            has_ended=broker.has_ended,
        )
        self.groups = TopicGroups(members, self.admin.create_group)
        broker.queue_admin.find_group = self.groups.find

    def _make_deciders(self, broker: Broker, own: TopicNode) -> None:
        """Creates the parts that change topics by themselves."""
        self._local, self.counts = broker.local, PartitionCounts()
        self.scaling = ScalingLoop(
            own,
            changes=self.admin,
            nodes=broker.nodes,
            targets=self.admin.drains.placement_nodes,
        )
        timeout_s = broker.settings.operation_timeout_s
        self.explain_scaling = ScalingQuestion(
            self.scaling, broker.metadata, broker.control, timeout_s
        )
        self.weak = WeakLoop(own, self.admin)

    def _make_guards(self, broker: Broker, own: TopicNode) -> None:
        """Creates the parts that deal with partitions without a majority."""
        self.silence = SilentPartitions(own, broker.nodes, self.admin.seal)
        self.fence = PartitionFence(
            node=own.node,
            tree=self._tree,
            host=broker.host,
            catch_up=broker.metadata_reads.catch_up,
            clock=own.clock,
            call_soon=own.call_soon,
            spawn=own.spawn,
        )

    def _place(self, first: int) -> tuple[int, ...]:
        nodes = self.admin.drains.placement_nodes()
        return self._placement.for_partitions(1, nodes, first)[0]

    def count(self) -> PartitionCounts:
        """Returns the counts of the partitions that this node leads, as they are now."""
        queues = [each for each in self._local.handles() if isinstance(each, PartitionQueue)]
        self.counts.look(queues)
        return self.counts

    def on_change(self, change: Change) -> None:
        """The tree has changed."""
        self.fence.on_change(change)
        self.silence.on_change(change)
        self.controller.on_change(change)
        self.change_times.on_change(change)
        self.upkeep.on_change(change)
        self.scaling.on_change(change)
        self.coordinators.on_change(change)
        self._give_up(change)
        self._forget_retries(change)
        self.groups.on_change(change)

    def _forget_retries(self, change: Change) -> None:
        """Copies for a topic that is deleted go nowhere any more."""
        vhost = self._tree.vhosts.get(change.vhost) if change.kind is ChangeKind.TOPIC else None
        if vhost is not None and change.topic not in vhost.topics:
            self._retries.forget(change.vhost, change.topic)

    def _give_up(self, change: Change) -> None:
        """Has publishers told of partitions that were sealed from outside."""
        if change.kind is ChangeKind.TOPIC:
            record = find_topic(self._tree, change.vhost, change.topic)
            records = [] if record is None else [record]
        elif change.kind is ChangeKind.RESTORED:
            vhosts = self._tree.vhosts.values()
            records = [record for vhost in vhosts for record in vhost.topics.values()]
        else:
            return
        for record in records:
            for pid in record.state.unknown_ends():
                queue = self.partitions.find(record.vhost, record.name, pid)
                if queue is not None:
                    queue.give_up()

    def tick(self) -> None:
        """To be called a few times a second."""
        self.fence.tick()
        self.silence.tick()
        self.controller.tick()
        self.coordinators.tick()
        self.upkeep.tick()
        self.scaling.tick()
        self.weak.tick()
        self.admin.drains.tick()


def _retries(broker: Broker, clock: Clock) -> Retries:
    dead_letters = broker.local.ask.dead_letters
    assert dead_letters is not None, "a broker publishes dead letters"
    return Retries(clock, broker.local.new_session, dead_letters)
