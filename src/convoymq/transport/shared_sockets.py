"""Listening sockets of a machine's processes, and the rule by which each of them accepts.

The supervisor binds each address of clients once and forks the processes, which all accept from the
same sockets. A process accepts while no other one has fewer clients: so clients are spread evenly,
whatever order the kernel wakes the processes in (ADR 0221). Numbers of clients are on a page of
memory that all processes have.

The HTTP addresses are served by one process at a time (ADR 0226). Each process writes on another
page when it looked last, and whether it serves.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
from collections.abc import Mapping, Sequence

from convoymq.model.config import Address
from convoymq.transport.listening import listen

Bound = Mapping[tuple[str, int], Sequence[socket.socket]]
"""Configured host and port -> sockets, which the processes inherit."""

CLOSED = -1
"""In place of a number of clients: the process does not accept."""

HUNG_MS = 3000
"""A process that has not looked for so long serves HTTP no more."""


class ClientCounts:
    """Number of clients of each process of a machine; processes count from 1."""

    def __init__(self, processes: int) -> None:
        self._page = memoryview(mmap.mmap(-1, 8 * processes)).cast("q")
        for process in range(1, processes + 1):
            self.set(process, CLOSED)

    def set(self, process: int, count: int) -> None:
        """Writes the number of clients of a process, or `CLOSED`."""
        self._page[process - 1] = count

    def others(self, process: int) -> dict[int, int]:
        """Returns the numbers of clients of the other processes that accept."""
        return {
            each: count
            for each, count in enumerate(self._page, 1)
            if each != process and count != CLOSED
        }


def bind(addresses: Sequence[Address]) -> Bound:
    """Binds the addresses of clients, which do not listen before a process opens them.

    Raises:
        OSError: an address cannot be bound; nothing is left open.
    """
    bound: dict[tuple[str, int], list[socket.socket]] = {}
    try:
        for address in addresses:
            bound[address.host, address.port] = listen(address.host, address.port, backlog=None)
    except OSError:
        for sockets in bound.values():
            for each in sockets:
                each.close()
        raise
    return bound


class SharedSockets:
    """One process's part in the listening sockets of its machine.

    Args:
        bound: what `bind` returned, before the process was forked.
    """

    def __init__(self, bound: Bound, counts: ClientCounts, process: int) -> None:
        self._bound = bound
        self._counts = counts
        self._process = process
        self._opened: dict[tuple[str, int], int] = {}
        """Addresses that this process accepts on -> backlog."""

    def open(self, host: str, port: int, backlog: int, clients: int) -> list[socket.socket]:
        """Returns duplicates of an address's sockets, which listen from now on."""
        self._opened[host, port] = backlog
        self.keep_open(clients)
        return [each.dup() for each in self._bound[host, port]]

    def keep_open(self, clients: int) -> None:
        """Tells the other processes how many clients this one has. To be called now and then: the
        last other process may have closed the sockets at the moment when this one opened them."""
        self.publish(clients)
        for address, backlog in self._opened.items():
            for each in self._bound[address]:
                each.listen(backlog)

    def publish(self, clients: int) -> None:
        """Tells the other processes how many clients this one has."""
        if self._opened:
            self._counts.set(self._process, clients)

    def may_accept(self, clients: int) -> bool:
        """Returns whether no other process that accepts has fewer clients than this one."""
        self.publish(clients)
        return clients <= min(self._counts.others(self._process).values(), default=clients)

    def close(self) -> None:
        """Accepts no more; the last process that does so has the system refuse connections."""
        if self._opened:
            self._opened.clear()
            end(self._bound, self._counts, self._process)


class TurnSockets(SharedSockets):
    """One process's part in the listening sockets of its machine that one process at a time serves.

    A process that serves goes on until it closes, dies or hangs; the first of the others follows.
    Two that began at one moment find each other at the next look: the first one goes on.
    """

    serves = False

    def look(self, now_ms: int) -> bool:
        """Returns whether this process serves. To be called several times in `HUNG_MS`.

        Args:
            now_ms: of the machine's monotonic clock.
        """
        others = {
            process: told % 2 == 1
            for process, told in self._counts.others(self._process).items()
            if now_ms - told // 2 < HUNG_MS
        }
        first = all(process > self._process for process in others)
        if self.serves:
            self.serves = not any(serves and k < self._process for k, serves in others.items())
        else:
            self.serves = first and not any(others.values())
        self.keep_open(2 * now_ms + self.serves)
        return self.serves


def end(bound: Bound, counts: ClientCounts, process: int) -> None:
    """Notes that a process does not accept any more. When no process does, connections are refused
    until the next one opens the addresses."""
    counts.set(process, CLOSED)
    if counts.others(process):
        return
    for sockets in bound.values():
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
