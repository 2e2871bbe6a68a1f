"""Messages that wait for a time in a queue: listed by its leader, cancelled by its log."""

from __future__ import annotations

from convoymq.broker.group_requests import AGAIN, DONE, NOT_LEADER, Answer, GroupRequests
from convoymq.broker.local_queues import LocalQueues
from convoymq.metadata.machine import QueueRecord
from convoymq.model.errors import PeerError
from convoymq.queues.interface import Queue, ScheduledMessage, ScheduledPlace

TIMEOUT_S = 5.0


class Scheduled:
    """See the module text. One per node."""

    def __init__(self, local: LocalQueues, requests: GroupRequests) -> None:
        self._local = local
        self._requests = requests
        requests.serve("scheduled", self._on_list)

    async def messages(
        self, queue: Queue, record: QueueRecord, after: ScheduledPlace | None, limit: int
    ) -> list[ScheduledMessage]:
        """Returns the delayed messages behind a place, in the order in which they are due.

        Raises:
            PreconditionFailed: messages do not wait in queues of this type.
            Unavailable: nobody leads the queue, or it did not answer in time.
        """
        queue.check_serves_delays()
        asked: list[object] = [] if after is None else list(after)
        found = await self._requests.ask_leader(
            record.group, record.members, "scheduled", asked, limit, timeout_s=TIMEOUT_S
        )
        if not isinstance(found, list):
            raise PeerError("malformed answer about messages that wait")
        return [ScheduledMessage(ScheduledPlace(*place), *rest) for place, *rest in found]

    async def _on_list(self, group: int, arguments: list[object]) -> Answer:
        after, limit = arguments
        assert isinstance(after, list)
        assert isinstance(limit, int)
        queue = self._local.led(group)
        if queue is None:
            return AGAIN, NOT_LEADER
        found = queue.scheduled(ScheduledPlace(*after) if after else None, limit)
        return DONE, [[list(each.place), *each[1:]] for each in found]
