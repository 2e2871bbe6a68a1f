"""TOPIC_PRODUCE and TOPIC_PRODUCER: producers of ordered topics with sequences of their own.

A request has messages of one partition, in runs: those of one logical partition with sequences in
succession. Range, session and sequence are decided when the partition applies them, so a client
may send again whatever it has no answer for. Here is looked at what no log entry decides: rights,
the form of the rows, and whether each order key belongs to the logical partition of its run.

Requests of one connection for one partition are appended in the order in which they came.
Sources: ordered topics, section 3; ADR 0066.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from convoymq.edges.columnar.fields import TopicProduce, TopicProducerSession, read
from convoymq.edges.columnar.producing import records_of
from convoymq.edges.columnar.turns import Slice
from convoymq.edges.stream_spans import COLUMNAR, StreamSpans
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.column_records import encode_enqueue, enqueue_flags
from convoymq.kernels.columns import ROUTING_KEY
from convoymq.kernels.ordered_runs import find_misplaced
from convoymq.model.columnar import ColumnarError, ErrorCode, Frame
from convoymq.model.errors import BrokerError, NotFound, PreconditionFailed, Unavailable
from convoymq.queues.message_properties import check_records
from convoymq.queues.null_events import NullEvents
from convoymq.topics.rules.answers import ProducerAnswer, RunAnswer, RunsAnswer
from convoymq.topics.rules.commands import OpenProducer, ProducedRun
from convoymq.topics.rules.lineage import PartitionState
from convoymq.topics.rules.refusals import Code, ProducerFenced
from convoymq.topics.shell.vocabulary import REFUSE, null_key_of

if TYPE_CHECKING:
    from convoymq.broker.records import TopicRecord
    from convoymq.edges.columnar.connection import FetchConnection
    from convoymq.edges.columnar.producing import Producing
    from convoymq.edges.columnar.topic_routes import TopicRoutes
    from convoymq.queues.interface import QueueClient
    from convoymq.topics.shell.vocabulary import PartitionClient, PartitionQueue

RUNS_MAX = 65_536
ASK_TIMEOUT_S = 5.0
CHANGE_WAIT_S = 0.05
"""Longest wait before a partition that a change goes on about is asked again."""

Place = tuple[str, int]
"""Topic and partition."""


class Portion(NamedTuple):
    """Runs that go to the partition in one command."""

    runs: list[ProducedRun]
    flags: int
    position: int
    body: bytes

    @property
    def rows(self) -> int:
        """Returns the number of messages."""
        return sum(run.messages for run in self.runs)


class TopicProducing(NullEvents):
    """The requests of producers with sequences on one connection."""

    def __init__(
        self, connection: FetchConnection, producing: Producing, routes: TopicRoutes
    ) -> None:
        self._connection = connection
        self._broker = connection.broker
        self._edge = connection.edge
        self._producing = producing
        self._routes = routes
        self._clients: dict[Place, PartitionClient] = {}
        self._turns: dict[Place, asyncio.Lock] = {}
        self._blocked: set[QueueClient] = set()
        self._progress = asyncio.Event()

    def sessions(self) -> list[int]:
        """Returns the sessions through which it publishes."""
        return [client.session for client in self._clients.values()]

    def close(self) -> None:
        """The connection is gone; what was appended goes on without it."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._progress.set()

    # --- TOPIC_PRODUCE ---------------------------------------------------------------------

    async def produce(self, frame: Frame) -> dict[str, object]:
        """Answers TOPIC_PRODUCE when the partition has decided about every run.

        Raises:
            ColumnarError, BrokerError: nothing was stored, unless the details have `maybe`.
        """
        request = read(TopicProduce, frame.map)
        record = self._writable(request.topic)
        place = request.topic, request.pid
        async with self._turns.setdefault(place, asyncio.Lock()):
            await self._producing.until_unblocked()
            columns = await self._producing.open_frame(frame.payload)
            runs = _runs(request, columns)
            queue = self._find(record, request.pid)
            if queue is None or record.state.is_end_unknown(request.pid):
                return _answer([_absent(record, request.pid, len(runs))])
            portions = await self._encode(record, queue, columns, runs)
            spans = StreamSpans.of(self._broker.spans, record.vhost, COLUMNAR)
            if spans is not None:
                for portion in portions:
                    spans.produced(portion.body, portion.rows, portion.position)
            waiting = [await self._append(place, queue, request, portion) for portion in portions]
        return await self._answered(waiting, spans)

    def _writable(self, topic: str) -> TopicRecord:
        """Returns a topic that the user may publish to. Raises AccessRefused, NotFound."""
        connection = self._connection
        connection.permissions.check("write", "exchange", topic)
        return self._routes.known(topic)

    def _find(self, record: TopicRecord, pid: int) -> PartitionQueue | None:
        found = self._broker.topic_parts.partitions.find(record.vhost, record.name, pid)
        return None if found is None or found.ended is not None else found

    async def _encode(
        self,
        record: TopicRecord,
        queue: PartitionQueue,
        columns: ColumnFrame,
        runs: list[ProducedRun],
    ) -> list[Portion]:
        """Checks the rows, and returns them as commands of whole runs. Raises BrokerError."""
        time = Slice(self._edge.turns)
        size = self._edge.settings.command_bytes
        key = None if columns.columns & ROUTING_KEY else b""
        portions: list[Portion] = []
        first = place = 0
        while place < len(runs):
            await time.check()
            room = columns.rows_within(first, size)
            taken = [runs[place]]
            rows = runs[place].messages
            while (
                place + len(taken) < len(runs) and rows + runs[place + len(taken)].messages <= room
            ):
                rows += runs[place + len(taken)].messages
                taken.append(runs[place + len(taken)])
            try:
                body, _, position = encode_enqueue(columns, first, rows, record.name.encode(), key)
            except ValueError as error:
                text = f"TOPIC_PRODUCE: {error}"
                raise ColumnarError(ErrorCode.PRECONDITION_FAILED, text) from None
            flags = enqueue_flags(columns, first, rows)
            check_records(flags, records_of(body, rows, position), (queue,))
            self._check_keys(record, taken, first, body, position)
            portions.append(Portion(taken, flags, position, body))
            first += rows
            place += len(taken)
        return portions

    @staticmethod
    def _check_keys(
        record: TopicRecord, runs: list[ProducedRun], first: int, body: bytes, position: int
    ) -> None:
        """Refuses a message whose order key does not belong to the logical partition of its run, or
        that has none. Raises ColumnarError."""
        lps, counts = [run.lp for run in runs], [run.messages for run in runs]
        keyless = null_key_of(record.settings, record.mode) != REFUSE
        found = find_misplaced(
            body, position, lps, counts, record.logical, record.hash_seed, keyless
        )
        if found is None:
            return
        row, computed = found
        at = row
        place = 0
        while at >= counts[place]:
            at -= counts[place]
            place += 1
        sent = lps[place]
        code = Code.NO_KEY if computed < 0 else Code.BAD_HASH
        if code is Code.NO_KEY:
            text = f"row {first + row} has no order key"
        else:
            text = (
                f"the key of row {first + row} belongs to logical partition {computed}, the sender "
                f"says {sent}: its hash function or seed is not the topic's"
            )
        details = {"topic_code": code.value, "row": first + row, "lp": sent}
        raise ColumnarError(ErrorCode.PRECONDITION_FAILED, text, details)

    async def _append(
        self, place: Place, queue: PartitionQueue, request: TopicProduce, portion: Portion
    ) -> asyncio.Future[RunsAnswer]:
        """Hands runs to the partition as soon as it takes them; returns what becomes of them."""
        client = await self._ready_client(place, queue)
        answered: asyncio.Future[RunsAnswer] = asyncio.get_running_loop().create_future()

        def done(answer: RunsAnswer | None, error: BrokerError | None) -> None:
            self._progress.set()
            if answered.done():
                return
            if answer is not None:
                answered.set_result(answer)
            elif isinstance(error, NotFound):
                # Its children know what it had stored.
                runs = (RunAnswer(Code.STALE_ROUTE),) * len(portion.runs)
                answered.set_result(RunsAnswer(runs))
            else:
                answered.set_exception(error or Unavailable("the partition did not answer"))

        enqueue = portion.flags, portion.rows, portion.position, portion.body
        client.produce(request.producer, request.epoch, portion.runs, enqueue, done)
        messages, vhost = self._edge.messages, self._connection.vhost
        messages.published_confirm += portion.rows
        messages.routed += portion.rows
        self._broker.publishing.count_published(messages, vhost, request.topic, (), portion.rows)
        return answered

    async def _ready_client(self, place: Place, queue: PartitionQueue) -> PartitionClient:
        """Returns this connection's stream into a partition, when it takes more. Raises
        Unavailable."""
        try:
            async with asyncio.timeout(self._edge.settings.request_timeout_s):
                while True:
                    client = self._clients.get(place)
                    if client is None or client.queue is not queue:
                        client = self._open(place, queue)
                    if client.takes_runs and client not in self._blocked:
                        return client
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            raise Unavailable(f"partition {place[1]} of topic '{place[0]}' is behind") from None

    def _open(self, place: Place, queue: PartitionQueue) -> PartitionClient:
        if len(self._clients) >= self._edge.settings.targets_max:
            for known, client in list(self._clients.items()):
                if not client.has_pending:
                    client.close()
                    del self._clients[known]
        before = self._clients.pop(place, None)
        if before is not None:
            before.close()
        made = self._clients[place] = queue.client(self._broker.new_session(), self)
        return made

    async def _answered(
        self, waiting: list[asyncio.Future[RunsAnswer]], spans: StreamSpans | None
    ) -> dict[str, object]:
        """Waits for the outcomes. Raises ColumnarError, with `maybe`."""
        try:
            async with asyncio.timeout(self._edge.settings.request_timeout_s):
                answers = [await each for each in waiting]
        except (TimeoutError, BrokerError) as error:
            for each in waiting:
                each.cancel()
            if spans is not None:
                spans.close()
            text = error.text if isinstance(error, BrokerError) else "the partition did not answer"
            raise ColumnarError(ErrorCode.UNAVAILABLE, text, {"maybe": True}) from None
        if spans is not None:
            codes = {run.code for answer in answers for run in answer.runs}
            spans.confirmed(lambda _: False, accepted=codes <= {Code.OK, Code.DUPLICATE})
        stored = sum(run.stored for answer in answers for run in answer.runs)
        self._edge.messages.confirmed += stored
        self._edge.counters.rows_in += stored
        return _answer(answers)

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        if blocked:
            self._blocked.add(client)
        else:
            self._blocked.discard(client)
            self._progress.set()

    # --- TOPIC_PRODUCER --------------------------------------------------------------------

    async def session(self, frame: Frame) -> dict[str, object]:
        """Answers TOPIC_PRODUCER: begins a session of a producer in every partition, or only says
        what is stored of the producer.

        Raises:
            ProducerFenced: there is a newer session.
            ColumnarError, BrokerError: it is refused. The session may have begun in some
                partitions: a repeat goes on.
        """
        request = read(TopicProducerSession, frame.map)
        self._writable(request.topic)
        epoch = request.epoch
        try:
            async with asyncio.timeout(self._edge.settings.request_timeout_s):
                if request.query or not epoch:
                    known, stored = await self._ask_all(request, 0)
                    if request.query:
                        return {"epoch": known, "stored": stored}
                    epoch = known + 1
                _, stored = await self._ask_all(request, epoch)
        except TimeoutError:
            raise Unavailable(f"not every partition of '{request.topic}' answered") from None
        return {"epoch": epoch, "stored": stored}

    async def _ask_all(
        self, request: TopicProducerSession, epoch: int
    ) -> tuple[int, list[list[object]]]:
        """Asks until a partition has answered for each range; what a change brings meanwhile has
        heard it from the ones before. Returns (newest epoch, rows of what is stored)."""
        stored: dict[int, tuple[int, bytes]] = {}
        covered: set[int] = set()
        newest = 0
        command = OpenProducer(request.producer, epoch)
        while True:
            record = self._routes.known(request.topic)
            route = record.state.route
            asked = [
                span for span in route.spans if not covered.issuperset(range(span.lo, span.hi))
            ]
            if not asked:
                rows = [[lp, seq, pos] for lp, (seq, pos) in sorted(stored.items())]
                return newest, rows
            answers = await asyncio.gather(
                *(self._ask(record, span.pid, command) for span in asked)
            )
            for span, answer in zip(asked, answers, strict=True):
                if answer is None or answer.code in (Code.NOT_OPEN, Code.CLOSED):
                    continue
                if answer.code is Code.PRODUCER_FENCED:
                    raise ProducerFenced(str(request.producer), epoch, answer.epoch)
                newest = max(newest, answer.epoch)
                stored.update({lp: (seq, pos) for lp, seq, pos in answer.stored})
                covered.update(range(span.lo, span.hi))
            if len(covered) < route.logical:
                await self._until_changed()

    async def _ask(
        self, record: TopicRecord, pid: int, command: OpenProducer
    ) -> ProducerAnswer | None:
        queue = self._find(record, pid)
        if queue is None:
            return None
        try:
            answer = await queue.ask(command, ASK_TIMEOUT_S)
        except (Unavailable, NotFound):
            return None
        assert isinstance(answer, ProducerAnswer)
        return answer

    async def _until_changed(self) -> None:
        try:
            async with asyncio.timeout(CHANGE_WAIT_S):
                await self._edge.route_watch().wait()
        except TimeoutError:
            pass


