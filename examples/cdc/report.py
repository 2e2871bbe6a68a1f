"""The demo's page: what the run has found, the topic's partitions, pauses and stalls."""

from __future__ import annotations

import contextlib
import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cdc.order import Order

Point = tuple[float, float]
"""(time, seconds)."""

_WIDTH_INCHES = 10


def pauses_of(log: Path) -> list[Point]:
    """Returns (time, seconds until all was stored) of the reports in a capture's output."""
    found: list[Point] = []
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith('{"event": "stored"'):
            # SIGKILL may have cut the line.
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                found.append((said["time_s"], said["wait_s"]))
    return found


ORDER_COLUMNS = (
    "order of each row's changes",
    "changes",
    "out of order",
    "stored twice",
    "again, marked",
    "again, unmarked",
)


class Event(NamedTuple):
    """Something that was done."""

    time_s: float
    text: str
    fault: bool = False
    """Something was killed."""


class Difference(NamedTuple):
    """A table of the database beside its copy."""

    table: str
    rows: int
    copied: int
    different: int
    """Rows that one side lacks, or that are not equal."""


@dataclass(frozen=True, slots=True)
class Found:
    """Results of the run."""

    differences: Sequence[Difference]
    topic: Order
    modulo: Order
    grown_at: int
    """Changes of the modulo run that were published before it got more queues."""
    broken: Sequence[str]
    """Promises that broke."""


def order_rows(topic: Order, modulo: Order) -> list[tuple[str, ...]]:
    """Returns the rows below `ORDER_COLUMNS`."""
    return [
        (
            name,
            f"{order.seen:,}",
            f"{order.violations:,}",
            f"{order.stored_twice:,}",
            f"{order.repeats_flagged:,}",
            f"{order.repeats_unflagged:,}",
        )
        for name, order in (
            ("topic: split, merged, moved", topic),
            ("modulo a number of queues that grows", modulo),
        )
    ]


def write_report(
    path: Path,
    found: Found,
    events: Sequence[Event],
    lineage: Sequence[Mapping[str, object]],
    pauses: Sequence[Point],
    scaled: Sequence[tuple[str, str, str]],
) -> Path:
    """Writes one page without other files; returns where it is.

    Args:
        events: what was done, in order.
        lineage: all partitions that the topic ever had.
        scaled: decision, rule and change of what the autoscaler did.
    """
    verdict = "; ".join(found.broken) or "every promise was kept"
    tables = [
        (each.table, f"{each.rows:,}", f"{each.copied:,}", f"{each.different:,}")
        for each in found.differences
    ]
    parts = [
        "<!doctype html><meta charset='utf-8'><title>A database through a changing topic</title>",
        "<style>body{font-family:sans-serif;max-width:62rem;margin:2rem auto}"
        "td,th{text-align:left;padding:0 1rem .2rem 0}.fault{color:#b00}</style>",
        "<h1>A database through a changing topic</h1>",
        f"<p class='{'fault' if found.broken else 'kept'}'>{html.escape(verdict)}</p>",
        _table(("table", "rows in the database", "rows in Delta", "different"), tables),
        "<h2>Order of each row's changes</h2>",
        _table(ORDER_COLUMNS, order_rows(found.topic, found.modulo)),
        _disorder(found),
        *_findings(found),
        "<h2>Partitions: ranges over route versions</h2>",
        _history(lineage),
        "<h2>Producer pauses and consumer stalls</h2>",
        _times(events, pauses, found.topic.stalls),
        "<h2>What was done</h2><p>Red: something was killed.</p><ol>",
        *(
            f"<li class='{'fault' if event.fault else 'step'}'>{html.escape(event.text)}</li>"
            for event in events
        ),
        "</ol>",
        "<h2>What the autoscaler did</h2>",
        _table(("change", "rule", "id"), scaled),
    ]
    path.write_text("\n".join(parts), encoding="utf-8")
    return path.absolute()


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', columns)}</tr>{body}</table>"


def _findings(found: Found) -> list[str]:
    if not found.topic.findings:
        return []
    lines = [f"<li>{html.escape(str(each))}</li>" for each in found.topic.findings]
    return ["<ol class='fault'>", *lines, "</ol>"]


def _svg(figure: object) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight")  # type: ignore[attr-defined]
    return text.getvalue().split("?>", 1)[-1].split(">", 1)[-1]


def _number(value: object) -> int:
    return int(str(value))


def _history(lineage: Sequence[Mapping[str, object]]) -> str:
    """Returns a picture: one rectangle for each partition, from the version that created it to the
    one that sealed it, as high as its range of logical partitions."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    versions = [_number(row["created_version"]) for row in lineage]
    latest = max(versions) + 1
    figure, axes = plt.subplots(figsize=(_WIDTH_INCHES, 5))
    for row in lineage:
        begin = _number(row["created_version"])
        sealed = row["sealed_version"]
        end = latest if sealed is None else _number(sealed)
        lo, hi = _number(row["lo"]), _number(row["hi"])
        colour = plt.get_cmap("tab20")(_number(row["pid"]) % 20)
        axes.broken_barh([(begin, end - begin)], (lo, hi - lo), facecolor=colour, edgecolor="white")
        axes.text((begin + end) / 2, (lo + hi) / 2, str(row["pid"]), ha="center", va="center")
    axes.set_xlabel("route version")
    axes.set_ylabel("logical partitions")
    axes.set_xlim(0, latest)
    axes.set_ylim(0, max(_number(row["hi"]) for row in lineage))
    return _svg(figure)


def _disorder(found: Found) -> str:
    """Returns a picture: how many changes were out of order, over those that were processed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(_WIDTH_INCHES, 3))
    for order, name, colour in (
        (found.topic, "topic", "tab:green"),
        (found.modulo, "modulo queues", "tab:red"),
    ):
        # A step at each change that came too late, and a point at the end.
        places = [0, *order.late, order.seen]
        counts = [0, *range(1, len(order.late) + 1), len(order.late)]
        shares = [100 * place / max(order.seen, 1) for place in places]
        label = f"{name}: {order.violations:,} of {order.seen:,} out of order"
        axes.step(shares, counts, where="post", color=colour, label=label)
    grown = 100 * found.grown_at / max(found.modulo.seen, 1)
    axes.axvline(grown, color="0.7", linewidth=0.8)
    axes.text(grown, axes.get_ylim()[1], "more queues", fontsize=8, color="0.4")
    axes.set_xlabel("% of the changes")
    axes.set_ylabel("out of order so far")
    axes.legend(loc="upper left")
    return _svg(figure)


def _times(events: Sequence[Event], pauses: Sequence[Point], stalls: Sequence[Point]) -> str:
    """Returns a picture of waits over time, with a line at each thing that was done."""
    import matplotlib.pyplot as plt

    times = [event.time_s for event in events] + [when for when, _ in (*pauses, *stalls)]
    begin = min(times, default=0.0)
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(_WIDTH_INCHES, 6))
    for axes, points, name in (
        (upper, pauses, "producer: s until all is stored"),
        (lower, stalls, "consumer: s between messages"),
    ):
        axes.plot([when - begin for when, _ in points], [each for _, each in points], linewidth=0.8)
        axes.set_ylabel(name)
        for number, event in enumerate(events, start=1):
            at, colour = event.time_s - begin, "#b00000" if event.fault else "0.6"
            axes.axvline(at, color=colour, linewidth=0.8)
            axes.text(at, axes.get_ylim()[1], str(number), fontsize=8, color=colour)
    lower.set_xlabel("seconds; the numbers are those of the list below, red: something was killed")
    return _svg(figure)
