"""Draws what a seed decides beforehand: sizes, rates, kinds of faults and operations.

Each seed leaves kinds out, so that none hides another.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from random import Random

KINDS = (
    "loss", "repeat", "leader", "controller", "coordinator", "consumer", "pause", "split", "merge",
    "move", "empty", "park", "seek", "outage", "cutoff", "silent", "trim", "abort", "restart",
    "lanes",
)  # fmt: skip
LATER_KINDS = ("expire", "forget", "window")
LATEST_KINDS = ("mute", "unheard", "keyless")
"""Drawn by themselves: the plans of seeds stay as they were."""
"""Of faults and operations. `outage`: a partition's server dies for long, `cutoff`: it does not
hear the controller, `silent`: it does not answer while it is to be sealed, `empty`: a partition is
sealed again at once, `restart`: a producer begins a new session, `expire`: a group is without
members for too long, `forget`: partitions forget producers that are silent, `window`: half of the
members have a window of many messages, `mute`: a coordinator hears nothing of a partition for a
while, `unheard`: nobody gets an answer of a partition for a while, `keyless`: some messages have
no key."""
CHANGES = frozenset(("split", "merge", "move"))
ALL_KINDS = (*KINDS, *LATER_KINDS, *LATEST_KINDS)
LATER_SEED = 0x5EED
PER_SEED = 0.5
"""Probability of a kind in a seed."""
RETRIES_PER_SEED = 0.6
"""Of the seeds with a weak topic."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    seed: int
    kinds: frozenset[str]
    logical: int
    partitions: int
    keys: int
    producers: int
    messages: int
    dag: tuple[bool, ...]
    """Of each group, whether it advances in DAG mode."""
    members: int
    lanes: int
    chaos_ms: int
    slow_handlers: bool
    weak: bool
    """The topic is a weak one."""
    retries: bool
    """A message that a handler fails with goes to a retry topic, in a weak one."""

    def has(self, kind: str) -> bool:
        """Returns whether something happens in this run."""
        return kind in self.kinds


def draw_plan(seed: int, kinds: Collection[str] | None = None) -> Plan:
    """The plan of a seed; with other kinds than the seed's if they are given."""
    random = Random(seed)
    drawn = {kind for kind in KINDS if random.random() < PER_SEED}
    if not drawn & CHANGES:
        drawn |= {"split", "move"}
    later = Random(seed ^ LATER_SEED)
    drawn |= {kind for kind in LATER_KINDS if later.random() < PER_SEED}
    keeps = later.random()
    drawn |= {kind for kind in LATEST_KINDS if later.random() < PER_SEED}
    chosen = frozenset(drawn if kinds is None else kinds)
    logical = random.choice((4, 8, 8, 16))
    plan = Plan(
        seed,
        chosen,
        logical=logical,
        partitions=random.randint(1, min(3, logical)),
        keys=random.choice((6, 12, 16)),
        producers=random.randint(2, 3),
        messages=random.choice((80, 120, 160)),
        dag=(False, random.random() < 0.6),
        members=random.randint(1, 3),
        lanes=random.choice((1, 2, 4)),
        chaos_ms=random.choice((900, 1400, 2000)),
        slow_handlers=random.random() < 0.4,
        weak=random.random() < 0.3,
        retries=False,
    )
    return replace(plan, retries=plan.weak and keeps < RETRIES_PER_SEED)
