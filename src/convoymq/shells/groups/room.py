# cython: annotation_typing=False
"""Flow control of a node's groups (ADR 0025): who waits until another node takes bulk again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, cast

from convoymq.model.rounds import run_each

if TYPE_CHECKING:
    from convoymq.shells.groups.host import ReplicaHost
    from convoymq.shells.groups.replica import Replica
    from convoymq.shells.groups.watched import Watched


class Waiting(Protocol):
    """Sender that has bulk frames for a node that takes none."""

    def on_room(self, node: int) -> None:
        """The node takes bulk again."""

    def on_lost(self, node: int) -> None:
        """The node is away."""


class _Line:
    """Senders that wait until a node takes bulk again, in order."""

    __slots__ = ("items", "known", "room_at")

    def __init__(self, now: int) -> None:
        self.items: deque[Waiting] = deque()
        self.known: set[Waiting] = set()
        self.room_at = now
        """Time when there was room last, or the wait began."""


class RoomQueues:
    """Waiting senders of each node that takes no bulk."""

    __slots__ = ("_lines", "host")

    def __init__(self, host: ReplicaHost) -> None:
        self.host = host
        self._lines: dict[int, _Line] = {}

    def wait(self, node: int, item: Waiting) -> None:
        """Has `item.on_room(node)` called when a node that is in `full` takes bulk again, once;
        `item.on_lost(node)` instead when it is lost."""
        host = self.host
        line = self._lines.get(node)
        if line is None:
            line = self._lines[node] = _Line(host.clock.monotonic_ms())
        if item not in line.known:
            line.known.add(item)
            line.items.append(item)

    def on_room(self, node: int) -> None:
        """A node that was in `full` takes bulk: whoever waits sends in turn, until it is full."""
        host = self.host
        line = self._lines.get(node)
        if line is None:
            return
        line.room_at = host.now = host.clock.monotonic_ms()
        run_each(self._in_turn(line, node), lambda item: item.on_room(node), self._stop_failed)
        if not line.items and self._lines.get(node) is line:
            del self._lines[node]
        host.wake()

    def _in_turn(self, line: _Line, node: int) -> Iterator[Waiting]:
        while line.items and node not in self.host.full:
            item = line.items.popleft()
            line.known.discard(item)
            yield item

    def _stop_failed(self, item: Waiting, error: Exception) -> None:
        if item not in self.host.groups.values() and item not in self.host.watched.values():
            raise error
        self.host.stop_failed(cast("Replica | Watched", item), error)

    def is_held_up(self, node: int) -> bool:
        """Returns whether others wait for the link to the node: it is full, but goes on."""
        host = self.host
        line = self._lines.get(node)
        return line is not None and host.now - line.room_at < host.config.quorum_timeout_ms

    def forward(self, item: Replica | Watched, node: int, term: int, data: bytes) -> None:
        """Sends a FORWARD frame to the leader, behind those that wait."""
        host = self.host
        late = item.late
        if late and late[0][:2] != (node, term):
            # For a former leader: clients have sent it all again.
            late.clear()
        if late or node in host.full:
            late.append((node, term, data))
            self.wait(node, item)
        else:
            host.transport.send(node, data)

    def send_late(self, item: Replica | Watched, node: int, leader: int, term: int) -> None:
        """Sends FORWARD frames that waited for a node, unless another one leads by now."""
        host = self.host
        late = item.late
        while late and late[0][0] == node and node not in host.full:
            _, sent_in, data = late.popleft()
            if (leader, term) == (node, sent_in):
                host.transport.send(node, data)
        if late and late[0][0] == node:
            self.wait(node, item)

    def on_lost(self, node: int) -> None:
        """A node is away: nobody waits for it any more."""
        line = self._lines.pop(node, None)
        if line is not None:
            # Clients send again what was for the leader, when they know one.
            run_each(line.items, lambda item: item.on_lost(node), self._stop_failed)
