"""Stores in memory, whose worker runs when a test says so."""

from __future__ import annotations

from convoymq.rocketmq.store.settings import StoreSettings
from convoymq.rocketmq.store.store import MessageStore
from convoymq.rocketmq.store.types import Draft, Message, Placed, PutStatus
from convoymq.storage.files import MemoryDirectory
from tests.unit.storage.inline import InlineWorker

HOST = bytes([127, 0, 0, 1, 0, 0, 42, 159])
SMALL = {"log_file_bytes": 8192, "queue_file_bytes": 400, "index_slots": 50, "index_units": 200}


class Opened:
    """A store on a disk in memory, with files of a few records."""

    def __init__(
        self,
        disk: MemoryDirectory | None = None,
        log: MemoryDirectory | None = None,
        **settings: object,
    ) -> None:
        self.disk = MemoryDirectory() if disk is None else disk
        self.worker = InlineWorker()
        self.now = 1_000_000
        self.store = MessageStore(
            self.disk, StoreSettings(**{**SMALL, **settings}), self.worker,  # type: ignore[arg-type]
            clock=lambda: self.now, store_host=HOST, log_directory=log,
        )  # fmt: skip
        self.report = self.store.open()

    def put(self, *drafts: Draft) -> list[Placed]:
        """Puts and stores messages."""
        placed = self.store.put(drafts, self.now)
        assert all(one.status is PutStatus.PUT_OK for one in placed), placed
        self.settle()
        return placed

    def settle(self) -> None:
        """Carries out everything that waits."""
        self.store.kick()
        while self.worker.run():
            self.store.kick()

    def bodies(self, topic: str, queue_id: int = 0, offset: int = 0) -> list[bytes]:
        """Returns the bodies of all messages of a queue from an offset on."""
        found = []
        while records := (got := self.store.get(topic, queue_id, offset, 32)).records:
            found += [bytes(Message(record).body) for record in records]
            offset = got.next
        return found

    def close(self) -> MemoryDirectory:
        """Ends in order; returns the disk."""
        self.settle()
        self.store.close()
        return self.disk
