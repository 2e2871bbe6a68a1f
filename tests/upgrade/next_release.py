"""A node of the synthetic next release: `python -m tests.upgrade.next_release --config FILE`.

It stands for whatever comes next. The next version of the quorum queue's machine has

- one new command: MARK, which the leader proposes from time to time and which is counted;
- one changed rule: a failed delivery counts twice towards the delivery limit;
- one new field of the snapshot: the number of marks.

All of it is in force only when the log says so (ADR 0016). The modules run from source, because a
compiled class does not let a subclass change its inner methods.
"""

from __future__ import annotations

import sys
from typing import Any

PRESENT = 6
"""The newest version of the quorum queue's machine in this release."""
NEXT = PRESENT + 1
MARK = 200
RELEASE = "0.99.0"


def install() -> None:
    """Puts the next version in place of what this release has. Call before anything is imported."""
    from convoymq.sim.interpreted import use_source

    use_source()
    import convoymq

    convoymq.__version__ = RELEASE
    from convoymq.queues.quorum import driver
    from convoymq.queues.quorum import queue as handles
    from convoymq.replication import versions as supported

    machine, queue = next_machine(), next_queue()
    supported.MACHINES.append(machine.__module__)
    supported.register(machine)
    driver.QuorumMachine = machine  # type: ignore[misc]
    handles.QuorumQueue = queue  # type: ignore[misc]


def next_machine() -> Any:
    """The machine with the next version."""
    from convoymq.queues.quorum.deliveries import Deliveries
    from convoymq.queues.quorum.machine import COMMAND_TYPES, QuorumMachine
    from convoymq.queues.quorum.reservation_holder import ReservationHolder
    from convoymq.queues.reservations import Reservations
    from convoymq.replication.versions import command_table

    known = [kind for kind in range(256) if COMMAND_TYPES[PRESENT][kind >> 3] & 1 << (kind & 7)]
    table = command_table([*known, MARK])

    class NextDeliveries(Deliveries):
        def give_back(self, run: Any, failed: int, *more: Any) -> None:
            super().give_back(run, failed * 2 if self.machine.version >= NEXT else failed, *more)

    class NextQuorumMachine(QuorumMachine):
        VERSION = NEXT
        marks = 0

        def command_types(self, version: int) -> bytes:
            return table if version >= NEXT else super().command_types(version)

        def _leader_command(self, kind: int, *arguments: Any) -> None:
            if kind == MARK and self.version >= NEXT:
                self.marks += 1
            else:
                super()._leader_command(kind, *arguments)

        def _clear(self) -> None:
            super()._clear()
            self.marks = 0
            self.deliveries = NextDeliveries(self, self.backlog, self.consumers, self.dead_letters)
            holder = ReservationHolder(self, self.backlog, self.consumers, self.deliveries)
            self.reservations = Reservations(holder)

        def _pack(self) -> dict[str, Any]:
            state = super()._pack()
            return state if self.version < NEXT else {**state, "marks": self.marks}

        def _restore(self, known: dict[str, Any]) -> None:
            super()._restore(known)
            self.marks = known.get("marks", 0)

    return NextQuorumMachine


def next_queue() -> Any:
    """The queue whose leader uses the new command, once it may."""
    from convoymq.queues.quorum.queue import QuorumQueue

    class NextQuorumQueue(QuorumQueue):
        def tick(self) -> None:
            super().tick()
            replica = self._host.replica(self.group)
            if replica is not None and replica.is_leader and replica.machine.version >= NEXT:
                replica.propose(MARK)

    return NextQuorumQueue


if __name__ == "__main__":
    install()
    from convoymq.cli.serve import main

    sys.exit(main(sys.argv[1:]))
