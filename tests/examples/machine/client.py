"""A node's client of the counter: numbers its commands and sends them until they are applied."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from convoymq.kernels.batch import CommandBuilder, PublishTarget
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_GAP, Effect
from convoymq.shells.effect_sink import EffectSink
from tests.examples.machine.machine import CMD_ADD


class CounterClient(EffectSink[Any]):
    """Implements `SimulatedClient` as well."""

    def __init__(self) -> None:
        self.target: PublishTarget | None = None
        self.amounts: list[int] = []
        self.applied = 0
        """How many commands have counted."""

    def attach(self, builder: CommandBuilder, session: int) -> None:
        self.target = PublishTarget(builder, session, self)

    def add(self, amount: int) -> None:
        assert self.target is not None
        self.amounts.append(amount)
        self.target.command(CMD_ADD, 0, 0, amount)

    def submit(self, rng: Random) -> None:
        self.add(rng.randrange(1, 100))

    def waits_for(self) -> str:
        waiting = len(self.amounts) - self.applied
        return f"{waiting} additions" if waiting else ""

    def on_effects(self, effects: Sequence[Effect], replica: Any) -> None:
        target = self.target
        for effect in effects:
            if target is None or effect[1] != target.session:
                continue
            if effect[0] == EFFECT_APPLIED and effect[2] > self.applied:
                self.applied = effect[2]
                target.applied(self.applied)
            elif effect[0] == EFFECT_GAP:
                target.resend(effect[2])

    def on_leader(self, group: int, leader: int | None, term: int) -> None:
        if self.target is not None and leader is not None:
            self.target.resend(self.applied)
