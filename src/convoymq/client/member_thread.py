"""The thread of a group's member: carries out what its `GroupConsumer` asks for.

Only this thread touches the member and the connection. Other threads put outcomes into its inbox,
and read `leases`, which is replaced as a whole.

A request without an answer is sent again when the connection is lost or a server cannot do it now;
commands of partitions bear that. A server that leaves a heartbeat without an answer is given up for
the next one in time for the leases.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from convoymq.client import errors
from convoymq.client.config import ClientConfig
from convoymq.client.pipeline import Pipeline
from convoymq.client.topic_messages import COLUMNS, Content, Hashing, TopicMessage, contents_of
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.model.columnar import ErrorCode, Frame, Op
from convoymq.model.errors import InvariantViolated
from convoymq.topics.answers import (
    AckAnswer,
    FetchAnswer,
    GroupView,
    ParkAnswer,
    ParkedEntry,
    Record,
)
from convoymq.topics.commands import Ack, DoneParked, Park
from convoymq.topics.consumer import Fetch, GroupConsumer, Handle, Request
from convoymq.topics.cursor import Cursor
from convoymq.topics.heartbeats import Heartbeat, Leases
from convoymq.topics.leaseholder import SendHeartbeat
from convoymq.topics.refusals import Code

log = logging.getLogger(__name__)

FETCHES_MAX = 32
"""Fetches under way: a server works on 64 requests of a connection."""
SETTLES_MAX = 24
FETCH_WAIT_MS = 5_000
CROWDED_WAIT_MS = 50
"""The same for a member with more partitions than fetches under way."""
FETCH_BYTES = 1 << 20
RETRY_MS = 100
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
Place = tuple[int, int]
"""(partition, offset)."""


class LeaseView(NamedTuple):
    """A lease, as other threads see it."""

    epoch: int
    until_ms: int
    """Of the monotonic clock: so long it holds for certain."""
    revoked: bool
    """Given back when what runs has finished."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message for the application."""

    handle: Handle
    message: TopicMessage
    attempt: int


