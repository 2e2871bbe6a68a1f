"""The table of errors in docs/topics.md says what tests/interop/test_topics.py provokes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.test_topics import AMQP, CELLS, HTTP, PYTHON

DOCS = Path(__file__).resolve().parents[2] / "docs"
SURFACES = (AMQP, HTTP, PYTHON)
NOT_POSSIBLE = "no such operation"
NO_ANSWER = "no answer, see below"


def table() -> dict[tuple[str, str], str]:
    """The cells by error and protocol."""
    text = (DOCS / "topics.md").read_text()
    part = text[text.index("\n## Errors\n") :]
    rows = part[: part.index("\n## Guarantees\n")].split("\n| ")[1:]
    head, *rest = [[cell.strip() for cell in row.split("|")] for row in rows]
    assert head[1:4] == list(SURFACES)
    return {(row[0], surface): row[at + 1] for row in rest for at, surface in enumerate(SURFACES)}


def test_every_cell_is_provoked_or_says_that_it_is_not_possible() -> None:
    cells = table()
    absent = {place for place, cell in cells.items() if cell.startswith((NOT_POSSIBLE, NO_ANSWER))}
    assert cells.keys() - absent == CELLS.keys()


@pytest.mark.parametrize("place", CELLS, ids=str)
def test_a_cell_names_the_codes_that_are_answered(place: tuple[str, str]) -> None:
    _, expected = CELLS[place]
    cell = table()[place]
    for code in expected[:-1]:
        if code is not None:
            assert str(code) in cell
