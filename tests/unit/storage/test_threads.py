"""Storage on real files with its real threads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from convoymq.kernels.flusher import Flusher
from convoymq.model.config import RaftConfig
from convoymq.storage import threads
from convoymq.storage.files import RealDirectory
from convoymq.storage.store import Storage
from convoymq.storage.threads import (
    BULK_RATE,
    COPY_RATE,
    LOG_SHARE,
    WAITING_SHARE,
    DiskPace,
    ThreadWorker,
)
from convoymq.storage.types import GroupPlan, Snapshot
from tests.patience import PATIENCE_S
from tests.unit.storage.disk import Owner, entry_of

CONFIG = RaftConfig(
    wal_max_size_bytes=256 * 1024, mem_table_max_bytes=64 * 1024, snapshot_min_dead_bytes=4096
)


class RealNode:
    """A storage as a node's event loop runs it."""

    def __init__(self, path: Path) -> None:
        loop = asyncio.get_running_loop()
        self.loop = loop
        self.flusher = Flusher()
        self.worker = ThreadWorker(loop.call_soon_threadsafe)
        self.storage = Storage(RealDirectory(path), self.flusher, self.worker, CONFIG)
        loop.add_reader(self.flusher.fileno(), self.flusher.on_readable)
        self.report = self.storage.recover()

    async def close(self) -> None:
        closed = self.loop.create_future()
        self.storage.close(lambda: closed.set_result(None))
        await asyncio.wait_for(closed, PATIENCE_S)
        self.worker.close()
        self.loop.remove_reader(self.flusher.fileno())
        self.flusher.close()


async def until_written(node: RealNode, groups: list[int], index: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(node.storage.logs[g].written_index < index for g in groups):
            await asyncio.sleep(0)


@pytest.mark.parametrize("restarts", [1, 3])
async def test_entries_outlive_restarts_and_wal_compactions(tmp_path: Path, restarts: int) -> None:
    groups = [1, 2, 3]
    last = 0
    for _ in range(restarts):
        node = RealNode(tmp_path)
        storage = node.storage
        storage.owner = Owner(
            plan=lambda group, storage=storage: GroupPlan(
                live_ranges=[(1, 1)],
                applied=storage.logs[group].written_index,
                keep_from=storage.logs[group].written_index - 10,
                take_snapshot=lambda: Snapshot(
                    index=storage.logs[group].written_index,
                    term=1,
                    membership=b"",
                    state=b"%d" % group,
                ),
            )
        )
        assert not node.report.damages
        for group in groups:
            log = storage.open_group(group)
            assert log.last_index == last
        for i in range(last + 1, last + 601):
            for group in groups:
                storage.open_group(group).append(entry_of(group, i, 1, 1000))
            storage.kick()
            if i % 50 == 0:
                await until_written(node, groups, i)
        last += 600
        await until_written(node, groups, last)
        async with asyncio.timeout(PATIENCE_S):
            while storage.wal_files_waiting:
                await asyncio.sleep(0.001)
        assert storage.compacted_files > 3
        assert storage.memory_bytes < 2 * CONFIG.mem_table_max_bytes
        await node.close()
    node = RealNode(tmp_path)
    for group in groups:
        log = node.storage.logs[group]
        assert log.last_index == last
        assert log.entry(1).data == entry_of(group, 1, 1, 1000).data
        assert log.entry(last - 5).data == entry_of(group, last - 5, 1, 1000).data
        snapshot = log.read_snapshot()
        assert snapshot is not None
        assert snapshot.state == b"%d" % group
    await node.close()


def test_copies_take_the_speed_of_the_log_into_account(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(closing=False, others_wait=False)
    now, logged, pressed = 100.0, 0, False
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: now, sleep=slept.append)
    monkeypatch.setattr(threads, "time", clock)
    pace = DiskPace(worker, lambda: logged, lambda: pressed)  # type: ignore[arg-type]
    assert not pace.is_urgent()
    pace.rest(COPY_RATE)
    # A busy log: copies stay ahead of it.
    now, logged = 101.0, COPY_RATE
    assert not pace.is_urgent()
    pace.rest(COPY_RATE)
    worker.others_wait = True
    pace.rest(COPY_RATE)
    assert slept == [1.0, 1 / LOG_SHARE, 1 / LOG_SHARE / WAITING_SHARE]
    # A log that is filled in bulk, and one that was a moment ago.
    now, logged = 102.0, logged + 2 * BULK_RATE
    assert pace.is_urgent()
    now = 103.0
    assert not pace.is_urgent()
    pressed = True
    assert pace.is_urgent()
    pressed = False
    worker.closing = True
    assert pace.is_urgent()
