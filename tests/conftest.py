"""Holds what tests claim to provoke against what they did (`tests.provocation`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import provocation
from tests.provocation import Observed


@pytest.fixture(autouse=True)
def observed(request: pytest.FixtureRequest) -> Iterator[Observed | None]:
    """What happens during a test that claims to provoke something; checked at its end."""
    events = {name for mark in request.node.iter_markers("provokes") for name in mark.args}
    names = {name for mark in request.node.iter_markers("moves") for name in mark.args}
    if not events | names:
        yield None
        return
    # Made before, and so gone after, whatever writes there and is stopped by another fixture.
    directory = request.getfixturevalue("tmp_path")
    with provocation.observing() as seen:
        yield seen
    seen.log_files(directory)
    provocation.check(seen, events, names)
