"""Declarations of a client: what its user must be allowed, and what nobody may do, whatever the
protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from convoymq.edges.permissions import Asking, Permissions
from convoymq.model import refusals
from convoymq.model.refusals import exchange_subject
from convoymq.model.tables import Table
from convoymq.routing.types import RESERVED_PREFIX, Destination, DestinationKind

if TYPE_CHECKING:
    from convoymq.broker.declarations import Declarations


class Declarer(Asking, Protocol):
    """A connection, which its exclusive queues belong to."""

    id: int


class Declaring:
    """The declarations of one connection. What it may not do raises AccessRefused."""

    def __init__(self, connection: Declarer, permissions: Permissions) -> None:
        self._connection = connection
        self._permissions = permissions

    @property
    def _declarations(self) -> Declarations:
        return self._connection.broker.declarations

    async def exchange(
        self,
        name: str,
        type: str,
        *,
        durable: bool,
        auto_delete: bool,
        internal: bool,
        arguments: Table,
    ) -> None:
        """Declares an exchange. Raises BrokerError."""
        self._check_configure("exchange", name, arguments)
        await self._declarations.declare_exchange(
            self._connection.vhost,
            name,
            type,
            durable=durable,
            auto_delete=auto_delete,
            internal=internal,
            arguments=arguments,
            user=self._connection.user.name,
        )

    async def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        """Deletes an exchange; one that does not exist is fine. Raises BrokerError."""
        _refuse_default(name)
        vhost = self._connection.vhost
        if name.startswith(RESERVED_PREFIX):
            raise refusals.system_exchange_deletion(exchange_subject(vhost, name))
        self._permissions.check("configure", "exchange", name)
        await self._declarations.delete_exchange(vhost, name, if_unused=if_unused)

    async def queue(
        self,
        name: str,
        *,
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        arguments: Table,
        generated: str = "",
    ) -> tuple[str, int, int]:
        """Declares a queue and returns its name, ready messages and consumers. Raises BrokerError.

        Args:
            generated: the name to take when `name` is empty.
        """
        self._check_configure("queue", name or generated, arguments)
        return await self._declarations.declare_queue(
            self._connection.vhost,
            name,
            durable=durable,
            exclusive=exclusive,
            auto_delete=auto_delete,
            arguments=arguments,
            owner=self._connection.id,
            generated=generated,
            user=self._connection.user.name,
        )

    async def delete_queue(
        self, name: str, *, if_unused: bool = False, if_empty: bool = False
    ) -> int:
        """Deletes a queue and returns how many ready messages it had. Raises BrokerError."""
        self._permissions.check("configure", "queue", name)
        connection = self._connection
        return await connection.broker.queue_admin.delete_queue(
            connection.vhost, name, if_unused=if_unused, if_empty=if_empty, owner=connection.id
        )

    async def bind(self, source: str, destination: Destination, key: str, arguments: Table) -> None:
        """Binds a queue or an exchange to an exchange. Raises BrokerError."""
        self.check_bind(source, destination, key)
        connection = self._connection
        await self._declarations.bind(
            connection.vhost, source, destination, key, arguments, connection.id
        )

    async def unbind(
        self, source: str, destination: Destination, key: str, arguments: Table
    ) -> None:
        """Removes a binding; one that does not exist is fine. Raises BrokerError."""
        self.check_bind(source, destination, key)
        connection = self._connection
        await self._declarations.unbind(
            connection.vhost, source, destination, key, arguments, connection.id
        )

    def _check_configure(self, kind: str, name: str, arguments: Table) -> None:
        if kind == "exchange":
            _refuse_default(name)
        may = self._permissions.check
        may("configure", kind, name)
        self._declarations.check_link(self._connection.vhost, kind, name, arguments, may)

    def check_bind(self, source: str, destination: Destination, key: str) -> None:
        """Raises AccessRefused: the user may not bind so, nor unbind."""
        _refuse_default(source)
        if destination.kind is DestinationKind.EXCHANGE:
            _refuse_default(destination.name)
        self._permissions.check("write", destination.kind.value, destination.name)
        self._permissions.check("read", "exchange", source)
        self._permissions.check_topic("read", source, key)


def _refuse_default(name: str) -> None:
    if not name:
        raise refusals.default_exchange_untouchable()
