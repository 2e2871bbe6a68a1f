"""Page of an ordered topic: its route history, durations of its changes, the load of its
partitions, and its groups."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convoymq.model.json import JsonObject
from convoymq.spark.html_report import bars, page, row

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 900, 420, 56, 12, 28
COLOURS = ("#bfdbfe", "#fde68a", "#bbf7d0", "#fecaca", "#ddd6fe", "#e2e8f0", "#fbcfe8", "#a5f3fc")
LABEL_HEIGHT, BAR_HEIGHT = 12, 20
PHASES = {
    "prepared": "#94a3b8",
    "targets_ready": "#2563eb",
    "sealing": "#d97706",
    "sealed": "#dc2626",
    "published": "#16a34a",
}
"""Phases of a change in their order, with their colours."""
NAME_LENGTH = 46
"""Characters of a change's name that have room beside its bar; the table has all."""
NAME_WIDTH, LEGEND_HEIGHT, LEGEND_WIDTH = 300, 24, 120


@dataclass(frozen=True, slots=True)
class Sample:
    """Answers of the nodes at one time."""

    topic: JsonObject
    lags: Mapping[str, Sequence[JsonObject]]
    """Group -> its rows by partition."""


def topic_page(
    lineage: Sequence[JsonObject],
    groups: Sequence[JsonObject],
    changes: Sequence[JsonObject],
    first: Sample,
    last: Sample,
    seconds: float,
) -> str:
    """Returns the page. `changes`: durations of the last ones. Rates are those between two samples
    that are so many seconds apart."""
    topic = last.topic
    name = f"Topic {topic['name']} of virtual host {topic['vhost']}"
    version, logical = _number(topic, "version"), _number(topic, "logical")
    rates = _rates(first.topic, last.topic, seconds)
    return page(
        name,
        (
            f"<h1>{html.escape(name)}</h1>",
            f"<p>Route version {version}, {_number(topic, 'partitions')} partitions, {logical} "
            f"logical partitions. Rates are means over {seconds:g} s.</p>",
            "<h2>Route history</h2>",
            _history(lineage, version, logical),
            "<h2>Durations of changes, by phase</h2>",
            _changes(changes),
            "<h2>Messages per second, by open partition</h2>",
            bars([(f"partition {pid}", round(rate, 1)) for pid, rate in sorted(rates.items())]),
            "<h2>Groups</h2>",
            _groups(groups, first, last, seconds),
        ),
    )


def _number(found: Mapping[str, object], key: str) -> int:
    value = found.get(key)
    return value if isinstance(value, int) else 0


def _rates(first: JsonObject, last: JsonObject, seconds: float) -> dict[int, float]:
    """Returns the messages per second that each open partition took."""
    before, after = (
        {
            _number(each, "pid"): _number(each, "end_offset")
            for each in _rows(topic, "partition_rows")
            if each.get("state") == "open" and each.get("end_offset") is not None
        }
        for topic in (first, last)
    )
    return {pid: (end - before[pid]) / seconds for pid, end in after.items() if pid in before}


def _rows(found: JsonObject, key: str) -> list[JsonObject]:
    rows = found.get(key)
    return [each for each in rows if isinstance(each, dict)] if isinstance(rows, list) else []


