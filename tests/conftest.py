"""Ends tests that hang; holds what tests claim to provoke against what they did
(`tests.provocation`); fails files that leave something behind for the next one of their process
(`tests.process_state`); and the order in which the processes of pytest-xdist get files."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests import process_state, provocation
from tests.patience import TEST_LIMIT_S
from tests.provocation import Observed

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

# No test measures time: under load an example may take long.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

SPARK_GROUPS = {
    f"tests/spark/test_{name}.py": group
    for group, names in {
        "spark-1": ("apply", "archive", "spark"),
        "spark-2": ("audit", "pipelines", "processes", "triage"),
    }.items()
    for name in names
}
"""File → its group. The files of a group go to one process, which starts Spark and a cluster once
for all of them; the groups take equally long."""

SPREAD = frozenset(
    ("tests/docs/test_blocks.py", "tests/sim/test_planted_bugs.py", "tests/sim/test_seeds.py")
)
"""Long files whose tests share nothing: each test goes to whichever process is free."""

FIRST = (*SPARK_GROUPS, "tests/upgrade/", "tests/docs/test_blocks.py")
"""Where the longest units lie; begun late, they would be the end that all other processes wait
for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest units come first, so that all processes end at about the same time."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Whole files go to a process, as `--dist loadfile` has it, but for groups and spread ones."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if file in SPREAD else SPARK_GROUPS.get(file, file)

    return Scheduling(config, log)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the last test of a file that changed what all files of a process share."""
    before = process_state.look()
    yield
    left = process_state.changes(before, process_state.look())
    assert not left, f"this file leaves behind: {'; '.join(left)}"


@pytest.fixture(autouse=True)
def time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends a test that hangs, with a traceback of where."""
    limit_s = getattr(request.module, "TEST_TIME_LIMIT_S", TEST_LIMIT_S)

    def expired(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"the test took more than {limit_s} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(limit_s)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


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
