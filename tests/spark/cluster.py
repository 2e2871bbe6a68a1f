"""Real nodes for the Spark tests: declare, publish, drain."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Sequence
from typing import Any

import pika
import pyarrow as pa

from convoymq.cli.cluster import LocalCluster
from convoymq.client import Client, ClientConfig
from convoymq.kernels import columns as bits
from convoymq.kernels.column_frame import build_frame
from convoymq.spark.frames import binary_buffers
from tests.patience import PATIENCE_S
from tests.ports import lasting_ports

BASE_PORT = int(os.environ.get("CONVOY_SPARK_TEST_BASE_PORT") or lasting_ports())
PART = 10_000


class Broker:
    """A running cluster as a test sees it."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.servers = ",".join(f"127.0.0.1:{node.amqp_port}" for node in cluster.nodes)
        self.client = Client(ClientConfig(tuple(self.servers.split(",")), timeout=PATIENCE_S))
        self._numbers = itertools.count()

    def declare(self, kind: str, **arguments: Any) -> str:
        """A new queue of this type; returns its name."""
        name = f"{kind}-{next(self._numbers)}"
        known = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
        with self.channel() as channel:
            channel.queue_declare(name, durable=True, arguments={"x-queue-type": kind, **known})
        return name

    def channel(self) -> Any:
        """A channel of a connection of its own, as a context."""
        return _Channel([pika.URLParameters(node.uri) for node in self.cluster.nodes if node.pid])

    def publish(self, name: str, values: Sequence[bytes], *, part: int = PART) -> None:
        """Publishes to a queue or stream, once; returns when all is confirmed."""
        # A classic queue can't tell repeats.
        producer = None if name.startswith("classic") else str(uuid.uuid4())
        for start in range(0, len(values), part):
            some = pa.array(values[start : start + part], pa.binary())
            frame = build_frame(bits.VALUE, len(some), 0, len(some), binary_buffers(some))
            target = {"stream": name} if name.startswith("stream") else {"queue": name}
            self.client.produce(frame, **target, producer=producer, sequence=start)

    def values(self, stream: str) -> list[bytes]:
        """Everything in a stream up to what its leader has now, in its order."""
        found: list[bytes] = []
        ((end, _),) = self.client.offsets([(stream, "latest", None)])
        assert end is not None
        offset = 0
        while offset < end:
            # Without `end`, a replica behind the leader would show the committed end that it knows.
            result = self.client.fetch(stream, offset, end=end)
            _, offsets, data = result.frame.buffers(bits.VALUE)
            ends = offsets.cast("i")
            found += [bytes(data[ends[i] : ends[i + 1]]) for i in range(result.frame.rows)]
            offset = result.next
        return found

    def kill_leader(self, name: str) -> int:
        """Kills the node that leads a queue; returns its number."""
        number = self.cluster.leader_of(name)
        self.cluster.kill(number)
        return number

    def bring_back(self, number: int) -> None:
        """Starts a killed node."""
        self.cluster.start_node(number)
        self.cluster.wait_ready()


class _Channel:
    def __init__(self, servers: list[Any]) -> None:
        self._servers = servers

    def __enter__(self) -> Any:
        self._connection = pika.BlockingConnection(self._servers)
        return self._connection.channel()

    def __exit__(self, *error: object) -> None:
        self._connection.close()
