"""Options: names, defaults, values, and what is said about wrong ones."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from convoymq.spark import option_values as values
from convoymq.spark.errors import OptionError
from convoymq.spark.option_table import FORMATS, Use, parse_options, reference
from convoymq.spark.options import Connection, SinkOptions, StreamReadOptions
from tests.spark.support import queue_source, stream_source

MINIMAL = {"servers": "a:1", "subscribe": "s"}


def read(use: Use = Use.STREAM_READ, **given: str) -> StreamReadOptions:
    return StreamReadOptions.of(parse_options("convoymq", {**MINIMAL, **given}), use)


def test_defaults_are_those_of_kafkas_source() -> None:
    stream = read()
    assert stream.starting.kind == "latest"
    assert stream.fail_on_data_loss
    assert stream.limits.delay_max_ms == 15 * 60_000
    assert stream.fetching.partitions_min is None
    batch = read(Use.BATCH_READ)
    assert (batch.starting.kind, batch.ending.kind) == ("earliest", "latest")


@pytest.mark.parametrize("format_name", FORMATS)
def test_every_option_says_what_it_does_and_is_unique(format_name: str) -> None:
    names = [option.name.lower() for option in FORMATS[format_name]]
    assert len(names) == len(set(names))
    assert all(option.text for option in FORMATS[format_name])


def test_the_page_of_options_is_the_generated_one() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "spark-options.md"
    assert page.read_text() == reference()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("maxoffsetpertrigger", "maxOffsetsPerTrigger"),
        ("startingoffset", "startingOffsets"),
        ("kafka.bootstrap.servers", "here it is servers"),
        ("failondataloose", "failOnDataLoss"),
        ("convoymq.timout", "convoymq.timeout"),
        ("zzzz", "there are afterClose, assign"),
    ],
)
def test_an_unknown_option_is_refused_with_the_near_ones(name: str, hint: str) -> None:
    with pytest.raises(OptionError, match=hint):
        parse_options("convoymq", {**MINIMAL, name: "1"})


@pytest.mark.parametrize("given", [{}, {**MINIMAL, "provider": "convoymq", "owner": "root"}])
def test_a_table_is_refused_with_what_to_do_instead(given: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=r"^Spark forgets .*CREATE TEMPORARY VIEW"):
        parse_options("convoymq", given)


def test_what_spark_adds_itself_is_let_through() -> None:
    parse_options("convoymq", {**MINIMAL, "checkpointLocation": "/x", "path": "y"})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"maxOffsetsPerTrigger": "0"}, "above zero"),
        ({"maxOffsetsPerTrigger": "many"}, "above zero"),
        ({"failOnDataLoss": "yes"}, "true or false"),
        ({"maxTriggerDelay": "15 parsecs"}, "must be a time"),
        ({"maxBytesPerTrigger": "-1"}, "must be a size"),
        ({"startingOffsets": "begin"}, "must be earliest, latest or JSON"),
        ({"startingOffsets": '{"s":{"1":5}}'}, "one partition"),
        ({"startingOffsets": '{"s":{"0":-3}}'}, "from -2 on"),
        ({"startingOffsets": '{"s":{"0":true}}'}, "whole number"),
        ({"startingOffsets": '{"other":{"0":5}}'}, "what is read is s"),
        ({"startingOffsets": "{"}, "not JSON"),
        ({"convoymq.fetch.compression": "gzip"}, "none or zstd or lz4"),
        ({"servers": " , "}, "at least one"),
        ({"servers": "host:port"}, "host:port"),
        ({"servers": "nohost"}, "must be host:port, nohost has no port"),
        ({"servers": "a:1,b"}, "must be host:port, b has no port"),
        ({"servers": "a:1,a:1"}, "names a:1 twice"),
        ({"subscribe": "x,x"}, "names x twice"),
        ({"assign": '{"s":[0]}'}, "one of subscribe"),
        ({"minOffsetsPerTrigger": "10", "maxOffsetsPerTrigger": "5"}, "above"),
        ({"convoymq.tls.ca": "/x"}, "needs convoymq.tls"),
        ({"transactional": "true"}, "not offered"),
        ({"endingOffsets": "latest"}, "a batch read"),
        ({"topic": "s"}, "not subscribe and topic"),
        ({"startingOffsets": '{"s":{}}'}, "must name partitions"),
        ({"startingOffsets": '{"s":{"01":5}}'}, "must name partitions"),
        ({"afterClose": "same-batch"}, "no meaning with subscribe"),
    ],
)
def test_wrong_values_are_refused_with_what_is_wanted(given: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        read(**given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"startingOffsets": "latest"}, "can't be latest"),
        ({"startingOffsets": '{"s":{"0":-1}}'}, "can't be latest"),
        ({"endingOffsets": "earliest"}, "can't be earliest"),
        ({"endingOffsets": '{"s":{"0":-2}}'}, "can't be earliest"),
        ({"maxOffsetsPerTrigger": "5"}, "a streaming read"),
    ],
)
def test_a_batch_refuses_what_would_read_nothing(given: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        read(Use.BATCH_READ, **given)


def test_selection_by_subscribe_assign_or_pattern() -> None:
    assert read(subscribe=" a , b,").streams == ("a", "b")
    base = {"servers": "a:1"}
    assigned = parse_options("convoymq", {**base, "assign": '{"a":[0],"b":[0]}'})
    assert StreamReadOptions.of(assigned, Use.STREAM_READ).streams == ("a", "b")
    matched = parse_options("convoymq", {**base, "subscribePattern": "fl.*"})
    assert StreamReadOptions.of(matched, Use.STREAM_READ).pattern == "fl.*"
    for wrong in ({}, {"subscribe": "a", "subscribePattern": "b"}):
        with pytest.raises(OptionError, match="one of subscribe"):
            StreamReadOptions.of(parse_options("convoymq", {**base, **wrong}), Use.STREAM_READ)
    with pytest.raises(OptionError, match="regular expression"):
        parse_options("convoymq", {**base, "subscribePattern": "("})
    with pytest.raises(OptionError, match="one partition"):
        parse_options("convoymq", {**base, "assign": '{"a":[0,1]}'})


def test_the_start_by_time_has_priority_in_kafkas_order() -> None:
    by_offset = {"startingOffsets": "earliest"}
    by_stream = {"startingOffsetsByTimestamp": '{"s":{"0":7}}'}
    assert read(**by_offset).starting.kind == "earliest"
    found = read(**by_offset, **by_stream).starting
    assert (found.kind, found.by_partition) == ("timestamps", {("s", 0): 7})
    found = read(**by_offset, **by_stream, startingTimestamp="9").starting
    assert (found.kind, found.timestamp_ms, found.late) == ("timestamps", 9, "error")


@pytest.mark.parametrize(
    ("text", "ms"), [("500ms", 500), ("30s", 30_000), ("15m", 900_000), ("1h", 3_600_000), ("7", 7)]
)
def test_times(text: str, ms: int) -> None:
    assert values.milliseconds(text) == ms


@pytest.mark.parametrize(("text", "size"), [("16m", 16 << 20), ("1g", 1 << 30), ("2kb", 2048)])
def test_sizes(text: str, size: int) -> None:
    assert values.size_bytes(text) == size


def test_secrets_stay_references_until_a_connection_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = tmp_path / "password"
    secret.write_text("from-file\n")
    monkeypatch.setenv("CONVOY_TEST_USER", "from-environment")
    given = {**MINIMAL, "user": "env:CONVOY_TEST_USER", "password": f"file:{secret}"}
    connection = Connection.of(parse_options("convoymq", given))
    pickled = pickle.dumps(connection)
    assert b"from-" not in pickled
    config = pickle.loads(pickled).config()
    assert (config.user, config.password) == ("from-environment", "from-file")
    monkeypatch.delenv("CONVOY_TEST_USER")
    with pytest.raises(OptionError, match="CONVOY_TEST_USER"):
        connection.config()
    with pytest.raises(OptionError, match="can't read"):
        Connection.of(parse_options("convoymq", {**MINIMAL, "password": "file:/none"})).config()


def test_a_password_is_never_shown() -> None:
    connection = Connection.of(parse_options("convoymq", {**MINIMAL, "password": "hush"}))
    assert "hush" not in repr(connection)
    assert "hush" not in repr(connection.config())


def test_tls_options_reach_the_client() -> None:
    given = {
        **MINIMAL,
        "convoymq.tls": "true",
        "convoymq.tls.ca": "/ca.pem",
        "convoymq.tls.servername": "broker",
        "convoymq.timeout": "5s",
    }
    config = Connection.of(parse_options("convoymq", given)).config()
    assert config.tls is not None
    assert (config.tls.ca_file, config.tls.server_name, config.tls.verify) == (
        "/ca.pem",
        "broker",
        True,
    )
    assert config.timeout == 5


def test_modes_of_the_queue_format() -> None:
    with pytest.raises(OptionError, match="give the option queue"):
        queue_source().stream_reader(queue_source().schema())
    for given, text in (
        ({"mode": "lease", "reservation": "x"}, "no meaning with mode=lease"),
        ({"mode": "reservation", "onExpired": "skip"}, "no meaning with mode=reservation"),
        ({"exchange": "e"}, "write"),
        ({"reservationTtl": "8d"}, "from 1s to 7d"),
    ):
        data_source = queue_source(queue="q", **given)
        with pytest.raises(OptionError, match=text):
            data_source.stream_reader(data_source.schema())


def test_targets_of_the_sinks() -> None:
    def sink(**given: str) -> SinkOptions:
        parsed = parse_options("convoymq_queue", {"servers": "a:1", **given})
        return SinkOptions.of_queue(parsed, Use.BATCH_WRITE)

    assert sink(queue="q").message_ids
    assert not sink(queue="q", messageId="none").message_ids
    for wrong in ({}, {"queue": "q", "exchange": "e"}, {"queue": "q", "routingKey": "k"}):
        with pytest.raises(OptionError):
            sink(**wrong)
    parsed = parse_options("convoymq", {"servers": "a:1", "producerName": "x"})
    with pytest.raises(OptionError, match="a batch write"):
        SinkOptions.of_stream(parsed, Use.STREAM_WRITE)


def test_data_sources_ask_nobody_before_they_are_used() -> None:
    data_source = stream_source(subscribe="s", includeHeaders="true")
    assert data_source.schema().fieldNames() == [
        "key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers",
    ]  # fmt: skip
    data_source.stream_reader(data_source.schema())
