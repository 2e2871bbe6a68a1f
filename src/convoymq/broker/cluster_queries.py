"""Lists across the cluster: nodes ask each other for connections, queues and resources."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from convoymq.broker.alarms import Alarms
from convoymq.broker.local_queues import LocalQueues
from convoymq.broker.node_view import NodeView
from convoymq.broker.registry import ConnectionHandle, ConnectionRegistry, Counters
from convoymq.broker.route_counts import RouteCounts
from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.model.clock import Clock
from convoymq.model.errors import BrokerError, PeerError, Unavailable
from convoymq.model.slices import in_slices
from convoymq.queues.interface import SINGLE_ACTIVE, Row
from convoymq.transport.control import ControlPlane, Reply
from convoymq.transport.frame_kinds import KIND_CLOSE_CONNECTION, KIND_LIST, KIND_PREFETCH

LIST_TIMEOUT_S = 1.0
LIST_QUEUES_TIMEOUT_S = 5.0


OWNER_FIELDS = ("name", "peer_host", "peer_port")


class ClusterQueries:
    """Asks all nodes that can be reached, and answers for this one."""

    def __init__(
        self,
        *,
        nodes: ClusterNodes,
        control: ControlPlane,
        local: LocalQueues,
        alarms: Alarms,
        connections: ConnectionRegistry,
        counters: Counters,
        route_counts: RouteCounts,
        clock: Clock,
        node: NodeView,
    ) -> None:
        self.node = node
        self._nodes = nodes
        self._control = control
        self._local = local
        self._alarms = alarms
        self._connections = connections
        self._counters = counters
        self._route_counts = route_counts
        self._clock = clock
        self._started_ms = clock.now_ms()
        control.handle_replying(KIND_LIST, self._on_list)
        control.handle(KIND_CLOSE_CONNECTION, self._on_close_connection)
        control.handle(KIND_PREFETCH, self._on_prefetch)

    @property
    def uptime_ms(self) -> int:
        """Time since the broker was made."""
        return self._clock.now_ms() - self._started_ms

    # --- questions -----------------------------------------------------------------------

    async def list_connections(self) -> list[Row]:
        """Returns the rows of all nodes."""
        return await self._gather("connections")

    async def list_channels(self) -> list[Row]:
        """Returns the rows of all nodes."""
        return await self._gather("channels")

    async def list_consumers(self) -> list[Row]:
        """Returns the rows of all nodes. Which consumer of a queue is active is known where the
        queue is decided about."""
        rows: list[Row] = []
        told: dict[tuple[int, int], str] = {}
        for row in await self._gather("consumers"):
            if "activity_of" in row:
                session, number = row["activity_of"]
                told[session, number] = row["activity_status"]
            else:
                rows.append(row)
        for row in rows:
            status = told.get((row.pop("session", 0), row.pop("number", 0)))
            if status is not None:
                row["activity_status"] = status
                row["active"] = status == SINGLE_ACTIVE
        return rows

    async def list_nodes(self) -> dict[str, Row]:
        """Resources of the nodes that answer, by name."""
        rows = await self._gather("node")
        return {str(row["name"]): row for row in rows}

    async def queue_infos(self, groups: Sequence[int] | None = None) -> dict[int, Row]:
        """Returns the row that the leading, or only, node of each queue gives, by group id.
        `groups`: of these queues alone."""
        rows = await self._gather("queues" if groups is None else ["queues", *groups])
        found: dict[int, Row] = {}
        notes = []
        async for row in in_slices(rows):
            if "readers" in row or "stopped" in row:
                notes.append(row)
            else:
                found[row["group"]] = row
        for row in notes:
            if "stopped" in row and row["group"] in found:
                found[row["group"]].setdefault("stopped_members", {})[row["node"]] = row["stopped"]
            # Streams are read on every node; their leader knows of its own readers only.
            if "readers" in row and row["group"] in found:
                found[row["group"]]["consumers"] += row["readers"]
        return found

    async def published(self) -> dict[tuple[str, str], Row]:
        """Returns by (virtual host, exchange) what clients of all nodes have published: messages
        into the exchange (`in`), and out of it by queue (`out`)."""
        found: dict[tuple[str, str], Row] = {}
        for row in await self._gather("routes"):
            known = found.setdefault((row["vhost"], row["exchange"]), {"in": 0, "out": Counter()})
            known["in"] += row["in"]
            known["out"].update(row["out"])
        return found

    async def replicas_behind(self) -> dict[tuple[int, int], bool]:
        """Returns (group, node) of replicas that could not replace another one now: they stopped,
        lack something for longer than a moment, or have no vote; the value says whether they have
        one."""
        found: dict[tuple[int, int], bool] = {}
        for row in await self._gather("behind"):
            place = (row["group"], row["node"])
            found[place] = found.get(place, True) and row.get("voter", True)
        return found

    async def leaderships(self) -> list[Row]:
        """Returns a row for each group of a queue that has a leader
        (`leadership.leadership_rows`)."""
        return await self._gather("leaders")

    async def close_connection(self, name: str, reason: str) -> bool:
        """Closes a client's connection, on whatever node; False when there is none."""
        for node in self._nodes.running():
            try:
                if await self._control.request(
                    node, KIND_CLOSE_CONNECTION, [name, reason], LIST_TIMEOUT_S
                ):
                    return True
            except BrokerError:
                continue
        return False

    async def set_prefetch(self, vhost: str, queue: str, tag: str, prefetch: int) -> int:
        """Changes the prefetch of running consumers, on whatever node; returns how many there are
        on the nodes that answered.

        Raises:
            PreconditionFailed: a node has a release that does not do this.
            Unavailable: no node answered.
        """
        for node in self._nodes.running():
            self._control.check_release(node)
        changed = answered = 0
        body = [vhost, queue, tag, prefetch]
        for node in self._nodes.running():
            try:
                found = await self._control.request(node, KIND_PREFETCH, body, LIST_TIMEOUT_S)
            except BrokerError:
                continue
            answered += 1
            changed += int(found)
        if not answered:
            raise Unavailable("no node answered in time")
        return changed

    async def learn_alarms(self) -> None:
        """Asks for alarms that began before this node started: nodes announce changes only."""
        for row in await self._gather("node"):
            names = (("memory", row["mem_alarm"]), ("disk", row["disk_free_alarm"]))
            self._alarms.learn(row["id"], (name for name, on in names if on))

    async def _gather(self, what: str | list[object]) -> list[Row]:
        timeout_s = _list_timeout_s(what)

        async def ask(node: int) -> list[Row]:
            if self._nodes.is_older(node) and isinstance(what, list):
                return await self._gather_older(node, what)
            try:
                return list(await self._control.request(node, KIND_LIST, what, timeout_s))
            except BrokerError:
                # A node that does not answer in time has no rows; the list still comes.
                return []

        found = await asyncio.gather(*(ask(node) for node in self._nodes.running()))
        return [row for rows in found for row in rows]

    async def _gather_older(self, node: int, what: list[object]) -> list[Row]:
        """Asks a node of 0.3.0, which lists all queues or none."""
        try:
            rows = await self._control.request(node, KIND_LIST, what[0], LIST_QUEUES_TIMEOUT_S)
        except BrokerError:
            return []
        return [row for row in rows if row["group"] in what[1:]]

    # --- answers -------------------------------------------------------------------------

    async def _on_list(self, node: int, what: object, reply: Reply) -> None:
        if node == self._nodes.node_id or what == "node":
            reply(await self._rows(what))
            return
        until_ms = self._clock.monotonic_ms() + int(_list_timeout_s(what) * 1000)
        answers = self._local.answers
        async with answers.room(node, until_ms):
            # Nothing is made for a link that is full.
            pass
        # Other answers need not wait while rows are made in slices.
        rows = await self._rows(what)
        async with answers.room(node, until_ms):
            reply(rows)

    async def _rows(self, what: object) -> list[Row]:
        connections = self._connections.all()
        match what:
            case "connections":
                return [{**c.info(), "node": self._nodes.own_name} for c in connections]
            case "channels":
                return [row for c in connections for row in c.channel_infos()]
            case "consumers":
                rows = [row for c in connections for row in c.consumer_infos()]
                return rows + self._reservation_rows() + self._activity_rows()
            case "queues":
                rows = [row async for row in in_slices(self.local_rows())]
                return rows + self._local.other_rows()
            case ["queues", *given]:
                groups = [group for group in given if isinstance(group, int)]
                return [*self.local_rows(groups), *self._local.other_rows(groups)]
            case "routes":
                return [row async for row in in_slices(self._route_counts.rows())]
            case "behind":
                return [row async for row in in_slices(self._local.behind_rows())]
            case "leaders":
                return [row async for row in in_slices(self._local.leader_rows())]
            case "node":
                return [self._node_row()]
            case _:
                return []

    def _node_row(self) -> Row:
        alarms = self._alarms.of(self._nodes.node_id)
        return {
            **self.node.info(),
            "name": self._nodes.own_name,
            "id": self._nodes.node_id,
            "partitions": self._nodes.partitions(),
            "mem_alarm": "memory" in alarms,
            "disk_free_alarm": "disk" in alarms,
            "connections": len(self._connections),
            "uptime": self.uptime_ms,
            "counters": self._counters.as_dict(),
        }

    def local_rows(self, groups: Collection[int] | None = None) -> Iterator[Row]:
        """Queues that this node leads or is the home of, one by one; exclusive ones with their
        connection. `groups`: of these alone."""
        owners: dict[str | None, ConnectionHandle] = {}
        for row in self._local.rows(groups):
            owner = row.pop("owner", None)
            if owner is not None and not owners:
                owners = {self._nodes.owner_name(each.id): each for each in self._connections.all()}
            if owner in owners:
                info = owners[owner].info()
                row["owner_pid_details"] = {name: info.get(name) for name in OWNER_FIELDS}
            yield row

    def _reservation_rows(self) -> list[Row]:
        """Reservations and leases as rows of /api/consumers, of queues that this node decides
        about."""
        return [
            {
                "consumer_tag": reservation["reservation"],
                "queue": {"name": queue.name, "vhost": queue.vhost},
                "channel_details": {"node": self._nodes.own_name},
                "ack_required": True,
                "prefetch_count": 0,
                "exclusive": False,
                "active": True,
                "activity_status": "up",
                "arguments": {},
                **reservation,
            }
            for queue in self._local.handles()
            for reservation in queue.reservations()
        ]

    def _activity_rows(self) -> list[Row]:
        """Returns the activity of consumers, on any node, of queues that this node decides about;
        for `list_consumers`."""
        return [
            {"activity_of": [session, number], "activity_status": status}
            for queue in self._local.handles()
            for session, number, status in queue.activity()
        ]

    async def _on_prefetch(self, node: int, body: object) -> int:
        match body:
            case [str(vhost), str(queue), str(tag), int(prefetch)]:
                connections = [each for each in self._connections.all() if each.vhost == vhost]
                return sum(each.set_prefetch(queue, tag, prefetch) for each in connections)
        raise PeerError(f"malformed request to change a prefetch from node {node}")

    async def _on_close_connection(self, node: int, body: object) -> bool:
        if not isinstance(body, list) or len(body) != 2:
            raise PeerError(f"malformed request to close a connection from node {node}")
        name, reason = body
        for connection in self._connections.all():
            if connection.name == name:
                connection.close(str(reason))
                return True
        return False


def _list_timeout_s(what: object) -> float:
    # Rows of thousands of queues are made in slices.
    return LIST_QUEUES_TIMEOUT_S if what in ("queues", "leaders") else LIST_TIMEOUT_S
