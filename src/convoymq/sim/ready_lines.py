"""Ready messages in the model of a queue, and their order.

Part of `sim.delivery_model`: lines of messages, and rules that look at the messages themselves.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from convoymq.sim.records import property_of

if TYPE_CHECKING:
    from convoymq.sim.delivery_parts import Message

LEVEL_DEFAULT = 4
ORIGINAL, FRONT, TAIL = 1, 2, 3
"""Values of the setting `requeue_position`, for where messages go that come back; 0 = RabbitMQ's
rule."""


def group_of(record: bytes) -> bytes | None:
    """Returns the message group of a record whose only header is `x-group-id`; None = it has
    none."""
    fields = property_of(record, "headers")[4:]
    return fields[16:] if fields.startswith(b"\x0ax-group-idS") else None


class ReadyLines:
    """The messages that wait to be given."""

    def __init__(self) -> None:
        self.limits: dict[str, int] = {}
        """Limits that CONFIG may set; -1 = none."""
        self.in_order = False
        """Everybody took one message at a time so far, so they are given in the order of the log,
        repeats included."""
        self.turn = 0
        """Two classes of priority: messages that were taken, modulo 3."""
        self.fronted: list[Message] = []
        """Messages that came back to the head with the command that is being applied."""
        self.levels: dict[int, deque[Message]] = {}
        """Messages of priorities other than the default one: fresh ones, and those that went to the
        tail."""
        self.fresh: deque[Message] = deque()
        self.returned: deque[Message] = deque()
        self.avoided: list[Message] = []
        """Messages that some consumers do not get, in the order in which they came back."""
        self.first_of: dict[bytes, Message] = {}
        """Of each message group, the one that is ready or that somebody has."""
        self.blocked: dict[bytes, deque[Message]] = {}
        """Of message groups, what waits for the one before it, by who began to wait first."""
        self.in_group: dict[bytes, deque[Message]] = {}
        """All of a group that are not gone, as they were published."""

    def _put_back(self, message: Message) -> None:
        """Puts a message that comes back where the queue's settings say."""
        position = self.limits.get("requeue_position", 0)
        if position == ORIGINAL or message.group is not None:
            self._restore(message)
        elif position == FRONT:
            self.fronted.append(message)
        elif position == TAIL:
            self._append_last(message)
        else:
            self.returned.append(message)

    def _enter(self, message: Message) -> None:
        """A message is published."""
        group = message.group
        if group is not None:
            self.in_group.setdefault(group, deque()).append(message)
            if group in self.first_of:
                self.blocked.setdefault(group, deque()).append(message)
                return
            self.first_of[group] = message
        self._append(message)

    def _make_way(self, message: Message) -> None:
        """A message is gone: the next one of its group is where it was published."""
        group = message.group
        if group is not None:
            self.in_group[group].remove(message)
        if group is None or self.first_of.get(group) is not message:
            return
        del self.first_of[group]
        if group in self.blocked:
            self.first_of[group] = following = self._unblock(group)
            self._restore(following)

    def _unblock(self, group: bytes) -> Message:
        line = self.blocked[group]
        message = line.popleft()
        if not line:
            del self.blocked[group]
        return message

    def _take_out(self, messages: list[Message]) -> None:
        """Takes messages out that wait no more, wherever they stand."""
        gone = {message.key for message in messages}
        for line in [*self._sources(), *self.blocked.values()]:
            kept = [message for message in line if message.key not in gone]
            # What went to the tail divides the line: without it others are in the order of the log.
            again = [m for m in kept if m.at_place] if line is self.fresh else []
            line.clear()
            line.extend(message for message in kept if message not in again)
            for message in again:
                self._restore(message)
        self.blocked = {group: line for group, line in self.blocked.items() if line}

    def _append(self, message: Message) -> None:
        """Behind all of its level."""
        if message.level == LEVEL_DEFAULT:
            self.fresh.append(message)
        else:
            self.in_order = False
            self.levels.setdefault(message.level, deque()).append(message)

    def _sources(self) -> list[deque[Message]]:
        """Returns where messages wait, in the order in which they are served."""
        by_level = {**self.levels, LEVEL_DEFAULT: self.fresh}
        found = [self.returned, *(by_level[level] for level in sorted(by_level, reverse=True))]
        return [source for source in found if source]

    def _has_classes(self) -> bool:
        """Returns whether priorities make two classes, and not 32 levels."""
        return self.in_force(2) and self.limits.get("two_priority_classes", 0) > 0

    def in_force(self, version: int) -> bool:
        """Returns whether that version of the machine, or a later one, applies entries by now."""
        raise NotImplementedError

    def _source(self) -> deque[Message]:
        """Returns where the next message is."""
        sources = self._sources()
        if self.returned or not self._has_classes():
            return sources[0]
        # Of each class the oldest head; two of the higher class before one of the other.
        high = [source for source in sources if source[0].level > LEVEL_DEFAULT]
        normal = [source for source in sources if source[0].level <= LEVEL_DEFAULT]
        oldest = [min(c, key=lambda source: source[0].key) for c in (high, normal) if c]
        if len(oldest) < 2 or self.turn < 2:
            return oldest[0]
        return min(oldest, key=lambda source: source[0].key)

    def _pop(self) -> Message:
        """Takes the next message out, or one that is blocked when there is no other, or last one
        that some consumers do not get."""
        if not self._has_ready():
            if not self.blocked:
                return self.avoided.pop(0)
            return self._unblock(next(iter(self.blocked)))
        source = self._source()
        if source is not self.returned and self._has_classes():
            self.turn = (self.turn + 1) % 3
        return source.popleft()

    def ready(self) -> list[Message]:
        """Returns all that waits; with 32 levels, in the order in which it would be delivered. What
        is blocked comes last."""
        sources = [*self._sources(), *self.blocked.values(), self.avoided]
        return [message for source in sources for message in source]

    def _available(self) -> int:
        """Returns how many messages wait for nothing but a consumer."""
        return sum(len(source) for source in self._sources())

    def _has_ready(self) -> bool:
        return bool(self.returned or self.fresh or any(self.levels.values()))

    def _append_last(self, message: Message) -> None:
        """Behind all that wait, whatever its priority."""
        self.in_order = False
        message.level = LEVEL_DEFAULT
        message.at_tail = True
        message.at_place = False
        self.fresh.append(message)

    def _restore(self, message: Message) -> None:
        """Puts a message back where it was published, among those of its level."""
        message.at_tail = False
        message.at_place = True
        line = self.fresh
        if message.level != LEVEL_DEFAULT:
            # A message of a group that was blocked since it was published comes here first.
            self.in_order = False
            line = self.levels.setdefault(message.level, deque())
        at = 0
        while at < len(line) and not line[at].at_tail and line[at].key < message.key:
            at += 1
        line.insert(at, message)

    def _put_front(self) -> None:
        """Puts what one command brought back to the head there, in the order of the log."""
        self.returned.extendleft(sorted(self.fronted, key=lambda m: m.key, reverse=True))
        self.fronted.clear()
