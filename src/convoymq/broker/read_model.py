"""The read model of lists: what all nodes of the cluster said of what they own.

| section        | key                | of                                                       |
|----------------|--------------------|----------------------------------------------------------|
| `figures`      | group              | numbers of a queue, packed (`FIGURES`)                   |
| `facts`        | group              | the queue's row                                          |
| `activity`     | group              | activity of the queue's consumers                        |
| `reservations` | group              | rows of the queue's reservations                         |
| `readers`      | group              | consumers that the leader does not know of               |
| `stopped`      | group              | why the node's replica stopped                           |
| `totals`       | virtual host       | sums of the figures of the node's queues, packed         |
| `connections`, `channels`, `consumers` | id | rows                                             |
| `routes`       | virtual host, exchange | messages into an exchange and out of it              |
| `node`, `load` | ""                 | what the node is; its numbers                            |

Each node fills its own part (`sampler`), and gets the other parts in one frame of each node a
second. Values stay encoded until a list shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from struct import Struct
from typing import TypeAlias

import msgspec

from convoymq.broker.tracks import STEP_MS, Series, Track
from convoymq.queues.interface import FIGURES, Row

SECTIONS = (
    "figures", "facts", "activity", "reservations", "readers", "stopped", "totals", "connections",
    "channels", "consumers", "routes", "node", "load",
)  # fmt: skip
STEPS_MS = {"routes": 5000}
"""Time between two samples, where it is not `STEP_MS`."""
WITH_HISTORY = frozenset({"figures", "totals", "load"})
"""Sections whose objects have a history while there is room."""
HISTORIES_MAX = 1024
"""At most 30 MiB. Beyond, an object gets a history when it is asked for; that which was asked for
longest ago loses its own."""
KEPT_MS = 60_000
"""A node that cannot be reached has its connections in lists for so long, unless it is known to
have ended."""
PACKED_SECTIONS = frozenset({"figures", "totals"})
CLIENTS = ("connections", "channels", "consumers")

Key: TypeAlias = int | str
PACKED = Struct(f"<{len(FIGURES)}q")


def figures_in(data: bytes) -> dict[str, float]:
    """Reads packed figures."""
    return dict(zip(FIGURES, PACKED.unpack(data), strict=True))


def lengths_in(data: bytes) -> Row:
    """Returns packed figures as fields of a queue's row; counters below `counters`."""
    found: Row = dict(zip(FIGURES, PACKED.unpack(data), strict=True))
    row = {name: found.pop(name) for name in FIGURES[: FIGURES.index("publish")]}
    for name in ("messages", "message_bytes"):
        row[name] = row[f"{name}_ready"] + row[f"{name}_unacknowledged"]
    return {**row, "counters": found}


def packed(figures: tuple[int, ...]) -> bytes:
    """Packs figures."""
    return PACKED.pack(*figures)


def encoded(value: object) -> bytes:
    """Encodes what is not packed."""
    return msgspec.msgpack.encode(value, enc_hook=str)


def decoded(data: bytes) -> Row:
    """Decodes a row."""
    found: Row = msgspec.msgpack.decode(data)
    return found


class NodePart:
    """The part of one node. `complete`: it has said all that it knew when it began."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[Key, Track]] = {section: {} for section in SECTIONS}
        self.heard_ms = 0
        self.complete = False


class ReadModel:
    """See the module text. One per node; single threaded."""

    def __init__(self) -> None:
        self.parts: dict[int, NodePart] = {}
        self._histories: dict[Track, None] = {}
        """Objects with a history, in the order in which they were asked for."""

    def part(self, node: int) -> NodePart:
        """Returns what a node said, to be added to."""
        return self.parts.setdefault(node, NodePart())

    def put(self, node: int, section: str, key: Key, data: bytes, now_ms: int) -> None:
        """Takes a value that has changed."""
        table = self.part(node).tables[section]
        track = table.get(key)
        if track is not None:
            track.put(data, now_ms)
            return
        track = table[key] = Track(data, now_ms, STEPS_MS.get(section, STEP_MS))
        if section in WITH_HISTORY and len(self._histories) < HISTORIES_MAX:
            track.remember()
            self._histories[track] = None

    def remove(self, node: int, section: str, key: Key) -> None:
        """Removes what is gone."""
        track = self.part(node).tables[section].pop(key, None)
        if track is not None:
            self._histories.pop(track, None)

    def find(self, node: int, section: str, key: Key = "") -> Track | None:
        """Returns what a node said of an object."""
        part = self.parts.get(node)
        return None if part is None else part.tables[section].get(key)

    def newest(self, section: str, key: Key, first: int | None = None) -> tuple[int, Track] | None:
        """Returns the latest that any node said of an object; node `first` goes before others."""
        if first is not None and (track := self.find(first, section, key)) is not None:
            return first, track
        found = self.said(section, key)
        if not found:
            return None
        node = max(found, key=lambda each: found[each].stamp_ms)
        return node, found[node]

    def all(self, section: str) -> Iterator[tuple[int, Key, Track]]:
        """Yields (node, key, samples) of a section. Later changes do no harm."""
        for node, part in list(self.parts.items()):
            for key, track in list(part.tables[section].items()):
                yield node, key, track

    def said(self, section: str, key: Key) -> dict[int, Track]:
        """Returns what each node said of an object."""
        return {
            node: track
            for node, part in self.parts.items()
            if (track := part.tables[section].get(key)) is not None
        }

    def forget(self, node: int) -> None:
        """Drops all that a node said."""
        part = self.parts.pop(node, None)
        if part is not None:
            for section in SECTIONS:
                self._forget(part, section)

    def forget_clients(self, node: int) -> None:
        """Drops a node's connections: it has ended."""
        part = self.parts.get(node)
        if part is not None:
            for section in CLIENTS:
                self._forget(part, section)

    def forget_histories(self) -> None:
        """Begins all histories and rates anew."""
        for part in self.parts.values():
            for table in part.tables.values():
                for track in table.values():
                    track.before, track.before_ms = track.data, track.stamp_ms
        for track in self._histories:
            track.remember()

    def _forget(self, part: NodePart, section: str) -> None:
        for track in part.tables[section].values():
            self._histories.pop(track, None)
        part.tables[section].clear()

    def with_history(self, series: Series) -> Series:
        """Returns the same; its object has a history from now on."""
        track = series.track
        self._histories.pop(track, None)
        if track.history is None:
            track.remember()
            if len(self._histories) >= HISTORIES_MAX:
                longest_ago = next(iter(self._histories))
                del self._histories[longest_ago]
                longest_ago.history = None
        self._histories[track] = None
        return series

    def load(self) -> Mapping[str, int]:
        """Returns the size of the model, for metrics."""
        tables = [part.tables for part in self.parts.values()]
        return {
            "entries": sum(len(table) for each in tables for table in each.values()),
            "histories": len(self._histories),
        }
