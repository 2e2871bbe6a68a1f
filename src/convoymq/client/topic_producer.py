"""Producers of ordered topics. `async_topic_producer` has them for asyncio.

A producer numbers its messages, so that what has no answer is sent again and still stored once,
also when a partition is split, merged or moved, or its leader is lost, meanwhile. Each session of a
producer's name ends the ones before. A session that goes on from a source (a log, a file) gives
every message its position there, and learns from the next `last_positions` what is stored.

    with TopicProducer(client, "orders", producer_id="importer") as producer:
        producer.send(b"account-7", b"...")
"""

from __future__ import annotations

import hashlib
import os
import random
from concurrent.futures import Future
from typing import TYPE_CHECKING

from convoymq.client import errors
from convoymq.client.producer_thread import ProducerThread, Sending, TopicReceipt
from convoymq.client.topic_rows import Headers, RowChunk, checked_row
from convoymq.topics.rules.dedup import UNANSWERED_MAX
from convoymq.topics.rules.hashing import key_bytes
from convoymq.topics.rules.producer import TopicProducer as Core

if TYPE_CHECKING:
    from types import TracebackType

    from convoymq.client.client import Client

PENDING_MAX = 10_000
IN_FLIGHT_MAX = UNANSWERED_MAX
"""Messages of one logical partition that are sent before the first of them is stored."""
TIMEOUT_MS = 30_000
"""A message without an answer is sent again after so long; at once when a connection is lost."""
SOURCE_POSITION_BYTES_MAX = 255
NUMBER_MAX = (1 << 63) - 1


