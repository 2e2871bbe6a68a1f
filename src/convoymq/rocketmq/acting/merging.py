"""Merges the metadata that a returning master takes over from a member: pure functions.

| what | rule here | RocketMQ's rule |
|---|---|---|
| consumer offsets (`Offsets.merge`) | the larger of each queue | all, if its version is not older |
| offsets of delay levels | the larger of each level | as above |
| check point of timed messages | the larger of each number | as above |
| topics, groups, users | all of both but what either deleted; of two, the newer table's | none |
| keys of what escaped | all of both | there are none |

A version counts every 500th commit only, so that by RocketMQ's rule up to 499 commits of clients
are forgotten, or a master's later ones are overwritten.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TypeVar

from convoymq.rocketmq.remoting.values import DataVersion

V = TypeVar("V")


def is_newer(one: DataVersion, other: DataVersion) -> bool:
    """Returns whether a version follows another: by state, then counter, then time."""
    return _order(one) > _order(other)


def _order(version: DataVersion) -> tuple[int, int, int]:
    return version.state_version, version.counter, version.timestamp


def joined(
    own: Mapping[str, V],
    own_version: DataVersion,
    other: Mapping[str, V],
    version: DataVersion,
    own_deleted: Mapping[str, int],
    deleted: Mapping[str, int],
) -> dict[str, V]:
    """Returns the entries of both tables; of an entry that both have, that of the newer table.

    Args:
        own_deleted, deleted: deletions that each table has seen. An entry of a table that has not
            seen its deletion is outdated.
    """
    left = {n: entry for n, entry in own.items() if not is_outdated(n, own_deleted, deleted)}
    more = {n: entry for n, entry in other.items() if not is_outdated(n, deleted, own_deleted)}
    return {**left, **more} if is_newer(version, own_version) else {**more, **left}


def lacks(
    own: Iterable[str], own_deleted: Mapping[str, int], other: Container[str],
    deleted: Mapping[str, int],
) -> set[str]:  # fmt: skip
    """Returns the entries of the own table that another one, which has not deleted them, lacks."""
    return {n for n in own if n not in other and not is_outdated(n, own_deleted, deleted)}


def is_outdated(name: str, seen: Mapping[str, int], deleted: Mapping[str, int]) -> bool:
    """Returns whether a table that has `seen` some deletions lacks that of a name."""
    return deleted.get(name, -1) > seen.get(name, -1)


def after(one: DataVersion, other: DataVersion, now_ms: int) -> DataVersion:
    """Returns a version that follows both."""
    newer = one if is_newer(one, other) else other
    return DataVersion(newer.state_version, now_ms, newer.counter + 1)
