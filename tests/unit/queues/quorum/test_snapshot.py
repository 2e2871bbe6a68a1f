"""Snapshots of the quorum queue's machine: what is in them, and which are refused."""

from __future__ import annotations

import msgspec
import pytest

from convoymq.kernels import batch
from convoymq.queues.quorum.invariants import check_invariants
from convoymq.queues.quorum.machine import QuorumMachine
from tests.unit.queues.quorum.support import (
    A,
    B,
    Queue,
    apply,
    in_turn,
    replies,
    single,
)


def test_what_went_to_the_tail_is_in_a_snapshot_in_live_ranges_and_purged() -> None:
    queue = Queue(delivery_limit=-1)
    queue.log.checkout(B, 1, 1)
    queue.log.publish(A, [1])
    queue.step()
    queue.log.publish(A, [1])
    queue.log.return_(B, 1, 0, 0)
    queue.step()
    machine = queue.machine
    assert list(machine.live_ranges()) == [(1, 2)]
    assert machine.totals()["returned_ready"] == 1
    other = QuorumMachine()
    other.restore(machine.snapshot())
    assert other.snapshot() == machine.snapshot()
    check_invariants(other)
    assert len(machine.state_snapshot()) == 2
    queue.log.command(A, batch.CMD_PURGE)
    assert replies(queue.step(), A)[-1][2] == 1
    assert machine.backlog.ready() == 0


def test_who_is_followed_later_is_in_a_snapshot() -> None:
    queue = single()
    in_turn(queue)
    queue.log.cancel(A, 1)
    queue.step()
    other = QuorumMachine()
    other.restore(queue.machine.snapshot())
    check_invariants(other)
    queue.log.settle(A, 1, 0, 0)
    entry = queue.log.seal()
    assert apply(other, entry) == apply(queue.machine, entry)
    assert other.snapshot() == queue.machine.snapshot()


def test_a_damaged_snapshot_is_refused() -> None:
    machine = QuorumMachine()
    good = machine.snapshot()
    for bad in (b"", b"\xc1", good[:-1], good.replace(b"\xa6format\x03", b"\xa6format\x09")):
        with pytest.raises(ValueError, match=r"."):
            QuorumMachine().restore(bad)


def test_a_snapshot_of_another_format_is_refused() -> None:
    known = msgspec.msgpack.decode(QuorumMachine().snapshot())
    known["format"] = 2
    with pytest.raises(ValueError, match="format 2 is not known"):
        QuorumMachine().restore(msgspec.msgpack.encode(known))
