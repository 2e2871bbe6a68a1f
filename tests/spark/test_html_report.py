"""Pages of reports: whole in one file, with the numbers that their charts draw."""

from __future__ import annotations

import json
import re

from convoymq.spark.html_report import bars, page, plot, row


def test_a_chart_has_its_numbers_and_its_library() -> None:
    chart = plot([480_000, 480_001], {"p50": [1.0, 0.0], "</script>": [20.0, 3000.0]})
    found = re.search(r"<script type='application/json'>(.*?)</script>", chart)
    assert found is not None
    given = json.loads(found[1])
    assert given["times"] == [480_000 * 3600, 480_001 * 3600]
    assert given["names"] == ["p50", "</script>"]
    # What has no place on a logarithmic axis lies on its edge, and is told as it is.
    assert given["lines"] == [[1.0, 1.0], [20.0, 3000.0]]
    assert "<td>0</td><td>3,000</td>" in chart
    made = page("A & B", [chart])
    assert "<title>A &amp; B</title>" in made
    assert "new uPlot(" in made
    assert not re.search(r"(?:src|href)=", made)


def test_a_page_without_charts_is_small() -> None:
    made = page("t", [bars([("<a>", 1.0), ("b", 1234.5)]), f"<table>{row(('x',), 'th')}</table>"])
    assert "uPlot" not in made
    assert "<td>&lt;a&gt;</td>" in made
    assert "<td class='number'>1,234.5</td><td class='bar'><span style='width:100.0%'>" in made


def test_no_value_is_no_bar() -> None:
    assert "width:0.0%" in bars([("none", 0.0)])
    assert "<tr><td>" not in bars([])
