"""Pages of reports in Chromium: charts are drawn, tables are sorted, nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convoymq.spark.html_report import bars, page, plot
from tests.page.conftest import PATIENCE_MS, SIZES

NAMES = "table.bars td:first-child"


def test_a_report_draws_its_charts_and_sorts_its_tables(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    chart = plot([480_000, 480_001, 480_002], {"p50": [1.0, 2.0, 4.0], "p99": [9.0, 0.0, 30.0]})
    alone = plot([480_000], {"messages": [5.0]}, logarithmic=False)
    path.write_text(page("Report", [chart, alone, bars([("b", 9.0), ("a", 1200.0), ("c", 70.0)])]))
    tab = browser.new_page(viewport=SIZES["desk"])
    tab.set_default_timeout(PATIENCE_MS)
    heard: list[str] = []
    tab.on("pageerror", lambda error: heard.append(str(error)))
    tab.on("console", lambda line: heard.append(line.text))
    tab.on("request", lambda sent: heard.append(sent.url) if "http" in sent.url else None)
    tab.goto(path.as_uri())
    tab.locator(".chart canvas").nth(1).wait_for()
    inked = "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)" \
        ".data.some(value => value > 0)"  # fmt: skip
    assert tab.locator(".chart canvas").first.evaluate(inked), "the chart is empty"
    assert tab.locator(NAMES).all_inner_texts() == ["b", "a", "c"]
    number = tab.get_by_role("button", name="number")
    number.click()
    assert tab.locator(NAMES).all_inner_texts() == ["b", "c", "a"]
    number.click()
    assert tab.locator(NAMES).all_inner_texts() == ["a", "c", "b"]
    tab.close()
    assert not heard
