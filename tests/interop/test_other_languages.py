"""Node's amqplib and Go's amqp091-go, undisturbed and with a leader killed under them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clusters import Cluster
from tests.interop.conftest import Names
from tests.interop.failover import (
    COUNT,
    LEADER,
    declare_on_leader,
    leader_killed,
    run_client,
    uris_from,
)
from tests.patience import PATIENCE_S

CLIENTS = Path(__file__).parent / "clients"
AMQPLIB = "amqplib@0.10.9"
AMQP091 = "github.com/rabbitmq/amqp091-go@v1.10.0"

Command = tuple[list[str], dict[str, str]]


def prepare(command: list[str], directory: Path) -> None:
    """Run a step of getting a client; skip the test, saying why, when it can't be got here."""
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{' '.join(command)} takes more than {PATIENCE_S} s")
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command)} fails: {done.stderr.strip()[-300:]}")


@pytest.fixture(scope="session")
def amqplib(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The Node client, with amqplib from npm in a temporary directory."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs Node and npm (Debian: apt-get install nodejs npm)")
    directory = tmp_path_factory.mktemp("amqplib")
    (directory / "package.json").write_text('{"private": true}\n')
    quiet = ["--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=0"]
    prepare(["npm", "install", *quiet, AMQPLIB], directory)
    environment = os.environ | {"NODE_PATH": str(directory / "node_modules")}
    return ["node", str(CLIENTS / "amqplib.js")], dict(environment)


@pytest.fixture(scope="session")
def amqp091(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The Go client, built in a temporary directory."""
    if shutil.which("go") is None:
        pytest.skip("needs Go (Debian: apt-get install golang)")
    directory = tmp_path_factory.mktemp("amqp091")
    shutil.copy(CLIENTS / "amqp091" / "main.go", directory)
    prepare(["go", "mod", "init", "client"], directory)
    prepare(["go", "get", AMQP091], directory)
    prepare(["go", "build", "-o", "client", "."], directory)
    return [str(directory / "client")], dict(os.environ)


@pytest.fixture(params=["amqplib", "amqp091"])
def client(request: pytest.FixtureRequest) -> Command:
    """Each client in turn. Getting it may take longer than a test; `prepare` gives up first."""
    command: Command = request.getfixturevalue(request.param)
    return command


@pytest.mark.optional
@pytest.mark.parametrize("first", [0, LEADER], ids=["on a follower", "on the leader"])
@pytest.mark.parametrize("kill", [False, True], ids=["undisturbed", "leader killed"])
def test_nothing_is_lost_and_order_is_kept(
    cluster: Cluster, names: Names, client: Command, first: int, kill: bool
) -> None:
    queue = names.queue()
    declare_on_leader(cluster, queue)
    command, environment = client
    with leader_killed(cluster, kill) as strike:
        uris = ",".join(uris_from(cluster, first))
        ledger = run_client([*command, uris, queue, str(COUNT)], environment, strike)
    ledger.check()
