"""Rules about exchanges and bindings."""

from __future__ import annotations

from convoymq.metadata.commands import (
    BeginMigration,
    Bind,
    DeclareExchange,
    DeclareQueue,
    DeleteExchange,
    Unbind,
)
from convoymq.metadata.records import Vhost
from convoymq.metadata.tree import Tree
from convoymq.model.errors import AccessRefused, PeerError, UnknownCommand
from convoymq.model.tables import Table, decode_body
from convoymq.routing.types import Destination, DestinationKind, ExchangeType


class Exchanges:
    """Changes exchanges and bindings."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def declare(self, command: DeclareExchange) -> bool:
        """Declares an exchange. Raises Refused."""
        created = self._tree.vhost(command.vhost).topology.declare_exchange(
            command.name,
            ExchangeType(command.type),
            durable=command.durable,
            auto_delete=command.auto_delete,
            internal=command.internal,
            arguments=arguments_of(command),
            user=command.user,
        )
        return self._tree.changed(created, command.vhost)

    def delete(self, command: DeleteExchange) -> bool:
        """Deletes an exchange with its bindings. Raises Refused."""
        vhost = self._tree.vhost(command.vhost)
        _refuse_topic(vhost, command.name, "deleted with the topic")
        removed = vhost.topology.delete_exchange(command.name, if_unused=command.if_unused)
        return self._tree.changed(bool(removed), command.vhost)

    def bind(self, command: Bind) -> bool:
        """Binds a queue or exchange. Raises Refused."""
        vhost = self._tree.vhost(command.vhost)
        _refuse_topic(vhost, command.source, "not bound: groups consume the topic")
        made = vhost.topology.bind(
            command.source,
            _destination(command),
            command.routing_key,
            arguments_of(command),
            owner=command.owner,
        )
        return self._tree.changed(made, command.vhost)

    def unbind(self, command: Unbind) -> bool:
        """Removes a binding. Raises Refused."""
        removed = self._tree.vhost(command.vhost).topology.unbind(
            command.source,
            _destination(command),
            command.routing_key,
            arguments_of(command),
            owner=command.owner,
        )
        return self._tree.changed(bool(removed), command.vhost)


def arguments_of(
    command: BeginMigration | DeclareQueue | DeclareExchange | Bind | Unbind,
) -> Table:
    """Returns the arguments of a command. Raises UnknownCommand."""
    try:
        return decode_body(command.arguments)
    except PeerError as error:
        raise UnknownCommand(f"arguments that this release cannot decode: {error.text}") from error


def _refuse_topic(vhost: Vhost, exchange: str, rule: str) -> None:
    """Raises AccessRefused for the exchange of a topic."""
    if exchange in vhost.topics:
        raise AccessRefused(
            f"exchange '{exchange}' in vhost '{vhost.name}' belongs to a topic: it is {rule}"
        )


def _destination(command: Bind | Unbind) -> Destination:
    try:
        return Destination(DestinationKind(command.kind), command.destination)
    except ValueError:
        raise UnknownCommand(f"a binding to a {command.kind}") from None
