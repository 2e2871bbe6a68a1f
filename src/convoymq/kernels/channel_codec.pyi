"""One channel of an AMQP connection (compiled only)."""

from collections.abc import Sequence
from typing import Any, Protocol

from convoymq.kernels.batch import PublishTarget
from convoymq.kernels.connection_buffer import ConnectionBuffer
from convoymq.kernels.order_headers import Place
from convoymq.kernels.route_cache import RouteCacheVersion, RouteCount

CHANNEL_OPEN: int
CHANNEL_BUSY: int
CHANNEL_CLOSING: int

MODE_PLAIN: int
MODE_CONFIRM: int
MODE_TX: int

SETTLE: int
RETURN: int
RETURN_FAILED: int
DISCARD: int

class ChannelCodecOwner(Protocol):
    """Calls that a channel takes from its `ChannelCodec`. Nothing here may raise."""

    def resolve_route(self, key: bytes) -> tuple[PublishTarget, ...] | None:
        """Targets of the exchange and routing key (short strings, back to back), to be remembered
        until the route cache version changes; None = every message has to be looked at
        (`on_publish`)."""
    def on_dropped(self) -> None:
        """A message without a queue to go to was dropped."""
    def on_publish(
        self, key: bytes, bits: int, content: bytes, body_size: int, flags: int, tag: int
    ) -> None:
        """A message that needs a closer look. `content`: header frame and body frames."""
    def on_too_big(self, size: int) -> None:
        """A body above the limit was announced; its frames are dropped."""
    def on_unknown_tag(self, tag: int, method_id: int) -> None:
        """Acknowledgement of a delivery that is not outstanding."""
    def on_settled(self) -> None:
        """Acknowledgements of this read have been handed to the queues."""

class ChannelSpans(Protocol):
    """Calls that a channel's spans take from its `ChannelCodec`. Nothing here may raise."""

    below: bytes
    """Bound of sampled trace ids (`trace_contexts.find_context`)."""

    def published(self, names: bytes, context: tuple[bytes, bytes], tag: int) -> None:
        """A sampled message was published: its exchange and routing key, trace context, and tag
        (0 = nobody waits for the outcome)."""
    def settled(self, client: object, consumer: int, ranges: Sequence[int], outcome: int) -> None:
        """A consumer has settled message ids, by ranges."""

class ConsumerDeliveries:
    """One consumer of a channel, or (number 0) its basic.get from one queue."""

    codec: ChannelCodec
    client: Any
    number: int
    no_ack: bool
    counted: bool
    offsets: bool
    places: dict[int, Place] | None
    """To be set for messages of ordered topics: where they lie, by the upper bits of the message
    id. Deliveries say so in headers (`order_headers`)."""
    head: bytes
    unacked: int
    index: int

class ChannelCodec:
    """One channel of a connection."""

    buffer: ConnectionBuffer
    number: int
    owner: object
    state: int
    mode: int
    route_cache_version: RouteCacheVersion
    has_order_key: bool
    """For `resolve_route`: the headers of its message have an order key."""
    spans: ChannelSpans | None
    """Gets sampled messages; None: nobody does."""
    every_key: bool
    """Set by `resolve_route`: its answer holds for every routing key of the exchange that is not
    empty."""
    route_count: RouteCount | None
    """Set by `resolve_route`: counts the messages that go where it says."""
    published: int
    delivered: int
    acknowledged: int
    next_tag: int
    unacked: int
    consumers: list[ConsumerDeliveries | None]
    confirm_low: int
    confirm_next: int
    @property
    def backlog_bytes(self) -> int:
        """Frames kept while the channel is busy."""
    @property
    def oldest_unacked(self) -> int:
        """Returns the lowest delivery tag that is outstanding; 0 = none."""
    def add_consumer(
        self,
        client: object,
        number: int,
        tag: bytes,
        no_ack: bool = False,
        counted: bool = False,
        offsets: bool = False,
    ) -> ConsumerDeliveries:
        """Registers a consumer; `counted` = deliveries show x-acquired-count and x-delivery-count,
        `offsets` = they show their message id as x-stream-offset.
        Raises ValueError for a tag above 255 bytes."""
    def remove_consumer(self, consumer: ConsumerDeliveries) -> None:
        """Forgets a consumer. Raises ValueError while deliveries are unacknowledged."""
    def close(self) -> None:
        """Drops everything that arrives from now on but channel.close, close-ok and open."""
    def drain(self) -> None:
        """Hears those among the frames that were kept while the channel was busy."""
    def detach(self) -> None:
        """Closes, and gives the number back."""
    def resume(self) -> None:
        """Ends CHANNEL_BUSY and works through the frames that were kept."""
    def forget_routes(self) -> None:
        """Every route is asked for anew."""
    def append(
        self,
        target: PublishTarget,
        key: bytes,
        content: bytes,
        body_size: int,
        flags: int,
        tag: int,
    ) -> None:
        """Appends a message that was looked at."""
    def select_confirms(self) -> None:
        """Enters MODE_CONFIRM."""
    def next_confirm(self) -> int:
        """Gives a publish tag out; it waits for one target."""
    def awaits(self, tag: int) -> bool:
        """Returns whether a publish waits for targets."""
    def expect_confirms(self, tag: int, count: int) -> None:
        """The publish waits for that many targets; 0 = it is acknowledged at the end of the round.
        Raises ValueError for a tag that is not outstanding."""
    def resolve(self, tags: Sequence[int], ok: bool) -> int:
        """One target has answered for these ranges of tags (first, last, …); returns how many tags
        they have."""
    def acknowledge(self, kind: int, tag: int, multiple: bool) -> bool:
        """Settles, returns or discards deliveries. False = the tag is not outstanding."""
    def take(
        self, tag: int, multiple: bool
    ) -> list[tuple[int, int, ConsumerDeliveries, int]] | None:
        """Removes deliveries from the outstanding ones: (tag, count, consumer, first message id)
        each. None = the tag is not outstanding."""
    def put_back(self, taken: Sequence[tuple[int, int, ConsumerDeliveries, int]]) -> None:
        """Makes taken deliveries outstanding again."""
    def settle_taken(
        self, kind: int, taken: Sequence[tuple[int, int, ConsumerDeliveries, int]]
    ) -> None:
        """Settles, returns or discards what was taken."""
    def note(self, consumer: ConsumerDeliveries, kind: int, first: int, last: int) -> None:
        """Settles, returns or discards message ids that the client never saw."""
    def flush_settles(self) -> None:
        """Hands the ranges gathered so far to the queues, one call per consumer and kind."""
    def deliver(
        self,
        consumer: ConsumerDeliveries,
        first_id: int,
        block: bytes,
        command: int,
        first: int,
        count: int,
        acquired_count: int,
        failed_delivery_count: int,
    ) -> None:
        """Encodes basic.deliver for the records and makes them outstanding (or, without
        acknowledgement, settles them at once). Raises ValueError when the records are damaged."""
    def deliver_record(
        self, consumer: ConsumerDeliveries, record: bytes, redelivered: bool
    ) -> None:
        """Encodes basic.deliver of a record that no queue holds."""
    def send_get(
        self,
        consumer: ConsumerDeliveries,
        block: bytes,
        command: int,
        record: int,
        get_id: int,
        acquired_count: int,
        failed_delivery_count: int,
        ready: int,
        no_ack: bool,
    ) -> None:
        """Encodes basic.get-ok with its content."""
    def send_return(self, code: int, text: bytes, key: bytes, content: bytes) -> None:
        """Encodes basic.return with its content."""
