"""The options of both formats: a table each, with Kafka's names and defaults where Kafka has them.

Spark hands options over in lower case and mixes its own among them; names are compared without
regard to case. An unknown option is an error that names the near ones: a mistyped limit must not
be silently no limit.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import TYPE_CHECKING, Any

from convoymq.spark import option_values as parse
from convoymq.spark.errors import OptionError
from convoymq.spark.option_values import Offsets

if TYPE_CHECKING:
    from convoymq.client import ClientConfig


class Use(Flag):
    """What somebody does with a format."""

    BATCH_READ = auto()
    STREAM_READ = auto()
    BATCH_WRITE = auto()
    STREAM_WRITE = auto()
    READ = BATCH_READ | STREAM_READ
    WRITE = BATCH_WRITE | STREAM_WRITE
    ALL = READ | WRITE


_USE_NAMES = {
    Use.BATCH_READ: "a batch read",
    Use.STREAM_READ: "a streaming read",
    Use.BATCH_WRITE: "a batch write",
    Use.STREAM_WRITE: "a streaming write",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row of a format's table."""

    name: str
    use: Use
    parse: Callable[[str], Any]
    default: Any = None
    text: str
    """What it does, with its unit."""


def _option(
    name: str, use: Use, parser: Callable[[str], Any], default: Any, description: str
) -> Option:
    return Option(name=name, use=use, parse=parser, default=default, text=description)


CONNECTION_OPTIONS = (
    _option("servers", Use.ALL, parse.names, None, "`host:port` of nodes, comma between; required"),
    _option("user", Use.ALL, parse.text, "guest", "user, or `env:NAME`, or `file:PATH`"),
    _option("password", Use.ALL, parse.text, "guest", "password, or `env:NAME`, or `file:PATH`"),
    _option("vhost", Use.ALL, parse.text, "/", "virtual host"),
    _option(
        "convoymq.timeout",
        Use.ALL,
        parse.milliseconds,
        30_000,
        "how long a request is repeated over all servers before the task or the query fails",
    ),
    _option("convoymq.name", Use.ALL, parse.text, "spark", "client name that the broker shows"),
    _option("convoymq.tls", Use.ALL, parse.boolean, False, "connect by TLS"),
    _option("convoymq.tls.ca", Use.ALL, parse.text, "", "file of the trusted authorities, PEM"),
    _option("convoymq.tls.cert", Use.ALL, parse.text, "", "file of the client's certificate, PEM"),
    _option("convoymq.tls.key", Use.ALL, parse.text, "", "file of the client's key, PEM"),
    _option("convoymq.tls.verify", Use.ALL, parse.boolean, True, "check the broker's certificate"),
    _option(
        "convoymq.tls.serverName", Use.ALL, parse.text, "", "name that the certificate must have"
    ),
)

FETCH_OPTIONS = (
    _option("includeHeaders", Use.READ, parse.boolean, False, "adds the column `headers`"),
    _option(
        "includeProperties",
        Use.READ,
        parse.boolean,
        False,
        "adds the column `properties`: exchange, routing key and the AMQP properties. Decoded "
        "message by message, so several times slower",
    ),
    _option(
        "minPartitions",
        Use.READ,
        parse.count,
        None,
        "at least so many tasks, by splitting the larger ranges",
    ),
    _option(
        "maxRecordsPerPartition", Use.READ, parse.count, None, "at most so many messages in a task"
    ),
    _option(
        "convoymq.fetch.maxRows", Use.READ, parse.count, 100_000, "messages of one fetch, at most"
    ),
    _option(
        "convoymq.fetch.maxBytes", Use.READ, parse.size_bytes, 8 << 20, "size of one fetch, about"
    ),
    _option(
        "convoymq.fetch.compression",
        Use.READ,
        parse.one_of("none", "zstd", "lz4"),
        "none",
        "compression of what is fetched: `none`, `zstd`, `lz4`",
    ),
    _option(
        "convoymq.fetch.prefetch",
        Use.READ,
        parse.boolean,
        True,
        "ask for the next part while Spark takes the last one",
    ),
    _option(
        "convoymq.pollInterval",
        Use.STREAM_READ,
        parse.milliseconds,
        100,
        "an idle query asks the broker no more often than this",
    ),
)

