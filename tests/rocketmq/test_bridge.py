"""`convoy bridge` between three nodes of ConvoyMQ and a broker, killed while it moves messages."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lz4.frame
import pika  # type: ignore[import-untyped]
import pytest
import zstandard

from convoymq.cli import roles
from convoymq.cli.cluster import LocalCluster
from convoymq.client import Client as Convoy
from convoymq.client import ClientConfig
from convoymq.client.topic_reader import TopicReader
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.store.types import Message
from tests.clusters import serving_cluster
from tests.faults.topic_traffic import create
from tests.faults.traffic import connect, until
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports, single_port
from tests.rocketmq.broker_client import Client
from tests.rocketmq.processes import RoleProcess

BASE_PORT = cluster_ports(__name__)
COUNT, KEYS, QUEUES = 200, 7, 3
COMPRESSED: Sequence[tuple[int, Callable[[bytes], bytes]]] = (
    (0, bytes), (0x1, zlib.compress), (0x101, lz4.frame.compress),
    (0x201, zstandard.ZstdCompressor().compress), (0x301, zlib.compress),
)  # fmt: skip
"""System flags, and what clients do that set them."""
QUORUM = {"x-queue-type": "quorum"}


class Peers:
    """The servers of both sides, and bridges between them."""

    def __init__(self, cluster: LocalCluster, directory: Path) -> None:
        self.cluster = cluster
        self.servers = tuple(f"127.0.0.1:{node.amqp_port}" for node in cluster.nodes)
        self.names_port, self.broker_port = single_port(), single_port()
        self.roles = [
            RoleProcess(directory, "namesrv", "namesrv", listenPort=self.names_port,
                 bindAddress="127.0.0.1", kvConfigPath=directory / "kv.json"),
            RoleProcess(directory, "broker", "broker", listenPort=self.broker_port, haListenPort=0,
                 bindAddress="127.0.0.1", brokerIP1="127.0.0.1", brokerName="b",
                 brokerClusterName="c", storePathRootDir=directory / "store",
                 mappedFileSizeCommitLog=4 << 20, namesrvAddr=f"127.0.0.1:{self.names_port}"),
        ]  # fmt: skip
        for role in self.roles:
            role.wait_for("role.ready")

    def bridge(self, directory: Path, name: str, **settings: object) -> RoleProcess:
        role = RoleProcess(
            directory, name, "bridge", bridgeName=name, servers=",".join(self.servers),
            namesrvAddr=f"127.0.0.1:{self.names_port}", window=10, retryInterval=50,
            pollInterval=20, **settings,
        )  # fmt: skip
        self.roles.append(role)
        return role

    def with_broker(self, work: Callable[[Client], object]) -> object:
        async def run() -> object:
            client = Client(self.broker_port)
            try:
                return await work(client)  # type: ignore[misc]
            finally:
                await client.stop()

        return asyncio.run(run())

    def make(self, topic: str) -> None:
        async def work(client: Client) -> None:
            made = await client.ask(
                Request.UPDATE_AND_CREATE_TOPIC, topic=topic, defaultTopic="TBW102",
                readQueueNums=QUEUES, writeQueueNums=QUEUES, perm=6, topicSysFlag=0,
                topicFilterType="SINGLE_TAG", order=False,
            )  # fmt: skip
            assert made.code == Answer.SUCCESS

        self.with_broker(work)

    def messages(self, topic: str) -> list[Message]:
        """By queue, in order."""

        async def work(client: Client) -> list[Message]:
            return [m for q in range(QUEUES) for m in await client.all(topic, 0, queueId=q)]

        found: list[Message] = self.with_broker(work)  # type: ignore[assignment]
        return found


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    directory = tmp_path_factory.mktemp("bridge")
    with serving_cluster(directory / "cluster", BASE_PORT) as cluster:
        made = Peers(cluster, directory)
        yield made
        for role in reversed(made.roles):
            role.end()


def kill_at(role: RoleProcess, condition: Callable[[], bool]) -> None:
    until(condition, role.log.read_text(), PATIENCE_S)
    role.process.kill()
    role.process.wait(PATIENCE_S)


def check(found: Sequence[tuple[bytes, bytes]]) -> None:
    """Each message once, those of a key in order."""
    assert sorted(int(body) for _, body in found) == list(range(COUNT))
    for key in {key for key, _ in found}:
        numbers = [int(body) for each, body in found if each == key]
        assert numbers == sorted(numbers)
        assert all(f"k{number % KEYS}".encode() == key for number in numbers)


def depth(peers: Peers, queue: str) -> int:
    connection = connect(peers.cluster, 1)
    try:
        return int(connection.channel().queue_declare(queue, passive=True).method.message_count)
    finally:
        connection.close()


@pytest.mark.provokes("rocketmq.bridge_began")
def test_killed_bridges_move_every_message_once_and_in_order(peers: Peers, tmp_path: Path) -> None:
    """A queue to a topic of RocketMQ, from there to a queue, and to an ordered topic and back."""
    for topic in ("first", "last"):
        peers.make(topic)
    create(peers.cluster, "ordered", 2)
    connection = connect(peers.cluster, 1)
    channel = connection.channel()
    channel.confirm_delivery()
    for queue in ("in", "out"):
        channel.queue_declare(queue, durable=True, arguments=QUORUM)
    for number in range(COUNT):
        properties = pika.BasicProperties(
            content_type="text/plain", message_id=f"m{number}", delivery_mode=2,
            headers={"x-key": f"k{number % KEYS}", "colour": "blue", "rocketmq-TAGS": "t"},
        )  # fmt: skip
        channel.basic_publish("", "in", str(number).encode(), properties)
    plans = {
        "there": {"fromQueue": "in", "toRocketmqTopic": "first", "fromRocketmqTopic": "first",
                  "toQueue": "out"},
        "back": {"fromRocketmqTopic": "first", "toTopic": "ordered", "fromTopic": "ordered",
                 "toRocketmqTopic": "last"},
    }  # fmt: skip
    bridge = peers.bridge(tmp_path, "there", **plans["there"])
    kill_at(bridge, lambda: len(peers.messages("first")) > COUNT // 5)
    bridge = peers.bridge(tmp_path, "there", **plans["there"])
    kill_at(bridge, lambda: depth(peers, "out") > COUNT // 2)
    other = peers.bridge(tmp_path, "back", **plans["back"])
    kill_at(other, lambda: len(peers.messages("last")) > COUNT // 4)
    bridge, other = (peers.bridge(tmp_path, name, **plans[name]) for name in plans)
    until(lambda: depth(peers, "out") >= COUNT, bridge.log.read_text(), PATIENCE_S)
    until(lambda: len(peers.messages("last")) >= COUNT, other.log.read_text(), PATIENCE_S)
    assert (bridge.end(), other.end()) == (0, 0)
    for topic in ("first", "last"):
        found = peers.messages(topic)
        check([(m.properties["__SHARDINGKEY"].encode(), bytes(m.body)) for m in found])
        assert {m.properties["TAGS"] for m in found} == {"t"}
        assert {m.properties["colour"] for m in found} == {"blue"}
    moved = []
    for _ in range(COUNT):
        _, known, body = channel.basic_get("out", auto_ack=True)
        moved.append((known.headers["x-key"].encode(), body))
        assert (known.content_type, known.message_id) == ("text/plain", f"m{int(body)}")
    check(moved)
    assert channel.queue_declare("in", passive=True).method.message_count == 0
    connection.close()
    with Convoy(ClientConfig(peers.servers)) as client:
        rows = [
            (message.key, message.body or b"")
            for part in TopicReader(client, "ordered")
            for message in part.messages()
        ]
    check(rows)
    began = [json.loads(line) for line in bridge.log.read_text().splitlines()
             if "bridge_began" in line]  # fmt: skip
    assert {each["promise"] for each in began} == {"exactly once"}


@pytest.mark.provokes("rocketmq.bridge_failed")
def test_what_is_refused_is_kept_or_ends_the_bridge(peers: Peers, tmp_path: Path) -> None:
    peers.make("small")
    connection = connect(peers.cluster, 1)
    channel = connection.channel()
    channel.confirm_delivery()
    for queue in ("large", "dead"):
        channel.queue_declare(queue, durable=True, arguments=QUORUM)
    headers = {"x-key": "k", "wide": "w" * 40_000}
    for body, given in ((b"0", None), (b"1", headers), (b"2", None)):
        properties = pika.BasicProperties(headers=given, delivery_mode=2)
        channel.basic_publish("", "large", body, properties)
    plan = {"fromQueue": "large", "toRocketmqTopic": "small"}
    bridge = peers.bridge(tmp_path, "refused", **plan)
    assert bridge.process.wait(PATIENCE_S) == 1
    assert "bytes of properties" in bridge.log.read_text()
    bridge = peers.bridge(tmp_path, "refused", **plan, refused="deadLetter", deadLetterQueue="dead")
    until(lambda: len(peers.messages("small")) == 2)
    # A bridge that ends returns what it has not finished: copies come before acknowledgements.
    until(lambda: depth(peers, "dead") == 1)
    until(lambda: depth(peers, "large") == 0)
    assert bridge.end() == 0
    assert sorted(bytes(m.body) for m in peers.messages("small")) == [b"0", b"2"]
    _, known, body = channel.basic_get("dead", auto_ack=True)
    assert (body, known.headers["wide"]) == (b"1", "w" * 40_000)
    assert "bytes of properties" in known.headers["rocketmq-refused"]
    assert channel.basic_get("dead")[0] is None
    connection.close()


def test_what_convoymq_refuses_is_kept_at_rocketmq_and_nothing_behind_it_is_lost(
    peers: Peers, tmp_path: Path
) -> None:
    """Bodies are compressed in all ways of RocketMQ's clients.
    `expiration` that is no number; the bridge is killed, and what it has done is not repeated.
    A classic queue is promised less."""
    for topic in ("odd", "kept"):
        peers.make(topic)
    connection = connect(peers.cluster, 1)
    channel = connection.channel()
    channel.queue_declare("even", durable=True, arguments=QUORUM)
    channel.queue_declare("plain", durable=True, arguments={"x-queue-type": "classic"})

    async def work(client: Client) -> None:
        for number in range(6):
            wrong = "AMQP_expiration\x01soon\x02" if number == 2 else ""
            flag, compress = COMPRESSED[number % len(COMPRESSED)]
            body = compress(str(number).encode())
            sent = await client.send("odd", body, i=wrong + "KEYS\x01k\x02", f=flag)
            assert sent.code == Answer.SUCCESS

    peers.with_broker(work)
    plan = {"fromRocketmqTopic": "odd", "toQueue": "even", "refused": "deadLetter",
            "deadLetterRocketmqTopic": "kept"}  # fmt: skip
    bridge = peers.bridge(tmp_path, "odd", **plan)
    kill_at(bridge, lambda: depth(peers, "even") == 5)
    bridge = peers.bridge(tmp_path, "odd", **plan)
    plain = peers.bridge(tmp_path, "plain", **plan | {"toQueue": "plain"})
    until(lambda: depth(peers, "plain") == 5)
    until(lambda: len(peers.messages("kept")) == 2)
    assert (bridge.end(), plain.end()) == (0, 0)
    bodies = [channel.basic_get("even", auto_ack=True)[1:] for _ in range(5)]
    assert [body for _, body in bodies] == [b"0", b"1", b"3", b"4", b"5"]
    assert {known.headers["rocketmq-KEYS"] for known, _ in bodies} == {"k"}
    assert channel.basic_get("even")[0] is None
    kept = [(bytes(m.body), m.properties["AMQP_expiration"]) for m in peers.messages("kept")]
    assert kept == [(b"2", "soon")] * 2, "once for each bridge"
    assert "at least once" in plain.log.read_text()
    connection.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fromQueue": "a", "toTopik": "b"}, "unknown key toTopik"),
        ({"fromQueue": "a"}, "toRocketmqTopic"),
        ({"fromRocketmqTopic": "t", "toQueue": "q", "fromQueue": "q", "toRocketmqTopic": "t"},
         "come back for ever"),
        ({"fromRocketmqTopic": "t", "toQueue": "q", "refused": "deadLetter"},
         "deadLetterRocketmqTopic"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, str], said: str
) -> None:
    config = tmp_path / "bridge.conf"
    lines = [f"{name}={value}\n" for name, value in given.items()]
    config.write_text("".join(["namesrvAddr=127.0.0.1:1\n", *lines]))
    assert roles.bridge(["-c", str(config)]) == 2
    assert said in capsys.readouterr().err
