"""Backups in a store: interrupted at every operation, damaged, incremental, restored."""

from __future__ import annotations

import errno
import fcntl
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from convoymq.cli.backup.archive import (
    CHUNK_POSITIONS,
    Archive,
    Manifest,
    chunks_of,
    commands_of,
    count_of,
)
from convoymq.cli.backup.cluster import Listing, Page, QueueRow
from convoymq.cli.backup.restoring import Restoring
from convoymq.cli.backup.store import DirectoryStore, Store, open_store
from convoymq.cli.backup.taking import Taking
from convoymq.kernels.batch import CMD_ENQUEUE
from convoymq.model.errors import (
    BrokerError,
    Misuse,
    PreconditionFailed,
    StorageFault,
    Unavailable,
)

PAGE = 3


def command(number: int, size: int = 8) -> bytes:
    """An ENQUEUE command of one record, as far as a backup looks at it."""
    body = b"%d" % number + bytes(size)
    length = (32 + len(body) + 7) & ~7
    head = length.to_bytes(4, "little") + bytes((CMD_ENQUEUE, 0)) + bytes(18)
    return (head + (1).to_bytes(4, "little") + bytes(4) + body).ljust(length, b"\0")


class FakeCluster:
    """Queues as lists of positions: source and target."""

    def __init__(self, **queues: list[int]) -> None:
        self.queues = queues
        self.type = "quorum"
        self.cluster_id = "id"
        self.gap = ""
        """Name of a queue that cannot be read."""
        self.source = 0
        self.failures = 0
        self.deleted: list[str] = []
        self.gone: list[str] = []
        """Deleted, and not declared again."""
        self.asked: list[int] = []
        self.page_size = PAGE

    def listing(self) -> Listing:
        rows = [
            QueueRow("/", name, self.type, 7 + at, durable=True, exclusive=False)
            for at, name in enumerate(self.queues)
        ]
        return Listing("c", self.cluster_id, {"bindings": []}, rows, [])

    def page(self, vhost: str, name: str, after: int, upto: int) -> Page:
        self.asked.append(after)
        if name == self.gap:
            raise Unavailable(f"queue '{name}' has no leader")
        if name not in self.queues:
            raise LookupError(name)
        held = self.queues[name]
        if upto < 0:
            upto = held[-1] if held else -1
        behind = held[bisect_right(held, after) : bisect_right(held, upto)]
        shown = behind[: self.page_size]
        last = len(shown) == len(behind)
        commands = [(at, command(at)) for at in shown]
        end = upto if last else shown[-1]
        first = held[0] if held else 0
        group = 7 + list(self.queues).index(name)
        return Page(group, self.source, upto, end, last, len(shown), commands, first)

    def publish(self, kind: str, vhost: str, name: str, commands: bytes) -> int:
        found = list(commands_of(commands))
        if self.failures:
            self.failures -= 1
            raise Unavailable("the connection was closed")
        self.queues[name] += [int(each[32:].split(b"\0")[0]) for each in found]
        return len(found)

    def put(self, path: str, body: object) -> None:
        raise AssertionError

    def import_definitions(self, definitions: object) -> None:
        assert "users" not in definitions or not self.gone  # type: ignore[operator]
        self.queues |= {name: [] for name in self.gone}
        self.gone.clear()

    def delete(self, kind: str, vhost: str, name: str) -> None:
        del self.queues[name]
        self.gone.append(name)
        self.deleted.append(name)


def quiet(_line: str) -> None:
    pass


def take(cluster: FakeCluster, store: Store, **options: bool) -> tuple[Manifest, Archive]:
    archive = Archive(store)
    with store.alone():
        return Taking(cluster, archive, quiet, **options).run(), archive


def restore(store: Store, target: FakeCluster, id: str = "", *, replace: bool = False) -> int:
    archive = Archive(store)
    manifest = archive.manifest(id or archive.ids()[-1])
    return Restoring(target, archive, manifest, quiet).run(replace=replace)


def test_a_chunk_that_ends_within_a_command_is_refused() -> None:
    assert count_of(command(5)) == 1
    with pytest.raises(StorageFault):
        list(commands_of(command(5)[:-8]))


def test_what_comes_back_is_what_was_there(tmp_path: Path) -> None:
    source = FakeCluster(a=list(range(10)), b=[], c=[5, 900_000])
    store = DirectoryStore(tmp_path / "store")
    manifest, _ = take(source, store)
    assert manifest.messages == 12
    target = FakeCluster(a=[], b=[], c=[])
    assert restore(store, target) == 12
    assert target.queues == source.queues
    with pytest.raises(PreconditionFailed, match=r"2 queues .* not empty: 'a' in vhost '/'"):
        restore(store, target)
    assert restore(store, target, replace=True) == 12
    assert target.queues == source.queues


