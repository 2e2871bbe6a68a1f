"""The WAL thread: what it writes, what it reports, and that it keeps what it was given alive."""

from __future__ import annotations

import errno
import gc
import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convoymq.kernels import flusher as kernel
from convoymq.kernels.flusher import Flusher
from convoymq.storage.files import RealDirectory, RealFile

METHODS = [kernel.SYNC_FDATASYNC, kernel.SYNC_FSYNC, kernel.SYNC_DSYNC, kernel.SYNC_NONE]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[RealFile]:
    opened = RealDirectory(tmp_path).open("wal", create=True)
    yield opened
    opened.close()


@pytest.fixture
def flusher() -> Iterator[Flusher]:
    made = Flusher()
    yield made
    made.close()


def answer(flusher: Flusher) -> list[tuple[object, int]]:
    """Waits as the event loop does."""
    poll = select.poll()
    poll.register(flusher.fileno(), select.POLLIN)
    assert poll.poll(10_000)
    return flusher.completed()


@pytest.mark.parametrize("method", METHODS)
def test_each_method_writes_all_buffers_back_to_back(file: RealFile, method: int) -> None:
    flusher = Flusher(method)
    flusher.submit(file, 5, [b"abc", b"", b"defg"], "token")
    assert answer(flusher) == [("token", 0)]
    assert file.pread(20, 0) == b"\0\0\0\0\0abcdefg"
    flusher.close()


def test_more_buffers_than_one_call_takes(file: RealFile, flusher: Flusher) -> None:
    buffers = [b"%05d" % i for i in range(5000)]
    flusher.submit(file, 0, buffers, 1)
    assert answer(flusher) == [(1, 0)]
    assert file.pread(30_000, 0) == b"".join(buffers)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.binary(max_size=3000), max_size=40), st.integers(0, 10_000))
def test_what_is_written_is_what_was_given(
    file: RealFile, flusher: Flusher, buffers: list[bytes], offset: int
) -> None:
    flusher.submit(file, offset, buffers, None)
    assert answer(flusher) == [(None, 0)]
    joined = b"".join(buffers)
    assert file.pread(len(joined), offset) == joined


def test_one_submission_at_a_time(file: RealFile, flusher: Flusher) -> None:
    flusher.submit(file, 0, [b"a"], 1)
    with pytest.raises(RuntimeError):
        flusher.submit(file, 1, [b"b"], 2)
    assert answer(flusher) == [(1, 0)]
    flusher.submit(file, 1, [b"b"], 2)
    assert answer(flusher) == [(2, 0)]


def test_buffers_outlive_their_owner(file: RealFile, flusher: Flusher) -> None:
    flusher.submit(file, 0, [os.urandom(1 << 20) for _ in range(8)], 1)
    gc.collect()
    assert answer(flusher) == [(1, 0)]
    assert file.size() == 8 << 20


def test_an_error_is_reported_by_its_number(tmp_path: Path, flusher: Flusher) -> None:
    (tmp_path / "f").write_bytes(b"")
    with open(tmp_path / "f", "rb") as read_only:
        flusher.submit(read_only, 0, [b"x"], "t")
        assert answer(flusher) == [("t", errno.EBADF)]


def test_a_full_disk_is_reported(flusher: Flusher) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        flusher.submit(full, 0, [b"x" * 4096], "t")
        assert answer(flusher) == [("t", errno.ENOSPC)]


def test_the_callback_gets_token_and_code(file: RealFile, flusher: Flusher) -> None:
    seen = []
    flusher.on_completed = lambda token, code: seen.append((token, code))
    flusher.submit(file, 0, [b"x"], 9)
    flusher.wait()
    flusher.on_readable()
    flusher.on_readable()
    assert seen == [(9, 0)]


def test_closing_finishes_what_is_in_flight(file: RealFile) -> None:
    flusher = Flusher()
    flusher.submit(file, 0, [b"last"], 1)
    flusher.close()
    flusher.close()
    assert file.pread(4, 0) == b"last"
    with pytest.raises(RuntimeError):
        flusher.submit(file, 0, [b"x"], 1)


def test_closing_with_an_untaken_answer_writes_nothing_twice(file: RealFile) -> None:
    flusher = Flusher()
    flusher.submit(file, 0, [b"first"], 1)
    flusher.wait()
    file.pwrite([b"other"], 0)
    flusher.close()
    assert file.pread(5, 0) == b"other"


def test_only_bytes_are_taken(file: RealFile, flusher: Flusher) -> None:
    with pytest.raises(TypeError):
        flusher.submit(file, 0, [bytearray(b"x")], 1)  # type: ignore[list-item]
    flusher.submit(file, 0, [b"x"], 2)
    assert answer(flusher) == [(2, 0)]


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="sync method"):
        Flusher(4)


