# cython: annotation_typing=False
"""Transactions in a quorum queue: publishes and settlements that count together or not at all, in
this queue and in others (ADR 0204).

    BEGIN --commands of its session--> staged --COMMIT--> applied, in this entry
                                         |
                                         +-----PREPARE--> prepared --decide--> applied, or undone
                                         +-----the session ends--> forgotten

Commands of a session between its BEGIN and its END wait. END says how they end:

| END of kind | fields                        | then                                             |
|-------------|-------------------------------|--------------------------------------------------|
| commit      | id, deadline, left            | they are applied; where others take part (`left`)|
|             |                               | this entry is the decision, and it is remembered |
| prepare     | id, deadline, home            | they are held aside until `home` has decided     |

END is refused, and nothing changes, when what is settled is not held any more, when the queue
refuses publishes, or when it comes after its deadline. A participant that hears of no decision asks
(`transaction_resolver`) by ops of RESERVATION:

| op                  | fields           | answered with                                         |
|---------------------|------------------|-------------------------------------------------------|
| resolve_transaction | id, deadline     | committed, aborted, or undecided: it may still commit |
| decide_transaction  | id, committed    | –; of one that is not prepared as well                |
| forget_transaction  | id, groups, heard| –; these participants know the decision; `heard`: so  |
|                     |                  | does who asked for it                                 |

A transaction that its home does not know is aborted as soon as its deadline has passed there: from
then on its home refuses to commit it. Of aborted ones nothing is remembered.

What is prepared is neither ready nor held by its consumer. Publishes of it enter, when it is
committed, as messages do that have waited: behind all that is in the queue by then.

Invariants: what is settled by a prepared transaction is held by it alone; nothing is both staged
and prepared; at most PREPARED_MAX are prepared and DECIDED_MAX decisions remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from convoymq.kernels import batch
from convoymq.kernels.command_walk import CommandWalk
from convoymq.kernels.message_attributes import attribute_runs
from convoymq.queues.outcomes import CMD_MODIFY, FLAG_UNTRIED, Modified, unpack_modified
from convoymq.queues.quorum import runs, tracing
from convoymq.queues.quorum.consumers import POLLER, Consumer, QueueSession
from convoymq.queues.quorum.deduplication import Enqueue
from convoymq.queues.quorum.levels import LEVEL_DEFAULT
from convoymq.queues.quorum.settings import FROZEN
from convoymq.queues.reservations import MALFORMED
from convoymq.queues.sessions import APPLIED_OK, APPLIED_REJECTED, Packed, decode_map
from convoymq.queues.transactions import (
    ABORTED,
    COMMIT,
    COMMITTED,
    DECIDE,
    FULL,
    NAMED,
    NOT_HELD,
    ORDERED,
    PREPARE,
    RESOLVE,
    TOO_LATE,
    TOO_MANY,
    UNDECIDED,
    Target,
)

if TYPE_CHECKING:
    from convoymq.queues.quorum.machine import QuorumMachine

FLAG_HEADERS = 8
"""Of ENQUEUE, as in `machine`."""
COMMANDS_MAX = 16_384
"""Staged commands of one transaction."""
KEPT_BYTES_MAX = 16 << 20
"""Records that ask for something, of one transaction: they are kept until its end."""
PREPARED_MAX = 1024
DECIDED_MAX = 8192
KEPT_MS = 600_000
"""A decision that nobody needs any more is kept so long beyond its deadline, unless who asked for
it has heard it."""
ID_MAX = (1 << 62) - 1


class Published(NamedTuple):
    """A staged ENQUEUE."""

    entry: int
    offset: int
    flags: int
    messages: int
    size: int
    kept: bytes
    """The command, if its records ask for something; or nothing."""


class Settled(NamedTuple):
    """A staged SETTLE, RETURN, DISCARD or MODIFY."""

    kind: int
    flags: int
    number: int
    """Of the consumer."""
    ranges: list[int]
    due_ms: int = 0
    annotations: bytes = b""


PackedTransaction: TypeAlias = tuple[
    str, int, int, str, int, Target, list[Published], list[Settled], list[tuple[int, bytes]]
]
PackedTransactions: TypeAlias = tuple[
    list[PackedTransaction], list[PackedTransaction], list[tuple[str, int, list[Target], bool]]
]
"""Staged, prepared, decided."""


class Transaction:
    """Commands of one transaction."""

    __slots__ = (
        "began", "deadline_ms", "holders", "home", "id", "incoming", "kept_bytes", "publishes",
        "refusal", "session", "settlements",
    )  # fmt: skip

    def __init__(self, session: int, began: int) -> None:
        self.id = ""
        self.session = session
        self.began = began
        """Messages that were published in the queue before."""
        self.refusal = ""
        """Reason why it cannot be committed."""
        self.deadline_ms = 0
        self.home: Target = ("", 0)
        self.publishes: list[Published] = []
        self.kept_bytes = 0
        self.incoming = runs.CheckedOut()
        """Messages of `publishes`: their bodies stay."""
        self.settlements: list[Settled] = []
        self.holders: dict[int, Consumer] = {}
        """Prepared: number of a consumer -> what is held of it, under the same ids."""

    def publish(self, published: Published) -> None:
        """Stages an ENQUEUE."""
        if not published.messages:
            return
        self.publishes.append(published)
        self.kept_bytes += len(published.kept)
        index, offset, _, count, size, _ = published
        self.incoming.add(self.messages, index, offset, 0, count, size, 0, 0)

    @property
    def messages(self) -> int:
        """Returns the number of messages that it publishes."""
        count: int = self.incoming.messages
        return count

    def check_size(self) -> None:
        """Refuses what is too large; what it has is dropped."""
        commands = len(self.publishes) + len(self.settlements)
        if commands > COMMANDS_MAX or self.kept_bytes > KEPT_BYTES_MAX:
            self.refusal = TOO_MANY
            self.publishes.clear()
            self.settlements.clear()
            self.incoming.clear()
            self.kept_bytes = 0

    def pack(self) -> list[object]:
        """Returns plain values."""
        held = [[number, each.checked_out.pack()] for number, each in self.holders.items()]
        said = [self.id, self.session, self.began, self.refusal, self.deadline_ms, list(self.home)]
        return [*said, [list(p) for p in self.publishes], [list(s) for s in self.settlements], held]

    @classmethod
    def unpacked(cls, packed: PackedTransaction) -> Transaction:
        """Returns what `pack` gave."""
        made = cls(packed[1], packed[2])
        made.id, made.refusal, made.deadline_ms = packed[0], packed[3], packed[4]
        made.home = (packed[5][0], packed[5][1])
        for published in packed[6]:
            made.publish(Published(*published))
        made.settlements = [Settled(*settled) for settled in packed[7]]
        for number, held in packed[8]:
            made._holder(number).checked_out.unpack(held)
        return made

    def _holder(self, number: int) -> Consumer:
        holder = self.holders.get(number)
        if holder is None:
            holder = Consumer(QueueSession(self.session), number, POLLER)
            self.holders[number] = holder
        return holder

    def hold(self, consumer: Consumer, ranges: list[tuple[int, int]]) -> None:
        """Takes messages from their consumer."""
        held = self._holder(consumer.number).checked_out
        for first, last in ranges:
            for run in consumer.checked_out.remove(first, last):
                held.add(first, *run)
                first += run[3]


class Decision:
    """Record of a transaction that was committed."""

    __slots__ = ("deadline_ms", "heard", "left")

    def __init__(self, deadline_ms: int, left: list[Target], *, heard: bool = False) -> None:
        self.deadline_ms = deadline_ms
        self.left = left
        """Participants that may not know it."""
        self.heard = heard
        """The node that asked for it knows it."""


class Transactions:
    """Transactions of a machine's queue."""

    def __init__(self, machine: QuorumMachine) -> None:
        self._machine = machine
        self.staged: dict[int, Transaction] = {}
        """By session."""
        self.prepared: dict[str, Transaction] = {}
        self.decided: dict[str, Decision] = {}

    @property
    def is_open(self) -> bool:
        """Returns whether the queue is needed for a transaction."""
        return bool(self.staged or self.prepared or self.decided)

    # ---------------------------------------------------------------- commands

    def begin(self, session: QueueSession) -> None:
        """BEGIN: what follows from the session waits."""
        self.staged[session.id] = Transaction(session.id, self._machine.backlog.published)
        self._machine._applied(session)

    def stage(self, session: QueueSession, walk: CommandWalk, data: bytes) -> bool:
        """Has a command wait, if it is one of a transaction; False: it is not."""
        transaction = self.staged.get(session.id)
        if transaction is None:
            return False
        kind, flags, count, offset = walk.type, walk.flags, walk.count, walk.offset
        if kind == batch.CMD_ENQUEUE:
            size = batch.enqueue_bytes(data, offset)
            kept = b""
            if flags & self._machine._attributes or self._machine._deduplicates:
                kept = data[offset : offset + walk.length]
            transaction.publish(Published(self._machine.index, offset, flags, count, size, kept))
        elif kind in (batch.CMD_SETTLE, batch.CMD_RETURN, batch.CMD_DISCARD):
            ranges = batch.ranges(data, offset, count)
            if ranges:
                transaction.settlements.append(Settled(kind, flags, walk.arg, ranges))
        elif kind == CMD_MODIFY:
            said = unpack_modified(data, offset, count)
            transaction.settlements.append(Settled(kind, flags, walk.arg, *said))
        elif kind == batch.CMD_PRODUCER:
            # A repeat must not be known before it is committed.
            transaction.refusal = NAMED
        else:
            return False
        transaction.check_size()
        self._machine._applied(session)
        return True

    def end(self, session: QueueSession, data: bytes, offset: int, count: int) -> None:
        """END: commits or prepares what the session has staged."""
        transaction = self.staged.pop(session.id, None)
        reason: str | None = MALFORMED
        try:
            op = decode_map(batch.command_body(data, offset), count)
            if transaction is not None:
                reason = self._end(session, transaction, op, data)
        except (KeyError, TypeError, ValueError):
            reason = MALFORMED
        if reason is None:
            self._machine._reply(session, APPLIED_OK, {})
        else:
            self._machine._reply(session, APPLIED_REJECTED, reason)

    def _end(
        self, session: QueueSession, transaction: Transaction, op: Packed, data: bytes
    ) -> str | None:
        kind = op["op"]
        transaction.id, transaction.deadline_ms = _id(op), _time(op)
        left = _targets(op["left"]) if kind == COMMIT else []
        if kind == PREPARE:
            (transaction.home,) = _targets([op["home"]])
        elif kind != COMMIT:
            return MALFORMED
        held = _held_ranges(transaction)
        reason = self._refusal(session, transaction, held, kind)
        if reason is not None:
            return reason
        machine = self._machine
        if kind == PREPARE:
            for number, ranges in held.items():
                consumer = session.consumers[number]
                transaction.hold(consumer, ranges)
                machine.consumers.refresh(consumer)
            self.prepared[transaction.id] = transaction
            return None
        self._settle(transaction, session.consumers)
        in_order = transaction.began == machine.backlog.published
        self._publish(session, transaction, data, in_order=in_order)
        if left:
            self._make_room()
            self.decided[transaction.id] = Decision(transaction.deadline_ms, left)
        return None

    def _refusal(
        self,
        session: QueueSession,
        transaction: Transaction,
        held: Mapping[int, list[tuple[int, int]]],
        kind: str,
    ) -> str | None:
        machine = self._machine
        if transaction.refusal:
            return transaction.refusal
        if machine.time_ms > transaction.deadline_ms:
            return TOO_LATE
        if transaction.publishes and machine.backlog.refusing:
            return FULL
        late = kind == PREPARE or transaction.began != machine.backlog.published
        if late and any(each.flags & FLAG_HEADERS for each in transaction.publishes):
            return ORDERED
        if kind == PREPARE and (
            len(self.prepared) >= PREPARED_MAX or transaction.id in self.prepared
        ):
            return TOO_MANY
        if kind == COMMIT and len(self.decided) >= DECIDED_MAX and not self._make_room():
            return TOO_MANY
        for number, ranges in held.items():
            consumer = session.consumers.get(number)
            if consumer is None or not _holds(consumer.checked_out, ranges):
                return NOT_HELD
        return None

    # ---------------------------------------------------------------- ops

    def apply(self, op: Packed) -> tuple[str | None, dict[str, object]]:
        """Carries out an op of RESERVATION. Returns (None, answer), or (reason, {}): it is refused,
        and nothing has changed."""
        try:
            id = _id(op)
            if op["op"] == RESOLVE:
                return None, {"outcome": self._outcome(id, _time(op))}
            if op["op"] == DECIDE:
                self._decide(id, committed=op["committed"] is True)
            else:
                self._forget(id, [group for _, group in _targets(op["groups"])], op)
        except (KeyError, TypeError, ValueError):
            return MALFORMED, {}
        return None, {}

    def _outcome(self, id: str, deadline_ms: int) -> str:
        if id in self.decided:
            return COMMITTED
        return ABORTED if self._machine.time_ms > deadline_ms else UNDECIDED

    def _decide(self, id: str, *, committed: bool) -> None:
        transaction = self.prepared.pop(id, None)
        if transaction is None:
            return
        if committed:
            self._settle(transaction, transaction.holders)
            self._publish(None, transaction, b"", in_order=False)
        else:
            for holder in transaction.holders.values():
                self._machine.settle_ranges(
                    holder, batch.CMD_RETURN, FLAG_UNTRIED, [0, (1 << 63) - 1]
                )
        assert not any(each.checked_out.messages for each in transaction.holders.values())
        self._machine.consumers.last_active_ms = self._machine.time_ms

    def _forget(self, id: str, groups: list[int], op: Packed) -> None:
        decision = self.decided.get(id)
        if decision is None:
            return
        decision.left = [each for each in decision.left if each[1] not in groups]
        decision.heard |= op.get("heard") is True
        self._make_room()

    def _make_room(self) -> bool:
        """Forgets decisions that nobody needs; returns whether there is room for one more."""
        horizon = self._machine.time_ms - KEPT_MS
        for id, decision in list(self.decided.items()):
            if decision.left:
                continue
            if decision.heard or decision.deadline_ms < horizon:
                del self.decided[id]
        return len(self.decided) < DECIDED_MAX

    # ---------------------------------------------------------------- messages

    def _settle(self, transaction: Transaction, consumers: Mapping[int, Consumer]) -> None:
        for kind, flags, number, ranges, due_ms, said in transaction.settlements:
            consumer = consumers[number]
            if kind == CMD_MODIFY:
                modified = Modified(ranges, due_ms, said)
                self._machine.deliveries.modify(consumer, flags, modified)
                self._machine.consumers.refresh(consumer)
            else:
                self._machine.settle_ranges(consumer, kind, flags, ranges)

    def _publish(
        self, session: QueueSession | None, transaction: Transaction, data: bytes, *, in_order: bool
    ) -> None:
        """Has the messages enter the queue. `in_order`: nothing was published since they were."""
        machine = self._machine
        take: Enqueue = machine.enqueue_run if in_order else self._late
        for index, offset, flags, count, size, kept in transaction.publishes:
            records = data if index == machine.index else bytes(offset if kept else 0) + kept
            if (
                kept
                and machine._deduplicates
                and machine.deduplication.enqueue(
                    session, flags, 0, count, records, offset, index, take
                )
            ):
                continue
            if machine.trace is not None:
                number = machine.backlog.published
                tracing.published(machine.trace, session, 0, count, number, index, offset)
            take(index, flags, 0, count, size, records, offset)
        transaction.incoming.clear()

    def _late(
        self, index: int, flags: int, first: int, count: int, size: int, data: bytes, offset: int
    ) -> None:
        """Takes records of an ENQUEUE that others have overtaken."""
        backlog = self._machine.backlog
        backlog.published += count
        # As what waits: it enters the default level at its tail.
        backlog.beside += count
        if flags & self._machine._attributes:
            found = attribute_runs(data, offset, first, count)
        else:
            found = [first, count, size, LEVEL_DEFAULT, -1]
        for at in range(0, len(found), 5):
            low, messages, part, level, expiration = found[at : at + 5]
            mark = self._machine.mark_for(level, expiration)
            backlog.arrive((index, offset, low, messages, part, 0, 0, mark))
        if backlog.fronted:
            backlog.put_front()

    # ---------------------------------------------------------------- what others ask for

    def allowed(self, settings: Mapping[str, int]) -> Mapping[str, int]:
        """Returns the changes of settings that the queue may follow now: it does not stand still
        while others rely on its answer. What is only staged is given up."""
        if settings.get(FROZEN, 0) <= 0:
            return settings
        if self.prepared or self.decided:
            return {name: value for name, value in settings.items() if name != FROZEN}
        self.staged.clear()
        return settings

    def session_ended(self, session: int) -> None:
        """A session is over: what it has staged is forgotten."""
        self.staged.pop(session, None)

    def held(self) -> list[runs.CheckedOut]:
        """Returns the messages that prepared transactions hold."""
        return [
            holder.checked_out
            for each in self.prepared.values()
            for holder in each.holders.values()
        ]

    def incoming(self) -> list[runs.CheckedOut]:
        """Returns the messages that are to enter the queue."""
        both = (*self.staged.values(), *self.prepared.values())
        return [each.incoming for each in both if each.messages]

    def pack(self) -> list[object]:
        """Returns plain values, equal for equal content."""
        return [
            [each.pack() for each in self.staged.values()],
            [each.pack() for each in self.prepared.values()],
            [
                [id, each.deadline_ms, [list(target) for target in each.left], each.heard]
                for id, each in self.decided.items()
            ],
        ]

    def unpack(self, packed: PackedTransactions) -> None:
        """Fills an empty object with what `pack` gave. Raises ValueError."""
        staged, prepared, decided = packed
        for made in map(Transaction.unpacked, staged):
            self.staged[made.session] = made
        for made in map(Transaction.unpacked, prepared):
            self.prepared[made.id] = made
        for id, deadline_ms, left, heard in decided:
            targets = [(name, group) for name, group in left]
            self.decided[id] = Decision(deadline_ms, targets, heard=heard)

    def check(self) -> list[runs.Run]:
        """Asserts what the module text promises; returns the runs that are held."""
        assert len(self.prepared) <= PREPARED_MAX
        assert len(self.decided) <= DECIDED_MAX
        assert self.staged.keys() <= self._machine.sessions.keys(), "a session that ended stages"
        for id, each in self.prepared.items():
            assert each.id == id
            assert not each.refusal
            wanted = sum(last - first + 1 for r in _held_ranges(each).values() for first, last in r)
            held = sum(holder.checked_out.messages for holder in each.holders.values())
            assert held == wanted, "a prepared transaction holds other messages than it settles"
        return [run for held in self.held() for _, run in held.held()]


