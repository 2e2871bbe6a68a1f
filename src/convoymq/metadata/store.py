"""A node's access to the replicated tree: ask for changes on any node, read locally, watch.

The store is one client session into group 0, with the session rule of every queue client: each
command gets the next number, stays pending until its APPLIED effect comes back from this node's own
replica, and is sent again after a change of leader or a gap. Because the answer comes from the
local replica, whoever asked for a change finds it in the local tree.

It is the `EffectSink` of group 0. Answers are called back; `AsyncMetadataStore` awaits them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from typing import TypeAlias

from convoymq.kernels.batch import CMD_METADATA, CommandBuilder, PublishTarget
from convoymq.metadata.commands import Command, OwnerGone, encode_command
from convoymq.metadata.machine import STATUS_OK, Change, MetadataMachine
from convoymq.metadata.validation import validated
from convoymq.model.clock import Clock, Timer
from convoymq.model.errors import (
    BrokerError,
    ResourceExhausted,
    Unavailable,
    refusal_from_builtins,
)
from convoymq.model.rounds import pass_on, run_each
from convoymq.replication.machine import EFFECT_APPLIED, EFFECT_GAP, Effect

WINDOW = 32
"""Commands outstanding; fewer than the answers that the machine keeps."""
WAITING_MAX = 100_000
"""Commands that may wait for a place in the window."""
RESEND_AFTER_MS = 1000

Done: TypeAlias = Callable[[object, BrokerError | None], None]
"""Hears the reply of a command and None, or None and why there is no reply."""


class Submitted:
    """A command that is on its way."""

    __slots__ = ("body", "done")

    def __init__(self, body: bytes, done: Done) -> None:
        self.body = body
        self.done: Done | None = done

    def abandon(self) -> None:
        """Nobody waits for the answer any more. The command may still be applied."""
        self.done = None


class MetadataStore:
    """Local tree plus the command session of this node."""

    def __init__(
        self, machine: MetadataMachine, builder: CommandBuilder, session: int, clock: Clock
    ) -> None:
        """`builder` is the open batch of group 0 on this node; the host seals and sends it."""
        self.tree = machine
        self.leader: int | None = None
        self.term = 0
        self._clock = clock
        self._target = PublishTarget(builder, session, self)
        self._waiting: deque[Submitted] = deque()
        self._answers: dict[int, Submitted] = {}
        self._applied = 0
        self._watchers: list[Callable[[Change], None]] = []
        self._resend_timer: Timer | None = None
        self._progress_ms = 0

    def submit(self, command: Command, done: Done, timeout_ms: int = 0) -> Submitted:
        """Applies a command in the whole cluster; `done` hears the reply, once.

        Args:
            done: hears `Refused` when the tree, or this node at once, says no, and `Unavailable`
                when there is no answer in time; the command may still be applied then.
            timeout_ms: 0 = as long as it takes.
        """
        submitted = Submitted(b"", done)
        try:
            if len(self._waiting) >= WAITING_MAX:
                raise ResourceExhausted("too many metadata changes are waiting")
            submitted.body = encode_command(validated(command, self.tree))
        except BrokerError as error:
            submitted.abandon()
            done(None, error)
            return submitted
        self._waiting.append(submitted)
        self._fill_window()
        if timeout_ms:
            self._clock.call_later(timeout_ms, self._expire, submitted)
        return submitted

    def read(self, done: Done) -> Submitted:
        """Calls back when the local tree has all that was recorded before."""
        # A command that changes nothing.
        return self.submit(OwnerGone(owner=""), done)

    @property
    def session(self) -> int:
        """Returns the store's own session."""
        return self._target.session

    def watch(self, watcher: Callable[[Change], None]) -> None:
        """Calls `watcher` for every change that this node applies, in order, before answers."""
        self._watchers.append(watcher)

    # --- EffectSink ----------------------------------------------------------------------

    def on_effects(self, effects: Sequence[Effect], replica: object) -> None:
        """Tells watchers what changed, and answers who waits."""
        self.publish_changes()
        session = self._target.session
        for effect in effects:
            if effect[0] == EFFECT_APPLIED and effect[1] == session:
                self._on_applied(effect[2], effect[3], effect[4])
            elif effect[0] == EFFECT_GAP and effect[1] == session:
                self._target.resend(effect[2])
        self._fill_window()

    def on_leader(self, group: int, leader: int | None, term: int) -> None:
        """Sends pending commands to the leader: it is new, or the link to it was broken."""
        self.leader = leader
        self.term = term
        if leader is not None and self._target.pending:
            self._target.resend(self._applied)

    def on_link_frame(
        self, node: int, kind: int, group: int, a: int, b: int, c: int, d: int, body: bytes
    ) -> None:
        """Nothing: every node has a replica of the tree and hears its answers from there."""

    def on_replica_gone(self) -> None:
        """Nothing: a node whose replica of the tree has stopped ends."""

    def on_version_raised(self, replica: object) -> None:
        """Nothing: what proposes looks at the version in force."""

    def on_restored(self) -> None:
        """The tree was replaced by a snapshot."""
        self.publish_changes()

    def publish_changes(self) -> None:
        """Hands the machine's changes to the watchers."""
        changes = self.tree.changes
        if changes:
            self.tree.changes = []
            calls = [partial(watcher, change) for change in changes for watcher in self._watchers]
            run_each(calls, call, pass_on)

    # --- inside --------------------------------------------------------------------------

    def _fill_window(self) -> None:
        while self._waiting and len(self._target.pending) < WINDOW:
            submitted = self._waiting.popleft()
            if submitted.done is None:
                continue
            body = submitted.body
            seq = self._target.command(CMD_METADATA, 0, 0, len(body), body)
            self._answers[seq] = submitted
            if self._resend_timer is None:
                self._progress_ms = self._clock.monotonic_ms()
                self._resend_timer = self._clock.call_later(RESEND_AFTER_MS, self._on_resend_timer)

    def _on_applied(self, seq: int, status: int, reply: object) -> None:
        if seq > self._applied:
            self._applied = seq
            self._progress_ms = self._clock.monotonic_ms()
            self._target.applied(seq)
        submitted = self._answers.pop(seq, None)
        if submitted is None or submitted.done is None:
            return
        done, submitted.done = submitted.done, None
        if status == STATUS_OK:
            done(reply, None)
        else:
            assert isinstance(reply, list | tuple)
            done(None, refusal_from_builtins(list(reply)))

    def _expire(self, submitted: Submitted) -> None:
        done, submitted.done = submitted.done, None
        if done is not None:
            done(None, too_slow())

    def _on_resend_timer(self) -> None:
        # A batch can be lost without anybody noticing: a link that broke just then.
        self._resend_timer = None
        if not self._target.pending:
            return
        now = self._clock.monotonic_ms()
        if now - self._progress_ms >= RESEND_AFTER_MS and self.leader is not None:
            self._progress_ms = now
            self._target.resend(self._applied)
        self._resend_timer = self._clock.call_later(RESEND_AFTER_MS, self._on_resend_timer)


