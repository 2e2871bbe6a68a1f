"""Containment of faults: the failure of one member of a round is the failure of that member only.

A *round* is one turn of a node's event loop that had work. Its members are queues, replicas, links,
connections and protocol edges. Whatever goes through many of them uses `run_each`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Member = TypeVar("Member")


def run_each(
    members: Iterable[Member],
    step: Callable[[Member], object],
    fail: Callable[[Member, Exception], None],
) -> None:
    """Calls `step` with each member.

    A member whose step raises is handed to `fail` with the error. `fail` stops that member, answers
    its clients and names it in the log. The other members get their turn in any case.

    Raises:
        InvariantViolated: at once, as it is no `Exception`; the process ends.
        Exception: the last error of `fail` itself, after all members had their turn.
    """
    not_stopped: Exception | None = None
    for member in members:
        try:
            step(member)
        except Exception as error:
            try:
                fail(member, error)
            except Exception as later:
                not_stopped = later
    if not_stopped is not None:
        raise not_stopped


def pass_on(_member: object, error: Exception) -> None:
    """Is the `fail` of members that cannot be stopped: the error is raised when all had their
    turn."""
    raise error
