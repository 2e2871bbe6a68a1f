"""Offsets as Spark keeps them in a checkpoint: canonical JSON objects, equal when their text is.

    {"v":1,"start":"latest"}              the initial offset: only a word. Spark asks for it twice
                                          and again after a restart, so it must not depend on when
                                          it is asked for
    {"v":1,"p":{"flights":{"0":1200}},    ends (exclusive) by stream and partition
     "g":{"flights":17},                  the stream's incarnation: its Raft group
     "from":{"flights":{"0":1000}}}       where this batch begins, wherever that is not the end of
                                          the one before: in the first batch, for new streams,
                                          behind a gap

    {"v":1,"rocketmq":"orders",           of a topic of RocketMQ: by broker and queue
     "p":{"broker-a":{"0":1200}}}

    {"v":1,"topic":"orders",              of a topic: its name,
     "created":1700000000000,             its incarnation: when it was created,
     "hash":[1024,0],                     number of logical partitions, and seed of the hash
     "p":{"orders":{"1":7,"2":1}},        the cut behind the batch (`topic_planning`), by partition
     "done":{"orders":{"0":1200}},        ends of partitions that the batch reads to their ends, and
                                          which therefore stand in no cut any more
     "from":{"orders":{"1":1}},           as above
     "g":{"0":[17,0],"1":[21,1]}}         of all these partitions: Raft group, and the route version
                                          that created it

Spark compares offsets as text: keys are sorted, and nothing in them changes unless a position does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from convoymq.spark.errors import SourceError

VERSION = 1

Partition = tuple[str, int]
"""Stream and partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """A point in all streams of a query."""

    ends: Mapping[Partition, int]
    groups: Mapping[str, int] = field(default_factory=dict)
    starts: Mapping[Partition, int] = field(default_factory=dict)
    rocketmq: str = ""
    """Topic of RocketMQ whose queues these are: broker and number."""

    def to_json(self) -> dict[str, object]:
        """Returns the canonical form."""
        made: dict[str, object] = {"v": VERSION, "p": _nested(self.ends)}
        if self.starts:
            made["from"] = _nested(self.starts)
        if self.groups:
            made["g"] = dict(sorted(self.groups.items()))
        if self.rocketmq:
            made["rocketmq"] = self.rocketmq
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPositions:
    """A point in a topic."""

    topic: str
    created_ms: int
    logical: int
    hash_seed: int
    cut: Mapping[int, int]
    done: Mapping[int, int] = field(default_factory=dict)
    starts: Mapping[int, int] = field(default_factory=dict)
    origins: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By partition its Raft group, and the route version that created it."""

    @property
    def version(self) -> int:
        """Returns the newest route version that is needed to understand it."""
        return max((version for _, version in self.origins.values()), default=0)

    def to_json(self) -> dict[str, object]:
        """Returns the canonical form."""
        made: dict[str, object] = {
            "v": VERSION,
            "topic": self.topic,
            "created": self.created_ms,
            "hash": [self.logical, self.hash_seed],
            "p": {self.topic: _by_pid(self.cut)},
        }
        for name, offsets in (("done", self.done), ("from", self.starts)):
            if offsets:
                made[name] = {self.topic: _by_pid(offsets)}
        made["g"] = {str(pid): list(pair) for pid, pair in sorted(self.origins.items())}
        return made


def symbol(kind: str) -> dict[str, object]:
    """Returns the initial offset of a query."""
    return {"v": VERSION, "start": kind}


def is_symbol(offset: Mapping[str, object]) -> bool:
    """Returns whether the offset is only a word."""
    check_version(offset)
    return "start" in offset


def check_version(offset: Mapping[str, object]) -> None:
    """Raises SourceError: a checkpoint of something else, or of a later version."""
    if not isinstance(offset, Mapping) or offset.get("v") != VERSION:
        raise SourceError(
            f"the checkpoint holds the offset {str(offset)[:200]}, which this version can't read"
        )


def parse(offset: Mapping[str, object], rocketmq: str = "") -> Positions:
    """Reads an offset that is not a symbol. Raises SourceError when it is not one of ours.

    Args:
        rocketmq: the topic of RocketMQ that is read.
    """
    check_version(offset)
    if offset.get("rocketmq", "") != rocketmq:
        found, wanted = (
            f"RocketMQ's topic {name}" if name else "streams"
            for name in (offset.get("rocketmq"), rocketmq)
        )
        raise SourceError(f"the checkpoint is of {found}, not of {wanted}")
    if "topic" in offset:
        raise SourceError(f"the checkpoint is of topic {offset['topic']}, not of streams")
    try:
        return Positions(
            ends=_flat(offset["p"]),
            starts=_flat(offset.get("from", {})),
            groups=_groups(offset.get("g", {})),
            rocketmq=rocketmq,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(offset, error) from None


def parse_topic(offset: Mapping[str, object], topic: str) -> TopicPositions:
    """Reads an offset of a topic that is not a symbol. Raises SourceError when it is none."""
    check_version(offset)
    if offset.get("topic") != topic:
        found = f"topic {offset['topic']}" if "topic" in offset else "streams"
        raise SourceError(f"the checkpoint is of {found}, not of topic {topic}")
    try:
        logical, seed = _pair(offset["hash"])
        return TopicPositions(
            topic=topic,
            created_ms=number(offset, "created"),
            logical=logical,
            hash_seed=seed,
            cut=_pids(offset["p"], topic),
            done=_pids(offset.get("done", {}), topic),
            starts=_pids(offset.get("from", {}), topic),
            origins=_origins(offset["g"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(offset, error) from None


def number(values: Mapping[str, object], name: str) -> int:
    """Returns a number of an offset, or of a broker's answer. Raises SourceError: there is none."""
    found = values.get(name)
    if not isinstance(found, int):
        raise SourceError(f"{name} is {found!r}, not a number")
    return found


def _damaged(offset: Mapping[str, object], error: Exception) -> SourceError:
    return SourceError(f"the checkpoint holds a damaged offset {str(offset)[:200]}: {error!r}")


def _pair(found: object) -> tuple[int, int]:
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise TypeError(f"{found!r} are no numbers")
    first, second = found
    return first, second


def _origins(found: object) -> dict[int, tuple[int, int]]:
    if not isinstance(found, Mapping):
        raise TypeError(f"{found!r} has no partitions")
    return {int(pid): _pair(each) for pid, each in found.items()}


def _by_pid(numbers: Mapping[int, int]) -> dict[str, int]:
    return {str(pid): number for pid, number in sorted(numbers.items())}


def _pids(nested: object, topic: str) -> dict[int, int]:
    found = _flat(nested)
    if any(name != topic for name, _ in found):
        raise ValueError(f"{nested!r} is not of {topic}")
    return {pid: number for (_, pid), number in found.items()}


def _nested(flat: Mapping[Partition, int]) -> dict[str, dict[str, int]]:
    made: dict[str, dict[str, int]] = {}
    for (stream, partition), offset in sorted(flat.items()):
        made.setdefault(stream, {})[str(partition)] = offset
    return made


def _groups(found: object) -> dict[str, int]:
    if not isinstance(found, Mapping):
        raise TypeError(f"{found!r} has no groups")
    return {str(name): int(group) for name, group in found.items()}


def _flat(nested: object) -> dict[Partition, int]:
    flat: dict[Partition, int] = {}
    if not isinstance(nested, Mapping):
        raise TypeError(f"{nested!r} has no streams")
    for stream, partitions in nested.items():
        for partition, offset in partitions.items():
            if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
                raise ValueError(f"{offset!r} is not an offset")
            flat[(stream, int(partition))] = offset
    return flat
