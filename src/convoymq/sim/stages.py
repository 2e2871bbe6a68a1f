"""Stages in the simulator: owners that take, read, settle and fence each other, and a referee that
follows them in the log.

What the referee asserts, beyond what holds for every queue:

- what a stage takes was ready: nobody else holds it, nobody gets it while it is staged;
- a stage holds what the ops in the log say, under dense offsets, on every replica;
- an offset means one message for as long as its epoch lasts, on every node that shows it;
- a staged message leaves by settle, release, close, or when nobody was heard of for the time to
  live; its counts say how often it was out and how often that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from convoymq.cluster.interfaces import EFFECT_APPLIED, Effect
from convoymq.kernels import batch
from convoymq.model.errors import BrokerError, StageRefused
from convoymq.queues.interface import Queue, QueueClient
from convoymq.queues.sessions import APPLIED_OK, decode_map
from convoymq.queues.stages import Refusal
from convoymq.sim.clients import ClientConfig, Workload
from convoymq.sim.clock import Life, Scheduler
from convoymq.sim.referee import InvariantBroken, Key, Message, Place, Referee, identity_of
from convoymq.sim.trace import Trace
from convoymq.storage.types import EntryGone, StorageFault

NAMES = ("s1", "s2")
TTLS_MS = (1_000, 3_000, 10_000)
#: Chances per turn of an owner that has a stage.
TAKE_CHANCE = 0.5
SETTLE_CHANCE = 0.4
RELEASE_CHANCE = 0.05
CLOSE_CHANCE = 0.03
LEASE_CHANCE = 0.3
REPEAT_CHANCE = 0.2
LEAVE_CHANCE = 0.02
TAKE_MAX = 40


class _Stage:
    """What the log says of one stage."""

    def __init__(self, epoch: int, ttl_ms: int, *, is_lease: bool) -> None:
        self.epoch = epoch
        self.ttl_ms = ttl_ms
        self.is_lease = is_lease
        self.heard_ms = 0
        self.first = 0
        self.next = 0
        self.keys: dict[int, Key] = {}
        """Offset -> message."""


class StagedReferee(Referee):
    """The model of one group's queue with stages."""

    def __init__(self, group: int, delivery_limit: int, disconnect_timeout_ms: int) -> None:
        super().__init__(group, delivery_limit, disconnect_timeout_ms)
        self.stages: dict[str, _Stage] = {}
        self.shown: dict[tuple[str, int, int], Key] = {}
        """(stage, epoch, offset) -> message, for ever."""
        self._fresh_before: Key = (0, 0, 0)
        self._replies: dict[tuple[int, int], tuple[int, Any]] = {}
        self._took: set[str] = set()

    def on_entry(self, index: int, data: bytes, effects: list[Effect]) -> None:
        """See `Referee`."""
        self._fresh_before = self.last_fresh
        self._took.clear()
        self._replies.clear()
        for effect in effects:
            # A mere "applied" may follow the answer.
            if effect[0] == EFFECT_APPLIED and effect[4] is not None:
                self._replies[effect[1], effect[2]] = effect[3], effect[4]
        super().on_entry(index, data, effects)

    def _other(self, kind: int, session: int, seq: int, body: bytes) -> None:
        if kind == batch.CMD_TICK:
            for name, stage in list(self.stages.items()):
                if stage.heard_ms + stage.ttl_ms <= self.time_ms:
                    self._give_back(stage, 0, 1)
                    del self.stages[name]
        elif kind == batch.CMD_STAGE:
            status, reply = self._replies.get((session, seq), (None, None))
            if status is None:
                self.fail(f"op {seq} of {session:x} was not answered")
            elif status == APPLIED_OK and reply is not None:
                self._op(decode_map(body, 0), reply)

    def _op(self, op: dict[str, Any], reply: dict[str, int]) -> None:
        name, kind = op["stage"], op["op"]
        stage = self.stages.get(name)
        if stage is None:
            if kind == "close" or (kind != "open" and reply["first"] == reply["next"]):
                # Nothing there to close, an empty lease, or a lease that was settled to its end.
                return
            if kind not in ("open", "lease") or reply["epoch"] != self.index:
                self.fail(f"{op} was answered {reply}, but there is no stage {name}")
            stage = _Stage(reply["epoch"], op["ttl_ms"], is_lease=kind == "lease")
            self.stages[name] = stage
            if kind == "lease":
                self._took.add(name)
                stage.next = reply["next"]
        stage.heard_ms = self.time_ms
        if kind == "open":
            stage.ttl_ms = op["ttl_ms"]
        elif kind == "take" and reply["next"] > stage.next:
            if op["after"] != stage.next or reply["next"] > stage.next + op["max"]:
                self.fail(f"{op} was answered {reply}, but {name} ended at {stage.next}")
            self._took.add(name)
            stage.next = reply["next"]
        elif kind == "settle" and op["upto"] > stage.first:
            for offset in range(stage.first, op["upto"]):
                self._move(self.messages[stage.keys.pop(offset)], Place.SETTLED)
            stage.first = op["upto"]
        elif kind == "release" and reply["epoch"] != stage.epoch:
            self._give_back(stage, op["from"], int(op["failed"]))
            stage.epoch = reply["epoch"]
        elif kind == "close":
            self._give_back(stage, 0, int(op["failed"]))
            del self.stages[name]
            return
        if (stage.epoch, stage.first, stage.next) != (
            reply["epoch"],
            reply["first"],
            reply["next"],
        ):
            self.fail(f"{op} was answered {reply}, but {name} is {vars(stage)}")
        if stage.is_lease and stage.first == stage.next:
            del self.stages[name]

    def _give_back(self, stage: _Stage, start: int, failed: int) -> None:
        start = max(start, stage.first)
        for offset in range(start, stage.next):
            self._return(self.messages[stage.keys.pop(offset)], failed)
        stage.next = start

    def sync(self, machine: Any) -> None:
        """See `Referee`; and learns which messages were taken."""
        super().sync(machine)
        if set(self.stages) != set(machine.stages.by_name):
            self.fail(f"stages are {sorted(machine.stages.by_name)}, not {sorted(self.stages)}")
        for name, stage in self.stages.items():
            known = machine.stages.by_name[name]
            held: dict[int, tuple[Key, int, int]] = {}
            for offset, run in known.held.held():
                for k in range(run[3]):
                    held[offset + k] = ((run[0], run[1], run[2] + k), run[5], run[6])
            if name in self._took:
                for offset in sorted(set(held) - set(stage.keys)):
                    self._stage(name, offset, *held[offset])
                    stage.keys[offset] = held[offset][0]
            if {o: key for o, (key, _, _) in held.items()} != stage.keys or (
                known.epoch != stage.epoch
            ):
                self.fail(f"stage {name} holds {held}, not {stage.keys}")
            for offset, key in stage.keys.items():
                if self.shown.setdefault((name, stage.epoch, offset), key) != key:
                    self.fail(f"offset {offset} of {name} in epoch {stage.epoch} became {key}")

    def _stage(self, name: str, offset: int, key: Key, acquired: int, failed: int) -> None:
        message: Message = self.messages[key]
        purged = self.purging and message.place is Place.PURGED
        if message.place is not Place.READY and not purged:
            self.fail(f"{key} is {message.place.value}, yet staged as {name}:{offset}")
        if message.loose:
            message.acquired, message.failed, message.loose = acquired, failed, False
        if (message.acquired, message.failed) != (acquired, failed):
            self.fail(
                f"{key} was returned {message.acquired} times ({message.failed} failed), but is"
                f" staged as ({acquired}, {failed})"
            )
        if not acquired:
            if key <= self._fresh_before:
                self.fail(f"{key} was staged after {self._fresh_before}: out of order")
            self.last_fresh = max(self.last_fresh, key)
        self._move(message, Place.STAGED)

    def is_staged(self, name: str, epoch: int, offset: int) -> bool:
        """Does the log still say so?"""
        stage = self.stages.get(name)
        return stage is not None and stage.epoch == epoch and offset in stage.keys

    def on_shown(self, name: str, epoch: int, offset: int, identity: bytes) -> None:
        """A reader got a message of a stage."""
        key = self.shown.get((name, epoch, offset))
        if key is None:
            self.fail(f"{name}:{offset} of epoch {epoch} was read, but no entry staged it")
        elif self.messages[key].identity != identity:
            self.fail(f"{name}:{offset} of epoch {epoch} shows another message than was staged")


