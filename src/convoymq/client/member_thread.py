"""The thread of a group's member: carries out what its `GroupMember` asks for.

Only this thread touches the member and the connection. Other threads put outcomes into its inbox,
and read `leases`, which is replaced as a whole.

A request without an answer is made again when the connection is lost or a server cannot do it now;
commands of partitions bear that. A server that leaves a heartbeat without an answer is given up for
the next one in time for the leases.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

from convoymq.client import errors
from convoymq.client.config import ClientConfig
from convoymq.client.pipeline import Pipeline
from convoymq.client.topic_messages import COLUMNS, Content, Hashing, TopicMessage, contents_of
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.model.columnar import ErrorCode, Frame, Op
from convoymq.model.errors import InvariantViolated
from convoymq.topics.rules.answers import AckAnswer, GroupView, ParkAnswer, ParkedEntry
from convoymq.topics.rules.commands import AckRanges, Park
from convoymq.topics.rules.heartbeats import Heartbeat, Leases
from convoymq.topics.rules.leaseholder import SendHeartbeat
from convoymq.topics.rules.member import Fetched, GroupMember, HandOut, HandOutParked
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.share import Fetch, Send, Share

log = logging.getLogger(__name__)

FETCHES_MAX = 32
"""Fetches under way: a server works on 64 requests of a connection."""
SETTLES_MAX = 24
FETCH_WAIT_MS = 5_000
CROWDED_WAIT_MS = 50
"""The same for a member with more partitions than fetches under way."""
FETCH_BYTES = 1 << 20
HEARTBEAT_RETRY_MS = 250
SILENCE_MS = 4_000
"""A server that leaves a heartbeat without an answer for so long is given up."""
LEFT_RETRY_MS = 20
"""Pause of a member that has left, until its group knows."""
WAKE_WAIT_MS = 30_000
POLL_S = 1.0
LASTING = frozenset((ErrorCode.ACCESS_REFUSED, ErrorCode.NOT_IMPLEMENTED))
"""Errors that another try does not change."""
MISSING_MS = 2_000
"""A group that is not found for so long is gone: a new leader may not know it yet."""

Lease = tuple[int, int]
"""(partition, epoch)."""


class LeaseView(NamedTuple):
    """A lease, as other threads see it."""

    epoch: int
    until_ms: int
    """Of the monotonic clock: so long it holds for certain."""
    revoked: bool
    """Given back when what runs has finished."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A message in the application's hands."""

    pid: int
    epoch: int
    offset: int
    key: bytes | None = None
    """Set for the head of a parked key."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message for the application."""

    handle: Handle
    message: TopicMessage
    attempt: int


@dataclass(frozen=True, slots=True)
class Contents:
    """Neighbouring messages, see `topics.rules.batches.Batch`."""

    offset: int
    contents: Sequence[Content]

    @property
    def messages(self) -> int:
        """Returns the number of messages."""
        return len(self.contents)

    @property
    def size(self) -> int:
        """Returns the bytes of the bodies."""
        return sum(len(content.body or b"") for content in self.contents)

    def hashes(self) -> bytes:
        """Returns 8 bytes for each message: a hash of its key, which means nothing elsewhere."""
        keys = (content.key for content in self.contents)
        return array("q", (hash(key) | 1 if key else 0 for key in keys)).tobytes()

    def key(self, offset: int) -> bytes:
        """Returns the order key of a message."""
        return self.contents[offset - self.offset].key

    def copy(self, offset: int) -> bytes:
        """Returns nothing: a server takes what it parks from the log."""
        return b""


class Head(ParkedEntry):
    """The head of a parked key, with its message."""

    content: Content


def now_ms() -> int:
    """Returns the time by which the member counts."""
    return time.monotonic_ns() // 1_000_000


