"""The options of both formats: a table each, with Kafka's names and defaults where Kafka has them.

Spark hands options over in lower case and mixes its own among them; names are compared without
regard to case. An unknown option is an error that names the near ones: a mistyped limit must not
be silently no limit. `reference` makes docs/spark-options.md of the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, TypeAlias

from convoymq.model.near_names import did_you_mean
from convoymq.spark import option_values as parse
from convoymq.spark.errors import OptionError

OptionValues: TypeAlias = Mapping[str, Any]
"""Option name → what its parser made of it, or its default."""


class Use(Flag):
    """Uses of a format."""

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


@dataclass(frozen=True, slots=True)
class Option:
    """One row of a format's table."""

    name: str
    use: Use
    parse: Callable[[str], object]
    default: object
    text: str
    """Effect of the option, with its unit."""


CONNECTION_OPTIONS = (
    Option("servers", Use.ALL, parse.servers, None,
        "`host:port` of nodes, comma between; required"),
    Option("user", Use.ALL, parse.text, "guest", "user, or `env:NAME`, or `file:PATH`"),
    Option("password", Use.ALL, parse.text, "guest", "password, or `env:NAME`, or `file:PATH`"),
    Option("vhost", Use.ALL, parse.text, "/", "virtual host"),
    Option("convoymq.timeout", Use.ALL, parse.milliseconds, 30_000,
        "how long a request is repeated over all servers before the task or the query fails"),
    Option("convoymq.name", Use.ALL, parse.text, "spark", "client name that the broker shows"),
    Option("convoymq.tls", Use.ALL, parse.boolean, False, "connect by TLS"),
    Option("convoymq.tls.ca", Use.ALL, parse.text, "", "file of the trusted authorities, PEM"),
    Option("convoymq.tls.cert", Use.ALL, parse.text, "", "file of the client's certificate, PEM"),
    Option("convoymq.tls.key", Use.ALL, parse.text, "", "file of the client's key, PEM"),
    Option("convoymq.tls.verify", Use.ALL, parse.boolean, True, "check the broker's certificate"),
    Option("convoymq.tls.serverName", Use.ALL, parse.text, "",
        "name that the certificate must have"),
)  # fmt: skip

FETCH_OPTIONS = (
    Option("includeHeaders", Use.READ, parse.boolean, False, "adds the column `headers`"),
    Option("includeProperties", Use.READ, parse.boolean, False,
        "adds the column `properties`: exchange, routing key and the AMQP properties. Decoded "
        "message by message, so several times slower"),
    Option("minPartitions", Use.READ, parse.count, None,
        "at least so many tasks, by splitting the larger ranges"),
    Option("maxRecordsPerPartition", Use.READ, parse.count, None,
        "at most so many messages in a task"),
    Option("convoymq.fetch.maxRows", Use.READ, parse.count, 100_000,
        "messages of one fetch, at most"),
    Option("convoymq.fetch.maxBytes", Use.READ, parse.size_bytes, 8 << 20,
        "size of one fetch, about"),
    Option("convoymq.fetch.maxBytesPerSecond", Use.READ, parse.size_bytes, None,
        "at most so much a second in each task, for a backlog beside busy clients"),
    Option("convoymq.fetch.compression", Use.READ, parse.one_of("none", "zstd", "lz4"), "none",
        "compression of what is fetched: `none`, `zstd`, `lz4`"),
    Option("convoymq.fetch.prefetch", Use.READ, parse.boolean, True,
        "ask for the next part while Spark takes the last one"),
    Option("convoymq.pollInterval", Use.STREAM_READ, parse.milliseconds, 100,
        "an idle query asks the broker no more often than this"),
)  # fmt: skip

SINK_OPTIONS = (
    Option("producerName", Use.BATCH_WRITE, parse.short_name, None,
        "a batch write of this name that is repeated adds only what is missing. Rows that come in "
        "other tasks or in another order come twice"),
    Option("idempotent", Use.WRITE, parse.boolean, True,
        "a repeated task or micro-batch adds only what is missing; rows in another order come "
        "twice. `false`: at least once, for classic queues, which can't tell repeats"),
    Option("messageId", Use.WRITE, parse.one_of("auto", "none"), None,
        "`auto` gives every message the id query/batch/task/row. A column `message_id` has "
        "priority. Default: `none` for streams, `auto` for queues and exchanges"),
    Option("transactional", Use.WRITE, parse.boolean, False,
        "not offered: rows of a batch become visible before the whole batch is there"),
    Option("convoymq.produce.maxBytes", Use.WRITE, parse.size_bytes, 4 << 20,
        "size of one request"),
    Option("convoymq.produce.maxRows", Use.WRITE, parse.count, 20_000, "rows of one request"),
)  # fmt: skip

