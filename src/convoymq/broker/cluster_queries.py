"""Lists across the cluster: from the read model; and questions that nodes ask each other."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import NamedTuple, TypeAlias

import msgspec

from convoymq.broker.alarms import Alarms
from convoymq.broker.local_queues import LocalQueues
from convoymq.broker.node_view import NodeView
from convoymq.broker.read_model import PACKED, ReadModel, decoded, figures_in, lengths_in
from convoymq.broker.registry import ConnectionHandle, ConnectionRegistry, Counters
from convoymq.broker.route_counts import RouteCounts
from convoymq.broker.sampler import Sampler, single_active
from convoymq.broker.tracks import Series, Track
from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.metadata.machine import QueueRecord
from convoymq.model.clock import Clock
from convoymq.model.errors import BrokerError, PeerError, Unavailable
from convoymq.model.slices import in_slices
from convoymq.model.tasks import Tasks
from convoymq.queues.interface import SINGLE_ACTIVE, Queue, Row
from convoymq.transport.control import ControlPlane, Reply
from convoymq.transport.frame_kinds import KIND_CLOSE_CONNECTION, KIND_LIST, KIND_PREFETCH

LIST_TIMEOUT_S = 1.0
LIST_QUEUES_TIMEOUT_S = 5.0
LONG_LISTS = ("queues", "leaders", "metrics")


LOAD = (
    "mem_used", "fd_used", "proc_used", "disk_free", "run_queue", "gc_num", "context_switches",
    "io_read_bytes", "io_write_count", "io_write_bytes", "io_sync_count", "io_sync_time",
)  # fmt: skip
"""Numbers of a node that change all the time."""
OWNER_FIELDS = ("name", "peer_host", "peer_port")
Family: TypeAlias = tuple[str, list[str]]
"""Name and lines of a metric."""
PACKED_FAMILIES = "families"


class Known(NamedTuple):
    """A row of a list, and its numbers over time."""

    row: Row
    series: tuple[Series, ...]


class KnownQueue(NamedTuple):
    """Knowledge of a queue: its row, its figures over time and its row over time."""

    row: Row
    figures: Track | None
    facts: Track | None


class ClusterQueries:
    """Lists from this node's read model; questions to other nodes, and their answers."""

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
        tasks: Tasks,
    ) -> None:
        self.node = node
        self.model = ReadModel()
        self.sampler = Sampler(
            model=self.model,
            nodes=nodes,
            control=control,
            local=local,
            connections=connections,
            route_counts=route_counts,
            clock=clock,
            tasks=tasks,
            queue_rows=self.local_rows,
            node_rows=self.node_rows,
        )
        self._nodes = nodes
        self._control = control
        self._local = local
        self._alarms = alarms
        self._connections = connections
        self._counters = counters
        self._route_counts = route_counts
        self._clock = clock
        self._started_ms = clock.now_ms()
        self.shovel_rows: Callable[[], list[Row]] = list
        """Returns the status of the shovels that run on this node."""
        self.metric_families: Callable[[list[object]], Awaitable[list[Family]]] = _no_families
        """Returns the metrics of this process that another one of its machine asks for."""
        control.handle_replying(KIND_LIST, self._on_list)
        control.handle(KIND_CLOSE_CONNECTION, self._on_close_connection)
        control.handle(KIND_PREFETCH, self._on_prefetch)

    @property
    def uptime_ms(self) -> int:
        """Time since the broker was made."""
        return self._clock.now_ms() - self._started_ms

    def now_ms(self) -> int:
        """Returns the time of the read model."""
        return self._clock.monotonic_ms()

    # --- lists, from the read model ---------------------------------------------------------

    async def connections(self) -> list[Known]:
        """Returns the connections of all nodes."""
        await self.sampler.read_connections()
        return await self._listed("connections")

    async def channels(self) -> list[Known]:
        """Returns the channels of all nodes."""
        await self.sampler.read_connections()
        return await self._listed("channels")

    async def list_sessions(self, connection: str) -> list[Row]:
        """Returns the sessions of a connection, by its name. Nodes before 0.4 have none."""
        return await self._gather(["sessions", connection])

    async def list_consumers(self) -> list[Row]:
        """Returns the consumers and reservations of all nodes. Which consumer of a queue is active
        is known where the queue is decided about."""
        await self.sampler.read_connections()
        await self.sampler.read_due_rows()
        told: dict[tuple[int, int], str] = {}
        rows: list[Row] = []
        for known in await self._listed("consumers"):
            if "activity_of" in known.row:
                session, number = known.row["activity_of"]
                told[session, number] = known.row["activity_status"]
            else:
                rows.append(known.row)
        for _, _, track in self.model.all("activity"):
            for session, number, status in msgspec.msgpack.decode(track.data):
                told[session, number] = status
        for node, group, track in self.model.all("reservations"):
            queue = self._local.get(int(group))
            if queue is not None:
                found = msgspec.msgpack.decode(track.data)
                rows += [self._reservation_row(queue, each, node) for each in found]
        for row in rows:
            status = told.get((row.pop("session", 0), row.pop("number", 0)))
            if status is not None:
                row["activity_status"] = status
                row["active"] = status == SINGLE_ACTIVE
        return rows

    async def nodes(self) -> dict[str, Known]:
        """Returns the nodes that can be reached, by name."""
        self.sampler.read_node()
        found: dict[str, Known] = {}
        for node, _, track in self.model.all("load"):
            facts = self.model.find(node, "node")
            if facts is not None and self._nodes.is_up(node) and self.model.part(node).complete:
                row = decoded(facts.data) | decoded(track.data)
                found[str(row["name"])] = Known(row, (Series(track, decoded),))
        for row in await self._of_others("node"):
            found[str(row["name"])] = Known(row, ())
        return found

    async def routes(self) -> dict[tuple[str, str], list[Known]]:
        """Returns by (virtual host, exchange) what clients of each node have published."""
        await self.sampler.read_routes()
        found: dict[tuple[str, str], list[Known]] = {}
        for known in await self._listed("routes"):
            row = known.row
            if isinstance(row["out"], dict):
                # Of a node that answered itself.
                row["out"] = sum(row["out"].values())
            found.setdefault((row["vhost"], row["exchange"]), []).append(known)
        return found

    def totals(self, vhosts: Collection[str]) -> list[Series]:
        """Returns the sums of the queues of virtual hosts, as the nodes that can be reached told
        them."""
        return [
            Series(track, figures_in)
            for node, vhost, track in self.model.all("totals")
            if vhost in vhosts and self._nodes.is_up(node)
        ]

    def figures_of(self, record: QueueRecord) -> tuple[int, ...] | None:
        """Returns the figures of a queue (`FIGURES`), as far as this node knows them."""
        found = self.model.newest("figures", record.group, self._local.leader_of(record))
        return PACKED.unpack(found[1].data) if found is not None else None

    def queue(self, record: QueueRecord, told: Row | None = None) -> KnownQueue | None:
        """Returns what the leading, or only, node of a queue says of it: `told`, or what is known
        here. None: nothing is known."""
        group, leader = record.group, self._local.leader_of(record)
        row = told or next(self.local_rows([group]), None)
        if row is not None and told is None:
            leader = self._nodes.node_id
            row["single_active_consumer_tag"] = row.get("single_active_consumer_tag") or (
                single_active(row)
            )
        facts = self.model.newest("facts", group, leader)
        figures = self.model.newest("figures", group, leader)
        if row is None:
            if facts is None:
                return None
            row = decoded(facts[1].data)
            if figures is not None:
                row |= lengths_in(figures[1].data)
            self._mark(row, facts[0])
            if self._local.get(group) is not None:
                # The model has the word of the last leader; this node may know of another, or none.
                row["leader"] = leader
        for node, reason in self._told_of(group, "stopped").items():
            row.setdefault("stopped_members", {})[node] = reason
        # Streams are read on every node; their leader knows of its own readers only.
        for node, readers in self._told_of(group, "readers").items():
            if node != leader and "consumers" in row:
                row["consumers"] += readers
        return KnownQueue(row, figures and figures[1], facts and facts[1])

    def _told_of(self, group: int, section: str) -> dict[int, int | str]:
        """Returns what each node says of a queue that another one decides about."""
        own = self._local.readers_of(group) if section == "readers" else self._local.why(group)
        found: dict[int, int | str] = {
            node: msgspec.msgpack.decode(track.data)
            for node, track in self.model.said(section, group).items()
            if node != self._nodes.node_id
        }
        return found | {self._nodes.node_id: own} if own else found

    async def ask_queue(self, record: QueueRecord) -> KnownQueue | None:
        """As `queue`, but with the present word of the leader, if it answers. A node without the
        queue asks all members."""
        leader = self._local.leader_of(record)
        asked = record.members if leader is None else (leader,)
        up = tuple(
            node for node in asked if node != self._nodes.node_id and self._nodes.is_up(node)
        )
        told = None
        if up:
            rows = await self._gather(["queues", record.group], up)
            told = next(
                (row for row in rows if "readers" not in row and "stopped" not in row), None
            )
        return self.queue(record, told)

    async def _listed(self, section: str) -> list[Known]:
        made = [Known(row, ()) for row in await self._of_others(section)]
        async for node, _, track in in_slices(self.model.all(section)):
            if node == self._nodes.node_id or self.model.part(node).complete:
                row = decoded(track.data)
                self._mark(row, node)
                made.append(Known(row, (Series(track, decoded),)))
        return made

    def _mark(self, row: Row, node: int) -> None:
        """Marks a row of a node that cannot be reached with its age."""
        if not self._nodes.is_up(node):
            row["stale_ms"] = self._clock.monotonic_ms() - self.model.part(node).heard_ms

    async def _of_others(self, what: str) -> list[Row]:
        """Asks the nodes that have not told their part of the model: those of earlier releases,
        and for a second those that were linked just now."""
        own = self._nodes.node_id
        others = [
            node
            for node in self._nodes.running()
            if node != own and not self.model.part(node).complete
        ]
        return await self._gather(what, others) if others else []

    # --- questions -----------------------------------------------------------------------

    async def list_connections(self) -> list[Row]:
        """Asks all nodes for their connections, as they are now."""
        return await self._gather("connections")

    async def shovels(self) -> dict[tuple[str, str], Row]:
        """Returns the status of shovels by virtual host and name, from the nodes that run them."""
        rows = await self._gather("shovels")
        return {(row["vhost"], row["name"]): row for row in rows}

    async def published(self) -> dict[tuple[str, str], Row]:
        """Returns by (virtual host, exchange) what clients of all nodes have published: messages
        into the exchange (`in`), and out of it by queue (`out`)."""
        found: dict[tuple[str, str], Row] = {}
        for row in await self._gather("routes"):
            known = found.setdefault((row["vhost"], row["exchange"]), {"in": 0, "out": Counter()})
            known["in"] += row["in"]
            known["out"].update(row["out"])
        return found

    async def metrics_of(self, processes: Collection[int], asked: list[object]) -> list[Family]:
        """Returns the metrics of other processes of this machine, as far as they answer."""
        running = [node for node in processes if self._nodes.is_up(node)]
        found = await self._gather(["metrics", *asked], running)
        return [family for row in found for family in _families_in(row)]

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

    async def _gather(
        self, what: str | list[object], nodes: Collection[int] | None = None
    ) -> list[Row]:
        timeout_s = _list_timeout_s(what)

        async def ask(node: int) -> list[Row]:
            if self._nodes.is_older(node) and isinstance(what, list):
                return await self._gather_older(node, what)
            try:
                return list(await self._control.request(node, KIND_LIST, what, timeout_s))
            except BrokerError:
                # A node that does not answer in time has no rows; the list still comes.
                return []

        asked = self._nodes.running() if nodes is None else nodes
        found = await asyncio.gather(*(ask(node) for node in asked))
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
            case ["sessions", name]:
                found = (c.session_infos() for c in connections if c.name == name)
                return [row for rows in found for row in rows or ()]
            case "shovels":
                return [{**row, "node": self._nodes.own_name} for row in self.shovel_rows()]
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
            case ["metrics", *asked]:
                families = msgspec.msgpack.encode(await self.metric_families(asked))
                # Lines of thousands of queues are much alike, and links carry messages meanwhile.
                return [{PACKED_FAMILIES: await asyncio.to_thread(zlib.compress, families, 1)}]
            case "leaders":
                return [row async for row in in_slices(self._local.leader_rows())]
            case "node":
                facts, load = self.node_rows()
                return [facts | load]
            case _:
                return []

    def node_rows(self) -> tuple[Row, Row]:
        """Returns what this node is, and its numbers."""
        alarms = self._alarms.of(self._nodes.node_id)
        info = self.node.info()
        load = {name: info.pop(name) for name in LOAD if name in info}
        facts = {
            **info,
            "name": self._nodes.own_name,
            "id": self._nodes.node_id,
            "partitions": self._nodes.partitions(),
            "mem_alarm": "memory" in alarms,
            "disk_free_alarm": "disk" in alarms,
        }
        counters = self._counters.as_dict()
        load |= {
            "connections": len(self._connections),
            "channels": counters["channels_opened"] - counters["channels_closed"],
            "uptime": self.uptime_ms,
            "counters": counters,
        }
        return facts, load

    def local_rows(self, groups: Collection[int] | None = None) -> Iterator[Row]:
        """Queues that this node leads or is the home of, one by one; exclusive ones with their
        connection. `groups`: of these alone."""
        for row in self._local.rows(groups):
            owner = row.pop("owner", None)
            connection = self._owner(owner) if owner is not None else None
            if connection is not None:
                info = connection.info()
                row["owner_pid_details"] = {name: info.get(name) for name in OWNER_FIELDS}
            yield row

    def _owner(self, owner: str) -> ConnectionHandle | None:
        """Returns the connection of this node that is the owner of an exclusive queue."""
        number = int(owner.rpartition(".")[2])
        return self._connections.get(number) if self._nodes.owner_name(number) == owner else None

    def _reservation_rows(self) -> list[Row]:
        """Returns reservations and leases of queues that this node decides about, as rows of
        /api/consumers."""
        own = self._nodes.node_id
        return [
            self._reservation_row(queue, each, own)
            for queue in self._local.handles()
            for each in queue.reservations()
        ]

    def _reservation_row(self, queue: Queue, reservation: Row, node: int) -> Row:
        return {
            "consumer_tag": reservation["reservation"],
            "queue": {"name": queue.name, "vhost": queue.vhost},
            "channel_details": {"node": self._nodes.name_of(node)},
            "ack_required": True,
            "prefetch_count": 0,
            "exclusive": False,
            "active": True,
            "activity_status": "up",
            "arguments": {},
            **reservation,
        }

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
    subject = what[0] if isinstance(what, list) and what[:1] == ["metrics"] else what
    return LIST_QUEUES_TIMEOUT_S if subject in LONG_LISTS else LIST_TIMEOUT_S


def _families_in(row: Row) -> list[Family]:
    return msgspec.msgpack.decode(zlib.decompress(row[PACKED_FAMILIES]), type=list[Family])


async def _no_families(_asked: list[object]) -> list[Family]:
    return []