def test_messages_behind_the_point_are_not_copied(tmp_path: Path) -> None:
    class Growing(FakeCluster):
        def page(self, vhost: str, name: str, after: int, upto: int) -> Page:
            found = super().page(vhost, name, after, upto)
            self.queues[name].append(self.queues[name][-1] + 1)
            return found

    manifest, _ = take(Growing(a=list(range(10))), DirectoryStore(tmp_path))
    assert (manifest.queues[0].upto, manifest.messages) == (9, 10)


def test_unchanged_parts_are_not_copied_again(tmp_path: Path) -> None:
    positions = [*range(20), *range(CHUNK_POSITIONS, CHUNK_POSITIONS + 20)]
    source = FakeCluster(a=positions)
    store = DirectoryStore(tmp_path)
    _, archive = take(source, store)
    assert archive.copied == 2
    source.queues["a"] = [*positions[3:], CHUNK_POSITIONS * 2]
    _, archive = take(source, store)
    assert archive.copied == 2
    _, archive = take(source, store)
    assert archive.copied == 0


def test_whole_chunks_of_streams_are_not_even_read_again(tmp_path: Path) -> None:
    source = FakeCluster(s=list(range(2 * CHUNK_POSITIONS + 5)))
    source.type, source.page_size = "stream", 5_000
    store = DirectoryStore(tmp_path)
    first, _ = take(source, store)
    source.asked.clear()
    source.queues["s"] = list(range(CHUNK_POSITIONS + 9, 2 * CHUNK_POSITIONS + 8))
    second, archive = take(source, store)
    assert archive.copied == 1
    assert source.asked[:2] == [-1, 2 * CHUNK_POSITIONS - 1]
    assert second.queues[0].chunks[0] == first.queues[0].chunks[1]
    # Another cluster may have a group of that number.
    source.cluster_id = "other"
    source.asked.clear()
    take(source, store)
    assert source.asked[1] == CHUNK_POSITIONS + 9 + 5_000 - 1


def test_a_queue_is_read_again_when_another_master_answers(tmp_path: Path) -> None:
    class Moving(FakeCluster):
        def page(self, vhost: str, name: str, after: int, upto: int) -> Page:
            if after >= 0 and not self.source:
                self.source = 2
            return super().page(vhost, name, after, upto)

    source = Moving(a=list(range(8)))
    manifest, _ = take(source, DirectoryStore(tmp_path))
    assert manifest.messages == 8
    assert source.asked.count(-1) == 2


def test_a_queue_that_cannot_be_read_fails_the_backup_or_is_named(tmp_path: Path) -> None:
    source = FakeCluster(a=[1], b=[2])
    source.gap = "a"
    store = DirectoryStore(tmp_path)
    with pytest.raises(Unavailable, match="no leader"):
        take(source, store)
    assert not Archive(store).ids()
    manifest, _ = take(source, store, skips=True)
    assert [(each.name, each.reason) for each in manifest.left_out] == [
        ("a", "queue 'a' has no leader")
    ]
    assert manifest.messages == 1