def test_a_small_flush_of_an_idle_disk_is_done_inline(tmp_path: Path) -> None:
    """Goal: small and idle → answered inside `submit`; what the answer submits goes to the thread;
    a large one goes to the thread; the bytes are on disk either way."""
    flusher = Flusher(kernel.SYNC_FDATASYNC, True)
    answers: list[tuple[Any, int]] = []
    with open(tmp_path / "log", "w+b") as file:

        def completed(token: Any, code: int) -> None:
            answers.append((token, code))
            if token == "first":
                flusher.submit(file, 5, [b"second"], "second")
                assert ("second", 0) not in answers

        flusher.on_completed = completed
        flusher.submit(file, 0, [b"fi", b"rst"], "first")
        assert answers == [("first", 0)]
        flusher.wait()
        flusher.on_readable()
        assert answers == [("first", 0), ("second", 0)]
        large = bytes(kernel.INLINE_BYTES_MAX + 1)
        flusher.submit(file, 11, [large], "large")
        assert answers[-1] != ("large", 0)
        flusher.wait()
        flusher.on_readable()
        assert answers[-1] == ("large", 0)
        assert os.pread(file.fileno(), 11, 0) == b"firstsecond"
    flusher.close()


def direct_file(path: Path, size: int) -> RealFile:
    """A file of written blocks on a file system that takes direct writes, or the test is left."""
    made = RealDirectory(path).open("wal", create=True)
    made.pwrite([b"\xaa" * size], 0)
    made.sync()
    try:
        os.close(os.open(path / "wal", os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("no direct writes here")
    return made


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    start=st.integers(0, 9000),
    sizes=st.lists(
        st.one_of(st.integers(1, 300), st.integers(3000, 9000), st.just(70_000)),
        min_size=1,
        max_size=20,
    ),
)
def test_small_and_large_flushes_leave_what_was_written_before(
    tmp_path_factory: pytest.TempPathFactory, start: int, sizes: list[int]
) -> None:
    """Goal: whichever way each flush takes, the file holds all of them, and what was before."""
    size = 1 << 21
    file = direct_file(tmp_path_factory.mktemp("direct"), size)
    flusher = Flusher(kernel.SYNC_FDATASYNC, True)
    answers: list[tuple[Any, int]] = []
    flusher.on_completed = lambda token, code: answers.append((token, code))
    expected = b"\xaa" * start
    for k, length in enumerate(sizes):
        data = bytes((k + i) & 0xFF for i in range(length))
        flusher.submit(file, len(expected), [data[:48], b"", data[48:]], k)
        flusher.wait()
        flusher.on_readable()
        expected += data
        assert file.pread(len(expected), 0) == expected
    assert answers == [(k, 0) for k in range(len(sizes))]
    assert file.size() == size
    if sizes[0] < kernel.INLINE_BYTES_MAX:
        assert flusher.direct_count > 0
    flusher.close()
    file.close()


def test_a_direct_write_never_makes_a_file_grow(tmp_path: Path) -> None:
    file = direct_file(tmp_path, 5000)
    flusher = Flusher(kernel.SYNC_FDATASYNC, True)
    flusher.on_completed = lambda token, code: None
    for offset in (0, 4000, 4900):
        flusher.submit(file, offset, [b"x" * 95], offset)
        flusher.wait()
        flusher.on_readable()
        assert file.size() == 5000
    assert flusher.direct_count == 2
    flusher.submit(file, 4995, [b"y" * 100], 1)
    flusher.wait()
    flusher.on_readable()
    assert file.size() == 5095
    assert file.pread(200, 4900) == b"x" * 95 + b"y" * 100
    flusher.close()
    file.close()


def test_a_file_that_takes_the_place_of_another_is_written_itself(tmp_path: Path) -> None:
    """Goal: the descriptor for direct writes follows the file, also when its number is reused."""
    flusher = Flusher(kernel.SYNC_FDATASYNC, True)
    flusher.on_completed = lambda token, code: None
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        file = direct_file(tmp_path / name, 8192)
        flusher.submit(file, 100, [name.encode()], name)
        flusher.wait()
        flusher.on_readable()
        assert file.pread(4, 99) == b"\xaa" + name.encode()[:3]
        file.close()
    assert flusher.direct_count == 3
    flusher.close()


def test_an_inline_flush_reports_errors(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"")
    flusher = Flusher(kernel.SYNC_FDATASYNC, True)
    answers: list[tuple[Any, int]] = []
    flusher.on_completed = lambda token, code: answers.append((token, code))
    with open(tmp_path / "log", "rb") as file:
        flusher.submit(file, 0, [b"x"], 1)
    assert answers == [(1, errno.EBADF)]
    flusher.close()
