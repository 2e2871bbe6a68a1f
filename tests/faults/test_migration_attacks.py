"""Migrations at bad moments: what expires, dies or closes meanwhile, answers and trees that are
late, alarms, long pauses, and messages that only the new type knows how to hold back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.metadata.commands import EndMigration
from convoymq.model.errors import Unavailable
from tests.faults.test_migration_rules import (
    PERSISTENT,
    ask,
    connect,
    fill,
    migrated,
    open_at_all,
    take,
)
from tests.faults.traffic import until
from tests.patience import PATIENCE_S
from tests.running import Nodes
from tests.running import until as in_time

TYPES = pytest.mark.parametrize(("type", "to"), [("classic", "quorum"), ("quorum", "classic")])
DEAD = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


def declare(nodes: Nodes, name: str, type: str, **arguments: object) -> None:
    connection = connect(nodes)
    arguments = {"x-queue-type": type, **{k.replace("_", "-"): v for k, v in arguments.items()}}
    connection.channel().queue_declare(name, durable=True, arguments=arguments)
    connection.close()


def publish(nodes: Nodes, name: str, count: int, node: int = 1, **properties: Any) -> None:
    connection = connect(nodes, node)
    channel = connection.channel()
    channel.confirm_delivery()
    made = pika.BasicProperties(delivery_mode=2, **properties)
    for number in range(count):
        channel.basic_publish("", name, str(number).encode(), made)
    connection.close()


def hold(nodes: Nodes, name: str, count: int) -> Any:
    """Returns a channel that holds messages."""
    channel = connect(nodes).channel()
    got: list[int] = []
    channel.basic_consume(name, lambda *_: got.append(1))

    def has_all() -> bool:
        channel.connection.process_data_events(0.05)
        return len(got) >= count

    until(has_all, "messages are missing")
    return channel


async def undo(nodes: Nodes, record: Any, successor: int, node: int = 1) -> None:
    """Undoes a migration as a new leader would."""
    end = EndMigration(
        vhost="/", name=record.name, group=record.group, successor=successor, switched=False
    )
    assert await nodes[node].broker.metadata.execute(end, PATIENCE_S)


@TYPES
async def test_what_expires_in_an_undone_migration_dies_once(
    tmp_path: Path, type: str, to: str
) -> None:
    async with Nodes(tmp_path) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "dead", 0)
        await asyncio.to_thread(declare, nodes, "q", type, **DEAD)
        await asyncio.to_thread(publish, nodes, "q", 10, expiration="2000")
        await asyncio.to_thread(publish, nodes, "q", 30)
        broker = nodes[1].broker
        record, successor = await broker.migrations.begin("/", "q", to, rate=5)
        copy = broker.local.get(successor)
        await in_time(lambda: broker.migrations._outcomes[successor].copied >= 11)
        # Longer than the copies' own time: they began anew.
        await asyncio.sleep(2.5)
        assert (await copy.counts())[0] >= 11
        await undo(nodes, record, successor)
        assert (await broker.migrations.wait(record, successor, PATIENCE_S)).state == "undone"
        dead = await asyncio.to_thread(take, nodes, "dead", 10)
        assert [number for number, _ in dead] == list(range(10))
        assert len(await asyncio.to_thread(take, nodes, "q", 30)) == 30
        assert len(await asyncio.to_thread(take, nodes, "dead", 0)) == 0


@TYPES
async def test_what_expires_meanwhile_dies_once_in_the_new_queue(
    tmp_path: Path, type: str, to: str
) -> None:
    """Some of it is held by a consumer, and marked as redelivered before it dies."""
    async with Nodes(tmp_path) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "dead", 0)
        await asyncio.to_thread(declare, nodes, "q", type, **DEAD)
        await asyncio.to_thread(publish, nodes, "q", 5, expiration="5000")
        channel = await asyncio.to_thread(hold, nodes, "q", 5)
        await asyncio.to_thread(publish, nodes, "q", 30)
        assert await migrated(nodes, "q", to, rate=5) == (35, 35, "migrated", "")
        await asyncio.to_thread(channel.connection.close)
        dead = await asyncio.to_thread(take, nodes, "dead", 5)
        assert sorted(number for number, _ in dead) == list(range(5))
        assert len(await asyncio.to_thread(take, nodes, "q", 30)) == 30


async def test_an_end_that_is_answered_late_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Nodes(tmp_path) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "q", 5)
        broker = nodes[1].broker
        execute = broker.metadata.execute

        async def late(command: Any, timeout: float = 30.0) -> object:
            reply = await execute(command, timeout)
            if isinstance(command, EndMigration):
                raise Unavailable("no answer in time")
            return reply

        monkeypatch.setattr(broker.metadata, "execute", late)
        before = broker.counters.queues_migrated
        assert await migrated(nodes, "q", "quorum") == (5, 5, "migrated", "")
        assert broker.counters.queues_migrated == before + 1


async def test_an_end_that_comes_while_the_tree_is_rebuilt_is_not_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the switch is late, and the tree of the node that migrates starts anew."""
    async with Nodes(tmp_path) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "q", 5)
        broker = nodes[1].broker
        migrations, local, tree = broker.migrations, broker.local, broker.metadata.tree
        execute, followed = broker.metadata.execute, local._followed
        ends: list[Any] = []

        async def late(command: Any, timeout: float = 30.0) -> object:
            if not isinstance(command, EndMigration):
                return await execute(command, timeout)
            ends.append(command)
            local._followed = 1 << 40
            raise Unavailable("no answer in time")

        monkeypatch.setattr(broker.metadata, "execute", late)
        record, successor = await migrations.begin("/", "q", "quorum")
        queue = local.get(record.group)
        await in_time(lambda: len(ends) >= 2)
        # As the tree looks before it has either of them.
        with monkeypatch.context() as rebuilt:
            rebuilt.setattr(tree.queue_index, "by_group", {})
            await in_time(lambda: len(ends) >= 4)
            assert queue.frozen == successor
            assert (await migrations.wait(record, successor, 0)).state == "migrating"
        assert await execute(ends[0], PATIENCE_S)
        local._followed = followed
        local.reconcile()
        assert await migrations.wait(record, successor, PATIENCE_S) == (5, 5, "migrated", "")
        assert len(await asyncio.to_thread(take, nodes, "q", 5)) == 5


