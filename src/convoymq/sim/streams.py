"""Streams in the simulator: a referee that keeps the log as a list, and channels that read it.

The referee sees every committed entry once and gives out offsets by its own session table and its
own memory of producers. What it asserts:

- offsets are dense: the machine is always where the list is, whatever was resent;
- a message is in the log once, although producers repeat what they published on purpose;
- what a publisher was told to be safe is in the log;
- a reader gets every offset from where it began on, in order, each once, with the message that the
  log has there; it may skip only what retention dropped;
- what is dropped by retention is the front of the log, and the newest message stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from convoymq.kernels import batch
from convoymq.model.tables import Field
from convoymq.queues.driver import GroupOptions
from convoymq.queues.interface import ConsumerSpec, Delivery, PublishOutcome, QueueClient
from convoymq.queues.stream.machine import StreamMachine
from convoymq.queues.stream.queue import StreamQueue
from convoymq.replication.machine import Effect, Machine
from convoymq.sim.clients import Channel, ClientConfig, ranges_of, record_of
from convoymq.sim.delivery_model import InvariantBroken
from convoymq.sim.group_node import GroupNode
from convoymq.sim.group_world import GroupLoad, GroupWorld
from convoymq.sim.records import identity_of
from convoymq.sim.world import ChannelKind

#: Chance of a burst by a named producer, and of repeating all that it published so far.
NAMED_CHANCE = 0.5
REPEAT_CHANCE = 0.1
#: Window in the quiet phase: thousands of messages are read within its time.
DRAIN_WINDOW = 200


class Opened:
    """Opening numbers that have opened a session, by node and incarnation."""

    def __init__(self) -> None:
        self._numbers: set[tuple[int, int, int]] = set()
        self._latest: dict[int, int] = {}

    def hear_of(self, node: int, incarnation: int) -> bool:
        """A node was heard of; False in an older incarnation than its latest."""
        self._latest[node] = max(self._latest.get(node, 0), incarnation)
        return self._latest[node] == incarnation

    def begins(self, kind: int, session: int, number: int) -> bool:
        """Returns whether a command of an unknown session opens it."""
        node, incarnation = session >> 56, session >> 24 & 0xFFFFFFFF
        opens = kind == batch.CMD_SESSION_OPEN
        if not (opens or kind == batch.CMD_SESSION_CLOSE):
            return False
        key = (node, incarnation, number)
        if not self.hear_of(node, incarnation) or key in self._numbers or not opens:
            return False
        self._numbers.add(key)
        return True


class StreamReferee:
    """The model of one group's stream."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.index = 0
        self.log: list[bytes] = []
        """Identities by offset."""
        self.places: dict[bytes, int] = {}
        self.first = 0
        self.seqs: dict[int, int] = {}
        self.ended: set[int] = set()
        self.opened = Opened()
        self.named: dict[int, tuple[bytes, int] | None] = {}
        self.last: dict[bytes, int] = {}

    def fail(self, text: str) -> None:
        """Stops the run."""
        raise InvariantBroken(f"stream {self.group}, entry {self.index}: {text}")

    def on_entry(self, index: int, data: bytes, effects: list[Effect]) -> None:
        """A committed entry of commands, in order of the log."""
        self.index = index
        for kind, flags, session, seq, count, arg, offset, _length in batch.commands(data):
            if session:
                last = self.seqs.get(session, 0)
                if session in self.ended or seq != last + 1:
                    continue
                if not last and not self.opened.begins(kind, session, arg << 32 | count):
                    continue
                self.seqs[session] = seq
            if kind == batch.CMD_ENQUEUE:
                self._enqueue(session, count, data, offset)
            elif kind == batch.CMD_PRODUCER:
                body = batch.command_body(data, offset)
                self.named[session] = (body[8 : 8 + count], int.from_bytes(body[:8], "little"))
            elif kind == batch.CMD_SESSION_CLOSE:
                self.ended.add(session)
            elif kind == batch.CMD_SESSION_DOWN:
                self.ended.add(int.from_bytes(batch.command_body(data, offset)[:8], "little"))
            elif kind == batch.CMD_NODE_DOWN and flags & 1:
                self.ended.update(s for s in self.seqs if s >> 56 == arg)
            elif kind == batch.CMD_NODE_UP:
                incarnation = int.from_bytes(batch.command_body(data, offset)[:8], "little")
                self.opened.hear_of(arg, incarnation)
                self.ended.update(
                    s for s in self.seqs if s >> 56 == arg and s >> 24 & 0xFFFFFFFF < incarnation
                )
            else:
                self._other(kind, arg, data, offset)

    def _other(self, kind: int, arg: int, data: bytes, offset: int) -> None:
        """A command that means nothing here."""

    def _enqueue(self, session: int, count: int, data: bytes, offset: int) -> None:
        producer = self.named.pop(session, None)
        for i in range(count):
            if producer is not None:
                name, first = producer
                if first + i <= self.last.get(name, -1):
                    continue
                self.last[name] = first + i
            identity = identity_of(batch.record(data, offset, i))
            known = self.places.get(identity)
            if known is not None:
                self.fail(f"{identity.hex()} is in the log twice, first at offset {known}")
            self.places[identity] = len(self.log)
            self.log.append(identity)

    def check_machine(self, machine: Machine) -> None:
        """Compares with a machine that applied the same index; follows retention, which goes by
        bytes and time."""
        assert isinstance(machine, StreamMachine)
        if machine.first < self.first:
            self.fail(f"first offset {machine.first} after {self.first}")
        self.first = machine.first
        machine.check_invariants()
        if machine.next != len(self.log):
            self.fail(f"the machine is at offset {machine.next}, the log has {len(self.log)}")
        if self.log and machine.first >= machine.next:
            self.fail("retention dropped the newest message")

    def waits_for(self) -> str:
        """Returns what has to happen before the end: nothing, streams keep what they have."""
        return ""

    def on_confirmed(self, identity: bytes) -> None:
        """A publisher was told that a message is safe."""
        if identity not in self.places:
            self.fail(f"{identity.hex()} was confirmed, but no committed entry holds it")

    def on_read(self, who: str, expected: int, offset: int, identities: Sequence[bytes]) -> None:
        """A reader got messages where it expected offset `expected` (-1: it begins)."""
        if expected >= 0 and offset != expected and not expected < offset <= self.first:
            self.fail(f"{who} got offset {offset} where {expected} was next")
        if offset + len(identities) > len(self.log):
            self.fail(f"{who} got offset {offset}, which no committed entry gave")
        for i, identity in enumerate(identities):
            if self.log[offset + i] != identity:
                self.fail(f"{who} got {identity.hex()} at offset {offset + i}")