class MetadataSink:
    """The `EffectSink` with which group 0 is opened. The store, whose builder the group has, is
    attached later."""

    def __init__(self) -> None:
        self._store: MetadataStore | None = None
        self._leader: tuple[int, int | None, int] | None = None

    def attach(self, store: MetadataStore) -> None:
        """Hands over to the store, which hears who leads."""
        self._store = store
        if self._leader is not None:
            store.on_leader(*self._leader)

    def on_effects(self, effects: Sequence[Effect], replica: object) -> None:
        """See `EffectSink`."""
        if self._store is not None:
            self._store.on_effects(effects, replica)

    def on_leader(self, group: int, leader: int | None, term: int) -> None:
        """See `EffectSink`."""
        self._leader = (group, leader, term)
        if self._store is not None:
            self._store.on_leader(group, leader, term)

    def on_link_frame(
        self, node: int, kind: int, group: int, a: int, b: int, c: int, d: int, body: bytes
    ) -> None:
        """Nothing: see `MetadataStore`."""

    def on_replica_gone(self) -> None:
        """Nothing: see `MetadataStore`."""

    def on_version_raised(self, replica: object) -> None:
        """Nothing: see `MetadataStore`."""

    def on_restored(self) -> None:
        """The tree was replaced by a snapshot."""
        if self._store is not None:
            self._store.on_restored()


def too_slow() -> Unavailable:
    """No answer in time."""
    return Unavailable("the metadata store has no majority, or is too slow")
