"""How long tests wait for what has to come: one place for all of them.

A limit only ends a test that would wait for ever, so it is far beyond ten times what a quiet
machine needs. What must *not* take long is no matter of these limits: such a test counts steps.
"""

from __future__ import annotations

import time

PATIENCE_S = 600.0
"""For a condition, an answer, a message, a process that ends."""

PAUSE_MIN_S, PAUSE_MAX_S = 0.01, 0.2

TEST_LIMIT_S = 1800
"""For a whole test; a module with longer ones has a `TEST_TIME_LIMIT_S` of its own."""


def pause_s(began: float) -> float:
    """Returns how long a test waits between two looks at a condition: a tenth of the time since
    `began` (`time.monotonic()`). A look is mostly a request to nodes, whose work it delays."""
    return min(PAUSE_MAX_S, max(PAUSE_MIN_S, (time.monotonic() - began) / 10))
