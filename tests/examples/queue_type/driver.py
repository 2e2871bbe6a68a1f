"""What rings are to the rest of the broker: a new queue type is this and a line that registers it.

declare x-queue-type=ring ─▶ RingDriver.rules ─▶ tree ─▶ RingHost.open ─▶ Ring
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from convoymq.metadata.machine import QueueRecord
from convoymq.model.tables import INTEGER_CODES, Field, Table
from convoymq.queues.driver import HomeDriver, HostParts
from convoymq.queues.interface import Row
from convoymq.routing.queue_types import Argument, PlacementKind, TypeRules
from tests.examples.queue_type.ring import Ring

SIZE_ARGUMENT = "x-ring-size"
SIZE_DEFAULT = 100


def _size(field: Field, _arguments: Table) -> str | None:
    good = field.code in INTEGER_CODES and isinstance(field.value, int) and field.value > 0
    return None if good else "invalid_ring_size"


class RingDriver(HomeDriver):
    """See the module text."""

    rules = TypeRules(
        name="ring",
        placement=PlacementKind.HOME,
        serves=frozenset(("x-queue-leader-locator",)),
        own=(Argument(SIZE_ARGUMENT, _size),),
    )

    def make_host(self, parts: HostParts) -> RingHost:
        """See `HomeDriver`."""
        return RingHost(parts)


class RingHost:
    """The rings of one node; see `QueueHost`."""

    def __init__(self, parts: HostParts) -> None:
        self.crashed: tuple[int, ...] = ()
        self._parts = parts
        self._rings: dict[int, Ring] = {}
        self._dirty: list[Ring] = []

    def open(self, record: QueueRecord, arguments: Table, _settings: Mapping[str, object]) -> Ring:
        """Opens a ring at its home, empty. It serves no policy keys, so it has no settings."""
        field = arguments.get(SIZE_ARGUMENT)
        size = field.value if field is not None and isinstance(field.value, int) else SIZE_DEFAULT
        ring = self._rings[record.group] = Ring(record, size, self._mark_dirty)
        return ring

    def due(self) -> tuple[int, ...]:
        """None: rings in memory do not fail."""
        return ()

    def _mark_dirty(self, ring: Ring) -> None:
        self._dirty.append(ring)
        self._parts.wanted()

    def end_of_round(self) -> None:
        """Carries out what clients appended."""
        dirty, self._dirty = self._dirty, []
        for ring in dirty:
            ring.end_of_round()

    def find(self, record: QueueRecord, _arguments: Table) -> Ring | None:
        """Rings are used on their home node only."""
        return self._rings.get(record.group)

    def get(self, group: int) -> Ring | None:
        """The ring with that group id."""
        return self._rings.get(group)

    def handles(self) -> Iterable[Ring]:
        """All rings."""
        return self._rings.values()

    def delete(self, group: int) -> None:
        """The ring is gone from the tree."""
        ring = self._rings.pop(group, None)
        if ring is not None:
            ring.delete()

    def rows(self, groups: Collection[int] | None = None) -> Iterator[Row]:
        """What management shows."""
        for group, ring in list(self._rings.items()):
            if groups is None or group in groups:
                yield {**ring.info(), "group": group}

    def sessions(self) -> Iterable[int]:
        """Sessions of clients."""
        return [client.session for ring in self._rings.values() for client in ring.clients]

    def backlog_bytes(self) -> int:
        """Nothing waits for a disk."""
        return 0

    def dead_lettered(self) -> Counter[tuple[str, str]]:
        """Messages that made room for newer ones."""
        dropped = sum(ring.dropped for ring in self._rings.values())
        return Counter({("disabled", "maxlen"): dropped})

    def copy_of(self, group: int) -> int:
        return 0

    def remove_orphans(self, known: set[int]) -> None:
        """Nothing is kept on disk."""

    def on_node_up(self, node: int) -> None:
        """No other node matters."""

    def on_suspect(self, node: int) -> None:
        """No other node matters."""

    def on_node_down(self, node: int) -> None:
        """No other node matters."""

    def stop(self) -> None:
        """Nothing to write."""
