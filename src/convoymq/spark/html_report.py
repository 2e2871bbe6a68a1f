"""Pages of reports: one HTML file with tables and plots, without a network.

Plots are SVG text, drawn here: a few polylines and bars need no plotting library, and the tables
around them no templates (ADR 0194).
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

COLOURS = ("#2563eb", "#d97706", "#dc2626", "#475569")
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 220, 56, 28
BAR_HEIGHT = 20


def page(title: str, body: Iterable[str]) -> str:
    """Returns the whole page; `body` is HTML."""
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}"
        f"</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def row(cells: Iterable[object], tag: str = "td", style: str = "") -> str:
    """Returns a row of a table; cells are HTML."""
    inner = "".join(f"<{tag}>{cell}</{tag}>" for cell in cells)
    return f"<tr class='{style}'>{inner}</tr>"


def hour_text(hour: int) -> str:
    """Hours since the epoch as month, day and hour (UTC)."""
    return datetime.fromtimestamp(hour * 3600, UTC).strftime("%m-%d %H:00")


def plot(hours: Sequence[int], series: dict[str, list[float]], *, logarithmic: bool = True) -> str:
    """Lines over hours. Values of 0 lie on the lower edge of a logarithmic axis."""
    values = [value for line in series.values() for value in line]
    low = min((v for v in values if v > 0), default=1.0) if logarithmic else 0.0
    high = max([*values, low])

    def scale(value: float) -> float:
        if logarithmic:
            span = math.log10(high / low) or 1.0
            share = math.log10(max(value, low) / low) / span
        else:
            share = value / (high or 1.0)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - 16)

    first, last = min(hours), max(hours)

    def across(hour: int) -> float:
        return LEFT + (hour - first) / max(last - first, 1) * (WIDTH - LEFT - 120)

    parts = [
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' role='img'>"
        f"<line x1='{LEFT}' y1='{HEIGHT - BOTTOM}' x2='{WIDTH - 112}' y2='{HEIGHT - BOTTOM}' "
        "stroke='#94a3b8'/>"
    ]
    for value in {low, high}:
        parts.append(
            f"<text x='{LEFT - 6}' y='{scale(value) + 4:.1f}' text-anchor='end'>{value:g}</text>"
        )
    for hour in {first, last}:
        parts.append(f"<text x='{across(hour):.1f}' y='{HEIGHT - 8}'>{hour_text(hour)}</text>")
    for k, (name, line) in enumerate(series.items()):
        colour = COLOURS[k % len(COLOURS)]
        points = " ".join(
            f"{across(h):.1f},{scale(v):.1f}" for h, v in zip(hours, line, strict=True)
        )
        dots = "".join(
            f"<circle cx='{p.split(',')[0]}' cy='{p.split(',')[1]}' r='2.5' fill='{colour}'/>"
            for p in points.split()
        )
        parts.append(
            f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.5'/>{dots}"
            f"<text x='{WIDTH - 106}' y='{20 + 16 * k}' fill='{colour}'>{html.escape(name)}</text>"
        )
    return "".join(parts) + "</svg>"


def bars(values: Sequence[tuple[str, float]]) -> str:
    """Returns a horizontal bar for each (name, value), the longest as wide as the page."""
    high = max((value for _, value in values), default=0) or 1
    height = BAR_HEIGHT * len(values)
    parts = [f"<svg viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' role='img'>"]
    for k, (name, value) in enumerate(values):
        top = BAR_HEIGHT * k
        width = value / high * (WIDTH / 2 - 72)
        parts.append(
            f"<text x='{WIDTH / 2 - 6:g}' y='{top + 14}' text-anchor='end'>{html.escape(name)}"
            f"</text><rect x='{WIDTH / 2:g}' y='{top + 3}' width='{width:.1f}' "
            f"height='{BAR_HEIGHT - 6}' fill='{COLOURS[0]}'/>"
            f"<text x='{WIDTH / 2 + width + 6:.1f}' y='{top + 14}'>{value:,g}</text>"
        )
    return "".join(parts) + "</svg>"


_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;
color:#0f172a}
table{border-collapse:collapse;margin:1rem 0}
td,th{border-bottom:1px solid #e2e8f0;padding:.3rem .7rem;text-align:left;vertical-align:top}
tr.good td:first-child{border-left:4px solid #16a34a}
tr.bad td:first-child{border-left:4px solid #dc2626}
tr.unsure td:first-child{border-left:4px solid #d97706}
p.good{color:#15803d;font-weight:600}p.bad{color:#b91c1c;font-weight:600}p.unsure{color:#b45309}
pre{white-space:pre-wrap;font-size:12px;background:#f8fafc;padding:.5rem}
svg text{font-size:11px;fill:#334155}
"""
