"""Latencies of a run as a page: one file, drawn in the browser by the chart library of the
management page, which is in it."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files

from convoymq.kernels.perfclient import Histogram

STEPS_PER_NINE = 20
NINES = 5
"""The last percentile that is drawn is 99.999."""

_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>{css}
body {{ font: 15px system-ui; margin: 2rem; }} table {{ border-collapse: collapse; }}
td, th {{ padding: 0.2rem 1rem; text-align: right; }}</style></head>
<body><h1>{title}</h1><div id="chart"></div>
<table><tr><th>ms</th>{heads}</tr>{rows}</table>
<script type="module">{library}
const data = {data};
const names = {names};
const percentile = (nines) => +(100 * (1 - 10 ** -nines)).toFixed(3) + " %";
new uPlot({{
  width: Math.min(1100, innerWidth - 60), height: 420,
  scales: {{ x: {{ time: false }}, y: {{ distr: 3 }} }},
  axes: [{{ values: (_, splits) => splits.map(percentile) }},
    {{ values: (_, splits) => splits.map((v) => v === null ? "" : v + " ms"), size: 80 }}],
  series: [{{ label: "percentile", value: (_, v) => v === null ? "" : percentile(v) }},
    ...names.map((label, n) => ({{ label, stroke: ["#0072b2", "#d55e00"][n % 2], width: 2 }}))],
}}, data, document.getElementById("chart"));
</script></body></html>
"""


def latency_page(title: str, histograms: Mapping[str, Histogram]) -> str:
    """Returns the page. Histograms without a value are left out."""
    known = {name: each for name, each in histograms.items() if each.total}
    nines = [step / STEPS_PER_NINE for step in range(NINES * STEPS_PER_NINE + 1)]
    lines = [
        [max(1, each.percentile(1 - 10**-nine)) / 1000 for nine in nines] for each in known.values()
    ]
    summaries = [each.summary() for each in known.values()]
    rows = ""
    for key in summaries[0] if summaries else ():
        cells = "".join(f"<td>{each[key] / 1000:,.2f}</td>" for each in summaries)
        rows += f"<tr><th>{key}</th>{cells}</tr>"
    vendor = files("convoymq.edges.http") / "page" / "vendor"
    return _PAGE.format(
        title=html.escape(title),
        css=(vendor / "uplot.css").read_text(),
        library=(vendor / "uplot.js").read_text(),
        heads="".join(f"<th>{name}</th>" for name in known),
        rows=rows,
        data=json.dumps([nines, *lines]),
        names=json.dumps(list(known)),
    )