STREAM_OPTIONS = (
    *CONNECTION_OPTIONS,
    Option("namesrv", Use.ALL, parse.servers, None,
        "`host:port` of RocketMQ's name servers, comma between, instead of `servers`: `topic` is a "
        "topic of broker groups. `user` and `password` are access key and secret key there"),
    Option("subscribe", Use.READ, parse.names, None, "streams, comma between"),
    Option("subscribePattern", Use.READ, parse.pattern, None, "regular expression of streams"),
    Option("assign", Use.READ, parse.assignment, None, 'streams as JSON: `{"flights":[0]}`'),
    Option("topic", Use.ALL, parse.text, None,
        "reading: one ordered topic, or RocketMQ's (`namesrv`), instead of streams. Writing: the "
        "stream or topic to write to; without it the column `topic` decides, by streams"),
    Option("afterClose", Use.STREAM_READ, parse.one_of("next-batch", "same-batch"), None,
        "of a topic: whether a micro-batch that reads a partition to its end goes on with what "
        "came after a split, merge or move. `next-batch` (default): no, so each key is in one "
        "task, in order. `same-batch`: yes; sort by `order_token`"),
    Option("startingOffsets", Use.READ, parse.place, None,
        'where a new query begins: `earliest`, `latest` (streaming only) or `{"flights":{"0":23}}` '
        "with -2 = earliest, -1 = latest; of a topic by partition, so that all keys have one "
        "place. Default: `latest` streaming, `earliest` in a batch"),
    Option("startingTimestamp", Use.READ, parse.whole, None,
        "begin at the first message at or after this time, ms since the epoch. Has priority over "
        "`startingOffsetsByTimestamp`, which has priority over `startingOffsets`"),
    Option("startingOffsetsByTimestamp", Use.READ, parse.timestamps, None,
        'the same by stream: `{"flights":{"0":1700000000000}}`'),
    Option("startingOffsetsByTimestampStrategy", Use.READ, parse.one_of("error", "latest"), "error",
        "what to do when no message is that young"),
    Option("endingOffsets", Use.BATCH_READ, parse.place, "latest",
        'where a batch ends, exclusive: `latest` or `{"flights":{"0":50}}` with -1 = latest'),
    Option("endingTimestamp", Use.BATCH_READ, parse.whole, None,
        "end before the first message at or after this time, ms"),
    Option("endingOffsetsByTimestamp", Use.BATCH_READ, parse.timestamps, None,
        "the same by stream"),
    Option("maxOffsetsPerTrigger", Use.STREAM_READ, parse.count, None,
        "messages of a micro-batch at most, shared by backlog"),
    Option("minOffsetsPerTrigger", Use.STREAM_READ, parse.count, None,
        "wait for so many messages before a micro-batch"),
    Option("maxBytesPerTrigger", Use.STREAM_READ, parse.size_bytes, None,
        "size of a micro-batch, reckoned from the streams' mean message size"),
    Option("maxTriggerDelay", Use.STREAM_READ, parse.milliseconds, 15 * 60_000,
        "`minOffsetsPerTrigger` waits no longer than this"),
    Option("failOnDataLoss", Use.READ, parse.boolean, True,
        "fail when messages that should be read are gone; `false` goes on behind the gap"),
    Option("groupId", Use.STREAM_READ, parse.text, None,
        "store progress in the broker under this name, for people to see; never read back"),
    Option("pushdown", Use.BATCH_READ, parse.boolean, False,
        "narrow the read by filters on topic, partition, offset and timestamp. Needs "
        "`spark.sql.python.filterPushdown.enabled=true`, which `convoymq.spark.session` sets"),
    Option("convoymq.fetch.local", Use.READ, parse.boolean, True,
        "read from the files of a node on the same machine, where a task may open them"),
    *FETCH_OPTIONS,
    *SINK_OPTIONS,
)  # fmt: skip