class MemberThread(threading.Thread):
    """See the module text.

    Args:
        deliveries: gets the messages, and None when no more come.
    """

    def __init__(
        self,
        config: ClientConfig,
        topic: str,
        core: GroupMember,
        hashing: Hashing,
        deliveries: queue.SimpleQueue[Delivered | None],
    ) -> None:
        super().__init__(name=f"{topic}/{core.group}", daemon=True)
        self.leases: dict[int, LeaseView] = {}
        self.failure: BaseException | None = None
        self._topic = topic
        self._core = core
        self._hashing = hashing
        self._deliveries = deliveries
        self._pipeline = Pipeline(config)
        self._inbox: deque[Callable[[], None]] = deque()
        self._ended = threading.Event()
        self._late: set[int] = set()
        """Partitions that the group had skipped."""
        self._versions: dict[int, int] = {}
        """Partition -> the version that created it."""
        self._closes: dict[Lease, int] = {}
        self._fetches: deque[Fetch] = deque()
        self._fetching = 0
        self._settles: deque[Send] = deque()
        self._settling = 0
        self._beat_ms = -1
        """Time at which the heartbeat without an answer was sent; -1: none is under way."""
        self._beat_again = False
        """Another one was due meanwhile."""
        self._is_member = True
        self._is_waiting = False
        self._wait_due_ms = 0
        self._missing_ms = -1
        """First of the answers in succession that the group is not found; -1: there is none."""

    # --- other threads ---------------------------------------------------------------------

    def holds(self, handle: Handle) -> bool:
        """Returns whether the lease of a message holds for certain."""
        lease = self.leases.get(handle.pid)
        return lease is not None and lease.epoch == handle.epoch and now_ms() < lease.until_ms

    def is_lost(self, handle: Handle) -> bool:
        """Returns whether the lease of a message has ended."""
        lease = self.leases.get(handle.pid)
        return lease is None or lease.epoch != handle.epoch

    def may_start(self, handle: Handle) -> bool:
        """Returns whether the application may begin with a message."""
        lease = self.leases.get(handle.pid)
        return lease is not None and not lease.revoked and self.holds(handle)

    def handled(self, handle: Handle, *, ok: bool) -> None:
        """The application has finished with a message."""
        self._post(lambda: self._settle(handle, ok=ok))

    def unhandled(self, handle: Handle) -> None:
        """The application does not begin with a message."""
        self._post(lambda: self._settle(handle, unused=True))

    def leave(self) -> None:
        """Leaves the group; what the application has not taken it does not get any more."""
        self._post(self._leave)

    def end(self, timeout_s: float) -> None:
        """Waits until the group has everything back, so long at most, and ends the thread."""
        self.join(timeout_s)
        self._ended.set()
        self._pipeline.wake()
        self.join(timeout_s)

    def _post(self, call: Callable[[], None]) -> None:
        self._inbox.append(call)
        self._pipeline.wake()

    # --- the thread ------------------------------------------------------------------------

    def run(self) -> None:
        """Serves the member until it is gone."""
        try:
            while not self._ended.is_set() and not self._is_gone:
                self._turn()
        except errors.ClientError as error:
            self.failure = error
        except (Exception, InvariantViolated) as error:
            log.exception("the member of group '%s' has failed", self._core.group)
            self.failure = error
        finally:
            self.leases = {}
            self._pipeline.close()
            self._deliveries.put(None)

    @property
    def _is_gone(self) -> bool:
        return self._core.is_gone and not self._is_member

    def _leave(self) -> None:
        self._core.leave(now_ms())
        while not self._deliveries.empty():
            try:
                delivered = self._deliveries.get_nowait()
            except queue.Empty:
                break
            if delivered is not None:
                self._settle(delivered.handle, unused=True)
        self._deliveries.put(None)

    def _settle(self, handle: Handle, *, ok: bool = False, unused: bool = False) -> None:
        core, now, offset = self._core, now_ms(), handle.offset
        lease = handle.pid, handle.epoch
        if handle.key is not None:
            core.on_parked_done(*lease, handle.key, now, ok=ok, unused=unused)
        elif ok:
            core.on_acknowledged(*lease, offset, offset, now)
        else:
            core.on_returned(*lease, offset, offset, now, unused=unused)

    def _turn(self) -> None:
        core = self._core
        while self._inbox:
            self._inbox.popleft()()
        now = now_ms()
        core.step(now)
        # Before messages: who takes one looks at its lease.
        self._show_leases()
        self._perform()
        if self._is_gone:
            return
        self._check_silence(now)
        self._pipeline.poll(min(POLL_S, max(0, core.due_ms(now) - now_ms()) / 1000))
        if self._pipeline.refusal is not None:
            raise self._pipeline.refusal

    def _perform(self) -> None:
        core = self._core
        while actions := core.take_actions():
            for action in actions:
                match action:
                    case SendHeartbeat(heartbeat):
                        self._send_heartbeat(heartbeat)
                    case Fetch():
                        self._fetches.append(action)
                    case HandOut():
                        self._hand_out(action)
                    case HandOutParked():
                        self._hand_out_parked(action)
                    case Send():
                        self._settles.append(action)
        # Also without an action: an answer may have made room.
        self._flush()
        self._wait_to_be_woken()

    def _show_leases(self) -> None:
        """Tells other threads of the leases, and forgets what belongs to ended ones."""
        held = self._core.held
        self.leases = {
            pid: LeaseView(each.epoch, each.until_ms, each.revoked) for pid, each in held.items()
        }
        for lease in [lease for lease in self._closes if self._share(*lease) is None]:
            del self._closes[lease]

    def _share(self, pid: int, epoch: int) -> Share | None:
        share = self._core.held.get(pid)
        return share if share is not None and share.epoch == epoch else None

    def _send(
        self, op: Op, fields: dict[str, object], done: Callable[[Frame | None], None]
    ) -> None:
        self._pipeline.send(op, {"topic": self._topic, "group": self._core.group, **fields}, done)

    def _answer(self, frame: Frame | None) -> Frame | None:
        """Returns an answer that is no error; None: another try may have one. Raises ClientError:
        none will."""
        if frame is None:
            return None
        if not frame.status:
            self._missing_ms = -1
            return frame
        missing = frame.status == ErrorCode.NOT_FOUND
        if missing and self._missing_ms < 0:
            self._missing_ms = now_ms()
        if frame.status in LASTING or (missing and now_ms() >= self._missing_ms + MISSING_MS):
            raise errors.of_answer(frame.status, frame.map)
        return None

    # --- leases ----------------------------------------------------------------------------

    def _send_heartbeat(self, beat: Heartbeat) -> None:
        if self._beat_ms >= 0:
            # The one under way is answered first, or its server is given up.
            self._beat_again = True
            return
        self._beat_again = False
        self._beat_ms = beat.sent_ms
        fields = {
            "member": beat.member,
            "sent_ms": beat.sent_ms,
            "group_epoch": beat.group_epoch,
            "held": [number for lease in beat.held.items() for number in lease],
            "released": [number for lease in beat.released.items() for number in lease],
            "leaves": beat.leaves,
        }
        self._send(Op.GROUP_HEARTBEAT, fields, self._on_leases)

    def _on_leases(self, frame: Frame | None) -> None:
        self._beat_ms = -1
        now = now_ms()
        answer = self._answer(frame)
        if answer is None:
            self._core.heartbeat_due_ms = now + HEARTBEAT_RETRY_MS
            return
        flat = _numbers(answer, "leases")
        leases = Leases(
            self._core.member,
            _number(answer, "sent_ms"),
            _number(answer, "group_epoch"),
            dict(zip(flat[::2], flat[1::2], strict=True)),
            frozenset(_numbers(answer, "revoked")),
        )
        self._core.on_leases(leases, now)
        self._is_member = bool(answer.map.get("is_member"))
        if self._beat_again:
            self._core.heartbeat_due_ms = now + 1
        if self._core.is_gone and self._is_member:
            self._core.heartbeat_due_ms = now + LEFT_RETRY_MS

    def _check_silence(self, now: int) -> None:
        if 0 <= self._beat_ms < now - SILENCE_MS:
            self._pipeline.drop()

    def _wait_to_be_woken(self) -> None:
        """Has a server say when the next heartbeat would be answered otherwise than the last."""
        waits = self._is_waiting or now_ms() < self._wait_due_ms
        if waits or not self._pipeline.is_connected:
            return
        self._is_waiting = True
        fields = {"member": self._core.member, "wait_ms": WAKE_WAIT_MS}
        self._send(Op.GROUP_WAKE, fields, self._on_woken)

    def _on_woken(self, frame: Frame | None) -> None:
        self._is_waiting = False
        now = now_ms()
        answer = self._answer(frame)
        if answer is None:
            self._wait_due_ms = now + HEARTBEAT_RETRY_MS
        # One within the same millisecond would be taken for the last one. After a change of server
        # the coordinator has to hear where this member is.
        if answer is None or answer.map.get("woken"):
            self._core.heartbeat_due_ms = min(self._core.heartbeat_due_ms, now + 1)

    # --- messages --------------------------------------------------------------------------

    def _hand_out(self, action: HandOut) -> None:
        batch, version = action.batch, self._versions[action.pid]
        assert isinstance(batch, Contents)
        for offset in range(action.first, action.end):
            handle = Handle(action.pid, action.epoch, offset)
            content = batch.contents[offset - batch.offset]
            self._deliver(handle, content, action.pid, version, action.failures)

    def _hand_out_parked(self, action: HandOutParked) -> None:
        head = action.entry
        assert isinstance(head, Head)
        handle = Handle(action.pid, action.epoch, head.offset, action.key)
        self._deliver(handle, head.content, head.pid, head.version, action.failures)

    def _deliver(
        self, handle: Handle, content: Content, pid: int, version: int, failures: int
    ) -> None:
        if self._core.leaves:
            self._settle(handle, unused=True)
            return
        late = handle.pid in self._late
        message = TopicMessage(content, pid, handle.offset, version, self._hashing, late)
        self._deliveries.put(Delivered(handle, message, failures + 1))

    def _flush(self) -> None:
        """Sends what waits for room."""
        crowded = len(self._core.held) > FETCHES_MAX
        while self._fetches and self._fetching < FETCHES_MAX:
            self._fetch(self._fetches.popleft(), CROWDED_WAIT_MS if crowded else FETCH_WAIT_MS)
        while self._settles and self._settling < SETTLES_MAX:
            self._send_command(self._settles.popleft())

    def _fetch(self, fetch: Fetch, wait_ms: int) -> None:
        share = self._share(fetch.pid, fetch.epoch)
        if share is None or share.asked is not fetch:
            return
        self._fetching += 1
        fields: dict[str, object] = {
            "pid": fetch.pid,
            "group_epoch": fetch.group_epoch,
            "epoch": fetch.epoch,
            "offset": fetch.offset,
            "max_rows": fetch.count,
            "max_bytes": FETCH_BYTES,
            "park_version": fetch.park_version,
            "close_offset": self._closes.get((fetch.pid, fetch.epoch), -1),
            "wait_ms": wait_ms,
            "columns": COLUMNS,
        }
        self._send(Op.GROUP_FETCH, fields, partial(self._on_fetched, fetch))

    def _on_fetched(self, fetch: Fetch, frame: Frame | None) -> None:
        self._fetching -= 1
        answer = self._answer(frame)
        code = Code.NOT_LEADER if answer is None else Code(answer.map.get("code"))
        share = self._share(fetch.pid, fetch.epoch)
        if code is Code.DATA_EXPIRED and share is not None:
            raise errors.DataExpired(
                f"partition {fetch.pid} of topic '{self._topic}' does not keep what group "
                f"'{self._core.group}' is to read next",
                code.value,
            )
        if answer is None or code is not Code.OK or share is None:
            self._core.on_fetched(fetch, Fetched(code), now_ms())
            return
        contents = _contents(answer)
        view = _view(answer, contents)
        # Heads of parked keys come without messages.
        heads = view is not None and any(view.parked.values())
        batches = [] if heads else list(_batches(answer, contents))
        self._versions[fetch.pid] = _number(answer, "version")
        if answer.map.get("late"):
            self._late.add(fetch.pid)
        else:
            self._late.discard(fetch.pid)
        close = _number(answer, "close")
        if close >= 0:
            self._closes[fetch.pid, fetch.epoch] = close
        found = Fetched(code, batches, _number(answer, "next"), view)
        self._core.on_fetched(fetch, found, now_ms())

    # --- commands --------------------------------------------------------------------------

    def _send_command(self, request: Send) -> None:
        if self._share(request.pid, request.epoch) is None:
            return
        self._settling += 1
        command = request.command
        fields: dict[str, object] = {
            "pid": request.pid,
            "group_epoch": command.group_epoch,
            "epoch": request.epoch,
            "member": self._core.member,
            "columns": COLUMNS,
        }
        if isinstance(command, AckRanges):
            fields |= {"kind": "ack", "ranges": list(command.ranges)}
        elif isinstance(command, Park):
            fields |= {
                "kind": "park",
                "offset": command.offset,
                "key": command.key,
                "follow": command.follow,
            }
        else:
            fields |= {
                "kind": "done",
                "version": command.token.created_version,
                "offset": command.token.offset,
                "key": command.key,
                "failed": command.failed,
            }
        self._send(Op.GROUP_SETTLE, fields, partial(self._on_answer, request))

    def _on_answer(self, request: Send, frame: Frame | None) -> None:
        self._settling -= 1
        answer = self._answer(frame)
        told: AckAnswer | ParkAnswer | None = None
        if answer is not None:
            code = Code(answer.map.get("code"))
            if isinstance(request.command, AckRanges):
                told = AckAnswer(code, bool(answer.map.get("drained")))
            else:
                place = answer.map.get("head")
                head = None
                if isinstance(place, list):
                    (content,) = _contents(answer)
                    head = _head(place, content)
                live, version = bool(answer.map.get("live")), _number(answer, "park_version")
                told = ParkAnswer(code, live, head, version)
        self._core.on_answer(request, told, now_ms())


