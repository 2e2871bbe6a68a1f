"""RocketMQ's own clients and tools with `convoy namesrv` and `convoy broker`, and with RocketMQ's
name server in the place of ours. Each client prints a line for each thing that it tries."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoymq.rocketmq.remoting.codes import Answer, Request
from tests.patience import PATIENCE_S
from tests.ports import single_port
from tests.rocketmq.broker_client import Client
from tests.rocketmq.processes import BrokerProcess, Server
from tests.rocketmq.upstream import JARS, JAVA, command, environment, mqadmin, needs_rocketmq

CLIENTS = Path(__file__).parent / "clients"
EXAMPLES = Path(__file__).parents[2] / "examples" / "rocketmq"
NODE_CLIENT = "ali-ons@3.12.0"
STEPS_S = 40 * PATIENCE_S

pytestmark = [pytest.mark.optional, needs_rocketmq]


class Peers:
    """A name server, a broker, and what clients said that tried them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names = Server(directory)
        self.broker = BrokerProcess(directory, self.names.address)
        self._said: dict[str, dict[str, str]] = {}

    def said(self, name: str, line: list[str]) -> dict[str, str]:
        """What a client said of each thing that it tried; it runs once."""
        if name not in self._said:
            done = subprocess.run(
                [*line, self.names.address], capture_output=True, text=True,
                timeout=STEPS_S, env=environment(self.directory), check=False,
            )  # fmt: skip
            words = [text.split(" ", 2) for text in done.stdout.splitlines()]
            self._said[name] = {w[1]: w[0] for w in words if w[0] in ("ok", "bad")}
            assert "end" in done.stdout.splitlines(), done.stdout + done.stderr
            assert "bad" not in self._said[name].values(), done.stdout + done.stderr
        return self._said[name]

    def stop(self) -> None:
        self.broker.stop()
        self.names.stop()


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    made = Peers(tmp_path_factory.mktemp("peers"))
    yield made
    made.stop()


def java(home: Path, main: Path) -> list[str]:
    """Compiles a Java client; returns the command."""
    classes = home / "classes"
    if not (classes / f"{main.stem}.class").exists():
        line = ["javac", "-cp", f"{JARS}/*", "-sourcepath", str(CLIENTS), "-d", str(classes)]
        subprocess.run([*line, str(main)], check=True, timeout=STEPS_S)
    return ["java", *JAVA, "-cp", f"{JARS}/*:{classes}", main.stem]


JAVA_STEPS = (
    *("send", "tags", "batch", "ordered", "pull", "query", "sql", "broadcast", "request"),
    *("rebalance", "large"),
)


def built(home: Path, main: Path) -> str:
    """Builds a Go client; returns its path."""
    if shutil.which("go") is None:
        pytest.skip("needs Go (https://go.dev/dl)")
    directory = home / main.stem
    target = directory / "client"
    if not target.exists():
        directory.mkdir()
        for path in (main, CLIENTS / "go" / "go.mod", CLIENTS / "go" / "go.sum"):
            shutil.copy(path, directory)
        subprocess.run(
            ["go", "build", "-o", str(target), "."], cwd=directory, check=True, timeout=STEPS_S
        )
    return str(target)


def node_program(home: Path, main: Path) -> list[str]:
    """Installs the Node client; returns the command of a program that uses it."""
    if shutil.which("npm") is None:
        pytest.skip("needs Node and npm (Debian: apt-get install nodejs npm)")
    directory = home / "node"
    if not directory.exists():
        directory.mkdir()
        line = ["npm", "install", "--silent", "--no-audit", "--no-fund", NODE_CLIENT]
        subprocess.run(line, cwd=directory, check=True, timeout=STEPS_S)
    shutil.copy(main, directory)
    return ["node", str(directory / main.name)]


async def node(peers: Peers, main: Path, topic: str) -> list[str]:
    """Returns the command of a program for Node, whose client makes no topics."""
    line = node_program(peers.directory, main)
    client = Client(peers.broker.port)
    made = await client.ask(
        Request.UPDATE_AND_CREATE_TOPIC, topic=topic, defaultTopic="TBW102",
        readQueueNums=4, writeQueueNums=4, perm=6, topicFilterType="SINGLE_TAG", order=False,
    )  # fmt: skip
    assert made.code == Answer.SUCCESS
    await client.stop()
    return line