def _runs(request: TopicProduce, columns: ColumnFrame) -> list[ProducedRun]:
    """Returns the runs of a request. Raises PreconditionFailed: they do not fit its rows."""
    if not 1 <= len(request.runs) <= RUNS_MAX:
        raise PreconditionFailed(f"TOPIC_PRODUCE: {len(request.runs)} runs, 1 to {RUNS_MAX} may be")
    runs = [ProducedRun(*run) for run in request.runs]
    rows = sum(run.messages for run in runs)
    if rows != columns.rows:
        raise PreconditionFailed(f"TOPIC_PRODUCE: runs of {rows} messages, {columns.rows} rows")
    return runs


def _absent(record: TopicRecord, pid: int, runs: int) -> RunsAnswer:
    """Returns the answer for a partition that has no queue here: not yet, or not any more. One that
    was deleted is closed for good: the latest version has its range."""
    state = record.state
    known = state.lineage.partitions.get(pid)
    if known is not None and known.is_deleted:
        closed = (RunAnswer(Code.CLOSED),) * runs
        return RunsAnswer(closed, to_version=state.lineage.latest.version)
    change = state.running
    comes = (known is None and change is not None and pid in {t.pid for t in change.targets}) or (
        known is not None and known.state in (PartitionState.CREATING, PartitionState.OPEN)
    )
    code = Code.NOT_OPEN if comes else Code.STALE_ROUTE
    return RunsAnswer((RunAnswer(code),) * runs)


def _answer(answers: list[RunsAnswer]) -> dict[str, object]:
    """Returns the answer's map."""
    newest = max(answers, key=lambda answer: answer.to_version)
    return {
        "runs": [
            [run.code.value, run.offset, run.stored, run.expected]
            for answer in answers
            for run in answer.runs
        ],
        "to_version": newest.to_version,
        "targets": [[span.lo, span.hi, span.pid] for span in newest.targets],
    }