def _view(answer: Frame, contents: list[Content]) -> GroupView | None:
    """Returns the view of an answer; heads of parked keys are its rows."""
    view = answer.map.get("view")
    if not isinstance(view, dict):
        return None
    rows = iter(contents)
    parked: dict[bytes, ParkedEntry | None] = {
        key: None if place is None else _head(place, next(rows)) for key, place in view["parked"]
    }
    return GroupView(tuple(view["acked"]), parked, view["park_version"])


def _head(place: list[int], content: Content) -> Head:
    version, offset, pid = place
    head = Head(version, offset, pid, b"")
    head.content = content
    return head


def _batches(answer: Frame, contents: list[Content]) -> Iterator[Contents]:
    """Yields the messages of an answer as runs of neighbours."""
    placed = enumerate(zip(ColumnFrame(answer.payload).offsets(), contents, strict=True))
    for _, run in groupby(placed, lambda each: each[1][0] - each[0]):
        rows = [row for _, row in run]
        yield Contents(rows[0][0], [content for _, content in rows])


def _contents(answer: Frame) -> list[Content]:
    try:
        return contents_of(ColumnFrame(answer.payload))
    except ValueError as error:
        raise errors.ProtocolError(f"columnar frame: {error}") from error


def _number(answer: Frame, name: str) -> int:
    found = answer.map.get(name)
    if not isinstance(found, int):
        raise errors.ProtocolError(f"answer without {name}")
    return found


def _numbers(answer: Frame, name: str) -> list[int]:
    found = answer.map.get(name)
    if not isinstance(found, list) or not all(isinstance(each, int) for each in found):
        raise errors.ProtocolError(f"answer without {name}")
    return found