@TYPES
async def test_clients_of_a_node_whose_tree_is_rebuilt_go_on(
    tmp_path: Path, type: str, to: str
) -> None:
    """It hears of the switch only when its tree is there again: nothing is confirmed before."""
    async with Nodes(tmp_path, 3) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "q", 40, type)
        broker, other = nodes[1].broker, nodes[2].broker
        record, successor = await broker.migrations.begin("/", "q", to, rate=20)
        await in_time(lambda: broker.migrations._outcomes[successor].copied > 0)
        handle = other.local.find(record)
        await in_time(lambda: handle.known_seqs[0] == successor)
        followed, other.local._followed = other.local._followed, 1 << 40
        confirmed: list[str] = []

        def publish_one() -> None:
            connection = connect(nodes, 2)
            channel = connection.channel()
            channel.confirm_delivery()
            try:
                channel.basic_publish("", "q", b"40", PERSISTENT)
                confirmed.append("ok")
            except pika.exceptions.NackError:
                confirmed.append("refused")
            connection.close()

        publishing = asyncio.create_task(asyncio.to_thread(publish_one))
        ended = await broker.migrations.wait(record, successor, PATIENCE_S)
        assert ended == (40, 40, "migrated", "")
        await in_time(lambda: record.group not in other.metadata.tree.queue_index.by_group)
        other.local._followed = followed
        while other.local.reconcile():
            pass
        await publishing
        wanted = 41 if confirmed == ["ok"] else 40
        found = await asyncio.to_thread(take, nodes, "q", wanted, 3)
        assert [number for number, _ in found] == list(range(wanted))


async def test_an_alarm_stops_migrations(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "q", 60)
        broker = nodes[1].broker
        broker.alarms.set("disk", True)
        with pytest.raises(Unavailable, match="alarm: disk"):
            await broker.migrations.begin("/", "q", "quorum")
        broker.alarms.set("disk", False)
        record, successor = await broker.migrations.begin("/", "q", "quorum", rate=5)
        await in_time(lambda: broker.migrations._outcomes[successor].copied > 0)
        broker.alarms.set("disk", True)
        ended = await broker.migrations.wait(record, successor, PATIENCE_S)
        assert (ended.state, "alarm: disk" in ended.reason) == ("undone", True)
        broker.alarms.set("disk", False)
        assert len(await asyncio.to_thread(take, nodes, "q", 60)) == 60


