"""Declares and deletes exchanges, bindings and queues; every change goes through the tree."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from convoymq.broker.ignored_arguments import IgnoredArguments
from convoymq.broker.local_queues import TRACE_ARGUMENT, LocalQueues
from convoymq.broker.queue_admin import QueueAdmin
from convoymq.broker.registry import Counters
from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.cluster_nodes import ClusterNodes
from convoymq.metadata.commands import (
    Bind,
    DeclareExchange,
    DeclareQueue,
    DeleteExchange,
    DeleteQueue,
    Unbind,
)
from convoymq.metadata.machine import Vhost
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import BrokerError, PreconditionFailed, Refused
from convoymq.model.refusals import (
    cluster_exchange_limit_reached,
    cluster_queue_limit_reached,
    feature_not_permitted,
    queue_subject,
    vhost_missing,
)
from convoymq.model.tables import EMPTY, Table
from convoymq.queues.driver import driver_of
from convoymq.queues.placement import Placement, placed
from convoymq.routing.declarations import check_exchange, check_queue
from convoymq.routing.default_type import with_default_type
from convoymq.routing.ignored_arguments import ignored_of_exchange, ignored_of_queue
from convoymq.routing.queue_arguments import TYPE_ARGUMENT, type_name_of
from convoymq.routing.types import Destination, Exchange, Queue, QueueType

NAME_BYTES_MAX = 255
LINKS = {"queue": "x-dead-letter-exchange", "exchange": "alternate-exchange"}
"""Arguments that name an exchange to which messages are handed on."""
DEFAULT_TYPE = QueueType.QUORUM
"""Queue type that `auto` stands for, where properties fit."""


class _ExchangeProperties(TypedDict):
    durable: bool
    auto_delete: bool
    internal: bool


class _QueueProperties(TypedDict):
    durable: bool
    auto_delete: bool
    server_named: bool


@dataclass(slots=True, kw_only=True)
class Declarations:
    """Declarations by clients of this node."""

    metadata: AsyncMetadataStore
    local: LocalQueues
    placement: Placement
    nodes: ClusterNodes
    queue_admin: QueueAdmin
    settings: DefaultsConfig
    counters: Counters
    ignored: IgnoredArguments

    # --- permissions ---------------------------------------------------------------------

    def check_link(
        self,
        vhost: str,
        kind: str,
        name: str,
        arguments: Table,
        may: Callable[[str, str, str], None],
    ) -> None:
        """Checks what a user needs to make a queue or an exchange that hands messages on to another
        exchange: read on it and write on the other one. One that exists is not asked, and nobody
        is asked later, or for a policy, as in RabbitMQ.

        Args:
            kind: "queue" or "exchange".
            may: raises AccessRefused unless the user has a permission on a kind of that name.
        """
        target = arguments.get(LINKS[kind])
        if target is None or not isinstance(target.value, bytes):
            return
        topology = self._vhost(vhost).topology
        find = topology.find_queue if kind == "queue" else topology.find_exchange
        if find(name) is None:
            may("read", kind, name)
            may("write", "exchange", target.value.decode("utf-8", "replace"))

    # --- exchanges -----------------------------------------------------------------------

    def passive_declare_exchange(self, vhost: str, name: str) -> Exchange:
        """Returns an exchange. Raises NotFound."""
        return self._vhost(vhost).topology.passive_exchange(name)

    async def declare_exchange(
        self,
        vhost: str,
        name: str,
        type: str,
        *,
        durable: bool,
        auto_delete: bool,
        internal: bool,
        arguments: Table = EMPTY,
        user: str = "",
    ) -> bool:
        """Declares an exchange for a user; False when an equal one exists."""
        _check_length(name)
        topology = self._vhost(vhost).topology
        properties = _ExchangeProperties(
            durable=durable, auto_delete=auto_delete, internal=internal
        )
        if topology.find_exchange(name) is not None:
            # It exists: nobody else has to be asked.
            check_exchange(topology, name, type, arguments=arguments, **properties)
            self.ignored.warn("exchange", vhost, name, ignored_of_exchange(type, arguments))
            return False
        limit = self.settings.cluster_exchanges_max
        if limit and self._exchange_count() >= limit:
            raise cluster_exchange_limit_reached(vhost, name, limit)
        command = DeclareExchange(
            vhost=vhost, name=name, type=type, arguments=arguments.encoded, user=user, **properties
        )
        try:
            created = await self.metadata.execute(command, self.settings.operation_timeout_s)
        except Refused:
            # Somebody else may have been first, with one that counts as equal.
            topology = self._vhost(vhost).topology
            if topology.find_exchange(name) is None:
                raise
            check_exchange(topology, name, type, arguments=arguments, **properties)
            created = False
        self.ignored.warn("exchange", vhost, name, ignored_of_exchange(type, arguments))
        return bool(created)

    async def delete_exchange(self, vhost: str, name: str, *, if_unused: bool = False) -> None:
        """Deletes an exchange; one that does not exist is fine."""
        self._vhost(vhost)
        command = DeleteExchange(vhost=vhost, name=name, if_unused=if_unused)
        await self.metadata.execute(command, self.settings.operation_timeout_s)

    def _exchange_count(self) -> int:
        places = self.metadata.tree.vhosts.values()
        return sum(1 for place in places for _ in place.topology.exchanges())

    # --- bindings ------------------------------------------------------------------------

    async def bind(
        self,
        vhost: str,
        source: str,
        destination: Destination,
        routing_key: str,
        arguments: Table = EMPTY,
        owner: int | None = None,
    ) -> bool:
        """Binds a queue or exchange to an exchange; False when it is bound so already."""
        _check_length(routing_key)
        self._vhost(vhost)
        command = Bind(
            **_binding_fields(vhost, source, destination, routing_key, arguments),
            owner=self.nodes.owner_name(owner),
        )
        return bool(await self.metadata.execute(command, self.settings.operation_timeout_s))

    async def unbind(
        self,
        vhost: str,
        source: str,
        destination: Destination,
        routing_key: str,
        arguments: Table = EMPTY,
        owner: int | None = None,
    ) -> None:
        """Removes a binding; one that does not exist is fine."""
        self._vhost(vhost)
        command = Unbind(
            **_binding_fields(vhost, source, destination, routing_key, arguments),
            owner=self.nodes.owner_name(owner),
        )
        await self.metadata.execute(command, self.settings.operation_timeout_s)

    # --- queues --------------------------------------------------------------------------

    async def passive_declare(
        self, vhost: str, name: str, owner: int | None = None
    ) -> tuple[str, int, int]:
        """Returns (name, ready messages, consumers). Raises NotFound, ResourceLocked."""
        await self.queue_admin.until_gone(vhost, name)
        queue = await self.queue_admin.renewed(vhost, name, owner)
        if queue is None:
            queue = self.queue_admin.find_queue(vhost, name, owner)
        messages, consumers = await queue.counts()
        return name, messages, consumers

    async def declare_queue(
        self,
        vhost: str,
        name: str,
        *,
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        arguments: Table = EMPTY,
        owner: int | None = None,
        generated: str = "",
        user: str = "",
    ) -> tuple[str, int, int]:
        """Declares a queue and waits until it can serve.

        Args:
            generated: the name to take when `name` is empty; empty: one is made.
            user: recorded as the one that declared it.
        Returns:
            Name, ready messages, consumers.
        Raises:
            PreconditionFailed: a different one exists, or it cannot be made so.
            ResourceLocked: it belongs to another connection.
            AccessRefused: a new name with the reserved prefix.
            Unavailable: no majority in time; nothing is left behind.
        """
        self.counters.queues_declared += 1
        _check_length(name)
        place = self._vhost(vhost)
        properties = _QueueProperties(
            durable=durable, auto_delete=auto_delete, server_named=not name
        )
        type_given = TYPE_ARGUMENT in arguments
        arguments = self._with_type(place, arguments, properties, exclusive=exclusive)
        name = name or generated or generated_name("amq.gen-")
        owner_name = self.nodes.owner_name(owner) if exclusive else None
        await self.queue_admin.make_way(place, name)

        def exists() -> bool:
            return self._exists(vhost, name, owner_name, arguments, properties)

        timeout = self.settings.operation_timeout_s
        queue = await self.queue_admin.renewed(vhost, name, owner, timeout) if exists() else None
        group = None
        if queue is None and not exists():
            self._check_new(vhost, name, arguments, transient=not (durable or exclusive))
            command = DeclareQueue(
                vhost=vhost,
                name=name,
                members=self._members_for(place, name, arguments, exclusive=exclusive),
                owner=owner_name,
                arguments=arguments.encoded,
                compatibility=place.compatibility or self.settings.compatibility,
                type_given=type_given,
                user=user,
                **properties,
            )
            group = await self._create(command, exists)
        ignored = ignored_of_queue(type_name_of(arguments), arguments)
        self.ignored.warn("queue", vhost, name, ignored)
        if group is None:
            if queue is None:
                # Somebody else made it just now.
                queue = self.queue_admin.find_queue(vhost, name, owner)
                await queue.ready(timeout)
            return (name, *await queue.counts())
        self.counters.queues_created += 1
        await self._wait_until_open(vhost, name, owner, group)
        return name, 0, 0

    def _with_type(
        self, place: Vhost, arguments: Table, properties: _QueueProperties, *, exclusive: bool
    ) -> Table:
        return with_default_type(
            arguments,
            exclusive=exclusive,
            vhost_default=QueueType(place.default_queue_type) if place.default_queue_type else None,
            node_default=self.default_queue_type,
            **properties,
        )

    def _exists(
        self,
        vhost: str,
        name: str,
        owner: str | None,
        arguments: Table,
        properties: _QueueProperties,
    ) -> bool:
        """Returns whether there is such a queue; raises the error of `check_queue` if it
        differs."""
        topology = self._vhost(vhost).topology
        if topology.find_queue(name) is None:
            return False
        check_queue(
            topology,
            name,
            exclusive_owner=owner,
            arguments=arguments,
            relaxed=self.settings.relaxed_redeclaration,
            **properties,
        )
        return True

    async def _wait_until_open(self, vhost: str, name: str, owner: int | None, group: int) -> None:
        """Waits until a new queue serves; deletes it where that takes too long: its name would be
        taken for nothing."""
        try:
            queue = self.queue_admin.find_queue(vhost, name, owner)
            await queue.wait_until_open(self.settings.operation_timeout_s)
        except BrokerError:
            delete = DeleteQueue(vhost=vhost, name=name, group=group)
            await self.metadata.execute(delete, self.settings.operation_timeout_s)
            raise

    async def _create(self, command: DeclareQueue, exists: Callable[[], bool]) -> int | None:
        """Returns the group of a queue that was made; None when an equal one was there."""
        try:
            reply = await self.metadata.execute(command, self.settings.operation_timeout_s)
        except Refused:
            # Somebody else may have been first, with one that counts as equal.
            if not exists():
                raise
            return None
        assert isinstance(reply, dict)
        return int(reply["group"]) if reply["created"] else None

    @property
    def default_queue_type(self) -> QueueType:
        """Type of queues that do not say which, where the virtual host does not either."""
        chosen = self.settings.queue_type
        return QueueType(chosen) if driver_of(chosen) is not None else DEFAULT_TYPE

    def _vhost(self, name: str) -> Vhost:
        vhost = self.metadata.tree.vhosts.get(name)
        if vhost is None:
            raise vhost_missing(name)
        return vhost

    def _members_for(
        self, vhost: Vhost, name: str, arguments: Table, *, exclusive: bool
    ) -> tuple[int, ...]:
        """Nodes for a new queue, the designated leader or home first."""
        if exclusive:
            return (self.nodes.node_id,)
        queue = Queue(name=name, type=QueueType(type_name_of(arguments)), arguments=arguments)
        return self.placement.members_for(
            placed(queue, vhost.policies),
            self.nodes.for_placement(),
            self.settings.leader_locator,
        )

    def _check_new(self, vhost: str, name: str, arguments: Table, *, transient: bool) -> None:
        """Raises Refused, PreconditionFailed: this cluster takes no such queue now."""
        if transient and not self.settings.permit_transient_queues:
            raise feature_not_permitted("transient_nonexcl_queues")
        limit = self.settings.cluster_queues_max
        if limit and len(self.metadata.tree.queue_index.by_group) >= limit:
            raise cluster_queue_limit_reached(vhost, name, limit)
        self._check_trace(vhost, name, arguments)

    def _check_trace(self, vhost: str, name: str, arguments: Table) -> None:
        """Raises PreconditionFailed for a queue that wants a trace which this node can't write."""
        requested = arguments.get(TRACE_ARGUMENT)
        traces = self.local.traces
        if requested is None or requested.value is not True or traces is None:
            return
        if not traces.available:
            subject = queue_subject(vhost, name)
            raise PreconditionFailed(
                f"invalid arg '{TRACE_ARGUMENT}' for {subject}: this node can't write traces, "
                "pyarrow is not installed (pip install convoymq[trace])",
                subject=subject,
            )


def generated_name(prefix: str) -> str:
    """Returns a fresh name: the prefix and 22 characters of the base64url alphabet."""
    return prefix + base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")


class _BindingFields(TypedDict):
    """Fields that name a binding in the commands of the tree."""

    vhost: str
    source: str
    kind: str
    destination: str
    routing_key: str
    arguments: bytes


def _binding_fields(
    vhost: str, source: str, destination: Destination, routing_key: str, arguments: Table
) -> _BindingFields:
    return {
        "vhost": vhost,
        "source": source,
        "kind": destination.kind.value,
        "destination": destination.name,
        "routing_key": routing_key,
        "arguments": arguments.encoded,
    }


def _check_length(name: str) -> None:
    if len(name.encode()) > NAME_BYTES_MAX:
        raise PreconditionFailed(f"name of more than {NAME_BYTES_MAX} bytes")
