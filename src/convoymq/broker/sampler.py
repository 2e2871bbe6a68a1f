"""Fills a node's part of the read model, and exchanges it with the other nodes once a second.

Queues put themselves into `LocalQueues.changed`; their figures are read at the next tick, their
rows within a budget of time. A tick reads a few other rows as well (`SWEPT`), because fields may
change of which nobody says so. A connection is read when bytes have passed. Nothing walks all
queues.

A frame is `[begins, complete, [[section, [[key, value] …], [key …]] …]]`: new values, and what is
gone. Each node has its own list of what it has not got yet (`_Peer`), so a full link or a new one
needs nothing else than time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from convoymq.broker.local_queues import LocalQueues
from convoymq.broker.read_model import (
    KEPT_MS,
    PACKED,
    PACKED_SECTIONS,
    SECTIONS,
    Key,
    ReadModel,
    decoded,
    encoded,
    packed,
)
from convoymq.broker.registry import ConnectionHandle, ConnectionRegistry
from convoymq.broker.route_counts import RouteCounts
from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.model.clock import Clock
from convoymq.model.errors import PeerError
from convoymq.model.slices import in_slices
from convoymq.model.tasks import Tasks
from convoymq.queues.interface import FIGURES, SINGLE_ACTIVE, Row
from convoymq.transport.control import Body, ControlPlane
from convoymq.transport.frame_kinds import KIND_READ_MODEL

TICK_MS = 1000
SLICE_NS = 1_000_000
BUDGET_NS = 10_000_000
"""Time for rows in a tick. What takes more is made up for in the next ones: 1 % of a core."""
SWEPT = 16
"""Queues whose rows are read in a tick without a sign of change."""
SUMMED = ("", "totals", "message_stats")
"""Parts of a row whose numbers are summed; "" is the row. A queue counts in one of the others."""
SUMMED_ROWS = 1000
"""Rows of changed queues that are read for sums: about 100 ms."""
FRAME_BYTES_MAX = 512 << 10
ROUTES_TICKS = 5
CONNECTION_TICKS = 64
"""A connection without traffic is read once in so many ticks."""
CONNECTIONS_MAX = 1000
"""Connections that are looked at in a tick; all of them in turn."""


class _Peer:
    """Entries that another node has not got yet."""

    def __init__(self, due: Iterator[tuple[str, Key]]) -> None:
        self.due: dict[tuple[str, Key], None] = dict.fromkeys(due)
        self.begins = True
        self.complete = False


class Sampler:
    """See the module text. One per node; single threaded."""

    def __init__(
        self,
        *,
        model: ReadModel,
        nodes: ClusterNodes,
        control: ControlPlane,
        local: LocalQueues,
        connections: ConnectionRegistry,
        route_counts: RouteCounts,
        clock: Clock,
        tasks: Tasks,
        queue_rows: Callable[[list[int]], Iterator[Row]],
        node_rows: Callable[[], tuple[Row, Row]],
    ) -> None:
        """
        Args:
            queue_rows: the rows of queues that this node decides about.
            node_rows: returns what this node is, and its numbers.
        """
        self.model = model
        self._nodes = nodes
        self._control = control
        self._local = local
        self._connections = connections
        self._route_counts = route_counts
        self._clock = clock
        self._tasks = tasks
        self._queue_rows = queue_rows
        self._node_rows = node_rows
        self._peers: dict[int, _Peer] = {}
        self._rows_due: dict[int, None] = {}
        self._sweep: deque[int] = deque()
        self._owned: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Group -> virtual host and figures of the queues that this node decides about."""
        self._totals: dict[str, list[int]] = {}
        self._sums: dict[str, Counter[str]] = {name: Counter() for name in SUMMED}
        """Sums of the numbers in the rows of the queues that this node decides about."""
        self._clients: dict[int, tuple[int, set[tuple[str, Key]], int]] = {}
        """Connection -> its traffic when it was read last, its entries, and the tick by which it is
        read again."""
        self._line: list[ConnectionHandle] = []
        """Connections that are still to be looked at in this turn."""
        self._debt_ns = 0
        self._next_ms = 0
        self._busy = False
        self._ticks = 0
        control.handle(KIND_READ_MODEL, self._on_frame)

    # --- time ----------------------------------------------------------------------------

    def tick(self) -> None:
        """To be called a few times a second."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._next_ms or self._busy:
            return
        self._next_ms = max(self._next_ms + TICK_MS, now_ms + TICK_MS // 2)
        self._busy = True
        self._ticks += 1
        self._tasks.spawn(self.exchange())

    async def exchange(self) -> None:
        """Reads what has changed, and tells the other nodes."""
        try:
            await self.read_figures()
            await self._read_rows()
            await self.read_connections(CONNECTIONS_MAX)
            if self._ticks % ROUTES_TICKS == 0:
                await self.read_routes()
            self._read_others()
            self.read_node()
            self._drop_old()
            for node in self._nodes.running():
                if node != self._nodes.node_id:
                    self._send(node)
        finally:
            self._busy = False

    # --- this node's part ------------------------------------------------------------------

    def _put(self, section: str, key: Key, data: bytes) -> None:
        own = self._nodes.node_id
        known = self.model.find(own, section, key)
        if known is not None and known.data == data:
            return
        self.model.put(own, section, key, data, self._clock.monotonic_ms())
        for peer in self._peers.values():
            peer.due[section, key] = None

    def _remove(self, section: str, key: Key) -> None:
        own = self._nodes.node_id
        if self.model.find(own, section, key) is None:
            return
        self.model.remove(own, section, key)
        for peer in self._peers.values():
            peer.due[section, key] = None

    async def read_figures(self) -> None:
        """Reads the figures of all queues that have changed."""
        changed = list(self._local.changed)
        self._local.changed.clear()
        touched: set[str] = set()
        async for group in in_slices(changed, SLICE_NS):
            self._rows_due[group] = None
            queue = self._local.get(group)
            figures = queue.figures() if queue is not None else None
            vhost, former = self._owned.get(group, ("", None))
            if figures == former:
                continue
            if figures is None or queue is None:
                del self._owned[group]
                self._add(vhost, former or (), -1)
                self._remove("figures", group)
            else:
                self._owned[group] = (queue.vhost, figures)
                self._put("figures", group, packed(figures))
                if former is not None:
                    self._add(vhost, former, -1)
                self._add(queue.vhost, figures, 1)
                touched.add(queue.vhost)
            touched.add(vhost)
        for vhost in touched & self._totals.keys():
            totals = self._totals[vhost]
            self._put("totals", vhost, packed(tuple(totals)))

    def _add(self, vhost: str, figures: tuple[int, ...], sign: int) -> None:
        totals = self._totals.setdefault(vhost, [0] * len(FIGURES))
        for at, value in enumerate(figures):
            totals[at] += sign * value

    async def _read_rows(self) -> None:
        """Reads rows of queues for as long as the budget lasts."""
        if not self._sweep:
            self._sweep.extend(self._owned)
        for _ in range(min(SWEPT, len(self._sweep))):
            self._local.changed.add(self._sweep.popleft())
        self._debt_ns = max(0, self._debt_ns - BUDGET_NS)
        if self._debt_ns:
            return
        began = time.perf_counter_ns()
        for group in list(self._rows_due):
            del self._rows_due[group]
            self.read_row(group)
            spent = time.perf_counter_ns() - began
            if spent >= BUDGET_NS:
                self._debt_ns = spent - BUDGET_NS
                return

    async def read_due_rows(self, limit: int | None = None) -> None:
        """Reads the rows of the queues that have changed, or of so many of them."""
        await self.read_figures()
        async for group in in_slices(list(islice(self._rows_due, limit)), SLICE_NS):
            self._rows_due.pop(group, None)
            self.read_row(group)

    @property
    def queue_count(self) -> int:
        """Returns the number of queues that this node decides about."""
        return len(self._owned)

    async def sums(self) -> list[Row]:
        """Returns sums of the numbers in the rows of the queues that this node decides about, and
        in each part `SUMMED` of the rows. What many queues have changed comes later."""
        await self.read_due_rows(SUMMED_ROWS)
        return [dict(self._sums[name]) for name in SUMMED]

    def _sum(self, row: Row, sign: int) -> None:
        counted = next((name for name in SUMMED if row.get(name)), "")
        for part, found in {"": row, counted: row.get(counted, row)}.items():
            sums = self._sums[part]
            for name, value in found.items():
                if isinstance(value, int | float):
                    sums[name] += sign * value  # type: ignore[assignment]

    def _put_facts(self, group: int, row: Row | None) -> None:
        known = self.model.find(self._nodes.node_id, "facts", group)
        data = encoded(row) if row is not None else None
        if known is not None and known.data == data:
            return
        if known is not None:
            self._sum(decoded(known.data), -1)
        if row is None or data is None:
            self._remove("facts", group)
        else:
            self._sum(row, 1)
            self._put("facts", group, data)

    def read_row(self, group: int) -> None:
        """Reads the row of a queue, if this node decides about it."""
        row = next(self._queue_rows([group]), None)
        if row is None:
            self._put_facts(group, None)
            for section in ("activity", "reservations"):
                self._remove(section, group)
            return
        if row.get("single_active"):
            row["single_active_consumer_tag"] = single_active(row)
        row.pop("consumer_details", None)
        self._put_facts(group, row)
        queue = self._local.get(group)
        self._put_or_remove("activity", group, queue.activity() if queue is not None else [])
        rows = queue.reservations() if queue is not None else []
        self._put_or_remove("reservations", group, rows)

    def _put_or_remove(self, section: str, key: Key, rows: Sequence[object]) -> None:
        if rows:
            self._put(section, key, encoded(rows))
        else:
            self._remove(section, key)

    async def read_connections(self, limit: int | None = None) -> None:
        """Reads the connections through which bytes have passed, with their channels and
        consumers. `limit`: looks at so many, all in turn."""
        for closed in self._clients.keys() - self._connections.ids():
            for section, key in self._clients.pop(closed)[1]:
                self._remove(section, key)
        line = self._connections.all() if limit is None else self._next_connections(limit)
        async for connection in in_slices(line, SLICE_NS):
            if self._connections.get(connection.id) is not connection:
                continue
            traffic = connection.traffic()
            known = self._clients.get(connection.id)
            if known is None or known[0] != traffic or known[2] <= self._ticks:
                self._read_connection(connection, traffic)

    def _next_connections(self, limit: int) -> list[ConnectionHandle]:
        if not self._line:
            self._line = self._connections.all()
        taken = self._line[-limit:]
        del self._line[-limit:]
        return taken

    def _read_connection(self, connection: ConnectionHandle, traffic: int) -> None:
        own = self._nodes.own_name
        rows: list[tuple[str, Key, Row]] = [
            ("connections", str(connection.id), {**connection.info(), "node": own})
        ]
        rows += [("channels", str(row["name"]), row) for row in connection.channel_infos()]
        for row in connection.consumer_infos():
            channel = row.get("channel_details", {}).get("number")
            rows.append(("consumers", f"{connection.id}/{channel}/{row['consumer_tag']}", row))
        entries = {(section, key) for section, key, _ in rows}
        former = self._clients[connection.id][1] if connection.id in self._clients else set()
        for section, key in former - entries:
            self._remove(section, key)
        self._clients[connection.id] = (traffic, entries, self._ticks + CONNECTION_TICKS)
        for section, key, row in rows:
            self._put(section, key, encoded(row))

    def _read_others(self) -> None:
        """Reads what this node knows of queues that other nodes decide about."""
        known = self.model.part(self._nodes.node_id).tables
        for section, rows in (
            ("readers", self._local.reader_rows()),
            ("stopped", self._local.stopped_rows()),
        ):
            found = {row["group"]: row[section] for row in rows}
            for group in [group for group in known[section] if group not in found]:
                self._remove(section, group)
            for group, value in found.items():
                self._put(section, group, encoded(value))

    async def read_routes(self) -> None:
        """Reads what was published to exchanges."""
        found = {f"{row['vhost']}\0{row['exchange']}": row for row in self._route_counts.totals()}
        async for key, row in in_slices(list(found.items()), SLICE_NS):
            self._put("routes", key, encoded(row))
        known = self.model.part(self._nodes.node_id).tables["routes"]
        for ended in [key for key in known if key not in found]:
            self._remove("routes", ended)

    def read_node(self) -> None:
        """Reads what this node is, and its numbers."""
        facts, load = self._node_rows()
        self._put("node", "", encoded(facts))
        self._put("load", "", encoded(load))

    # --- the other nodes -------------------------------------------------------------------

    def on_node_up(self, node: int) -> None:
        """Another node is linked: it gets all again."""
        self._peers.pop(node, None)

    def on_node_down(self, node: int, *, definite: bool) -> None:
        """Another node is not linked; `definite`: its process is known to be gone."""
        self._peers.pop(node, None)
        if definite:
            self.model.forget_clients(node)

    def _drop_old(self) -> None:
        now_ms = self._clock.monotonic_ms()
        own = self.model.part(self._nodes.node_id)
        own.heard_ms, own.complete = now_ms, True
        for node, part in list(self.model.parts.items()):
            if not self._nodes.is_known(node):
                self.model.forget(node)
            elif not self._nodes.is_up(node) and now_ms - part.heard_ms > KEPT_MS:
                self.model.forget_clients(node)

    def _send(self, node: int) -> None:
        if self._nodes.is_older(node) or node in self._control.transport.full:
            return
        part = self.model.part(self._nodes.node_id)
        peer = self._peers.get(node)
        if peer is None:
            peer = self._peers[node] = _Peer(
                (section, key) for section in SECTIONS for key in part.tables[section]
            )
        values: dict[str, list[tuple[Key, bytes]]] = {}
        gone: dict[str, list[Key]] = {}
        room = FRAME_BYTES_MAX
        while peer.due and room > 0:
            section, key = next(iter(peer.due))
            del peer.due[section, key]
            track = part.tables[section].get(key)
            if track is None:
                gone.setdefault(section, []).append(key)
                room -= 16
            else:
                values.setdefault(section, []).append((key, track.data))
                room -= len(track.data) + 16
        peer.complete = peer.complete or not peer.due
        body = [
            [section, values.get(section, []), gone.get(section, [])]
            for section in SECTIONS
            if section in values or section in gone
        ]
        self._control.tell(node, KIND_READ_MODEL, [peer.begins, peer.complete, body])
        peer.begins = False

    async def _on_frame(self, node: int, body: Body) -> None:
        now_ms = self._clock.monotonic_ms()
        try:
            begins, complete, sections = body
            if begins:
                self.model.forget(node)
            part = self.model.part(node)
            for section, values, gone in sections:
                if section not in part.tables:
                    # It is of a later release.
                    continue
                for key, data in values:
                    if not isinstance(data, bytes) or (
                        section in PACKED_SECTIONS and len(data) != PACKED.size
                    ):
                        raise TypeError(section)
                    self.model.put(node, section, key, data, now_ms)
                for key in gone:
                    self.model.remove(node, section, key)
            part.heard_ms, part.complete = now_ms, bool(complete)
        except (TypeError, ValueError) as error:
            raise PeerError(f"malformed part of the read model from node {node}: {error}") from None


def single_active(row: Row) -> str | None:
    """Returns the tag of the single active consumer among those of a queue's row."""
    tags = (
        consumer["consumer_tag"]
        for consumer in row.get("consumer_details", ())
        if consumer.get("activity_status") == SINGLE_ACTIVE
    )
    return next(tags, None)
