"""A master's side of replication: links of slaves, sends that wait for them, and its life.

| link | is | counts |
|---|---|---|
| unchecked | a slave of RocketMQ's, which compares nothing | by what it reports |
| checked | a slave that compared its log in this session | the same, once for each broker id |

A master takes writes in a *life*, which begins when it has compared its log with as many slaves as
together have every acknowledged message, or its own log is whole anyway. Before that it fetches
what it lacks. Invariants: a report counts on its own link only; a slave that was not heard for
`silence_ms` counts nowhere; the log is never cut during a life; no slave has what the log has not
stored. Source: docs/adr/0155, 0185.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from convoymq.model.errors import PeerError, Refused, check
from convoymq.replication.group.lives import (
    Book,
    encode_lives,
    next_life,
    with_life,
)
from convoymq.replication.group.member import Member, tail_of
from convoymq.replication.group.stream import HEADER, SLAVE_ID_MAX, WordReader
from convoymq.replication.group.tails import STOPS, Step, common_end, master_step, whole_end
from convoymq.replication.group.types import (
    MASTER_ID,
    Ask,
    Fetch,
    GroupSettings,
    Log,
    Tail,
    Verdict,
)

WAITING_MAX = 1 << 17
FETCH_BYTES = 1 << 20
CHECKED_BLOCK_BYTES = 256 << 10
"""Size of a block for a checked slave."""
LINKS_MAX = 64
REFUSED_MAX = 64


@dataclass(slots=True)
class Link:
    """A slave's connection."""

    number: int
    host: str
    heard_ms: int
    sent_ms: int
    words: WordReader = field(default_factory=WordReader)
    slave: int | None = None
    """Broker id of a checked slave."""
    session: int | None = None
    address: str = ""
    """Address at which a checked slave answers."""
    acked: int = -1
    next: int = -1
    """Offset of the next block; -1 before the first report."""
    owes_lives: bool = False
    is_open: bool = True

    @property
    def is_known(self) -> bool:
        """Returns whether it has said who it is, and where its log ends."""
        return self.next >= 0

    @property
    def identity(self) -> object:
        """Returns what no other slave has."""
        return self.number + SLAVE_ID_MAX if self.slave is None else self.slave


@dataclass(slots=True)
class _Send:
    """A send that waits for slaves."""

    offset: int
    need: int
    deadline_ms: int
    done: Callable[[Verdict], None] | None


class Forked(PeerError):
    """Logs that nobody but an operator may join."""


