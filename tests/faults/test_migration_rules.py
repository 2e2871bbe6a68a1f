"""What a migration makes of everything that a queue can have: unacknowledged messages on all nodes,
transactions, limits, mirrors to come; and how it ends when something ends meanwhile."""

from __future__ import annotations

import asyncio
import http.client
import json
from pathlib import Path
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest

from convoymq.broker.migrations import HOLD, Progress
from convoymq.metadata.commands import EndMigration
from convoymq.metadata.machine import Change, ChangeKind
from convoymq.transport.frame_kinds import KIND_MIGRATION
from tests.faults.traffic import until
from tests.patience import PATIENCE_S
from tests.running import GUEST, Nodes
from tests.running import until as in_time

PERSISTENT = pika.BasicProperties(delivery_mode=2)


def connect(nodes: Nodes, node: int = 1) -> Any:
    address = pika.ConnectionParameters("127.0.0.1", nodes.amqp_port(node), heartbeat=0)
    return pika.BlockingConnection(address)


def fill(nodes: Nodes, name: str, count: int, type: str = "classic", size: int = 0) -> None:
    """Declares a queue at node 1 and publishes numbers."""
    connection = connect(nodes)
    channel = connection.channel()
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": type})
    channel.tx_select()
    for number in range(count):
        channel.basic_publish("", name, str(number).encode().ljust(size), PERSISTENT)
    channel.tx_commit()
    connection.close()


def take(nodes: Nodes, name: str, count: int, node: int = 1) -> list[tuple[int, bool]]:
    """Takes messages, which clients that have ended may still return: (number, redelivered)."""
    connection = connect(nodes, node)
    channel = connection.channel()
    found: list[tuple[int, bool]] = []

    def is_done() -> bool:
        while (got := channel.basic_get(name, auto_ack=True))[0] is not None:
            found.append((int(got[2]), got[0].redelivered))
        return len(found) >= count

    until(is_done, "messages are missing")
    connection.close()
    assert len(found) == count
    return found


async def open_at_all(nodes: Nodes) -> None:
    for number in nodes.ports:
        tree = nodes[number].broker.metadata.tree
        await in_time(lambda: tree.version >= 6)  # noqa: B023


async def migrated(nodes: Nodes, name: str, to: str, rate: int = 0, node: int = 1) -> Progress:
    migrations = nodes[node].broker.migrations
    record, successor = await migrations.begin("/", name, to, rate=rate)
    ended: Progress = await migrations.wait(record, successor, PATIENCE_S)
    return ended


@pytest.mark.parametrize(("type", "to"), [("classic", "quorum"), ("quorum", "classic")])
async def test_all_that_clients_hold_comes_again(tmp_path: Path, type: str, to: str) -> None:
    """Consumers of three nodes, a `basic.get` and a transaction hold messages."""
    async with Nodes(tmp_path, 3) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "q", 100, type)
        held: list[Any] = []

        def hold() -> None:
            for node in (1, 2, 3):
                channel = connect(nodes, node).channel()
                channel.basic_qos(prefetch_count=10)
                tags: list[int] = []
                channel.basic_consume("q", lambda _c, m, _p, _b, t=tags: t.append(m.delivery_tag))
                while len(tags) < 10:
                    channel.connection.process_data_events(0.05)
                held.append((channel, tags))
            got = connect(nodes, 2).channel()
            assert got.basic_get("q")[2] == b"30"
            held.append((got, [1]))
            doing = connect(nodes, 3).channel()
            doing.tx_select()
            method, _, body = doing.basic_get("q")
            assert body == b"31"
            doing.basic_ack(method.delivery_tag)
            doing.basic_publish("", "q", b"100", PERSISTENT)
            held.append((doing, []))

        await asyncio.to_thread(hold)
        assert await migrated(nodes, "q", to, node=2) == (100, 100, "migrated", "")

        def go_on() -> list[tuple[int, bool]]:
            for channel, tags in held[:3]:
                # What it had comes again, under its tag; acknowledgements of before do nothing.
                first = len(tags)
                while len(tags) < first + 10:
                    channel.connection.process_data_events(0.05)
                channel.basic_ack(10, multiple=True)
                channel.connection.process_data_events(0.05)
            held[3][0].basic_ack(1)
            held[4][0].tx_commit()
            for channel, _ in held:
                channel.connection.close()
            return take(nodes, "q", 101, 3)

        found = await asyncio.to_thread(go_on)
        assert sorted(number for number, _ in found) == list(range(101))
        assert all(again for number, again in found if number < 32)
        assert [number for number, again in found if not again] == list(range(32, 101))


