"""Links of clients that may go on in another session, by their keys (ADR 0202).

A consumer with a key is the receiver of a link. What it holds stays when its session ends, for the
setting `link_resume_timeout_ms`; an attach with the same key takes it over, wherever the one before
it is:

| receiver | holds messages | leaves it by                                                         |
|----------|----------------|----------------------------------------------------------------------|
| attached | of a session   | end of the session, suspension -> kept; attach of its key -> gone    |
| kept     | of no session  | attach of its key -> attached, or returned; time over -> returned    |

Message ids go on where they were: they are the delivery-tags of the link.

A publisher tags its messages: the queue remembers the latest tags of each link, for that time after
the last one. Claiming a link tells which of some tags it has, and begins a new epoch. Messages of
an older epoch that come later are refused: their publisher was told that they are not there.

Invariants: a kept consumer holds messages; a key has one consumer at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoymq.queues.link_claims import KEY_BYTES, TAGGED, TAGS_MAX
from convoymq.queues.quorum.consumers import (
    CANCELLED,
    OUTCOMES_SINCE,
    TAKEN,
    Consumer,
    QueueSession,
)
from convoymq.queues.quorum.runs import CheckedOut
from convoymq.queues.quorum.settings import LINK_RESUME_TIMEOUT
from convoymq.queues.reservations import MALFORMED
from convoymq.queues.sessions import Packed
from convoymq.replication.machine import EFFECT_ACTIVITY, EFFECT_TIMER

if TYPE_CHECKING:
    from convoymq.queues.quorum.machine import QuorumMachine

RANGES_MAX = 1_024
"""Ranges of message ids that a link takes over; what lies behind them is returned."""

TAGS_OF_ALL_MAX = 131_072


class _Publisher:
    """The latest tags of a link."""

    __slots__ = ("epoch", "heard_ms", "tags")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.heard_ms = 0
        self.tags: dict[bytes, None] = {}


class Links:
    """See the module text."""

    def __init__(self, machine: QuorumMachine) -> None:
        self._machine = machine
        #: Key -> its consumer, attached or kept.
        self.receivers: dict[bytes, Consumer] = {}
        #: Key of a kept consumer, or of one whose node is silent -> when its messages go back.
        self.due_ms: dict[bytes, int] = {}
        #: Key -> tags, the longest silent first.
        self.publishers: dict[bytes, _Publisher] = {}
        self._tags = 0

    @property
    def timeout_ms(self) -> int:
        """Returns how long links are kept; 0: they are not."""
        timeout: int = self._machine.settings.get(LINK_RESUME_TIMEOUT, 0)
        return timeout if self._machine.version >= OUTCOMES_SINCE else 0

    # ---------------------------------------------------------------- receivers

    def attach(self, consumer: Consumer, key: bytes, resumes: bool) -> list[int]:
        """Gives a new consumer a link's key, and what the one before it held if it `resumes`.
        Returns its next message id, and the ranges of those that it holds."""
        consumers, deliveries = self._machine.consumers, self._machine.deliveries
        before = self._take(key)
        consumer.link = key
        self.receivers[key] = consumer
        if before is not None:
            if resumes:
                consumer.checked_out, before.checked_out = before.checked_out, CheckedOut()
                consumer.next_id = before.next_id
                if consumer.limit >= 0:
                    consumer.limit = before.next_id
                consumers.succeed(before, consumer)
                deliveries.trace_passed_on(before, consumer)
            else:
                deliveries.give_back_all(before, 0)
        return [consumer.next_id, *self._ranges(consumer)]

    def _ranges(self, consumer: Consumer) -> list[int]:
        """Returns the ranges of ids that a consumer holds, as many as its client is told."""
        ranges: list[int] = []
        for first, run in consumer.checked_out.held():
            if ranges and ranges[-1] + 1 == first:
                ranges[-1] += run[3]
            elif len(ranges) < 2 * RANGES_MAX:
                ranges += (first, first + run[3] - 1)
            else:
                for rest in consumer.checked_out.remove(first, consumer.next_id):
                    self._machine.deliveries.give_back(rest, 0, 0)
                break
        return ranges

    def _take(self, key: bytes) -> Consumer | None:
        """Takes a key from its consumer, which is out of its session and gets no more. Returns it
        while it holds what is to go elsewhere."""
        consumer = self.receivers.pop(key, None)
        if consumer is None:
            return None
        machine, session = self._machine, consumer.session
        self.due_ms.pop(key, None)
        if _is_attached(consumer):
            machine.consumers.end(consumer)
            del session.consumers[consumer.number]
            machine.effects.append((EFFECT_ACTIVITY, session.id, consumer.number, TAKEN))
        consumer.link = b""
        return consumer

    def keep(self, consumer: Consumer) -> bool:
        """Keeps what a consumer holds that is out of its session; False: it goes back."""
        key = consumer.link
        if not key or self.receivers.get(key) is not consumer:
            return False
        if not self.timeout_ms or not consumer.checked_out.messages:
            del self.receivers[key]
            self.due_ms.pop(key, None)
            return False
        self._wait_until(key, self.due_ms.get(key, self._machine.time_ms + self.timeout_ms))
        return True

    def drop(self, consumer: Consumer) -> None:
        """Takes its key from a consumer that is cancelled: its link is closed."""
        if self.receivers.get(consumer.link) is consumer:
            del self.receivers[consumer.link]
            self.due_ms.pop(consumer.link, None)
            consumer.link = b""

    def waits(self, consumer: Consumer, since_ms: int) -> bool:
        """Returns whether a consumer whose node is silent since then still has time."""
        due_ms = since_ms + self.timeout_ms
        if self.receivers.get(consumer.link) is not consumer or due_ms <= self._machine.time_ms:
            return False
        self._wait_until(consumer.link, due_ms)
        return True

    def heard(self, consumer: Consumer) -> None:
        """The node of an attached consumer is not silent any more."""
        if consumer.link:
            self.due_ms.pop(consumer.link, None)

    def _wait_until(self, key: bytes, due_ms: int) -> None:
        self.due_ms[key] = due_ms
        self._machine.effects.append((EFFECT_TIMER, due_ms))

    def expire(self) -> None:
        """Returns what was kept for long enough; forgets tags."""
        machine = self._machine
        self._forget_silent()
        for key in [key for key, due_ms in self.due_ms.items() if due_ms <= machine.time_ms]:
            del self.due_ms[key]
            consumer = self.receivers[key]
            is_kept = not _is_attached(consumer)
            if is_kept:
                del self.receivers[key]
            machine.deliveries.give_back_all(consumer, int(is_kept))
            machine.consumers.refresh(consumer)

    def next_due_ms(self) -> int | None:
        """Returns when the next messages go back; None: none wait."""
        return min(self.due_ms.values(), default=None)

    def kept(self) -> list[Consumer]:
        """Returns the consumers that are of no session."""
        found = [self.receivers[key] for key in self.due_ms]
        return [each for each in found if not _is_attached(each)]

    # ---------------------------------------------------------------- publishers

    def claim(self, op: Packed) -> tuple[str | None, object]:
        """Begins a new epoch of a link, and returns which of some tags are known; without any it
        forgets all: the link begins anew, and may use tags again."""
        key, tags = op.get("link"), op.get("tags")
        if not isinstance(key, bytes) or len(key) != KEY_BYTES or not isinstance(tags, bytes):
            return MALFORMED, None
        self._forget_silent()
        before = self.publishers.get(key)
        names = [tags[at : at + KEY_BYTES] for at in range(0, len(tags), KEY_BYTES)]
        known = [at for at, name in enumerate(names) if before and name in before.tags]
        made = self._publisher(key, max(self._machine.index, before.epoch + 1 if before else 0))
        if before is not None and names:
            made.tags = before.tags
            self._tags += len(made.tags)
        return None, {"epoch": made.epoch, "known": known}

    def note(self, name: bytes, first: int) -> bool:
        """Notes the tag of the message that comes next; False: it is of an older epoch."""
        key, tag, epoch = name[:KEY_BYTES], name[KEY_BYTES:], first & ~TAGGED
        known = self.publishers.get(key)
        if known is not None and epoch < known.epoch:
            return False
        if not self.timeout_ms:
            return True
        if known is None or epoch > known.epoch:
            known = self._publisher(key, epoch)
        else:
            del self.publishers[key]
            self.publishers[key] = known
        known.heard_ms = self._machine.time_ms
        self._tags -= len(known.tags)
        known.tags.pop(tag, None)
        known.tags[tag] = None
        if len(known.tags) > TAGS_MAX:
            del known.tags[next(iter(known.tags))]
        self._tags += len(known.tags)
        while self._tags > TAGS_OF_ALL_MAX and len(self.publishers) > 1:
            self._forget(next(iter(self.publishers)))
        return True

    def _publisher(self, key: bytes, epoch: int) -> _Publisher:
        """Returns a link in a new epoch, without tags."""
        if key in self.publishers:
            self._forget(key)
        made = self.publishers[key] = _Publisher(epoch)
        made.heard_ms = self._machine.time_ms
        return made

    def _forget(self, key: bytes) -> None:
        self._tags -= len(self.publishers.pop(key).tags)

    def _forget_silent(self) -> None:
        horizon_ms = self._machine.time_ms - self.timeout_ms
        for key, known in list(self.publishers.items()):
            if known.heard_ms >= horizon_ms:
                break
            self._forget(key)

    # ---------------------------------------------------------------- snapshots

    @property
    def is_used(self) -> bool:
        """Returns whether there is anything to be in a snapshot beside the consumers' keys."""
        return bool(self.due_ms or self.publishers)

    def pack(self) -> list[object]:
        """Returns plain values."""
        machine = self._machine
        return [
            list(self.due_ms.items()),
            [
                [each.session.id, each.pack(machine.version), each is machine.consumers.active]
                for each in self.kept()
            ],
            [
                [key, each.epoch, each.heard_ms, list(each.tags)]
                for key, each in self.publishers.items()
            ],
        ]

    def unpack(self, due_ms: list[list[object]], kept: list[list[object]], packed: object) -> None:
        """Takes over what `pack` gave. The sessions are there."""
        machine = self._machine
        for session, of_consumer, is_active in kept:
            consumer = Consumer(QueueSession(session), of_consumer[0], CANCELLED)  # type: ignore[arg-type, index]
            consumer.unpack(of_consumer)  # type: ignore[arg-type]
            self.receivers[consumer.link] = consumer
            machine.backlog.hold(consumer.checked_out.messages, consumer.checked_out.size)
            if is_active:
                machine.consumers.active = consumer
        for consumer in machine.consumers.all():
            if consumer.link:
                self.receivers[consumer.link] = consumer
        self.due_ms = dict(due_ms)  # type: ignore[arg-type]
        for key, epoch, heard_ms, tags in packed:  # type: ignore[attr-defined]
            made = self._publisher(key, epoch)
            made.heard_ms = heard_ms
            made.tags = dict.fromkeys(tags)
            self._tags += len(tags)


def _is_attached(consumer: Consumer) -> bool:
    return consumer.session.consumers.get(consumer.number) is consumer
