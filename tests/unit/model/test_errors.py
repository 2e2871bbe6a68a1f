"""The error tree: refusals as plain strings, checks that hold under -O."""

from __future__ import annotations

import subprocess
import sys

import pytest

from convoymq.model import errors, refusals
from convoymq.model.errors import (
    BrokerError,
    InvariantViolated,
    NotFound,
    Refused,
    StorageFault,
    SyntaxFault,
    check,
    refusal_from_builtins,
    refusal_to_builtins,
)


def test_invariants_are_outside_the_tree() -> None:
    assert not issubclass(InvariantViolated, BrokerError)
    check(True, "fine")
    with pytest.raises(InvariantViolated, match="term fell"):
        check(False, "term fell")


def test_checks_hold_without_asserts() -> None:
    code = "from convoymq.model.errors import check; check(0, 'still here')"
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False
    )
    assert "InvariantViolated: still here" in done.stderr


@pytest.mark.parametrize("name", sorted(vars(errors)))
def test_every_refusal_crosses_a_link(name: str) -> None:
    cls = getattr(errors, name)
    if not (isinstance(cls, type) and issubclass(cls, Refused)):
        return
    if cls in (errors.ReservationRefused, errors.OffsetOutOfRange):
        return
    for subject in (None, refusals.queue_subject("/", "q")):
        parts = refusal_to_builtins(cls("text", subject=subject))
        found = refusal_from_builtins(parts)
        assert type(found) is cls
        assert (found.text, found.subject) == ("text", subject)


def test_what_a_refusal_knows_beyond_its_text_crosses_too() -> None:
    for subject in (None, refusals.queue_subject("/", "q")):
        refused = errors.ReservationRefused("reservation_epoch", "text", subject=subject)
        found = refusal_from_builtins(refusal_to_builtins(refused))
        assert isinstance(found, errors.ReservationRefused)
        assert (found.reason, found.text, found.subject) == ("reservation_epoch", "text", subject)
    beyond = refusal_from_builtins(refusal_to_builtins(errors.OffsetOutOfRange(5, 9, 3)))
    assert isinstance(beyond, errors.OffsetOutOfRange)
    assert (beyond.first, beyond.high, beyond.offset) == (5, 9, 3)


def test_a_subclass_crosses_as_its_nearest_known_class() -> None:
    class Special(NotFound):
        pass

    assert type(refusal_from_builtins(refusal_to_builtins(Special("x")))) is NotFound


@pytest.mark.parametrize(
    "parts",
    [
        [],
        ["Odd", "x"],
        ["NotFound", "x", "queue"],
        ["NotFound", "x", "y", "", ""],
        ["ReservationRefused", "x"],
    ],
)
def test_broken_refusals_are_peer_errors(parts: list[str]) -> None:
    with pytest.raises(SyntaxFault):
        refusal_from_builtins(parts)


def test_a_storage_fault_says_where() -> None:
    assert StorageFault("bad", path="/a", offset=7).text == "bad (/a at byte 7)"
    assert StorageFault("bad", path="/a").text == "bad (/a)"
    assert StorageFault("bad").text == "bad"
