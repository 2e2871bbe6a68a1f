"""Synchronisation of mirrors: the master sends them what its log had before they came.

First goes what is settled, then the messages that are alive, in batches, of which some are on their
way at a time: mirrors store with one flush what came while the flush before lasted. How many bytes
they may have follows from the time until a batch is stored (ADR 0186). Batches are small, because
nothing else happens on the node while one is read and sent, and others have their turn between two.
The queue serves its clients meanwhile: what comes and goes while it lasts reaches the mirrors as it
does the others. The log keeps its files until the end.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator

from convoymq.queues.classic.log import HANDED_OUT, MESSAGES, SETTLED, Found
from convoymq.queues.classic.runs import Place
from convoymq.queues.mirrored.copy_index import Kept
from convoymq.queues.mirrored.instructions import SyncBegin, Synced, SyncEnd
from convoymq.queues.mirrored.log import BroadcastLog

BATCH_BYTES_MAX = 1 << 16
WINDOW_BYTES_MIN, WINDOW_BYTES_MAX = 1 << 17, 1 << 20
"""Bytes of batches that some mirror has not stored yet; one more batch may be under way."""
SLOWER = 3
"""So many times as long as the quickest batch may one take. When it takes longer, batches wait for
each other, and what else uses disk, network and processors waits for them."""
WORDS_MAX = BATCH_BYTES_MAX // 8
NO_PLACE = Place(0, 0, 0)


class Synchronisation:
    """See the module text.

    Args:
        log: its records up to now are sent, once `is_on_disk` says that they can be read.
        members: numbers of the mirrors.
        batch_size: messages in a batch; one that is larger in bytes ends sooner.
        unsaid: positions (first, last, …) that are gone, and the log does not say it.
        rate: returns the bytes in a second at most, as it is now; 0 = as many as mirrors take.
    """

    def __init__(
        self,
        log: BroadcastLog,
        members: list[int],
        batch_size: int,
        unsaid: array[int],
        *,
        rate: Callable[[], int] = int,
    ) -> None:
        self.members = members
        self.is_on_disk = False
        self.messages = 0
        """Messages that the mirrors got so far."""
        self._log = log
        self._batch_size = batch_size
        self._rate = rate
        self._bytes = 0
        """Bytes of the last batch."""
        self._from_ms = 0
        """Time from which the last batch counts, by the monotonic clock."""
        self._dead = Kept(0, 1 << 62, NO_PLACE, 0, [True])
        self._records = self._in_order(log.end, unsaid)
        self._sent: deque[tuple[int, int, int]] = deque()
        """(number, bytes, time) of the broadcasts with batches that some mirror has not stored."""
        self._unstored = 0
        """Bytes of them."""
        self._window = WINDOW_BYTES_MIN
        self._quickest_ms = 1 << 62
        log.holds = True
        log.tell(SyncBegin(members))

    def _in_order(self, end: tuple[int, int], unsaid: array[int]) -> Iterator[Found]:
        yield from self._settled(unsaid)
        for index in self._log.indexes(end):
            yield from self._settled(index.settled)
            for level, position in list(index.handed_out.items()):
                yield Found(HANDED_OUT, position, NO_PLACE, b"", level)
        for found in self._log.messages(end):
            if self._living(found):
                yield found

    def _settled(self, words: array[int]) -> Iterator[Found]:
        for at in range(0, len(words), WORDS_MAX):
            part = words[at : at + WORDS_MAX]
            for i in range(0, len(part), 2):
                self._dead.settle(part[i], part[i + 1])
            yield Found(SETTLED, 0, NO_PLACE, part.tobytes())

    def _living(self, found: Found) -> int:
        count = int.from_bytes(found.body[24:28], "little")
        dead = self._dead.settled_within(found.position, found.position + count - 1)
        return count - sum(last - first + 1 for first, last in dead)

    def wait_ms(self, now_ms: int) -> int | None:
        """Returns the time until the rate allows the next batch; None: mirrors must store some
        before, or the ring has no room."""
        if not self.is_on_disk or self._unstored >= self._window or not self._log.has_room:
            return None
        rate = self._rate()
        return max(self._from_ms + -(-self._bytes * 1000 // rate) - now_ms, 0) if rate else 0

    def step(self, now_ms: int) -> bool:
        """Sends the next batch if mirrors and rate allow it; returns False at the end."""
        if not self.is_on_disk:
            return True
        stored = self._log.confirms.stored
        self.members = [member for member in self.members if member in stored]
        if not self.members:
            return False
        least = min(stored[member] for member in self.members)
        while self._sent and self._sent[0][0] <= least:
            self._note_stored(*self._sent.popleft()[1:], now_ms)
        if self.wait_ms(now_ms) != 0:
            return True
        self._from_ms = now_ms
        return self._send()

    def _note_stored(self, size: int, sent_ms: int, now_ms: int) -> None:
        """Adapts the window to the time that a batch took."""
        self._unstored -= size
        # The clock counts milliseconds.
        took_ms = now_ms - sent_ms + 1
        self._quickest_ms = min(self._quickest_ms, took_ms)
        change = size if took_ms <= SLOWER * self._quickest_ms else -size
        self._window = min(max(self._window + change, WINDOW_BYTES_MIN), WINDOW_BYTES_MAX)

    def _send(self) -> bool:
        """Sends a batch; returns False when there are no more records."""
        log = self._log
        count = self._bytes = 0
        for found in self._records:
            if found.kind == MESSAGES:
                count += self._living(found)
            self._bytes += len(found.body)
            log.tell(Synced(found.kind, found.position, found.time_ms, found.body))
            if count >= self._batch_size or self._bytes >= BATCH_BYTES_MAX:
                break
        else:
            return False
        self.messages += count
        self._unstored += self._bytes
        self._sent.append((log.send(), self._bytes, self._from_ms))
        return True

    def end(self, depth: int) -> None:
        """Ends it, where it is."""
        self._log.holds = False
        self._log.tell(SyncEnd(depth))
        self._log.send()
        self._log.collect()