async def test_limits_act_from_the_switch_on(tmp_path: Path) -> None:
    """Policies with limits, a time to live and dead letters: nothing is dropped by the copy, and
    nothing becomes a dead letter twice."""
    async with Nodes(tmp_path) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "q", 50)
        await asyncio.to_thread(fill, nodes, "dead", 0)
        answer = await asyncio.to_thread(
            ask, nodes, "PUT", "/api/policies/%2F/p",
            {"pattern": "^q$", "apply-to": "quorum_queues", "definition": {
                "max-length": 20, "dead-letter-exchange": "", "dead-letter-routing-key": "dead"}},
        )  # fmt: skip
        assert answer[0] in (201, 204)
        assert await migrated(nodes, "q", "quorum") == (50, 50, "migrated", "")
        dead = await asyncio.to_thread(take, nodes, "dead", 30)
        assert [number for number, _ in dead] == list(range(30))
        left = await asyncio.to_thread(take, nodes, "q", 20)
        assert [number for number, _ in left] == list(range(30, 50))


def ask(
    nodes: Nodes, method: str, path: str, body: Any = None, user: str = GUEST, raw: bytes = b""
) -> tuple[int, str]:
    port = nodes.ports[1]["management.tcp.port"]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    data = raw or (json.dumps(body).encode() if body is not None else None)
    connection.request(
        method, path, data, {"authorization": user, "content-type": "application/json"}
    )
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


async def test_requests_that_make_no_sense_or_may_not_are_refused(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "q", 3)
        path = "/api/convoy/queues/%2F/q/migration"

        def work() -> None:
            for body, status, text in (
                (None, 400, ""),
                ([], 400, ""),
                ({}, 400, "key to"),
                ({"to": 5}, 400, "key to"),
                ({"to": "quorum", "rate": -1}, 400, "key rate"),
                ({"to": "quorum", "rate": "fast"}, 400, "key rate"),
                ({"to": "quorum", "rate": 1.5}, 400, "key rate"),
                ({"to": "quorum", "wait": [1]}, 400, "key wait"),
                ({"to": "quorum", "dry_run": "maybe"}, 400, "key dry_run"),
                ({"to": "quorum", "drop_arguments": 1}, 400, "key drop_arguments"),
                ({"to": "quorum", "other": 1}, 400, "other"),
                ({"to": "x" * 300}, 400, ""),
            ):
                got, said = ask(nodes, "POST", path, body)
                assert (got, text in said) == (status, True), f"{body}: {got} {said}"
            got, said = ask(nodes, "POST", path, raw=b'{"to":')
            assert got == 400
            for query in ("", "?successor=x", "?successor=-1", "?successor=1&wait=x"):
                assert ask(nodes, "GET", path + query)[0] == 400, query
            assert ask(nodes, "POST", path.replace("/q/", "/none/"), {"to": "quorum"})[0] == 404
            assert ask(nodes, "POST", path, {"to": "quorum"}, user="Basic eDp5")[0] == 401

            may = {"password": "y", "tags": "management"}
            assert ask(nodes, "PUT", "/api/users/x", may)[0] == 201
            for missing in ("configure", "write", "read"):
                given = dict.fromkeys(("configure", "write", "read"), ".*") | {missing: "^$"}
                assert ask(nodes, "PUT", "/api/permissions/%2F/x", given)[0] in (201, 204)
                got, said = ask(nodes, "POST", path, {"to": "quorum"}, user="Basic eDp5")
                assert got in (401, 403), f"{missing}: {got} {said}"
            assert json.loads(ask(nodes, "GET", "/api/queues/%2F/q")[1])["type"] == "classic"

        await asyncio.to_thread(work)


async def test_an_empty_queue_is_migrated_while_a_node_is_down(tmp_path: Path) -> None:
    async with Nodes(tmp_path, 3) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "q", 0)
        await nodes.stop(3)
        await in_time(lambda: 3 not in nodes[1].broker.nodes.running())
        assert await migrated(nodes, "q", "quorum") == (0, 0, "migrated", "")
        nodes.start(3)
        await nodes.ready(3)

        def use() -> list[tuple[int, bool]]:
            connection = connect(nodes, 3)
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_publish("", "q", b"1", PERSISTENT, mandatory=True)
            connection.close()
            return take(nodes, "q", 1, 3)

        assert await asyncio.to_thread(use) == [(1, False)]


