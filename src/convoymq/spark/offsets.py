"""Offsets as Spark keeps them in a checkpoint: canonical JSON objects, equal when their text is.

    {"v":1,"start":"latest"}              the initial offset: only a word. Spark asks for it twice
                                          and again after a restart, so it must not depend on when
                                          it is asked for
    {"v":1,"p":{"flights":{"0":1200}},    ends (exclusive) by stream and partition
     "g":{"flights":17},                  the stream's incarnation: its Raft group
     "from":{"flights":{"0":1000}}}       where this batch begins, wherever that is not the end of
                                          the one before: in the first batch, for new streams,
                                          behind a gap

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

    def to_json(self) -> dict[str, object]:
        """Returns the canonical form."""
        made: dict[str, object] = {"v": VERSION, "p": _nested(self.ends)}
        if self.starts:
            made["from"] = _nested(self.starts)
        if self.groups:
            made["g"] = dict(sorted(self.groups.items()))
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


def parse(offset: Mapping[str, object]) -> Positions:
    """Reads an offset that is not a symbol. Raises SourceError when it is not one of ours."""
    check_version(offset)
    try:
        return Positions(
            ends=_flat(offset["p"]),
            starts=_flat(offset.get("from", {})),
            groups=_groups(offset.get("g", {})),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(
            f"the checkpoint holds a damaged offset {str(offset)[:200]}: {error!r}"
        ) from None


def number(values: Mapping[str, object], name: str) -> int:
    """Returns a number of an offset, or of a broker's answer. Raises SourceError: there is none."""
    found = values.get(name)
    if not isinstance(found, int):
        raise SourceError(f"{name} is {found!r}, not a number")
    return found


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
