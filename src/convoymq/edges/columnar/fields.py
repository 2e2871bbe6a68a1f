"""The maps of requests, checked field by field before anything is done with them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from convoymq.model.columnar import ColumnarError, ErrorCode

INT64_MAX = (1 << 63) - 1
COLUMNS_ALL = 1023
SECRET_BYTES_MAX = 4096
DIGEST_BYTES = 16
SOURCE_POSITION_BYTES_MAX = 255

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Text = Annotated[str, msgspec.Meta(max_length=255)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=INT64_MAX)]
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Columns = Annotated[int, msgspec.Meta(ge=1, le=COLUMNS_ALL)]
SourcePosition = Annotated[bytes, msgspec.Meta(max_length=SOURCE_POSITION_BYTES_MAX)]
Compression = Literal["", "zstd", "lz4"]


class Authenticate(msgspec.Struct, frozen=True, kw_only=True):
    """AUTHENTICATE."""

    mechanism: Text
    user: Text
    password: Annotated[str, msgspec.Meta(max_length=SECRET_BYTES_MAX)]
    vhost: Text = "/"
    client: Text = ""


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """METADATA."""

    names: list[Text] | None = None
    types: tuple[Literal["stream", "quorum", "classic", "partition"], ...] = ("stream",)
    current: bool = False


class Offsets(msgspec.Struct, frozen=True, kw_only=True):
    """OFFSETS."""

    queries: list[tuple[Name, Literal["earliest", "latest", "timestamp"], Offset | None]]


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """FETCH."""

    stream: Name
    offset: Offset
    end: Offset | None = None
    max_rows: Positive = 100_000
    max_bytes: Positive = 16 << 20
    columns: Columns = 15
    wait_ms: Offset = 0
    compression: Compression = ""
    machine: Text = ""
    group: Offset = 0


class Produce(msgspec.Struct, frozen=True, kw_only=True):
    """PRODUCE, and CHECK_PRODUCE."""

    stream: Name | None = None
    queue: Name | None = None
    exchange: Text | None = None
    routing_key: Text | None = None
    producer: Name | None = None
    sequence: Offset = 0
    digest: Digest | None = None
    mandatory: bool = False


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """RESERVATION; which fields an op needs is the queue's to say (ADR 0008)."""

    queue: Name
    op: Literal["open", "take", "settle", "release", "close", "lease", "touch"]
    reservation: Name
    owner: Text | msgspec.UnsetType = msgspec.UNSET
    ttl_ms: Offset | msgspec.UnsetType = msgspec.UNSET
    epoch: Offset | msgspec.UnsetType = msgspec.UNSET
    fencing_token: Offset | msgspec.UnsetType = msgspec.UNSET
    max: Offset | msgspec.UnsetType = msgspec.UNSET
    after: Offset | msgspec.UnsetType = msgspec.UNSET
    upto: Offset | msgspec.UnsetType = msgspec.UNSET
    from_: Offset | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="from")
    failed: bool | msgspec.UnsetType = msgspec.UNSET

    def body(self) -> dict[str, object]:
        """Returns the op as the queue takes it: the fields that were given."""
        found: dict[str, object] = msgspec.to_builtins(self)
        del found["queue"]
        return found


class ReservationFetch(msgspec.Struct, frozen=True, kw_only=True):
    """RESERVATION_FETCH."""

    queue: Name
    reservation: Name
    epoch: Offset
    offset: Offset
    end: Offset | None = None
    max_rows: Positive = 100_000
    max_bytes: Positive = 16 << 20
    columns: Columns = 15
    compression: Compression = ""


class Browse(msgspec.Struct, frozen=True, kw_only=True):
    """BROWSE; the cursor is the queue's own."""

    queue: Name
    cursor: Any = None
    max_rows: Positive = 100_000
    max_bytes: Positive = 16 << 20
    columns: Columns = 15
    compression: Compression = ""


class StoreOffset(msgspec.Struct, frozen=True, kw_only=True):
    """STORE_OFFSET."""

    stream: Name
    consumer: Name
    offset: Offset


class QueryOffset(msgspec.Struct, frozen=True, kw_only=True):
    """QUERY_OFFSET."""

    stream: Name
    consumer: Name


class TopicRoute(msgspec.Struct, frozen=True, kw_only=True):
    """TOPIC_ROUTE."""

    topic: Name
    vhost: Text | None = None
    group: Name | None = None
    newer_than: Annotated[int, msgspec.Meta(ge=-1, le=INT64_MAX)] = -1
    wait_ms: Offset = 0
    lineage: bool = True


class TopicProduce(msgspec.Struct, frozen=True, kw_only=True):
    """TOPIC_PRODUCE."""

    topic: Name
    pid: Offset
    producer: Positive
    epoch: Positive
    runs: list[tuple[Offset, Positive, Positive, Offset, SourcePosition]]


class TopicProducerSession(msgspec.Struct, frozen=True, kw_only=True):
    """TOPIC_PRODUCER."""

    topic: Name
    producer: Positive
    epoch: Offset = 0
    query: bool = False


Fields = TypeVar("Fields", bound=msgspec.Struct)


def read(kind: type[Fields], given: dict[str, object]) -> Fields:
    """Returns the map as its request.

    Raises:
        ColumnarError: PRECONDITION_FAILED; the text names the field.
    """
    try:
        return msgspec.convert(given, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        name = kind.__name__.upper()
        raise ColumnarError(ErrorCode.PRECONDITION_FAILED, f"{name}: {error}") from None
