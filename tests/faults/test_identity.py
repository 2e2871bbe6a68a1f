"""Who is let into a cluster of real nodes, and who is not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import stop_nodes
from tests.faults.conftest import BASE_PORT, StartCluster
from tests.faults.traffic import (
    Traffic,
    counter,
    declare,
    drain,
    fill,
    in_step,
    log_has,
    until,
)
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

SECOND_PORT = cluster_ports(__name__)
QUEUE = "orders"
SIZE = 100


def config_of_a_second(cluster: LocalCluster, number: int) -> Path:
    """Writes the configuration of another node with that number, its own directory and ports."""
    home = cluster.data / "second"
    home.mkdir()
    own = LocalCluster(home, 1, SECOND_PORT).nodes[0]
    instead = {
        "data_dir": str(home / "data"),
        "listeners.tcp.default": f"localhost:{own.amqp_port}",
        "management.tcp.port": f"localhost:{own.http_port}",
        "prometheus.tcp.port": f"localhost:{own.metrics_port}",
        "cluster.listen": f"127.0.0.1:{own.link_port}",
    }
    lines = (cluster.data / f"node-{number}" / "convoy.conf").read_text().splitlines()
    keys = [line.partition(" = ")[0] for line in lines]
    assert instead.keys() <= set(keys)
    text = [
        f"{key} = {instead[key]}" if key in instead else line
        for key, line in zip(keys, lines, strict=True)
    ]
    (home / "convoy.conf").write_text("\n".join(text) + "\n")
    return home / "convoy.conf"


def link_downs(cluster: LocalCluster, number: int, peer: int) -> int:
    """Returns how often a node has logged that the link to another one is down."""
    lines = cluster.log_file(number).read_text().splitlines()
    return sum('"link.down"' in line and f'"peer": {peer},' in line for line in lines)


@pytest.mark.parametrize("number", [1, 3])
def test_the_second_node_with_a_number_ends_and_the_first_serves_on(
    cluster: LocalCluster, number: int
) -> None:
    others = [node.number for node in cluster.nodes if node.number != number]
    declare(cluster, 1, QUEUE)
    config = config_of_a_second(cluster, number)
    address = f"127.0.0.1:{cluster.nodes[number - 1].link_port}"
    with Traffic(cluster, QUEUE, publish_at=(number,), consume_at=((number,),)) as traffic:
        traffic.goes_on()
        connections = traffic.publisher.attempt
        # While a cluster forms, nodes that dial each other at once may drop one of the links.
        downs = [link_downs(cluster, other, number) for other in others]
        second = subprocess.Popen(
            [sys.executable, "-m", "convoymq.cli.serve", "--config", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            said = second.communicate(timeout=PATIENCE_S)[0].decode()
        finally:
            second.kill()
            second.communicate()
        assert second.returncode == 1, said
        words = f"number {number} is in use: the node at {address} has it and is alive"
        assert words in said.splitlines()[-1]
        traffic.goes_on()
        assert traffic.publisher.attempt == connections
        traffic.finish()
    for other in others:
        assert log_has(cluster, other, "link.refused", words)
    assert [link_downs(cluster, other, number) for other in others] == downs


def test_a_node_that_was_killed_is_let_in_at_once(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    with Traffic(cluster, QUEUE, publish_at=(2,)) as traffic:
        for _ in range(2):
            traffic.goes_on()
            cluster.kill(3)
            cluster.start_node(3)
            cluster.wait_ready()
        traffic.all_consume()
        traffic.finish()
    for number in (1, 2):
        assert not log_has(cluster, number, "is in use")


# What was emptied, lost or copied.


def data(cluster: LocalCluster, number: int) -> Path:
    return cluster.data / f"node-{number}" / "data"


def identity(cluster: LocalCluster, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((data(cluster, number) / "node.json").read_text())
    return found


def start_again(cluster: LocalCluster, *numbers: int) -> None:
    """Starts nodes with an empty log file, so that only the new life is in it."""
    for number in numbers:
        cluster.log_file(number).unlink(missing_ok=True)
        cluster.start_node(number)


def ended_with(cluster: LocalCluster, number: int, words: str) -> None:
    """Waits until a node has ended by itself and has said why."""
    until(
        lambda: cluster.poll() is not None and cluster.nodes[number - 1].pid is None,
        f"node {number} goes on",
    )
    assert log_has(cluster, number, "node.failed", words), cluster.last_words(number)


def test_two_emptied_nodes_found_nothing_with_or_without_the_third(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 20, SIZE)
    before = identity(cluster, 3)["cluster"]
    assert before == identity(cluster, 1)["cluster"] != ""
    stop_nodes(cluster, 1, 2, 3)
    for number in (1, 2):
        shutil.rmtree(data(cluster, number))
    # Without the third: they wait for it, however long it takes.
    start_again(cluster, 1, 2)
    for number in (1, 2):
        until(
            lambda n=number: log_has(cluster, n, "cluster.waiting", '"missing": [3]'),
            "an emptied node does not say for whom it waits",
        )
    assert cluster.waiting() == dict.fromkeys((1, 2), "node 3 is not linked yet")
    # With the third: it has no majority, and says what can be done.
    start_again(cluster, 3)
    told = ("cluster.waiting", "no majority", "only [3] run", "convoy recover")
    for number in (1, 2):
        until(lambda n=number: log_has(cluster, n, *told), "an emptied node is not told why")
    # The same when the third was there first.
    for number in (1, 2):
        cluster.kill(number)
        shutil.rmtree(data(cluster, number))
    start_again(cluster, 1, 2)
    for number in (1, 2):
        until(lambda n=number: log_has(cluster, n, *told), "an emptied node is not told why")
        assert identity(cluster, number)["cluster"] == ""
    assert identity(cluster, 3)["cluster"] == before
    for number in (1, 2, 3):
        assert not log_has(cluster, number, "cluster.forming")
        assert not log_has(cluster, number, "node.ready")


def test_all_nodes_emptied_found_another_cluster(cluster: LocalCluster) -> None:
    before = identity(cluster, 1)
    stop_nodes(cluster, 1, 2, 3)
    for number in (1, 2, 3):
        shutil.rmtree(data(cluster, number))
        cluster.start_node(number)
    cluster.wait_ready()
    after = [identity(cluster, number) for number in (1, 2, 3)]
    assert len({found["cluster"] for found in after}) == 1
    assert after[0]["cluster"] != before["cluster"]
    assert after[0]["directory"] != before["directory"]


def test_nodes_that_learn_their_numbers_found_one_cluster(start_cluster: StartCluster) -> None:
    ports = [node.link_port for node in LocalCluster(Path(), 3, BASE_PORT).nodes]
    peers = ", ".join(f"127.0.0.1:{port}" for port in ports)
    cluster = start_cluster(settings={"cluster.peers": peers})
    assert len({identity(cluster, number)["cluster"] for number in (1, 2, 3)}) == 1
    for number in (1, 2, 3):
        until(
            lambda n=number: identity(cluster, n)["founding"] is None,
            "the founding is not over",
        )
    in_step(cluster)


@pytest.mark.parametrize("lost", ["log", "log/wal"])
def test_a_node_whose_log_is_gone_is_let_in_anew_and_nothing_is_lost(
    cluster: LocalCluster, lost: str
) -> None:
    for number in (1, 2, 3):
        declare(cluster, number, f"{QUEUE}-{number}")
        fill(cluster, 1, f"{QUEUE}-{number}", 50, SIZE)
    before = identity(cluster, 3)
    cluster.kill(3)
    shutil.rmtree(data(cluster, 3) / lost)
    start_again(cluster, 3)
    cluster.wait_ready()
    # Neither a vote nor an entry of it is counted on before it has everything again.
    until(
        lambda: (
            any(log_has(cluster, number, "cluster.wiped_node") for number in (1, 2))
            or log_has(cluster, 3, "storage.damaged")
        ),
        "nobody says that the log is gone",
    )
    until(
        lambda: counter(cluster, 3, "groups_led") + counter(cluster, 3, "groups_followed") == 4,
        "the node lacks groups",
    )
    in_step(cluster)
    after = identity(cluster, 3)
    assert after["cluster"] == before["cluster"]
    assert after["directory"] == before["directory"]
    assert after["incarnation"] > before["incarnation"]
    cluster.kill(1)
    for number in (1, 2, 3):
        assert drain(cluster, 3, f"{QUEUE}-{number}", 50, SIZE) == list(range(50))


@pytest.mark.parametrize("lost", ["all", "files", "newest"])
def test_missing_files_of_the_log_are_named_and_fetched_again(
    start_cluster: StartCluster, lost: str
) -> None:
    # A part of every group lies in segments or a snapshot, so that the node knows its cluster and
    # its members.
    small = {"raft.wal_max_size_bytes": "1MiB", "raft.mem_table_max_bytes": "0"}
    cluster = start_cluster(settings=small)
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 3000, 1000)
    wal = data(cluster, 3) / "log" / "wal"

    def is_kept() -> bool:
        """Whether the tree has more than the write-ahead log."""
        files = (wal.parent / "groups").glob("*0/*")
        # A pack has the first entries of every group that has little.
        packs = (wal.parent / "packs").glob("*.pack")
        return any(packs) or any(each.name == "snapshot" or each.suffix == ".seg" for each in files)

    until(is_kept, "the tree is in no segment and no pack yet")
    in_step(cluster)
    cluster.kill(3)
    found = sorted(wal.glob("*.wal"))
    if lost == "all":
        shutil.rmtree(wal)
    for path in found[-1:] if lost == "newest" else found if lost == "files" else []:
        path.unlink()
    start_again(cluster, 3)
    cluster.wait_ready()
    assert log_has(cluster, 3, "storage.damaged", "wal/"), cluster.last_words(3)
    in_step(cluster)
    cluster.kill(1)
    assert drain(cluster, 3, QUEUE, 3000, 1000) == list(range(3000))


def test_a_node_without_its_identity_does_not_start(cluster: LocalCluster) -> None:
    declare(cluster, 1, QUEUE)
    fill(cluster, 1, QUEUE, 20, SIZE)
    before = identity(cluster, 3)
    cluster.kill(3)
    (data(cluster, 3) / "node.json").unlink()
    start_again(cluster, 3)
    ended_with(cluster, 3, "node.json is missing")
    # Its number is known under another directory: what it once promised is gone.
    shutil.rmtree(data(cluster, 3))
    start_again(cluster, 3)
    cluster.wait_ready()
    after = identity(cluster, 3)
    assert after["directory"] != before["directory"]
    assert after["incarnation"] > before["incarnation"]
    in_step(cluster)
    cluster.kill(1)
    assert drain(cluster, 3, QUEUE, 20, SIZE) == list(range(20))


def test_an_older_copy_of_a_directory_is_refused(cluster: LocalCluster) -> None:
    stop_nodes(cluster, 3)
    copy = cluster.data / "copy"
    shutil.copytree(data(cluster, 3), copy)
    start_again(cluster, 3)
    cluster.wait_ready()
    start_time = identity(cluster, 3)["incarnation"]
    stop_nodes(cluster, 3)
    start_again(cluster, 3)
    cluster.wait_ready()
    assert identity(cluster, 3)["incarnation"] == start_time + 1
    stop_nodes(cluster, 3)
    shutil.rmtree(data(cluster, 3))
    copy.rename(data(cluster, 3))
    start_again(cluster, 3)
    until(
        lambda: any(
            log_has(cluster, number, words)
            for number in (1, 2, 3)
            for words in ("later incarnation", "another process had")
        ),
        "nobody says that the directory is an older copy",
    )
    assert not log_has(cluster, 3, "node.ready")


def lone(tmp_path: Path, number: int, *also: int) -> LocalCluster:
    """A cluster of one node with that number; `also`: further nodes in its list of peers."""
    secret = tmp_path / "secret"
    secret.write_text("the same for all")
    secret.chmod(0o600)
    base = BASE_PORT + 10 * number
    peers = [f"{n}@127.0.0.1:{BASE_PORT + 10 * n + 20_000}" for n in (number, *also)]
    settings = {
        "node.id": str(number),
        "cluster.peers": ", ".join(peers),
        "cluster.secret_file": str(secret),
    }
    return LocalCluster(tmp_path / f"cluster-{number}", 1, base, settings)


def test_two_clusters_never_link(tmp_path: Path) -> None:
    with lone(tmp_path, 4) as one:
        one.wait_ready()
        with lone(tmp_path, 5) as other:
            other.wait_ready()
            mine, theirs = (identity(made, 1)["cluster"] for made in (one, other))
            assert mine != theirs
        # Its list of peers now leads to the other cluster, by mistake.
        with lone(tmp_path, 5, 4) as other:
            other.wait_ready()
            declare(other, 1, "theirs")
            for made in (one, other):
                until(
                    lambda made=made: log_has(made, 1, "link.", mine, theirs),
                    "the clusters are not named",
                )
                assert not log_has(made, 1, "link.up")
            assert one.api("queues") == []
            assert [queue["name"] for queue in other.api("queues")] == ["theirs"]
        # The other cluster's id in a directory that is not its own.
        file = data(other, 1) / "node.json"
        file.write_text(file.read_text().replace(theirs, mine))
        with lone(tmp_path, 5) as other:
            ended_with(other, 1, f"belongs to cluster {theirs}")
