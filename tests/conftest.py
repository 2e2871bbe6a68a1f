"""Ends tests that hang; holds what tests claim to provoke against what they did
(`tests.provocation`); closes the connections that they abandon (`tests.abandoned`); fails files
that leave something behind for the next one of their process (`tests.process_state`); and the order
in which the processes of pytest-xdist get files."""

from __future__ import annotations

import gc
import re
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests import abandoned, process_state, provocation
from tests.patience import TEST_LIMIT_S
from tests.provocation import Observed

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

# No test measures time: under load an example may take long. What is red for one of many random
# examples would be red by chance: `make test` tries the same ones each time, `make properties`
# others.
STEADY = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.register_profile("steady", STEADY)
settings.register_profile("random", STEADY, derandomize=False, print_blob=True)
settings.load_profile("steady")

abandoned.watch()

HERE = Path(__file__).parent
INTEROP_GROUPS = 6
GROUPS = {
    f"tests/spark/test_{name}.py": group
    for group, names in {
        "spark-1": ("apply", "archive", "spark"),
        "spark-2": ("audit", "pipelines", "processes", "triage"),
        "spark-3": ("capture", "connect_types", "merging", "rocketmq"),
        "spark-4": ("hostile", "query_runs", "topic_audit", "topics"),
    }.items()
    for name in names
} | {
    f"tests/{path.relative_to(HERE)}": f"interop-{number % INTEROP_GROUPS}"
    for number, path in enumerate(sorted((HERE / "interop").rglob("test_*.py")))
}
"""File → its group. The files of a group go to one process, which starts Spark and a cluster once
for all of them; the groups of each kind take equally long."""

SPREAD = re.compile(r"tests/(sim/test_(planted_bugs|seeds)\.py::|docs/test_blocks\.py::\w+_runs\b)")
"""Long tests of files whose tests share nothing: each goes to whichever process is free."""

FIRST = ("spark-1", "spark-2", "tests/docs/test_blocks.py::test_the_tutorial_of_spark_runs")
EARLY = (
    *("interop-", "spark-", "tests/upgrade/", "tests/docs/test_blocks.py::"),
    *("tests/faults/test_topic_phases", "tests/faults/test_replicas_behind"),
    *("tests/faults/test_mirrored.py", "tests/faults/test_killed_changes"),
    *("tests/faults/test_migrations", "tests/rocketmq/test_bridge"),
)
"""The longest units, in this order. Begun late, they would be the end that all other processes wait
for; more Sparks at a time would have no processor."""

COMPUTING = ("tests/sim/", "tests/unit/")
"""Tests that use a processor all the time; those of clusters wait for most of theirs."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting makes 600,000 objects that stay. The garbage collector looks at none of them,
    neither while they are made nor in the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest units come first, so that all processes end at about the same time. Then those
    that compute lie evenly between those that wait, so that there is always something to do.
    A name with an address in it differs between processes, which then collect other tests."""
    if unsteady := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"an address in the name of a test: {unsteady[0]}")
    if not hasattr(config, "workerinput"):
        return
    units: dict[str, list[pytest.Item]] = {}
    for item in items:
        units.setdefault(unit_of(item.nodeid), []).append(item)
    first = [unit for unit in units if unit.startswith(FIRST)]
    computing = [unit for unit in units if unit.startswith(COMPUTING)]
    waiting = [unit for unit in units if unit not in {*first, *computing}]
    waiting.sort(key=lambda unit: [not unit.startswith(beginning) for beginning in EARLY])
    place = dict.fromkeys(first, -1.0)
    for kind in (computing, waiting):
        place |= {unit: number / len(kind) for number, unit in enumerate(kind)}
    items[:] = [item for unit in sorted(place, key=place.__getitem__) for item in units[unit]]


def unit_of(nodeid: str) -> str:
    """Returns the name of what goes to one process as a whole."""
    file = nodeid.split("::", 1)[0]
    return nodeid if SPREAD.match(nodeid) else GROUPS.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Whole files go to a process, as `--dist loadfile` has it, but for groups and spread ones."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names planted bugs that other seeds notice than those that are recorded."""
    passed = terminalreporter.stats.get("passed", ())
    drifted = [text for each in passed for key, text in each.user_properties if key == "drifted"]
    if drifted:
        terminalreporter.section("planted bugs drifted: python -m tests.sim.planted --record NAME")
        terminalreporter.write_line("\n".join(sorted(drifted)))


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
def abandoned_connections() -> Iterator[None]:
    """Closes what a test opened with pika and left open; what a file or more shares stays."""
    with abandoned.closed_at_the_end():
        yield


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
