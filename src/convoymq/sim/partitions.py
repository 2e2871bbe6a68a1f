"""Partitions of topics in the simulator: those of streams, with a state that says who may append.

The referee drives the pure machine of `topics.machine.partition` with the committed commands. What
it asserts beyond `streams`:

- the machine's state is that of the pure one;
- what a publisher was told to be refused is not in the log, and what it was told to be safe is;
- after a refusal nothing of the session is in the log;
- messages of a producer with sequences are in the log as the pure machine decides about each, and
  what it was told to be stored is;
- a command is answered once, and before the end;
- a fetch of a group shows messages of the log at their offsets.

Channels tell the commands and fetch. A partition is sealed at some time in most runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from convoymq.kernels import batch
from convoymq.kernels.batch import PendingCommand
from convoymq.model.errors import BrokerError
from convoymq.queues.driver import GroupOptions
from convoymq.queues.interface import PublishOutcome, QueueClient
from convoymq.replication.machine import Machine
from convoymq.sim.clients import Channel, record_of
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.group_node import GroupNode
from convoymq.sim.records import identity_of
from convoymq.sim.streams import StreamChannel, StreamLoad, StreamReferee
from convoymq.sim.world import ChannelKind
from convoymq.topics.machine.client import Enqueue, PartitionClient
from convoymq.topics.machine.codec import (
    CMD_PARTITION,
    CMD_PRODUCE,
    PackedRuns,
    decode_command,
    decode_runs,
)
from convoymq.topics.machine.group_machine import (
    CREATION,
    FIRST_OFFSET,
    PartitionGroupMachine,
)
from convoymq.topics.machine.partition import Outcome, PartitionMachine
from convoymq.topics.machine.queue import PartitionQueue
from convoymq.topics.machine.reads import Fetch, Fetched
from convoymq.topics.rules.answers import RunsAnswer
from convoymq.topics.rules.commands import (
    AckRanges,
    Command,
    Lease,
    Open,
    OpenCursor,
    Produce,
    ProducedRun,
    Seal,
)
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import Span

GROUP = "g"
TELL_CHANCE = 0.2
FETCH_CHANCE = 0.1
PRODUCE_CHANCE = 0.3
#: Of the commands that are told.
SEAL_CHANCE = 0.01
FETCH_WAIT_MS = 300
COMMAND_HEADER_SIZE = 32


class PartitionReferee(StreamReferee):
    """The model of one group's partition."""

    def __init__(self, group: int, settings: Mapping[str, int]) -> None:
        super().__init__(group)
        version = settings["created_version"]
        self.pure = PartitionMachine(settings["pid"], settings["lo"], settings["hi"], version)
        self.pure.open(Open(CREATION, version, 0))
        self.refused_sessions: set[int] = set()
        self.announced: dict[int, PackedRuns] = {}
        """Session -> runs of its next ENQUEUE."""

    def _enqueue(self, session: int, count: int, data: bytes, offset: int) -> None:
        announced = self.announced.pop(session, None)
        if announced is not None:
            self._produce(announced, data, offset)
            return
        is_open = self.pure.state is PartitionState.OPEN
        if not is_open or session in self.refused_sessions:
            self.refused_sessions.add(session)
            return
        super()._enqueue(session, count, data, offset)
        self.pure.append_until(len(self.log) + FIRST_OFFSET, 0)

    def _produce(self, announced: PackedRuns, data: bytes, offset: int) -> None:
        """Message by message."""
        producer, epoch, runs = announced
        row = 0
        for run in runs:
            for i in range(run.messages):
                command = Produce(producer, epoch, run.lp, run.seq + i, b"", run.base)
                if self.pure.produce(command).code is Code.OK:
                    identity = identity_of(batch.record(data, offset, row))
                    if identity in self.places:
                        self.fail(f"{identity.hex()} is in the log twice")
                    self.places[identity] = len(self.log)
                    self.log.append(identity)
                row += 1

    def _other(self, kind: int, arg: int, data: bytes, offset: int) -> None:
        if kind == CMD_PRODUCE:
            # The session rule has been checked; the session of the command stands in its head.
            session = int.from_bytes(data[offset + 8 : offset + 16], "little")
            self.announced[session] = decode_runs(batch.command_body(data, offset)[:arg])
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
    stored = {key: (row.epoch, row.last_seq) for key, row in state.dedup.rows.items()}
    return [state.state, state.end_offset, state.close_offset, state.sealed_by, groups, stored]


