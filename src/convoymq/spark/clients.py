"""Connection of this process to the broker. Workers are pooled by Spark, so connections last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoymq.client import Client
    from convoymq.spark.options import Connection


def connect(connection: Connection) -> Client:
    """Returns the client, which connects at its first call. Raises OptionError: no such secret."""
    from convoymq.client import pool

    return pool.client(connection.config())
