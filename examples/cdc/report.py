"""The demo's page: the topic's partitions, its producer's pauses and its consumer's stalls."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

Point = tuple[float, float]
"""(time, seconds)."""

_WIDTH_INCHES = 10


def pauses_of(path: Path) -> list[Point]:
    """Returns what the reader has written: (time, seconds until all was stored)."""
    if not path.exists():
        return []
    rows = (line.split(",") for line in path.read_text().splitlines())
    return [(float(when), float(seconds)) for when, seconds in rows]


def write_report(
    path: Path,
    events: Sequence[tuple[float, str]],
    lineage: Sequence[Mapping[str, object]],
    pauses: Sequence[Point],
    stalls: Sequence[Point],
    scaled: Sequence[tuple[str, str, str]],
) -> Path:
    """Writes one page without other files; returns where it is.

    Args:
        events: (time, what was done).
        lineage: all partitions that the topic ever had.
        scaled: decision, rule and change of what the autoscaler did.
    """
    parts = [
        "<!doctype html><meta charset='utf-8'><title>A database through a changing topic</title>",
        "<style>body{font-family:sans-serif;max-width:62rem;margin:2rem auto}"
        "td,th{text-align:left;padding:0 1rem .2rem 0}</style>",
        "<h1>A database through a changing topic</h1>",
        "<h2>Partitions: ranges over route versions</h2>",
        _history(lineage),
        "<h2>Producer pauses and consumer stalls</h2>",
        _times(events, pauses, stalls),
        "<h2>What was done</h2><ol>",
        *(f"<li>{html.escape(text)}</li>" for _, text in events),
        "</ol>",
        "<h2>What the autoscaler did</h2>",
        "<table><tr><th>change</th><th>rule</th><th>id</th></tr>",
        *(f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in row)}</tr>" for row in scaled),
        "</table>",
    ]
    path.write_text("\n".join(parts), encoding="utf-8")
    return path.absolute()


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


def _times(
    events: Sequence[tuple[float, str]], pauses: Sequence[Point], stalls: Sequence[Point]
) -> str:
    """Returns a picture of waits over time, with a line at each thing that was done."""
    import matplotlib.pyplot as plt

    begin = min([when for when, _ in [*events, *pauses, *stalls]], default=0.0)
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(_WIDTH_INCHES, 6))
    for axes, points, name in (
        (upper, pauses, "producer: s until all is stored"),
        (lower, stalls, "consumer: s between messages"),
    ):
        axes.plot([when - begin for when, _ in points], [each for _, each in points], linewidth=0.8)
        axes.set_ylabel(name)
        for number, (when, _) in enumerate(events, start=1):
            axes.axvline(when - begin, color="0.8", linewidth=0.8)
            axes.text(when - begin, axes.get_ylim()[1], str(number), fontsize=8, color="0.4")
    lower.set_xlabel("seconds; the numbers are those of the list below")
    return _svg(figure)
