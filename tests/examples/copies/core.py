"""The core of a queue of a primary and copies, on one of its nodes. Sans-IO.

A view is a number and the nodes that have the queue, in order; the tree records one after another.
The first member is the primary. It numbers what is done to the queue, sends it to the copies, and
confirms it when all of the view have it. The primary proposes a view without a copy that it cannot
reach; the first copy that is left proposes one without the primary. A copy that becomes the primary
has all that was ever confirmed. Messages of another view are dropped.

    message                     from     to
    ASK     view                copy     primary   it lacks what came before
    WHOLE   view, number, state primary  copy      in place of all that it has
    OP      view, number, op    primary  copy      the next one
    STORED  view, number        copy     primary   it has all up to there

Invariants: a confirmed op is in the store of every member of its view. A node without a state
never leads: it was started after the queue was made, and has not got the whole yet.

Effects, for the shell to carry out in order:
    ("send", node, message), ("confirmed", number), ("lead",), ("yield",)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any, Protocol

ASK, WHOLE, OP, STORED = range(4)
Message = tuple[int, int, int, bytes]
"""(kind, view, number, op or state)."""


class Store(Protocol):
    """What ops change. Equal ops make equal stores."""

    def apply(self, number: int, op: bytes) -> None:
        """Carries out an op."""

    def snapshot(self) -> bytes:
        """Returns the whole state."""

    def restore(self, state: bytes) -> None:
        """Replaces the whole state."""


class Copies:
    """See the module text."""

    def __init__(self, node: int, store: Store, *, is_founder: bool) -> None:
        """
        Args:
            is_founder: this node begins the queue, which is empty.
        """
        self.node = node
        self.store = store
        self.view = -1
        self.members: tuple[int, ...] = ()
        self.stored = 0
        """Number of the last op in the store."""
        self.confirmed = 0
        self.effects: deque[tuple[Any, ...]] = deque()
        self._has_state = is_founder
        self.is_whole = is_founder
        """The store is the primary's, of this view."""
        self._lost: set[int] = set()
        """Members whose link broke, or whose process may be another one by now: they go."""
        self._acked: dict[int, int] = {}
        self._open: deque[int] = deque()
        """Ops that some member lacks."""

    @property
    def primary(self) -> int | None:
        """Returns the node that leads, if it is not known to be away."""
        first = self.members[0]
        return None if first in self._lost else first

    @property
    def is_idle(self) -> bool:
        """Returns whether no op waits for a member."""
        return not self._open

    @property
    def leads(self) -> bool:
        """Returns whether this node is the primary."""
        return self._has_state and self.members[:1] == (self.node,)

    def take_view(self, view: int, members: tuple[int, ...], away: Collection[int]) -> None:
        """The tree records a view. `away`: nodes that cannot be reached now."""
        if view <= self.view:
            return
        led = self.leads
        self.view, self.members = view, members
        self._lost = (self._lost | set(away)) & set(members)
        self.is_whole = self.leads
        self._acked.clear()
        if led and not self.leads:
            # Clients are told that nobody knows of these; a later primary may have them.
            self._open.clear()
            self.effects.append(("yield",))
        elif self.leads and not led:
            self.effects.append(("lead",))
        if self.leads:
            for copy in members[1:]:
                self._send_whole(copy)
            self._confirm()
        elif self.node in members:
            self._send(members[0], ASK, 0)

    def submit(self, op: bytes) -> int:
        """As primary: does something to the queue; returns its number."""
        assert self.leads
        self.stored += 1
        self.store.apply(self.stored, op)
        self._open.append(self.stored)
        for copy in self.members[1:]:
            self._send(copy, OP, self.stored, op)
        self._confirm()
        return self.stored

    def on_message(self, node: int, message: Message) -> None:
        """A message of another member."""
        kind, view, number, body = message
        if view != self.view or self.node not in self.members:
            return
        if self.leads:
            if kind == ASK:
                self._send_whole(node)
            elif kind == STORED:
                self._acked[node] = max(number, self._acked.get(node, 0))
                self._confirm()
            return
        if node != self.members[0]:
            return
        if kind == WHOLE and not (self.is_whole and number < self.stored):
            self.store.restore(body)
            self.stored = number
            self._has_state = self.is_whole = True
        elif kind == OP and self.is_whole and number == self.stored + 1:
            self.store.apply(number, body)
            self.stored = number
        elif kind == OP and not (self.is_whole and number <= self.stored):
            self._send(node, ASK, 0)
            return
        self._send(node, STORED, self.stored)

    def on_lost(self, node: int) -> None:
        """The link to a node broke."""
        if node in self.members:
            self._lost.add(node)

    def proposal(self, *, waited: bool) -> tuple[int, tuple[int, ...]] | None:
        """Returns the view that this node proposes to the tree; None: the one in force is good, or
        another member sees to it.

        Args:
            waited: the first copy that is left had time to take over from a primary that is away.
        """
        left = tuple(node for node in self.members if node not in self._lost)
        if left == self.members or not self._has_state or self.node not in left:
            return None
        if left[0] != self.node:
            if left[0] == self.members[0] or not waited:
                return None
            # It may have no state.
            left = (self.node, *(node for node in left if node != self.node))
        return self.view + 1, left

    def _confirm(self) -> None:
        low = min((self._acked.get(n, 0) for n in self.members[1:]), default=self.stored)
        while self._open and self._open[0] <= low:
            self.confirmed = self._open.popleft()
            self.effects.append(("confirmed", self.confirmed))

    def _send_whole(self, node: int) -> None:
        self._send(node, WHOLE, self.stored, self.store.snapshot())

    def _send(self, node: int, kind: int, number: int, body: bytes = b"") -> None:
        self.effects.append(("send", node, (kind, self.view, number, body)))