class StageChannel:
    """One owner: opens a stage or leases, takes, reads anywhere, settles, and dies now and then.

    Args:
        replicas: (node, replica) of the group on all nodes that run.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        trace: Trace,
        life: Life,
        node: int,
        group: int,
        queue: Queue,
        session: int,
        config: ClientConfig,
        workload: Workload,
        referee: StagedReferee,
        publishes: bool,
        consumes: bool,
        on_closed: Callable[[Any], None],
        replicas: Callable[[int], list[tuple[Any, Any]]],
    ) -> None:
        self._scheduler = scheduler
        self._trace = trace
        self._life = life
        self.node = node
        self.group = group
        self._config = config
        self._workload = workload
        self._referee = referee
        self._on_closed = on_closed
        self._replicas = replicas
        workload.publishers += 1
        workload.channels += 1
        self.name = f"owner{workload.publishers}"
        self.client: Any = queue.client(session, self)
        self.closed = False
        self.draining = False
        self._leases = 0
        self._stage = ""
        self._epoch = 0
        self._fence = 0
        self._first = 0
        self._next = 0
        self._read = 0
        self._asked: dict[str, Any] | None = None
        """The op under way."""
        self._again: dict[str, Any] | None = None
        """What to ask once more: its answer got lost, or to see that it does no harm."""
        self._next_turn()

    # Turns.

    def _next_turn(self) -> None:
        delay_us = self._scheduler.between(self._config.turn_min_us, self._config.turn_max_us)
        self._scheduler.after(delay_us, self._life, self._turn)

    def _turn(self) -> None:
        if self.closed:
            return
        # An op that was given up is still on its way: the next one waits for it.
        if self._asked is None and not self.client.target.pending:
            if self._again is not None:
                op, self._again = self._again, None
                self._ask(op)
            elif self.draining:
                self._drain()
            elif self._scheduler.chance(LEAVE_CHANCE):
                self._trace.add(self.name, "leaves")
                self._close()
            elif not self._epoch:
                self._begin()
            else:
                self._work()
        # First, as the node that is read may lose its power under the reader.
        self._next_turn()
        if self._epoch and not self.closed:
            self._look()

    def _begin(self) -> None:
        ttl_ms = self._scheduler.rng.choice(TTLS_MS)
        if self._scheduler.chance(LEASE_CHANCE):
            self._leases += 1
            self._stage = f"{self.name}-{self._leases}"
            count = self._scheduler.between(1, TAKE_MAX)
            self._ask({"op": "lease", "owner": "x", "ttl_ms": ttl_ms, "max": count})
        else:
            self._stage = self._scheduler.rng.choice(NAMES)
            self._ask({"op": "open", "owner": self.name, "ttl_ms": ttl_ms})

    def _work(self) -> None:
        chance, between = self._scheduler.chance, self._scheduler.between
        is_lease = self._stage not in NAMES
        if chance(CLOSE_CHANCE):
            self._ask({**self._mine(), "op": "close", "failed": chance(0.5)})
        elif chance(RELEASE_CHANCE):
            start = between(0, self._next)
            self._ask({**self._mine(), "op": "release", "from": start, "failed": chance(0.5)})
        elif not is_lease and chance(TAKE_CHANCE):
            count = between(0, TAKE_MAX)
            self._ask({**self._mine(), "op": "take", "max": count, "after": self._next})
        elif self._read > self._first and chance(SETTLE_CHANCE):
            self._ask({**self._mine(), "op": "settle", "upto": between(self._first, self._read)})

    def _drain(self) -> None:
        if self._epoch:
            self._ask({**self._mine(), "op": "close", "failed": False})
        else:
            self._close()

    def drain(self) -> None:
        """From now on only what ends the stage."""
        self.draining = True

    def _close(self) -> None:
        self.closed = True
        self.client.close()
        self._on_closed(self)

    def waits_for(self) -> str:
        """What is still outstanding; empty when nothing is."""
        return f"the end of stage {self._stage}"

    # Ops.

    def _mine(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "fence": self._fence}

    def _ask(self, op: dict[str, Any]) -> None:
        self._asked = op
        op = {"stage": self._stage, **op}
        self._trace.add(self.name, f"asks {op}")
        self.client.stage(msgspec.msgpack.encode(op), self._on_answer)

    def _on_answer(self, reply: Any, error: BrokerError | None) -> None:
        asked, self._asked = self._asked, None
        assert asked is not None
        if isinstance(error, StageRefused):
            self._trace.add(self.name, f"is refused: {error.reason}")
            if asked["op"] in ("take", "settle", "release") and error.reason == "stage_range":
                raise InvariantBroken(f"{self.name}: {asked} is out of range after {self._next}")
            self._epoch = 0
        elif error is not None:
            self._trace.add(self.name, f"hears nothing: {error.text}")
            self._again = asked
        elif asked["op"] == "close":
            self._epoch = 0
        else:
            self._learn(asked, reply)
            if self._scheduler.chance(REPEAT_CHANCE):
                self._again = asked

    def _learn(self, asked: dict[str, Any], reply: dict[str, int]) -> None:
        op = asked["op"]
        if not self._epoch and op not in ("open", "lease"):
            # The repeat of what ended a lease.
            return
        same = reply["epoch"] == self._epoch and reply["fence"] == self._fence
        if op in ("open", "lease"):
            if not same:
                self._read = reply["first"]
            self._epoch, self._fence = reply["epoch"], reply["fence"]
        elif op == "release":
            self._epoch = reply["epoch"]
            self._read = min(self._read, reply["next"])
        elif not same:
            raise InvariantBroken(f"{self.name}: {asked} was answered {reply}")
        elif reply["first"] < self._first or reply["next"] < self._next:
            raise InvariantBroken(f"{self.name}: {reply} after {self._first}, {self._next}")
        self._first, self._next = reply["first"], reply["next"]
        self._read = max(self._read, self._first)
        if self._stage not in NAMES and self._first == self._next:
            # A lease that is empty, or at its end.
            self._epoch = 0

    # Reading.

    def _look(self) -> None:
        """Reads some rows from the replica of some node, as a task of a batch does."""
        replicas = self._replicas(self.group)
        if not replicas or self._first == self._next:
            return
        node, replica = self._scheduler.rng.choice(replicas)
        machine = replica.machine
        start = self._scheduler.between(self._first, self._read)
        end = self._scheduler.between(start, self._next)
        if machine.index < self._epoch:
            return
        try:
            stage = machine.stages.reading(self._stage, self._epoch, start)
        except Refusal:
            return
        if stage.next < end:
            return
        at = start
        for offset, run in stage.held.between(start, end, 1 << 20):
            index, command, first, count = run[:4]
            try:
                data = node.host.read_entry(self.group, index).data
            except (EntryGone, KeyError) as error:
                replaced = replica.log.snapshot_index > machine.index
                if replaced and not self._referee.is_staged(self._stage, self._epoch, offset):
                    # A snapshot has replaced the log, and the machine follows when that is durable.
                    # Until then it shows what is over, and readers are sent to other nodes.
                    return
                raise InvariantBroken(f"{self.name}: entry {index} is gone: {error}") from error
            except (StorageFault, OSError):
                return
            if offset != at:
                raise InvariantBroken(f"{self.name}: offset {offset} where {at} was next")
            for k in range(count):
                identity = identity_of(batch.record(data, command, first + k))
                self._referee.on_shown(self._stage, self._epoch, offset + k, identity)
            at = offset + count
        if at != end:
            raise InvariantBroken(f"{self.name}: read {start} … {at}, not up to {end}")
        self._read = max(self._read, end)
        self._workload.read += end - start

    # Events of the session: an owner neither publishes nor consumes.

    def on_published(self, client: QueueClient, tags: Sequence[int], ok: bool) -> None:
        """Not used."""

    def on_deliver(self, client: QueueClient, *delivery: Any) -> None:
        """Not used."""

    def on_subscribed(self, client: QueueClient, consumer: int, error: Exception | None) -> None:
        """Not used."""

    def on_cancel_ok(self, client: QueueClient, consumer: int) -> None:
        """Not used."""

    def on_cancelled(self, client: QueueClient, consumer: int, reason: str) -> None:
        """Not used."""

    def on_get(self, client: QueueClient, *answer: Any) -> None:
        """Not used."""

    def on_purged(self, client: QueueClient, count: int, error: Exception | None) -> None:
        """Not used."""

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        """Not used."""