class Master(Member):
    """See the module text. All times are of one monotonic clock, but for `wall_ms`.

    Args:
        save: persists the book; it is durable on return.
        is_intact: recovery found the log as the last run left it, or as it was flushed before each
            acknowledgement.
        session: a number that no other run of the process has.
    """

    def __init__(
        self,
        settings: GroupSettings,
        log: Log,
        book: Book,
        save: Callable[[Book], None],
        *,
        is_intact: bool,
        session: int,
    ) -> None:
        super().__init__(book, save)
        self.settings = settings
        self.log = log
        self.session = session
        self.takes_writes = False
        self.alive: int | None = None
        """Replicas that the name server lists; None: it was not asked."""
        self.links: dict[int, Link] = {}
        self.pushed = 0
        """Largest offset that any slave reported (`push2SlaveMaxOffset`)."""
        self.ended: deque[tuple[Link, str]] = deque()
        """Links to be closed, and why."""
        self._compared: set[object] = set()
        self._asked: dict[int, str] = {}
        """Slave -> its address, in the order of their questions."""
        self._homes: dict[int, str] = {}
        """Slave -> its address."""
        self._compare_due_ms = 0
        self.refused: dict[str, int] = {}
        """Host of an unchecked slave with a longer log -> the end of that log."""
        self._numbers = 0
        self._waiting: dict[int, list[tuple[int, int, _Send]]] = {}
        """Copies needed -> heap by offset."""
        self._by_deadline: deque[_Send] = deque()
        self._counter = 0
        if book.is_whole and not is_intact:
            self._write(Book(lives=book.lives))

    # --- life -------------------------------------------------------------------------------

    def tail(self, ask: Ask, slave: int, address: str) -> Tail:
        """Answers a slave's question; it may be asked in return (`next_to_compare`). Raises Refused
        while another slave of its id is linked."""
        for link in self.links.values():
            if link.slave == slave and link.address != address:
                raise Refused(f"slave {slave} is linked from {link.address}: {address} has its id")
        if slave in self._homes or len(self._homes) < LINKS_MAX:
            self._homes[slave] = address
        if slave in self._asked or len(self._asked) < LINKS_MAX:
            self._asked[slave] = address
        return tail_of(
            self.log, ask, MASTER_ID, self.session, self._book, takes_writes=self.takes_writes
        )

    def begin(self, wall_ms: int) -> bool:
        """Takes writes from now on, if enough slaves were compared; otherwise once they are, and
        this is called again."""
        if self.takes_writes:
            return True
        is_proven = self._book.is_whole or len(self._compared) >= self.settings.slaves_to_compare
        if not is_proven and self.settings.copies_min > 1:
            return False
        if self.log.stored < self.log.max_offset:
            # What was fetched: readers would be sent back, and offsets given twice.
            return False
        begin = self.log.max_offset
        life = next_life(self._book.lives, wall_ms, begin, is_proven)
        self._write(Book(lives=with_life(self._book.lives, life), is_whole=is_proven))
        self.takes_writes = True
        for link in self.links.values():
            link.owes_lives = link.slave is not None
        return True

    def step_down(self) -> None:
        """Another broker has the id of this master: it takes no writes until it has begun again.
        What that one wrote is not known, so that this log is not whole any more."""
        self.takes_writes = False
        self._compared.clear()
        for link in list(self.links.values()):
            self._end(link, "another broker has the master's id")
        self._write(Book(lives=self._book.lives))

    def compare(self) -> Generator[Ask | Fetch, Tail | bytes, Step]:
        """Compares with a slave, fetches what is missing here; yields questions to the slave and is
        sent its answers. One at a time. Raises Forked."""
        while not self.takes_writes:
            self._trim()
            common = yield from common_end(self.log)
            if self._goes_on_alone():
                break
            slave = common.other
            step = master_step(self.log, self._book.lives, common)
            if step in STOPS:
                raise Forked(f"broker {slave.member}: {step.value}, from {common.end} on")
            if step is Step.CUT:
                self._cut(common.end)
                continue
            if step is Step.FETCH:
                # What is whole stays so: what is fetched only adds to it.
                self._write(Book(lives=slave.lives, is_whole=self._book.is_whole))
                start = max(common.end, slave.min_offset)
                if not (yield from self._fetch(start, slave.max_offset)):
                    continue
            self._compared.add(slave.member)
            return step
        return Step.NOTHING

    def _goes_on_alone(self) -> bool:
        """Returns whether the life began while a slave was asked."""
        return self.takes_writes

    def next_to_compare(self, now_ms: int) -> str | None:
        """Returns the address of a slave with which to compare now, because the life cannot begin
        yet. What has asked is compared with again and again, while it is linked."""
        if self.takes_writes or now_ms < self._compare_due_ms:
            return None
        for slave, address in list(self._asked.items()):
            del self._asked[slave]
            if slave not in self._compared:
                self._compare_due_ms = now_ms + self.settings.wait_ms
                if any(link.slave == slave for link in self.links.values()):
                    self._asked[slave] = address
                return address
        return None

    def on_no_comparison(self, member: object) -> None:
        """A member is of RocketMQ's: it compares nothing, and what it has is not known."""
        self._compared.add(member)

    def _fetch(self, start: int, end: int) -> Generator[Fetch, bytes, bool]:
        while start < end:
            block: bytes = yield Fetch(offset=start, limit=min(FETCH_BYTES, end - start))
            if self.takes_writes or (self.log.max_offset not in (self.log.min_offset, start)):
                return False
            if not block:
                raise PeerError(f"a slave has nothing at {start} any more")
            self.log.append_raw(start, block[: end - start])
            start += len(block)
        return True

    def _trim(self) -> None:
        """Ends the log with a message: what fills up a file is no surplus."""
        end = whole_end(self.log)
        if end < self.log.max_offset:
            self._shorten(end)

    def _cut(self, offset: int) -> None:
        self._write(Book(lives=self._book.lives))
        self._shorten(offset)
        self._compared.clear()

    def _shorten(self, offset: int) -> None:
        check(not self.takes_writes, "a master's log is cut in its life")
        self.log.truncate(offset)
        self.session += 1
        for link in list(self.links.values()):
            self._end(link, "the log was cut")

    # --- links ------------------------------------------------------------------------------

    def on_connected(self, host: str, now_ms: int) -> Link | None:
        """A slave connected. None: one too many."""
        if len(self.links) >= LINKS_MAX:
            return None
        self._numbers += 1
        link = Link(self._numbers, host, now_ms, now_ms)
        self.links[link.number] = link
        return link

    def on_closed(self, link: Link) -> None:
        """A connection ended; what its slave reported counts no more."""
        link.is_open = False
        self.links.pop(link.number, None)

    def _end(self, link: Link, reason: str) -> None:
        if link.is_open:
            self.on_closed(link)
            self.ended.append((link, reason))

    def on_data(self, link: Link, data: bytes, now_ms: int) -> None:
        """Bytes of a slave arrived."""
        if link.is_open:
            link.heard_ms = now_ms
            for word in link.words.feed(data):
                self._on_word(link, word)
            self._advance()

    def _on_word(self, link: Link, word: int) -> None:
        if not link.is_open:
            return
        if link.slave is not None and link.session is None:
            link.session = word
            if word != self.session:
                self._end(link, "it compared with another run of this master")
        elif word < 0 and not link.is_known and link.slave is None:
            self._on_hello(link, -1 - word)
        else:
            self._on_report(link, word)

    def _on_hello(self, link: Link, slave: int) -> None:
        link.slave, link.address = slave, self._homes.get(slave, "")
        link.owes_lives = True
        if link.address and not self.takes_writes:
            # It asked before its link stood, and does not ask again.
            self._asked[slave] = link.address
        for other in list(self.links.values()):
            if other is not link and other.slave == slave:
                self._end(other, "the slave has connected again")

    def _on_report(self, link: Link, offset: int) -> None:
        if offset < 0 or (link.slave is not None and offset > self.log.max_offset):
            self._end(link, f"a report of {offset}")
            return
        if not link.is_known:
            if link.slave is None and not self._admit(link, offset):
                return
            link.next = self._start(link, offset)
        link.acked = max(link.acked, offset)
        self.pushed = max(self.pushed, offset)

    def _admit(self, link: Link, offset: int) -> bool:
        """Returns whether an unchecked slave's log can be a beginning of this one."""
        refused = self.refused.get(link.host)
        if offset > self.log.max_offset or (refused is not None and offset >= refused):
            if refused is None and len(self.refused) < REFUSED_MAX:
                self.refused[link.host] = offset
            self._end(link, f"its log ends at {offset}, behind this one's end")
            return False
        self.refused.pop(link.host, None)
        self._compared.add(link.host)
        return True

    def _start(self, link: Link, offset: int) -> int:
        """Returns where a slave's copy begins: RocketMQ's are not sent full files when they have
        nothing."""
        if offset:
            return offset
        if link.slave is not None:
            return self.log.min_offset
        end = self.log.max_offset
        return max(self.log.min_offset, end - end % self.log.file_bytes)

    def next_block(self, link: Link, now_ms: int) -> list[bytes | memoryview]:
        """Returns what to send to a slave now; empty: nothing."""
        if not link.is_open or not link.is_known:
            return []
        if link.owes_lives:
            link.owes_lives = False
            link.sent_ms = now_ms
            lives = encode_lives(self._book.lives)
            return [HEADER.pack(link.next, -len(lives)), lives]
        limit = self.settings.block_bytes_max
        if link.slave is not None:
            limit = max(limit, CHECKED_BLOCK_BYTES)
        offset = link.next
        parts = self._read(offset, limit)
        if parts:
            size = sum(map(len, parts))
            link.next += size
            link.sent_ms = now_ms
            return [HEADER.pack(offset, size), *parts]
        if now_ms - link.sent_ms >= self.settings.heartbeat_ms:
            link.sent_ms = now_ms
            return [HEADER.pack(offset, 0)]
        return []

    def _read(self, offset: int, limit: int) -> list[bytes | memoryview]:
        """Returns what the log has stored: a slave that acts must not hand out what this master
        does not find again after a crash."""
        parts: list[bytes | memoryview] = []
        limit = min(limit, self.log.stored - offset)
        while limit > 0:
            part = self.log.read_raw(offset, limit)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            limit -= len(part)
        return parts

    # --- sends ------------------------------------------------------------------------------

    def in_sync(self, now_ms: int) -> int:
        """Returns how many replicas are in sync, this master among them."""
        least = self.log.max_offset - self.settings.gap_bytes_max
        return 1 + len(
            {each.identity for each in self.links.values()
             if each.is_known and each.acked > least and self._is_heard(each, now_ms)}
        )  # fmt: skip

    def _is_heard(self, link: Link, now_ms: int) -> bool:
        return now_ms - link.heard_ms < self.settings.silence_ms

    def _needed(self, now_ms: int) -> tuple[int, int]:
        """Returns how many copies a send needs now, and how many there can be."""
        settings = self.settings
        if not settings.is_synchronous:
            return 1, 1
        there = self.in_sync(now_ms)
        if self.alive is not None:
            there = min(self.alive, there)
        if settings.auto:
            return max(settings.in_sync_min, min(settings.in_sync, there)), there
        return settings.in_sync, there

    def refusal(self, now_ms: int) -> Verdict | None:
        """Returns why nothing may be appended now."""
        if not self.takes_writes:
            return Verdict.NOT_ONLINE
        need, there = self._needed(now_ms)
        return Verdict.NOT_ENOUGH if self.settings.refuses and need > there else None

    def wait(
        self, offset: int, now_ms: int, timeout_ms: int, done: Callable[[Verdict], None]
    ) -> None:
        """Calls back once enough replicas have the log up to an offset, or the time is over."""
        need, _ = self._needed(now_ms)
        if need <= 1 or self._reached(need) >= offset:
            done(Verdict.OK)
        elif len(self._by_deadline) >= WAITING_MAX:
            done(Verdict.SLAVE_TIMEOUT)
        else:
            send = _Send(offset, need, now_ms + timeout_ms, done)
            self._counter += 1
            heappush(self._waiting.setdefault(need, []), (offset, self._counter, send))
            self._by_deadline.append(send)

    def _reached(self, need: int) -> int:
        """Returns up to where `need` copies of the log are confirmed, this master's among them."""
        acked: dict[object, int] = {}
        for link in self.links.values():
            acked[link.identity] = max(link.acked, acked.get(link.identity, -1))
        ends = sorted(acked.values(), reverse=True)
        return ends[need - 2] if len(ends) >= need - 1 else -1

    def _advance(self) -> None:
        for need, heap in self._waiting.items():
            reached = self._reached(need) if heap else -1
            while heap and heap[0][0] <= reached:
                self._resolve(heappop(heap)[2], Verdict.OK)

    def _resolve(self, send: _Send, verdict: Verdict) -> None:
        done, send.done = send.done, None
        if done is not None:
            done(verdict)

    def tick(self, now_ms: int) -> None:
        """Ends silent links, and sends whose time is over."""
        for link in list(self.links.values()):
            if not self._is_heard(link, now_ms):
                self._end(link, "it is silent")
        late = self._by_deadline
        while late and (late[0].done is None or late[0].deadline_ms <= now_ms):
            self._resolve(late.popleft(), Verdict.SLAVE_TIMEOUT)
        for heap in self._waiting.values():
            while heap and heap[0][2].done is None:
                heappop(heap)
