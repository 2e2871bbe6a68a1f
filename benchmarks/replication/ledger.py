"""What clients were told, and what is counted from it: the same for every way and both drives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.replication.faults import NODES, RUN_S, WARM_S, Fault

Key = tuple[int, int]
"""(publisher, number): a publisher counts up, and publishes nothing twice."""
GAP_S = 0.5
"""Silence of this length is time without service."""
BIN_S = 0.25


@dataclass(frozen=True, slots=True)
class Delivered:
    """One message came to a consumer."""

    at_s: float
    node: int
    consumer: int
    key: Key
    redelivered: bool


@dataclass(slots=True)
class Ledger:
    """One run as its clients saw it. Times count from its begin."""

    published: dict[Key, float] = field(default_factory=dict)
    confirmed: dict[Key, tuple[float, int]] = field(default_factory=dict)
    """Message -> when, and at which node."""
    delivered: list[Delivered] = field(default_factory=list)
    holder: int = 0
    link_bytes: int = 0

    def counts(self, fault: Fault) -> dict[str, Any]:
        """Counts of the run, as they are kept."""
        seen = {each.key for each in self.delivered}
        again, unflagged, reorders = self._repeats()
        hit = fault.hit(self.holder)
        confirms = [found for found in self.confirmed.values() if found[0] <= RUN_S]
        delivered = [(each.at_s, each.node) for each in self.delivered]
        waits = [at_s - self.published[key] for key, (at_s, _) in self.confirmed.items()]
        return asdict(
            Counts(
                published=len(self.published),
                confirmed=len(self.confirmed),
                lost=len(self.confirmed.keys() - seen),
                repeats=again,
                unflagged=unflagged,
                reorders=reorders,
                publish_hit_s=_silence(confirms, hit, WARM_S),
                publish_others_s=_silence(confirms, set(NODES) - hit, WARM_S),
                consume_hit_s=_silence(delivered, hit, fault.consume_from_s + WARM_S),
                consume_others_s=_silence(
                    delivered, set(NODES) - hit, fault.consume_from_s + WARM_S
                ),
                bytes_per_message=round(self.link_bytes / len(seen)) if seen else None,
                confirm_ms=round(1000 * median(waits), 2) if waits else None,
                publish_bins=_bins(at_s for at_s, _ in confirms),
                consume_bins=_bins(at_s for at_s, _ in delivered),
            )
        )

    def _repeats(self) -> tuple[int, int, int]:
        """Deliveries of what came before or after to somebody; how many too many of them had no
        flag; first deliveries that came to a consumer behind a later message of their publisher."""
        times, fresh = Counter[Key](), Counter[Key]()
        last: dict[tuple[int, int], int] = {}
        reorders = 0
        for each in self.delivered:
            publisher, number = each.key
            times[each.key] += 1
            if each.redelivered:
                continue
            fresh[each.key] += 1
            line = each.consumer, publisher
            reorders += number < last.get(line, -1)
            last[line] = max(number, last.get(line, -1))
        again = sum(count - 1 for count in times.values())
        return again, sum(count - 1 for count in fresh.values()), reorders


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of one run; times are the worst node's of those that were hit, or were not."""

    published: int
    confirmed: int
    lost: int
    """Confirmed, and delivered to nobody."""
    repeats: int
    unflagged: int
    """Deliveries without `redelivered`, beyond one of each message."""
    reorders: int
    publish_hit_s: float | None
    publish_others_s: float | None
    consume_hit_s: float | None
    consume_others_s: float | None
    bytes_per_message: int | None
    """Per message that was delivered."""
    confirm_ms: float | None
    """Median, from publish to confirm."""
    publish_bins: list[int]
    consume_bins: list[int]


def _silence(events: list[tuple[float, int]], nodes: Iterable[int], from_s: float) -> float | None:
    """Seconds in silences of at least `GAP_S` at the node that had most of them; None = there is
    no node, or no time."""
    worst = None
    if from_s >= RUN_S:
        return None
    for node in nodes:
        times = sorted(at_s for at_s, at in events if at == node and from_s < at_s < RUN_S)
        gaps = [b - a for a, b in zip([from_s, *times], [*times, RUN_S], strict=True)]
        found = sum(gap for gap in gaps if gap >= GAP_S)
        worst = max(found, worst or 0.0)
    return worst if worst is None else round(worst, 2)


def _bins(times: Iterable[float]) -> list[int]:
    found = [0] * round(RUN_S / BIN_S)
    for at_s in times:
        if 0 <= at_s < RUN_S:
            found[int(at_s / BIN_S)] += 1
    return found
