"""The figures that README shows, from the table of the current release in docs/benchmarks.md.

    python -m benchmarks.figures      after the table was edited; `make bench` does it by itself

Nothing else in README has figures, so the table is the one place to change.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
CLASSIC_PAGE = ROOT / "docs" / "benchmarks-classic.md"
AMQP10_PAGE = ROOT / "docs" / "benchmarks-amqp10.md"
README = ROOT / "README.md"
SECTION = re.compile(r"(?<=\n## The current release\n\n).*?(?=\n## )", re.DOTALL)
ABOUT = re.compile(r"^\d{4}-\d\d-\d\d · .* · ConvoyMQ ([\d.]+)\b.* · RabbitMQ ([\d.]+\d)", re.M)
"""When, on which machine, and which releases: the first paragraph of the section."""
THROUGHPUT = re.compile(
    r"^\| [^|]+ \| [\d,]+ msg/s[^|]* \| [\d,]+ msg/s[^|]* \| ([\d.]+)× \|", re.MULTILINE
)
CELL = re.compile(r"(?<=\| throughput of a replicated queue \| )[^|]*(?= \|)")


def replace_section(page: Path, text: str) -> None:
    """Gives a page another part about the current release."""
    page.write_text(with_section(page.read_text(), text))


def section(page: str) -> str:
    """Returns the part about the current release."""
    found = SECTION.search(page)
    assert found is not None, "docs/benchmarks.md has no section of the current release"
    return found[0]


def with_section(page: str, text: str) -> str:
    """Returns the page with another part about the current release."""
    return SECTION.sub(lambda _: text, page, count=1)


def cell(page: str) -> str:
    """Returns the cell of README's comparison: lowest and highest ratio of throughput, rounded."""
    part = section(page)
    about = ABOUT.search(part)
    assert about is not None, "the section begins with date, machine, ConvoyMQ X · RabbitMQ Y"
    ratios = [float(ratio) for ratio in THROUGHPUT.findall(part)]
    shown = f"{min(ratios):.0f}–{max(ratios):.0f} × RabbitMQ {about[2]}'s with {about[1]}"
    return f"[{shown}](docs/benchmarks.md#the-current-release)"


def write() -> None:
    """Brings README in step with the table."""
    README.write_text(CELL.sub(lambda _: cell(PAGE.read_text()), README.read_text()))


if __name__ == "__main__":
    write()
