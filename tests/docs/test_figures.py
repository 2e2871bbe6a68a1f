"""README's figures are those of the current release, measured."""

from __future__ import annotations

import re

from benchmarks import figures

from convoymq import __version__


def test_readme_shows_the_table_of_the_current_release() -> None:
    page, readme = figures.PAGE.read_text(), figures.README.read_text()
    found = figures.CELL.search(readme)
    assert found is not None
    assert found[0] == figures.cell(page), "run: python -m benchmarks.figures"
    # Nowhere else in README is there a ratio.
    rest = readme.replace(found[0], "")
    assert re.findall(r"\d[\d.]* ?(?:×|times)", rest) == []


def test_the_table_says_when_where_and_against_what() -> None:
    about = figures.ABOUT.search(figures.section(figures.PAGE.read_text()))
    assert about is not None
    assert about[1] == __version__
    assert "cores" in about[0]
    assert "GiB" in about[0]


def test_a_new_table_reaches_readme() -> None:
    page = figures.PAGE.read_text()
    about = "2027-01-02 · 4 cores (some), 8 GiB, Linux 7 · ConvoyMQ 0.5.0 · RabbitMQ 4.1.2\n"
    table = (
        "| one: throughput | 5,000 msg/s ±1 % | 1,000 msg/s ±2 % | 5× | ≥ 2× | reached |\n"
        "| other | 12,345 msg/s | 1,000 msg/s | 12.3× |\n| p50 | 0.1 ms | 1 ms | 0.1× |\n"
    )
    changed = figures.with_section(page, f"{about}\n{table}")
    shown = "[5–12 × RabbitMQ 4.1.2's with 0.5.0](docs/benchmarks.md#the-current-release)"
    assert figures.cell(changed) == shown
    assert changed.count("\n## ") == page.count("\n## ")
