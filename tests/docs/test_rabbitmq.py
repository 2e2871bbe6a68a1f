"""docs/rabbitmq.md says of each of RabbitMQ's names what is here, by our own tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.rabbitmq_names import TITLES, Names, names_here, page, rabbitmq_names

PAGE = Path(__file__).parents[2] / "docs" / "rabbitmq.md"


@pytest.mark.parametrize("title", TITLES)
def test_a_name_is_here_or_its_absence_has_a_reason(title: str) -> None:
    assert rabbitmq_names()[title].faults(names_here(title)) == []


def test_the_page_is_the_generated_one() -> None:
    assert PAGE.read_text() == page(), ".venv/bin/python -m tools.rabbitmq_names > docs/rabbitmq.md"


def test_faults_are_found() -> None:
    names = Names(("a", "b", "c"), differs={"a x": "so"}, absent={"b b": "because"})
    assert names.faults(frozenset("ab")) == [
        "b is said to be absent",
        "c is absent without a reason",
        "x is no name of RabbitMQ",
        "b stands there twice",
    ]


def test_notes_of_several_tools_are_shared_and_a_tool_may_have_its_own() -> None:
    shared = {"absent": {"b c": "of both", "d": "of another"}}
    names = Names.of({"names": "a b c", "absent": {"c": "own"}}, shared)
    assert names == Names(("a", "b", "c"), {}, {"b": "of both", "c": "own"})
    assert names.rows() == [
        "| `a` | same | |", "| `c` | absent | own |", "| `b` | absent | of both |"
    ]  # fmt: skip
