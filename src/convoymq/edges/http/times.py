"""Time limits for clients of the HTTP API."""

from __future__ import annotations

from dataclasses import dataclass

HOLD_BACK = "convoymq.hold_back"
"""Key of a request's scope: the function that lets a time pass before a refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """See the module text."""

    head_s: float = 10.0
    """For a request's head, and for a body that nobody wants to read."""
    answer_s: float = 30.0
    """Between two of its reads of an answer."""
    start_pause_s: float = 1.0
    """Until the next try to start serving, when that fails."""
