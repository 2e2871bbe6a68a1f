"""Interfaces between the parts of a broker.

`service.Broker` is the only implementation of `BrokerParts`. Acting, delayed messages,
transactions, pop and replication are handed these parts, register handlers for their own requests,
and change drafts before they are stored (`before_put`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from convoymq.model.config.keys import Section
from convoymq.rocketmq.remoting.codes import Answer
from convoymq.rocketmq.remoting.connection import Handler
from convoymq.rocketmq.remoting.values import MASTER_ID
from convoymq.rocketmq.store.types import Draft, Message, Placed, PutStatus

if TYPE_CHECKING:
    from convoymq.model.tasks import Tasks
    from convoymq.rocketmq.acting.locks import LockTable
    from convoymq.rocketmq.broker.clients import Clients
    from convoymq.rocketmq.broker.config_files import ConfigFile
    from convoymq.rocketmq.broker.groups import Groups
    from convoymq.rocketmq.broker.offsets import Offsets
    from convoymq.rocketmq.broker.pull import Puller
    from convoymq.rocketmq.broker.registering import Registrar
    from convoymq.rocketmq.broker.settings import BrokerSettings
    from convoymq.rocketmq.broker.stats import Stats
    from convoymq.rocketmq.broker.topics import Topics
    from convoymq.rocketmq.remoting.client import RemotingClient
    from convoymq.rocketmq.store.store import MessageStore

S = TypeVar("S", bound=Section)

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

    async def put_to_specific_queue(self, draft: Draft) -> Placed:
        """Stores a message in a queue that is always the same one for this broker and topic."""

    async def get(self, topic: str, queue_id: int, offset: int, broker: str) -> Message | None:
        """Returns one message of a broker."""


class SlaveLink(Protocol):
    """A slave that is connected. `slave`: its id, which RocketMQ's do not say."""

    @property
    def host(self) -> str:
        """Returns its address, without a port."""

    @property
    def slave(self) -> int | None:
        """Returns its broker id; None for one of RocketMQ's, which does not say."""

    @property
    def silent_ms(self) -> int:
        """Returns how long ago it was heard."""

    @property
    def acked(self) -> int:
        """Returns up to where it has the log."""

    @property
    def in_sync(self) -> bool:
        """Returns whether it counts for `inSyncReplicas`."""


class Replication(Protocol):
    """The other replicas of this broker, as sends and administration see them.

    Attributes:
        failures: writes of its file that failed.
    """

    failures: int

    @property
    def state(self) -> str:
        """Returns READY, TRANSFER, SUSPEND or SHUTDOWN for a slave; a master is in TRANSFER."""

    async def start(self, port: int) -> int:
        """Listens for slaves; returns the port."""

    async def stop(self) -> None:
        """Ends."""

    def refusal(self) -> PutStatus | None:
        """Returns why nothing may be appended now."""

    def on_appended(self) -> None:
        """Sends slaves what was appended."""

    def when_copied(self, offset: int, timeout_s: float, call: Callable[[PutStatus], None]) -> None:
        """Calls once: when enough replicas have the log up to an offset, or the time is over."""

    def set_master(self, ha_address: str | None, address: str | None = None) -> None:
        """Names the master that this slave copies; None: nobody.

        Args:
            address: where the master answers requests. Without one nothing is compared.
        """

    def links(self) -> Sequence[SlaveLink]:
        """Returns the slaves that are connected."""

    def begin(self) -> bool:
        """Takes writes, now or as soon as enough slaves were compared. Returns whether now."""

    def set_alive(self, count: int | None) -> None:
        """Says how many replicas name servers list, this one among them."""

    async def compare_with(self, address: str) -> bool:
        """Compares this master's log with a slave's, and fetches what is missing here. Returns
        False when that has to be tried again."""

    def master_silent_ms(self) -> int | None:
        """Returns how long ago a slave heard of its master; None: it transfers nothing."""


class SpecialService(Protocol):
    """Delayed messages, transactions, pop: each runs on masters and acting slaves only."""

    @property
    def name(self) -> str:
        """Returns the name in logs."""

    def start(self) -> None:
        """Begins, from what files and the log hold."""

    async def stop(self) -> None:
        """Ends, and persists."""

    def persist(self) -> None:
        """Writes its files."""


class BrokerParts(Protocol):
    """A broker, for its parts."""

    settings: BrokerSettings
    role: Role
    store: MessageStore
    topics: Topics
    groups: Groups
    offsets: Offsets
    clients: Clients
    locks: LockTable
    stats: Stats
    registrar: Registrar
    puller: Puller
    escape: Escape
    replication: Replication
    remoting: RemotingClient
    tasks: Tasks
    before_put: list[BeforePut]
    specials: list[SpecialService]

    @property
    def message_bytes_max(self) -> int:
        """Returns the limit of a message's body."""

    def section(self, kind: type[S]) -> S:
        """Returns a section of the configuration."""

    def now_ms(self) -> int:
        """Returns milliseconds since 1970."""

    def steady_ms(self) -> int:
        """Returns milliseconds of a clock that never jumps, for time-outs."""

    def register(self, code: int, handler: Handler) -> Handler | None:
        """Has requests with a code answered by a handler from now on; returns the one before."""

    def file(self, name: str) -> ConfigFile:
        """Returns a file of the directory `config`."""

    def prepared(self, draft: Draft) -> Draft:
        """Returns a draft as special services change it. Raises Refusal."""

    def put_now(self, drafts: Sequence[Draft]) -> list[Placed]:
        """Appends prepared messages, which are stored soon."""

    def when_confirmed(self, offset: int, call: Callable[[PutStatus], None]) -> None:
        """Calls when the log is stored and copied up to an offset as the settings demand."""

    async def put(self, drafts: Sequence[Draft]) -> list[Placed]:
        """Prepares and appends messages, and waits until they are confirmed. Raises Refusal."""

    def wake_pulls(self) -> None:
        """Answers all pulls that wait."""


class LocalEscape:
    """Puts into the own store, as long as this broker is a master."""

    def __init__(self, parts: BrokerParts) -> None:
        self._parts = parts

    async def put(self, draft: Draft) -> Placed:
        """Stores a message; SERVICE_NOT_AVAILABLE where this broker is no master."""
        if not self._parts.role.is_master:
            return Placed(PutStatus.SERVICE_NOT_AVAILABLE)
        (placed,) = await self._parts.put([draft])
        return placed

    async def put_to_specific_queue(self, draft: Draft) -> Placed:
        """Stores a message; SERVICE_NOT_AVAILABLE where this broker is no master."""
        return await self.put(draft)

    async def get(self, topic: str, queue_id: int, offset: int, broker: str) -> Message | None:
        """Returns one message of the own store."""
        found = self._parts.store.get(topic, queue_id, offset, 1, 1 << 30, None)
        return Message(found.records[0]) if found.records else None
