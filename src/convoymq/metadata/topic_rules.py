"""Rules about ordered topics: the topic itself, its partitions' queues, and its groups.

A topic's queues are those of its partitions that are not deleted, and of the targets of its running
change that exist. What a change gives up goes in the entry that gives it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from convoymq.metadata.commands import (
    ChangeGroup,
    ChangeTopic,
    Command,
    CreateGroup,
    CreatePartition,
    CreateTopic,
    DeclareQueue,
    DeleteGroup,
    DeleteTopic,
    NewPartition,
    SetTopic,
)
from convoymq.metadata.queues import Queues
from convoymq.metadata.records import Change, ChangeKind, TopicRecord, Vhost
from convoymq.metadata.topic_codec import unpack_group_command, unpack_topic_command
from convoymq.metadata.topics import (
    GROUP_SEPARATOR,
    PARTITION_TYPE,
    get_topic,
    partition_queue_name,
    topic_subject,
)
from convoymq.metadata.tree import Tree
from convoymq.model.errors import NotFound, PreconditionFailed
from convoymq.routing.types import ExchangeType
from convoymq.topics.rules.group import GroupState, Release, Seek, Skip, is_kept
from convoymq.topics.rules.lineage import Mode, Published
from convoymq.topics.rules.losses import note_losses
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import first_route
from convoymq.topics.rules.topic import Begin, DeclareLost, TopicState

if TYPE_CHECKING:
    from convoymq.metadata.topic_trace import TopicTrace


class Topics:
    """Changes topics, and the queues and exchanges with them."""

    def __init__(self, tree: Tree, queues: Queues) -> None:
        self._tree = tree
        self._queues = queues
        self._timed_rules: dict[type[Command], Callable[..., object]] = {
            CreateTopic: self._create,
            CreatePartition: self._create_partition,
            CreateGroup: self._create_group,
            ChangeGroup: self._change_group,
        }
        self._rules: dict[type[Command], Callable[..., object]] = {
            DeleteTopic: self._delete,
            ChangeTopic: self._change,
            DeleteGroup: self._delete_group,
            SetTopic: self._set,
        }

    def carry_out(self, command: Command, time_ms: int) -> object:
        """Changes the tree and returns the reply. Raises Refused."""
        timed = self._timed_rules.get(type(command))
        if timed is not None:
            return timed(command, time_ms)
        return self._rules[type(command)](command)

    # --- topics ----------------------------------------------------------------------------

    def _create(self, command: CreateTopic, time_ms: int) -> bool:
        """Creates a topic with its exchange and first partitions. Raises Refused."""
        vhost = self._tree.vhost(command.vhost)
        _check_name_free(vhost, command.name)
        route = first_route(command.logical, len(command.partitions))
        state = TopicState.first(route)
        state.lineage.published[0] = Published(0, "", None, time_ms)
        vhost.topology.declare_exchange(command.name, ExchangeType.ORDERED, durable=True)
        vhost.topics[command.name] = TopicRecord(
            vhost=command.vhost,
            name=command.name,
            mode=command.mode,
            hash_id=command.hash_id,
            hash_seed=command.hash_seed,
            created_ms=time_ms,
            state=state,
            settings=dict(command.settings),
        )
        for span, partition in zip(route.spans, command.partitions, strict=True):
            self._declare(vhost, command.name, span.pid, partition, time_ms)
        trace = self._trace(vhost)
        if trace is not None:
            trace.created(vhost, vhost.topics[command.name])
        self._note(vhost, command.name)
        return True

    def _delete(self, command: DeleteTopic) -> bool:
        """Deletes a topic with its exchange and partitions. Raises NotFound."""
        vhost = self._tree.vhost(command.vhost)
        record = vhost.topics.pop(command.name, None)
        if record is None:
            return False
        trace = self._trace(vhost)
        if trace is not None:
            trace.deleted(record)
        self._remove_queues(vhost, command.name, _placed(record.state))
        vhost.topology.delete_exchange(command.name)
        self._note(vhost, command.name)
        return True

    def _set(self, command: SetTopic) -> bool:
        """Replaces settings; False when they are so already. Raises NotFound."""
        vhost, record = self._find(command.vhost, command.name)
        joined = {**record.settings, **command.settings}
        settings = {name: value for name, value in joined.items() if value is not None}
        if settings == record.settings:
            return False
        record.settings = settings
        self._note(vhost, command.name)
        return True

    def _change(self, command: ChangeTopic) -> str:
        """Applies a command of a topic; returns the code of the refusal, or empty. Raises
        NotFound."""
        vhost, record = self._find(command.vhost, command.name)
        state = record.state
        topic_command = unpack_topic_command(command.command)
        before, had = state.change, _placed(state)
        if isinstance(topic_command, Begin) and _reuses_pid(state, topic_command):
            return Code.VERSION_CONFLICT.value
        refused = state.apply(topic_command, record.held_versions, record.expired_versions)
        if refused is not None:
            return refused.value
        if isinstance(topic_command, Begin) and state.change is not before:
            record.places = dict(command.places)
        if isinstance(topic_command, DeclareLost):
            for group in record.groups.values():
                note_losses(state, group)
        trace = self._trace(vhost)
        if trace is not None:
            trace.changed(vhost, record, topic_command)
        self._remove_queues(vhost, command.name, had - _placed(state))
        self._note(vhost, command.name)
        return ""

    def _create_partition(self, command: CreatePartition, time_ms: int) -> dict[str, object]:
        """Creates the queue of a target. Raises Refused."""
        vhost, record = self._find(command.vhost, command.topic)
        change = record.state.running
        if change is None or all(span.pid != command.pid for span in change.targets):
            raise PreconditionFailed(
                f"partition {command.pid} of {topic_subject(vhost, command.topic)} is no target of "
                "the running change"
            )
        return self._declare(vhost, command.topic, command.pid, command.partition, time_ms)

    def _declare(
        self, vhost: Vhost, topic: str, pid: int, partition: NewPartition, time_ms: int
    ) -> dict[str, object]:
        name = partition_queue_name(topic, pid)
        known = vhost.queues.get(name)
        if known is not None:
            return {"created": False, "group": known.group}
        return self._queues.declare(
            DeclareQueue(
                vhost=vhost.name,
                name=name,
                members=partition.members,
                type=PARTITION_TYPE,
                durable=True,
                arguments=partition.arguments,
            ),
            time_ms,
        )

    def _remove_queues(self, vhost: Vhost, topic: str, pids: Iterable[int]) -> None:
        names = (partition_queue_name(topic, pid) for pid in pids)
        self._queues.delete_all([vhost.queues[name] for name in names if name in vhost.queues])

    # --- groups ----------------------------------------------------------------------------

    def _create_group(self, command: CreateGroup, time_ms: int) -> bool:
        """Creates a consumer group; False when there is one of that name. Raises Refused."""
        vhost, record = self._find(command.vhost, command.name)
        if command.group in record.groups:
            return False
        kept, latest = record.state.kept, record.state.route.version
        if not kept.oldest <= command.version <= latest:
            raise PreconditionFailed(
                f"a group of {topic_subject(vhost, command.name)} begins at version "
                f"{kept.oldest} to {latest}, not {command.version}"
            )
        if not is_kept(kept, command.version, command.starts):
            raise PreconditionFailed(
                f"a group of {topic_subject(vhost, command.name)} cannot begin in a partition "
                "that is deleted"
            )
        group = record.groups[command.group] = GroupState.first(
            command.group, command.version, command.starts, Mode(command.mode), time_ms
        )
        note_losses(record.state, group)
        trace = self._trace(vhost)
        if trace is not None:
            trace.group_created(record, group)
        self._note(vhost, command.name)
        return True

    def _delete_group(self, command: DeleteGroup) -> bool:
        """Deletes a consumer group. Raises NotFound."""
        vhost, record = self._find(command.vhost, command.name)
        if record.groups.pop(command.group, None) is None:
            return False
        trace = self._trace(vhost)
        if trace is not None:
            trace.group_deleted(record, command.group)
        self._note(vhost, command.name)
        return True

    def _change_group(self, command: ChangeGroup, time_ms: int) -> bool:
        """Applies a command of a group; False when it came too late. Raises NotFound."""
        vhost, record = self._find(command.vhost, command.name)
        group = record.groups.get(command.group)
        if group is None:
            raise NotFound(f"no group '{command.group}' of {topic_subject(vhost, command.name)}")
        state = record.state
        group_command = unpack_group_command(command.command)
        owner = group.owners.get(group_command.pid) if isinstance(group_command, Release) else None
        if isinstance(group_command, Skip) and group_command.pid in state.lost:
            # A record says so already.
            return False
        changed = group.apply(group_command, state.route.version, state.kept, time_ms)
        if changed:
            if isinstance(group_command, Seek):
                note_losses(state, group)
            trace = self._trace(vhost)
            if trace is not None:
                trace.group_changed(record, group, group_command, owner)
            self._note(vhost, command.name)
        return changed

    # --- inside ----------------------------------------------------------------------------

    def _find(self, vhost: str, name: str) -> tuple[Vhost, TopicRecord]:
        return self._tree.vhost(vhost), get_topic(self._tree, vhost, name)

    def _trace(self, vhost: Vhost) -> TopicTrace | None:
        trace = self._tree.topic_trace
        return trace if trace is not None and trace.wants(vhost.name) else None

    def _note(self, vhost: Vhost, topic: str) -> None:
        self._tree.note(Change(ChangeKind.TOPIC, vhost=vhost.name, topic=topic))


def _check_name_free(vhost: Vhost, name: str) -> None:
    if name in vhost.topics:
        raise PreconditionFailed(f"{topic_subject(vhost, name)} exists")
    subject = f"a topic '{name}' in vhost '{vhost.name}' is not possible: "
    if vhost.topology.find_exchange(name) is not None:
        raise PreconditionFailed(f"{subject}there is an exchange of that name")
    if name in vhost.queues:
        raise PreconditionFailed(f"{subject}there is a queue of that name")
    for queue in vhost.queues:
        if queue.rpartition(GROUP_SEPARATOR)[:2] == (name, GROUP_SEPARATOR):
            raise PreconditionFailed(f"{subject}queue '{queue}' is named like a group of it")


def _placed(state: TopicState) -> set[int]:
    """Returns the partitions that may have a queue."""
    pids = {pid for pid, each in state.lineage.partitions.items() if not each.is_deleted}
    if state.running is not None:
        pids.update(span.pid for span in state.running.targets)
    return pids - state.lost.keys()


def _reuses_pid(state: TopicState, begin: Begin) -> bool:
    """Returns whether a planned change has a number that another change was given meanwhile."""
    known = state.change
    if known is not None and known.change_id == begin.change.change_id:
        return False
    return any(span.pid < state.next_pid for span in begin.change.targets)