class StreamChannel(Channel):
    """A channel into a stream."""

    def _prepare(self) -> None:
        self._next: dict[int, int] = {}
        """Consumer -> offset that comes next; -1 before the first."""
        self._from_first: set[int] = set()
        self._sent: list[bytes] = []
        """Bodies that this channel's producer published, by sequence."""
        self._sequences: dict[int, int] = {}
        """Tag -> sequence, of what is not answered."""
        self._refused: int | None = None
        """The lowest sequence that was refused and not sent again. A producer repeats from there:
        once a later one is in the log, an older one counts as a repeat, even if it never came."""

    @property
    def _stream(self) -> StreamReferee:
        assert isinstance(self._referee, StreamReferee)
        return self._referee

    # Publishing.

    def _publish(self) -> None:
        if not self._scheduler.chance(NAMED_CHANCE):
            super()._publish()
            return
        again = self._sent and self._scheduler.chance(REPEAT_CHANCE)
        first = self._scheduler.between(0, len(self._sent) - 1) if again else len(self._sent)
        if self._refused is not None:
            first = self._refused
        count = self._scheduler.between(1, self.config.burst_max)
        if len(self.unconfirmed) + count > self.config.unconfirmed_max:
            return
        name = b"producer%d" % self.publisher
        target = self.client.target
        body = first.to_bytes(8, "little") + name
        target.command(batch.CMD_PRODUCER, 0, len(name), 0, body)
        for sequence in range(first, first + count):
            if sequence == len(self._sent):
                self._count += 1
                identity = self.publisher.to_bytes(4, "big") + self._count.to_bytes(8, "big")
                size = self._scheduler.skewed(0, self.config.body_max)
                self._sent.append(identity + bytes(size))
            message = self._sent[sequence]
            self._tag += 1
            self.unconfirmed[self._tag] = message[:12]
            self._sequences[self._tag] = sequence
            self._workload.published += 1
            target.publish(record_of(message), len(message), self._tag)
        # What follows must not join the ENQUEUE: it has no sequence.
        target.command(batch.CMD_SETTLE, 0, 0, 0)
        if self._refused is not None:
            self._refused = None if first + count >= len(self._sent) else first + count

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        """Confirms; a producer begins again with the first of what was refused."""
        super().on_published(client, tags, outcome)
        for i in range(0, len(tags), 2):
            for tag in range(tags[i], tags[i + 1] + 1):
                sequence = self._sequences.pop(tag, None)
                if sequence is not None and not outcome:
                    known = self._refused
                    self._refused = sequence if known is None else min(sequence, known)

    # Consuming.

    def _subscribe(self) -> None:
        self._numbers += 1
        number = self._numbers
        starts = (
            None,
            Field("S", b"first"),
            Field("S", b"last"),
            Field("S", b"1s"),
            Field("l", self._scheduler.between(0, len(self._stream.log) + 3)),
        )
        start = starts[1] if self.draining else self._scheduler.rng.choice(starts)
        arguments = {}
        if not self.draining and self._scheduler.chance(0.3):
            arguments["x-stream-consumer-name"] = f"name{self._scheduler.between(1, 3)}"
        spec = ConsumerSpec(
            number=number,
            tag=f"{self.name}-{number}",
            prefetch=DRAIN_WINDOW
            if self.draining
            else self._scheduler.between(1, self.config.prefetch_max),
            no_ack=False,
            arguments=arguments,
            stream_offset=start,
        )
        self._asked.add(number)
        self._consumers[number] = False
        self._next[number] = -1
        if start is starts[1] and not arguments:
            # One with a name begins behind what it stored, maybe at the end.
            self._from_first.add(number)
        self._trace.add(self.name, f"subscribe {number} prefetch {spec.prefetch} at {start}")
        self.client.subscribe(spec)

    def drain(self) -> None:
        """From now on everything that is kept is read from the first offset on."""
        super().drain()
        if self.is_over:
            return
        for number in sorted(self._consumers):
            self.client.set_credit(number, DRAIN_WINDOW)
        self._subscribe()

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        """Messages arrive."""
        if self.lost:
            # Nobody reads any more, and nobody would say that a recovery took entries back.
            return
        consumer, first_id, block, command, first, count, *_ = delivery
        if consumer in self._asked:
            raise InvariantBroken(f"{self.name}: delivery to consumer {consumer} before its answer")
        identities = [identity_of(batch.record(block, command, first + i)) for i in range(count)]
        expected = self._next.get(consumer, -1)
        self._stream.on_read(f"{self.name}/{consumer}", expected, first_id, identities)
        self._next[consumer] = first_id + count
        self._workload.delivered += count
        self.held.setdefault(consumer, []).extend(range(first_id, first_id + count))
        if self._scheduler.chance(0.02):
            self.client.pause(consumer)
            self._scheduler.after(
                self._scheduler.between(0, 100_000), self._process, self.client.resume, consumer
            )

    def _settle(self, consumer: int, ids: list[int]) -> None:
        ranges = ranges_of(ids)
        draw = 1.0 if self.draining else self._scheduler.rng.random()
        if draw < self.config.reject_chance:
            self.client.discard(consumer, ranges)
        elif draw < self.config.reject_chance + self.config.requeue_chance:
            self.client.return_(consumer, ranges, failed=False)
        else:
            self.client.settle(consumer, ranges)
        self._workload.settled += len(ids)

    def waits_for(self) -> str:
        """Returns what is still outstanding; empty when nothing is."""
        missing = super().waits_for()
        if not missing and self.draining:
            end = len(self._stream.log)
            # A consumer that began behind the last message waits for nothing.
            behind = {
                n: self._next[n]
                for n in self._consumers
                if 0 <= self._next[n] < end or (self._next[n] < 0 and n in self._from_first)
            }
            if behind and end:
                return f"offsets up to {end}: {behind}"
        return missing


class StreamLoad(GroupLoad):
    """Streams."""

    text = "streams instead of quorum queues"
    machine_class = StreamMachine
    world_class = GroupWorld

    def adapt_clients(self, clients: ClientConfig) -> ClientConfig:
        """See `GroupLoad`: late acknowledgements and fixed bodies are about quorum queues."""
        return replace(clients, late_chance=0.0, outcome_chance=0.0, body_fixed=-1)

    def draw_settings(self, rng: Random, settings: dict[str, int]) -> dict[str, int]:
        """See `GroupLoad`. Small enough for retention to have work within seconds."""
        return {
            "max_age_ms": rng.choice((-1, -1, 300, 2000)),
            "max_bytes": rng.choice((-1, -1, 1000, 20_000)),
            "segment_bytes": rng.choice((300, 3000, 1 << 20)),
        }

    def make_referee(self, group: int, settings: dict[str, int]) -> StreamReferee:
        return StreamReferee(group)

    def make_queue(self, node: GroupNode, parts: GroupOptions) -> StreamQueue:
        return StreamQueue(**parts, ask_node=node.ask_node, answers=node.answers)

    def channel_kind(self, group: int) -> ChannelKind:
        return StreamChannel
