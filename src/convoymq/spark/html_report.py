"""Pages of reports: one HTML file with tables and charts, without a network.

Lines are drawn by uPlot, which the management page brings with it and each report with a chart
contains (ADR 0218); a bar is a cell of a table. Tables are sorted by a click on a column.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import convoymq

_VENDOR = Path(convoymq.__file__).parent / "edges" / "http" / "page" / "vendor"
_CHART = "<div class='chart'>"


def page(title: str, body: Iterable[str]) -> str:
    """Returns the whole page; `body` is HTML."""
    content = "".join(body)
    style, script = _STYLE, _SORT
    if _CHART in content:
        style += (_VENDOR / "uplot.css").read_text("utf-8")
        script += (_VENDOR / "uplot.js").read_text("utf-8") + _DRAW
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}"
        f"</title><style>{style}</style></head><body>{content}"
        f"<script type='module'>{script}</script></body></html>\n"
    )


def row(cells: Iterable[object], tag: str = "td", style: str = "") -> str:
    """Returns a row of a table; cells are HTML."""
    inner = "".join(f"<{tag}>{cell}</{tag}>" for cell in cells)
    return f"<tr class='{style}'>{inner}</tr>"


def hour_text(hour: int) -> str:
    """Hours since the epoch as month, day and hour (UTC)."""
    return datetime.fromtimestamp(hour * 3600, UTC).strftime("%m-%d %H:00")


def plot(hours: Sequence[int], series: dict[str, list[float]], *, logarithmic: bool = True) -> str:
    """Lines over hours, and their numbers. Values of 0 lie on the lower edge of a logarithmic
    axis."""
    values = [value for line in series.values() for value in line]
    low = min((value for value in values if value > 0), default=1.0) if logarithmic else 0.0
    given = {
        "times": [hour * 3600 for hour in hours],
        "names": list(series),
        "lines": [[max(value, low) for value in line] for line in series.values()],
        "logarithmic": logarithmic,
    }
    lines = zip(*series.values(), strict=True)
    rows = [row(("hour", *map(html.escape, series)), "th")]
    rows += [
        row((hour_text(hour), *(f"{value:,g}" for value in line)))
        for hour, line in zip(hours, lines, strict=True)
    ]
    # No text of a series ends the script that holds it.
    data = json.dumps(given).replace("<", "\\u003c")
    return (
        f"{_CHART}<script type='application/json'>{data}</script></div>"
        f"<details><summary>numbers</summary><table>{''.join(rows)}</table></details>"
    )


def bars(values: Sequence[tuple[str, float]]) -> str:
    """Returns a table with a bar for each (name, value), the longest as wide as its column."""
    high = max((value for _, value in values), default=0) or 1
    rows = [
        f"<tr><td>{html.escape(name)}</td><td class='number'>{value:,g}</td>"
        f"<td class='bar'><span style='width:{100 * value / high:.1f}%'></span></td></tr>"
        for name, value in values
    ]
    return (
        f"<table class='bars'><tr><th>name</th><th>number</th><td></td></tr>{''.join(rows)}</table>"
    )


_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;
color:#0f172a}
table{border-collapse:collapse;margin:1rem 0}
td,th{border-bottom:1px solid #e2e8f0;padding:.3rem .7rem;text-align:left;vertical-align:top}
th button{font:inherit;font-weight:600;background:none;border:0;padding:0;cursor:pointer}
th[aria-sort=ascending] button::after{content:" ▲"}
th[aria-sort=descending] button::after{content:" ▼"}
td.number{text-align:right}td.bar{width:24rem}
td.bar span{display:block;height:.9rem;background:#0072b2}
tr.good td:first-child{border-left:4px solid #009e73}
tr.bad td:first-child{border-left:4px solid #d55e00}
tr.unsure td:first-child{border-left:4px solid #e69f00}
tr.good td:first-child::before{content:"✓ "}tr.bad td:first-child::before{content:"✗ "}
tr.unsure td:first-child::before{content:"? "}
p.good{color:#00694d;font-weight:600}p.bad{color:#a34800;font-weight:600}p.unsure{color:#7a5300}
pre{white-space:pre-wrap;font-size:12px;background:#f8fafc;padding:.5rem}
svg text{font-size:11px;fill:#334155}
"""
_SORT = """
for (const table of document.querySelectorAll("table")) {
  const [head, ...rows] = table.rows;
  if (rows.length < 2 || !head.querySelector("th")) continue;
  [...head.cells].forEach((cell, at) => {
    if (cell.tagName !== "TH") return;
    const button = document.createElement("button");
    button.append(...cell.childNodes);
    cell.append(button);
    button.onclick = () => {
      const up = cell.getAttribute("aria-sort") !== "ascending";
      for (const each of head.cells) each.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[at]?.innerText.trim() ?? "";
      const number = (text) => Number.parseFloat(text.replaceAll(",", ""));
      const compare = (one, two) => {
        const [a, b] = [number(one), number(two)];
        return Number.isNaN(a) || Number.isNaN(b) ? one.localeCompare(two) : a - b;
      };
      rows.sort((one, two) => (up ? 1 : -1) * compare(key(one), key(two)));
      head.after(...rows);
    };
  });
}
"""
_DRAW = """
// Okabe and Ito's colours, and dashes beside them: no line is known by its colour alone.
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7"];
const DASHES = [[], [8, 4], [2, 4], [10, 3, 2, 3]];
for (const chart of document.querySelectorAll(".chart")) {
  const given = JSON.parse(chart.firstElementChild.textContent);
  const lines = given.names.map((label, at) => {
    const [stroke, dash] = [COLOURS[at % 4], DASHES[at % 4]];
    return { label, stroke, dash, width: 1.5, points: { show: true, size: 5 } };
  });
  const options = {
    width: 900,
    height: 260,
    tzDate: (seconds) => uPlot.tzDate(new Date(1000 * seconds), "UTC"),
    scales: {
      x: {
        range: (_plot, low, high) =>
          given.times.length === 1 ? [given.times[0] - 3600, given.times[0] + 3600] : [low, high],
      },
      y: given.logarithmic ? { distr: 3 } : { range: (_plot, _low, high) => [0, high || 1] },
    },
    axes: [{}, { size: 64 }],
    series: [{ label: "time (UTC)" }, ...lines],
  };
  new uPlot(options, [given.times, ...given.lines], chart);
}
"""
