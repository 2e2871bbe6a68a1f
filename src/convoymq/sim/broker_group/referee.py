"""The referee of a broker group: it knows what clients were told, and looks at what is served.

| rule | looked at |
|---|---|
| as many brokers have a message as it needs | when it is acknowledged |
| an acknowledged message is at its queue offset | at every read, at the end on all |
| a master in its life ends behind all that was acknowledged | at every read |
| no fork is served: a linked slave has the same bytes as its master | at every read |
| messages of a producer are in a queue in the order in which they were sent | at the end |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from convoymq.rocketmq.store.types import GetStatus, Message
from convoymq.sim.delivery_model import InvariantBroken

if TYPE_CHECKING:
    from convoymq.sim.broker_group.acting_node import ActingNode
    from convoymq.sim.broker_group.node import BrokerNode

Replica: TypeAlias = "BrokerNode | ActingNode"

TOPIC = "orders"
COMPARED_BYTES = 4096
COUNT = 32


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A message whose client was told that it is safe. `number`: its producer, and which of that
    one's it is; `end`: in the commit log."""

    number: int
    queue: int
    offset: int
    end: int


class BrokerGroupReferee:
    """See the module text."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[int, int], Acknowledged] = {}
        self.end = 0
        """Of what was acknowledged, in the commit log."""
        self._ends: dict[int, int] = {}
        """Queue -> end of what was acknowledged in it."""
        self.reads = 0

    def on_acknowledged(self, number: int, queue: int, offset: int, end: int) -> None:
        """A client was told that its message is safe."""
        place = (queue, offset)
        former = self.by_place.get(place)
        if former is not None:
            raise InvariantBroken(f"{number} was acknowledged at {place}, as {former.number} was")
        self.by_place[place] = Acknowledged(number, queue, offset, end)
        self._ends[queue] = max(offset + 1, self._ends.get(queue, 0))
        self.end = max(self.end, end)

    def acknowledged_end(self, queue: int) -> int:
        """Returns the end of what was acknowledged in a queue."""
        return self._ends.get(queue, 0)

    def read(self, node: Replica, queue: int, offset: int) -> None:
        """A client reads from a broker that serves."""
        got = node.store.get(TOPIC, queue, offset, COUNT)
        end = node.store.queue_max(TOPIC, queue)
        if node.master is not None and self._ends.get(queue, 0) > end:
            last = self._ends[queue] - 1
            raise InvariantBroken(
                f"{node.name}: queue {queue} ends at {end}, and {last} was acknowledged"
            )
        if got.status is not GetStatus.FOUND:
            return
        for record in got.records:
            self._look(node, Message(record))
        self.reads += 1

    def _read_all(self, node: Replica, queue: int, end: int) -> None:
        found: set[int] = set()
        at = 0
        while at < end:
            got = node.store.get(TOPIC, queue, at, COUNT)
            if got.status is not GetStatus.FOUND:
                break
            for record in got.records:
                message = Message(record)
                self._look(node, message)
                found.add(message.queue_offset)
                at = message.queue_offset + 1
        for place, wanted in self.by_place.items():
            if place[0] == queue and place[1] not in found:
                raise InvariantBroken(f"{node.name}: {wanted} is lost")

    def _look(self, node: Replica, message: Message) -> None:
        place = (message.queue_id, message.queue_offset)
        wanted = self.by_place.get(place)
        number = int.from_bytes(message.body[:8], "big")
        if wanted is not None and wanted.number != number:
            raise InvariantBroken(
                f"{node.name}: {number} is at {place}, where {wanted.number} was acknowledged"
            )

    def compare(self, master: Replica, slave: Replica) -> None:
        """Both serve: the slave's log is the beginning of the master's."""
        start = max(master.store.min_offset, slave.store.min_offset)
        end = min(slave.store.max_offset, master.store.max_offset)
        if slave.store.max_offset > master.store.stored:
            raise InvariantBroken(f"{slave.name} is linked, and has more than its master stored")
        start = max(start, end - COMPARED_BYTES)
        if start < end and master.log.crc32c(start, end) != slave.log.crc32c(start, end):
            raise InvariantBroken(f"{slave.name} is linked, and differs before {end}")

    def check_at_rest(self, nodes: list[Replica]) -> None:
        """Everything has healed: every broker has all that was acknowledged."""
        first = nodes[0].store
        for node in nodes:
            store = node.store
            if (store.min_offset, store.max_offset) != (first.min_offset, first.max_offset):
                raise InvariantBroken(f"{node.name} has {store.min_offset}-{store.max_offset}")
            span = first.min_offset, first.max_offset
            if span[0] < span[1] and node.log.crc32c(*span) != nodes[0].log.crc32c(*span):
                raise InvariantBroken(f"{node.name}: other bytes than {nodes[0].name}")
            for queue, end in self._ends.items():
                self._read_all(node, queue, end)
        last: dict[tuple[int, int], int] = {}
        for (queue, _), each in sorted(self.by_place.items()):
            place = queue, each.number >> 32
            if each.number < last.get(place, 0):
                raise InvariantBroken(f"queue {queue}: {each.number} is out of order")
            last[place] = each.number
