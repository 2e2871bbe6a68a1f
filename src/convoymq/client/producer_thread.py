"""The thread of a topic's producer: carries out what its core (`topics.rules.producer`) asks for.

Only this thread touches the core and the connection. Other threads put messages into its inbox, and
get their outcomes from futures.

Messages that are to be sent to one partition go together, in runs; a few such requests are under
way for each partition, so that one that waits holds up nobody else. A request whose answer is lost
is sent again with the same sequences, on the next server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from convoymq.client import errors
from convoymq.client.config import ClientConfig
from convoymq.client.pipeline import Pipeline
from convoymq.client.topic_rows import RowChunk, TopicRow, frame_of_rows
from convoymq.client.topics import route_of
from convoymq.model.columnar import ErrorCode, Frame, Op
from convoymq.model.errors import InvariantViolated
from convoymq.topics.rules.answers import ProduceAnswer
from convoymq.topics.rules.producer import Failed, RefreshRoute, SendRequest, Stored, TopicProducer
from convoymq.topics.rules.refusals import Code
from convoymq.topics.rules.routes import Span

log = logging.getLogger(__name__)

REQUESTS_MAX = 48
"""Under way: a server works on 64 requests of a connection."""
REQUESTS_OF_PARTITION_MAX = 4
ROWS_MAX = 4_000
BYTES_MAX = 512 << 10
"""Of one request, which may be larger when one message is."""
MAP_BYTES = 256 << 10
"""Room for the map of a request."""
REFRESH_WAIT_MS = 500
"""Longest wait of a server for a newer route."""
SILENCE_MS = 20_000
"""A server that leaves every request without an answer for so long is given up."""
TICK_MS = 5
POLL_S = 1.0
LASTING = frozenset((ErrorCode.NOT_FOUND, ErrorCode.ACCESS_REFUSED, ErrorCode.NOT_IMPLEMENTED))
"""Errors that another try does not change."""
NOBODY = ProduceAnswer(Code.NOT_LEADER)
"""Instead of an answer: the same again after a pause."""


class TopicReceipt(NamedTuple):
    """A message that is stored: its place among those of its producer. Of several that were sent
    together, that of the last."""

    lp: int
    """Logical partition."""
    seq: int
    """Number within the logical partition, from 1 in each session."""


@dataclass(slots=True)
class Sending:
    """A message without an outcome, or several of one logical partition that have one together."""

    lp: int
    row: TopicRow | RowChunk
    source_pos: bytes
    future: Future[TopicReceipt]
    seq: int = 0

    @property
    def last(self) -> int:
        """Returns the sequence of the last of them."""
        return self.seq + self.row.messages - 1


@dataclass(slots=True)
class _Run:
    """Messages of one logical partition in a request."""

    lp: int
    seq: int
    base: int
    source_pos: bytes = b""
    count: int = 0
    tickets: list[int] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    """First sequence of what each ticket is for."""


class ProducerThread(threading.Thread):
    """See the module text.

    Args:
        pending_max: messages without an outcome; then `has_room` is false.

    Attributes:
        positions: logical partition -> source position of the last message that is stored.
        failure: why the producer has ended; None while it goes on.
    """

    def __init__(
        self,
        config: ClientConfig,
        topic: str,
        core: TopicProducer,
        positions: dict[int, bytes],
        pending_max: int,
    ) -> None:
        super().__init__(name=f"producer of {topic}", daemon=True)
        self.positions = positions
        self._sent_positions = dict(positions)
        self.failure: BaseException | None = None
        self._topic = topic
        self._core = core
        self._pending_max = pending_max
        self._pipeline = Pipeline(config)
        self._inbox: deque[Sending] = deque()
        self._sleeps = False
        self._changed = threading.Condition()
        self._pending = 0
        self._ended = False
        self._sendings: dict[int, dict[int, Sending]] = {}
        """Logical partition -> first sequence -> messages without an outcome, in succession."""
        self._queued: dict[int, deque[SendRequest]] = {}
        self._under_way: dict[int, int] = {}
        self._alone: set[tuple[int, int]] = set()
        """(lp, sequence) of messages that are sent alone, to find out which one is refused."""
        self._errors: dict[int, Exception] = {}
        self._tick_ms = 0
        self._heard_ms = 0

    # --- other threads ---------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Returns the number of messages without an outcome."""
        return self._pending

    @property
    def has_room(self) -> bool:
        """Returns whether one more message may come."""
        return self._pending < self._pending_max or self.failure is not None

    def wait_for_room(self, timeout_s: float | None) -> bool:
        """Returns `has_room`, when it is or the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self.has_room, timeout_s)

    def wait_until_done(self, timeout_s: float | None) -> bool:
        """Returns whether everything has an outcome, when it has or the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def put(self, sending: Sending) -> None:
        """Takes a message.

        Raises:
            ClientError: the producer has ended.
            ValueError: its source position lies before that of an earlier message of its logical
                partition. Nothing is sent then.
        """
        with self._changed:
            if self.failure is not None:
                raise self.failure
            if position := sending.source_pos:
                last = self._sent_positions.get(sending.lp, b"")
                if position < last:
                    raise ValueError(
                        f"source position {position!r} falls: logical partition {sending.lp} has "
                        f"{last!r} already, and whoever goes on from there would miss the message"
                    )
                self._sent_positions[sending.lp] = position
            self._pending += sending.row.messages
            self._inbox.append(sending)
        if self._sleeps:
            self._pipeline.wake()

    def end(self) -> None:
        """Ends the thread; what has no outcome fails."""
        self._ended = True
        self._pipeline.wake()
        self.join()

    # --- the thread ------------------------------------------------------------------------

    def run(self) -> None:
        """Sends until the producer is closed, or fails."""
        failure: BaseException = errors.Unavailable("the producer is closed")
        try:
            while not self._ended:
                self._turn()
        except errors.ClientError as error:
            failure = error
        except (Exception, InvariantViolated) as error:
            log.exception("the producer of topic '%s' has failed", self._topic)
            failure = error
        finally:
            self._pipeline.close()
            self._end(failure)

    def _end(self, failure: BaseException) -> None:
        with self._changed:
            self.failure = failure
            left = [*self._inbox]
            self._inbox.clear()
        for sendings in self._sendings.values():
            left += sendings.values()
        for sending in left:
            sending.future.set_exception(failure)
        self._count_done(sum(sending.row.messages for sending in left))

    def _turn(self) -> None:
        core = self._core
        now = now_ms()
        while self._inbox:
            sending = self._inbox.popleft()
            row = sending.row
            sending.seq = core.send(sending.lp, row.key, now, sending.source_pos, row.messages)
            self._sendings.setdefault(sending.lp, {})[sending.seq] = sending
        if now >= self._tick_ms:
            core.tick(now)
            self._tick_ms = now + TICK_MS
        self._perform()
        self._flush()
        self._check_silence(now)
        self._sleeps = True
        wait_s = 0.0 if self._inbox else POLL_S
        if self._pending:
            wait_s = min(wait_s, TICK_MS / 1000)
        self._pipeline.poll(wait_s)
        self._sleeps = False
        if self._pipeline.refusal is not None:
            raise self._pipeline.refusal

    def _perform(self) -> None:
        while actions := self._core.take_actions():
            for action in actions:
                match action:
                    case SendRequest():
                        self._queued.setdefault(action.pid, deque()).append(action)
                    case RefreshRoute():
                        self._refresh()
                    case Stored(lp, seq):
                        self._stored(lp, seq)
                    case Failed(lp, seq, code):
                        self._failed(lp, seq, code)

    def _check_silence(self, now: int) -> None:
        if not self._pipeline.under_way:
            self._heard_ms = now
        elif now - self._heard_ms > SILENCE_MS:
            self._pipeline.drop()

    # --- outcomes --------------------------------------------------------------------------

    def _stored(self, lp: int, seq: int) -> None:
        sendings = self._sendings[lp]
        done = 0
        stored = [*takewhile(lambda sending: sending.last <= seq, sendings.values())]
        for sending in stored:
            del sendings[sending.seq]
            done += sending.row.messages
            if sending.source_pos:
                self.positions[lp] = sending.source_pos
            if self._alone:
                self._alone.discard((lp, sending.seq))
            sending.future.set_result(TopicReceipt(lp, sending.last))
        self._count_done(done)

    def _failed(self, lp: int, seq: int, code: Code) -> None:
        if code is Code.PRODUCER_FENCED:
            raise errors.ProducerFenced(
                f"topic '{self._topic}' has a newer session of this producer", code.value
            )
        error = self._errors.get(lp)
        if error is None:
            error = self._errors[lp] = errors.TopicRefused(
                f"logical partition {lp} of topic '{self._topic}' has not what was stored before",
                code.value,
            )
        sendings = self._sendings[lp]
        done = 0
        for failed in [sending for sending in sendings.values() if sending.seq >= seq]:
            del sendings[failed.seq]
            failed.future.set_exception(error)
            done += failed.row.messages
        self._count_done(done)

    def _count_done(self, count: int) -> None:
        if count:
            with self._changed:
                self._pending -= count
                self._changed.notify_all()

    # --- routes ----------------------------------------------------------------------------

    def _refresh(self) -> None:
        fields = {
            "topic": self._topic,
            "newer_than": self._core.route.version,
            "wait_ms": REFRESH_WAIT_MS,
            "lineage": False,
        }
        self._pipeline.send(Op.TOPIC_ROUTE, fields, self._on_route)

    def _on_route(self, frame: Frame | None) -> None:
        self._heard_ms = now_ms()
        route = self._core.route
        if frame is not None:
            _raise_lasting(frame)
            if not frame.status:
                route = route_of(frame.map).route
        self._core.on_route(route, self._heard_ms)

    # --- requests --------------------------------------------------------------------------

    def _flush(self) -> None:
        """Sends what waits, as far as there is room."""
        if not self._pipeline.is_connected:
            return
        for pid, queued in list(self._queued.items()):
            while (
                queued
                and self._under_way.get(pid, 0) < REQUESTS_OF_PARTITION_MAX
                and self._pipeline.under_way < REQUESTS_MAX
                and self._pipeline.is_connected
            ):
                self._send(pid, queued)
            if not queued:
                del self._queued[pid]

    def _send(self, pid: int, queued: deque[SendRequest]) -> None:
        """Sends messages of one partition in one request."""
        runs: list[_Run] = []
        rows: list[TopicRow | RowChunk] = []
        size = count = 0
        while queued and count < ROWS_MAX and size < BYTES_MAX:
            request = queued[0].request
            alone = bool(self._alone) and (request.lp, request.seq) in self._alone
            if alone and rows:
                break
            ticket = queued.popleft().ticket
            if self._core.is_stale(ticket):
                continue
            row = self._sendings[request.lp][request.seq].row
            last = runs[-1] if runs else None
            if last is None or (last.lp, last.seq + last.count) != (request.lp, request.seq):
                last = _Run(request.lp, request.seq, request.base)
                runs.append(last)
            last.tickets.append(ticket)
            last.seqs.append(request.seq)
            last.count += row.messages
            last.source_pos = request.source_pos
            rows.append(row)
            count += row.messages
            size += row.size
            if alone:
                break
        if rows:
            self._send_runs(pid, runs, rows)

    def _send_runs(self, pid: int, runs: list[_Run], rows: list[TopicRow | RowChunk]) -> None:
        core = self._core
        fields: dict[str, object] = {
            "topic": self._topic,
            "pid": pid,
            "producer": core.producer,
            "epoch": core.epoch,
            "runs": [(run.lp, run.seq, run.count, run.base, run.source_pos) for run in runs],
        }
        payload = frame_of_rows(rows)
        self._under_way[pid] = self._under_way.get(pid, 0) + 1
        if len(payload) + MAP_BYTES > self._pipeline.frame_max:
            self._refused(pid, runs, errors.PreconditionFailed("the message is too large"))
            return
        self._pipeline.send(Op.TOPIC_PRODUCE, fields, partial(self._on_answer, pid, runs), payload)

    def _on_answer(self, pid: int, runs: list[_Run], frame: Frame | None) -> None:
        self._heard_ms = now_ms()
        if frame is None:
            self._answer(pid, runs, [NOBODY] * len(runs))
            return
        _raise_lasting(frame)
        if frame.status == ErrorCode.PRECONDITION_FAILED:
            self._refused(pid, runs, errors.of_answer(frame.status, frame.map), frame.map.get("lp"))
        elif frame.status:
            self._answer(pid, runs, [NOBODY] * len(runs))
        else:
            self._answer(pid, runs, _answers(frame, len(runs)))

    def _answer(self, pid: int, runs: list[_Run], answers: Sequence[ProduceAnswer]) -> None:
        self._under_way[pid] -= 1
        for run, answer in zip(runs, answers, strict=True):
            for ticket in run.tickets:
                self._core.on_answer(ticket, answer, self._heard_ms)

    def _refused(
        self, pid: int, runs: list[_Run], error: errors.ClientError, lp: object = None
    ) -> None:
        """A request was refused as a whole. The message that is to blame fails with all behind it
        in its logical partition; the others are sent again."""
        if lp is None:
            if len(runs) == 1 and len(runs[0].tickets) == 1:
                lp = runs[0].lp
            else:
                self._alone |= {(run.lp, seq) for run in runs for seq in run.seqs}
        self._answer(pid, runs, [NOBODY] * len(runs))
        if isinstance(lp, int):
            self._errors[lp] = error
            self._core.fail(lp, Code.BAD_HASH)


