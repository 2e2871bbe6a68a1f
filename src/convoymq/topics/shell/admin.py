"""Administration of ordered topics, on any node: every change goes through the replicated tree, and
whatever is to be done about it is done by the controller on the metadata leader.

Refusals are those of topics (`topics.rules.refusals`, each with its code) and of the tree.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import structlog

from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.metadata.commands import (
    ChangeGroup,
    ChangeTopic,
    CreateGroup,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    NewPartition,
    SetTopic,
)
from convoymq.metadata.machine import TopicRecord
from convoymq.metadata.topic_codec import pack_command
from convoymq.metadata.topic_settings import WEAK
from convoymq.metadata.topics import find_topic, get_group, get_topic, partition_arguments
from convoymq.model.errors import BrokerError, NotFound, PreconditionFailed, Unavailable
from convoymq.model.refusals import (
    cluster_partition_limit_reached,
    queue_subject,
)
from convoymq.queues.placement import Placement
from convoymq.topics.machine.reads import PartitionDescription
from convoymq.topics.rules.answers import LossAnswer
from convoymq.topics.rules.changes import Change, Kind, Phase, plan_merge, plan_move, plan_split
from convoymq.topics.rules.commands import AcceptLoss, DropGroup, ExpireProducers
from convoymq.topics.rules.group import GroupState, Seek, is_kept
from convoymq.topics.rules.hashing import MURMUR3_X86_32
from convoymq.topics.rules.lineage import Mode
from convoymq.topics.rules.refusals import (
    BadTopic,
    ChangePhase,
    ChangeRunning,
    Code,
    GroupLive,
    UnknownPartition,
    VersionConflict,
)
from convoymq.topics.rules.routes import LOGICAL_DEFAULT, first_route
from convoymq.topics.rules.topic import (
    Abort,
    Begin,
    DeclareLost,
    GiveUp,
    LeftBehind,
    TopicCommand,
    TopicState,
)
from convoymq.topics.shell import views
from convoymq.topics.shell.cuts import Position, cut_of
from convoymq.topics.shell.drains import TopicDrains
from convoymq.topics.shell.leader_task import TopicNode
from convoymq.topics.shell.parked import ParkedKeys
from convoymq.topics.shell.partitions import QUESTION_TIMEOUT_S
from convoymq.topics.shell.refusals import GroupDataExpired
from convoymq.topics.shell.repeats import Asked, middle, repeat_of
from convoymq.topics.shell.rows import (
    ChangeRow,
    GapRows,
    GroupRow,
    GroupRows,
    LagRows,
    LossRows,
    PartitionDetails,
    PartitionRow,
    PartitionRows,
    TopicDetail,
    TopicRows,
)

log = structlog.get_logger()

CHANGE_TIMEOUT_S = 30.0
POLL_S = 0.01
ATTEMPTS = 5
"""Plans of one change, while others publish versions."""
Plan = Callable[[TopicState], Change]


class TopicAdmin:
    """See the module text. One per node.

    Args:
        timeout_s: for one command of the tree.
        queues_max: of the cluster, with partitions; 0 = any number.
    """

    def __init__(
        self,
        own: TopicNode,
        *,
        nodes: ClusterNodes,
        placement: Placement,
        timeout_s: float,
        queues_max: int = 0,
    ) -> None:
        self._metadata = own.store
        self._partitions = own.partitions
        self._clock = own.clock
        self._nodes = nodes
        self._placement = placement
        self._timeout_s = timeout_s
        self._queues_max = queues_max
        self.parked = ParkedKeys(own.store.tree, own.partitions)
        """Parked keys of groups."""
        self.drains = TopicDrains(
            own, nodes=nodes, placement=placement, move=self.move, timeout_s=timeout_s
        )
        """Nodes that give their partitions away."""

    # --- topics ----------------------------------------------------------------------------

    async def create(
        self,
        vhost: str,
        name: str,
        *,
        partitions: int,
        logical: int = LOGICAL_DEFAULT,
        mode: str = "strict",
        settings: Mapping[str, bool | int | str] = MappingProxyType({}),
    ) -> bool:
        """Creates a topic and its exchange, and waits until its partitions serve; False when the
        same topic exists.

        Args:
            settings: as `metadata.topic_settings` has them.

        Raises:
            BadTopic: the numbers make no topic; the name is taken or not possible, or the topic
                exists with other settings; a limit is reached; a setting is none.
            NotServed: a node of the cluster has a release without topics; a mode that is not
                served.
            Unavailable: no majority in time; nothing is left behind.
        """
        route = first_route(logical, partitions)
        if find_topic(self._metadata.tree, vhost, name) is not None:
            return await self._exists(vhost, name, partitions, logical, mode, settings)
        placed = self._placement.for_partitions(partitions, self.drains.placement_nodes())
        command = CreateTopic(
            vhost=vhost,
            name=name,
            logical=logical,
            mode=mode,
            hash_id=MURMUR3_X86_32,
            settings=dict(settings),
            partitions=tuple(
                NewPartition(
                    members=members,
                    arguments=partition_arguments(name, span, 0, settings).encoded,
                )
                for span, members in zip(route.spans, placed, strict=True)
            ),
        )
        try:
            self._check_cluster_limit(vhost, name, partitions)
            await self._metadata.execute(command, self._timeout_s)
        except PreconditionFailed as error:
            if find_topic(self._metadata.tree, vhost, name) is not None:
                # Somebody else was faster.
                return await self._exists(vhost, name, partitions, logical, mode, settings)
            raise BadTopic(error.text, subject=error.subject) from None
        try:
            await self._wait_until_all_open(vhost, name, route.pids)
        except BrokerError:
            # Its name would be taken for nothing.
            await self._metadata.execute(DeleteTopic(vhost=vhost, name=name), self._timeout_s)
            raise
        return True

    async def _exists(
        self,
        vhost: str,
        name: str,
        partitions: int,
        logical: int,
        mode: str,
        settings: Mapping[str, bool | int | str],
    ) -> bool:
        """Waits until a topic serves that was created before. Raises BadTopic: with other
        settings."""
        record = self._record(vhost, name)
        first = [p for p in record.state.lineage.partitions.values() if not p.created_version]
        has = {**record.settings, "partitions": len(first)}
        has |= {"logical": record.logical, "mode": record.mode}
        wanted = {**settings, "partitions": partitions, "logical": logical, "mode": mode}
        others = [
            f"{key} {has.get(key, 'not set')}, not {wanted.get(key, 'unset')}"
            for key in sorted({*has, *wanted})
            if has.get(key) != wanted.get(key)
        ]
        if others:
            raise BadTopic(
                f"topic '{name}' in vhost '{vhost}' exists with other settings: {'; '.join(others)}"
            )
        await self._wait_until_all_open(vhost, name, record.state.route.pids)
        return False

    async def _wait_until_all_open(self, vhost: str, name: str, pids: Iterable[int]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.gather(*(self._wait_until_open(vhost, name, pid) for pid in pids))
        except TimeoutError:
            raise Unavailable(f"the partitions of topic '{name}' did not open in time") from None

    async def _wait_until_open(self, vhost: str, name: str, pid: int) -> None:
        while (queue := self._partitions.find(vhost, name, pid)) is None:
            await asyncio.sleep(POLL_S)
        await queue.wait_until_open(self._timeout_s)

    async def set_autoscale(
        self, vhost: str, name: str, changes: Mapping[str, bool | int | str | None]
    ) -> None:
        """Replaces settings of the autoscaler; None takes one away.

        Raises:
            NotFound: no such topic.
            PreconditionFailed: a setting is none, or has a value that it cannot have.
        """
        self._record(vhost, name)
        command = SetTopic(vhost=vhost, name=name, settings=dict(changes))
        await self._metadata.execute(command, self._timeout_s)

    async def delete(self, vhost: str, name: str) -> None:
        """Deletes a topic with its messages and groups. Raises NotFound."""
        self._record(vhost, name)
        await self._metadata.execute(DeleteTopic(vhost=vhost, name=name), self._timeout_s)

    async def list(self, vhost: str | None = None) -> TopicRows:
        """Returns the topics of a virtual host, or of all, by name. Raises NotFound."""
        tree = self._metadata.tree
        places = sorted(tree.vhosts) if vhost is None else [tree.vhost(vhost).name]
        return [
            views.topic_row(record)
            for place in places
            for _, record in sorted(tree.vhosts[place].topics.items())
        ]

    async def describe(self, vhost: str, name: str) -> TopicDetail:
        """Returns all about a topic. Raises NotFound."""
        record = self._record(vhost, name)
        partitions = views.kept_partitions(record)
        found = await self._partitions.describe_all(record, [each.pid for each in partitions])
        change = record.state.change
        rows: PartitionDetails = [
            views.partition_detail(
                self._partition_row(record, each.pid),
                [self._nodes.name_of(node) for node in self._partitions.members(record, each.pid)],
                found[each.pid],
            )
            for each in partitions
        ]
        return {
            **views.topic_row(record),
            "partition_rows": rows,
            "latest_change": None if change is None else views.change_row(change),
        }

    async def route(
        self, vhost: str, name: str, version: int | None = None, *, lineage: bool = False
    ) -> PartitionRows:
        """Returns the partitions of a route version, by range; with `lineage` all that ever were,
        by version and range.

        Raises:
            NotFound: no such topic.
            StaleRoute: a version that is not kept, or not there yet.
        """
        record = self._record(vhost, name)
        state = record.state
        if lineage:
            pids = [each.pid for each in state.lineage.oldest_first()]
        else:
            route = state.route if version is None else state.lineage.route(version)
            pids = list(route.pids)
        return [self._partition_row(record, pid) for pid in pids]

    # --- changes ---------------------------------------------------------------------------

    async def split(
        self,
        vhost: str,
        name: str,
        pid: int,
        at: Sequence[int] = (),
        *,
        by: str = "",
        change_id: str = "",
    ) -> ChangeRow:
        """Begins to split a partition: at these logical partitions, or in the middle.

        Args:
            by: who does, as the id of the change shall say.
            change_id: the id itself; empty: a new one. When the change of that id is there, and is
                the same, it is returned as it is now: whoever has lost an answer asks again.

        Raises:
            NotFound, UnknownPartition, BadCut, ChangeRunning: it cannot be.
            PreconditionFailed: a limit is reached; the id is that of another change.
        """

        def plan(state: TopicState) -> Change:
            self._check_cluster_limit(vhost, name, len(at) + 1 if at else 2)
            span = state.route.span_of(pid)
            cuts = asked.cuts or ((middle(span.lo, span.hi),) if span.width > 1 else ())
            return plan_split(state.route, pid, cuts, state.next_pid, asked.change_id)

        asked = Asked(change_id or _new_id("split", by), Kind.SPLIT, (pid,), tuple(at))
        return await self._begin(vhost, name, asked, plan)

    async def merge(
        self, vhost: str, name: str, pids: Sequence[int], *, by: str = "", change_id: str = ""
    ) -> ChangeRow:
        """Begins to merge neighbours; see `split`.

        Raises:
            NotFound, UnknownPartition, NotAdjacent, ChangeRunning: it cannot be.
            PreconditionFailed: the id is that of another change.
        """
        asked = Asked(change_id or _new_id("merge", by), Kind.MERGE, tuple(pids))
        return await self._begin(
            vhost,
            name,
            asked,
            lambda state: plan_merge(state.route, pids, state.next_pid, asked.change_id),
        )

    async def move(
        self,
        vhost: str,
        name: str,
        pid: int,
        to_node: int,
        *,
        by: str = "",
        change_id: str = "",
    ) -> ChangeRow:
        """Begins to move a partition to a node, which leads it then; see `split`.

        Raises:
            NotFound, UnknownPartition, ChangeRunning: it cannot be.
            PreconditionFailed: the node leads it already, is not in the cluster, away or drained;
                the id is that of another change.
        """

        def plan(state: TopicState) -> Change:
            state.route.span_of(pid)
            self._check_may_lead(self._record(vhost, name), pid, to_node)
            return plan_move(state.route, pid, state.next_pid, asked.change_id)

        asked = Asked(change_id or _new_id("move", by), Kind.MOVE, (pid,), to_node=to_node)
        return await self._begin(vhost, name, asked, plan)

    def _check_may_lead(self, record: TopicRecord, pid: int, node: int) -> None:
        """Refuses a node to which a partition cannot be moved. Raises PreconditionFailed."""
        node_name = self._nodes.name_of(node)
        if node not in self._metadata.tree.nodes or not self._nodes.is_up(node):
            raise PreconditionFailed(f"node_not_running: node {node_name}")
        if self._nodes.is_drained(node) or self.drains.is_draining(node):
            raise PreconditionFailed(f"node {node_name} is drained")
        if self._partitions.leader(record, pid) == node:
            raise PreconditionFailed(f"partition {pid} is led by node {node_name} already")

    async def _begin(self, vhost: str, name: str, asked: Asked, plan: Plan) -> ChangeRow:
        """Has a planned change recorded, unless it is there. Raises TopicRefused, NotFound,
        PreconditionFailed."""
        for _ in range(ATTEMPTS):
            record = self._record(vhost, name)
            known = repeat_of(record, asked)
            if known is not None:
                return known
            state = record.state
            planned = plan(state)
            if state.running is not None:
                raise ChangeRunning(state.running.change_id)
            to_node = asked.to_node
            places = {span.pid: to_node for span in planned.targets} if to_node else {}
            code = await self._change(vhost, name, Begin(planned), places)
            if not code:
                # A change of this id that is there already is left as it is.
                recorded = repeat_of(self._record(vhost, name), asked)
                return views.change_row(planned) if recorded is None else recorded
            state = self._record(vhost, name).state
            running = "" if state.running is None else state.running.change_id
            if code == Code.CHANGE_RUNNING.value and running not in ("", asked.change_id):
                raise ChangeRunning(running)
            # Somebody else's change was first, and may be over already.
        raise VersionConflict(planned.base_version, state.route.version)

    async def change(self, vhost: str, name: str, change_id: str | None = None) -> ChangeRow | None:
        """Returns a change; without an id the running one, or the latest. None: it is not known.
        Raises NotFound."""
        state = self._record(vhost, name).state
        latest = state.change
        if latest is not None and change_id in (None, latest.change_id):
            return views.change_row(latest)
        return None if change_id is None else views.past_change_row(state.lineage, change_id)

    async def wait_change(
        self, vhost: str, name: str, change_id: str, timeout_s: float = CHANGE_TIMEOUT_S
    ) -> ChangeRow:
        """Waits until a change is done, and returns it.

        Raises:
            NotFound: no such topic, or the change is not known (any more).
            PreconditionFailed: it was aborted.
            Unavailable: it is not done in time; it goes on.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    row = await self.change(vhost, name, change_id)
                    if row is None:
                        raise NotFound(f"no change '{change_id}' of topic '{name}'")
                    if row["is_finished"]:
                        break
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Unavailable(f"change '{change_id}' is not done yet, and goes on") from None
        if row["phase"] == Phase.ABORTED.value:
            raise PreconditionFailed(f"change '{change_id}' was aborted")
        return row

    async def abort(self, vhost: str, name: str, change_id: str) -> None:
        """Gives a change up that has sealed nothing. Raises NotFound, ChangePhase."""
        code = await self._change(vhost, name, Abort(change_id))
        if code:
            row = await self.change(vhost, name, change_id)
            phase = "unknown" if row is None else row["phase"]
            raise ChangePhase(change_id, phase, "it cannot be aborted")

    async def seal(self, vhost: str, name: str, pid: int) -> ChangeRow:
        """Begins to seal a partition from outside, whose majority is gone: its range goes on in a
        new partition, and groups wait for it to come back.

        Raises:
            NotFound, UnknownPartition, ChangeRunning: it cannot be.
            PreconditionFailed: the partition answers.
            Unavailable: no majority of the nodes.
        """
        record = self._record(vhost, name)
        record.state.route.span_of(pid)
        if await self._answers(record, pid):
            raise PreconditionFailed(f"partition {pid} answers: move it")
        change_id = await self._give_up(vhost, name, pid, "seal")
        row = await self.change(vhost, name, change_id)
        if row is None:
            raise NotFound(f"no change '{change_id}' of topic '{name}'")
        return row

    async def _answers(self, record: TopicRecord, pid: int) -> bool:
        """Returns whether a majority of a partition's members answers."""
        try:
            # Nothing is that old: it only tells whether a majority answers.
            await self._partitions.get(record, pid).ask(ExpireProducers(0), QUESTION_TIMEOUT_S)
        except Unavailable:
            return False
        return True

    async def _give_up(self, vhost: str, name: str, pid: int, kind: str) -> str:
        """Has a change recorded, if there is none, that seals a partition from outside; returns its
        id. Raises as `_begin` does."""
        running = self._record(vhost, name).state.running
        if running is not None and pid in running.sources:
            change_id = running.change_id
        else:
            change_id = _new_id(kind)
            await self._begin(
                vhost,
                name,
                Asked(change_id, Kind.MOVE, (pid,)),
                lambda state: plan_move(state.route, pid, state.next_pid, change_id),
            )
        code = await self._change(vhost, name, GiveUp(change_id, pid))
        if not code:
            log.warning("topics.partition_given_up", vhost=vhost, topic=name, pid=pid)
        # Otherwise it was sealed meanwhile, or the change went on without it.
        return change_id

    async def declare_lost(self, vhost: str, name: str, pid: int) -> None:
        """Gives up a partition whose majority is gone: its range goes on in a new partition, and
        groups go on without what it held.

        Raises:
            NotFound, UnknownPartition, ChangeRunning: it cannot be.
            PreconditionFailed: the partition answers.
            Unavailable: it is not done in time; it goes on.
        """
        record = self._record(vhost, name)
        state = record.state
        if pid in state.lost:
            return
        if pid not in state.route.pids and pid not in state.unknown_ends():
            raise UnknownPartition(pid, state.route.version)
        if await self._answers(record, pid):
            raise PreconditionFailed(f"partition {pid} answers: nothing of it is lost")
        said = (await self._partitions.describe_all(record, [pid]))[pid]
        if pid in state.route.pids:
            await self._go_round(vhost, name, pid)
        command = _declaration(pid, said, self._clock.now_ms())
        code = await self._change(vhost, name, command)
        if code:
            raise PreconditionFailed(f"partition {pid} has said where it ends: it is not lost")
        log.warning("topics.partition_lost", vhost=vhost, topic=name, pid=pid)

    async def losses(self, vhost: str, name: str) -> LossRows:
        """Returns what groups go on without, by group and time. Raises NotFound."""
        record = self._record(vhost, name)
        return [
            views.loss_row(record, group, loss)
            for _, group in sorted(record.groups.items())
            for loss in group.losses
        ]

    async def _go_round(self, vhost: str, name: str, pid: int) -> None:
        """Has a partition replaced that cannot be sealed."""
        for _ in range(ATTEMPTS):
            change_id = await self._give_up(vhost, name, pid, "lost")
            await self.wait_change(vhost, name, change_id)
            # A merge may have gone on without it.
            if pid not in self._record(vhost, name).state.route.pids:
                return
        raise Unavailable(f"partition {pid} of topic '{name}' was left out of every change")

    # --- groups ----------------------------------------------------------------------------

    async def groups(self, vhost: str, name: str) -> GroupRows:
        """Returns the consumer groups, by name. Raises NotFound."""
        record = self._record(vhost, name)
        lineage = record.state.lineage
        waited_for = {pid for group in record.groups.values() for pid in lineage.sources(group.cv)}
        found = await self._partitions.describe_all(record, waited_for)
        return [views.group_row(record, group, found) for _, group in sorted(record.groups.items())]

    async def lag(self, vhost: str, name: str, group: str) -> LagRows:
        """Returns the positions of a group in the partitions that it has before it. Raises
        NotFound."""
        record = self._record(vhost, name)
        state = get_group(record, group)
        partitions = views.partitions_ahead(record, state)
        found = await self._partitions.describe_all(record, [each.pid for each in partitions])
        return [views.lag_row(record, state, each, found) for each in partitions]

    async def create_group(
        self,
        vhost: str,
        name: str,
        group: str,
        position: Position = "earliest",
        advance: str | None = None,
    ) -> bool:
        """Creates a consumer group; False when it exists. `advance`: a `lineage.Mode`; None:
        linear, or what the group has.

        Raises:
            NotFound: no such topic.
            PreconditionFailed: a name that is not possible; the group exists and advances
                otherwise.
            BadPosition, UnknownPartition, DataExpired: a position that is not possible.
        """
        while True:
            record = self._record(vhost, name)
            if group in record.groups:
                check_advance(record, group, advance)
                state = record.groups[group]
                if record.mode != WEAK and state.has_lost_data(record.state.kept):
                    raise GroupDataExpired(queue_subject(vhost, f"{name}/{group}"))
                return False
            version, starts = await cut_of(record, position, self._partitions)
            command = CreateGroup(
                vhost=vhost,
                name=name,
                group=group,
                version=version,
                starts=starts,
                mode=advance or Mode.LINEAR.value,
            )
            try:
                made = bool(await self._metadata.execute(command, self._timeout_s))
            except PreconditionFailed:
                if is_kept(self._record(vhost, name).state.kept, version, starts):
                    raise
                # Retention has deleted what it would have begun in: the position is another one.
                continue
            if not made:
                check_advance(self._record(vhost, name), group, advance)
            return made

    async def delete_group(self, vhost: str, name: str, group: str) -> None:
        """Deletes a consumer group, with what it has parked.

        Raises:
            NotFound: no such group.
            GroupLive: it has members.
            Unavailable: a partition did not answer in time.
        """
        record = self._record(vhost, name)
        self._check_idle(record, get_group(record, group))
        # A group of that name that is made later must not find anything of this one.
        queues = [self._partitions.get(record, each.pid) for each in views.kept_partitions(record)]
        await asyncio.gather(*(queue.ask(DropGroup(group), self._timeout_s) for queue in queues))
        command = DeleteGroup(vhost=vhost, name=name, group=group)
        await self._metadata.execute(command, self._timeout_s)

    async def seek(self, vhost: str, name: str, group: str, position: Position) -> GroupRow:
        """Has a group read again, or skip, from a position.

        Raises:
            NotFound: no such group.
            GroupLive: it has members.
            PreconditionFailed: something else has changed the group meanwhile.
            BadPosition, UnknownPartition, DataExpired: a position that is not possible.
        """
        record = self._record(vhost, name)
        state = get_group(record, group)
        self._check_idle(record, state)
        epoch = state.group_epoch
        version, starts = await cut_of(record, position, self._partitions)
        command = ChangeGroup(
            vhost=vhost,
            name=name,
            group=group,
            command=pack_command(Seek(epoch, version, starts)),
        )
        if not await self._metadata.execute(command, self._timeout_s):
            raise PreconditionFailed(
                f"group '{group}' of topic '{name}' or its topic has changed meanwhile: try again"
            )
        record = self._record(vhost, name)
        return views.group_row(record, get_group(record, group), {})

    async def accept_loss(self, vhost: str, name: str, group: str) -> GapRows:
        """Has a group go on behind messages that retention cut before it had read them; returns
        what it goes on without.

        Raises:
            NotFound: no such group.
            Unavailable: a partition did not answer in time.
        """
        record = self._record(vhost, name)
        ahead = views.partitions_ahead(record, get_group(record, group))
        queues = {each.pid: self._partitions.get(record, each.pid) for each in ahead}
        answers = await asyncio.gather(
            *(queue.ask(AcceptLoss(group), self._timeout_s) for queue in queues.values())
        )
        rows: GapRows = [
            {"pid": pid, "first": first, "end": end}
            for pid, answer in zip(queues, answers, strict=True)
            if isinstance(answer, LossAnswer)
            for _, first, end in answer.losses
        ]
        for row in rows:
            log.warning(
                "topics.loss_accepted", vhost=vhost, topic=name, group=group,
                partition=row["pid"], first=row["first"], end=row["end"],
            )  # fmt: skip
        return rows

    @staticmethod
    def _check_idle(record: TopicRecord, group: GroupState) -> None:
        if group.members:
            raise GroupLive(group.name, len(group.members))

    # --- inside ----------------------------------------------------------------------------

    def _check_cluster_limit(self, vhost: str, name: str, more: int) -> None:
        """Refuses partitions beyond the cluster's limit of queues. Raises PreconditionFailed."""
        limit = self._queues_max
        if limit and len(self._metadata.tree.queue_index.by_group) + more > limit:
            raise cluster_partition_limit_reached(vhost, name, limit)

    def _record(self, vhost: str, name: str) -> TopicRecord:
        return get_topic(self._metadata.tree, vhost, name)

    async def _change(
        self, vhost: str, name: str, command: TopicCommand, places: dict[int, int] | None = None
    ) -> str:
        """Has a command of a topic applied; returns the code of the refusal, or empty."""
        change = ChangeTopic(
            vhost=vhost, name=name, command=pack_command(command), places=places or {}
        )
        return str(await self._metadata.execute(change, self._timeout_s))

    def _partition_row(self, record: TopicRecord, pid: int) -> PartitionRow:
        leader = self._partitions.leader(record, pid)
        node = self._nodes.name_of(leader) if leader else ""
        return views.partition_row(record, record.state.lineage.partition(pid), node)


def check_advance(record: TopicRecord, group: str, advance: str | None) -> None:
    """Refuses what a group that exists does otherwise. Raises PreconditionFailed."""
    state = record.groups.get(group)
    mode = None if state is None else state.mode.value
    if mode is not None and advance not in (None, mode):
        raise PreconditionFailed(
            f"group '{group}' of topic '{record.name}' in vhost '{record.vhost}' has the advance "
            f"'{mode}', not '{advance}'"
        )


def _declaration(pid: int, said: PartitionDescription | None, now_ms: int) -> DeclareLost:
    """Returns the command by which a partition is given up. `said`: by a replica that is left."""
    if said is None:
        return DeclareLost(pid, now_ms)
    groups = {
        name: LeftBehind(own.group_epoch, own.watermark, own.parked_keys)
        for name, own in sorted(said.groups.items())
    }
    end = said.end_offset if said.close_offset < 0 else said.close_offset
    return DeclareLost(pid, now_ms, end, groups)


def _new_id(kind: str, by: str = "") -> str:
    return f"{by}-{kind}-{os.urandom(8).hex()}" if by else f"{kind}-{os.urandom(8).hex()}"
