"""Topics whose trace is written to real files without a cluster: one node, its metadata machine's
rules, and the machines of partitions.

Every topic goes the same way: messages of six keys, a group with two members, a lease that moves, a
parked key that is resumed, a split, and the group's step behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from convoymq.client.rows import frame_of
from convoymq.kernels import batch
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.column_records import encode_enqueue
from convoymq.metadata.records import TopicRecord
from convoymq.metadata.topic_trace import TopicTrace, topic_id
from convoymq.metadata.topics import partition_queue_name
from convoymq.model import trace as words
from convoymq.replication.machine import EFFECT_APPLIED
from convoymq.topics.machine.codec import CMD_PRODUCE, decode_outcome, encode_runs
from convoymq.topics.machine.group_machine import FIRST_OFFSET, PartitionGroupMachine
from convoymq.topics.rules import changes
from convoymq.topics.rules import commands as c
from convoymq.topics.rules import group as g
from convoymq.topics.rules import topic as t
from convoymq.topics.rules.changes import Phase
from convoymq.topics.rules.controller import late_seal
from convoymq.topics.rules.dedup import SourceSeal, seed_of
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.order_token import OrderToken
from convoymq.topics.rules.routes import first_route
from convoymq.trace.effects import EffectLog, SourceLog
from convoymq.trace.recorder import QueueTrace
from convoymq.trace.segments import Origin
from convoymq.trace.writer import Writer
from tests.unit.queues.quorum.support import Log, session_id
from tests.unit.topics.machine.support import TELLER, tell

LOGICAL = 8
SEED = 5
KEYS = [b"key-%d" % number for number in range(6)]
GROUP = "billing"
CHANNEL = session_id(1, 7)
PRODUCER = 77
MEMBERS = ("1-1-5-1", "1-1-6-1")
GROUPS_PER_TOPIC = 8
STEP_US = 20_000
"""Between two things that happen: clocks may differ by less."""


class Clock:
    """The one clock of the node."""

    def __init__(self) -> None:
        self.us = 1_000_000_000

    def __call__(self) -> int:
        self.us += 1
        return self.us

    def pass_by(self) -> int:
        """Something has happened; returns the time in ms."""
        self.us = self.us // STEP_US * STEP_US + STEP_US
        return self.us // 1000


class Routes:
    """The metadata group's trace of all topics, below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.writer = Writer(root, retention_bytes=1 << 40, backlog_max_bytes=1 << 30)
        self.recorder = self.recorder_of("", words.TOPICS_QUEUE, words.TOPICS_TYPE, 0)
        self.trace = TopicTrace(("/",))
        self.recorder.attach(self.trace)
        self.index = 0
        self.topics: list[Topic] = []

    def recorder_of(self, vhost: str, queue: str, type: str, group: int) -> QueueTrace:
        origin = Origin(vhost=vhost, queue=queue, type=type, group=group, node=1, incarnation=1)
        return QueueTrace(
            origin,
            self.writer,
            origin.directory(self.root),
            through=0,
            now_us=self.clock,
            members=lambda: [(1, 1, True)],
        )

    def entry(self) -> TopicTrace:
        """The next entry of the metadata group."""
        assert self.trace.trace is not None
        self.index += 1
        self.trace.trace.begin(self.index, 1, self.clock.pass_by())
        return self.trace

    def topic(self, name: str, mode: str = "strict") -> Topic:
        made = Topic(self, name, 1 + GROUPS_PER_TOPIC * len(self.topics), mode)
        self.topics.append(made)
        return made

    def close(self) -> None:
        for topic in self.topics:
            for partition in topic.partitions.values():
                partition.trace.close()
        self.recorder.close()
        assert self.writer.close(60)