def _held_ranges(transaction: Transaction) -> dict[int, list[tuple[int, int]]]:
    """Returns number of a consumer -> the ranges of ids that are settled, ascending."""
    found: dict[int, list[tuple[int, int]]] = {}
    for settled in transaction.settlements:
        pairs = zip(settled.ranges[::2], settled.ranges[1::2], strict=True)
        found.setdefault(settled.number, []).extend(pairs)
    for ranges in found.values():
        ranges.sort()
    return found


def _holds(held: runs.CheckedOut, ranges: list[tuple[int, int]]) -> bool:
    """Returns whether all ids are held, each named once."""
    if any(first > last for first, last in ranges):
        return False
    if any(one[1] >= other[0] for one, other in pairwise(ranges)):
        return False
    for first, last in ranges:
        found = held.between(first, last + 1, last - first + 1)
        if sum(run[3] for _, run in found) != last - first + 1:
            return False
    return True


def _id(op: Packed) -> str:
    id = op["id"]
    if not isinstance(id, str) or not 0 < len(id) <= 64:
        raise ValueError("an id is a short text")
    return id


def _time(op: Packed) -> int:
    time_ms = op["deadline"]
    if not isinstance(time_ms, int) or not 0 <= time_ms < ID_MAX:
        raise ValueError("a deadline is a time")
    return time_ms


def _targets(values: object) -> list[Target]:
    if not isinstance(values, list) or len(values) > 1024:
        raise ValueError("targets are a list")
    targets: list[Target] = []
    for name, group in values:
        if not isinstance(name, str) or not isinstance(group, int):
            raise ValueError("a target is a name and a group")
        targets.append((name, group))
    return targets
