"""How many random schedules tests try: in `make properties` four times those of `make test`."""

from __future__ import annotations

import os

SCALE = int(os.environ.get("CONVOY_TEST_SEEDS", "1"))


def seeds(count: int) -> range:
    """Returns the seeds of a test that has `count` of them in `make test`."""
    return range(count * SCALE)
