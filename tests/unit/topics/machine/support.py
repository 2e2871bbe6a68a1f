"""A log, a partition's machine that applies it, and how commands get there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convoymq.client.rows import frame_of
from convoymq.kernels import batch
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.column_records import encode_enqueue
from convoymq.replication.machine import EFFECT_APPLIED
from convoymq.streamlog.reader import ChunkReader
from convoymq.topics.machine.client import Enqueue
from convoymq.topics.machine.codec import (
    CMD_PARTITION,
    CMD_PRODUCE,
    decode_outcome,
    encode_command,
    encode_runs,
)
from convoymq.topics.machine.group_machine import PartitionGroupMachine
from convoymq.topics.machine.partition import Outcome
from convoymq.topics.rules import commands as c
from convoymq.topics.rules.answers import RunsAnswer
from convoymq.topics.rules.routes import Span
from tests.unit.queues.quorum.support import Log, apply, session_id

A = session_id(1, 1)
B = session_id(2, 1)
TELLER = session_id(1, 9)
SETTINGS = {"pid": 3, "lo": 0, "hi": 8, "created_version": 2}
OPEN = c.Open("change-1", 2, 1)
SEAL = c.Seal("change-2", 1, 4, (Span(0, 4, 7), Span(4, 8, 8)), term=1)


def tell(log: Log, command: c.Command, session: int = TELLER) -> None:
    body = encode_command(command)
    log.command(session, CMD_PARTITION, len(body), body=body)


def enqueue_of(runs: Sequence[c.ProducedRun], messages: int | None = None) -> Enqueue:
    """The ENQUEUE of runs, or of the first messages of them."""
    values = [bytes((run.lp, run.seq + i)) for run in runs for i in range(run.messages)]
    values = values[:messages]
    frame = ColumnFrame(frame_of(values))
    body, count, position = encode_enqueue(frame, 0, len(values), b"t", b"k")
    return 0, count, position, body


def produce(
    log: Log,
    runs: Sequence[c.ProducedRun],
    *,
    producer: int = 5,
    epoch: int = 1,
    session: int = A,
    messages: int | None = None,
) -> None:
    """PRODUCE and its ENQUEUE. Bodies are two bytes: the logical partition, the sequence."""
    announced = encode_runs(producer, epoch, runs)
    log.command(session, CMD_PRODUCE, len(announced), body=announced)
    _, count, position, body = enqueue_of(runs, messages)
    log.command(session, batch.CMD_ENQUEUE, position, count=count, body=body)


def bodies_of(machine: PartitionGroupMachine, log: Log) -> list[bytes]:
    """Two bytes of each message that a reader finds, in order."""
    reader = ChunkReader(machine, lambda i, _: [log.entries[i - 1]], machine.first)
    found = []
    while (run := reader.next(1 << 30, 1 << 30)) is not None:
        assert run.offset == machine.first + len(found)
        records = [batch.record(run.block, run.command, run.first + i) for i in range(run.messages)]
        found += [record[-3:-1] if record[-1] == 0xCE else record[-2:] for record in records]
    return found


class Bench:
    """A log and a machine that applies it."""

    def __init__(self, *, opened: bool = True, **settings: int) -> None:
        self.log = Log()
        self.machine = PartitionGroupMachine({**SETTINGS, **settings})
        if opened:
            self.ask(OPEN)

    def seal(self, after_ms: int = 1) -> list[Any]:
        effects = apply(self.machine, self.log.seal(after_ms))
        self.machine.check_invariants()
        return effects

    def publish(self, *sizes: int, session: int = A) -> list[Any]:
        self.log.publish(session, sizes)
        return self.seal()

    def produce(self, *runs: c.ProducedRun, **more: Any) -> RunsAnswer:
        """Returns the answer to a producer's runs."""
        produce(self.log, runs, **more)
        session = more.get("session", A)
        replies = [e[4] for e in self.seal() if e[0] == EFFECT_APPLIED and e[1] == session]
        answer = decode_outcome(replies[-1])
        assert isinstance(answer, RunsAnswer)
        return answer

    def bodies(self) -> list[bytes]:
        return bodies_of(self.machine, self.log)

    def ask(self, command: c.Command) -> Outcome:
        tell(self.log, command)
        replies = [e[4] for e in self.seal() if e[0] == EFFECT_APPLIED and e[1] == TELLER]
        return decode_outcome(replies[-1])

    def copy(self) -> PartitionGroupMachine:
        made = PartitionGroupMachine(SETTINGS)
        made.restore(self.machine.snapshot())
        return made
