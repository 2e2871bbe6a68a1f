"""The referee's own rules: what it lets pass, and what stops a run."""

from __future__ import annotations


from convoymq.kernels import batch
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.sim.referee import Place, Referee
from tests.unit.queues.quorum.support import Log, apply, session_id

TIMEOUT_MS = 500
A, B = session_id(1), session_id(2)


class Queue:
    """A log with one message that is checked out to a consumer of node 2."""

    def __init__(self) -> None:
        self.log = Log()
        self.machine = QuorumMachine({"disconnect_timeout_ms": TIMEOUT_MS, "delivery_limit": -1})
        self.referee = Referee(1, -1, TIMEOUT_MS)
        self.log.publish(A, [12])
        self.log.checkout(B, 1)
        self.step()
        self.log.node_down(2)
        self.step()
        assert self.place is Place.HELD

    @property
    def place(self) -> Place:
        (message,) = self.referee.messages.values()
        return message.place

    def step(self, after_ms: int = 1) -> None:
        entry = self.log.seal(after_ms)
        effects = apply(self.machine, entry)
        self.referee.on_entry(entry.index, entry.data, effects)
        self.referee.sync(self.machine)
        self.referee.check_machine(self.machine)


def test_what_a_lost_node_settles_behind_the_time_limit_comes_too_late() -> None:
    """In one entry with the TICK: the message is ready again, and goes to who asks for it."""
    queue = Queue()
    queue.log.leader(batch.CMD_TICK)
    queue.log.node_up(2)
    queue.log.settle(B, 1, 0, 0)
    queue.log.checkout(A, 1)
    queue.step(TIMEOUT_MS)
    assert queue.place is Place.HELD
    assert queue.machine.totals()["acked"] == 0


def test_what_a_lost_node_settles_before_the_time_limit_is_settled() -> None:
    queue = Queue()
    queue.log.leader(batch.CMD_TICK)
    queue.log.settle(B, 1, 0, 0)
    queue.step(TIMEOUT_MS - 1)
    assert queue.place is Place.SETTLED


def test_a_node_that_is_back_in_time_keeps_what_it_has() -> None:
    queue = Queue()
    queue.log.node_up(2)
    queue.log.leader(batch.CMD_TICK)
    queue.log.settle(B, 1, 0, 0)
    queue.step(TIMEOUT_MS)
    assert queue.place is Place.SETTLED
