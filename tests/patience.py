"""How long tests wait for what has to come: one place for all of them.

A limit only ends a test that would wait for ever, so it is far beyond ten times what a quiet
machine needs. What must *not* take long is no matter of these limits: such a test counts steps.
"""

from __future__ import annotations

PATIENCE_S = 600.0
"""For a condition, an answer, a message, a process that ends."""

TEST_LIMIT_S = 1800
"""For a whole test; a module with longer ones has a `TEST_TIME_LIMIT_S` of its own."""
