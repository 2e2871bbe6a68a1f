"""The exchanges, queues and bindings of one virtual host, and where a message goes.

A pure table: an operation changes it or raises, without reading a clock, a random number or
anything outside. Equal operations in equal order give equal tables, so it can be the state of a
replicated machine. `version` rises by one with each operation that changed something. The policies
of the virtual host lie beside the tables: routing asks them for alternate exchanges.

Operations record. They refuse by rules about the tables only: what exists, is equal, belongs to
somebody, or has no end. What may be declared at all is asked before, by `routing.declarations`, so
that a release which accepts more, or less, makes the same tables of the same operations (ADR 0015).

Invariants:
    - both ends of every binding exist; nothing is bound to or from the default exchange
    - the predeclared exchanges exist
    - an auto-delete exchange that had a binding as source and has none any more is gone
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypedDict

from convoymq.messages.amqp091 import NO_PROPERTIES, Properties
from convoymq.model.errors import BrokerError, StorageFault, Subject
from convoymq.model.refusals import (
    default_exchange_untouchable,
    exchange_subject,
    exclusive_queue,
    in_use,
    inequivalent,
    internal_exchange_publish,
    missing,
    queue_subject,
    system_exchange_deletion,
)
from convoymq.model.tables import EMPTY, Table, decode_body
from convoymq.routing.bindings import BindingTable
from convoymq.routing.choosing import (
    NO_NODE,
    Message,
    PublisherNode,
)
from convoymq.routing.policies import Policies
from convoymq.routing.types import (
    DEFAULT_EXCHANGE,
    RESERVED_PREFIX,
    Binding,
    Destination,
    DestinationKind,
    Exchange,
    ExchangeType,
    Queue,
    QueueType,
    Removed,
)

FORMAT = 1

#: Part of version 1 of the metadata machine: another list needs another version.
PREDECLARED: tuple[Exchange, ...] = (
    Exchange(name=DEFAULT_EXCHANGE, type=ExchangeType.DIRECT, durable=True),
    Exchange(name="amq.direct", type=ExchangeType.DIRECT, durable=True),
    Exchange(name="amq.fanout", type=ExchangeType.FANOUT, durable=True),
    Exchange(name="amq.headers", type=ExchangeType.HEADERS, durable=True),
    Exchange(name="amq.match", type=ExchangeType.HEADERS, durable=True),
    Exchange(name="amq.rabbitmq.trace", type=ExchangeType.TOPIC, durable=True, internal=True),
    Exchange(name="amq.topic", type=ExchangeType.TOPIC, durable=True),
)


class TopologyState(TypedDict):
    """A topology as plain values; arguments as their encoded bytes."""

    format: int
    vhost: str
    version: int
    exchanges: list[tuple[str, str, bool, bool, bool, bytes]]
    """(name, type, durable, auto-delete, internal, arguments)"""
    queues: list[tuple[str, str, bool, str | None, bool, bytes, int]]
    """(name, type, durable, exclusive owner, auto-delete, arguments, declared version)"""
    bindings: list[tuple[str, str, str, str, bytes]]
    """(source, kind of destination, destination, routing key, arguments)"""


class Targets(NamedTuple):
    """Names of what gets a message, sorted, each once."""

    queues: list[str]
    topics: list[str]


class Topology:
    """The tables of one virtual host."""

    __slots__ = ("_bindings", "_exchanges", "_queues", "policies", "version", "vhost")

    def __init__(self, vhost: str, exchanges: Iterable[Exchange] = PREDECLARED) -> None:
        """Starts with the predeclared exchanges."""
        self.vhost = vhost
        self.version = 0
        self.policies = Policies()
        """Kept beside the tables, by who owns them: `version` and plain values leave them out."""
        self._exchanges: dict[str, Exchange] = {}
        self._queues: dict[str, Queue] = {}
        self._bindings = BindingTable(vhost)
        for exchange in exchanges:
            self._add_exchange(exchange)

    # --- exchanges ---------------------------------------------------------------------------

    def declare_exchange(
        self,
        name: str,
        exchange_type: ExchangeType,
        *,
        durable: bool = False,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Table = EMPTY,
        user: str = "",
    ) -> bool:
        """Records an exchange; False when one with the same properties and arguments exists.

        Raises:
            AccessRefused: the default exchange.
            PreconditionFailed: a different one exists.
        """
        _refuse_default(name)
        current = self._exchanges.get(name)
        if current is not None:
            subject = exchange_subject(self.vhost, name)
            check_same(subject, "type", f"'{current.type.value}'", f"'{exchange_type.value}'")
            check_flag(subject, "durable", current.durable, durable)
            check_flag(subject, "auto_delete", current.auto_delete, auto_delete)
            check_flag(subject, "internal", current.internal, internal)
            _check_arguments(subject, current.arguments, arguments)
            return False
        self._add_exchange(
            Exchange(
                name=name,
                type=exchange_type,
                durable=durable,
                auto_delete=auto_delete,
                internal=internal,
                arguments=arguments,
                user=user,
            )
        )
        self.version += 1
        return True

    def find_exchange(self, name: str) -> Exchange | None:
        """Returns an exchange, or None."""
        return self._exchanges.get(name)

    def exchange(self, name: str) -> Exchange:
        """Returns an exchange.

        Raises:
            NotFound: there is none.
        """
        found = self._exchanges.get(name)
        if found is None:
            raise missing(exchange_subject(self.vhost, name))
        return found

    def exchange_for_publish(self, name: str) -> Exchange:
        """Returns an exchange that a client may publish to.

        Raises:
            NotFound: there is none.
            AccessRefused: it is internal.
        """
        found = self.exchange(name)
        if found.internal:
            raise internal_exchange_publish(exchange_subject(self.vhost, name))
        return found

    def passive_exchange(self, name: str) -> Exchange:
        """Returns an exchange for a passive declare, which the default exchange refuses.

        Raises:
            NotFound: there is none.
            AccessRefused: the default exchange.
        """
        _refuse_default(name)
        return self.exchange(name)

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> Removed:
        """Deletes an exchange and its bindings; one that does not exist is fine.

        Raises:
            AccessRefused: a predeclared exchange.
            PreconditionFailed: `if_unused` and it has bindings as source.
        """
        _refuse_default(name)
        subject = exchange_subject(self.vhost, name)
        if name.startswith(RESERVED_PREFIX):
            raise system_exchange_deletion(subject)
        if name not in self._exchanges:
            return Removed()
        if if_unused and self._bindings.leads_anywhere(name):
            raise in_use(subject)
        return self._remove(exchanges=(name,))

    def exchanges(self) -> Iterator[Exchange]:
        """Yields all exchanges, by name."""
        return (self._exchanges[name] for name in sorted(self._exchanges))

    # --- queues ------------------------------------------------------------------------------

    def declare_queue(
        self,
        name: str,
        queue_type: QueueType,
        *,
        durable: bool = False,
        exclusive_owner: str | None = None,
        auto_delete: bool = False,
        arguments: Table = EMPTY,
        user: str = "",
    ) -> bool:
        """Records a queue; False when one with the same properties and arguments exists.

        Args:
            exclusive_owner: the declaring connection when the queue is exclusive.
        Raises:
            ResourceLocked: it belongs to another connection, or is exclusive and shall not be.
            PreconditionFailed: a different one exists.
        """
        current = self._queues.get(name)
        if current is not None:
            subject = queue_subject(self.vhost, name)
            if current.exclusive_owner != exclusive_owner:
                raise exclusive_queue(subject)
            check_flag(subject, "durable", current.durable, durable)
            check_flag(subject, "auto_delete", current.auto_delete, auto_delete)
            check_same(subject, "type", f"'{current.type.value}'", f"'{queue_type.value}'")
            _check_arguments(subject, current.arguments, arguments)
            return False
        self.version += 1
        self._queues[name] = Queue(
            name=name,
            type=queue_type,
            durable=durable,
            exclusive_owner=exclusive_owner,
            auto_delete=auto_delete,
            arguments=arguments,
            declared_version=self.version,
            user=user,
        )
        return True

    def queue(self, name: str, owner: str | None = None) -> Queue:
        """Returns a queue that the connection `owner` may use.

        Raises:
            NotFound: there is none.
            ResourceLocked: it belongs to another connection.
        """
        found = self._queues.get(name)
        if found is None:
            raise missing(queue_subject(self.vhost, name))
        if found.exclusive_owner is not None and found.exclusive_owner != owner:
            raise exclusive_queue(queue_subject(self.vhost, name))
        return found

    def find_queue(self, name: str) -> Queue | None:
        """Returns a queue whoever owns it, or None."""
        return self._queues.get(name)

    def delete_queue(self, name: str) -> Removed:
        """Deletes a queue and its bindings; one that does not exist is fine.

        Who may delete it, and whether it is unused or empty, is checked before by `queue` and by
        the queue itself.
        """
        return self._remove(queues=(name,)) if name in self._queues else Removed()

    def replace_queue(self, queue: Queue) -> None:
        """Gives a queue another type and other arguments; its bindings stay."""
        assert queue.name in self._queues
        self.version += 1
        self._queues[queue.name] = replace(queue, declared_version=self.version)

    def queues(self) -> Iterator[Queue]:
        """Yields all queues, by name."""
        return (self._queues[name] for name in sorted(self._queues))

    # --- bindings ----------------------------------------------------------------------------

    def bind(
        self,
        source: str,
        destination: Destination,
        routing_key: str = "",
        arguments: Table = EMPTY,
        *,
        owner: str | None = None,
    ) -> bool:
        """Records a binding of a queue or an exchange to an exchange; False when it exists already.

        Raises:
            AccessRefused: one end is the default exchange.
            NotFound: one end does not exist.
            ResourceLocked: the queue belongs to a connection other than `owner`.
        """
        self.check_ends(source, destination, owner)
        binding = Binding(source, destination, routing_key, arguments.canonical())
        if binding in self._bindings:
            return False
        self._bindings.add(binding)
        self.version += 1
        return True

    def unbind(
        self,
        source: str,
        destination: Destination,
        routing_key: str = "",
        arguments: Table = EMPTY,
        *,
        owner: str | None = None,
    ) -> Removed:
        """Removes a binding; one that does not exist, or whose ends don't, is fine.

        Raises:
            AccessRefused: one end is the default exchange.
            ResourceLocked: the queue belongs to a connection other than `owner`.
        """
        _refuse_default_ends(source, destination)
        binding = Binding(source, destination, routing_key, arguments.canonical())
        if destination.kind is DestinationKind.QUEUE and destination.name in self._queues:
            self.queue(destination.name, owner)
        return self._remove(bindings=(binding,)) if binding in self._bindings else Removed()

    def bindings(
        self, *, source: str | None = None, destination: Destination | None = None
    ) -> list[Binding]:
        """Returns all explicit bindings, or those of one end or between two ends, in a fixed order.

        The implicit ones, from the default exchange to each queue, are not among them.
        """
        return self._bindings.select(source=source, destination=destination)

    # --- routing -----------------------------------------------------------------------------

    def route(
        self,
        exchange: str,
        routing_key: str,
        headers: Table = EMPTY,
        extra_keys: Iterable[str] = (),
        properties: Properties = NO_PROPERTIES,
        node: PublisherNode = NO_NODE,
    ) -> list[str]:
        """Returns the names of the queues that get a message, sorted, each once. Raises as
        `targets`."""
        return self.targets(exchange, routing_key, headers, extra_keys, properties, node).queues

    def targets(
        self,
        exchange: str,
        routing_key: str,
        headers: Table = EMPTY,
        extra_keys: Iterable[str] = (),
        properties: Properties = NO_PROPERTIES,
        node: PublisherNode = NO_NODE,
    ) -> Targets:
        """Returns the queues and ordered topics that get a message.

        Exchanges behind exchanges are visited once, so cycles are harmless; an exchange that
        yields nothing hands over to its alternate exchange, if that exists.

        Args:
            extra_keys: further routing keys of the message (CC and BCC), all of them tried.
            properties: of the message, for exchanges that hash one.
            node: where the message is published, for exchanges that choose by chance or place.
        Raises:
            NotFound: `exchange` does not exist.
        """
        self.exchange(exchange)
        keys = tuple(dict.fromkeys((routing_key, *extra_keys)))
        message = Message(keys, headers, properties, node)
        queues: set[str] = set()
        topics: set[str] = set()
        seen = {exchange}
        waiting = [exchange]
        while waiting:
            name = waiting.pop()
            if self._exchanges[name].type is ExchangeType.ORDERED:
                topics.add(name)
                continue
            found = self._destinations(name, message)
            if not found:
                found = self._alternate_of(name)
            for kind, target in found:
                if kind is DestinationKind.QUEUE:
                    queues.add(target)
                elif target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return Targets(sorted(queues), sorted(topics))

    def varies_by_message(self, exchange: str) -> bool:
        """Returns whether routes from here may differ for equal routing keys, because an exchange
        is reachable that looks at headers or properties, or chooses by chance or place. CC and BCC
        are not considered: they are routing keys.

        Raises:
            NotFound: `exchange` does not exist.
        """
        self.exchange(exchange)
        seen = {exchange}
        waiting = [exchange]
        while waiting:
            name = waiting.pop()
            if self._bindings.varies(name):
                return True
            for _, target in (*self._bindings.onward(name), *self._alternate_of(name)):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return False

    # --- as plain values ---------------------------------------------------------------------

    def to_builtins(self) -> TopologyState:
        """Returns everything as dicts, lists, strings, integers and bytes, in a fixed order."""
        return {
            "format": FORMAT,
            "vhost": self.vhost,
            "version": self.version,
            "exchanges": [
                (e.name, e.type.value, e.durable, e.auto_delete, e.internal, e.arguments.encoded)
                for e in self.exchanges()
            ],
            "queues": [
                (
                    q.name,
                    q.type.value,
                    q.durable,
                    q.exclusive_owner,
                    q.auto_delete,
                    q.arguments.encoded,
                    q.declared_version,
                )
                for q in self.queues()
            ],
            "bindings": [
                (
                    b.source,
                    b.destination.kind.value,
                    b.destination.name,
                    b.routing_key,
                    b.arguments.encoded,
                )
                for b in self.bindings()
            ],
        }

    @classmethod
    def from_builtins(cls, state: TopologyState) -> Topology:
        """Returns the topology that `to_builtins` described.

        Raises:
            StorageFault: `state` is of another format or does not fit together.
        """
        if state.get("format") != FORMAT:
            raise StorageFault(f"topology of format {state.get('format')!r}, known is {FORMAT}")
        try:
            # What is there is what the state says, whatever this release would predeclare.
            topology = cls(state["vhost"], ())
            topology._fill(state)
        except (KeyError, TypeError, ValueError, BrokerError) as error:
            raise StorageFault(f"topology does not fit together: {error!r}") from error
        return topology

    def set_users(self, exchanges: Mapping[str, str], queues: Mapping[str, str]) -> None:
        """Records which users declared exchanges and queues: `to_builtins` leaves them out."""
        for name, user in exchanges.items():
            self._exchanges[name] = replace(self._exchanges[name], user=user)
        for name, user in queues.items():
            self._queues[name] = replace(self._queues[name], user=user)

    def check_invariants(self) -> None:
        """Assert what the module text promises. Cost: O(everything); for tests."""
        assert all(exchange.name in self._exchanges for exchange in PREDECLARED)
        self._bindings.check_invariants()
        for binding in self._bindings.select():
            assert binding.source != DEFAULT_EXCHANGE
            assert binding.arguments == binding.arguments.canonical()
            assert self._has_ends(binding)

    # --- inside ------------------------------------------------------------------------------

    def check_ends(self, source: str, destination: Destination, owner: str | None) -> Exchange:
        """Returns the source of a binding that `owner` may make. Raises as `bind`."""
        _refuse_default_ends(source, destination)
        exchange = self.exchange(source)
        if destination.kind is DestinationKind.QUEUE:
            self.queue(destination.name, owner)
        else:
            self.exchange(destination.name)
        return exchange

    def _destinations(self, exchange: str, message: Message) -> tuple[Destination, ...]:
        if exchange == DEFAULT_EXCHANGE:
            return tuple(
                Destination(DestinationKind.QUEUE, key)
                for key in message.keys
                if key in self._queues
            )
        return tuple(self._bindings.match(exchange, message))

    def _alternate_of(self, exchange: str) -> tuple[Destination, ...]:
        alternate = self.policies.alternate_of(self._exchanges[exchange])
        if alternate is None or alternate not in self._exchanges:
            return ()
        return (Destination(DestinationKind.EXCHANGE, alternate),)

    def _has_ends(self, binding: Binding) -> bool:
        kind, name = binding.destination
        ends = self._queues if kind is DestinationKind.QUEUE else self._exchanges
        return binding.source in self._exchanges and name in ends

    def _add_exchange(self, exchange: Exchange) -> None:
        self._exchanges[exchange.name] = exchange
        self._bindings.open_source(exchange)

    def _fill(self, state: TopologyState) -> None:
        for name, kind, durable, auto_delete, internal, arguments in state["exchanges"]:
            self._add_exchange(
                Exchange(
                    name=name,
                    type=ExchangeType(kind),
                    durable=durable,
                    auto_delete=auto_delete,
                    internal=internal,
                    arguments=decode_body(arguments),
                )
            )
        for name, kind, durable, owner, auto_delete, arguments, declared_version in state["queues"]:
            self._queues[name] = Queue(
                name=name,
                type=QueueType(kind),
                durable=durable,
                exclusive_owner=owner,
                auto_delete=auto_delete,
                arguments=decode_body(arguments),
                declared_version=declared_version,
            )
        for source, kind, name, routing_key, arguments in state["bindings"]:
            end = Destination(DestinationKind(kind), name)
            binding = Binding(source, end, routing_key, decode_body(arguments))
            if binding in self._bindings or not self._has_ends(binding):
                raise StorageFault(f"{binding} is there twice or lacks an end")
            self._bindings.add(binding)
        self.version = state["version"]

    def _remove(
        self,
        *,
        queues: tuple[str, ...] = (),
        exchanges: tuple[str, ...] = (),
        bindings: tuple[Binding, ...] = (),
    ) -> Removed:
        """Removes these, the bindings at them, and every auto-delete exchange that runs dry."""
        gone_exchanges: list[Exchange] = []
        gone_bindings: list[Binding] = []
        waiting = deque(exchanges)

        def drop(binding: Binding) -> None:
            self._bindings.remove(binding)
            gone_bindings.append(binding)
            dry = not self._bindings.leads_anywhere(binding.source)
            if dry and self._exchanges[binding.source].auto_delete:
                waiting.append(binding.source)

        for binding in bindings:
            drop(binding)
        for name in queues:
            for binding in self.bindings(destination=Destination(DestinationKind.QUEUE, name)):
                drop(binding)
        while waiting:
            name = waiting.popleft()
            if name not in self._exchanges:
                continue
            for binding in self.bindings(source=name):
                drop(binding)
            end = Destination(DestinationKind.EXCHANGE, name)
            for binding in self.bindings(destination=end):
                drop(binding)
            gone_exchanges.append(self._exchanges.pop(name))
            self.policies.forget(name)
            self._bindings.close_source(name)
        gone_queues = tuple(self._queues.pop(name) for name in queues)
        removed = Removed(gone_queues, tuple(gone_exchanges), tuple(gone_bindings))
        if removed:
            self.version += 1
        return removed


def _refuse_default(name: str) -> None:
    if name == DEFAULT_EXCHANGE:
        raise default_exchange_untouchable()


def _refuse_default_ends(source: str, destination: Destination) -> None:
    _refuse_default(source)
    if destination.kind is DestinationKind.EXCHANGE:
        _refuse_default(destination.name)


def check_same(subject: Subject, key: str, current: str, received: str) -> None:
    """Refuses a redeclare that differs in this property. Raises PreconditionFailed."""
    if current != received:
        raise inequivalent(key, subject, received, current)


def check_flag(subject: Subject, key: str, current: bool, received: bool) -> None:
    """Refuses a redeclare that differs in this flag. Raises PreconditionFailed."""
    words = ("'false'", "'true'")
    check_same(subject, key, words[current], words[received])


def _check_arguments(subject: Subject, current: Table, received: Table) -> None:
    # A fixed rule: the same keys with the same types and values, in any order. Who declares
    # compares by what the arguments mean (`declarations`), and comes here for what is new only.
    if current.canonical() != received.canonical():
        raise inequivalent("arguments", subject, str(received), str(current))
