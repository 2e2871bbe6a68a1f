"""A log, a partition's machine that applies it, and how commands get there."""

from __future__ import annotations

from typing import Any

from convoymq.queues.partition.codec import CMD_PARTITION, decode_outcome, encode_command
from convoymq.queues.partition.machine import PartitionGroupMachine
from convoymq.replication.machine import EFFECT_APPLIED
from convoymq.topics import commands as c
from convoymq.topics.partition import Outcome
from convoymq.topics.routes import Span
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

    def ask(self, command: c.Command) -> Outcome:
        tell(self.log, command)
        replies = [e[4] for e in self.seal() if e[0] == EFFECT_APPLIED and e[1] == TELLER]
        return decode_outcome(replies[-1])

    def copy(self) -> PartitionGroupMachine:
        made = PartitionGroupMachine(SETTINGS)
        made.restore(self.machine.snapshot())
        return made
