"""One channel's command stream into a topic: publishes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Never

from convoymq.kernels.ordered_runs import OrderedTarget
from convoymq.metadata.topic_settings import SPREAD
from convoymq.model.errors import Misuse
from convoymq.queues.interface import (
    NO_MODIFICATION,
    ClientEvents,
    ConsumerSpec,
    Modification,
    PublishOutcome,
    QueueClient,
)
from convoymq.topics.rules.routes import Route
from convoymq.topics.shell.publishes import OrderedPublishes

if TYPE_CHECKING:
    from convoymq.topics.shell.handle import TopicHandle


class TopicPublisher(QueueClient):
    """See the module text. No queue name leads to a topic, so nobody consumes here."""

    def __init__(self, handle: TopicHandle, session: int, events: ClientEvents) -> None:
        self.queue = self._handle = handle
        self.session = session
        self._events = events
        record = handle.record
        self._publishes = OrderedPublishes(
            record.state.route,
            record.hash_seed,
            self,
            handle.clock,
            bytes_max=handle.limits.pending_bytes_max,
            budget=handle.budget,
            publisher=session,
        )
        if not handle.needs_key:
            target = self._publishes.target
            target.keyless_lp = int(handle.clock.random() * record.logical)
            target.spreads_keyless = handle.null_key == SPREAD

    @property
    def target(self) -> OrderedTarget:
        return self._publishes.target

    @property
    def has_pending(self) -> bool:
        return self._publishes.has_pending

    @property
    def sent_again(self) -> int:
        """Returns how many messages a partition refused."""
        return self._publishes.sent_again

    @property
    def pauses(self) -> tuple[int, int]:
        """Returns how often a range of keys stood still at a change, and for how many ms in all."""
        return self._publishes.pauses, self._publishes.paused_ms

    def on_route(self, route: Route) -> None:
        """The tree has this route by now."""
        self._publishes.on_route(route)

    def on_deleted(self) -> None:
        """The topic is gone."""
        self._publishes.end()

    def close(self) -> None:
        """See `QueueClient`. It stays until everything that was published has an outcome."""
        if not self._publishes.closed:
            self._publishes.close()

    # --- outcomes of publishes ------------------------------------------------------------

    def open_client(self, pid: int) -> QueueClient | None:
        """Returns a new client of a partition; None when it is not open on this node."""
        handle = self._handle
        partition = None if handle.ended is not None else handle.find_partition(pid)
        return (
            None if partition is None else partition.client(handle.new_session(), self._publishes)
        )

    def confirm(self, tags: Sequence[int], outcome: PublishOutcome) -> None:
        """Confirms publishes by their tags (first, last, …), or says that they failed."""
        self._events.on_published(self, tags, outcome)

    def flow(self, blocked: bool) -> None:
        """Has the channel stop, or go on, reading publishes."""
        self._events.on_flow(self, blocked)

    def is_deleted(self) -> bool:
        """Returns whether the topic is deleted."""
        return self._handle.ended is not None

    def finished(self) -> None:
        """Ends: the publishes were closed, and everything has an outcome."""
        self._handle.forget(self)

    # --- what only queues do -------------------------------------------------------------

    def settle(self, consumer: int, ranges: Sequence[int]) -> None:
        """Nothing was delivered."""
        assert not ranges

    def when_settled(self, call: Callable[[bool], None]) -> None:
        """See `QueueClient`: nothing was delivered."""
        call(True)

    def subscribe(self, spec: ConsumerSpec) -> None:
        """Not served."""
        self._refuse()

    def cancel(self, consumer: int) -> None:
        """Not served."""
        self._refuse()

    def set_credit(self, consumer: int, credit: int) -> None:
        """Not served."""
        self._refuse()

    def return_(
        self,
        consumer: int,
        ranges: Sequence[int],
        *,
        failed: bool,
        untried: bool = False,
        modification: Modification = NO_MODIFICATION,
    ) -> None:
        """Not served."""
        self._refuse()

    def discard(
        self, consumer: int, ranges: Sequence[int], *, failed: bool = False, error: bytes = b""
    ) -> None:
        """Not served."""
        self._refuse()

    def get(self, *, no_ack: bool) -> None:
        """Not served."""
        self._refuse()

    def purge(self) -> None:
        """Not served."""
        self._refuse()

    @staticmethod
    def _refuse() -> Never:
        raise Misuse("a topic is published to; consumers read it in groups")
