"""SQL over a stream with DuckDB: readings of thermometers, summed up where they lie.

    python examples/duckdb_stream.py [HOST:PORT,…]

DuckDB takes the record batches as they come; no message becomes a Python object.
"""

from __future__ import annotations

import sys

import duckdb
import pika

from convoymq.client import Client, ClientConfig
from convoymq.client.rows import frame_of

STREAM = "duckdb.readings"
ROOMS = (b"kitchen", b"cellar", b"attic")
QUERY = """
SELECT decode(key) AS room, count(*) AS readings, avg(CAST(decode(value) AS DOUBLE)) AS mean
FROM readings GROUP BY room ORDER BY room
"""


def main(servers: tuple[str, ...]) -> None:
    """Publishes readings to a new stream, and asks for the mean of each room."""
    host, port = servers[0].rsplit(":", 1)
    with pika.BlockingConnection(pika.ConnectionParameters(host, int(port))) as connection:
        channel = connection.channel()
        channel.queue_delete(STREAM)
        channel.queue_declare(STREAM, durable=True, arguments={"x-queue-type": "stream"})
    with Client(ClientConfig(servers)) as client:
        numbers = range(30_000)
        values = [b"%d.5" % (15 + number % 3) for number in numbers]
        keys = [ROOMS[number % 3] for number in numbers]
        client.produce(frame_of(values, keys=keys), stream=STREAM)
        with duckdb.connect() as database:
            database.register("readings", client.read(STREAM, columns=("key", "value")).reader())
            print(database.sql(QUERY))


if __name__ == "__main__":
    main(tuple(sys.argv[1].split(",")) if len(sys.argv) > 1 else ("127.0.0.1:5672",))