async def test_questions_wait_as_long_as_the_copy_takes(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "q", 40, "quorum")
        broker = nodes[1].broker
        queue = broker.queue_admin.find_queue("/", "q")
        queue.limits = replace(
            queue.limits, operation_timeout_ms=500, publish_register_timeout_ms=500
        )
        record, successor = await broker.migrations.begin("/", "q", "classic", rate=10)
        await in_time(lambda: broker.local.get(record.group).known_seqs[0] == successor)

        def use() -> list[Any]:
            connection = connect(nodes)
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_publish("", "q", b"40", PERSISTENT)
            got = channel.basic_get("q", auto_ack=True)
            purged = channel.queue_purge("q")
            connection.close()
            return [got[2], purged.method.message_count]

        assert await asyncio.to_thread(use) == [b"0", 40]
        assert (await broker.migrations.wait(record, successor, PATIENCE_S)).state == "migrated"


@pytest.mark.parametrize("headers", [{"x-group-id": "one"}, {"x-other": 1}])
async def test_headers_that_meant_nothing_hold_nothing_back(
    tmp_path: Path, headers: dict[str, Any]
) -> None:
    """All of one group: a quorum queue would give out one of them at a time."""
    async with Nodes(tmp_path) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "q", 0)
        await asyncio.to_thread(publish, nodes, "q", 10, headers=headers)
        channel = await asyncio.to_thread(hold, nodes, "q", 10)
        assert await migrated(nodes, "q", "quorum") == (10, 10, "migrated", "")
        await asyncio.to_thread(channel.connection.close)
        found = await asyncio.to_thread(take, nodes, "q", 10)
        assert found == [(number, True) for number in range(10)]


async def test_dead_letters_on_their_way_into_a_queue_go_on_in_its_successor(
    tmp_path: Path,
) -> None:
    async with Nodes(tmp_path) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "dead", 30, "quorum")
        await asyncio.to_thread(declare, nodes, "q", "classic", **DEAD)
        broker = nodes[1].broker
        record, successor = await broker.migrations.begin("/", "dead", "classic", rate=20)
        await in_time(lambda: broker.local.get(record.group).known_seqs[0] == successor)
        await asyncio.to_thread(publish, nodes, "q", 10, expiration="0")
        ended = await broker.migrations.wait(record, successor, PATIENCE_S)
        assert ended == (30, 30, "migrated", "")
        found = await asyncio.to_thread(take, nodes, "dead", 40)
        assert [number for number, _ in found] == [*range(30), *range(10)]


@TYPES
async def test_a_queue_whose_messages_die_all_the_time_is_migrated(
    tmp_path: Path, type: str, to: str
) -> None:
    async with Nodes(tmp_path) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "dead", 0)
        await asyncio.to_thread(declare, nodes, "q", type, x_max_length=5, **DEAD)
        stopping = False

        def work() -> int:
            connection = connect(nodes)
            channel = connection.channel()
            channel.confirm_delivery()
            count = 0
            while not stopping or count < 200:
                channel.basic_publish("", "q", str(count).encode(), PERSISTENT)
                count += 1
            connection.close()
            return count

        working = asyncio.create_task(asyncio.to_thread(work))
        try:
            for _ in range(2):
                assert (await migrated(nodes, "q", to))[2:] == ("migrated", "")
                type, to = to, type
        finally:
            stopping = True
        count = await working
        broker = nodes[1].broker
        queue = broker.queue_admin.find_queue("/", "q")
        await in_time(lambda: queue.ended is None)
        left = await asyncio.to_thread(take, nodes, "q", 5)
        assert [number for number, _ in left] == list(range(count - 5, count))
        dead = await asyncio.to_thread(take, nodes, "dead", count - 5)
        assert [number for number, _ in dead] == list(range(count - 5))
        assert (await asyncio.to_thread(ask, nodes, "GET", "/api/queues/%2F/q"))[0] == 200
