"""Options of a read or a write as typed objects, checked as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from convoymq.spark import option_values as parse
from convoymq.spark.errors import OptionError
from convoymq.spark.option_table import OptionValues, Use, check_use
from convoymq.spark.option_values import Offsets

if TYPE_CHECKING:
    from ssl import SSLContext

    from convoymq.client import ClientConfig

TTL_MS_MIN = 1000
TTL_MS_MAX = 7 * 24 * 3600 * 1000
"""Times to live that the broker takes for a reservation (ADR 0008)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Address and user of a connection. Holds references to secrets, not what they stand for."""

    servers: tuple[str, ...]
    user: str
    password: str = field(repr=False)
    vhost: str
    timeout_ms: int
    name: str
    namesrv: tuple[str, ...] = ()
    """RocketMQ's name servers, instead of nodes."""
    tls: tuple[str, str, str, bool, str] | None
    """Files of authorities, certificate and key; whether to verify; server name."""

    @classmethod
    def of(cls, values: OptionValues) -> Connection:
        """From parsed options. Raises OptionError: not `host:port`, or TLS options without TLS."""
        tls_options = [name for name in values["given"] if name.startswith("convoymq.tls.")]
        if tls_options and not values["convoymq.tls"]:
            raise OptionError(f"option {min(tls_options)} needs convoymq.tls=true")
        made = cls(
            servers=values["servers"] or (),
            namesrv=values.get("namesrv") or (),
            user=values["user"],
            password=values["password"],
            vhost=values["vhost"],
            timeout_ms=values["convoymq.timeout"],
            name=values["convoymq.name"],
            tls=(
                values["convoymq.tls.ca"],
                values["convoymq.tls.cert"],
                values["convoymq.tls.key"],
                values["convoymq.tls.verify"],
                values["convoymq.tls.serverName"],
            )
            if values["convoymq.tls"]
            else None,
        )
        if not made.namesrv:
            made._check()
        elif made.tls is not None and made.tls[3] and not made.tls[0]:
            raise OptionError("option convoymq.tls with namesrv needs convoymq.tls.ca, or "
                              "convoymq.tls.verify=false")  # fmt: skip
        elif misfits := sorted(set(_UNFIT_FOR_ROCKETMQ) & values["given"]):
            raise OptionError(f"option {misfits[0]} has no meaning with namesrv")
        return made

    def config(self) -> ClientConfig:
        """For a client of this process; resolves references. Raises OptionError."""
        return self._config(parse.secret(self.user), parse.secret(self.password))

    @property
    def account(self) -> tuple[str, str] | None:
        """Returns access key and secret key for RocketMQ's brokers. Raises OptionError."""
        if self.user == "guest":
            return None
        return parse.secret(self.user), parse.secret(self.password)

    def rocket_tls(self) -> SSLContext | None:
        """Returns the TLS of connections to RocketMQ's name servers and brokers, whose authority is
        looked at and whose names are not. Raises OSError: a file is missing or is no certificate.
        """
        if self.tls is None:
            return None
        from convoymq.rocketmq.remoting.tls import ClientTlsSettings

        authorities, certificate, key, verify, _ = self.tls
        return ClientTlsSettings(
            tls_client=True, tls_client_certificate=certificate,
            tls_client_key=key or certificate, tls_client_authorities=authorities,
            tls_client_verifies=verify,
        ).client_tls()  # fmt: skip

    def _check(self) -> None:
        try:
            self._config("", "")
        except ValueError as error:
            raise OptionError(f"option servers: {error}") from None

    def _config(self, user: str, password: str) -> ClientConfig:
        from convoymq.client.config import ClientConfig, TlsConfig

        tls = None
        if self.tls is not None:
            ca, cert, key, verify, server_name = self.tls
            tls = TlsConfig(
                ca_file=ca, cert_file=cert, key_file=key, verify=verify, server_name=server_name
            )
        return ClientConfig(
            servers=self.servers,
            user=user,
            password=password,
            vhost=self.vhost,
            tls=tls,
            timeout=self.timeout_ms / 1000,
            name=self.name,
        )


