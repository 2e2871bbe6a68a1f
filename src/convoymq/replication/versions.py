"""The list of replicated machines, and which versions of them this build supports (ADR 0016)."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from convoymq.model.errors import UnsupportedVersion

MACHINES = [
    "convoymq.metadata.machine",
    "convoymq.topics.machine.versions",
    "convoymq.queues.quorum.machine",
    "convoymq.queues.stream.machine",
]
"""Modules of machines, or of their versions, which register classes when they are imported: a new
one is one line here. A node tells other nodes of all of them."""

Supports = Mapping[str, Sequence[int]]
"""Kind -> (oldest, newest) version."""

FLOORS: dict[tuple[str, int], dict[str, int]] = {("metadata", 2): {"quorum": 2, "stream": 2}}
"""(Kind, version) of a machine that every node runs -> versions of others that every release with
it supports: once it is in force, nobody can come back with an older one."""

_ranges: dict[str, tuple[str, int, int]] = {}
"""Kind -> (module, oldest, newest version)."""


class Versioned(Protocol):
    """A machine of some kind, and the versions of it that this build supports."""

    KIND: str
    OLDEST_VERSION: int
    VERSION: int


def register(machine: type[Versioned]) -> None:
    """Adds a class of machines: its KIND, OLDEST_VERSION and VERSION."""
    _ranges[machine.KIND] = (machine.__module__, machine.OLDEST_VERSION, machine.VERSION)


def supports() -> dict[str, tuple[int, int]]:
    """Returns the versions of the machines of the list, as far as they are imported."""
    return {
        kind: (oldest, newest)
        for kind, (module, oldest, newest) in _ranges.items()
        if module in MACHINES
    }


def announced() -> dict[str, tuple[int, int]]:
    """Imports the machines of the list, and returns the versions of every one."""
    for name in MACHINES:
        importlib.import_module(name)
    return supports()


def newest_of(supported: Supports, kind: str) -> int:
    """Returns the newest version of a kind; who says nothing about it supports version 1 only."""
    found = supported.get(kind)
    return int(found[1]) if found else 1


def is_supported(supported: Supports, kind: str, version: int) -> bool:
    """Returns whether that version of a kind is among those supported."""
    found = supported.get(kind) or (1, 1)
    return bool(found[0] <= version <= found[1])


def floor_of(in_force: Mapping[str, int], kind: str) -> int:
    """Returns the version of a kind that every node supports, by what is in force on one of
    them."""
    floors = [
        floor.get(kind, 1)
        for (known, version), floor in FLOORS.items()
        if in_force.get(known, 0) >= version
    ]
    return max(floors, default=1)


def check_version(machine: Versioned | type[Versioned], version: int) -> int:
    """Returns the version when the machine's class supports it. Raises UnsupportedVersion."""
    if not machine.OLDEST_VERSION <= version <= machine.VERSION:
        raise UnsupportedVersion(
            f"version {version} of the {machine.KIND} machine is in force; this release supports "
            f"{machine.OLDEST_VERSION} to {machine.VERSION}"
        )
    return version


def command_table(types: Iterable[int]) -> bytes:
    """256 bits, one for each command type; those in `types` are set."""
    table = bytearray(32)
    for type in types:
        table[type >> 3] |= 1 << (type & 7)
    return bytes(table)
