"""All connections of the columnar protocol on one node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

import structlog

from convoymq.broker.access import COLUMNAR
from convoymq.broker.facade import Broker
from convoymq.edges.columnar.config import FetchConfig
from convoymq.edges.columnar.counters import FetchCounters
from convoymq.edges.columnar.turns import Budget, Turns
from convoymq.edges.edge import Edge, Incoming, Metric, NodeParts, message_metrics
from convoymq.edges.sasl import Login, LoginConfig
from convoymq.model.columnar import PREFACE_MAGIC
from convoymq.model.late_imports import import_late
from convoymq.model.machine import machine_id
from convoymq.model.tasks import Tasks
from convoymq.transport.listening import HangUpWatch

if TYPE_CHECKING:
    from convoymq.edges.columnar.connection import FetchConnection
    from convoymq.edges.columnar.topic_routes import RouteWatch

log = structlog.get_logger()

STOP_TIMEOUT_S = 1.0


def open_edge(parts: NodeParts) -> FetchEdge | None:
    """Makes the edge as the node's configuration wants it."""
    fetch = parts.config.of(FetchConfig)
    if not fetch.enabled:
        return None
    return FetchEdge(
        broker=parts.broker,
        settings=fetch,
        login=parts.config.of(LoginConfig),
        machine=machine_id() if fetch.local_reads else "",
        message_size_max=parts.config.listeners.max_message_size,
        activity=parts.activity,
    )


class FetchEdge(Edge):
    """See the module text. Make it on the loop it serves."""

    prefaces = (PREFACE_MAGIC[:4],)
    """Of every version: another one than this is answered."""

    def __init__(
        self,
        *,
        broker: Broker,
        settings: FetchConfig | None = None,
        login: LoginConfig | None = None,
        machine: str = "",
        message_size_max: int = 16 << 20,
        activity: Callable[[], int] = int,
    ) -> None:
        """
        Args:
            machine: clients that name it read from the node's files what lies there; "" = none do.
            message_size_max: limit of bodies of produced messages, bytes.
            activity: a number that changes when AMQP clients of this node send or receive, or
                writers have something stored here.
        """
        self.broker = broker
        self.settings = settings if settings is not None else FetchConfig()
        self.login = Login(broker.access, login or LoginConfig(), COLUMNAR)
        self.machine = machine
        self.message_size_max = message_size_max
        self.counters = FetchCounters()
        self.messages = broker.counters.of(COLUMNAR)
        self.turns = Turns(
            self.settings.slice_us / 1_000_000, self.settings.rest_us / 1_000_000, activity
        )
        self.budget = Budget(self.settings.buffer_max)
        """Answers that are built or not yet read."""
        self.input = Budget(self.settings.buffer_max)
        """Requests that are being read or worked on."""
        self.connections: dict[int, FetchConnection] = {}
        self.unblocked = asyncio.Event()
        """Set while no alarm blocks publishers."""
        self._tasks = Tasks()
        self._hang_ups = HangUpWatch(
            lambda: {c.fileno(): c.abort for c in self.connections.values() if c.blocked}
        )
        self.stopping = False
        self._route_watch: RouteWatch | None = None
        broker.alarms.listeners.append(self._on_alarms)
        self._on_alarms(broker.alarms.effective)

    def connect(self, incoming: Incoming) -> None:
        # For the first connection, so that a node without any does not carry it.
        import_late("convoymq.edges.columnar.connection")
        from convoymq.edges.columnar.connection import FetchConnection

        connection = FetchConnection(
            self,
            incoming.head,
            incoming.id,
            incoming.peer,
            incoming.local,
            incoming.tls,
            incoming.handshake_left_s(),
        )
        incoming.attach(connection)

    def route_watch(self) -> RouteWatch:
        """Returns what wakes requests that wait for a topic to change; made for the first one."""
        if self._route_watch is None:
            # Imported with the first connection (`connect`).
            from convoymq.edges.columnar.topic_routes import RouteWatch

            self._route_watch = RouteWatch(self.broker.tree.topics)
        return self._route_watch

    def admit(self, connection: FetchConnection) -> bool:
        """Returns whether there is room for one more connection; counts the refused."""
        if self.stopping or len(self.connections) >= self.settings.connections_max:
            self.counters.refused += 1
            log.warning("fetch.connection_limit", limit=self.settings.connections_max)
            return False
        self.connections[connection.id] = connection
        return True

    def gone(self, connection: FetchConnection) -> None:
        """A connection's socket is closed."""
        self.connections.pop(connection.id, None)

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Runs in a task of this edge."""
        return self._tasks.spawn(work)

    def _on_alarms(self, alarms: frozenset[str]) -> None:
        if alarms:
            self.unblocked.clear()
        else:
            self.unblocked.set()
        self._hang_ups.set(bool(alarms))

    async def stop(self) -> None:
        """Closes all connections; clients are told why."""
        self.stopping = True
        if self._on_alarms in self.broker.alarms.listeners:
            self.broker.alarms.listeners.remove(self._on_alarms)
        self._hang_ups.set(False)
        for connection in list(self.connections.values()):
            connection.close("the node stops")
        await self._tasks.wait(STOP_TIMEOUT_S)
        deadline = asyncio.get_running_loop().time() + STOP_TIMEOUT_S
        while self.connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self.connections.values()):
            connection.abort()
        await asyncio.sleep(0)

    def metrics(self) -> list[Metric]:
        found: list[Metric] = [
            ("gauge", "convoy_fetch_connections", {}, len(self.connections)),
            ("gauge", "convoy_fetch_buffered_bytes", {}, self.budget.used),
            ("gauge", "convoy_fetch_input_bytes", {}, self.input.used),
        ]
        found += [
            ("counter", f"convoy_fetch_{name}_total", labels, value)
            for name, labels, value in self.counters.metrics()
        ]
        return found + message_metrics(COLUMNAR, self.messages)

    def sent(self, rows: int) -> None:
        """Counts messages that a client has read."""
        self.counters.rows_out += rows
        self.messages.delivered_no_ack += rows