def test_an_interrupted_queue_begins_again_from_empty(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    take(FakeCluster(a=list(range(10))), store)
    target = FakeCluster(a=[])
    target.failures = 1
    assert restore(store, target) == 10
    assert target.queues["a"] == list(range(10))
    assert target.deleted == ["a"]
    target = FakeCluster(a=[])
    target.failures = 3
    with pytest.raises(Unavailable, match="queue 'a' in vhost '/': the connection was closed"):
        restore(store, target)


# --- interrupted and damaged ------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone."""


OPERATIONS = ("open", "fsync", "replace", "mkdir", "unlink", "listdir")


class Interrupting:
    """Ends every file operation from the n-th on, as a kill does, or fails it, as a full disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.error: Callable[[], BaseException] = Killed
        for name in OPERATIONS:
            self._wrap(monkeypatch, name, getattr(os, name))

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str, real: Any) -> None:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.left == 0:
                raise self.error()
            self.left -= 1
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)


@pytest.fixture
def interrupting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupting]:
    made = Interrupting(monkeypatch)
    yield made
    made.left = -1


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [Killed, full_disk])
def test_the_earlier_backup_stays_good_wherever_a_later_one_is_interrupted(
    tmp_path: Path, interrupting: Interrupting, error: Callable[[], BaseException]
) -> None:
    interrupting.error = error
    store = DirectoryStore(tmp_path)
    source = FakeCluster(a=[*range(10), CHUNK_POSITIONS + 1])
    good, _ = take(source, store)
    before = dict(source.queues)
    source.queues = {"a": [*range(4, 10), 2 * CHUNK_POSITIONS], "b": [1, 2]}
    steps = 0
    while True:
        interrupting.left = steps
        try:
            take(source, store)
        except (Killed, Unavailable):
            pass
        else:
            break
        finally:
            interrupting.left = -1
        steps += 1
        archive = Archive(store)
        assert archive.ids() == [good.id]
        assert archive.check(archive.manifest(good.id)) == []
    assert steps > 10
    target = FakeCluster(a=[], b=[])
    restore(store, target, good.id)
    assert target.queues == {**before, "b": []}
    target = FakeCluster(a=[], b=[])
    restore(store, target)
    assert target.queues == source.queues
    assert not list(tmp_path.glob("*/*.new"))


def test_damage_is_found_before_anything_is_restored(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    manifest, archive = take(FakeCluster(a=[1, 2], b=[3]), store)
    chunk = tmp_path / "chunks" / manifest.queues[1].chunks[0].sha256
    whole = chunk.read_bytes()
    target = FakeCluster(a=[], b=[])
    for at in range(len(whole)):
        chunk.write_bytes(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :])
        found = archive.check(manifest)
        assert found == [] or found[0].startswith("queue 'b' in vhost '/'"), at
        if not found:
            # A byte that does not change what is read.
            assert archive.read(manifest.queues[1].chunks[0]) == command(3)
    for broken in (whole[:-1], b"", whole[:5]):
        chunk.write_bytes(broken)
        with pytest.raises(StorageFault, match="the backup is damaged, nothing was restored"):
            restore(store, target)
    chunk.unlink()
    with pytest.raises(StorageFault, match="is missing"):
        restore(store, target)
    assert target.queues == {"a": [], "b": []}
    # The next backup copies it anew.
    again, _ = take(FakeCluster(a=[1, 2], b=[3]), store)
    assert restore(store, target, again.id) == 3


def test_a_damaged_manifest_is_told_and_passed_over(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    manifest, archive = take(FakeCluster(a=[1]), store)
    path = tmp_path / "backups" / manifest.id
    data = path.read_bytes()
    for broken in (data[:-1], data.replace(b'"a"', b'"z"'), b"", b"\n"):
        path.write_bytes(broken)
        with pytest.raises(StorageFault, match="is damaged: its checksum is wrong"):
            archive.manifest(manifest.id)
        with pytest.raises(StorageFault):
            archive.prune(1)
    assert take(FakeCluster(a=[1]), store)[0].messages == 1


def test_only_the_newest_backups_are_kept_with_their_chunks(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for number in range(4):
        take(FakeCluster(a=[number, CHUNK_POSITIONS]), store)
    archive = Archive(store)
    assert archive.prune(2) == 2
    assert len(archive.ids()) == 2
    assert len(store.names("chunks")) == 3
    assert all(not archive.check(archive.manifest(id)) for id in archive.ids())


def test_one_backup_at_a_time_goes_into_a_directory(tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(Unavailable, match="another backup"):
        take(FakeCluster(a=[1]), DirectoryStore(tmp_path))
    os.close(lock)


def test_ends_of_chunks_depend_on_positions_alone() -> None:
    cut: list[tuple[int, int]] = []

    def put(commands: bytes, messages: int, first: int, last: int) -> Any:
        cut.append((first, last))

    list(chunks_of([(at, command(at)) for at in (3, 9, CHUNK_POSITIONS - 1, CHUNK_POSITIONS)], put))
    assert cut == [(3, CHUNK_POSITIONS - 1), (CHUNK_POSITIONS, CHUNK_POSITIONS)]


# --- buckets ------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket of a service on loopback."""
    import boto3

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="saved")
    client.close()
    yield f"s3://saved/nightly?endpoint={endpoint}"
    server.stop()


def test_a_bucket_serves_as_a_directory_does(bucket: str) -> None:
    store = open_store(bucket)
    source = FakeCluster(a=list(range(10)))
    take(source, store)
    source.queues["a"].append(CHUNK_POSITIONS)
    _, archive = take(source, store)
    assert archive.copied == 1
    assert len(archive.ids()) == 2
    target = FakeCluster(a=[])
    assert restore(store, target) == 11
    assert archive.prune(1) == 1
    assert len(store.names("chunks")) == 2
    with pytest.raises(LookupError):
        store.get("backups/none")
    with pytest.raises(Unavailable, match="s3://nowhere"):
        open_store(bucket.replace("saved", "nowhere")).names("chunks")


def test_a_url_without_a_bucket_is_refused() -> None:
    with pytest.raises(Misuse, match="names no bucket"):
        open_store("s3://")
    assert issubclass(StorageFault, BrokerError)
