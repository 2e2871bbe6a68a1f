"""Migration of a classic queue to another type (ADR 0128): its clients go on in the successor, and
at its home it stands still before.

A file beside the log says that the queue is frozen, for when the node is started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from heapq import merge
from typing import TYPE_CHECKING

from convoymq.model.errors import StorageFault, Unavailable
from convoymq.queues.copying import CopiedPage, page_of
from convoymq.queues.interface import LETTERS_LEAVE, StoredRun

if TYPE_CHECKING:
    from convoymq.kernels.batch import CommandBuilder
    from convoymq.model.errors import Refused, Subject
    from convoymq.queues.classic.client import ClassicClient
    from convoymq.queues.classic.host import ClassicHost
    from convoymq.queues.classic.limits import Limits
    from convoymq.queues.classic.machine import ClassicMachine
    from convoymq.queues.classic.runs import Run
    from convoymq.queues.interface import Queue
    from convoymq.storage.types import Directory

FROZEN = "frozen-"
"""Begins the name of the file of a queue that is frozen; the successor's group follows."""


class Replaceable:
    """Part of `ClassicQueue`, on every node."""

    host: ClassicHost
    builder: CommandBuilder
    group: int
    clients: dict[int, ClassicClient]
    known_seqs: tuple[int, Mapping[int, int]]
    if TYPE_CHECKING:

        def forget(self, client: ClassicClient) -> None: ...
        def _on_first(self) -> None: ...
        def tell(self, client: ClassicClient, step: Callable[[ClassicClient], None]) -> None: ...
        def tell_all(self, step: Callable[[ClassicClient], None]) -> None: ...
        def known_seq(self, session: int, successor: int) -> int | None: ...

    def hold(self, successor: int, seqs: Mapping[int, int]) -> None:
        """See `Queue`."""
        self.known_seqs = (successor, dict(seqs))
        self.tell_all(lambda client: client.on_flow(True))

    def _tell_frozen(self, client: ClassicClient) -> None:
        """Has a channel wait that was opened meanwhile."""
        if self.known_seqs[0]:
            self.tell(client, lambda told: told.on_flow(True))

    def release(self) -> None:
        """See `Queue`."""
        if self.known_seqs[0]:
            self.known_seqs = (0, {})
            for client in [each for each in self.clients.values() if each.closed]:
                self.forget(client)
            self.tell_all(lambda client: client.on_flow(False))
            if self.builder.used:
                self._on_first()

    def replace(self, successor: Queue) -> None:
        """See `Queue`."""
        if self.builder.used:
            # Sealed, so that it can be published elsewhere.
            self.builder.take_forward(self.group, 0)
        group = successor.group
        self.tell_all(
            lambda client: client.replace(successor, self.known_seq(client.session, group))
        )


