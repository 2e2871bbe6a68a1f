"""A node that ends itself by SIGKILL at a named point of a change of partitions.

`tests.forked_nodes` forks such nodes. A test writes `TOPIC POINT` into the file `die-at` in the
cluster's directory; of the nodes that come to this point the one that removes the file dies there.

| point                                        | the node dies                                     |
|----------------------------------------------|---------------------------------------------------|
| `PHASE controller`, `… source`, `… target`   | when it has applied the phase or a later one, and |
|                                              | leads the metadata, a source or a target          |
| `seal controller`, `open controller`         | before it tells a partition to close, to open     |
| `publish controller`                         | before it proposes the next version               |
| `closed source`, `opened target`             | when it has applied CLOSE or OPEN, before anybody |
|                                              | has its answer                                    |
| `advance coordinator`, `advanced …`          | before it proposes a group's next version, and    |
|                                              | when it has applied it                            |
| `grant coordinator`                          | before it gives a member a partition of a change  |
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import ClassVar

from convoymq.broker import topic_parts as parts
from convoymq.broker.topic_parts import TopicParts
from convoymq.metadata.machine import Change, ChangeKind, TopicRecord
from convoymq.metadata.topics import PARTITION_PREFIX
from convoymq.queues.stream.machine import StreamMachine
from convoymq.topics.machine import queue
from convoymq.topics.machine.group_machine import PartitionGroupMachine
from convoymq.topics.machine.queue import PartitionQueue
from convoymq.topics.rules.changes import Phase
from convoymq.topics.rules.commands import Command, Open, Seal
from convoymq.topics.rules.controller import Controller
from convoymq.topics.rules.group import Advance, Grant, GroupCommand
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.topic import Publish, TopicCommand
from convoymq.topics.shell.controller_loop import ControllerLoop
from convoymq.topics.shell.coordinator_loop import GroupCoordinators, _Seat
from convoymq.topics.shell.leader_task import TopicKey

FILE = "die-at"
PHASES = [phase for phase in Phase if phase is not Phase.ABORTED]
FIRST_PARTITIONS = 2
"""Partitions of the topics of these tests, before any change."""


def dies_at(topic: str, *points: str) -> None:
    """Ends this process if one of these points is the one that a test has named."""
    # The node's configuration is the last argument, in a directory of its own.
    armed = Path(sys.argv[-1]).parents[1] / FILE
    try:
        named, point = armed.read_text().split(" ", 1)
        if named != topic or point not in points:
            return
        armed.unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class DyingParts(TopicParts):
    """Dies at phases, and when a group has advanced."""

    versions: ClassVar[dict[tuple[str, str], int]] = {}

    def on_change(self, change: Change) -> None:
        """See `TopicParts`. The controller's next step comes behind it."""
        if change.kind is ChangeKind.TOPIC:
            vhost = self.controller._store.tree.vhosts.get(change.vhost)
            record = None if vhost is None else vhost.topics.get(change.topic)
            if record is not None:
                self._at_phase(record)
                self._at_version(record)
        super().on_change(change)

    def _leads_metadata(self) -> bool:
        return self.controller._store.leader == self.controller._node

    def _at_phase(self, record: TopicRecord) -> None:
        change = record.state.change
        if change is None:
            return
        roles = ["controller"] if self._leads_metadata() else []
        targets = [span.pid for span in change.targets]
        for role, pids in (("source", change.sources), ("target", targets)):
            leaders = {self.partitions.leader(record, pid) for pid in pids}
            if self.controller._node in leaders:
                roles.append(role)
        # A node that is behind sees several phases at once.
        passed = itertools.takewhile(lambda phase: phase is not change.phase, PHASES)
        phases = [*passed, change.phase]
        points = itertools.product((phase.value for phase in phases), roles)
        dies_at(record.name, *(f"{phase} {role}" for phase, role in points))

    def _at_version(self, record: TopicRecord) -> None:
        for name, group in record.groups.items():
            before = self.versions.setdefault((record.name, name), group.cv)
            self.versions[record.name, name] = group.cv
            if group.cv > before and self._leads_metadata():
                dies_at(record.name, "advanced coordinator")


class DyingController(ControllerLoop):
    """Dies before it tells or proposes something."""

    def _tell(self, key: TopicKey, controller: Controller, pid: int, command: Command) -> None:
        if isinstance(command, Seal):
            dies_at(key.name, "seal controller")
        elif isinstance(command, Open):
            dies_at(key.name, "open controller")
        super()._tell(key, controller, pid, command)

    def _submit(self, key: TopicKey, command: TopicCommand) -> None:
        if isinstance(command, Publish):
            dies_at(key.name, "publish controller")
        super()._submit(key, command)


class DyingCoordinators(GroupCoordinators):
    """Dies before it proposes something."""

    def _propose(self, seat: _Seat, command: GroupCommand) -> None:
        if isinstance(command, Advance):
            dies_at(seat.name.topic, "advance coordinator")
        elif isinstance(command, Grant) and seat.core.state.cv > 0:
            dies_at(seat.name.topic, "grant coordinator")
        super()._propose(seat, command)


class DyingPartition(PartitionQueue):
    """Dies when CLOSE or OPEN is applied."""

    def _moved(self, machine: StreamMachine) -> None:
        assert isinstance(machine, PartitionGroupMachine)
        topic, _, pid = self.name.removeprefix(PARTITION_PREFIX).rpartition(".")
        if self.leads and machine.state.state is PartitionState.SEALED:
            dies_at(topic, "closed source")
        elif (
            self.leads
            and int(pid) >= FIRST_PARTITIONS
            and machine.state.state is PartitionState.OPEN
        ):
            dies_at(topic, "opened target")
        super()._moved(machine)


def install() -> None:
    """Has the node made of these parts."""
    for module, name, part in (
        (parts, "TopicParts", DyingParts),
        (parts, "ControllerLoop", DyingController),
        (parts, "GroupCoordinators", DyingCoordinators),
        (queue, "PartitionQueue", DyingPartition),
    ):
        setattr(module, name, part)
