"""One AMQP connection: input, output, channels (compiled only)."""

from collections.abc import Callable
from typing import Protocol

from convoymq.kernels.channel_codec import ChannelCodec, ChannelCodecOwner
from convoymq.kernels.message_sizes import MessageSizes
from convoymq.kernels.route_cache import RouteCacheVersion

CONNECTION_HEADER: int
CONNECTION_OPEN: int
CONNECTION_CLOSING: int
CONNECTION_CLOSED: int

class ConnectionBufferOwner(Protocol):
    """Calls that a connection takes from its `ConnectionBuffer`. Nothing here may raise."""

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

class Outbox:
    """All connections with output; `on_first` is called when there is a first one."""

    buffers: list[ConnectionBuffer]
    on_first: Callable[[], None] | None
    bytes_sent: int
    bytes_received: int
    sizes: MessageSizes
    """Of the messages that its connections have published."""
    def __init__(self, on_first: Callable[[], None] | None = None) -> None: ...
    def flush(self) -> None:
        """End of a round: confirms are encoded and all output is sent."""

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
        owner: ConnectionBufferOwner,
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
    def open_codec(
        self, number: int, owner: ChannelCodecOwner, version: RouteCacheVersion
    ) -> ChannelCodec:
        """Opens a channel. Raises ValueError when it is open."""
    def codec(self, number: int) -> ChannelCodec | None:
        """Returns the channel of that number."""
    def receive(self) -> int:
        """Reads the socket once (at most 128 KiB) and works through what came. Returns the number
        of bytes; 0 = closed by the peer, below 0 = -errno."""
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
