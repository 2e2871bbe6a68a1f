"""Which arguments of declarations do nothing."""

from __future__ import annotations

import pytest

from convoymq.model.tables import Table
from convoymq.routing.ignored_arguments import ignored_of_exchange, ignored_of_queue


@pytest.mark.parametrize(
    ("kind", "arguments", "ignored"),
    [
        ("quorum", {"x-queue-type": "quorum", "x-delivery-limit": 5}, []),
        ("quorum", {"x-delivery-limit": "five"}, ["x-delivery-limit"]),
        ("quorum", {"x-delivery-limits": 5, "team": "a"}, ["team", "x-delivery-limits"]),
        ("quorum", {"x-max-in-memory-length": 5}, ["x-max-in-memory-length"]),
        ("classic", {"x-max-length": 5, "x-queue-mode": "lazy"}, ["x-queue-mode"]),
        ("stream", {"x-max-age": "1h", "x-max-ages": "1h"}, ["x-max-ages"]),
        ("a type of another release", {"x-odd": 1}, []),
    ],
)
def test_arguments_of_queues(kind: str, arguments: dict[str, object], ignored: list[str]) -> None:
    assert ignored_of_queue(kind, Table.of(arguments)) == ignored


@pytest.mark.parametrize(
    ("kind", "arguments", "ignored"),
    [
        ("direct", {"alternate-exchange": "other"}, []),
        ("topic", {"x-alternate-exchange": "other"}, ["x-alternate-exchange"]),
        ("fanout", {"hash-header": "k"}, ["hash-header"]),
        ("x-consistent-hash", {"hash-header": "k", "hash": 1}, ["hash"]),
    ],
)
def test_arguments_of_exchanges(
    kind: str, arguments: dict[str, object], ignored: list[str]
) -> None:
    assert ignored_of_exchange(kind, Table.of(arguments)) == ignored
