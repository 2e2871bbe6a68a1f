"""Client connections of a node, and counters of what passes through its edges."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, KeysView
from typing import Protocol

from convoymq.kernels.message_sizes import MessageSizes
from convoymq.metadata.machine import User
from convoymq.queues.interface import Row


class ConnectionHandle(Protocol):
    """Interface of an edge's connection for lists and operators."""

    id: int
    name: str
    vhost: str

    @property
    def user(self) -> User:
        """Returns the user who has logged in."""

    def info(self) -> Row:
        """Returns one row of the list of connections."""

    def traffic(self) -> int:
        """Returns the bytes that came and went."""

    def channel_infos(self) -> list[Row]:
        """Returns the rows of the list of channels."""

    def session_infos(self) -> list[Row] | None:
        """Returns the sessions of AMQP 1.0 with their links; None: it speaks another protocol."""

    def consumer_infos(self) -> list[Row]:
        """Returns the rows of the list of consumers."""

    def set_prefetch(self, queue: str, tag: str, prefetch: int) -> int:
        """Changes the prefetch of the running consumers of a queue with that tag, and returns how
        many there are."""

    def sessions(self) -> list[int]:
        """Returns the sessions of its channels."""

    def close(self, reason: str) -> None:
        """Closes the connection; the client is told the reason."""

    def expire(self) -> None:
        """Closes the connection, whose user's credentials have expired."""

    def check_access(self) -> None:
        """Asks for every permission of the user again."""


class ConnectionRegistry:
    """The open connections of one node."""

    def __init__(self) -> None:
        self._open: dict[int, ConnectionHandle] = {}
        self._closing = ""

    def add(self, connection: ConnectionHandle) -> None:
        """A connection has opened its virtual host."""
        self._open[connection.id] = connection
        if self._closing:
            # Its client was logging in when the others were closed.
            asyncio.get_running_loop().call_soon(connection.close, self._closing)

    def close_all(self, reason: str) -> None:
        """Closes all connections, and those that open before `admit`."""
        self._closing = reason
        for connection in self.all():
            connection.close(reason)

    def admit(self) -> None:
        """Lets connections stay open again."""
        self._closing = ""

    def remove(self, connection: ConnectionHandle) -> None:
        """A connection is gone."""
        self._open.pop(connection.id, None)

    def all(self) -> list[ConnectionHandle]:
        """Returns all of them."""
        return list(self._open.values())

    def ids(self) -> KeysView[int]:
        """Returns their ids."""
        return self._open.keys()

    def get(self, owner: int) -> ConnectionHandle | None:
        """Returns the connection with that id."""
        return self._open.get(owner)

    def __len__(self) -> int:
        return len(self._open)


COUNTED = (
    "acknowledged", "confirmed", "delivered", "delivered_no_ack", "dropped_unroutable", "get",
    "get_empty", "get_no_ack", "published", "published_confirm", "redelivered",
    "returned_unroutable", "routed",
)  # fmt: skip
"""Names of the counts of messages."""


class MessageCounters:
    """Messages of one protocol's clients since the node started. `fold` comes before a reading."""

    __slots__ = (*COUNTED, "counting", "sizes")

    acknowledged: int
    confirmed: int
    delivered: int
    delivered_no_ack: int
    dropped_unroutable: int
    get: int
    get_empty: int
    get_no_ack: int
    published: int
    published_confirm: int
    """By publishers that wait for confirms."""
    redelivered: int
    returned_unroutable: int
    routed: int
    """A message counts once for each queue that it went to."""

    def __init__(self) -> None:
        for name in COUNTED:
            setattr(self, name, 0)
        self.sizes = MessageSizes()
        """Bodies of published messages."""
        self.counting: set[Callable[[], None]] = set()
        """Each adds what its channel has counted by itself since the last time."""

    def fold(self) -> None:
        """Adds what open channels have counted by themselves."""
        for add in self.counting:
            add()


class Counters:
    """Totals since the node started; the edges add to them, batch by batch."""

    __slots__ = (
        "auth_attempts", "auth_failed", "auth_succeeded", "channels_closed", "channels_opened",
        "connections_closed", "connections_opened", "dropped_replies", "messages", "queues_created",
        "queues_declared", "queues_deleted", "queues_migrated",
    )  # fmt: skip

    auth_attempts: int
    auth_failed: int
    auth_succeeded: int
    channels_closed: int
    channels_opened: int
    connections_closed: int
    connections_opened: int
    dropped_replies: int
    queues_created: int
    queues_declared: int
    queues_deleted: int
    queues_migrated: int

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)
        self.messages: dict[str, MessageCounters] = {}
        """By protocol."""

    def of(self, protocol: str) -> MessageCounters:
        """Returns what the clients of a protocol count."""
        return self.messages.setdefault(protocol, MessageCounters())

    def as_dict(self) -> dict[str, int]:
        """Returns all totals by name; those of messages over all protocols."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "messages"}
        each = self.messages.values()
        for counted in each:
            counted.fold()
        return own | {name: sum(getattr(counted, name) for counted in each) for name in COUNTED}