def _history(lineage: Sequence[JsonObject], version: int, logical: int) -> str:
    """Returns a drawing: versions from left to right, logical partitions from top to bottom."""

    def across(at: int) -> float:
        return LEFT + at / (version + 1) * (WIDTH - LEFT - 8)

    def down(lp: int) -> float:
        return TOP + lp / max(logical, 1) * (HEIGHT - TOP - BOTTOM)

    parts = [f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' role='img'>"]
    for each in lineage:
        pid, lo, hi = (_number(each, key) for key in ("pid", "lo", "hi"))
        begin, sealed = _number(each, "created_version"), each.get("sealed_version")
        end = sealed if isinstance(sealed, int) else version + 1
        wide, high = across(end) - across(begin), down(hi) - down(lo)
        title = f"partition {pid}: {lo} to {hi - 1}, {each.get('state')}, versions {begin} to "
        parts.append(
            f"<rect x='{across(begin):.1f}' y='{down(lo):.1f}' width='{wide:.1f}' "
            f"height='{high:.1f}' fill='{COLOURS[pid % len(COLOURS)]}' stroke='#475569'>"
            f"<title>{html.escape(title)}{end - 1}</title></rect>"
        )
        if high >= LABEL_HEIGHT:
            parts.append(
                f"<text x='{across(begin) + wide / 2:.1f}' y='{down(lo) + high / 2 + 4:.1f}' "
                f"text-anchor='middle'>{pid}</text>"
            )
    for lp in (0, logical):
        parts.append(f"<text x='{LEFT - 6}' y='{down(lp) + 4:.1f}' text-anchor='end'>{lp}</text>")
    for at in sorted({0, version // 2, version}):
        parts.append(f"<text x='{across(at):.1f}' y='{HEIGHT - 8}'>version {at}</text>")
    return "".join(parts) + "</svg>"


def _changes(changes: Sequence[JsonObject]) -> str:
    """Returns a bar for each change, of one part for each phase, and a table of the same."""
    found = [(each, _phases_ms(each)) for each in changes]
    if not found:
        return "<p>The node that was asked has seen no change since it started.</p>"
    titles = ("change", "kind", "phase", *(f"{phase}, ms" for phase in PHASES), "sum, ms")
    lines = [row(titles, "th")]
    for each, spent in found:
        cells = (
            each.get("change_id"), each.get("kind"), each.get("phase"),
            *(_shown(spent.get(phase)) for phase in PHASES), sum(spent.values()),
        )  # fmt: skip
        lines.append(row(html.escape(str(cell)) for cell in cells))
    return (
        "<p>As the node that was asked has seen them. Unknown: the phase began before the node "
        "saw it, has not ended, or did not come.</p>"
        f"{_stacked(found)}<table>{''.join(lines)}</table>"
    )


def _phases_ms(change: JsonObject) -> dict[str, int]:
    spent = change.get("phases_ms")
    known = spent if isinstance(spent, dict) else {}
    return {phase: _number(known, phase) for phase in PHASES if phase in known}


def _stacked(changes: Sequence[tuple[JsonObject, Mapping[str, int]]]) -> str:
    """Returns a drawing with a legend: a bar for each change, from top to bottom."""
    longest = max(sum(spent.values()) for _, spent in changes) or 1
    height = LEGEND_HEIGHT + BAR_HEIGHT * len(changes)
    parts = [f"<svg viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' role='img'>"]
    for k, (phase, colour) in enumerate(PHASES.items()):
        at = NAME_WIDTH + k * LEGEND_WIDTH
        parts.append(
            f"<rect x='{at}' y='4' width='10' height='10' fill='{colour}'/>"
            f"<text x='{at + 14}' y='13'>{phase}</text>"
        )
    for k, (each, spent) in enumerate(changes):
        top, across = LEGEND_HEIGHT + BAR_HEIGHT * k, float(NAME_WIDTH)
        full = f"{each.get('kind')} {each.get('change_id')}"
        name = html.escape(full if len(full) <= NAME_LENGTH else full[: NAME_LENGTH - 1] + "…")
        parts.append(f"<text x='{NAME_WIDTH - 6}' y='{top + 14}' text-anchor='end'>{name}</text>")
        for phase, ms in spent.items():
            wide = ms / longest * (WIDTH - NAME_WIDTH - 80)
            parts.append(
                f"<rect x='{across:.1f}' y='{top + 3}' width='{wide:.1f}' "
                f"height='{BAR_HEIGHT - 6}' fill='{PHASES[phase]}'>"
                f"<title>{name}: {phase} {ms} ms</title></rect>"
            )
            across += wide
        parts.append(f"<text x='{across + 6:.1f}' y='{top + 14}'>{sum(spent.values())} ms</text>")
    return "".join(parts) + "</svg>"


def _groups(groups: Sequence[JsonObject], first: Sample, last: Sample, seconds: float) -> str:
    if not groups:
        return "<p>No groups.</p>"
    titles = (
        "group", "version", "partition", "state", "owner", "lag in messages",
        "seconds at the present rate", "parked keys", "waits for",
    )  # fmt: skip
    lines = [row(titles, "th")]
    for group in groups:
        name = str(group["group"])
        before = {_number(each, "pid"): each for each in first.lags.get(name, ())}
        for each in last.lags.get(name, ()):
            waits = each.get("waits_for")
            cells = (
                name,
                f"{group.get('cv')} of {group.get('latest')}",
                each.get("pid"),
                each.get("state"),
                each.get("owner") or "nobody",
                _shown(each.get("lag")),
                _shown(_seconds_left(before.get(_number(each, "pid")), each, seconds)),
                each.get("parked_keys"),
                ", ".join(f"partition {pid}" for pid in waits) if isinstance(waits, list) else "",
            )
            lines.append(row(html.escape(str(cell)) for cell in cells))
    return f"<table>{''.join(lines)}</table>"


def _shown(value: object) -> object:
    return "unknown" if value is None else value


def _seconds_left(before: JsonObject | None, after: JsonObject, seconds: float) -> float | None:
    """Returns how long a group needs for its lag at the rate of the samples; None: not known."""
    lag = after.get("lag")
    if lag == 0:
        return 0.0
    if before is None or not isinstance(lag, int):
        return None
    done = _number(after, "watermark") - _number(before, "watermark")
    return round(lag / done * seconds, 1) if done > 0 else None
