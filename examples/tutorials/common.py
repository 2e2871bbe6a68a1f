"""What the six tutorials share: the `--uri` option and a channel."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import pika  # type: ignore[import-untyped]
from pika.adapters.blocking_connection import BlockingChannel  # type: ignore[import-untyped]

DEFAULT_URI = "amqp://guest:guest@127.0.0.1:5672/"


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser that knows where the broker is and how many messages are enough."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--uri", default=DEFAULT_URI, help="node to connect to")
    parser.add_argument("--count", type=int, help="stop after so many messages")
    return parser


@contextmanager
def open_channel(uri: str) -> Iterator[BlockingChannel]:
    """A channel that is closed together with its connection."""
    connection = pika.BlockingConnection(pika.URLParameters(uri))
    try:
        yield connection.channel()
    finally:
        connection.close()


def show(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)
