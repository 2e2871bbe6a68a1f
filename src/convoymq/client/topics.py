"""Routes of ordered topics, as a client knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import msgspec

from convoymq.client import errors
from convoymq.topics.rules.hashing import MURMUR3_X86_32, logical_partition
from convoymq.topics.rules.routes import Route, Span

KEYS_REMEMBERED = 65_536
"""Keys whose hash is not computed again."""


class TopicPartition(NamedTuple):
    """One line of a topic's lineage."""

    pid: int
    lo: int
    hi: int
    state: str
    """`creating`, `open`, `sealed`, `retired`, `deleted` or `lost`."""
    created_version: int
    sealed_version: int | None
    """The first version without it."""
    close_offset: int | None
    parents: tuple[int, ...]
    children: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRoute:
    """The newest route of a topic, as the server that was asked knows it."""

    vhost: str
    topic: str
    version: int
    logical: int
    """Number of logical partitions; never changes."""
    hash_id: int
    hash_seed: int
    mode: str
    created_ms: int
    """Tells a topic from another one of the same name."""
    ranges: tuple[tuple[int, int, int], ...]
    """(first logical partition, the one behind the last, partition), by range."""
    partitions: tuple[TopicPartition, ...] = field(default=(), repr=False)
    """All that ever were, by version and range; empty when the lineage was not asked for."""

    def lp_of(self, key: bytes) -> int:
        """Returns the logical partition of an order key."""
        return _logical_partition(key, self.logical, self.hash_seed)

    @property
    def route(self) -> Route:
        """Returns the ranges as a route."""
        return Route(self.version, self.logical, tuple(Span(*each) for each in self.ranges))


_logical_partition = lru_cache(KEYS_REMEMBERED)(logical_partition)


def route_of(answer: Mapping[str, object]) -> TopicRoute:
    """Returns the route of an answer to TOPIC_ROUTE.

    Raises:
        ProtocolError: it is none.
        PreconditionFailed: this client does not know the topic's hash function.
    """
    try:
        found = msgspec.convert(answer, TopicRoute)
    except msgspec.ValidationError as error:
        raise errors.ProtocolError(f"answer that is no route of a topic: {error}") from error
    if found.hash_id != MURMUR3_X86_32:
        raise errors.PreconditionFailed(
            f"topic '{found.topic}' uses hash {found.hash_id}, which this client does not know"
        )
    return found
