"""AMQP 0-9-1 frames between a socket and the batches (compiled only)."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from convoymq.kernels.batch import PublishTarget

WIRE_HEADER: int
WIRE_OPEN: int
WIRE_CLOSING: int
WIRE_CLOSED: int

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

ROUTES_MAX: int
RECEIVE_BYTES: int
FRAME_PAYLOAD_MAX: int

class WireOwner(Protocol):
    """What a connection implements to hear from its `ConnectionBuffer`. Nothing here may raise."""

    def on_protocol_header(self, data: bytes) -> None:
        """The first 8 bytes; fewer when they cannot become a protocol header."""
    def on_method(self, channel: int, payload: bytes) -> None:
        """A method that the kernel does not serve itself."""
    def on_fault(self, code: int, text: str, channel: int, class_id: int, method_id: int) -> None:
        """The peer broke the protocol: close the connection with this code."""
    def on_publish_blocked(self) -> None:
        """A publish waits in front of an alarm; reading is paused."""
    def on_backlog_full(self, channel: int) -> None:
        """A busy channel got more frames than are kept; reading is paused."""
    def on_output(self) -> None:
        """End of a round: take the output (only without a file descriptor)."""
    def on_drained(self) -> None:
        """All output was sent while `holding` was set."""
    def on_write_blocked(self, error: int) -> None:
        """The socket takes no more (0), or it is broken (errno)."""

class LaneOwner(Protocol):
    """What a channel implements to hear from its `ChannelCodec`. Nothing here may raise."""

    def resolve_route(self, key: bytes) -> tuple[PublishTarget, ...] | None:
        """Targets of the exchange and routing key (short strings, back to back), to be remembered
        until the epoch changes; None = every message has to be looked at (`on_publish`)."""
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

class Epoch:
    """A number that moves whenever remembered routes and permissions have to be forgotten."""

    value: int
    def bump(self) -> None:
        """Forget what was remembered."""

class Outbox:
    """All connections with output; `on_first` is called when there is a first one."""

    buffers: list[ConnectionBuffer]
    on_first: Callable[[], None] | None
    bytes_sent: int
    bytes_received: int
    def __init__(self, on_first: Callable[[], None] | None = None) -> None: ...
    def flush(self) -> None:
        """End of a round: confirms are encoded and all output is sent."""

class ConsumerDeliveries:
    """One consumer of a channel, or (number 0) its basic.get from one queue."""

    codec: ChannelCodec
    client: Any
    number: int
    no_ack: bool
    counted: bool
    offsets: bool
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
    epoch: Epoch
    published: int
    delivered: int
    acknowledged: int
    next_tag: int
    unacked: int
    slots: list[ConsumerDeliveries | None]
    confirm_low: int
    confirm_next: int
    @property
    def backlog_bytes(self) -> int:
        """Frames kept while the channel is busy."""
    @property
    def oldest_unacked(self) -> int:
        """The lowest delivery tag that is outstanding; 0 = none."""
    def add_slot(
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
    def remove_slot(self, slot: ConsumerDeliveries) -> None:
        """Forgets a consumer. Raises ValueError while deliveries are unacknowledged."""
    def close(self) -> None:
        """Drops everything that arrives from now on but channel.close, close-ok and open."""
    def drain(self) -> None:
        """Hears those among the frames that were kept while the channel was busy."""
    def detach(self) -> None:
        """Closes, and gives the number back."""
    def resume(self) -> None:
        """Ends LANE_BUSY and works through the frames that were kept."""
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
    def expect_confirms(self, tag: int, count: int) -> None:
        """The publish waits for that many targets; 0 = it is acknowledged at the end of the round.
        Raises ValueError for a tag that is not outstanding."""
    def resolve(self, tags: Sequence[int], ok: bool) -> None:
        """One target has answered for these ranges of tags (first, last, …)."""
    def acknowledge(self, kind: int, tag: int, multiple: bool) -> bool:
        """Settles, returns or discards deliveries. False = the tag is not outstanding."""
    def take(
        self, tag: int, multiple: bool
    ) -> list[tuple[int, int, ConsumerDeliveries, int]] | None:
        """Removes deliveries from the outstanding ones: (tag, count, slot, first message id) each.
        None = the tag is not outstanding."""
    def put_back(self, taken: Sequence[tuple[int, int, ConsumerDeliveries, int]]) -> None:
        """Makes taken deliveries outstanding again."""
    def settle_taken(
        self, kind: int, taken: Sequence[tuple[int, int, ConsumerDeliveries, int]]
    ) -> None:
        """Settles, returns or discards what was taken."""
    def note(self, slot: ConsumerDeliveries, kind: int, first: int, last: int) -> None:
        """Settles, returns or discards message ids that the client never saw."""
    def flush_settles(self) -> None:
        """Hands the ranges gathered so far to the queues, one call per consumer and kind."""
    def deliver(
        self,
        slot: ConsumerDeliveries,
        first_id: int,
        block: bytes,
        command: int,
        first: int,
        count: int,
        acquired: int,
        delivery_count: int,
    ) -> None:
        """Encodes basic.deliver for the records and makes them outstanding (or, without
        acknowledgement, settles them at once). Raises ValueError when the records are damaged."""
    def deliver_record(self, slot: ConsumerDeliveries, record: bytes, redelivered: bool) -> None:
        """Encodes basic.deliver of a record that no queue holds."""
    def send_get(
        self,
        slot: ConsumerDeliveries,
        block: bytes,
        command: int,
        record: int,
        get_id: int,
        acquired: int,
        delivery_count: int,
        ready: int,
        no_ack: bool,
    ) -> None:
        """Encodes basic.get-ok with its content."""
    def send_return(self, code: int, text: bytes, key: bytes, content: bytes) -> None:
        """Encodes basic.return with its content."""

class ConnectionBuffer:
    """One connection: its buffers and its channels."""

    fd: int
    owner: object
    outbox: Outbox
    state: int
    paused: bool
    alarmed: bool
    corked: bool
    """The client does not read: consumers without acknowledgement are not settled."""
    holding: bool
    """The owner wants `on_drained` when output is gone."""
    frame_max: int
    message_size_max: int
    backlog_max: int
    received: int
    sent: int
    def __init__(
        self,
        owner: WireOwner,
        outbox: Outbox,
        fd: int = -1,
        frame_max: int = 8192,
        message_size_max: int = 16777216,
    ) -> None: ...
    @property
    def output_bytes(self) -> int:
        """Output that waits."""
    @property
    def input_bytes(self) -> int:
        """Input that waits: part of a frame, or all that came after a pause."""
    def open_codec(self, number: int, owner: LaneOwner, epoch: Epoch) -> ChannelCodec:
        """Opens a channel. Raises ValueError when it is open."""
    def codec(self, number: int) -> ChannelCodec | None:
        """The channel of that number."""
    def receive(self) -> int:
        """Reads the socket once (at most 128 KiB) and works through what came. Returns the number
        of
        bytes; 0 = closed by the peer, below 0 = -errno."""
    def feed(self, data: bytes) -> None:
        """Works through bytes that somebody else has read."""
    def pump(self) -> None:
        """Works through what waits, after a pause."""
    def flush_settles(self) -> None:
        """Hands gathered acknowledgements of all channels to the queues."""
    def flush_confirms(self) -> None:
        """Encodes the confirms that are due."""
    def send_frame(self, type: int, channel: int, payload: bytes) -> None:
        """Appends a frame to the output."""
    def send_bytes(self, data: bytes) -> None:
        """Appends raw bytes to the output."""
    def flush(self) -> None:
        """End of a round for this connection."""
    def write(self) -> int:
        """Sends what the socket takes. Returns 0 or the errno that ended the connection."""
    def take_output(self) -> bytes:
        """Takes all output."""
    def close(self) -> None:
        """Ends all channels; nothing is scanned any more."""
