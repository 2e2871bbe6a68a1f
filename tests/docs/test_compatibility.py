"""Every row of docs/compatibility.md says what it claims by a test, or why it claims nothing."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tests.docs.test_references import REFERENCE, text_of

PAGE = "docs/compatibility.md"
STATES = ("works", "differs", "missing")
HEADING = ("feature", "state", "shown by, or why")
WORDS_MIN = 2


class Row(NamedTuple):
    line: int
    feature: str
    state: str
    proof: str

    @property
    def tests(self) -> list[tuple[str, str]]:
        return [found for found in REFERENCE.findall(self.proof) if found[0].startswith("tests/")]

    @property
    def reason(self) -> str:
        return re.sub(r"[\s,]+", " ", REFERENCE.sub("", self.proof)).strip()


def cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split(" | "))


def rows() -> list[Row]:
    found = []
    for number, line in enumerate(text_of(PAGE).splitlines(), 1):
        if line.startswith("|") and not line.startswith("|---") and cells(line) != HEADING:
            parts = cells(line)
            assert len(parts) == len(HEADING), f"{PAGE}:{number}: {len(parts)} cells"
            found.append(Row(number, *parts))
    return found


def test_the_page_has_rows_of_every_state() -> None:
    assert len(rows()) > 250, "the search for rows has stopped working"
    assert {row.state for row in rows()} == set(STATES)


@pytest.mark.parametrize("state", STATES)
def test_rows_name_a_test_or_a_reason(state: str) -> None:
    for row in rows():
        place = f"{PAGE}:{row.line} ({row.feature})"
        assert row.state in STATES, place
        if row.state != state:
            continue
        if state != "missing":
            assert row.tests, f"{place}: no test"
            assert all(name.split(".")[-1].startswith("test_") for _, name in row.tests), place
        if state != "works":
            assert len(row.reason.split()) >= WORDS_MIN, f"{place}: no reason"


def test_no_feature_of_a_table_stands_there_twice() -> None:
    heading, seen = "", set()
    for line in text_of(PAGE).splitlines():
        if line.startswith("#"):
            heading = line
        elif line.startswith("|") and cells(line) != HEADING and not line.startswith("|---"):
            key = (heading, cells(line)[0])
            assert key not in seen, f"{heading}: {key[1]} stands there twice"
            seen.add(key)
