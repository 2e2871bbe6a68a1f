"""Streams as Arrow, pandas, Polars and DuckDB read them, from a real cluster."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from benchmarks.systems import connect

from convoymq.client import Client, ClientConfig
from convoymq.client.rows import frame_of
from tests.clusters import Cluster
from tests.interop.conftest import Names

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COUNT = 5000


@pytest.fixture
def servers(cluster: Cluster) -> tuple[str, ...]:
    return tuple(urlsplit(uri).netloc.rpartition("@")[2] for uri in cluster.uris)


@pytest.fixture
def client(servers: tuple[str, ...]) -> Iterator[Client]:
    with Client(ClientConfig(servers)) as made:
        yield made


@pytest.fixture
def stream(cluster: Cluster, client: Client, names: Names) -> str:
    """A stream with numbers; each tenth is a tombstone, each third has no key."""
    name = names.queue()
    connection = connect(cluster.uris[0])
    connection.channel().queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
    connection.close()
    values = [None if n % 10 == 0 else b"%d" % n for n in range(COUNT)]
    keys = [None if n % 3 == 0 else b"k%d" % n for n in range(COUNT)]
    client.produce(frame_of(values, keys=keys), stream=name, producer="p", sequence=1)
    return name


def test_a_stream_is_a_table(client: Client, stream: str) -> None:
    before = datetime.now(UTC) - timedelta(hours=1)
    read = client.read(stream)
    table = read.to_arrow()
    assert table.schema == read.schema
    assert table.schema.names == ["offset", "timestamp", "key", "value", "headers"]
    assert table["offset"].to_pylist() == list(range(COUNT))
    assert table["value"].to_pylist()[:12] == [
        None,
        *(b"%d" % n for n in range(1, 10)),
        None,
        b"11",
    ]
    assert table["key"].to_pylist()[:3] == [None, b"k1", b"k2"]
    assert not any(table["headers"].to_pylist())
    assert all(before < each < datetime.now(UTC) + timedelta(hours=1)
               for each in table["timestamp"].to_pylist())  # fmt: skip
    # Read again, it is the same; what is stored later is not in it.
    client.produce(frame_of([b"later"]), stream=stream)
    assert read.to_arrow() == table
    assert all(isinstance(batch, pa.RecordBatch) for batch in read)


def test_a_part_of_a_stream_by_offset_time_and_columns(client: Client, stream: str) -> None:
    part = client.read(stream, start=10, end=13, columns=("value", "offset")).to_arrow()
    assert part.to_pylist() == [
        {"value": None, "offset": 10}, {"value": b"11", "offset": 11},
        {"value": b"12", "offset": 12},
    ]  # fmt: skip
    assert client.read(stream, start="latest").to_arrow().num_rows == 0
    then = datetime.now(UTC) - timedelta(hours=1)
    assert client.read(stream, start=then).to_arrow().num_rows == COUNT
    later = datetime.now(UTC) + timedelta(hours=1)
    assert client.read(stream, start=later).to_arrow().num_rows == 0
    with pytest.raises(ValueError, match="columns are of offset, timestamp, key"):
        client.read(stream, columns=("body",))


def test_pandas_and_polars_take_it(
    client: Client, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Polars sets it when it is imported.
    monkeypatch.setenv("_RJEM_MALLOC_CONF", "")
    polars = pytest.importorskip("polars")
    frame = client.read(stream).to_pandas()
    assert (len(frame), frame["value"][11]) == (COUNT, b"11")
    assert frame["value"].isna().sum() == COUNT // 10
    table = client.read(stream).to_polars()
    assert table.height == COUNT
    assert table.filter(polars.col("value").is_null()).height == COUNT // 10


def test_the_example_of_duckdb(
    servers: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("duckdb")
    runpy.run_path(str(EXAMPLES / "duckdb_stream.py"))["main"](servers)
    printed = capsys.readouterr().out
    for room, mean in (("attic", "17.5"), ("cellar", "16.5"), ("kitchen", "15.5")):
        assert any(room in line and "10000" in line and mean in line
                   for line in printed.splitlines()), printed  # fmt: skip
