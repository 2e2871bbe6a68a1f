"""The referee of what a group does while its master is away.

| rule | looked at |
|---|---|
| a delayed message that was acknowledged is delivered, once | at the end |
| a half message is delivered once if its producer committed it, else never | at the end |
| special services run on the master or on slaves | at every turn |
| an acting slave takes the ends of transactions | at every end |
| a master takes the larger offsets of consumers, and all topics, over | when it gets online |
| offsets that a replica took and persisted are those of the master at last | at the end |
| a slave is online within a second of its link | when it gets online |
| what falls due in an acting slave's log leaves within a second | after a time without the master |
| half messages leave when targets are back | after a time without the master |
| targets take nothing of a replica that was superseded, which stops sending | at every attempt |
| a name server answers while it notifies | at every request |
| a lock has one holder, an epoch one client; epochs grow, nobody else pulls | at every lock |

Twice by design (ADR 0159), and counted: what a master delivered before it escaped from an acting
slave that did not have that; and what
two replicas delivered that ran special services at once, since each was listed by another name
server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from convoymq.rocketmq.remoting.codes import Answer
from convoymq.rocketmq.store.types import GetStatus, Message
from convoymq.sim.broker_group.acting_node import ActingNode
from convoymq.sim.delivery_model import InvariantBroken

DELIVERED_TO = ("later", "deals")
QUEUES = 2
LATE_US = 1_000_000
NEVER_US = 1 << 60


class Fate(Enum):
    """Wanted end of a message."""

    DELIVERED = "delivered"
    NEVER = "rolled back"


@dataclass(slots=True)
class Sent:
    """A message for special services."""

    fate: Fate
    is_timed: bool
    due_us: int
    physical: int = -1
    is_ended: bool = False
    """A replica took the end of the transaction."""
    is_acknowledged: bool = False


class ActingReferee:
    """See the module text."""

    def __init__(self) -> None:
        self.sent: dict[int, Sent] = {}
        self.escapes: dict[int, tuple[int, int]] = {}
        """Number -> time, and end of the log of the slave that sent it."""
        self.splits = 0
        """Turns in which two replicas ran special services, by disagreeing name servers."""
        self.doubled = 0
        self.clocks_ms = 0
        """By so much clocks may differ."""
        self.holders: dict[object, tuple[str, int]] = {}
        """Queue -> client that has its lock, restarts until then."""
        self.highest: dict[object, int] = {}
        """Queue -> highest epoch that a client had."""
        self._lost = 0
        """Disks that were lost: with each the epochs that its replica voted for."""
        self.epochs: dict[tuple[object, int], str] = {}
        self.persisted: dict[int, dict[int, int]] = {}
        """Replica -> queue -> largest offset of a consumer that it took, and persisted."""

    def on_persisted(self, number: int, offsets: Mapping[int, int]) -> None:
        """A replica persisted offsets that clients committed there."""
        known = self.persisted.setdefault(number, {})
        for queue, offset in offsets.items():
            known[queue] = max(offset, known.get(queue, 0))

    def check_offsets(self, offsets: Mapping[int, int]) -> None:
        """Everything has healed: the master has these offsets."""
        for number, found in self.persisted.items():
            for queue, offset in found.items():
                if offsets.get(queue, -1) < offset:
                    raise InvariantBroken(
                        f"{queue}: the master has {offsets.get(queue)}, {number} took {offset}"
                    )

    def on_escape(self, number: int, now_us: int, end: int) -> None:
        """A message arrives at a target."""
        self.escapes.setdefault(number, (now_us, end))

    def late(self, begin_us: int, end_us: int, acting: ActingNode) -> list[int]:
        """Returns the messages of an acting slave's log that did not leave on time: those that fell
        due in a time within a second, those that are half when it ends."""
        if self.clocks_ms:
            return []
        found = self.deliveries([acting])
        return [
            number
            for number, sent in self.sent.items()
            if sent.is_acknowledged and 0 <= sent.physical < acting.store.dispatched
            and not (number in found or sent.is_ended)
            and (begin_us < sent.due_us < end_us if sent.is_timed else sent.due_us < begin_us)
            and self.escapes.get(number, (NEVER_US, 0))[0] > (
                sent.due_us + LATE_US if sent.is_timed else end_us
            )
        ]  # fmt: skip

    def on_end(self, name: str, code: int, remark: str) -> None:
        """A replica that serves answered the end of a transaction."""
        if code == Answer.SLAVE_NOT_AVAILABLE:
            raise InvariantBroken(f"{name} serves, and takes no ends of transactions: {remark}")

    @staticmethod
    def deliveries(nodes: Iterable[ActingNode]) -> dict[int, list[tuple[str, int, int]]]:
        """Returns number -> (broker, physical offset, time in its log) of what consumers get."""
        found: dict[int, list[tuple[str, int, int]]] = {}
        for node in nodes:
            for topic in DELIVERED_TO:
                for queue in range(QUEUES):
                    at = node.store.queue_min(topic, queue)
                    while True:
                        got = node.store.get(topic, queue, at, 32)
                        if got.status is not GetStatus.FOUND:
                            break
                        for record in got.records:
                            message = Message(record)
                            number = int.from_bytes(message.body[:8], "big")
                            found.setdefault(number, []).append(
                                (node.broker_name, message.physical, message.stored_ms)
                            )
                            at = message.queue_offset + 1
        return found

    def lacking(self, nodes: Iterable[ActingNode], sent: Iterable[int]) -> list[int]:
        """Returns which of these messages were not delivered, and have to be."""
        found = self.deliveries(nodes)
        return [
            number
            for number in sent
            if self.sent[number].is_acknowledged
            and self.sent[number].fate is Fate.DELIVERED
            and number not in found
        ]

    def check_at_rest(self, nodes: list[ActingNode]) -> None:
        """Everything has healed, and was delivered."""
        for number in self.lacking(nodes, self.sent):
            raise InvariantBroken(f"{number} was acknowledged and is lost: {self.sent[number]}")
        for number, places in self.deliveries(nodes).items():
            sent = self.sent[number]
            if sent.fate is Fate.NEVER:
                raise InvariantBroken(f"{number} was rolled back, and is at {places}")
            if len(places) > 1:
                self._doubled(number, places)

    def _doubled(self, number: int, places: list[tuple[str, int, int]]) -> None:
        here = [(at_ms, physical) for broker, physical, at_ms in places if broker == "a"]
        there = [at_ms for broker, _, at_ms in places if broker != "a"]
        is_excused = len(here) == len(there) == 1 and number in self.escapes and (
            self.splits > 0
            or (here[0][0] <= there[0] + self.clocks_ms and here[0][1] >= self.escapes[number][1])
        )  # fmt: skip
        if not is_excused:
            raise InvariantBroken(
                f"{number} was delivered {len(places)} times: {places}, {self.sent[number]},"
                f" escaped {self.escapes.get(number)}"
            )
        self.doubled += 1

    def on_locked(
        self, queue: object, client: str, epoch: int, asked: tuple[int, int], restarts: int
    ) -> None:
        """A majority gave a client a lock.

        Args:
            asked: `known_epoch` when the client asked.
            restarts: of replicas, until now. With them their locks are gone.
        """
        held = self.holders.get(queue)
        if held is not None and held[1] == restarts and held[0] not in ("", client):
            raise InvariantBroken(f"{client} has the lock of {queue}, which {held} has")
        self.holders[queue] = client, restarts
        lost, before = asked
        if lost != self._lost:
            return
        if epoch < before:
            raise InvariantBroken(f"{queue}: epoch {epoch} after {before}")
        other = self.epochs.setdefault((queue, epoch), client)
        if other != client:
            raise InvariantBroken(f"{queue}: {client} has epoch {epoch}, which {other} had")
        self.highest[queue] = max(epoch, self.highest.get(queue, 0))

    def known_epoch(self, queue: object) -> tuple[int, int]:
        """Returns lost disks, and the highest epoch that a client of a queue had since."""
        return self._lost, self.highest.get(queue, 0)

    def on_disk_lost(self) -> None:
        """A replica votes for any epoch."""
        self._lost += 1
        self.highest.clear()
        self.epochs.clear()

    def on_unlocked(self, queue: object, client: str) -> None:
        """A client gives its lock back, if it has it."""
        holder, restarts = self.holders.get(queue, ("", 0))
        if holder == client:
            self.holders[queue] = "", restarts