@dataclass(slots=True)
class _Stored:
    """A message that was fetched."""

    content: Content
    attempts: int = 0


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
        core: GroupConsumer,
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
        self._stored: dict[Lease, dict[Place, _Stored]] = {}
        """Messages, and heads of parked keys, until they are settled."""
        self._versions: dict[int, int] = {}
        """Partition -> the version that created it."""
        self._closes: dict[Lease, int] = {}
        self._fetches: deque[Fetch] = deque()
        self._fetching = 0
        self._requests: dict[int, Request] = {}
        """Commands without an answer, by number."""
        self._acks: dict[Lease, list[Request]] = {}
        """Acknowledgements that are to be sent together."""
        self._acking: set[Lease] = set()
        self._settles: deque[Request] = deque()
        self._settling = 0
        self._again: list[tuple[int, Request]] = []
        """(Time, command) to be sent again."""
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
        self._post(lambda: self._core.on_handled(handle, ok, now_ms()))

    def unhandled(self, handle: Handle) -> None:
        """The application does not begin with a message."""
        self._post(lambda: self._give_back(handle))

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
                self._core.on_unhandled(delivered.handle, now_ms())
        self._deliveries.put(None)

    def _turn(self) -> None:
        core = self._core
        while self._inbox:
            self._inbox.popleft()()
        now = now_ms()
        self._send_again(now)
        core.step(now)
        # Before messages: who takes one looks at its lease.
        self._show_leases()
        self._perform()
        if self._is_gone:
            return
        self._check_silence(now)
        due = min([core.due_ms(now), *(at for at, _ in self._again)])
        self._pipeline.poll(min(POLL_S, max(0, due - now_ms()) / 1000))
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
                    case Handle():
                        self._hand_out(action)
                    case Request():
                        self._request(action)
        # Also without an action: an answer may have made room.
        self._flush()
        self._wait_to_be_woken()

    def _show_leases(self) -> None:
        """Tells other threads of the leases, and forgets what belongs to ended ones."""
        held = self._core.held
        self.leases = {
            pid: LeaseView(each.epoch, each.until_ms, each.revoked) for pid, each in held.items()
        }
        for lease in [lease for lease in self._stored if not self._is_held(lease)]:
            del self._stored[lease]
        for lease in [lease for lease in self._closes if not self._is_held(lease)]:
            del self._closes[lease]
        for lease in [lease for lease in self._acks if not self._is_held(lease)]:
            for request in self._acks.pop(lease):
                del self._requests[request.number]

    def _is_held(self, lease: Lease) -> bool:
        held = self._core.held.get(lease[0])
        return held is not None and held.epoch == lease[1]

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

    def _hand_out(self, handle: Handle) -> None:
        if self._core.leaves:
            self._core.on_unhandled(handle, now_ms())
            return
        place = pid, offset = _place_of(handle)
        version = handle.token_version if _is_parked(handle) else self._versions[pid]
        stored = self._stored[handle.pid, handle.epoch][place]
        stored.attempts += 1
        late = handle.pid in self._late
        message = TopicMessage(stored.content, pid, offset, version, self._hashing, late)
        self._deliveries.put(Delivered(handle, message, stored.attempts))

    def _give_back(self, handle: Handle) -> None:
        stored = self._stored.get((handle.pid, handle.epoch), {}).get(_place_of(handle))
        if stored is not None:
            stored.attempts -= 1
        self._core.on_unhandled(handle, now_ms())

    def _flush(self) -> None:
        """Sends what waits for room."""
        crowded = len(self._core.held) > FETCHES_MAX
        while self._fetches and self._fetching < FETCHES_MAX:
            self._fetch(self._fetches.popleft(), CROWDED_WAIT_MS if crowded else FETCH_WAIT_MS)
        for lease in list(self._acks):
            if lease not in self._acking and self._settling < SETTLES_MAX:
                self._send_acks(lease, self._acks.pop(lease))
        while self._settles and self._settling < SETTLES_MAX:
            self._settle(self._settles.popleft())

    def _fetch(self, fetch: Fetch, wait_ms: int) -> None:
        self._fetching += 1
        fields: dict[str, object] = {
            "pid": fetch.pid,
            "group_epoch": fetch.group_epoch,
            "epoch": fetch.epoch,
            "offset": fetch.offset,
            "max_rows": max(1, fetch.count),
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
        held = self._core.held.get(fetch.pid)
        if code is Code.DATA_EXPIRED and held is not None and held.epoch == fetch.epoch:
            raise errors.DataExpired(
                f"partition {fetch.pid} of topic '{self._topic}' does not keep what group "
                f"'{self._core.group}' is to read next",
                code.value,
            )
        if answer is None or code is not Code.OK or held is None or held.epoch != fetch.epoch:
            self._core.on_fetched(fetch, FetchAnswer(code), now_ms())
            return
        lease = (fetch.pid, fetch.epoch)
        contents = _contents(answer)
        view = self._view(lease, answer, contents)
        records: list[Record] = []
        if view is None or not any(view.parked.values()):
            acked = held.acked if view is None else Cursor.load(view.acked)
            stored = self._stored.setdefault(lease, {})
            for offset, content in zip(_offsets(answer), contents, strict=True):
                if offset not in acked:
                    stored[fetch.pid, offset] = _Stored(content)
                    records.append(Record(offset, 0, content.key, 0, 0, 1, content.body or b""))
        self._versions[fetch.pid] = _number(answer, "version")
        if answer.map.get("late"):
            self._late.add(fetch.pid)
        else:
            self._late.discard(fetch.pid)
        close = _number(answer, "close")
        if close >= 0:
            self._closes[lease] = close
        found = FetchAnswer(code, tuple(records), _number(answer, "next"), view)
        self._core.on_fetched(fetch, found, now_ms())

    def _view(self, lease: Lease, answer: Frame, contents: list[Content]) -> GroupView | None:
        """Returns the view of an answer; heads of parked keys are its rows."""
        view = answer.map.get("view")
        if not isinstance(view, dict):
            return None
        parked: dict[bytes, ParkedEntry | None] = {}
        rows = iter(contents)
        for key, place in view["parked"]:
            parked[key] = None if place is None else self._head(lease, place, next(rows))
        return GroupView(tuple(view["acked"]), parked, view["park_version"])

    def _head(self, lease: Lease, place: list[int], content: Content) -> ParkedEntry:
        version, offset, pid = place
        self._stored.setdefault(lease, {})[pid, offset] = _Stored(content)
        return ParkedEntry(version, offset, pid, content.body or b"")

    # --- commands --------------------------------------------------------------------------

    def _request(self, request: Request) -> None:
        if request.number in self._requests:
            return
        self._requests[request.number] = request
        if isinstance(request.command, Ack):
            self._acks.setdefault((request.pid, request.epoch), []).append(request)
        else:
            self._settles.append(request)

    def _send_again(self, now: int) -> None:
        due = [request for at, request in self._again if at <= now]
        self._again = [each for each in self._again if each[0] > now]
        for request in due:
            self._request(request)
        if due:
            self._flush()

    def _fields(self, request: Request, kind: str) -> dict[str, object]:
        return {
            "pid": request.pid,
            "group_epoch": request.command.group_epoch,
            "epoch": request.epoch,
            "kind": kind,
            "member": self._core.member,
            "columns": COLUMNS,
        }

    def _send_acks(self, lease: Lease, requests: list[Request]) -> None:
        offsets = sorted(
            offset
            for request in requests
            if isinstance(request.command, Ack)
            for offset in request.command.offsets
        )
        ranges: list[int] = []
        for offset in offsets:
            if ranges and offset == ranges[-1] + 1:
                ranges[-1] = offset
            else:
                ranges += [offset, offset]
        self._acking.add(lease)
        self._settling += 1
        fields = {**self._fields(requests[0], "ack"), "ranges": ranges}
        self._send(Op.GROUP_SETTLE, fields, partial(self._on_acked, lease, requests))

    def _on_acked(self, lease: Lease, requests: list[Request], frame: Frame | None) -> None:
        self._acking.discard(lease)
        answer = self._settled(requests, frame)
        if answer is None:
            return
        told = AckAnswer(Code(answer.map.get("code")), bool(answer.map.get("drained")))
        stored = self._stored.get(lease, {})
        for request in requests:
            self._core.on_answer(request, told, now_ms())
            if isinstance(request.command, Ack):
                for offset in request.command.offsets:
                    stored.pop((request.pid, offset), None)

    def _settled(self, requests: list[Request], frame: Frame | None) -> Frame | None:
        """Counts commands as answered; without an answer they are sent again later."""
        self._settling -= 1
        for request in requests:
            del self._requests[request.number]
        answer = self._answer(frame)
        if answer is None:
            due = now_ms() + RETRY_MS
            self._again += [
                (due, each) for each in requests if self._is_held((each.pid, each.epoch))
            ]
        return answer

    def _settle(self, request: Request) -> None:
        self._settling += 1
        command = request.command
        if isinstance(command, Park):
            fields = {
                **self._fields(request, "park"),
                "offset": command.offset,
                "key": command.key,
                "follow": command.follow,
            }
        else:
            assert isinstance(command, DoneParked)
            fields = {
                **self._fields(request, "done"),
                "version": command.token.created_version,
                "offset": command.token.offset,
                "key": command.key,
                "failed": command.failed,
            }
        self._send(Op.GROUP_SETTLE, fields, partial(self._on_settled, request))

    def _on_settled(self, request: Request, frame: Frame | None) -> None:
        answer = self._settled([request], frame)
        if answer is None:
            return
        code = Code(answer.map.get("code"))
        lease = (request.pid, request.epoch)
        held = self._core.held.get(request.pid)
        if held is not None and code in (Code.OK, Code.DUPLICATE) and self._is_held(lease):
            work = held.lanes[request.lane].work
            if work is not None:
                pid = request.pid if work.parked is None else work.parked.pid
                self._stored.get(lease, {}).pop((pid, work.record.offset), None)
        place = answer.map.get("head")
        head = None
        if isinstance(place, list):
            (content,) = _contents(answer)
            head = self._head(lease, place, content)
        live, version = bool(answer.map.get("live")), _number(answer, "park_version")
        self._core.on_answer(request, ParkAnswer(code, live, head, version), now_ms())


def _is_parked(handle: Handle) -> bool:
    return isinstance(handle.record, ParkedEntry)


def _place_of(handle: Handle) -> Place:
    record = handle.record
    pid = record.pid if isinstance(record, ParkedEntry) else handle.pid
    return pid, record.offset


def _contents(answer: Frame) -> list[Content]:
    try:
        return contents_of(ColumnFrame(answer.payload))
    except ValueError as error:
        raise errors.ProtocolError(f"columnar frame: {error}") from error


def _offsets(answer: Frame) -> list[int]:
    return list(ColumnFrame(answer.payload).offsets())


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
