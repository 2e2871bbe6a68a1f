"""Tasks about topics that the node does which leads the metadata group.

    follower ──leads──▶ `_begin_term` ──▶ work ──other term──▶ `_begin_term` ──▶ …
                                            └──leads no more──▶ `_end_term`

A task holds nothing that its successor on another node could not learn again, from the tree and
from the partitions. What waits for an answer is not sent twice.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

from convoymq.metadata.async_store import AsyncMetadataStore
from convoymq.metadata.commands import Command
from convoymq.metadata.machine import Change, ChangeKind, TopicRecord
from convoymq.metadata.topic_settings import Settings
from convoymq.metadata.topics import find_topic
from convoymq.model.clock import Clock
from convoymq.model.errors import BrokerError
from convoymq.topics.shell.partitions import TopicPartitions

PROPOSAL_TIMEOUT_MS = 5_000
T = TypeVar("T")
Answered = Callable[["T | None", "BrokerError | None"], None]
"""Gets an answer, or why there is none."""


class TopicKey(NamedTuple):
    """A topic."""

    vhost: str
    name: str


class Place(NamedTuple):
    """A partition."""

    vhost: str
    topic: str
    pid: int

    @property
    def key(self) -> TopicKey:
        """Returns its topic."""
        return TopicKey(self.vhost, self.topic)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicNode:
    """Parts of a node that its tasks share."""

    node: int
    store: AsyncMetadataStore
    partitions: TopicPartitions
    clock: Clock
    call_soon: Callable[[Callable[[], None]], object]
    """Runs a callback when the present one is done."""
    spawn: Callable[[Coroutine[object, object, None]], object]
    """Runs a coroutine."""


class LeaderTask:
    """See the module text. One of a kind per node."""

    BEGINS_ANEW: ClassVar[frozenset[ChangeKind]] = frozenset()
    """Changes of the tree after which nothing that a task knows of it is current."""

    def __init__(self, own: TopicNode) -> None:
        self._node = own.node
        self._store = own.store
        self._partitions = own.partitions
        self._clock = own.clock
        self._call_soon = own.call_soon
        self._spawn = own.spawn
        self._term = -1
        """The term that has begun; -1: this node does not lead, or has to begin anew."""
        self._due: set[TopicKey] = set()
        """Topics that the tree has changed since they were looked at."""
        self._under_way: set[Hashable] = set()
        """Proposals, commands and questions without an answer, and work that has not ended."""
        self._is_called = False

    @property
    def leads(self) -> bool:
        """Returns whether this node leads the metadata group."""
        return self._store.leader == self._node

    def on_change(self, change: Change) -> None:
        """The tree has changed."""
        if change.kind is ChangeKind.TOPIC:
            self._due.add(TopicKey(change.vhost, change.topic))
        elif change.kind in self.BEGINS_ANEW:
            self._term = -1

    def _take_due(self) -> set[TopicKey]:
        due, self._due = self._due, set()
        return due

    def _run_soon(self, run: Callable[[], None]) -> None:
        """Runs a method when the present callback is done, once for all calls until then."""

        def called() -> None:
            self._is_called = False
            run()

        if not self._is_called:
            self._is_called = True
            self._call_soon(called)

    def _follow_term(self) -> bool:
        """Begins and ends terms; returns whether this node leads."""
        if not self.leads:
            self._term = -1
            self._end_term()
            return False
        if self._term != self._store.term:
            self._term = self._store.term
            self._begin_term()
        return True

    def _begin_term(self) -> None:
        """Begins to lead, and knows nothing yet."""
        self._under_way.clear()

    def _end_term(self) -> None:
        """Forgets all; called again and again while this node does not lead."""
        self._due.clear()

    def _records(self) -> Iterator[TopicRecord]:
        for vhost in self._store.tree.vhosts.values():
            for _, record in sorted(vhost.topics.items()):
                yield record

    def _topics(self) -> list[TopicKey]:
        return [TopicKey(record.vhost, record.name) for record in self._records()]

    def _record(self, key: TopicKey) -> TopicRecord | None:
        return find_topic(self._store.tree, key.vhost, key.name)

    def _settings_of(self, record: TopicRecord) -> Settings:
        """Returns the settings of a topic, by its policies as they are now."""
        return self._store.tree.vhosts[record.vhost].settings_of(record)

    def _once(
        self,
        what: Hashable,
        begin: Callable[[Answered[T]], object],
        done: Answered[T],
    ) -> None:
        """Has `begin` begin something, unless it is under way; `done` gets its answer."""
        if what in self._under_way:
            return
        self._under_way.add(what)

        def answered(answer: T | None, error: BrokerError | None) -> None:
            self._under_way.discard(what)
            done(answer, error)

        begin(answered)

    def _spawn_once(
        self, what: Hashable, work: Callable[[], Coroutine[object, object, None]]
    ) -> None:
        """Runs a coroutine, unless it is under way."""
        if what in self._under_way:
            return
        self._under_way.add(what)

        async def run() -> None:
            try:
                await work()
            finally:
                self._under_way.discard(what)

        self._spawn(run())

    def _propose_once(self, what: Hashable, command: Command, done: Answered[object]) -> None:
        """Proposes a command of the tree, unless it is under way."""
        self._once(
            what, lambda answered: self._store.submit(command, answered, PROPOSAL_TIMEOUT_MS), done
        )