SINK_OPTIONS = (
    _option(
        "producerName",
        Use.BATCH_WRITE,
        parse.short_name,
        None,
        "a batch write of this name that is repeated adds only what is missing. The rows and their "
        "tasks must be the same",
    ),
    _option(
        "idempotent",
        Use.WRITE,
        parse.boolean,
        True,
        "a repeated task or micro-batch adds only what is missing. `false`: at least once, for "
        "classic queues, which can't tell repeats",
    ),
    _option(
        "messageId",
        Use.WRITE,
        parse.one_of("auto", "none"),
        None,
        "`auto` gives every message the id query/batch/task/row. A column `message_id` has "
        "priority. Default: `none` for streams, `auto` for queues and exchanges",
    ),
    _option(
        "transactional",
        Use.WRITE,
        parse.boolean,
        False,
        "not offered: rows of a batch become visible before the whole batch is there",
    ),
    _option(
        "convoymq.produce.maxBytes", Use.WRITE, parse.size_bytes, 2 << 20, "size of one request"
    ),
    _option("convoymq.produce.maxRows", Use.WRITE, parse.count, 20_000, "rows of one request"),
)

STREAM_OPTIONS = (
    *CONNECTION_OPTIONS,
    _option("subscribe", Use.READ, parse.names, None, "streams, comma between"),
    _option("subscribePattern", Use.READ, parse.pattern, None, "regular expression of streams"),
    _option("assign", Use.READ, parse.assignment, None, 'streams as JSON: `{"flights":[0]}`'),
    _option(
        "startingOffsets",
        Use.READ,
        parse.place,
        None,
        'where a new query begins: `earliest`, `latest` (streaming only) or `{"flights":{"0":23}}` '
        "with -2 = earliest, -1 = latest. Default: `latest` streaming, `earliest` in a batch",
    ),
    _option(
        "startingTimestamp",
        Use.READ,
        parse.whole,
        None,
        "begin at the first message at or after this time, ms since the epoch. Has priority over "
        "`startingOffsetsByTimestamp`, which has priority over `startingOffsets`",
    ),
    _option(
        "startingOffsetsByTimestamp",
        Use.READ,
        parse.timestamps,
        None,
        'the same by stream: `{"flights":{"0":1700000000000}}`',
    ),
    _option(
        "startingOffsetsByTimestampStrategy",
        Use.READ,
        parse.one_of("error", "latest"),
        "error",
        "what to do when no message is that young",
    ),
    _option(
        "endingOffsets",
        Use.BATCH_READ,
        parse.place,
        "latest",
        'where a batch ends, exclusive: `latest` or `{"flights":{"0":50}}` with -1 = latest',
    ),
    _option(
        "endingTimestamp",
        Use.BATCH_READ,
        parse.whole,
        None,
        "end before the first message at or after this time, ms",
    ),
    _option(
        "endingOffsetsByTimestamp", Use.BATCH_READ, parse.timestamps, None, "the same by stream"
    ),
    _option(
        "maxOffsetsPerTrigger",
        Use.STREAM_READ,
        parse.count,
        None,
        "messages of a micro-batch at most, shared by backlog",
    ),
    _option(
        "minOffsetsPerTrigger",
        Use.STREAM_READ,
        parse.count,
        None,
        "wait for so many messages before a micro-batch",
    ),
    _option(
        "maxBytesPerTrigger",
        Use.STREAM_READ,
        parse.size_bytes,
        None,
        "size of a micro-batch, reckoned from the streams' mean message size",
    ),
    _option(
        "maxTriggerDelay",
        Use.STREAM_READ,
        parse.milliseconds,
        15 * 60_000,
        "`minOffsetsPerTrigger` waits no longer than this",
    ),
    _option(
        "failOnDataLoss",
        Use.READ,
        parse.boolean,
        True,
        "fail when messages that should be read are gone; `false` goes on behind the gap",
    ),
    _option(
        "groupId",
        Use.STREAM_READ,
        parse.text,
        None,
        "store progress in the broker under this name, for people to see; never read back",
    ),
    _option(
        "pushdown",
        Use.BATCH_READ,
        parse.boolean,
        False,
        "narrow the read by filters on topic, partition, offset and timestamp. Needs "
        "`spark.sql.python.filterPushdown.enabled=true`, which `convoymq.spark.session` sets",
    ),
    *FETCH_OPTIONS,
    _option(
        "topic",
        Use.WRITE,
        parse.text,
        None,
        "stream to write to; without it the column `topic` decides",
    ),
    *SINK_OPTIONS,
)