class PartitionChannel(StreamChannel):
    """A channel into a partition, which also has its node tell commands and fetch."""

    def _prepare(self) -> None:
        super()._prepare()
        self._untold = 0
        self._unfetched = 0
        self._unanswered = 0
        self._messages: dict[int, list[bytes]] = {}
        """Logical partition -> bodies by sequence, of this channel's producer."""
        self._expected: dict[int, int] = {}
        """Logical partition -> the next sequence, as far as it was told."""

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
        if self._scheduler.chance(PRODUCE_CHANCE):
            self._produce()

    # Producers with sequences.

    def _produce(self) -> None:
        """Sends runs that begin at the next sequence, before it, or behind it."""
        client = self.client
        assert isinstance(client, PartitionClient)
        if not client.takes_runs:
            return
        runs: list[ProducedRun] = []
        bodies: list[bytes] = []
        for _ in range(self._scheduler.between(1, 3)):
            lp = self._scheduler.between(0, 8)
            first = self._expected.get(lp, 1)
            if self._scheduler.chance(0.3):
                first = max(1, first + self._scheduler.between(-3, 2))
            count = self._scheduler.between(1, 4)
            bodies += self._bodies(lp, first, count)
            runs.append(ProducedRun(lp, first, count))
        self._unanswered += 1
        self._workload.published += len(bodies)
        client.produce(
            self.publisher,
            1,
            runs,
            _enqueue_of(bodies),
            lambda answer, error: self._on_produced(runs, answer),
        )

    def _bodies(self, lp: int, first: int, count: int) -> list[bytes]:
        known = self._messages.setdefault(lp, [])
        while len(known) < first + count - 1:
            self._count += 1
            identity = self.publisher.to_bytes(4, "big") + self._count.to_bytes(8, "big")
            known.append(identity + bytes(self._scheduler.skewed(0, self.config.body_max)))
        return known[first - 1 : first + count - 1]

    def _on_produced(self, runs: list[ProducedRun], answer: RunsAnswer | None) -> None:
        self._unanswered -= 1
        if self._unanswered < 0:
            raise InvariantBroken(f"{self.name}: runs were answered twice")
        if answer is None or self.lost:
            return
        for run, its in zip(runs, answer.runs, strict=True):
            if its.expected:
                self._expected[run.lp] = its.expected
            if its.code in (Code.OK, Code.DUPLICATE):
                for body in self._bodies(run.lp, run.seq, run.messages):
                    self._partition.on_confirmed(body[:12])

    # Publishers without sequences.

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
        self.on_published(client, command.tags, PublishOutcome.REFUSED_UNAVAILABLE)

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
        if self._untold or self._unfetched or self._unanswered:
            told = f"{self._untold} commands told, {self._unanswered} requests of its producer"
            return f"{missing} {told}, {self._unfetched} fetches".strip()
        return missing


def _enqueue_of(bodies: list[bytes]) -> Enqueue:
    """Returns an ENQUEUE with these bodies, for a session that numbers it."""
    builder = batch.CommandBuilder()
    target = batch.PublishTarget(builder, 1, None)
    for body in bodies:
        target.publish(record_of(body), len(body), 0)
    data = builder.take_entry(1, 1, 1, 0).data
    ((_, flags, _, _, count, position, offset, _),) = batch.commands(data)
    end = offset + position + 4 * (count + 1)
    return flags, count, position, data[offset + COMMAND_HEADER_SIZE : end]


class PartitionLoad(StreamLoad):
    """Partitions of topics, each on its own."""

    text = "partitions of topics, each on its own"
    machine_class = PartitionGroupMachine

    def draw_settings(self, rng: Random, settings: dict[str, int]) -> dict[str, int]:
        settings = super().draw_settings(rng, settings)
        return settings | {"pid": 1, "lo": 0, "hi": 8, "created_version": 0}

    def make_referee(self, group: int, settings: dict[str, int]) -> PartitionReferee:
        return PartitionReferee(group, settings)

    def make_queue(self, node: GroupNode, parts: GroupOptions) -> PartitionQueue:
        return PartitionQueue(**parts, ask_node=node.ask_node, answers=node.answers)

    def channel_kind(self, group: int) -> ChannelKind:
        return PartitionChannel
