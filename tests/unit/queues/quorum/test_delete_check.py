"""Conditions of queue.delete: judged by the queue's log, from machine version 2 on."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from convoymq.kernels import batch
from convoymq.model.errors import NotServed, PreconditionFailed
from convoymq.queues.quorum.machine import QuorumMachine
from convoymq.queues.quorum.questions import DELETE_CHECK, IN_USE, NOT_EMPTY
from convoymq.queues.sessions import APPLIED_OK, APPLIED_REJECTED
from convoymq.replication.machine import EFFECT_APPLIED
from tests.unit.queues.quorum.cluster import Cluster, publish, spec
from tests.unit.queues.quorum.support import Log, apply, session_id

ASKING = session_id(1, 1)
OTHER = session_id(2, 2)


class Asked:
    """A machine, and what it says to the question."""

    def __init__(self, version: int = 2) -> None:
        self.log = Log()
        self.machine = QuorumMachine({})
        self.machine.set_version(version)

    def ask(self, *, if_unused: bool = False, if_empty: bool = False) -> tuple[int, Any]:
        body = msgspec.msgpack.encode(
            {"op": DELETE_CHECK, "if_unused": if_unused, "if_empty": if_empty}
        )
        self.log.command(ASKING, batch.CMD_RESERVATION, count=len(body), body=body)
        effects = apply(self.machine, self.log.seal())
        return [each[3:5] for each in effects if each[0] == EFFECT_APPLIED and each[1] == ASKING][
            -1
        ]


def test_a_queue_without_consumers_and_messages_may_go() -> None:
    asked = Asked()
    assert asked.ask(if_unused=True, if_empty=True) == (APPLIED_OK, {"messages": 0})
    asked.log.publish(OTHER, [5, 5])
    assert asked.ask(if_unused=True) == (APPLIED_OK, {"messages": 2})
    assert asked.ask(if_empty=True) == (APPLIED_REJECTED, NOT_EMPTY)
    assert asked.ask(if_unused=True, if_empty=True) == (APPLIED_REJECTED, NOT_EMPTY)


def test_what_the_same_entry_says_before_counts() -> None:
    asked = Asked()
    asked.log.checkout(OTHER, 1)
    assert asked.ask(if_unused=True) == (APPLIED_REJECTED, IN_USE)
    assert asked.ask(if_empty=True) == (APPLIED_OK, {"messages": 0})
    asked.log.node_down(2)
    assert asked.ask(if_unused=True) == (APPLIED_REJECTED, IN_USE)
    asked.log.cancel(OTHER, 1)
    assert asked.ask(if_unused=True) == (APPLIED_OK, {"messages": 0})


def test_version_1_does_not_know_the_question() -> None:
    assert Asked(version=1).ask(if_unused=True) == (APPLIED_REJECTED, "malformed")


@pytest.mark.parametrize("node", [1, 4])
@pytest.mark.parametrize("version", [1, 2])
async def test_the_handle_of_any_node_asks_the_log(node: int, version: int) -> None:
    cluster = Cluster()
    for each in cluster.nodes.values():
        if each.own is not None:
            each.own.machine.set_version(version)
    queue = cluster.nodes[node].queue
    source, _ = cluster.nodes[2].open()
    source.subscribe(spec())
    publish(source, 1, 1)
    cluster.run()

    async def check(**conditions: bool) -> int:
        return await asked(cluster, queue.check_delete(**conditions))

    kind = NotServed if version == 1 else PreconditionFailed
    with pytest.raises(kind, match=r"if-unused flag set" if version == 1 else "in use"):
        await check(if_unused=True, if_empty=False)
    assert await check(if_unused=False, if_empty=False) in (0, 1)
    if version == 2:
        assert await check(if_unused=False, if_empty=True) == 0
        source.close()
        cluster.run()
        with pytest.raises(PreconditionFailed, match="not empty"):
            await check(if_unused=False, if_empty=True)


async def asked(cluster: Cluster, question: Any) -> int:
    """The answer, for which the cluster has to run."""
    task = asyncio.ensure_future(question)
    for _ in range(20):
        await asyncio.sleep(0)
        cluster.run()
    assert task.done()
    return int(await task)
