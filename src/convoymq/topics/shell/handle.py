"""A node's handle of a topic, to which its exchange routes every message."""

from __future__ import annotations

from collections.abc import Callable

from convoymq.kernels.batch import PendingBudget
from convoymq.metadata.machine import TopicRecord
from convoymq.metadata.topic_settings import REFUSE, null_key_of
from convoymq.model.clock import Clock
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import Unavailable
from convoymq.model.refusals import exchange_subject, missing
from convoymq.queues.interface import ClientEvents, Queue, QueueFeatures, Row
from convoymq.topics.shell.measures import Durations
from convoymq.topics.shell.publisher import TopicPublisher


class TopicHandle(Queue):
    """See the module text and `Queue`. Consumers have handles of their groups.

    Args:
        group: a number that no queue has.
        find_partition: returns a partition's handle; None: it is not open here (yet).
    """

    type = "topic"
    features = QueueFeatures(answers_by_tags=True)

    def __init__(
        self,
        record: TopicRecord,
        group: int,
        *,
        clock: Clock,
        limits: DefaultsConfig,
        budget: PendingBudget,
        new_session: Callable[[], int],
        find_partition: Callable[[int], Queue | None],
    ) -> None:
        self.vhost = record.vhost
        self.name = record.name
        self.group = group
        self.record = record
        self.clock = clock
        self.limits = limits
        self.budget = budget
        self.new_session = new_session
        self.find_partition = find_partition
        self._publishers: set[TopicPublisher] = set()
        self._sent_again = 0
        self._pauses = Durations()

    def client(self, session: int, events: ClientEvents) -> TopicPublisher:
        made = TopicPublisher(self, session, events)
        self._publishers.add(made)
        return made

    def forget(self, publisher: TopicPublisher) -> None:
        """A publisher was closed, and everything has an outcome."""
        if publisher in self._publishers:
            self._publishers.discard(publisher)
            self._sent_again += publisher.sent_again
            self._pauses = self._pauses.plus(*publisher.pauses)

    @property
    def needs_key(self) -> bool:
        """Returns whether every message needs an order key."""
        return self.null_key == REFUSE

    @property
    def null_key(self) -> str:
        """Returns what becomes of messages without a key (`metadata.topic_settings`)."""
        return null_key_of(self.record.settings, self.record.mode)

    @property
    def sent_again(self) -> int:
        """Returns how many messages were refused by a partition, and sent to the next one."""
        return self._sent_again + sum(each.sent_again for each in self._publishers)

    @property
    def pauses(self) -> Durations:
        """Returns for how long ranges of keys stood still at changes."""
        made = self._pauses
        for each in self._publishers:
            made = made.plus(*each.pauses)
        return made

    def follow(self, record: TopicRecord) -> None:
        """The tree has this record by now."""
        self.record = record
        for publisher in list(self._publishers):
            publisher.on_route(record.state.route)

    def on_deleted(self) -> None:
        """The topic is gone."""
        self.ended = missing(exchange_subject(self.vhost, self.name))
        for publisher in list(self._publishers):
            publisher.on_deleted()

    async def ready(self, timeout: float) -> None:
        for pid in self.record.state.route.pids:
            partition = self.find_partition(pid)
            if partition is None:
                raise Unavailable(f"partition {pid} of topic '{self.name}' is not open here")
            await partition.ready(timeout)

    async def counts(self) -> tuple[int, int]:
        """See `Queue`: messages of the partitions of the newest route."""
        found = (self.find_partition(pid) for pid in self.record.state.route.pids)
        counts = [await each.counts() for each in found if each is not None]
        return sum(messages for messages, _ in counts), 0

    def info(self) -> Row:
        route = self.record.state.route
        return {
            "name": self.name,
            "vhost": self.vhost,
            "type": self.type,
            "route_version": route.version,
            "partitions": len(route.spans),
            "publishers": len(self._publishers),
            "sent_again": self.sent_again,
        }
