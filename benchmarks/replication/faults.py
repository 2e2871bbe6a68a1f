"""What happens to a cluster, and when: one table, for the simulator and for real processes.

A run lasts `RUN_S` seconds; then everything heals but what is gone for good, nobody publishes any
more, and what is left is consumed. *Holder* is the node that decides for the queue when the first
step comes: leader, master or home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

NODES = (1, 2, 3)
RUN_S = 10.0
WARM_S = 1.0
"""From the begin of a run: not measured."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happens.

    Args:
        action: name of a method of `Site`.
        who: `holder`, `first` or `second` of the others, or `all`.
        for_s: when it is over; 0 = never.
    """

    at_s: float
    action: str
    who: str
    for_s: float = 0.0

    def nodes(self, holder: int) -> tuple[int, ...]:
        """The nodes that it happens to."""
        others = [node for node in NODES if node != holder]
        chosen = {"holder": (holder,), "first": others[:1], "second": others[1:], "all": NODES}
        return tuple(chosen[self.who])


@dataclass(frozen=True, slots=True)
class Fault:
    """One schedule.

    Args:
        is_real: whether it can be had with real processes.
        consume_from_s: consumers begin then; before, a backlog grows.
    """

    name: str
    title: str
    text: str
    steps: tuple[Step, ...]
    is_real: bool = True
    consume_from_s: float = 0.0

    @property
    def is_for_good(self) -> bool:
        """Whether a node does not come back."""
        return any(not step.for_s for step in self.steps)

    def hit(self, holder: int) -> frozenset[int]:
        """The nodes that something happens to."""
        return frozenset(node for step in self.steps for node in step.nodes(holder))

    def windows(self) -> list[tuple[float, float]]:
        """When something is wrong: from, to."""
        return [(step.at_s, step.at_s + step.for_s if step.for_s else RUN_S) for step in self.steps]


class Site(Protocol):
    """A cluster that faults come to, simulated or real. What has a length ends by itself."""

    def kill(self, node: int, for_s: float) -> None:
        """The process ends without a word; what it wrote stays. For good: its disk is gone."""

    def stop(self, node: int, for_s: float) -> None:
        """The node is stopped in order, as by an operator."""

    def freeze(self, node: int, for_s: float) -> None:
        """The process stands still; its connections stay open."""

    def isolate(self, node: int, for_s: float) -> None:
        """The node and all others do not hear each other; clients reach all nodes."""

    def slow(self, node: int, for_s: float) -> None:
        """Each sync of its disk takes `SLOW_S` longer."""

    def cut_power(self, node: int, for_s: float) -> None:
        """What the disk had not synced is gone."""


SLOW_S = 0.2
OUT_S = 4.0

FAULTS = (
    Fault("none", "No fault", "Nothing happens.", ()),
    Fault(
        "kill",
        "Kill",
        "The process of the holder is killed, and started again 4 s later.",
        (Step(3, "kill", "holder", OUT_S),),
    ),
    Fault(
        "lost",
        "Kill, for good",
        "The process of the holder is killed; node and disk never come back.",
        (Step(3, "kill", "holder"),),
    ),
    Fault(
        "freeze",
        "Freeze",
        "The process of the holder stands still for 4 s (`SIGSTOP`), and goes on as if nothing"
        " had been.",
        (Step(3, "freeze", "holder", OUT_S),),
    ),
    Fault(
        "minority",
        "Partition, holder in the minority",
        "For 4 s the holder and the two other nodes do not hear each other. Clients stay where"
        " they are: *hit* is the minority's side.",
        (Step(3, "isolate", "holder", OUT_S),),
    ),
    Fault(
        "majority",
        "Partition, holder in the majority",
        "For 4 s a node that is not the holder and the two others do not hear each other. *Hit* is"
        " the minority's side.",
        (Step(3, "isolate", "first", OUT_S),),
    ),
    Fault(
        "slow",
        "Slow disk of the holder",
        "For 4 s each sync of the holder's disk takes 0.2 s longer.",
        (Step(3, "slow", "holder", OUT_S),),
    ),
    Fault(
        "slow-other",
        "Slow disk of another node",
        "For 4 s each sync of the disk of a node that is not the holder takes 0.2 s longer.",
        (Step(3, "slow", "first", OUT_S),),
    ),
    Fault(
        "power",
        "Power cut",
        "All nodes lose their power at once, and what their disks had not synced; 2 s later they"
        " start.",
        (Step(3, "cut_power", "all", 2.0),),
        is_real=False,
    ),
    Fault(
        "rolling",
        "Rolling restart",
        "One node after the other is stopped in order and started again, the holder last.",
        (
            Step(2, "stop", "first", 1.0),
            Step(4.5, "stop", "second", 1.0),
            Step(7, "stop", "holder", 1.0),
        ),
    ),
    Fault(
        "backlog",
        "Restarts, then a loss, with a backlog",
        "Nobody consumes before the end, so a backlog grows. The two nodes that are not the holder"
        " are restarted, one after the other; then the holder is killed, and never comes back.",
        (
            Step(2, "stop", "first", 1.0),
            Step(4.5, "stop", "second", 1.0),
            Step(8, "kill", "holder"),
        ),
        consume_from_s=RUN_S,
    ),
)


def faults_of(names: Sequence[str]) -> list[Fault]:
    """The schedules of these names, in the order of the table; all for no name."""
    return [fault for fault in FAULTS if not names or fault.name in names]
