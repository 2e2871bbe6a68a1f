"""What a node does before it talks to anybody: its limits, its logs."""

from __future__ import annotations

import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from convoymq.edges.configuration import load
from convoymq.edges.tls import client_tls
from convoymq.model.errors import Unavailable
from convoymq.model.machine_checks import free_disk_bytes, machine_memory_bytes
from convoymq.model.process import resident_bytes
from convoymq.node.logs import EXIT_FAULT, LogOutput
from convoymq.node.node import CONGESTED_SHARE, Node
from convoymq.node.process import run
from convoymq.node.registration import Registration, addresses
from convoymq.node.resources import memory_limit
from convoymq.replication.versions import announced


def test_the_memory_limit_is_a_share_or_a_size() -> None:
    whole = machine_memory_bytes()
    assert memory_limit(load(flags={"vm_memory_high_watermark.relative": "0.5"})) == whole // 2
    assert memory_limit(load(flags={"vm_memory_high_watermark.absolute": "1GiB"})) == 1 << 30
    assert 1 << 20 < resident_bytes() < whole


def test_room_on_disk_is_that_of_the_directory(tmp_path: Path) -> None:
    assert free_disk_bytes(tmp_path) > 0


def test_client_tls_follows_the_options(tmp_path: Path) -> None:
    import trustme

    authority = trustme.CA()
    made = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    made.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    made.private_key_pem.write_to_path(tmp_path / "key.pem")
    flags = {
        "listeners.ssl.default": "5671",
        "ssl_options.certfile": str(tmp_path / "cert.pem"),
        "ssl_options.keyfile": str(tmp_path / "key.pem"),
        "ssl_options.cacertfile": str(tmp_path / "ca.pem"),
    }
    assert client_tls(load(flags=flags).ssl).verify_mode == ssl.CERT_NONE
    flags |= {"ssl_options.verify": "verify_peer"}
    assert client_tls(load(flags=flags).ssl).verify_mode == ssl.CERT_OPTIONAL
    flags |= {"ssl_options.fail_if_no_peer_cert": "true"}
    assert client_tls(load(flags=flags).ssl).verify_mode == ssl.CERT_REQUIRED


@pytest.mark.provokes("node.failed")
def test_a_stopped_replica_ends_the_node_only_if_it_is_the_metadata_group_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "entry 7: a command of type 99 is not known"

    async def stopped(self: Node) -> None:
        self._on_replica_stopped(5, reason)
        assert self._failure is None
        self._on_replica_stopped(0, reason)
        assert self._failure is not None
        raise self._failure

    monkeypatch.setattr(Node, "run", stopped)
    monkeypatch.setattr("convoymq.node.logs.set_up", lambda config: LogOutput())
    flags = {"data_dir": str(tmp_path), "node.event_loop": "asyncio"}
    with capture_logs() as said:
        assert run(load(flags=flags)) == EXIT_FAULT
    assert [(line["event"], line["reason"]) for line in said] == [
        ("node.failed", f"the replica of the metadata group has stopped: {reason}")
    ]


@pytest.mark.provokes("cluster.not_usable")
async def test_a_node_asks_again_until_it_is_known(tmp_path: Path) -> None:
    answers: list[Any] = [Unavailable("no majority"), "done"]

    async def execute(_command: Any, _timeout_s: float) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    store: Any = SimpleNamespace(execute=execute)
    config: Any = load(flags={"data_dir": str(tmp_path)})
    command: Any = "command"
    nothing: Any = None
    registration = Registration(config, nothing, nothing, store, structlog.get_logger())
    assert await registration.persist(command) == "done"


def test_all_machines_are_announced() -> None:
    assert announced().keys() == {"metadata", "partition", "quorum", "stream"}


@pytest.mark.parametrize("where", ["storage", "classic"])
def test_others_send_less_while_the_disk_is_behind(tmp_path: Path, where: str) -> None:
    """What other nodes send for quorum queues and streams waits in one place, for classic queues
    in another."""
    flags = {"data_dir": str(tmp_path), "cluster.link_backlog_max": "1MiB"}
    node: Any = Node(load(flags=flags))
    waiting = {"storage": 0, "classic": 0}
    node.storage = SimpleNamespace(backlog_bytes=0)
    assert not node._is_congested()
    waiting[where] = (1 << 20) // CONGESTED_SHARE
    node.storage.backlog_bytes = waiting["storage"]
    local = SimpleNamespace(backlog_bytes=lambda: waiting["classic"])
    node.broker = SimpleNamespace(local=local)
    assert not node._is_congested()
    node.storage.backlog_bytes += 1
    assert node._is_congested()


def test_nodes_tell_each_other_addresses_and_no_names(tmp_path: Path) -> None:
    config = load(flags={"data_dir": str(tmp_path), "listeners.tcp.default": "5673"})
    assert addresses(config) == {
        "link": "127.0.0.1:25672",
        "amqp": "127.0.0.1:5673",
        "http": "127.0.0.1:15672",
        "metrics": "127.0.0.1:15692",
    }
