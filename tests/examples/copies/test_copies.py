"""A replicated type that is no Raft group is added in its own folder and with one line."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pika  # type: ignore[import-untyped]
import pytest

from tests.examples.copies.core import Copies, Store
from tests.examples.copies.driver import register
from tests.examples.copies.simulation import World
from tests.patience import PATIENCE_S
from tests.process_state import registries_restored
from tests.running import Nodes, until

COPIES = {"x-queue-type": "copies"}
SEEDS = 60


def test_what_was_confirmed_survives_every_change_of_the_primary() -> None:
    taken_over = confirmed = crashes = 0
    for seed in range(1, SEEDS + 1):
        world = World(seed)
        world.run()
        taken_over += world.taken_over
        confirmed += len(world.confirmed)
        crashes += world.crashes
    assert taken_over > SEEDS / 2
    assert crashes > SEEDS / 2
    assert confirmed > 100 * SEEDS


class EagerCore(Copies):
    """Confirms what one copy lacks."""

    def _confirm(self) -> None:
        if len(self._acked) > 1:
            del self._acked[min(self._acked, key=self._acked.__getitem__)]
        high = max(self._acked.values(), default=self.stored)
        while self._open and self._open[0] <= high:
            self.confirmed = self._open.popleft()
            self.effects.append(("confirmed", self.confirmed))


class BlankCore(Copies):
    """Leads although it was started anew, with nothing."""

    def __init__(self, node: int, store: Store, *, is_founder: bool) -> None:
        super().__init__(node, store, is_founder=True)


@pytest.mark.parametrize("planted", [EagerCore, BlankCore])
def test_the_simulator_finds_a_planted_bug(planted: type[Copies]) -> None:
    def fails(seed: int) -> bool:
        try:
            World(seed, planted).run()
        except AssertionError:
            return True
        return False

    assert any(fails(seed) for seed in range(1, SEEDS + 1))


@pytest.fixture
def registered() -> Iterator[None]:
    with registries_restored():
        register()
        yield


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.usefixtures("registered")
async def test_messages_outlive_the_primary_on_three_nodes(
    tmp_path: Path, by: signal.Signals
) -> None:
    """It ends, or stands still."""
    nodes = Nodes(tmp_path, 3)
    primary = subprocess.Popen([sys.executable, "-c", SERVE, json.dumps(nodes.flags(1))])
    try:
        async with asyncio.timeout(PATIENCE_S):
            nodes.start(2)
            nodes.start(3)
            await nodes.ready()
            await until(lambda: is_open(nodes.amqp_port(1)))
            await lose_the_primary(nodes, primary, by)
    finally:
        primary.kill()
        primary.wait()
        for number in list(nodes.running):
            await nodes.stop(number)


SERVE = """
import json, sys
from convoymq.cli.serve import main
from tests.examples.copies.driver import register
register()
flags = json.loads(sys.argv[1])
sys.exit(main([each for key in flags for each in ("--set", f"{key}={flags[key]}")]))
"""


async def lose_the_primary(
    nodes: Nodes, primary: subprocess.Popen[bytes], by: signal.Signals
) -> None:
    await asyncio.to_thread(publish, nodes.amqp_port(1))
    names = {number: nodes[2].broker.node_name_of(number) for number in (1, 2, 3)}
    (row,) = json.loads(await nodes.api("queues/%2F", 2))
    while "leader" not in row or row["messages"] != 15:
        # What another node says of its queues is up to a second old.
        (row,) = json.loads(await nodes.api("queues/%2F", 2))
    assert (row["type"], row["leader"], row["state"]) == ("copies", names[1], "running")
    assert sorted(row["members"]) == sorted(row["online"]) == sorted(names.values())
    assert row["messages"] == 15
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match=f"is led by {names[1]}"):
        await asyncio.to_thread(consume, nodes.amqp_port(3), 1)
    queues = nodes[2].machine.vhosts["/"].queues
    first = queues["q"].members[1]
    primary.send_signal(by)
    await until(lambda: queues["q"].members[0] == first)
    await until(lambda: nodes[first].broker.local.get(queues["q"].group).ended is None)
    found = await asyncio.to_thread(consume, nodes.amqp_port(first), 15)
    assert found == [b"%d" % number for number in range(5, 20)]


def is_open(port: int) -> bool:
    """Whether a node takes clients."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def publish(port: int) -> None:
    """Publishes with confirms, and takes some."""
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    channel = connection.channel()
    channel.queue_declare("q", durable=True, arguments=COPIES)
    channel.confirm_delivery()
    for number in range(20):
        channel.basic_publish("", "q", b"%d" % number)
    channel.basic_qos(prefetch_count=5)
    for number, (method, _, body) in enumerate(channel.consume("q", inactivity_timeout=PATIENCE_S)):
        assert body == b"%d" % number
        channel.basic_ack(method.delivery_tag)
        if number == 4:
            break
    channel.cancel()
    connection.close()


def consume(port: int, count: int) -> list[bytes]:
    """Takes some messages."""
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    found = []
    try:
        channel = connection.channel()
        for method, _, body in channel.consume("q", inactivity_timeout=PATIENCE_S):
            assert body is not None
            channel.basic_ack(method.delivery_tag)
            found.append(body)
            if len(found) == count:
                channel.cancel()
                break
    finally:
        connection.close()
    return found
