"""The disk in memory behaves as a disk that loses power, and as the real one while it does not."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from convoymq.storage.files import MemoryDirectory, RealDirectory
from convoymq.storage.types import Directory


@pytest.fixture(params=["memory", "real"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Directory:
    return MemoryDirectory() if request.param == "memory" else RealDirectory(tmp_path / "d")


def test_files_and_names(directory: Directory) -> None:
    assert directory.list("none") == []
    directory.make("a/b")
    assert directory.exists("a/b")
    with pytest.raises(FileNotFoundError):
        directory.open("a/b/f")
    file = directory.open("a/b/f", create=True)
    file.pwrite([b"12", b"345"], 3)
    assert file.pread(100, 0) == b"\0\0\x0012345"
    assert file.size() == 8
    file.truncate(4)
    file.sync()
    assert directory.open("a/b/f").pread(9, 0) == b"\0\0\x001"
    directory.rename("a/b/f", "a/b/g")
    directory.sync("a/b")
    assert directory.list("a/b") == ["g"]
    assert directory.list("a") == ["b"]
    assert file.pread(1, 3) == b"1"
    directory.remove("a/b/g")
    directory.remove("a/b/g")
    directory.remove("a")
    assert not directory.exists("a/b")
    file.close()
    file.close()


def test_many_buffers_are_written_in_order(directory: Directory) -> None:
    file = directory.open("f", create=True)
    buffers = [b"%04d" % i for i in range(3000)]
    file.pwrite(buffers, 1)
    assert file.pread(20_000, 1) == b"".join(buffers)
    file.close()


def test_what_was_not_synced_is_lost_sector_by_sector() -> None:
    disk = MemoryDirectory()
    file = disk.open("f", create=True)
    disk.sync()
    file.pwrite([b"a" * 1024], 0)
    file.sync()
    file.pwrite([b"b" * 1024], 0)
    keep = iter([True, False])
    disk.crash(lambda: next(keep))
    assert disk.open("f").pread(2000, 0) == b"b" * 512 + b"a" * 512


def test_names_that_were_not_synced_are_lost_and_renames_are_whole() -> None:
    disk = MemoryDirectory()
    disk.open("old", create=True)
    disk.sync()
    disk.rename("old", "new")
    disk.open("other", create=True)
    disk.crash(lambda: False)
    assert disk.list() == ["old"]
    disk.rename("old", "new")
    disk.crash(lambda: True)
    assert disk.list() == ["new"]


def test_a_full_disk_says_so() -> None:
    disk = MemoryDirectory(capacity=100)
    file = disk.open("f", create=True)
    with pytest.raises(OSError) as caught:
        file.pwrite([b"x" * 101], 0)
    assert caught.value.errno == errno.ENOSPC


def test_a_synced_tree_outlives_the_power() -> None:
    directory = MemoryDirectory()
    directory.make("a")
    directory.open("a/f", create=True).pwrite([b"12345"], 0)
    directory.open("gone", create=True)
    directory.sync("")
    directory.remove("gone")
    directory.sync_all()
    directory.crash(lambda: False)
    assert directory.open("a/f").pread(9, 0) == b"12345"
    assert not directory.exists("gone")


@pytest.mark.parametrize("kept", [True, False])
def test_a_directory_made_again_is_not_the_one_that_was_removed(kept: bool) -> None:
    directory = MemoryDirectory()
    for content in (b"old", b"new"):
        directory.remove("a")
        directory.make("a")
        directory.open("a/f", create=True).pwrite([content], 0)
        directory.open("a/f").sync()
        directory.sync("a")
    directory.crash(lambda: kept)
    assert directory.open("a/f").pread(9, 0) == b"new"


@pytest.mark.parametrize("served", [True, False])
def test_the_file_system_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    """A refusal is told; a system without `syncfs` syncs all."""
    codes = [0, -1]
    calls: list[object] = []
    library = SimpleNamespace(syncfs=lambda fd: codes.pop(0)) if served else SimpleNamespace()
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: library)
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EIO)
    monkeypatch.setattr("os.sync", lambda: calls.append(1))
    directory = RealDirectory(tmp_path)
    directory.sync_all()
    assert len(calls) == (not served)
    if served:
        with pytest.raises(OSError) as caught:
            directory.sync_all()
        assert caught.value.errno == errno.EIO
