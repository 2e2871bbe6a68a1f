"""A node's directory: whose it is, which life it is, and which releases may open it."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from convoymq.model.errors import Misuse, StorageFault
from convoymq.node.data_directory import DataDirectory
from convoymq.transport.identity import Founding, is_id

CLUSTER = "c" * 32


def change(path: Path, **fields: Any) -> None:
    file = path / "node.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_starts_are_counted_and_the_clock_plays_no_part(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        directory = DataDirectory(str(tmp_path), 1)
        assert directory.incarnation == expected
        directory.close()


def test_ids_stay_with_the_directory(tmp_path: Path) -> None:
    first = DataDirectory(str(tmp_path / "a"), 1)
    first.close()
    again = DataDirectory(str(tmp_path / "a"), 1)
    again.close()
    other = DataDirectory(str(tmp_path / "b"), 1)
    other.close()
    assert is_id(first.identity.directory)
    assert is_id(first.identity.candidate)
    assert first.cluster == ""
    assert again.identity.directory == first.identity.directory
    assert again.identity.candidate == first.identity.candidate
    assert other.identity.directory != first.identity.directory


def test_a_founding_is_remembered_until_the_cluster_lives(tmp_path: Path) -> None:
    directory = DataDirectory(str(tmp_path), 1)
    founding = Founding(cluster=CLUSTER, directories=((1, "a" * 32), (2, "b" * 32)))
    directory.found(founding)
    directory.close()
    directory = DataDirectory(str(tmp_path), 1)
    assert (directory.cluster, directory.founding) == (CLUSTER, founding)
    assert founding.members == (1, 2)
    directory.founded()
    directory.close()
    directory = DataDirectory(str(tmp_path), 1)
    assert (directory.cluster, directory.founding) == (CLUSTER, None)
    directory.close()


def test_a_founding_outlives_a_log_that_nobody_else_may_have(tmp_path: Path) -> None:
    directory = DataDirectory(str(tmp_path), 1)
    founding = Founding(cluster=CLUSTER, directories=((1, "a" * 32), (2, "b" * 32)))
    directory.found(founding)
    assert not directory.logged
    directory.note_log()
    directory.close()
    directory = DataDirectory(str(tmp_path), 1)
    assert (directory.founding, directory.logged) == (founding, True)
    directory.renew()
    directory.note_log()
    directory.close()
    directory = DataDirectory(str(tmp_path), 1)
    assert (directory.founding, directory.logged) == (None, False)
    directory.close()


def test_joining_raises_the_incarnation(tmp_path: Path) -> None:
    directory = DataDirectory(str(tmp_path), 1)
    directory.join(CLUSTER, 7, 12)
    directory.close()
    directory = DataDirectory(str(tmp_path), 1)
    assert (directory.cluster, directory.incarnation, directory.lost_groups) == (CLUSTER, 8, 12)
    with pytest.raises(Misuse, match="incarnation 3"):
        directory.join(CLUSTER, 3, 0)
    directory.close()


def test_who_gives_up_a_founding_is_another_directory(tmp_path: Path) -> None:
    directory = DataDirectory(str(tmp_path), 1)
    before = directory.identity
    directory.found(Founding(cluster=CLUSTER, directories=((1, before.directory),)))
    directory.renew()
    directory.close()
    directory = DataDirectory(str(tmp_path), 1)
    assert (directory.cluster, directory.founding) == ("", None)
    assert directory.identity.directory != before.directory
    assert directory.identity.candidate != before.candidate
    assert directory.incarnation == before.incarnation + 1
    directory.close()


def test_a_recovery_keeps_the_former_ids(tmp_path: Path) -> None:
    directory = DataDirectory(str(tmp_path), 1)
    directory.recover("d" * 32, (CLUSTER,))
    directory.close()
    directory = DataDirectory(str(tmp_path), 1)
    assert (directory.cluster, directory.identity.former) == ("d" * 32, (CLUSTER,))
    directory.close()


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    DataDirectory(str(tmp_path / "data"), 1).close()
    for path, mode in (("data", 0o700), ("data/node.json", 0o600), ("data/lock", 0o600)):
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == mode


def test_a_directory_serves_one_process_and_one_node(tmp_path: Path) -> None:
    directory = DataDirectory(str(tmp_path), 1)
    with pytest.raises(Misuse, match="in use"):
        DataDirectory(str(tmp_path), 1)
    directory.close()
    with pytest.raises(Misuse, match="belongs to node 1"):
        DataDirectory(str(tmp_path), 2)
    DataDirectory(str(tmp_path), 1).close()


@pytest.mark.parametrize("content", ["", "[]", '{"format": 5}', '{"format": 5, "directory": 5}'])
def test_a_damaged_identity_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "node.json").write_text(content)
    with pytest.raises(StorageFault, match=r"node\.json"):
        DataDirectory(str(tmp_path), 1)
    assert (tmp_path / "node.json").read_text() == content


@pytest.mark.parametrize("field", ["directory", "candidate", "cluster"])
def test_an_id_of_another_form_is_refused(tmp_path: Path, field: str) -> None:
    DataDirectory(str(tmp_path), 1).close()
    change(tmp_path, **{field: "short"})
    with pytest.raises(StorageFault, match="not 32 hex digits"):
        DataDirectory(str(tmp_path), 1)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({}, 1),
        ({"node": 1, "incarnation": 58000000, "lost_groups": 0, "joined": False}, 1),
        ({"format": 2, "release": "0.2.0.dev0", "node": 1, "incarnation": 4}, 2),
    ],
)
def test_directories_of_development_versions_are_refused(
    tmp_path: Path, content: dict[str, Any], found: int
) -> None:
    file = tmp_path / "node.json"
    before = json.dumps(content)
    file.write_text(before)
    text = rf"{tmp_path} .*development version .*before 0\.2\.0 in format {found};.*empty directory"
    with pytest.raises(Misuse, match=text):
        DataDirectory(str(tmp_path), 1)
    assert file.read_text() == before


def test_data_without_an_identity_is_refused(tmp_path: Path) -> None:
    DataDirectory(str(tmp_path), 1).close()
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "wal").touch()
    (tmp_path / "node.json").unlink()
    with pytest.raises(Misuse, match=r"node\.json is missing"):
        DataDirectory(str(tmp_path), 1)
    assert not (tmp_path / "node.json").exists()


def test_a_downgrade_is_refused_with_both_releases(tmp_path: Path) -> None:
    DataDirectory(str(tmp_path), 1, release="0.9.0").close()
    change(tmp_path, format=9)
    before = (tmp_path / "node.json").read_text()
    with pytest.raises(Misuse, match=r"release 0\.9\.0 in format 9.* release 0\.2\.0.*downgrade"):
        DataDirectory(str(tmp_path), 1, release="0.2.0")
    assert (tmp_path / "node.json").read_text() == before


def test_versions_in_force_that_this_build_does_not_know_are_refused(tmp_path: Path) -> None:
    directory = DataDirectory(str(tmp_path), 1, {"quorum": (1, 3)}, release="0.9.0")
    directory.raise_version("quorum", 2)
    directory.raise_version("quorum", 1)
    directory.close()
    with pytest.raises(Misuse, match=r"0\.9\.0 .*quorum machines of version 2.*0\.2\.0"):
        DataDirectory(str(tmp_path), 1, {"quorum": (1, 1)}, release="0.2.0")
    with pytest.raises(Misuse, match="quorum machines"):
        DataDirectory(str(tmp_path), 1, {"stream": (1, 1)}, release="0.2.0")
    again = DataDirectory(str(tmp_path), 1, {"quorum": (1, 2)}, release="0.2.0")
    assert again.versions == {"quorum": 2}
    again.close()


def test_packs_are_taken_when_no_earlier_release_opens_the_directory(tmp_path: Path) -> None:
    supports = {"metadata": (1, 4)}
    directory = DataDirectory(str(tmp_path), 1, supports, release="0.4.0")
    assert not directory.takes_packs()
    directory.raise_version("metadata", 3)
    assert not directory.takes_packs()
    directory.raise_version("metadata", 4)
    assert directory.takes_packs()
    directory.close()
    with pytest.raises(Misuse, match="metadata machines of version 4"):
        DataDirectory(str(tmp_path), 1, {"metadata": (1, 3)}, release="0.3.0")
    again = DataDirectory(str(tmp_path), 1, supports, release="0.4.0")
    assert again.takes_packs()
    again.close()