def now_ms() -> int:
    """Returns the time by which the producer counts."""
    return time.monotonic_ns() // 1_000_000


def _raise_lasting(frame: Frame) -> None:
    if frame.status in LASTING:
        raise errors.of_answer(frame.status, frame.map)


def _answers(frame: Frame, count: int) -> list[ProduceAnswer]:
    """Returns the answer to each run. Raises ProtocolError."""
    match frame.map:
        case {"runs": list(rows), "to_version": int(version), "targets": list(spans)}:
            targets = tuple(_span(span) for span in spans)
            found = [_answer(row, version, targets) for row in rows]
        case _:
            raise errors.ProtocolError("answer that is none to runs")
    if len(found) != count:
        raise errors.ProtocolError(f"{len(found)} answers to {count} runs")
    return found


def _span(row: object) -> Span:
    match row:
        case [int(lo), int(hi), int(pid)]:
            return Span(lo, hi, pid)
        case _:
            raise errors.ProtocolError(f"{row!r} is no range of a partition")


def _answer(row: object, version: int, targets: tuple[Span, ...]) -> ProduceAnswer:
    match row:
        case [str(code), int(offset), int(_), int(expected)] if code in Code.__members__:
            return ProduceAnswer(Code(code), offset, expected, version, targets)
        case _:
            raise errors.ProtocolError(f"{row!r} is no answer to a run")