class Partition:
    """One partition: its log, machine and trace."""

    def __init__(self, topic: Topic, pid: int, lo: int, hi: int, version: int) -> None:
        self.topic = topic
        self.pid = pid
        self.log = Log()
        settings = {"pid": pid, "lo": lo, "hi": hi, "created_version": version}
        self.machine = PartitionGroupMachine(settings)
        routes = topic.routes
        name = partition_queue_name(topic.name, pid)
        self.trace = routes.recorder_of("/", name, words.PARTITION_TYPE, topic.first_group + pid)
        self.trace.key_hash(LOGICAL, SEED)
        self.trace.attach(self.machine)
        self.session = session_id(1, 100 + topic.first_group + pid)
        self.stored: list[tuple[int, bytes, int]] = []
        """(offset, key, delivery tag)."""
        self.has_published = False
        self.done = 0
        """Messages that the group is through with."""

    def seal(self) -> list[Any]:
        """The next entry of the log."""
        self.log.time_ms = self.topic.routes.clock.pass_by() - 1
        entry = self.log.seal(1)
        self.machine.apply(entry.index, entry.time_ms, entry.data)
        effects, self.machine.effects = self.machine.effects, []
        return effects

    def ask(self, command: c.Command) -> Any:
        tell(self.log, command)
        replies = [e[4] for e in self.seal() if e[0] == EFFECT_APPLIED and e[1] == TELLER]
        return decode_outcome(replies[-1])

    def publish(self, key: bytes, tag: int) -> None:
        if not self.has_published:
            self.has_published = True
            self.trace.publisher(self.session, CHANNEL)
        target = self.log._target(self.session)
        body = b"%d" % tag
        target.publish([b"\0" + bytes([len(key)]) + key, b"h", body], len(body), tag)
        for effect in self.seal():
            if effect[0] == EFFECT_APPLIED and effect[1] == self.session:
                confirmed = target.applied(effect[2])
                self.trace.confirms(self.session, confirmed)
                self.trace.tagged(self.session, confirmed, 1 << 62)
        self.stored.append((FIRST_OFFSET + len(self.stored), key, tag))

    def produce(self, key: bytes, seq: int, tags: Sequence[int], base: int) -> None:
        """A producer with sequences; `tags` stand for its messages."""
        runs = [c.ProducedRun(logical_partition(key, LOGICAL, SEED), seq, len(tags), base)]
        announced = encode_runs(PRODUCER, 1, runs)
        session = session_id(1, 200 + self.topic.first_group + self.pid)
        self.trace.publisher(session, 0)
        self.log.command(session, CMD_PRODUCE, len(announced), body=announced)
        frame = ColumnFrame(frame_of([b"%d" % tag for tag in tags]))
        body, count, position = encode_enqueue(frame, 0, len(tags), b"t", key)
        self.log.command(session, batch.CMD_ENQUEUE, position, count=count, body=body)
        self.seal()
        self.stored += [
            (FIRST_OFFSET + len(self.stored) + i, key, tag) for i, tag in enumerate(tags)
        ]

    def token(self, offset: int) -> OrderToken:
        return OrderToken(self.machine.state.created_version, offset)


