"""Where the benchmarks put what runs in the background."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import background
from benchmarks.background import IDLE_CLASS


def mount(place: Path, kind: str, options: str) -> str:
    return f"32 31 0:29 / {place} rw,relatime - {kind} cgroup {options}\n"


@pytest.mark.parametrize(
    ("membership", "kind", "options", "parent"),
    [
        ("3:cpuset:/\n1:cpu,cpuacct:/own/group\n0::/else\n", "cgroup", "rw,cpu", "own/group"),
        ("1:cpu:/\n", "cgroup", "rw,cpu", ""),
        ("1:cpu:/\n", "cgroup", "rw,cpuacct", None),
        ("0::/a.slice/b.scope\n", "cgroup2", "rw", "a.slice"),
        ("0::/\n", "cgroup2", "rw", ""),
        ("1:memory:/own\n", "cgroup", "rw,cpu", None),
    ],
)
def test_a_group_is_made_beside_or_in_that_of_this_process(
    tmp_path: Path, membership: str, kind: str, options: str, parent: str | None
) -> None:
    parents = list(background._parents(membership, mount(tmp_path, kind, options)))
    assert parents == ([] if parent is None else [tmp_path / parent])


def test_without_a_place_for_a_group_the_idle_class_remains(tmp_path: Path) -> None:
    membership, mounts = tmp_path / "cgroup", tmp_path / "mountinfo"
    membership.write_text("1:cpu:/\n0::/\n")
    mounts.write_text(mount(tmp_path / "none", "cgroup", "rw,cpu"))
    with background.background(membership, mounts) as way:
        assert way == IDLE_CLASS