@pytest.mark.parametrize("language", ["java", "go", "node"])
async def test_examples(peers: Peers, language: str) -> None:
    match language:
        case "java":
            line = java(peers.directory, EXAMPLES / "Hello.java")
        case "go":
            line = [built(peers.directory, EXAMPLES / "hello.go")]
        case _:
            line = await node(peers, EXAMPLES / "hello.js", "hello-node")
    done = subprocess.run(
        [*line, peers.names.address], capture_output=True, text=True, timeout=STEPS_S,
        env=environment(peers.directory), check=False,
    )  # fmt: skip
    said = [text for text in done.stdout.splitlines() if text.startswith("received")]
    assert sorted(said) == [f"received hello {n}" for n in range(5)], done.stdout + done.stderr


@pytest.mark.parametrize("step", JAVA_STEPS)
def test_the_java_client(peers: Peers, step: str) -> None:
    assert peers.said("java", java(peers.directory, CLIENTS / "Peer.java"))[step] == "ok"


@pytest.mark.parametrize("step", ["send", "batch", "push", "tags", "ordered"])
def test_the_go_client(peers: Peers, step: str) -> None:
    assert peers.said("go", [built(peers.directory, CLIENTS / "go" / "main.go")])[step] == "ok"


@pytest.mark.parametrize("step", ["send", "push", "tags"])
async def test_the_node_client(peers: Peers, step: str) -> None:
    line = await node(peers, CLIENTS / "peer.js", "node-plain")
    assert peers.said("node", line)[step] == "ok"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("updateTopic", "-c", "DefaultCluster", "-t", "admin"), "create topic to"),
        (("topicStatus", "-t", "admin"), "broker-a"),
        (("topicList",), "admin"),
        (("sendMessage", "-t", "admin", "-p", "hello"), "SEND_OK"),
        (("consumeMessage", "-t", "admin"), "BODY: hello"),
        (("updateSubGroup", "-c", "DefaultCluster", "-g", "admins"), "create subscription group"),
        (("clusterList",), "V5_3_3"),
        (("clusterList", "-m"), "broker-a"),
        (("consumerProgress",), "TOOLS_CONSUMER"),
        (("deleteSubGroup", "-c", "DefaultCluster", "-g", "admins"), "success"),
        (("deleteTopic", "-c", "DefaultCluster", "-t", "admin"), "success"),
    ],
)  # fmt: skip
def test_mqadmin(peers: Peers, arguments: tuple[str, ...], text: str) -> None:
    assert text in mqadmin(peers.directory / "admin", *arguments, "-n", peers.names.address)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("brokerStatus",), "brokerVersionDesc"),
        (("getBrokerConfig",), "enablePropertyFilter"),
        (("updateBrokerConfig", "-k", "traceOn", "-v", "false"), "success"),
        (("brokerConsumeStats",), "Diff Total"),
        (("haStatus",), "MasterCommitLogMaxOffset"),
        (("cleanUnusedTopic",), "success"),
    ],
)  # fmt: skip
def test_mqadmin_of_a_broker(peers: Peers, arguments: tuple[str, ...], text: str) -> None:
    line = (*arguments, "-b", peers.broker.address, "-n", peers.names.address)
    assert text in mqadmin(peers.directory / "admin", *line)


@pytest.mark.parametrize("settings", [{}, {"tls.enable": "true"}])
def test_rocketmqs_name_server(tmp_path: Path, settings: dict[str, object]) -> None:
    """Our broker registers there, by TLS if wanted, and RocketMQ's tools find it."""
    port = single_port()
    (tmp_path / "namesrv.conf").write_text(f"listenPort={port}\n")
    with (tmp_path / "names.log").open("wb") as log:
        process = subprocess.Popen(
            command(tmp_path, "namesrv.NamesrvStartup", "-c", str(tmp_path / "namesrv.conf")),
            env=environment(tmp_path), stdout=log, stderr=log,
        )  # fmt: skip
    try:
        names = f"127.0.0.1:{port}"
        broker = BrokerProcess(tmp_path, names, **settings)
        admin = tmp_path / "admin"
        sent = mqadmin(admin, "updateTopic", "-c", "DefaultCluster", "-t", "there", "-n", names)
        assert "create topic to" in sent
        assert "SEND_OK" in mqadmin(admin, "sendMessage", "-t", "there", "-p", "x", "-n", names)
        broker.stop()
    finally:
        process.kill()
        process.wait()
