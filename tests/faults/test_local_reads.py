"""Streams read from the files of a node on the same machine: the same rows, or the node's own."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.client import Client, ClientConfig
from convoymq.client.errors import NotFound, Recreated
from convoymq.kernels.columns import (
    EXCHANGE,
    HEADERS,
    KEY,
    OFFSET,
    PROPERTIES,
    ROUTING_KEY,
    TIMESTAMP,
    VALUE,
)
from tests.faults.test_damage import flip, log_directory
from tests.faults.traffic import connect, until
from tests.forked_nodes import ForkedCluster
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports
from tests.spark.support import Query, batch_rows, stream_source
from tests.unit.edges.columnar.support import values_frame

BASE_PORT = cluster_ports(__name__)
STREAM = "measurements"
COLUMNS = OFFSET | TIMESTAMP | KEY | VALUE | HEADERS | EXCHANGE | ROUTING_KEY | PROPERTIES
SMALL_FILES = {"raft.wal_max_size_bytes": "2MiB", "raft.mem_table_max_bytes": "0"}
ROUNDS = 12
ROWS = 4000
SIZE = 200


def client(cluster: LocalCluster, *numbers: int) -> Client:
    """A client of these nodes that begins with the first."""
    servers = tuple(f"127.0.0.1:{cluster.nodes[number - 1].amqp_port}" for number in numbers)
    return Client(ClientConfig(servers, spread=False))


def produced(first: int) -> bytes:
    return values_frame([b"%0*d" % (SIZE, first + n) for n in range(ROWS)])


def fill(cluster: LocalCluster) -> int:
    """Rows from a columnar producer and, between them, from AMQP, repeats that are dropped and
    offsets that are stored among them; returns how many there are."""
    connection = connect(cluster, 1)
    channel = connection.channel()
    channel.queue_declare(STREAM, durable=True, arguments={"x-queue-type": "stream"})
    channel.confirm_delivery()
    made = 0
    with client(cluster, 1) as producer:
        for turn in range(ROUNDS):
            for _ in range(2):
                producer.produce(
                    produced(turn * ROWS), stream=STREAM, producer="meter", sequence=turn * ROWS
                )
            made += ROWS
            producer.store_offset(STREAM, "reader", turn)
            for n in range(20):
                properties = pika.BasicProperties(
                    headers={"x-key": f"k{n}", "turn": turn}, message_id=str(n), delivery_mode=2
                )
                channel.basic_publish("", STREAM, b"x" * n, properties)
            made += 20
    connection.close()
    return made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes with a stream in several small segment files."""
    directory = tmp_path_factory.mktemp("local") / "cluster"
    with ForkedCluster(directory, 3, BASE_PORT, SMALL_FILES) as made:
        made.wait_ready()
        assert fill(made) == ROUNDS * (ROWS + 20)
        for number in (1, 2, 3):
            until(lambda number=number: segments(made, number), "no segments")
        yield made


def segments(cluster: LocalCluster, number: int) -> list[Path]:
    """Segment files of the stream on a node that are worth reading, oldest first."""
    found = sorted((log_directory(cluster, number) / "groups").glob("*/*.seg"))
    return [path for path in found if path.stat().st_size > 1 << 20]


def rows(reader: Client, *, local: bool, start: int = 0, max_bytes: int = 1 << 20) -> list[bytes]:
    """All rows from `start` on, each with all its columns; they must be without a gap."""
    found: list[bytes] = []
    end = ROUNDS * (ROWS + 20)
    at = start
    while at < end:
        result = reader.fetch(
            STREAM, at, end=end, max_bytes=max_bytes, columns=COLUMNS, local=local
        )
        frame = result.frame
        assert frame.base == at < frame.next <= end
        assert list(frame.offsets()) == list(range(at, frame.next))
        times = frame.buffers(TIMESTAMP)[0].cast("q")
        lists = frame.buffers(HEADERS)[1].cast("i")
        columns = [
            (buffers[-2].cast("i"), buffers[-1])
            for buffers in map(frame.buffers, (KEY, VALUE, EXCHANGE, ROUTING_KEY, PROPERTIES))
        ]
        for n in range(frame.rows):
            parts = [bytes(data[ends[n] : ends[n + 1]]) for ends, data in columns]
            found.append(repr((times[n], lists[n + 1] - lists[n], parts)).encode())
        at = frame.next
    return found


def descriptors(cluster: LocalCluster, *numbers: int) -> int:
    """How many fetches these nodes have answered with a place in a file."""
    name = "convoy_fetch_read_descriptors_total"
    count = 0
    for number in numbers:
        url = f"http://127.0.0.1:{cluster.nodes[number - 1].metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        line = next(line for line in text.splitlines() if line.startswith(name))
        count += int(float(line.split()[-1]))
    return count


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("max_bytes", [3_000, 300_000, 16 << 20])
def test_rows_from_a_file_are_those_of_the_node(
    cluster: LocalCluster, number: int, max_bytes: int
) -> None:
    with client(cluster, number) as reader:
        before = descriptors(cluster, number)
        expected = rows(reader, local=False)
        assert descriptors(cluster, number) == before
        assert rows(reader, local=True, max_bytes=max_bytes) == expected
        assert descriptors(cluster, number) > before
        start = ROWS + ROWS // 3
        assert rows(reader, local=True, start=start, max_bytes=max_bytes) == expected[start:]


