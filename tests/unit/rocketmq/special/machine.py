"""A broker's special services over a real store in memory: time, failures and crashes by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

from convoymq.rocketmq.acting.escape import KEY_PROPERTY, Key, key_of
from convoymq.rocketmq.special.levels import DelayLevels
from convoymq.rocketmq.special.log_view import StoreLog
from convoymq.rocketmq.special.outbox import Batch
from convoymq.rocketmq.special.pop import Pops
from convoymq.rocketmq.special.prepare import Preparation
from convoymq.rocketmq.special.state import Part, Saved, SpecialState
from convoymq.rocketmq.special.transactions import Check, Transactions
from convoymq.rocketmq.special.wheel import TimerWheel
from convoymq.rocketmq.store.types import Draft, Message, Placed, encode_properties
from tests.unit.rocketmq.store.stores import Opened

NAME, CLUSTER = "b", "c"
DELAYS_MS = (1000, 5000, 10_000)
START_MS = 1_700_000_000_000
SYSTEM = ("SCHEDULE", "rmq_sys_", "RMQ_SYS_", "%RETRY%", "TRANS_CHECK")


class Machine:
    """One broker. `kill` ends it as a crash does: the disk and what was saved last are left."""

    def __init__(self, *, now_ms: int = START_MS, is_acting: bool = False, **store: object) -> None:
        self.now_ms = now_ms
        self.is_acting = is_acting
        self.saved = Saved()
        self.positions: dict[tuple[str, str, int], int] = {}
        """Offsets of consumers."""
        self._saved_positions: dict[tuple[str, str, int], int] = {}
        self._store_settings = store
        self.born_ms = now_ms
        self.escaped: list[Draft] = []
        """What an acting slave has put at another broker."""
        self.checks: list[Check] = []
        self.fails: Callable[[Draft], bool] = lambda _draft: False
        self.opened = Opened(None, **store)
        self._make()
        if not is_acting:
            self.state.start(is_acting=False)

    def _make(self) -> None:
        self.opened.now = self.now_ms
        self.log = StoreLog(self.opened.store)
        read = self.log.read
        self.state = SpecialState(
            self.log, DelayLevels(NAME, DELAYS_MS, read), TimerWheel(NAME, read),
            Transactions(NAME, read), Pops(NAME, CLUSTER),
        )  # fmt: skip
        self.state.open(self.saved)
        self.opened.store.on_dispatched.append(self.state.on_record)
        self.prepare = Preparation(len(DELAYS_MS), lambda: self.now_ms)

    def kill(self) -> None:
        """Ends this broker, and starts it again."""
        self.opened = Opened(self.opened.disk, **self._store_settings)
        self.positions = dict(self._saved_positions)
        self._make()
        if not self.is_acting:
            self.state.start(is_acting=False)

    def save(self) -> None:
        """Writes the files."""
        self._take_positions()
        self._saved_positions = dict(self.positions)
        self.saved = self.state.saved(self.now_ms)

    def _take_positions(self) -> None:
        for place, offset in self.state.pops.take_positions().items():
            self.positions[place] = max(self.positions.get(place, 0), offset)

    def position(self, topic: str, group: str, queue: int = 0) -> int:
        """Returns how far a group is."""
        self._take_positions()
        return self.positions.get((topic, group, queue), 0)

    # --- messages --------------------------------------------------------------------------------

    def put(self, draft: Draft) -> Placed:
        """Stores a draft as it is."""
        self.opened.now = self.now_ms
        (placed,) = self.opened.put(draft)
        return placed

    def send(self, body: bytes, topic: str = "t", queue: int = 0, **properties: object) -> Placed:
        """Sends a message as a client does."""
        texts = {name: str(value) for name, value in properties.items()}
        # The clock of a client may be wrong.
        draft = Draft(topic, queue, body, encode_properties(texts), born_ms=self.born_ms)
        return self.put(self.prepare(draft))

    def messages(self, topic: str, queue: int = 0, offset: int = 0) -> list[Message]:
        """Returns all messages of a queue."""
        found: list[Message] = []
        while True:
            messages, following = self.log.read(topic, queue, offset, 32)
            found += messages
            if following == offset:
                return found
            offset = following

    def bodies(self, topic: str = "t", queue: int = 0) -> list[bytes]:
        """Returns the bodies of a queue."""
        return [bytes(message.body) for message in self.messages(topic, queue)]

    # --- time ------------------------------------------------------------------------------------

    def advance(self, ms: int, step_ms: int = 100) -> None:
        """Lets time pass, and the services work."""
        end_ms = self.now_ms + ms
        while self.now_ms < end_ms:
            self.now_ms = min(self.now_ms + step_ms, end_ms)
            self.tick()

    def tick(self, crash_after: int | None = None) -> bool:
        """Works once; returns whether it crashed: after so many puts, before they are settled."""
        batches, checks = self.state.tick(self.now_ms)
        self.checks += checks
        for part, batch in batches:
            count = 0
            for key in batch.keys:
                if crash_after == 0:
                    self.kill()
                    return True
                if not self._put_key(part, key):
                    break
                count += 1
                if crash_after is not None:
                    crash_after -= 1
            if crash_after is not None and crash_after <= 0 and count:
                self.kill()
                return True
            self.state.settle(part, batch, count, self.now_ms)
        self.state.check_invariants()
        return False

    def _put_key(self, part: Part, key: Key) -> bool:
        draft = self.draft(part, key)
        if draft is None:
            return True
        if self.fails(draft):
            return False
        if self.is_acting:
            self.escaped.append(draft)
        else:
            self.put(self.prepare(draft))
        return True

    def draft(self, part: Part, key: Key) -> Draft | None:
        """Returns what the service puts for a key."""
        if isinstance(part, Pops):
            wanted = part.wanted(key)
            if wanted is None:
                return None
            checkpoint, offset = wanted
            messages, _ = self.log.read(checkpoint.topic, checkpoint.queue, offset, 1)
            draft = part.draft(checkpoint, messages[0])
        else:
            found = part.draft(key, self.now_ms)
            if found is None:
                return None
            draft = found
        draft.properties += f"{KEY_PROPERTY}\x01{key}\x02".encode()
        return draft


def keys(messages: list[Message]) -> list[Key | None]:
    """Returns the keys of messages."""
    return [key_of(message.properties.get(KEY_PROPERTY, "")) for message in messages]


def seeded(seed: int) -> random.Random:
    """Returns numbers for a schedule, and prints the seed."""
    print(f"seed {seed}")
    return random.Random(seed)


__all__ = ["CLUSTER", "NAME", "START_MS", "Batch", "Machine", "keys", "seeded"]
