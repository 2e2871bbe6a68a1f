"""Merges the metadata that a returning master takes over from a member: pure functions.

| what | rule here | RocketMQ's rule |
|---|---|---|
| consumer offsets (`Offsets.merge`) | the larger of each queue | all, if its version is not older |
| offsets of delay levels | the larger of each level | as above |
| check point of timed messages | the larger of each number | as above |
| topics, groups | all of both; of one that both have, that of the newer table | not taken over |
| keys of what escaped | all of both | there are none |

A version counts every 500th commit only, so that by RocketMQ's rule up to 499 commits of clients
are forgotten, or a master's later ones are overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from convoymq.rocketmq.remoting.values import DataVersion

V = TypeVar("V")


def is_newer(one: DataVersion, other: DataVersion) -> bool:
    """Returns whether a version follows another: by state, then counter, then time."""
    return _order(one) > _order(other)


def _order(version: DataVersion) -> tuple[int, int, int]:
    return version.state_version, version.counter, version.timestamp


def joined(
    own: Mapping[str, V], own_version: DataVersion, other: Mapping[str, V], version: DataVersion
) -> dict[str, V]:
    """Returns the entries of both tables; of an entry that both have, that of the newer table."""
    return {**own, **other} if is_newer(version, own_version) else {**other, **own}


def after(one: DataVersion, other: DataVersion, now_ms: int) -> DataVersion:
    """Returns a version that follows both."""
    newer = one if is_newer(one, other) else other
    return DataVersion(newer.state_version, now_ms, newer.counter + 1)