def producer_number(producer_id: str | int) -> int:
    """Returns the number of a producer: itself, or the first 63 bits of its name's BLAKE2b hash."""
    if isinstance(producer_id, int):
        if not 1 <= producer_id <= NUMBER_MAX:
            raise ValueError(f"the number of a producer is 1 to {NUMBER_MAX}")
        return producer_id
    if not producer_id:
        raise ValueError("the name of a producer is not empty")
    digest = hashlib.blake2b(producer_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 or 1


class TopicProducer:
    """See the module text. Thread-safe. Not to be used after a fork.

    Args:
        client: any client of the cluster; the producer has a connection of its own.
        producer_id: a name or number; whoever begins a session with it ends this one. Without one
            nothing is known of the producer later.
        pending_max: messages that may have no outcome; then `send` waits.

    Raises:
        NotFound: no such topic.
    """

    def __init__(
        self,
        client: Client,
        topic: str,
        *,
        producer_id: str | int | None = None,
        pending_max: int = PENDING_MAX,
    ) -> None:
        number = int.from_bytes(os.urandom(8), "big") >> 1 or 1
        if producer_id is not None:
            number = producer_number(producer_id)
        self.topic = topic
        self._route = client.topic_route(topic, lineage=False)
        session = client.open_producer(topic, number)
        self.epoch = session.epoch
        """Number of this session."""
        self._core = Core(
            number,
            session.epoch,
            self._route.route,
            in_flight_max=IN_FLIGHT_MAX,
            timeout_ms=TIMEOUT_MS,
            jitter=lambda bound: random.randrange(bound + 1),
        )
        self._keyless_lp = random.randrange(self._route.route.logical)
        """Logical partition of this session's messages without a key."""
        positions = {lp: pos for lp, (_, pos) in session.stored.items() if pos}
        self._stored_before = dict(positions)
        self._thread = ProducerThread(client.config, topic, self._core, positions, pending_max)
        self._thread.start()

    def __enter__(self) -> TopicProducer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(None if error is None else 0.0)

    @property
    def pending(self) -> int:
        """Returns the number of messages without an outcome."""
        return self._thread.pending

    @property
    def has_room(self) -> bool:
        """Returns whether `send` would not wait."""
        return self._thread.has_room

    def wait_for_room(self, timeout: float | None = None) -> bool:
        """Returns `has_room`, when it is or the time is over."""
        return self._thread.wait_for_room(timeout)

    def send(
        self,
        key: bytes | str | None,
        body: bytes | None,
        headers: Headers | None = None,
        source_pos: bytes | None = None,
        *,
        timeout: float | None = None,
    ) -> Future[TopicReceipt]:
        """Publishes a message; returns a future that is done when it is stored.

        A message that fails takes all later ones of its logical partition with it: nothing is
        stored behind a hole. Begin a new session then.

        Args:
            key: the order key; text is taken as UTF-8. None: the message has none; where the topic
                takes such ones, all of a session go one way.
            source_pos: where the message comes from, at most 255 bytes. Compared as bytes it never
                falls in a logical partition, also behind sessions before this one.
            timeout: seconds to wait for room; None: as long as it takes.

        Raises:
            ValueError: no server would take it, or its source position falls; it is not sent.
            Unavailable: there was no room in time.
            ClientError: the producer has ended, as the one that began a newer session knows
                (`ProducerFenced`).
        """
        return self._put(self._sending(key, body, headers, source_pos), timeout)

    def send_chunk(
        self,
        lp: int,
        chunk: RowChunk,
        source_pos: bytes | None = None,
        *,
        timeout: float | None = None,
    ) -> Future[TopicReceipt]:
        """Publishes messages of one logical partition, which have one outcome; see `send`.

        Args:
            lp: logical partition that all their keys belong to; the server checks it.
            chunk: at most `IN_FLIGHT_MAX` messages.
            source_pos: of the last of them.

        Raises:
            ValueError: no server would take it.
            Unavailable: there was no room in time.
            ClientError: the producer has ended.
        """
        if not 1 <= chunk.messages <= IN_FLIGHT_MAX:
            raise ValueError(f"{chunk.messages} messages together, 1 to {IN_FLIGHT_MAX} may be")
        return self._put(Sending(lp, chunk, _checked(source_pos), _future()), timeout)

    def _put(self, sending: Sending, timeout: float | None) -> Future[TopicReceipt]:
        if not self._thread.has_room and not self._thread.wait_for_room(timeout):
            raise errors.Unavailable(f"{self.pending} messages have no answer yet")
        self._thread.put(sending)
        return sending.future

    def _sending(
        self,
        key: bytes | str | None,
        body: bytes | None,
        headers: Headers | None,
        source_pos: bytes | None,
    ) -> Sending:
        if key is not None and not key:
            raise ValueError("an order key is not empty; None: the message has none")
        row = checked_row(b"" if key is None else key_bytes(key), body, headers)
        lp = self._keyless_lp if key is None else self._route.lp_of(row.key)
        return Sending(lp, row, _checked(source_pos), _future())

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every message has an outcome.

        Raises:
            Unavailable: not in time; they are sent on.
            ClientError: the producer has ended.
        """
        if not self._thread.wait_until_done(timeout):
            raise errors.Unavailable(f"{self.pending} messages have no answer yet")
        if self._thread.failure is not None:
            raise self._thread.failure

    def last_positions(self) -> dict[int, bytes]:
        """Returns the source position of the last message that is stored, by logical partition, of
        this session and those before it."""
        return dict(self._thread.positions)

    def is_stored(self, key: bytes | str, source_pos: bytes) -> bool:
        """Returns whether a session before this one has stored the message at a source position:
        positions are compared as bytes."""
        known = self._stored_before.get(self._route.lp_of(key_bytes(key)))
        return known is not None and source_pos <= known

    def close(self, timeout: float | None = None) -> None:
        """Waits as `flush` does, and ends the producer. What has no outcome fails.

        Raises:
            Unavailable: not everything was stored in time.
        """
        done = self._thread.wait_until_done(timeout)
        self._thread.end()
        if not done and timeout != 0.0:
            raise errors.Unavailable("the producer was closed before every message had an answer")


def _checked(source_pos: bytes | None) -> bytes:
    position = source_pos or b""
    if len(position) > SOURCE_POSITION_BYTES_MAX:
        raise ValueError(f"a source position has at most {SOURCE_POSITION_BYTES_MAX} bytes")
    return position


def _future() -> Future[TopicReceipt]:
    future: Future[TopicReceipt] = Future()
    # It is sent whoever waits for it: nobody cancels it.
    future.set_running_or_notify_cancel()
    return future
