"""A member of a consumer group of an ordered topic, with key lanes.

    servers ──▶ Pipeline ──▶ thread of the member ──▶ deliveries ──▶ threads of the application
                              GroupMember decides    ◀── outcomes ──

The member decides by `topics.rules.member.GroupMember`: heartbeats and leases, one message of a key
at a time, repeats, parking. Its thread sends what it asks for, through whatever server can be
reached: leases are the member's own and outlast a server. Acknowledgements gather while one of
their partition is under way. The application's code runs in its own threads.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType

from convoymq.client import errors
from convoymq.client.client import Client, Start
from convoymq.client.member_thread import Delivered, Handle, LeaseView, MemberThread
from convoymq.client.topic_messages import Hashing, TopicMessage
from convoymq.topics.rules.hashing import logical_partition
from convoymq.topics.rules.member import GroupMember, Lanes

log = logging.getLogger(__name__)

LANES = 16
WINDOW = 1_000
WINDOW_BYTES = 16 << 20
RETRIES = 4
RETRY_MS = 100
CLOSE_TIMEOUT_S = 10.0


class TopicDelivery(TopicMessage):
    """A message that is delivered. It waits for `ack` or `nack`; a handler that returns has
    acknowledged it, and one that raises has not."""

    __slots__ = ("_consumer", "_handle", "_settled", "attempt", "epoch")

    def __init__(self, delivered: Delivered, consumer: TopicConsumer) -> None:
        message = delivered.message
        super().__init__(
            message.content,
            message.pid,
            message.offset,
            message.route_version,
            message.hashing,
            message.late,
        )
        self.epoch = delivered.handle.epoch
        """Of the lease: it grows with each owner of the partition."""
        self.attempt = delivered.attempt
        """1 for the first time that this member hands the message out."""
        self._handle = delivered.handle
        self._consumer = consumer
        self._settled = False

    @property
    def is_current(self) -> bool:
        """Returns whether the lease holds for certain: nobody else has the message."""
        return self._consumer.holds(self._handle)

    def ack(self) -> None:
        """The message is processed. Raises MemberFenced: another member gets it again."""
        self._settle(ok=True)

    def nack(self) -> None:
        """The message failed: it comes again, in place, and is parked with its key in the end.
        Raises MemberFenced."""
        self._settle(ok=False)

    def _settle(self, *, ok: bool) -> None:
        if self._settled:
            return
        self._settled = True
        self._consumer.settle(self._handle, ok=ok)


Handler = Callable[[TopicDelivery], object]


class TopicConsumer:
    """See the module text.

        with TopicConsumer(client, "orders", "billing") as consumer:
            consumer.run(lambda ctx: book(ctx.key, ctx.body, ctx.order_token))

    or, for who settles by itself: `for ctx in consumer: …; ctx.ack()`.

    Args:
        client: where the servers are, and who asks. The consumer has a connection of its own.
        lanes: messages of each partition that the application has at a time; of one key it has one.
        window: messages of a partition that are fetched ahead.
        window_bytes: likewise, bytes of their bodies.
        retries: how often a message that failed is handed out again, before its key is parked; -1 =
            for ever, and no key is ever parked.
        start: where a new group begins, see `Client.join_group`.

    Raises:
        NotFound: no such topic.
        BadPosition, UnknownPartition, DataExpired: no group can begin at `start`.
    """

    def __init__(
        self,
        client: Client,
        topic: str,
        group: str,
        *,
        lanes: int = LANES,
        window: int = WINDOW,
        window_bytes: int = WINDOW_BYTES,
        retries: int = RETRIES,
        retry_ms: int = RETRY_MS,
        start: Start = "earliest",
    ) -> None:
        if lanes < 1 or window < 1 or window_bytes < 1 or retries < -1 or retry_ms < 0:
            raise ValueError("lanes and windows are positive, retries are -1 or more")
        joined = client.join_group(topic, group, start)
        self.topic = topic
        self.group = group
        self.member = joined.member
        self.lanes = lanes
        core = GroupMember(
            group,
            joined.member,
            partial(logical_partition, logical=joined.logical, seed=joined.hash_seed),
            window=lanes,
            retries=retries,
            retry_ms=retry_ms,
            ttl_ms=joined.ttl_ms,
            margin_ms=joined.margin_ms,
            drain_ms=joined.ttl_ms,
            one_of_key=joined.holds_keys,
            holds_keys=joined.holds_keys,
            lanes=Lanes(window, window_bytes),
        )
        self._deliveries: queue.SimpleQueue[Delivered | None] = queue.SimpleQueue()
        self._stopping = False
        hashing = Hashing(joined.logical, joined.hash_seed)
        self._thread = MemberThread(client.config, topic, core, hashing, self._deliveries)
        self._thread.start()

    # --- the application -------------------------------------------------------------------

    def run(self, handler: Handler, workers: int | None = None) -> None:
        """Calls `handler` with each message, until `stop` is called.

        Args:
            handler: is called by several threads, never at once with messages of the same key. When
                it raises an exception the message comes again, and is parked in the end.
            workers: threads; the number of lanes without it.

        Raises:
            NotFound: the topic or the group was deleted.
            DataExpired: retention has dropped what the group was to read.
            ClientError: the servers refuse this user.
        """
        count = workers or self.lanes
        with ThreadPoolExecutor(count, thread_name_prefix=f"{self.topic}/{self.group}") as pool:
            running = [pool.submit(self._work, handler) for _ in range(count)]
            try:
                for done in running:
                    done.result()
            except BaseException:
                # The pool waits for the others.
                self.stop()
                raise
        self._raise_failure()

    def _work(self, handler: Handler) -> None:
        while (delivery := self._next(None)) is not None:
            try:
                handler(delivery)
            except Exception as error:
                log.warning("the handler of group '%s' failed", self.group, exc_info=error)
                self._quietly(delivery.nack)
            else:
                self._quietly(delivery.ack)

    @staticmethod
    def _quietly(settle: Callable[[], None]) -> None:
        try:
            settle()
        except errors.MemberFenced:
            # Another member gets the message again.
            return

    def __iter__(self) -> Iterator[TopicDelivery]:
        """Yields messages until `stop` is called; each has to be settled. Raises as `run` does."""
        while (delivery := self._next(None)) is not None:
            yield delivery
        self._raise_failure()

    def poll(self, timeout_s: float) -> TopicDelivery | None:
        """Returns the next message, or None when there was none in time. Raises as `run` does."""
        delivery = self._next(timeout_s)
        if delivery is None:
            self._raise_failure()
        return delivery

    def _next(self, timeout_s: float | None) -> TopicDelivery | None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                delivered = self._deliveries.get(timeout=left)
            except queue.Empty:
                return None
            if delivered is None:
                # For the other threads as well.
                self._deliveries.put(None)
                return None
            if self._stopping or not self._thread.may_start(delivered.handle):
                self._thread.unhandled(delivered.handle)
                continue
            return TopicDelivery(delivered, self)

    # --- for deliveries --------------------------------------------------------------------

    def holds(self, handle: Handle) -> bool:
        """Returns whether the lease of a message holds for certain."""
        return self._thread.holds(handle)

    def settle(self, handle: Handle, *, ok: bool) -> None:
        """The application has finished with a message. Raises MemberFenced."""
        is_lost = self._thread.is_lost(handle)
        self._thread.handled(handle, ok=ok)
        if is_lost:
            raise errors.MemberFenced(
                f"the lease {handle.epoch} of partition {handle.pid} in group '{self.group}' has "
                "ended: another member gets the message again",
                "LEASE_FENCED",
            )

    # --- looking at it, and the end --------------------------------------------------------

    @property
    def leases(self) -> dict[int, LeaseView]:
        """Returns the partitions that the member has now, with their leases."""
        return dict(self._thread.leases)

    def _raise_failure(self) -> None:
        failure = self._thread.failure
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """Takes nothing new, and leaves the group when what runs has finished. Returns at once; may
        be called by handlers."""
        self._stopping = True
        self._thread.leave()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stops, and waits until the group has the partitions back, so long at most. What is not
        settled then waits for the end of the leases."""
        self.stop()
        self._thread.end(timeout_s)

    def __enter__(self) -> TopicConsumer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