_UNFIT_FOR_ROCKETMQ = (
    *("servers", "vhost", "subscribe", "subscribePattern", "assign", "afterClose", "pushdown"),
    *("includeHeaders", "includeProperties", "convoymq.fetch.compression"),
    *("convoymq.fetch.local", "convoymq.tls.serverName", "convoymq.name", "messageId"),
)
"""Options that a read of a topic of RocketMQ does not serve."""
_SELECTING = ("subscribe", "subscribePattern", "assign", "topic")
_UNFIT_FOR_TOPIC = (
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "groupId",
    "pushdown",
)
"""Options that a read of a topic does not serve."""
PARTS_PER_S = 50
PART_BYTES_MIN = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetching:
    """Options by which tasks read."""

    partitions_min: int | None
    records_per_partition_max: int | None
    rows_max: int
    bytes_max: int
    rate_max: int | None
    """Bytes a second of one task."""
    compression: str
    local: bool
    """Of streams: from a node's files where they can be read."""
    prefetch: bool

    @property
    def part_bytes(self) -> int:
        """Returns the size of one fetch: a bounded rate comes in small parts, not in bursts."""
        if self.rate_max is None:
            return self.bytes_max
        return min(self.bytes_max, max(PART_BYTES_MIN, self.rate_max // PARTS_PER_S))

    @classmethod
    def of(cls, values: OptionValues) -> Fetching:
        """From parsed options."""
        compression = values["convoymq.fetch.compression"]
        return cls(
            partitions_min=values["minPartitions"],
            records_per_partition_max=values["maxRecordsPerPartition"],
            rows_max=values["convoymq.fetch.maxRows"],
            bytes_max=values["convoymq.fetch.maxBytes"],
            rate_max=values["convoymq.fetch.maxBytesPerSecond"],
            compression="" if compression == "none" else compression,
            local=values.get("convoymq.fetch.local", False),
            prefetch=values["convoymq.fetch.prefetch"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Beginning or end, as asked for: not yet an offset."""

    kind: str
    """`earliest`, `latest`, `offsets` or `timestamps`."""
    by_partition: Offsets = field(default_factory=dict)
    """Offsets, or times in ms; empty for the first two and for `timestamp`."""
    timestamp_ms: int | None = None
    """One time for all partitions, with kind `timestamps`."""
    late: str = "latest"
    """`error` or `latest`: what to do when nothing is as young as the timestamp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a micro-batch."""

    rows_max: int | None = None
    rows_min: int | None = None
    bytes_max: int | None = None
    delay_max_ms: int = 15 * 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReadOptions:
    """Of a read of streams, or of an ordered topic."""

    connection: Connection
    fetching: Fetching
    streams: tuple[str, ...]
    """Named by `subscribe` or `assign`; empty with a pattern, and with a topic."""
    pattern: str | None
    topic: str | None
    same_batch: bool
    """Of a topic: a batch goes on with what comes after a partition that it reads to its end."""
    starting: Place
    ending: Place
    limits: Limits
    fail_on_data_loss: bool
    group_id: str | None
    pushdown: bool
    poll_interval_ms: int

    @classmethod
    def of(cls, values: OptionValues, use: Use) -> StreamReadOptions:
        """From parsed options. Raises OptionError when they do not fit together."""
        check_use("convoymq", values, use)
        selected = [name for name in _SELECTING if values[name] is not None]
        if len(selected) != 1:
            found = f", not {' and '.join(selected)}" if selected else ""
            raise OptionError(f"give one of subscribe, subscribePattern, assign and topic{found}")
        of_rocketmq = values["namesrv"] is not None
        unfit = _UNFIT_FOR_TOPIC if values["topic"] is not None else ("afterClose",)
        for name in () if of_rocketmq else unfit:
            if name in values["given"]:
                raise OptionError(f"option {name} has no meaning with {selected[0]}")
        rows_min, rows_max = values["minOffsetsPerTrigger"], values["maxOffsetsPerTrigger"]
        if rows_min is not None and rows_max is not None and rows_min > rows_max:
            raise OptionError(
                f"minOffsetsPerTrigger {rows_min} is above maxOffsetsPerTrigger {rows_max}"
            )
        made = cls(
            connection=Connection.of(values),
            fetching=Fetching.of(values),
            streams=values["subscribe"] or values["assign"] or (),
            pattern=values["subscribePattern"],
            topic=values["topic"],
            same_batch=use is Use.BATCH_READ or values["afterClose"] == "same-batch",
            starting=_starting(values, "earliest" if use is Use.BATCH_READ else "latest"),
            ending=_ending(values),
            limits=Limits(
                rows_max=rows_max,
                rows_min=rows_min,
                bytes_max=values["maxBytesPerTrigger"],
                delay_max_ms=values["maxTriggerDelay"],
            ),
            fail_on_data_loss=values["failOnDataLoss"],
            group_id=values["groupId"],
            pushdown=values["pushdown"],
            poll_interval_ms=values["convoymq.pollInterval"],
        )
        if use is Use.BATCH_READ:
            made._check_batch()
        made._check_places()
        return made

    def _check_batch(self) -> None:
        if self.starting.kind == "latest" or parse.LATEST in _plain_offsets(self.starting):
            raise OptionError("startingOffsets can't be latest in a batch: nothing would be read")
        if self.ending.kind == "earliest" or parse.EARLIEST in _plain_offsets(self.ending):
            raise OptionError("endingOffsets can't be earliest: nothing would be read")

    def _check_places(self) -> None:
        """Offsets by stream name exactly the streams that are read, as Kafka demands."""
        if self.topic is None:
            for place in (self.starting, self.ending):
                if any(partition for _, partition in place.by_partition):
                    raise OptionError("a stream has one partition, 0, in offsets and times")
        # Brokers of a topic are known when it is read.
        if self.pattern is not None or self.connection.namesrv:
            return
        for name, place in (("starting", self.starting), ("ending", self.ending)):
            if not place.by_partition:
                continue
            placed = {stream for stream, _ in place.by_partition}
            read = self.streams if self.topic is None else (self.topic,)
            if placed != set(read):
                raise OptionError(
                    f"the {name} offsets are for {_listed(placed)}, "
                    f"but what is read is {_listed(read)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReadOptions:
    """Of a read of a queue."""

    connection: Connection
    fetching: Fetching
    queue: str
    mode: str
    reservation: str
    ttl_ms: int
    skip_expired: bool
    rows_max: int | None
    fail_on_data_loss: bool
    poll_interval_ms: int

    @classmethod
    def of(cls, values: OptionValues, use: Use) -> QueueReadOptions:
        """From parsed options. Raises OptionError when they do not fit together."""
        check_use("convoymq_queue", values, use)
        if values["queue"] is None:
            raise OptionError("format convoymq_queue reads one queue: give the option queue")
        lease = values["mode"] == "lease"
        misfits = {"reservation", "failOnDataLoss"} if lease else {"onExpired"}
        for name in sorted(misfits & values["given"]):
            raise OptionError(f"option {name} has no meaning with mode={values['mode']}")
        if use is Use.STREAM_READ and not TTL_MS_MIN <= values["reservationTtl"] <= TTL_MS_MAX:
            raise OptionError("option reservationTtl must be from 1s to 7d")
        return cls(
            connection=Connection.of(values),
            fetching=Fetching.of(values),
            queue=values["queue"],
            mode=values["mode"],
            reservation=values["reservation"],
            ttl_ms=values["reservationTtl"],
            skip_expired=values["onExpired"] == "skip",
            rows_max=values["maxOffsetsPerTrigger"],
            fail_on_data_loss=values["failOnDataLoss"],
            poll_interval_ms=values["convoymq.pollInterval"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """Of a write, to streams, to a queue or to an exchange."""

    connection: Connection
    topic: str | None = None
    queue: str | None = None
    exchange: str | None = None
    routing_key: str | None = None
    fail_on_unroutable: bool = True
    idempotent: bool
    producer_name: str | None
    message_ids: bool
    request_bytes_max: int
    request_rows_max: int

    @classmethod
    def of_stream(cls, values: OptionValues, use: Use) -> SinkOptions:
        """From the parsed options of format convoymq. Raises OptionError."""
        check_use("convoymq", values, use)
        return cls(topic=values["topic"], **_sink_basics(values, "none"))

    @classmethod
    def of_queue(cls, values: OptionValues, use: Use) -> SinkOptions:
        """From the parsed options of format convoymq_queue. Raises OptionError."""
        check_use("convoymq_queue", values, use)
        if (values["queue"] is None) == (values["exchange"] is None):
            raise OptionError("give either queue or exchange to write to")
        if values["routingKey"] is not None and values["exchange"] is None:
            raise OptionError("option routingKey needs exchange")
        return cls(
            queue=values["queue"],
            exchange=values["exchange"],
            routing_key=values["routingKey"],
            fail_on_unroutable=values["onUnroutable"] == "fail",
            **_sink_basics(values, "auto"),
        )


class _SinkBasics(TypedDict):
    connection: Connection
    producer_name: str | None
    idempotent: bool
    message_ids: bool
    request_bytes_max: int
    request_rows_max: int


def _sink_basics(values: OptionValues, message_id: str) -> _SinkBasics:
    if values["producerName"] is not None and not values["idempotent"]:
        raise OptionError("option producerName has no meaning with idempotent=false")
    return {
        "connection": Connection.of(values),
        "producer_name": values["producerName"],
        "idempotent": values["idempotent"],
        "message_ids": (values["messageId"] or message_id) == "auto",
        "request_bytes_max": values["convoymq.produce.maxBytes"],
        "request_rows_max": values["convoymq.produce.maxRows"],
    }


def _starting(values: OptionValues, default: str) -> Place:
    late = values["startingOffsetsByTimestampStrategy"]
    if values["startingTimestamp"] is not None:
        return Place(kind="timestamps", timestamp_ms=values["startingTimestamp"], late=late)
    if values["startingOffsetsByTimestamp"] is not None:
        by_partition = values["startingOffsetsByTimestamp"]
        return Place(kind="timestamps", by_partition=by_partition, late=late)
    return _place(values["startingOffsets"] or default)


def _ending(values: OptionValues) -> Place:
    if values["endingTimestamp"] is not None:
        return Place(kind="timestamps", timestamp_ms=values["endingTimestamp"])
    if values["endingOffsetsByTimestamp"] is not None:
        return Place(kind="timestamps", by_partition=values["endingOffsetsByTimestamp"])
    return _place(values["endingOffsets"])


def _place(value: str | Offsets) -> Place:
    if isinstance(value, str):
        return Place(kind=value)
    return Place(kind="offsets", by_partition=value)


def _plain_offsets(place: Place) -> Iterable[int]:
    return place.by_partition.values() if place.kind == "offsets" else ()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
