"""Interfaces between the parts of a broker.

Acting, delayed messages, transactions, pop and replication are parts of `service.Broker`: they
register handlers for their own requests, and change drafts before they are stored (`before_put`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from convoymq.rocketmq.remoting.codes import Answer
from convoymq.rocketmq.remoting.values import MASTER_ID
from convoymq.rocketmq.store.types import Draft, Message, Placed, PutStatus

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker

STORED = {
    PutStatus.PUT_OK: Answer.SUCCESS,
    PutStatus.FLUSH_DISK_TIMEOUT: Answer.FLUSH_DISK_TIMEOUT,
    PutStatus.FLUSH_SLAVE_TIMEOUT: Answer.FLUSH_SLAVE_TIMEOUT,
    PutStatus.SLAVE_NOT_AVAILABLE: Answer.SLAVE_NOT_AVAILABLE,
}
"""Statuses of stored messages, and their answers: the code says how safely."""


@dataclass(slots=True)
class Role:
    """Role of this broker in its group.

    Args:
        id: 0 is a master's; slaves have larger ones.
        is_acting: a slave with the smallest id of its group, whose master is away.
        is_isolated: not yet in its group: it answers members of the group only.
    """

    id: int
    name: str
    cluster: str
    address: str = ""
    is_acting: bool = False
    is_isolated: bool = False
    min_id: int = MASTER_ID
    min_address: str = ""

    @property
    def is_master(self) -> bool:
        """Returns whether clients may write."""
        return self.id == MASTER_ID and not self.is_isolated

    @property
    def runs_special_services(self) -> bool:
        """Returns whether delayed messages, transactions and pop are looked after here."""
        return self.is_master or self.is_acting


BeforePut: TypeAlias = Callable[[Draft], Draft]
"""Changes a draft that a client sent, or raises Refusal. It is called for messages only that have
one of the properties DELAY, TIMER_* and TRAN_MSG."""


class Escape(Protocol):
    """Target of the messages of special services: this broker, or another master."""

    async def put(self, draft: Draft) -> Placed:
        """Stores a message in any queue of its topic."""

    async def home(self, topic: str) -> int | None:
        """Returns the number of a broker that takes records of pops (`escape.home_number`), None:
        there is none."""

    async def put_at(self, draft: Draft, home: int) -> Placed:
        """Stores a record of a pop at the broker of a number."""

    async def get(self, topic: str, queue_id: int, offset: int, broker: str) -> Message | None:
        """Returns one message of a broker."""


class LocalEscape:
    """Puts into the own store, as long as this broker is a master."""

    def __init__(self, parts: Broker) -> None:
        self._parts = parts

    async def put(self, draft: Draft) -> Placed:
        """Stores a message; SERVICE_NOT_AVAILABLE where this broker is no master."""
        if not self._parts.role.is_master:
            return Placed(PutStatus.SERVICE_NOT_AVAILABLE)
        (placed,) = await self._parts.put([draft])
        return placed

    async def home(self, topic: str) -> int | None:
        """Returns None: nothing leaves."""
        return None

    async def put_at(self, draft: Draft, home: int) -> Placed:
        """Stores nothing."""
        return Placed(PutStatus.SERVICE_NOT_AVAILABLE)

    async def get(self, topic: str, queue_id: int, offset: int, broker: str) -> Message | None:
        """Returns one message of the own store."""
        found = self._parts.store.get(topic, queue_id, offset, 1, 1 << 30, None)
        return Message(found.records[0]) if found.records else None