class Freezable(Replaceable):
    """Part of `LocalQueue`."""

    machine: ClassicMachine
    limits: Limits
    durable: bool
    ended: Refused | None
    _directory: Directory
    _frozen: int
    _down_meanwhile: frozenset[int] = frozenset()
    """Nodes whose links broke while the queue was frozen."""
    if TYPE_CHECKING:

        @property
        def subject(self) -> Subject: ...
        def settle_round(self, now_ms: int) -> None: ...
        def _carry_out(self) -> None: ...
        async def written(self) -> None: ...
        def node_down(self, node: int, now_ms: int) -> None: ...

    @property
    def frozen(self) -> int:
        """See `Queue`."""
        return self._frozen

    @property
    def stands_still(self) -> bool:
        """Returns whether no command is carried out: the queue is frozen, or its node is paused."""
        return bool(self._frozen) or self.host.is_paused

    def check_moving(self) -> None:
        """Raises Unavailable when the queue stands still."""
        if self._frozen:
            raise Unavailable(f"{self.subject} is being migrated")
        if self.host.is_paused:
            raise Unavailable(f"{self.subject} waits: its node reaches no majority")

    def migration_obstacle(self) -> str:
        """See `Queue`."""
        if self.machine.reservations:
            return "messages are reserved"
        return LETTERS_LEAVE if self.machine.leaving.count else ""

    def settle_leaving(self) -> None:
        """Has the log know that dead letters are published, also while the queue is frozen."""
        if self._frozen:
            self._carry_out()
        else:
            self.settle_round(self.host.now_ms())

    async def freeze(self, successor: int, timeout: float) -> None:
        """See `Queue`. A file beside the log says so, for when the node is started again."""
        self.settle_round(self.host.now_ms())
        self._frozen = successor
        noted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: BaseException | None) -> None:
            if noted.done():
                return
            if error is None:
                noted.set_result(None)
            else:
                noted.set_exception(error)

        self.host.writer.run(partial(self._note_frozen, successor), done)
        try:
            async with asyncio.timeout(timeout):
                await noted
                await self.written()
        except TimeoutError:
            raise Unavailable(f"{self.subject} was not frozen in time") from None
        except (OSError, StorageFault) as error:
            raise Unavailable(f"{self.subject} cannot be frozen: {error}") from error

    def _note_frozen(self, successor: int) -> None:
        """Makes the file, as the worker."""
        folder = str(self.group)
        self._directory.make(folder)
        self._directory.open(f"{folder}/{FROZEN}{successor}", create=True).close()
        self._directory.sync(folder)

    def _frozen_before(self) -> int:
        names = self._directory.list(str(self.group)) if self.durable else []
        return max((int(n[len(FROZEN) :]) for n in names if n.startswith(FROZEN)), default=0)

    def _is_down_later(self, node: int) -> bool:
        """Returns whether the queue is frozen, and takes note of a node whose link broke."""
        if self._frozen:
            self._down_meanwhile |= {node}
        return bool(self._frozen)

    def thaw(self) -> None:
        """See `Queue`."""
        if not self._frozen or self.ended is not None:
            return
        # Behind what makes the file. One that stays is that of a migration which has ended.
        name = f"{self.group}/{FROZEN}{self._frozen}"
        self.host.writer.run(lambda: self._directory.remove(name), lambda _error: None)
        self._frozen = 0
        now_ms = self.host.now_ms()
        down, self._down_meanwhile = self._down_meanwhile, frozenset()
        for node in sorted(down):
            self.node_down(node, now_ms)
        self.settle_round(now_ms)

    def applied_seqs(self) -> dict[int, int]:
        """See `Queue`."""
        return {number: session.seq for number, session in self.machine.sessions.items()}

    def stored_count(self) -> int:
        """See `Queue`."""
        machine = self.machine
        held = sum(run.count for run in machine.held_runs())
        return machine.ready_count + held + machine.aside.count

    def stored_runs(self, since: int = 0) -> Iterator[StoredRun]:
        """See `Queue`; from a position on."""
        try:
            for run, is_held in _stored(self.machine, since):
                block, command = self.machine.body_of(run.block)
                skip = max(0, since - run.position)
                yield StoredRun(
                    block, command, run.first + skip, run.count - skip,
                    run.acquired_count + is_held, run.position + skip, spreads=True,
                )  # fmt: skip
        except (OSError, StorageFault) as error:
            raise Unavailable(f"{self.subject} cannot be read: {error}") from error

    async def copy_page(self, after: int, upto: int) -> CopiedPage:
        """See `Queue`."""
        if self.ended is not None:
            raise self.ended
        self.settle_round(self.host.now_ms())
        newest = self.machine.next_position - 1
        # In one go: what is read from disk while the queue moves on may not come twice.
        return page_of(self.stored_runs(after + 1), after, newest if upto < 0 else upto)

    def replace(self, successor: Queue) -> None:
        """See `Queue`. Clients elsewhere hear of it from the tree."""
        super().replace(successor)
        self.machine.delete("migrated")
        self.machine.effects.clear()


def _stored(machine: ClassicMachine, since: int) -> Iterator[tuple[Run, bool]]:
    """Yields what is ready, held or about to leave from a position on, and whether somebody holds
    it, in the order in which it was published. Raises StorageFault and OSError."""
    ready = ((run, False) for run in machine.backing.by_position(since))
    beside = [*((run, True) for run in machine.held_runs()), *((r, False) for r in machine.aside)]
    beside += ((run, False) for run in machine.leaving)
    behind = (each for each in beside if each[0].position + each[0].count > since)
    held = sorted(behind, key=lambda each: each[0].position)
    yield from merge(ready, held, key=lambda each: each[0].position)
