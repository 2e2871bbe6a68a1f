"""Consumers with a filter: what they get, in which order, and what stays."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.filters import encoded
from convoymq.messages.amqp10.values import Described, Symbol, Value
from convoymq.messages.record import content_of, names_of
from convoymq.model.errors import PreconditionFailed
from convoymq.model.tables import Table
from convoymq.queues.interface import Modification
from convoymq.queues.quorum.filtering import Cursor
from convoymq.queues.quorum.machine import QuorumMachine
from tests.unit.queues.quorum.cluster import NODES, Events, spec
from tests.unit.queues.quorum.test_reservation_client import Reserved

EACH = pytest.mark.parametrize("node", NODES)


def selecting(text: str, number: int = 1) -> Any:
    """A consumer with credit and a filter."""
    sql: dict[Value, Value] = {Symbol("sql-filter"): Described(Symbol("amqp:sql-filter"), text)}
    return spec(number, credited=True, filters=encoded(sql))


def kept(n: int, priority: int | None = None, expiration: str | None = None) -> tuple[bytes, int]:
    """A record that is known by its number, and the flags of its ENQUEUE."""
    headers = Table.of({"n": n})
    made = Properties(headers=headers, priority=priority, expiration=expiration)
    flags = (priority is not None) << 1 | (expiration is not None) << 2
    return names_of("", "q") + content_of(made, b""), flags


def numbers(events: Events) -> list[int]:
    return [NUMBERS[body] for body in events.bodies()]


NUMBERS = {kept(n, priority)[0]: n for n in range(200) for priority in (None, 9)}


class Filtered(Reserved):
    newest = QuorumMachine.VERSION

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for node in self.nodes.values():
            if node.own is not None:
                node.own.machine.set_version(QuorumMachine.VERSION)
        self.publisher, _ = self.nodes[1].open()
        self.published = 0

    @property
    def machine(self) -> QuorumMachine:
        machine = self.nodes[1].own.machine  # type: ignore[union-attr]
        assert isinstance(machine, QuorumMachine)
        return machine

    def publish(self, *which: int, priority: int | None = None) -> None:  # type: ignore[override]
        for n in which:
            self.published += 1
            record, flags = kept(n, priority)
            self.publisher.target.publish([record], 0, self.published, flags)

    async def settle(self) -> None:
        """Runs until nothing happens any more."""
        for _ in range(60):
            await asyncio.sleep(0)
            self.run()

    async def consume(self, node: int, text: str, limit: int) -> tuple[Any, Events]:
        client, events = self.nodes[node].open()
        client.subscribe(selecting(text))
        client.grant(1, limit)
        await self.settle()
        return client, events

    async def end(self) -> None:
        for node in self.nodes.values():
            for client in list(node.queue._clients.values()):
                client.close()
        await self.settle()


@EACH
async def test_a_consumer_gets_what_it_wants_and_the_rest_stays(node: int) -> None:
    cluster = Filtered()
    cluster.publish(*range(10))
    client, events = await cluster.consume(node, "n % 2 = 1", 3)
    assert numbers(events) == [1, 3, 5]
    client.grant(1, 10)
    await cluster.settle()
    assert numbers(events) == [1, 3, 5, 7, 9]
    cluster.publish(*range(10, 14))
    await asyncio.sleep(0.01)
    await cluster.settle()
    assert numbers(events)[5:] == [11, 13]
    assert cluster.machine.backlog.ready() == 7
    other, all_of_them = cluster.nodes[2].open()
    other.subscribe(spec())
    cluster.run()
    assert numbers(all_of_them) == [0, 2, 4, 6, 8, 10, 12]
    await cluster.end()


@EACH
async def test_a_drain_gets_all_that_is_wanted_before_its_answer(node: int) -> None:
    cluster = Filtered()
    client, events = await cluster.consume(node, "n > 6", 0)
    cluster.publish(*range(10))
    cluster.run()
    client.grant(1, 100, drain=True)
    await cluster.settle()
    assert numbers(events) == [7, 8, 9]
    assert events.heard[-1] == ("credit", 1, 3, 0)
    cluster.publish(10)
    await cluster.settle()
    assert numbers(events) == [7, 8, 9], "a drained link has no credit"
    client.grant(1, 4)
    await cluster.settle()
    assert numbers(events)[3:] == [10]
    await cluster.end()


async def test_what_comes_back_comes_before_what_is_fresh() -> None:
    cluster = Filtered()
    cluster.publish(*range(6))
    client, events = await cluster.consume(2, "n % 2 = 1", 2)
    client.return_(1, (0, 1), failed=True)
    await cluster.settle()
    client.grant(1, 5)
    await cluster.settle()
    assert numbers(events) == [1, 3, 1, 3, 5]
    assert [each[2:] for each in events.heard if each[0] == "message"][2] == (1, 1)
    assert {run[5] for run in cluster.machine.backlog.ready_runs()} == {0}
    await cluster.end()


async def test_a_higher_priority_comes_first() -> None:
    cluster = Filtered()
    client, events = await cluster.consume(1, "n % 2 = 1", 0)
    cluster.publish(1, 2, 3)
    cluster.publish(5, 6, 7, priority=9)
    client.grant(1, 4)
    await cluster.settle()
    assert numbers(events) == [5, 7, 1, 3]
    await cluster.end()


async def test_undeliverable_here_goes_to_another_consumer_that_wants_it() -> None:
    cluster = Filtered(delivery_limit=5)
    cluster.publish(1, 2)
    one, first = await cluster.consume(1, "n = 1", 1)
    _, second = await cluster.consume(2, "n = 2", 5)
    _, got = await cluster.consume(3, "n < 2", 5)
    assert (numbers(first), numbers(second), numbers(got)) == ([1], [2], [])
    one.return_(1, (0, 0), failed=False, modification=Modification(undeliverable=True))
    await cluster.settle()
    assert numbers(got) == [1]
    one.grant(1, 5)
    await cluster.settle()
    assert numbers(first) == [1]
    await cluster.end()


async def test_what_has_expired_is_not_handed_out() -> None:
    cluster = Filtered()
    cluster.publish(2)
    record, flags = kept(1, expiration="50")
    cluster.publisher.target.publish([record], 0, 9, flags)
    cluster.run()
    cluster.wait(100)
    _, events = await cluster.consume(1, "n = 1", 1)
    assert numbers(events) == []
    assert cluster.machine.backlog.dropped.get("expired") == 1
    await cluster.end()


async def test_a_single_active_consumer_has_no_filter() -> None:
    cluster = Filtered(single_active=1)
    client, events = cluster.nodes[1].open()
    client.subscribe(selecting("n = 1"))
    await cluster.settle()
    assert events.heard[-1][:2] == ("subscribed", 1)
    assert isinstance(events.heard[-1][2], PreconditionFailed)
    assert "which cannot have a filter" in str(events.heard[-1][2])
    await cluster.end()


async def test_no_message_stays_that_a_consumer_with_credit_wants() -> None:
    """Consumers with and without filters, on all nodes, that settle, return and end; leaders
    change. Each message is held once at a time, and none is left that somebody waits for."""
    for seed in range(4):
        random, cluster = Random(seed), Filtered()
        consumers: list[tuple[Any, Events, int]] = []
        limits: dict[int, int] = {}
        for _ in range(25):
            step = random.random()
            if step < 0.3:
                first = random.randrange(150)
                cluster.publish(*range(first, first + random.randrange(1, 40)))
            elif step < 0.5 or not consumers:
                rest = random.randrange(3)
                client, events = await cluster.consume(random.choice(NODES), f"n % 3 = {rest}", 5)
                consumers.append((client, events, rest))
                limits[len(consumers) - 1] = 5
            elif step < 0.6:
                cluster.elect(random.choice((1, 2, 3)))
            else:
                which = random.randrange(len(consumers))
                client, events, _ = consumers[which]
                held = (0, max(len(events.messages) - 1, 0))
                if random.random() < 0.5:
                    client.settle(1, held)
                else:
                    client.return_(1, held, failed=random.random() < 0.5)
                limits[which] += random.randrange(10)
                client.grant(1, limits[which], drain=random.random() < 0.2)
            await cluster.settle()
        await asyncio.sleep(0.15)
        for _ in range(4):
            await cluster.settle()
        for which, (client, events, rest) in enumerate(consumers):
            assert all(n % 3 == rest for n in numbers(events)), seed
            known = cluster.machine.consumers.find(client.session, 1)
            assert known is not None
            filters = selecting(f"n % 3 = {rest}").filters
            if known.room() > 0:
                reader = cluster.nodes[1].queue.filter_reader
                wanted = await reader.find(filters, Cursor(), 10, wait=False)
                assert not wanted.messages, (seed, which)
        await cluster.end()