QUEUE_OPTIONS = (
    *CONNECTION_OPTIONS,
    _option("queue", Use.ALL, parse.text, None, "queue to read, or to write to"),
    _option(
        "mode",
        Use.STREAM_READ,
        parse.one_of("stage", "lease"),
        "stage",
        "`stage`: in order, exactly once into a checkpointed sink. `lease`: at least once",
    ),
    _option(
        "stage",
        Use.STREAM_READ,
        parse.short_name,
        "spark",
        "name of the query's stage; two queries that read the same queue need two names",
    ),
    _option(
        "stageTtl",
        Use.STREAM_READ,
        parse.milliseconds,
        3_600_000,
        "unsettled messages return to the queue when nothing is heard of the query for so long",
    ),
    _option(
        "onExpired",
        Use.STREAM_READ,
        parse.one_of("fail", "skip"),
        "fail",
        "lease mode: what a repeated batch does whose lease has expired",
    ),
    _option(
        "maxOffsetsPerTrigger",
        Use.STREAM_READ,
        parse.count,
        None,
        "messages of a micro-batch at most",
    ),
    _option(
        "failOnDataLoss",
        Use.STREAM_READ,
        parse.boolean,
        True,
        "fail when the stage was lost, so that messages of the last batches may come again; "
        "`false` goes on",
    ),
    *FETCH_OPTIONS,
    _option(
        "exchange",
        Use.WRITE,
        parse.text,
        None,
        "exchange to publish to, instead of `queue`",
    ),
    _option(
        "routingKey",
        Use.WRITE,
        parse.text,
        None,
        "routing key for `exchange`; without it the column `routing_key` decides",
    ),
    _option(
        "onUnroutable",
        Use.WRITE,
        parse.one_of("fail", "drop"),
        "fail",
        "what to do with messages that the exchange routes nowhere",
    ),
    *SINK_OPTIONS,
)

FORMATS = {"convoymq": STREAM_OPTIONS, "convoymq_queue": QUEUE_OPTIONS}

# Spark passes these along with ours.
_SPARKS_OWN = frozenset({"path", "paths", "checkpointlocation", "queryname", "outputmode"})
# What people who come from Kafka write, and what it is called here.
_KAFKAS_OWN = {
    "kafka.bootstrap.servers": "servers",
    "kafka.group.id": "groupId",
    "groupidprefix": "groupId",
    "kafkaconsumer.polltimeoutms": "convoymq.timeout",
    "fetchoffset.numretries": "convoymq.timeout",
    "fetchoffset.retryintervalms": "convoymq.timeout",
}
_NEAR_MAX = 3


