# cython: annotation_typing=False
"""A node's handle of a physical partition: publishers, commands, and reads of groups.

Commands go through one session of this node, to whoever leads, and are repeated until they are
answered. Groups read what is applied: from this node's replica once it has applied the lease of
the reader, otherwise from the leader. A fetch waits until there is something, or its time is over.

Requests between nodes, beside those of `stream.queue` (CONTROL frames of kind KIND_STREAM):

| request                                             | answer                               |
|-----------------------------------------------------|--------------------------------------|
| fetch · group, fields of `Fetch`                    | fetched · fields of `PackedFetched`  |
| describe · group                                    | described · `PartitionDescription`   |
| drained · group, consumer group, group epoch        | drained · whether                    |
| parked · group, consumer group, after, limit, bytes | parked · list of `ParkedRow`         |
| load · group, fields of `LoadQuestion`              | load · `LoadReport`                  |
| any of them                                         | away · text, as a stream's           |

A fetch that another node asks for is answered by the leader only: it alone knows of every lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Unpack

from convoymq.kernels import batch
from convoymq.model.clock import Timer
from convoymq.model.errors import BrokerError, Unavailable
from convoymq.model.refusals import missing
from convoymq.queues.interface import ClientEvents, QueueFeatures
from convoymq.queues.large_answers import LargeAnswers
from convoymq.queues.null_events import NullEvents
from convoymq.queues.reservation_reads import Fields
from convoymq.queues.stream.machine import StreamMachine
from convoymq.queues.stream.queue import (
    ANSWER_KINDS,
    ASK_TIMEOUT_MS,
    REMOTE_BYTES_MAX,
    Answer,
    AskNode,
    Found,
    StreamQueue,
    awaited,
)
from convoymq.topics.machine import reads
from convoymq.topics.machine.client import PartitionClient, Told
from convoymq.topics.machine.group_machine import FIRST_OFFSET, PartitionGroupMachine
from convoymq.topics.machine.load import IDLE_MS_MIN, LoadMeter, LoadQuestion, LoadReport
from convoymq.topics.machine.partition import Outcome
from convoymq.topics.machine.reads import (
    Fetch,
    Fetched,
    ParkedRow,
    PartitionDescription,
)
from convoymq.topics.rules.commands import Command
from convoymq.topics.rules.refusals import Code

if TYPE_CHECKING:
    from convoymq.queues.driver import Fence, GroupOptions

ASK_TIMEOUT_S = 5.0
PARKED_ROWS_MAX = 1000


class _WaitingFetch:
    """A fetch that found nothing."""

    __slots__ = ("answerable", "request", "timer")

    def __init__(self, request: Fetch, answerable: Callable[[], None]) -> None:
        self.request = request
        self.answerable = answerable
        self.timer: Timer | None = None

    def end(self) -> None:
        """Stops the timer, and answers."""
        if self.timer is not None:
            self.timer.cancel()
        self.answerable()


class PartitionQueue(StreamQueue):
    """A physical partition on this node; see the module text and `StreamQueue`."""

    type = "partition"
    answer_kinds = ANSWER_KINDS | {"fetched", "described", "drained", "parked", "load"}
    features = QueueFeatures(
        reads_by_offset=True,
        consumer_arguments=StreamQueue.features.consumer_arguments,
        unserved_consumer_arguments=StreamQueue.features.unserved_consumer_arguments,
    )

    def __init__(
        self,
        *,
        ask_node: AskNode,
        answers: LargeAnswers,
        fence: Fence | None = None,
        **common: Unpack[GroupOptions],
    ) -> None:
        super().__init__(ask_node=ask_node, answers=answers, **common)
        self._fence = fence
        # A publish that is given up while later ones of its key wait would be overtaken by them.
        self.limits = replace(self.limits, leaderless_publish_timeout_ms=0)
        #: Sends the commands of this node.
        self._teller: PartitionClient | None = None
        self._waiting_fetches: list[_WaitingFetch] = []
        self._meter: LoadMeter | None = None
        """Measures the load, while somebody asks for it."""

    # --- clients -------------------------------------------------------------------------

    def client(self, session: int, events: ClientEvents) -> PartitionClient:
        """Opens a publisher's or reader's command stream. `events` of a publisher are
        `PartitionPublisherEvents`."""
        made = super().client(session, events)
        assert isinstance(made, PartitionClient)
        return made

    def _new_client(self, session: int, events: ClientEvents) -> PartitionClient:
        return PartitionClient(self, session, events)

    def give_up(self) -> None:
        """The partition was sealed from outside; see `PartitionClient.give_up`."""
        for client in list(self._clients.values()):
            if client is not self._teller:
                client.give_up()

    # --- commands ------------------------------------------------------------------------

    def tell(self, command: Command, done: Told) -> None:
        """Has a command applied by whatever node leads, after those that this node told before.
        `done` gets its outcome, however long that takes; NotFound when the partition is
        deleted."""
        if self.deleted:
            done(None, missing(self.subject))
            return
        client = self._teller
        if client is None:
            client = self._teller = self.client(self.new_session(), NullEvents())
        client.tell(command, done)

    async def ask(self, command: Command, timeout_s: float = ASK_TIMEOUT_S) -> Outcome:
        """Returns the outcome of a command.

        Raises:
            Unavailable: no answer in time; it may be applied later.
            NotFound: the partition is deleted.
        """
        return await self._in_time(lambda done: self.tell(command, done), timeout_s)

    async def _in_time(self, ask: Callable[[Answer[Found]], None], timeout_s: float) -> Found:
        try:
            async with asyncio.timeout(timeout_s):
                return await awaited(ask)
        except TimeoutError:
            raise Unavailable(f"partition '{self.name}' did not answer in time") from None

    # --- reads of groups -----------------------------------------------------------------

    def machine(self) -> PartitionGroupMachine | None:
        """Returns the machine of this node's replica, unless it is behind."""
        found = super().machine()
        assert found is None or isinstance(found, PartitionGroupMachine)
        return found

    @property
    def leads(self) -> bool:
        """Returns whether this node's replica leads."""
        replica = self._host.replica(self.group)
        return replica is not None and replica.is_leader

    def fetch(self, request: Fetch, done: Answer[Fetched]) -> None:
        """Reads for a group's member; `done` may be called at once. Errors: Unavailable."""
        machine = self.machine()
        if machine is None or not (self.leads or self._has_lease(machine, request)):
            self._fetch_from_leader(request, done)
            return

        def answerable() -> None:
            try:
                found = self._fetch_now(request)
            except BrokerError as error:
                done(None, error)
            else:
                done(found, None)

        self._when_answerable(request, answerable)

    @staticmethod
    def _has_lease(machine: PartitionGroupMachine, request: Fetch) -> bool:
        """Returns whether a replica that does not lead has applied all that the reader knows: its
        lease comes behind what the owners before it acknowledged."""
        _, own = reads.group_of(machine.state, request)
        return own is not None and request.offset >= 0 and request.park_version <= own.park_version

    def _fetch_now(self, request: Fetch) -> Fetched:
        """Reads what is there. Raises Unavailable."""
        machine = self.machine()
        if machine is None:
            raise Unavailable(f"partition '{self.name}' has no replica here")
        state = machine.state
        code, own = reads.group_of(state, request)
        end = reads.messages_end(state)
        if own is None:
            return Fetched(code, [], request.offset, end, state.close_offset)
        view = state.view(request.group) if reads.wants_view(own, request) else None
        start = reads.start_of(state, own, request.offset)
        if start >= end or request.max_messages <= 0:
            return Fetched(Code.OK, [], start, end, state.close_offset, view)
        found, reader = self.read_now(
            start - FIRST_OFFSET, None, request.max_messages, request.max_bytes
        )
        self._keep_place(reader)
        runs = [run._replace(offset=run.offset + FIRST_OFFSET) for run in found.runs]
        next_offset = reader.offset + FIRST_OFFSET
        return Fetched(Code.OK, runs, next_offset, end, state.close_offset, view)

    def _when_answerable(self, request: Fetch, answerable: Callable[[], None]) -> None:
        """Calls back when the local replica has an answer to a fetch, or in time."""
        machine = self.machine()
        if request.wait_ms <= 0 or machine is None or reads.is_answerable(machine.state, request):
            answerable()
            return
        waiting = _WaitingFetch(request, answerable)
        waiting.timer = self.clock.call_later(request.wait_ms, self._waited_for_fetch, waiting)
        self._waiting_fetches.append(waiting)

    def _waited_for_fetch(self, waiting: _WaitingFetch) -> None:
        if waiting in self._waiting_fetches:
            self._waiting_fetches.remove(waiting)
            waiting.end()

    def _moved(self, machine: StreamMachine) -> None:
        super()._moved(machine)
        if not self._waiting_fetches:
            return
        assert isinstance(machine, PartitionGroupMachine)
        state = machine.state
        due = [each for each in self._waiting_fetches if reads.is_answerable(state, each.request)]
        for waiting in due:
            self._waited_for_fetch(waiting)

    def _end_waits(self) -> None:
        super()._end_waits()
        waiting, self._waiting_fetches = self._waiting_fetches, []
        for each in waiting:
            each.end()

    def on_leader(self, group: int, leader: int | None, term: int) -> None:
        """See `GroupQueue`; who waits for a leader's answer asks the next one."""
        super().on_leader(group, leader, term)
        self.on_member()
        if self._waiting_fetches:
            self._end_waits()
        if self._meter is not None and leader != self.node:
            self._end_metering()

    def on_member(self) -> None:
        if self._fence is not None:
            self._fence.follow(self)

    def on_deleted(self) -> None:
        super().on_deleted()
        if self._fence is not None:
            self._fence.forget(self)

    def _fetch_from_leader(self, request: Fetch, done: Answer[Fetched]) -> None:
        def answered(fields: Fields | None, error: BrokerError | None) -> None:
            if error is None:
                try:
                    assert fields is not None
                    done(reads.unpack_fetched(fields), None)
                    return
                except BrokerError as malformed:
                    error = malformed
            done(None, error)

        self._ask_member(
            ["fetch", self.group, *request], answered, leader=True, wait_ms=request.wait_ms
        )

    def forgettable_producers(self, before_ms: int) -> bool:
        """Returns whether there may be producers that sent nothing since a time: a node without a
        replica does not know."""
        machine = self.machine()
        if machine is None:
            return True
        assert isinstance(machine, PartitionGroupMachine)
        oldest_ms = machine.state.dedup.oldest_ms
        return oldest_ms is not None and oldest_ms < before_ms

    # --- looking at it -------------------------------------------------------------------

    def describe(self, done: Answer[PartitionDescription]) -> None:
        """`done` gets the state as the leader knows it, or else a member near by."""
        self._ask_best(["describe", self.group], _taken(PartitionDescription, done))

    async def description(self, timeout_s: float = ASK_TIMEOUT_S) -> PartitionDescription:
        """Returns what `describe` finds. Raises Unavailable."""
        return await self._in_time(self.describe, timeout_s)

    def drained(
        self, group: str, group_epoch: int, done: Answer[bool], *, whole: bool = False
    ) -> None:
        """`done` gets whether a group has drained the partition, as the leader knows it; `whole`:
        and has nothing parked there."""
        self._ask_member(
            ["drained", self.group, group, group_epoch, whole], _taken(bool, done), leader=True
        )

    def load(self, question: LoadQuestion, done: Answer[LoadReport]) -> None:
        """`done` gets the load of the partition; its leader measures it from the first question on,
        until none has come for a while."""
        self._ask_member(["load", self.group, *question], _taken(LoadReport, done), leader=True)

    async def parked(
        self, group: str, after: bytes = b"", limit: int = PARKED_ROWS_MAX
    ) -> list[ParkedRow]:
        """Returns parked keys of a group behind one, in their order, as many as fit into an answer.
        Raises Unavailable."""
        request: list[object] = ["parked", self.group, group, after, limit, REMOTE_BYTES_MAX]
        return await self._in_time(
            lambda done: self._ask_member(request, _taken(list[ParkedRow], done), leader=True),
            ASK_TIMEOUT_S,
        )

    # --- for other nodes -----------------------------------------------------------------

    def serve(
        self, request: Fields, answer: Callable[[list[object]], None], node: int | None = None
    ) -> None:
        """See `StreamQueue`. A fetch is read when the link to `node` has room for it."""
        if not request or request[0] != "fetch":
            super().serve(request, answer, node)
            return
        try:
            if not self.leads:
                raise Unavailable(f"node {self.node} does not lead partition '{self.name}'")
            fetch = reads.converted(request[2:], Fetch)
        except BrokerError as error:
            answer(["away", error.text])
            return
        answerable = partial(self._answer_fetch, fetch, answer)
        if node is not None:
            until_ms = self.clock.monotonic_ms() + fetch.wait_ms + ASK_TIMEOUT_MS
            answerable = partial(self._answers.when_room, node, answerable, until_ms)
        self._when_answerable(fetch, answerable)

    def _answer_fetch(self, fetch: Fetch, answer: Callable[[list[object]], None]) -> None:
        try:
            if not self.leads:
                raise Unavailable(f"node {self.node} does not lead partition '{self.name}'")
            bounded = fetch._replace(max_bytes=min(fetch.max_bytes, REMOTE_BYTES_MAX))
            found = self._fetch_now(bounded)
        except BrokerError as error:
            answer(["away", error.text])
            return
        runs = [
            (
                batch.slice_records(run.block, run.command, run.first, run.messages),
                run.messages,
                run.offset,
                run.time_ms,
            )
            for run in found.runs
        ]
        code, _, next_offset, end, close, view = found
        packed = reads.pack_view(view)
        answer(["fetched", code.value, runs, next_offset, end, close, packed])

    def _serve(self, request: Fields) -> list[object]:
        kind = request[0]
        if kind not in ("describe", "drained", "parked", "load"):
            return super()._serve(request)
        machine = self.machine()
        if machine is None:
            raise Unavailable(f"partition '{self.name}' has no replica here")
        if kind == "load":
            return ["load", self._load(machine, reads.converted(request[2:], LoadQuestion))]
        if kind == "describe":
            return ["described", reads.describe(machine)]
        if kind == "drained":
            _, _, group, epoch, whole = request
            own = machine.state.groups.get(group)
            known = own is not None and own.group_epoch == epoch
            return ["drained", known and machine.state.drained(group, whole=whole)]
        _, _, group, after, limit, size = request
        return ["parked", reads.parked_rows(machine.state, group, after, limit, size)]

    # --- load ------------------------------------------------------------------------------

    def _load(self, machine: PartitionGroupMachine, question: LoadQuestion) -> LoadReport:
        """Returns the load. Raises Unavailable: this node does not lead."""
        replica = self._host.replica(self.group)
        if replica is None or not replica.is_leader:
            raise Unavailable(f"node {self.node} does not lead partition '{self.name}'")
        now_ms = self.clock.now_ms()
        meter = self._meter
        if meter is not None and machine.load is not meter.counter:
            # The replica was opened anew.
            self._end_metering()
            meter = None
        if meter is None:
            meter = self._meter = LoadMeter(machine, question.logical, question.seed, now_ms)
            self._check_meter()
        is_replicated = all(
            node == self.node or self._host.is_replica_live(self.group, node)
            for node in replica.members
        )
        return meter.report(question, now_ms, is_replicated=is_replicated)

    def _check_meter(self) -> None:
        """Ends the measuring when nobody asks any more, else looks again later."""
        meter = self._meter
        if meter is None:
            return
        if meter.is_idle(self.clock.now_ms()) or self.deleted:
            self._end_metering()
        else:
            self.clock.call_later(IDLE_MS_MIN, self._check_if_current, meter)

    def _check_if_current(self, meter: LoadMeter) -> None:
        if self._meter is meter:
            self._check_meter()

    def _end_metering(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.close()


def _taken(kind: type[Found], done: Answer[Found]) -> Answer[Fields]:
    """Returns what takes the one field of an answer as a type."""

    def answered(fields: Fields | None, error: BrokerError | None) -> None:
        found: Found | None = None
        if error is None:
            try:
                assert fields is not None
                found = reads.converted(fields[0], kind)
            except BrokerError as malformed:
                error = malformed
        done(found, error)

    return answered