QUEUE_OPTIONS = (
    *CONNECTION_OPTIONS,
    Option("queue", Use.ALL, parse.text, None, "queue to read, or to write to"),
    Option("mode", Use.STREAM_READ, parse.one_of("reservation", "lease"), "reservation",
        "`reservation`: in order, exactly once into a checkpointed sink. `lease`: at least once"),
    Option("reservation", Use.STREAM_READ, parse.short_name, "spark",
        "name of the query's reservation; two queries that read the same queue need two names"),
    Option("reservationTtl", Use.STREAM_READ, parse.milliseconds, 3_600_000,
        "unsettled messages return to the queue when nothing is heard of the query for so long"),
    Option("onExpired", Use.STREAM_READ, parse.one_of("fail", "skip"), "fail",
        "lease mode: what a repeated batch does whose lease has expired"),
    Option("maxOffsetsPerTrigger", Use.STREAM_READ, parse.count, None,
        "messages of a micro-batch at most"),
    Option("failOnDataLoss", Use.STREAM_READ, parse.boolean, True,
        "fail when the reservation was lost, so that messages of the last batches may come again; "
        "`false` goes on"),
    Option("includeContentHeader", Use.READ, parse.boolean, False,
        "adds the column `content_header`: properties and header table as AMQP writes them, in the "
        "payload of a content header frame"),
    *FETCH_OPTIONS,
    Option("exchange", Use.WRITE, parse.text, None, "exchange to publish to, instead of `queue`"),
    Option("routingKey", Use.WRITE, parse.text, None,
        "routing key for `exchange`; without it the column `routing_key` decides"),
    Option("onUnroutable", Use.WRITE, parse.one_of("fail", "drop"), "fail",
        "what to do with messages that the exchange routes nowhere"),
    *SINK_OPTIONS,
)  # fmt: skip

FORMATS = {"convoymq": STREAM_OPTIONS, "convoymq_queue": QUEUE_OPTIONS}

# Spark passes these along with ours.
_OF_TABLES = "provider"
"""An option that Spark gives for CREATE TABLE alone."""
_USE_VIEWS = (
    "Spark forgets the options of a table whose source is written in Python: "
    "use CREATE TEMPORARY VIEW … USING {format} OPTIONS (…)"
)
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


def parse_options(format_name: str, given: Mapping[str, str]) -> OptionValues:
    """Reads the options of a format, whatever they are used for.

    Returns:
        A value for every name in the format's table; `given` holds the names that were given.

    Raises:
        OptionError: an unknown name, or a value that its option does not take.
    """
    if not given or _OF_TABLES in given:
        # CREATE TABLE; or a query of a table that was made with columns.
        raise OptionError(_USE_VIEWS.format(format=format_name))
    table = {option.name.lower(): option for option in FORMATS[format_name]}
    values: dict[str, object] = {option.name: option.default for option in table.values()}
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
    if not values["servers"] and not values.get("namesrv"):
        raise OptionError(f"format {format_name} needs the option servers: host:port,host:port")
    if values["transactional"]:
        raise OptionError(
            "transactional is not offered: rows become visible while their batch is written. "
            "A repeat adds nothing as it is; readers that must not see part of it need a mark"
        )
    return values


def check_use(format_name: str, values: OptionValues, use: Use) -> None:
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
    names = sorted(option.name for option in table.values())
    return f"{text}; {did_you_mean(name, names) or 'there are ' + ', '.join(names)}"


def reference() -> str:
    """Returns docs/spark-options.md."""
    lines = [
        "# Options of the Spark data sources",
        "",
        "Names are those of Spark's Kafka source where Kafka has the option; case does not matter.",
        "An unknown option is an error that names the near ones. Times are written `500ms`, `30s`,",
        "`15m`; sizes `500000`, `16m`, `1g`. This page is made by",
        "`python -m convoymq.spark.option_table`.",
    ]
    for format_name, options in FORMATS.items():
        for title, use in (("Reading", Use.READ), ("Writing", Use.WRITE)):
            lines += ["", f"## {title}, format `{format_name}`", ""]
            lines += ["| option | default | meaning |", "|---|---|---|"]
            lines += [_row(option, use) for option in options if option.use & use]
    return "\n".join(lines) + "\n"


def _row(option: Option, use: Use) -> str:
    only = [text for flag, text in _USE_NAMES.items() if flag & use & option.use]
    where = f" For {only[0]} only." if len(only) == 1 else ""
    meaning = option.text[0].upper() + option.text[1:] if option.text[0].isalpha() else option.text
    cell = meaning.replace("|", "\\|")
    return f"| `{option.name}` | {_default(option)} | {cell}.{where} |"


def _default(option: Option) -> str:
    value = option.default
    if value is None or value == "":
        return "–"
    if option.parse is parse.milliseconds and isinstance(value, int):
        units = ((3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms"))
        size, unit = next(pair for pair in units if value % pair[0] == 0)
        return f"`{value // size}{unit}`"
    if option.parse is parse.size_bytes and isinstance(value, int):
        return f"`{value >> 20}m`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(reference(), end="")