def parse_options(format_name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Reads the options of a format, whatever they are used for.

    Returns:
        A value for every name in the format's table; `given` holds the names that were given.

    Raises:
        OptionError: an unknown name, or a value that its option does not take.
    """
    table = {option.name.lower(): option for option in FORMATS[format_name]}
    values: dict[str, Any] = {option.name: option.default for option in table.values()}
    for name, value in given.items():
        option = table.get(name.lower())
        if option is None:
            if name.lower() in _SPARKS_OWN:
                continue
            raise OptionError(_unknown(format_name, name, table))
        try:
            values[option.name] = option.parse(value)
        except ValueError as error:
            shown = "" if option.name == "password" else f" {value!r}"
            raise OptionError(f"option {option.name}{shown} {error}") from None
    values["given"] = frozenset(table[name.lower()].name for name in given if name.lower() in table)
    if not values["servers"]:
        raise OptionError(f"format {format_name} needs the option servers: host:port,host:port")
    if values["transactional"]:
        raise OptionError(
            "transactional is not offered: rows become visible while their batch is written. "
            "A repeat adds nothing as it is; readers that must not see part of it need a mark"
        )
    return values


def check_use(format_name: str, values: Mapping[str, Any], use: Use) -> None:
    """Refuses options that mean nothing for this use. Raises OptionError."""
    for option in FORMATS[format_name]:
        if option.name in values["given"] and not option.use & use:
            fitting = " and ".join(text for flag, text in _USE_NAMES.items() if flag & option.use)
            raise OptionError(
                f"option {option.name} is for {fitting}; {_USE_NAMES[use]} has no use for it"
            )


def _unknown(format_name: str, name: str, table: Mapping[str, Option]) -> str:
    text = f"format {format_name} has no option {name}"
    known = _KAFKAS_OWN.get(name.lower())
    if known is not None and known.lower() in table:
        return f"{text}; here it is {known}"
    near = [
        table[match].name
        for match in difflib.get_close_matches(name.lower(), table, n=_NEAR_MAX, cutoff=0.6)
    ]
    if near:
        return f"{text}; did you mean {' or '.join(near)}?"
    return f"{text}; there are {', '.join(sorted(option.name for option in table.values()))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Where to connect and as whom. Holds references to secrets, not what they stand for."""

    servers: tuple[str, ...]
    user: str
    password: str = field(repr=False)
    vhost: str
    timeout_ms: int
    name: str
    tls: tuple[str, str, str, bool, str] | None
    """Files of authorities, certificate and key; whether to verify; server name."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Connection:
        """From parsed options. Raises OptionError: not `host:port`, or TLS options without TLS."""
        tls_options = [name for name in values["given"] if name.startswith("convoymq.tls.")]
        if tls_options and not values["convoymq.tls"]:
            raise OptionError(f"option {min(tls_options)} needs convoymq.tls=true")
        made = cls(
            servers=values["servers"],
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
        made._check()
        return made

    def config(self) -> ClientConfig:
        """For a client of this process; resolves references. Raises OptionError."""
        return self._config(parse.secret(self.user), parse.secret(self.password))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetching:
    """How tasks read."""

    include_headers: bool
    include_properties: bool
    partitions_min: int | None
    records_per_partition_max: int | None
    rows_max: int
    bytes_max: int
    compression: str
    prefetch: bool

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Fetching:
        """From parsed options."""
        compression = values["convoymq.fetch.compression"]
        return cls(
            include_headers=values["includeHeaders"],
            include_properties=values["includeProperties"],
            partitions_min=values["minPartitions"],
            records_per_partition_max=values["maxRecordsPerPartition"],
            rows_max=values["convoymq.fetch.maxRows"],
            bytes_max=values["convoymq.fetch.maxBytes"],
            compression="" if compression == "none" else compression,
            prefetch=values["convoymq.fetch.prefetch"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where to begin or to end, as asked for: not yet an offset."""

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
    """How much a micro-batch takes."""

    rows_max: int | None = None
    rows_min: int | None = None
    bytes_max: int | None = None
    delay_max_ms: int = 15 * 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReadOptions:
    """Of a read of streams."""

    connection: Connection
    fetching: Fetching
    streams: tuple[str, ...]
    """Named by `subscribe` or `assign`; empty with a pattern."""
    pattern: str | None
    starting: Place
    ending: Place
    limits: Limits
    fail_on_data_loss: bool
    group_id: str | None
    pushdown: bool
    poll_interval_ms: int

    @classmethod
    def of(cls, values: Mapping[str, Any], use: Use) -> StreamReadOptions:
        """From parsed options. Raises OptionError when they do not fit together."""
        check_use("convoymq", values, use)
        selected = [n for n in ("subscribe", "subscribePattern", "assign") if values[n] is not None]
        if len(selected) != 1:
            found = f", not {' and '.join(selected)}" if selected else ""
            raise OptionError(f"give one of subscribe, subscribePattern and assign{found}")
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
        if self.pattern is not None:
            return
        for name, place in (("starting", self.starting), ("ending", self.ending)):
            if not place.by_partition:
                continue
            placed = {stream for stream, _ in place.by_partition}
            if placed != set(self.streams):
                raise OptionError(
                    f"the {name} offsets are for {_listed(placed)}, "
                    f"but what is read is {_listed(self.streams)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReadOptions:
    """Of a read of a queue."""

    connection: Connection
    fetching: Fetching
    queue: str
    mode: str
    stage: str
    ttl_ms: int
    skip_expired: bool
    rows_max: int | None
    fail_on_data_loss: bool
    poll_interval_ms: int

    @classmethod
    def of(cls, values: Mapping[str, Any], use: Use) -> QueueReadOptions:
        """From parsed options. Raises OptionError when they do not fit together."""
        check_use("convoymq_queue", values, use)
        if values["queue"] is None:
            raise OptionError("format convoymq_queue reads one queue: give the option queue")
        lease = values["mode"] == "lease"
        misfits = {"stage", "failOnDataLoss"} if lease else {"onExpired"}
        for name in sorted(misfits & values["given"]):
            raise OptionError(f"option {name} has no meaning with mode={values['mode']}")
        return cls(
            connection=Connection.of(values),
            fetching=Fetching.of(values),
            queue=values["queue"],
            mode=values["mode"],
            stage=values["stage"],
            ttl_ms=values["stageTtl"],
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
    def of_stream(cls, values: Mapping[str, Any], use: Use) -> SinkOptions:
        """From the parsed options of format convoymq. Raises OptionError."""
        check_use("convoymq", values, use)
        return cls(topic=values["topic"], **_sink_basics(values, "none"))

    @classmethod
    def of_queue(cls, values: Mapping[str, Any], use: Use) -> SinkOptions:
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


def _sink_basics(values: Mapping[str, Any], message_id: str) -> dict[str, Any]:
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


def _starting(values: Mapping[str, Any], default: str) -> Place:
    late = values["startingOffsetsByTimestampStrategy"]
    if values["startingTimestamp"] is not None:
        return Place(kind="timestamps", timestamp_ms=values["startingTimestamp"], late=late)
    if values["startingOffsetsByTimestamp"] is not None:
        by_partition = values["startingOffsetsByTimestamp"]
        return Place(kind="timestamps", by_partition=by_partition, late=late)
    return _place(values["startingOffsets"] or default)


def _ending(values: Mapping[str, Any]) -> Place:
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