@pytest.mark.parametrize("type", ["classic", "quorum"])
async def test_the_end_of_its_virtual_host_ends_a_migration(tmp_path: Path, type: str) -> None:
    async with Nodes(tmp_path) as nodes:
        await open_at_all(nodes)
        broker = nodes[1].broker
        migrations, tree = broker.migrations, broker.metadata.tree
        await asyncio.to_thread(ask, nodes, "PUT", "/api/vhosts/v", {})
        await asyncio.to_thread(
            ask,
            nodes,
            "PUT",
            "/api/queues/v/q",
            {"durable": True, "arguments": {"x-queue-type": type}},
        )

        def publish() -> None:
            address = pika.ConnectionParameters(
                "127.0.0.1", nodes.amqp_port(), virtual_host="v", heartbeat=0
            )
            connection = pika.BlockingConnection(address)
            channel = connection.channel()
            channel.confirm_delivery()
            for number in range(40):
                channel.basic_publish("", "q", str(number).encode(), PERSISTENT)
            connection.close()

        await asyncio.to_thread(publish)
        to = "quorum" if type == "classic" else "classic"
        record, successor = await migrations.begin("v", "q", to, rate=10)
        await in_time(lambda: migrations._outcomes[successor].copied > 0)
        assert (await asyncio.to_thread(ask, nodes, "DELETE", "/api/vhosts/v"))[0] == 204
        ended = await migrations.wait(record, successor, PATIENCE_S)
        assert ended.state == "undone"
        await in_time(lambda: not migrations._running)
        assert not tree.queue_index.successors
        assert not tree.queue_index.by_group


async def test_mirrors_wait_for_the_end_of_a_migration(tmp_path: Path) -> None:
    async with Nodes(tmp_path, 3) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "q", 40)
        broker = nodes[1].broker
        migrations, tree = broker.migrations, broker.metadata.tree
        record, successor = await migrations.begin("/", "q", "quorum", rate=10)
        await in_time(lambda: migrations._outcomes[successor].copied > 0)
        policy = {"pattern": ".*", "definition": {"ha-mode": "all"}}
        assert (await asyncio.to_thread(ask, nodes, "PUT", "/api/policies/%2F/ha", policy))[
            0
        ] == 201
        assert await migrations.wait(record, successor, PATIENCE_S) == (40, 40, "migrated", "")
        assert tree.vhosts["/"].queues["q"].view is None
        # Back, and mirrored then.
        assert await migrated(nodes, "q", "classic") == (40, 40, "migrated", "")
        home = tree.vhosts["/"].queues["q"].home
        await in_time(lambda: tree.vhosts["/"].queues["q"].view is not None)
        assert [n for n, _ in await asyncio.to_thread(take, nodes, "q", 40, home)] == list(
            range(40)
        )
        with pytest.raises(Exception, match="has mirrors"):
            await migrations.begin("/", "q", "quorum")


async def test_a_node_that_hears_late_of_a_migration_goes_on(tmp_path: Path) -> None:
    """The request to hold clients comes after the tree has undone the migration."""
    async with Nodes(tmp_path) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "q", 40)
        broker = nodes[1].broker
        migrations = broker.migrations
        record, successor = await migrations.begin("/", "q", "quorum", rate=1)
        queue = broker.local.get(record.group)
        await in_time(lambda: queue.known_seqs[0] == successor)
        end = EndMigration(
            vhost="/", name="q", group=record.group, successor=successor, switched=False
        )
        assert await broker.metadata.execute(end, PATIENCE_S)
        await in_time(lambda: not queue.frozen and queue.known_seqs[0] == 0)
        await broker.control.request(
            1, KIND_MIGRATION, [HOLD, record.group, successor, {}], PATIENCE_S
        )
        assert queue.known_seqs[0] == 0
        # So does one that gets a snapshot of the tree from after the end.
        queue.hold(successor, {})
        migrations.on_change(Change(ChangeKind.RESTORED))
        assert queue.known_seqs[0] == 0
        assert len(await asyncio.to_thread(take, nodes, "q", 40)) == 40


@pytest.mark.parametrize(
    ("type", "to", "count"),
    [
        pytest.param("classic", "quorum", 2500, marks=pytest.mark.long),
        ("quorum", "classic", 1500),
    ],
)
async def test_what_many_consumers_hold_is_marked_in_the_successor(
    tmp_path: Path, type: str, to: str, count: int
) -> None:
    """A quorum queue hands out 2000 to a client that acknowledges none."""
    async with Nodes(tmp_path, 3) as nodes:
        await open_at_all(nodes)
        await asyncio.to_thread(fill, nodes, "q", count, type, 10_000)

        def hold() -> Any:
            channel = connect(nodes).channel()
            tags: list[int] = []
            channel.basic_consume("q", lambda *_: tags.append(1))
            while len(tags) < count:
                channel.connection.process_data_events(0.05)
            return channel

        channel = await asyncio.to_thread(hold)
        ended = await migrated(nodes, "q", to)
        assert ended == (count, count, "migrated", "")
        await asyncio.to_thread(channel.connection.close)
        found = await asyncio.to_thread(take, nodes, "q", count, 2)
        assert sorted(found) == [(number, True) for number in range(count)]