class Topic:
    """One topic and its group."""

    def __init__(self, routes: Routes, name: str, first_group: int, mode: str) -> None:
        self.routes = routes
        self.name = name
        self.first_group = first_group
        self.tag = 0
        queues = {
            partition_queue_name(name, pid): SimpleNamespace(group=first_group + pid)
            for pid in range(GROUPS_PER_TOPIC)
        }
        self.vhost: Any = SimpleNamespace(name="/", queues=queues)
        state = t.TopicState.first(first_route(LOGICAL, 2))
        self.record = TopicRecord(
            vhost="/", name=name, mode=mode, hash_id=1, hash_seed=SEED, created_ms=first_group,
            state=state,
        )  # fmt: skip
        routes.entry().created(self.vhost, self.record)
        self.partitions = {
            span.pid: Partition(self, span.pid, span.lo, span.hi, 0) for span in state.route.spans
        }
        self.group = g.GroupState.first(GROUP, 0, {})
        self.record.groups[GROUP] = self.group
        routes.entry().group_created(self.record, self.group)
        for member in MEMBERS:
            self.change_group(g.Join(member))

    @property
    def number(self) -> int:
        return topic_id(self.record)

    def change_group(self, command: g.GroupCommand) -> None:
        owner = self.group.owners.get(command.pid) if isinstance(command, g.Release) else None
        state = self.record.state
        assert self.group.apply(command, state.route.version)
        self.routes.entry().group_changed(self.record, self.group, command, owner)

    def next_tag(self) -> int:
        self.tag += 1
        return self.tag

    def publish(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.next_tag()
            lp = logical_partition(key, LOGICAL, SEED)
            span = next(s for s in self.record.state.route.spans if s.lo <= lp < s.hi)
            self.partitions[span.pid].publish(key, self.tag)

    # --- the group -------------------------------------------------------------------------

    def own(self, pid: int, member: str, states: tuple[bytes, ...] = ()) -> None:
        """A member gets a partition; the first one opens the cursor."""
        partition = self.partitions[pid]
        owner = self.group.owners.get(pid)
        if owner is None:
            partition.ask(c.OpenCursor(GROUP, 1, 0, states))
        else:
            self.change_group(g.Release(pid, owner.epoch))
        self.change_group(g.Grant(pid, member, 1, self.group.lease_epochs.get(pid, 0)))
        partition.ask(c.Lease(GROUP, 1, self.group.owners[pid].epoch, member))

    def hand_out(self, pid: int, first: int, count: int = 1, failures: int = 0) -> None:
        self.routes.clock.pass_by()
        owner = self.group.owners[pid]
        trace = self.partitions[pid].trace
        trace.handed_out(GROUP, owner.member, owner.epoch, first, count, failures)

    def acknowledge(self, pid: int, first: int, last: int) -> None:
        epoch = self.group.owners[pid].epoch
        answer = self.partitions[pid].ask(c.AckRanges(GROUP, 1, epoch, (first, last)))
        assert answer.code.value == "OK", answer

    def consume(self, pid: int, until: int | None = None) -> None:
        """Each message is handed out and acknowledged."""
        partition = self.partitions[pid]
        for offset, _, _ in partition.stored[partition.done : until]:
            self.hand_out(pid, offset)
            self.acknowledge(pid, offset, offset)
            partition.done += 1

    def park_and_resume(self, pid: int) -> None:
        """The next message fails and is parked, the later ones of its key behind it; then they are
        delivered and done."""
        partition = self.partitions[pid]
        epoch = self.group.owners[pid].epoch
        (first, key, _), *rest = partition.stored[partition.done :]
        parked = [first, *(offset for offset, other, _ in rest if other == key)]
        assert len(parked) > 1
        lp = logical_partition(key, LOGICAL, SEED)
        self.hand_out(pid, first)
        for offset in parked:
            partition.ask(c.Park(GROUP, 1, epoch, offset, key, lp, b"copy", offset != first))
        for offset, other, _ in rest:
            if other != key:
                self.hand_out(pid, offset)
                self.acknowledge(pid, offset, offset)
        partition.ask(c.ResumeParked(GROUP, key))
        for offset in parked:
            self.routes.clock.pass_by()
            version = partition.token(offset).created_version
            owner = self.group.owners[pid]
            partition.trace.handed_out(
                GROUP, owner.member, epoch, offset, 1, 0, parked=(key, version)
            )
            partition.ask(c.DoneParked(GROUP, 1, epoch, key, partition.token(offset)))
        partition.done = len(partition.stored)

    # --- changes ---------------------------------------------------------------------------

    def split(self, pid: int, cut: int, *, skip: bool = False) -> tuple[int, ...]:
        """Splits a partition that is consumed, and takes the group along; returns the targets.
        `skip`: it is not consumed, and does not answer."""
        state = self.record.state
        plan = changes.plan_split(state.route, pid, [cut], state.next_pid, "split")
        targets = [span.pid for span in plan.targets]
        commands: list[t.TopicCommand] = [t.Begin(plan)]
        commands += [t.TargetReady("split", 1, target) for target in targets]
        commands += [t.ToPhase("split", 1, phase) for phase in (Phase.TARGETS_READY, Phase.SEALING)]
        self._change(commands)
        source = self.partitions[pid]
        sealed = source.ask(c.Seal("split", 1, plan.next_version, plan.targets, term=1))
        seal = changes.Seal(sealed.close_offset, sealed.dedup)
        now_ms = self.routes.clock.us // 1000
        self._change(
            [
                t.RecordSeal("split", pid, seal),
                t.ToPhase("split", 1, Phase.SEALED),
                t.Publish("split", now_ms),
            ]
        )
        for span in plan.targets:
            made = Partition(self, span.pid, span.lo, span.hi, plan.next_version)
            self.partitions[span.pid] = made
            made.ask(c.Open("split", plan.next_version, 1, sealed.dedup))
        if skip:
            self.change_group(g.Skip(pid, 1, sealed.close_offset))
            states: tuple[bytes, ...] = ()
        else:
            handed = source.ask(c.HandOver(GROUP, 1))
            assert handed.code.value == "OK", handed
            states = (handed.state,)
        self.change_group(g.Release(pid, self.group.owners[pid].epoch))
        self.change_group(g.Advance(1, self.group.cv, self.group.cv + 1))
        for target in targets:
            self.own(target, MEMBERS[0], states)
        return tuple(targets)

    def seal_from_outside(self, pid: int) -> int:
        """Has a partition moved that does not answer; returns the target."""
        state = self.record.state
        plan = changes.plan_move(state.route, pid, state.next_pid, "outside")
        (span,) = plan.targets
        self._change(
            [
                t.Begin(plan),
                t.TargetReady("outside", 1, span.pid),
                t.ToPhase("outside", 1, Phase.TARGETS_READY),
                t.ToPhase("outside", 1, Phase.SEALING),
                t.GiveUp("outside", pid),
                t.RecordSeal("outside", pid, changes.Seal(None)),
                t.ToPhase("outside", 1, Phase.SEALED),
                t.Publish("outside", self.routes.clock.us // 1000),
            ]
        )
        made = Partition(self, span.pid, span.lo, span.hi, plan.next_version)
        self.partitions[span.pid] = made
        seed = seed_of(span.lo, span.hi, [SourceSeal(span.lo, span.hi, None)])
        made.ask(c.Open("outside", plan.next_version, 1, seed))
        return span.pid

    def comes_back(self, pid: int, target: int) -> None:
        """The partition is closed, read to its end and left."""
        source = self.partitions[pid]
        sealed = source.ask(late_seal(self.record.state, pid, 1))
        self._change([t.LearnClose(pid, sealed.close_offset)])
        self.consume(pid)
        handed = source.ask(c.HandOver(GROUP, 1))
        self.change_group(g.Release(pid, self.group.owners[pid].epoch))
        self.change_group(g.Advance(1, self.group.cv, self.group.cv + 1))
        self.own(target, MEMBERS[0], (handed.state,))

    def _change(self, commands: Iterable[t.TopicCommand]) -> None:
        for command in commands:
            assert self.record.state.apply(command) is None, command
            self.routes.entry().changed(self.vhost, self.record, command)


def run(routes: Routes, name: str) -> Topic:
    """A topic that goes the whole way; see the module text."""
    topic = routes.topic(name)
    topic.own(0, MEMBERS[0])
    topic.own(1, MEMBERS[0])
    topic.publish(KEYS * 3)
    topic.consume(0, 2)
    # What the first member has of partition 1 is handed out again by the second.
    topic.hand_out(1, 1, 3)
    topic.acknowledge(1, 1, 1)
    topic.own(1, MEMBERS[1])
    topic.partitions[1].done = 1
    topic.consume(1)
    topic.park_and_resume(0)
    for pid in topic.split(0, 2):
        topic.publish(KEYS)
        topic.consume(pid)
    topic.publish(KEYS)
    for pid in sorted(topic.group.owners):
        topic.consume(pid)
    return topic


def run_weak(routes: Routes, name: str) -> Topic:
    """A weak topic: two members have a partition at once, a message does not wait for the one
    before it, messages have no keys, and a partition is skipped and read late."""
    topic = routes.topic(name, "weak")
    topic.own(0, MEMBERS[0])
    topic.own(1, MEMBERS[0])
    topic.publish((*KEYS, b"", b"", *KEYS, b"", *KEYS))
    first, old = topic.partitions[1], topic.group.owners[1].epoch
    topic.hand_out(1, 1, 2)
    topic.own(1, MEMBERS[1])
    # Nothing waits for the messages that have no outcome yet.
    topic.hand_out(1, 1, len(first.stored))
    routes.clock.pass_by()
    first.trace.handed_out(GROUP, MEMBERS[0], old, 3, 1, 0)
    topic.acknowledge(1, 1, len(first.stored))
    first.done = len(first.stored)
    topic.consume(0, 1)
    targets = topic.split(0, 2, skip=True)
    topic.publish((*KEYS, b""))
    for pid in (*targets, 1):
        topic.consume(pid)
    topic.own(0, MEMBERS[1])
    topic.consume(0)
    topic.change_group(g.Recover(0, 1))
    return topic


def run_round(routes: Routes, name: str) -> Topic:
    """A topic with a partition that is sealed from outside. A producer has no answer to messages 2
    and 3 of its own there, and sends them again."""
    topic = routes.topic(name)
    topic.own(0, MEMBERS[0])
    topic.own(1, MEMBERS[0])
    topic.publish(KEYS * 2)
    topic.consume(0)
    source = topic.partitions[1]
    key = source.stored[0][1]
    tags = [topic.next_tag() for _ in range(4)]
    source.produce(key, 1, tags[:3], base=1)
    topic.consume(1, 2)
    target = topic.seal_from_outside(1)
    topic.partitions[target].produce(key, 2, tags[1:], base=2)
    topic.publish(KEYS)
    topic.comes_back(1, target)
    # What the source has as well is passed over.
    topic.partitions[target].done = 2
    topic.consume(target)
    topic.consume(0)
    return topic


def write_effects(root: Path, topic: Topic) -> None:
    """What a source and a sink of the topic would write: the value of a key is its latest tag."""
    stored = {
        tag: (tag, key, partition.token(offset))
        for partition in sorted(topic.partitions.values(), key=lambda each: -each.pid)
        for offset, key, tag in partition.stored
    }.values()
    with (
        SourceLog(root, topic.name, topic.name) as source,
        EffectLog(root, topic.name, topic.name, GROUP) as sink,
    ):
        for tag, key, token in sorted(stored):
            source.changed(key.decode(), str(tag))
            sink.applied(key.decode(), str(token), str(tag))
            sink.ignored(key.decode(), str(token))
