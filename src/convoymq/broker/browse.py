"""Looks at the ready messages of a queue, and carries out operations on chosen ones: asked for on
any node. The node that leads the queue answers; while nobody does, the replica here (ADR 0053)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from convoymq.broker.group_requests import AGAIN, DONE, NOT_LEADER, Answer, GroupRequests
from convoymq.broker.local_queues import LocalQueues
from convoymq.metadata.machine import QueueRecord
from convoymq.model.errors import (
    NotFound,
    PeerError,
    PreconditionFailed,
    ReservationRefused,
    Unavailable,
)
from convoymq.model.refusals import OLDER_NODES, missing, queue_subject
from convoymq.queues.interface import Queue
from convoymq.queues.quorum.browsing import (
    ROWS_MAX,
    Cursor,
    Filter,
    Page,
    Question,
    Row,
    page_of,
    plain_page,
    question_of,
)
from convoymq.queues.quorum.moves import EXCHANGE, FIRST, ORIGIN, QUEUE, RETRIES, MoveSpec
from convoymq.queues.quorum.operations import (
    CANCEL,
    CLAIM,
    NAME_BYTES_MAX,
    NO_OPERATION,
    OPERATION_DIFFERS,
    OPERATION_LIMIT,
    OPERATION_PART,
    RANGES_MAX,
    SPEC_BYTES_MAX,
    Summary,
)
from convoymq.queues.reservations import MALFORMED

LEADER_TIMEOUT_S = 5.0
Place: TypeAlias = tuple[int, int, int]
"""(entry index, command offset, record)"""

_TEXTS = {
    OPERATION_LIMIT: "the queue has too many operations that have not ended: cancel some",
    OPERATION_DIFFERS: "an operation of this name is under way, and asks for something else",
    OPERATION_PART: "another request goes on with this operation: ask again, or take another name",
    MALFORMED: "the queue's machine version knows no operations on chosen messages: they are served"
    " when all nodes run this release",
}


class Browsing:
    """See the module text. One per node."""

    def __init__(self, local: LocalQueues, requests: GroupRequests) -> None:
        self._local = local
        self._requests = requests
        requests.serve("browse", self._on_browse)
        requests.serve("message", self._on_message)
        requests.serve("operations", self._on_operations)

    async def page(self, record: QueueRecord, question: Question) -> Page:
        """Returns the next page of the ready messages of a queue.

        Raises:
            PreconditionFailed: the queue is no quorum queue.
            Unavailable: nobody leads it, and it cannot be read here.
        """
        self._check_type(record)
        try:
            found = await self._requests.ask_leader(
                record.group,
                record.members,
                "browse",
                question.pack(),
                timeout_s=LEADER_TIMEOUT_S,
            )
        except Unavailable:
            queue = self._local.queues.get(record.group)
            page = None if queue is None else await queue.browse_page(question)
            if page is None:
                raise
            return page
        return page_of(found)

    async def _on_browse(self, group: int, arguments: list[object]) -> Answer:
        queue = self._local.led(group)
        if queue is None:
            return AGAIN, NOT_LEADER
        page = await queue.browse_page(question_of(arguments[0]))
        if page is None:
            return AGAIN, "the replica is behind"
        return DONE, plain_page(page)

    async def message(self, record: QueueRecord, place: Place) -> bytes | None:
        """Returns the record of a message; None: it is not there any more. Raises as `page`."""
        self._check_type(record)
        found = await self._requests.ask_leader(
            record.group, record.members, "message", *place, timeout_s=LEADER_TIMEOUT_S
        )
        if found is not None and not isinstance(found, bytes):
            raise PeerError("malformed answer about a message")
        return found

    async def _on_message(self, group: int, arguments: list[object]) -> Answer:
        queue = self._local.led(group)
        if queue is None:
            return AGAIN, NOT_LEADER
        index, offset, number = arguments
        assert isinstance(index, int) and isinstance(offset, int)  # noqa: PT018
        assert isinstance(number, int)
        return DONE, queue.message_at((index, offset, number))

    @staticmethod
    def _check_type(record: QueueRecord) -> None:
        if record.type.value != "quorum":
            raise PreconditionFailed(f"Cannot browse a {record.type.value} queue")

    # --- operations ----------------------------------------------------------------------

    async def claim(
        self,
        record: QueueRecord,
        id: str,
        places: Sequence[Place],
        spec: bytes | None,
        first_part: int = 0,
    ) -> Summary:
        """Begins an operation, or goes on with one of this name: either with the same places, which
        are asked for in the same parts, or with other ones as further parts.

        Raises PreconditionFailed, NotFound, Unavailable: then it may be asked for again.
        """
        queue = self._queue(record)
        ranges = ranges_of(places)
        parts = [ranges[at : at + RANGES_MAX] for at in range(0, len(ranges), RANGES_MAX)] or [[]]
        summary: Summary = {}
        for number, part in enumerate(parts, first_part):
            if summary and (number < summary["parts"] or summary["sealed"]):
                # Asked for before.
                continue
            op: dict[str, object] = {
                "op": CLAIM,
                "operation": id,
                "part": number,
                "last": number == first_part + len(parts) - 1,
                "ranges": [each for found in part for each in found],
            }
            if spec is not None:
                op["spec"] = spec
            summary = await self._ask(queue, op)
        return summary

    async def cancel(self, record: QueueRecord, id: str) -> Summary:
        """Ends an operation. Raises as `claim`."""
        return await self._ask(self._queue(record), {"op": CANCEL, "operation": id})

    async def operations(self, record: QueueRecord) -> dict[str, tuple[Summary, str]]:
        """Returns (summary, what it waits for) of the operations of a queue, and of those that have
        ended lately, by name. Raises PreconditionFailed, Unavailable."""
        self._check_type(record)
        found = await self._requests.ask_leader(
            record.group, record.members, "operations", timeout_s=LEADER_TIMEOUT_S
        )
        if not isinstance(found, list):
            raise PeerError("malformed answer about operations")
        return {id: (summary, waits_for) for id, summary, waits_for in found}

    async def _on_operations(self, group: int, _arguments: list[object]) -> Answer:
        queue = self._local.led(group)
        if queue is None:
            return AGAIN, NOT_LEADER
        return DONE, [list(each) for each in queue.operations()]

    def _queue(self, record: QueueRecord) -> Queue:
        self._check_type(record)
        queue = self._local.find(record)
        if queue is None:
            raise Unavailable(f"{queue_subject(record.vhost, record.name)} is not open here yet")
        if queue.is_early:
            raise PreconditionFailed(f"Operations on messages are not served yet{OLDER_NODES}")
        return queue

    async def _ask(self, queue: Queue, op: Mapping[str, object]) -> Summary:
        try:
            return await queue.operation(op)
        except ReservationRefused as refused:
            if refused.reason == NO_OPERATION:
                raise NotFound("the operation is not known") from None
            if refused.reason == "deleted":
                raise missing(queue_subject(queue.vhost, queue.name)) from None
            raise PreconditionFailed(_TEXTS.get(refused.reason, refused.text)) from None


def ranges_of(places: Iterable[Place]) -> list[tuple[int, int, int, int]]:
    """Places as ranges of records, in their order."""
    made: list[tuple[int, int, int, int]] = []
    for index, offset, record in places:
        if made and made[-1][:2] == (index, offset) and made[-1][3] + 1 == record:
            made[-1] = (*made[-1][:3], record)
        else:
            made.append((index, offset, record, record))
    return made


__all__ = [
    "EXCHANGE",
    "FIRST",
    "NAME_BYTES_MAX",
    "ORIGIN",
    "QUEUE",
    "RETRIES",
    "ROWS_MAX",
    "SPEC_BYTES_MAX",
    "Browsing",
    "Cursor",
    "Filter",
    "MoveSpec",
    "Page",
    "Place",
    "Question",
    "Row",
    "Summary",
]
