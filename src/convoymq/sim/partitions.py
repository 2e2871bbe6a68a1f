"""Partitions of topics in the simulator: those of streams, with a state that says who may append.

The referee drives the pure machine of `topics.partition` with the committed commands. What it
asserts beyond `streams`:

- the machine's state is that of the pure one;
- what a publisher was told to be refused is not in the log, and what it was told to be safe is;
- after a refusal nothing of the session is in the log;
- a command is answered once, and before the end;
- a fetch of a group shows messages of the log at their offsets.

Channels tell the commands and fetch. A partition is sealed at some time in most runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from convoymq.kernels import batch
from convoymq.kernels.batch import PendingCommand
from convoymq.model.errors import BrokerError
from convoymq.queues.interface import QueueClient
from convoymq.queues.partition.codec import CMD_PARTITION, decode_command
from convoymq.queues.partition.machine import (
    CREATION,
    FIRST_OFFSET,
    PartitionGroupMachine,
)
from convoymq.queues.partition.queue import PartitionQueue
from convoymq.queues.partition.reads import Fetch, Fetched
from convoymq.replication.machine import Machine
from convoymq.sim.clients import Channel
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.records import identity_of
from convoymq.sim.streams import StreamChannel, StreamReferee
from convoymq.topics.commands import AckRanges, Command, Lease, Open, OpenCursor, Seal
from convoymq.topics.lineage import PartitionState
from convoymq.topics.partition import Outcome, PartitionMachine
from convoymq.topics.refusals import Code
from convoymq.topics.routes import Span

GROUP = "g"
TELL_CHANCE = 0.2
FETCH_CHANCE = 0.1
#: Of the commands that are told.
SEAL_CHANCE = 0.01
FETCH_WAIT_MS = 300


class PartitionReferee(StreamReferee):
    """The model of one group's partition."""

    def __init__(self, group: int, settings: Mapping[str, int]) -> None:
        super().__init__(group)
        version = settings["created_version"]
        self.pure = PartitionMachine(settings["pid"], settings["lo"], settings["hi"], version)
        self.pure.open(Open(CREATION, version, 0))
        self.refused_sessions: set[int] = set()

    def _enqueue(self, session: int, count: int, data: bytes, offset: int) -> None:
        is_open = self.pure.state is PartitionState.OPEN
        if not is_open or session in self.refused_sessions:
            self.refused_sessions.add(session)
            return
        super()._enqueue(session, count, data, offset)
        self.pure.append_until(len(self.log) + FIRST_OFFSET, 0)

    def _other(self, kind: int, arg: int, data: bytes, offset: int) -> None:
        if kind == CMD_PARTITION:
            self.pure.apply(decode_command(batch.command_body(data, offset)[:arg]))

    def check_machine(self, machine: Machine) -> None:
        """Compares with a machine that applied the same index; retention is the machine's."""
        super().check_machine(machine)
        assert isinstance(machine, PartitionGroupMachine)
        mine, its = _facts(self.pure), _facts(machine.state)
        if mine != its:
            self.fail(f"the machine is at {its}, the model at {mine}")

    def on_refused(self, identity: bytes) -> None:
        """A publisher was told that a message is not stored."""
        if identity in self.places:
            self.fail(f"{identity.hex()} was refused, and lies at {self.places[identity]}")


def _facts(state: PartitionMachine) -> list[object]:
    """Facts that both machines must agree about; the start of the log is retention's."""
    groups = [
        (name, own.group_epoch, own.lease_epoch, own.member, own.cursor.pack())
        for name, own in sorted(state.groups.items())
    ]
    return [state.state, state.end_offset, state.close_offset, state.sealed_by, groups]


class PartitionChannel(StreamChannel):
    """A channel into a partition, which also has its node tell commands and fetch."""

    def _prepare(self) -> None:
        super()._prepare()
        self._untold = 0
        self._unfetched = 0

    @property
    def _partition(self) -> PartitionReferee:
        assert isinstance(self._referee, PartitionReferee)
        return self._referee

    @property
    def _queue(self) -> PartitionQueue:
        assert isinstance(self.client.queue, PartitionQueue)
        return self.client.queue

    def _publish(self) -> None:
        # Producers have no names here.
        Channel._publish(self)
        if self._scheduler.chance(TELL_CHANCE):
            self._tell()
        if self._scheduler.chance(FETCH_CHANCE):
            self._fetch()

    def on_closed(
        self, client: QueueClient, command: PendingCommand, code: Code, to_version: int
    ) -> None:
        """A command of publishes was refused."""
        assert command.tags is not None
        if code is not Code.CLOSED or to_version != 1:
            raise InvariantBroken(f"{self.name}: refused with {code} and version {to_version}")
        for first, last in zip(command.tags[::2], command.tags[1::2], strict=True):
            for tag in range(first, last + 1):
                self._partition.on_refused(self.unconfirmed[tag])
        self.on_published(client, command.tags, False)

    def _tell(self) -> None:
        self._untold += 1
        self._queue.tell(self._draw_command(), self._on_told)

    def _draw_command(self) -> Command:
        own = self._partition.pure.groups.get(GROUP)
        if self._scheduler.chance(SEAL_CHANCE):
            return Seal("change", 1, 1, (Span(0, 8, 2),), term=0)
        if own is None:
            return OpenCursor(GROUP, 1)
        if self._scheduler.chance(0.2):
            return Lease(GROUP, 1, own.lease_epoch + self._scheduler.between(0, 1), self.name)
        first = own.cursor.watermark + self._scheduler.between(0, 3)
        last = first + self._scheduler.between(0, 20)
        return AckRanges(GROUP, 1, own.lease_epoch, (first, last))

    def _on_told(self, outcome: Outcome | None, error: BrokerError | None) -> None:
        self._untold -= 1
        if self._untold < 0:
            raise InvariantBroken(f"{self.name}: a command was answered twice")
        if outcome is None:
            raise InvariantBroken(f"{self.name}: a command was not answered: {error}")

    def _fetch(self) -> None:
        own = self._partition.pure.groups.get(GROUP)
        if own is None:
            return
        self._unfetched += 1
        offset = self._scheduler.between(-1, 50)
        wait_ms = self._scheduler.between(0, FETCH_WAIT_MS)
        request = Fetch(GROUP, 1, own.lease_epoch, offset, 20, 1 << 16, -1, -1, wait_ms)
        self._queue.fetch(request, self._on_fetched)

    def _on_fetched(self, found: Fetched | None, error: BrokerError | None) -> None:
        self._unfetched -= 1
        if self._unfetched < 0:
            raise InvariantBroken(f"{self.name}: a fetch was answered twice")
        if found is None or self.lost:
            return
        expected = -1
        for run in found.runs:
            identities = [
                identity_of(batch.record(run.block, run.command, run.first + i))
                for i in range(run.messages)
            ]
            self._stream.on_read(self.name, expected, run.offset - FIRST_OFFSET, identities)
            expected = run.offset - FIRST_OFFSET + run.messages

    def waits_for(self) -> str:
        """Returns what is still outstanding; empty when nothing is."""
        missing = super().waits_for()
        if self._untold or self._unfetched:
            return f"{missing} {self._untold} commands told, {self._unfetched} fetches".strip()
        return missing