def test_readers_beside_each_other_do_not_mix_their_places(cluster: LocalCluster) -> None:
    with client(cluster, 1) as one:
        expected = rows(one, local=False)
        at = [0, ROWS]
        found: list[list[int]] = [[], []]
        while min(at) < 3 * ROWS:
            for which in (0, 1):
                result = one.fetch(STREAM, at[which], max_bytes=50_000, columns=OFFSET, local=True)
                found[which] += list(result.frame.offsets())
                at[which] = result.next
        assert found[0] == list(range(at[0]))
        assert found[1] == list(range(ROWS, at[1]))
        assert rows(one, local=True) == expected


def test_spark_reads_each_row_once_in_a_batch_and_in_a_stream(cluster: LocalCluster) -> None:
    count = ROUNDS * (ROWS + 20)
    before = descriptors(cluster, 1, 2, 3)
    options = {
        "servers": ",".join(f"127.0.0.1:{node.amqp_port}" for node in cluster.nodes),
        "subscribe": STREAM,
        "startingOffsets": "earliest",
        "includeHeaders": "true",
    }
    through = batch_rows(stream_source(**options, **{"convoymq.fetch.local": "false"}))
    assert [row["offset"] for row in through] == list(range(count))
    assert descriptors(cluster, 1, 2, 3) == before
    assert batch_rows(stream_source(**options, minPartitions=3)) == through
    data_source = stream_source(**options, maxOffsetsPerTrigger=count // 3 + 7)
    query = Query(lambda: data_source.stream_reader(data_source.schema()))
    query.start()
    query.run()
    assert query.rows == through
    assert descriptors(cluster, 1, 2, 3) > before + 3


def test_a_file_that_is_gone_or_another_is_not_read(cluster: LocalCluster) -> None:
    with client(cluster, 2, 1, 3) as reader:
        expected = rows(reader, local=False)
        path = segments(cluster, 2)[0]
        kept = path.with_suffix(".kept")
        os.rename(path, kept)
        try:
            assert rows(reader, local=True) == expected
            # A pipe in its place must neither be opened nor waited for.
            os.mkfifo(path)
            with client(cluster, 2, 1, 3) as another:
                assert rows(another, local=True) == expected
            # Cut short under its own inode, as no node would.
            os.replace(kept, path)
            data = path.read_bytes()
            os.truncate(path, len(data) // 4)
            with client(cluster, 2, 1, 3) as another:
                assert another.fetch(STREAM, 0, max_bytes=10_000, local=True).frame.rows
                assert another._local is not None
                assert another._local.machine == ""
            path.write_bytes(data)
            os.rename(path, kept)
            path.write_bytes(kept.read_bytes())
            with client(cluster, 2, 1, 3) as another:
                assert rows(another, local=True) == expected
        finally:
            os.replace(kept, path)


def test_damage_in_a_file_is_never_served(cluster: LocalCluster) -> None:
    with client(cluster, 3, 1, 2) as reader:
        expected = rows(reader, local=False)
        path = segments(cluster, 3)[0]
        for share in (3, 5, 7):
            flip(path, path.stat().st_size // share)
        # The node is asked for what does not fit, finds it out, and the others are asked.
        assert rows(reader, local=True) == expected


def test_another_machine_is_told_of_no_file(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoymq.client.local.machine_id", lambda: "another")
    with client(cluster, 1) as reader:
        before = descriptors(cluster, 1)
        assert rows(reader, local=True) == rows(reader, local=False)
        assert descriptors(cluster, 1) == before


def test_rows_of_another_stream_of_the_name_are_never_read(cluster: LocalCluster) -> None:
    """Deleted and declared again, on a real cluster: from files and from every node."""
    connection = connect(cluster, 1)
    channel = connection.channel()
    groups = []
    for turn in range(2):
        channel.queue_declare("again", durable=True, arguments={"x-queue-type": "stream"})
        with client(cluster, 1) as producer:
            producer.produce(produced(turn * ROWS), stream="again")
            (found,) = producer.metadata(names=["again"], current=True)
            groups.append(found.group)
        if not turn:
            channel.queue_delete("again")
    connection.close()
    assert groups[0] < groups[1]
    for number in (1, 2, 3):
        with client(cluster, number) as reader:
            for local in (False, True):
                with pytest.raises(Recreated) as told:
                    reader.fetch("again", 0, end=ROWS, local=local, group=groups[0])
                assert told.value.group == groups[1]
                result = reader.fetch("again", 0, end=ROWS, local=local, group=groups[1])
                assert result.frame.base == 0
            with pytest.raises(NotFound):
                reader.fetch("never", 0)
