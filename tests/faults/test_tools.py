"""RabbitMQ's tools against real nodes: no password on the own machine, any node of the cluster, and
what they say when nodes are down."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.cli.ctl.main import main
from tests.faults.conftest import BASE_PORT, StartCluster
from tests.faults.traffic import log_has, until
from tests.patience import PATIENCE_S

QUORUM = {"x-queue-type": "quorum"}


def node_names(cluster: LocalCluster) -> dict[int, str]:
    """The nodes' names by number. The HTTP API opens a moment after AMQP does."""
    found: dict[int, str] = {}

    def answers() -> bool:
        found.update({row["id"]: row["name"] for row in cluster.api("nodes")})
        return True

    until(answers, "the HTTP API does not answer")
    return found


class Tools:
    """Runs tools against a cluster of this machine."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.names = node_names(cluster)

    def run(self, *words: object, code: int = 0, **environment: str) -> str:
        """Returns what a command printed; checks its exit code."""
        return self.both(*words, code=code, **environment)[0]

    def both(self, *words: object, code: int = 0, **environment: str) -> tuple[str, str]:
        """Returns standard output and standard error; checks the exit code."""
        out, err = io.StringIO(), io.StringIO()
        variables = {"CONVOY_DATA_DIR": str(self.cluster.data), **environment}
        with patch.dict(os.environ, variables), redirect_stdout(out), redirect_stderr(err):
            got = main(str(words[0]), [str(word) for word in words[1:]])
        assert got == code, (words, out.getvalue(), err.getvalue())
        return out.getvalue(), err.getvalue()

    def json(self, *words: object, **environment: str) -> Any:
        """The JSON that a command prints."""
        return json.loads(self.run(*words, "--formatter", "json", **environment))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes for tests that leave nothing behind."""
    with LocalCluster(tmp_path_factory.mktemp("tools"), 3, BASE_PORT + 40) as made:
        made.wait_ready()
        yield made


@pytest.fixture
def tools(shared: LocalCluster) -> Tools:
    return Tools(shared)


def connect(cluster: LocalCluster, node: int = 1, user: str = "guest", vhost: str = "/") -> Any:
    credentials = pika.PlainCredentials(user, user)
    port = cluster.nodes[node - 1].amqp_port
    return pika.BlockingConnection(
        pika.ConnectionParameters("127.0.0.1", port, vhost, credentials, heartbeat=0)
    )


def closed_with(connection: Any) -> str:
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as raised:
        connection.process_data_events(PATIENCE_S)
    return str(raised.value.reply_text)


def test_an_operator_on_the_machine_needs_no_user(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    tools = Tools(cluster)
    assert tools.run("ctl", "delete_user", "guest") == 'Deleting user "guest" ...\n'
    tools.run("ctl", "add_user", "boss", "boss")
    tools.run("ctl", "set_user_tags", "boss", "administrator")
    tools.run("ctl", "add_vhost", "own")
    # Nobody got permissions for it: nobody made it by a user.
    assert tools.run("ctl", "list_permissions", "-p", "own", "-q") == ""
    tools.run("ctl", "set_permissions", "-p", "own", "boss", ".*", ".*", ".*")
    connection = connect(cluster, 1, "boss", "own")
    connection.channel().queue_declare("q", durable=True, arguments=QUORUM)
    listed = tools.run("ctl", "-s", "-p", "own", "list_queues", "name", "type", "messages")
    assert listed == "q\tquorum\t0\n"
    assert tools.run("ctl", "-q", "delete_queue", "-p", "own", "q") == (
        "Queue was successfully deleted with 0 ready messages\n"
    )
    # From elsewhere a user is needed; the old one is gone.
    url = f"http://127.0.0.1:{cluster.nodes[0].http_port}"
    tools.run("ctl", "-q", "list_users", "--url", url, code=77)
    tools.run("ctl", "-q", "list_users", "--url", url, "--user", "boss:boss")
    tools.run("ctl", "-q", "change_password", "boss", "other")
    tools.run("ctl", "-q", "list_users", "--url", url, "--user", "boss:boss", code=77)
    tools.run("ctl", "authenticate_user", "boss", "boss", code=65)
    tools.run("ctl", "authenticate_user", "boss", "other")
    connection.close()
    who = f'"uid": {os.getuid()}'
    for method, path in (("DELETE", "users/guest"), ("PUT", "vhosts/own")):
        asked = ("operator.requested", who, f'"method": "{method}"', f'"path": "/api/{path}"')
        until(lambda asked=asked: log_has(cluster, 1, *asked), f"{path} is not in the log")


def test_a_command_goes_to_the_node_that_is_named(tools: Tools) -> None:
    cluster = tools.cluster
    for number in (1, 2, 3):
        pid = cluster.nodes[number - 1].pid
        for node in (number, tools.names[number]):
            status = tools.json("ctl", "-n", node, "status")
            assert status["pid"] == pid
            assert status["data_directory"] == str(cluster.data / f"node-{number}" / "data")
            assert Path(status["raft_data_directory"]).is_dir()
        # A data directory of a node answers for the others too, over the link.
        data = str(cluster.data / "node-1" / "data")
        found = tools.json("ctl", "-n", tools.names[number], "status", CONVOY_DATA_DIR=data)
        assert found["pid"] == pid
        named = tools.json("ctl", "status", RABBITMQ_NODENAME=tools.names[number])
        assert named["pid"] == pid
    out, err = tools.both("ctl", "-q", "-n", "nobody@nowhere", "list_users", code=69)
    assert out == ""
    assert "unable to perform an operation on node 'nobody@nowhere'" in err


def test_connections_are_listed_and_closed_with_a_reason(tools: Tools) -> None:
    cluster = tools.cluster
    first, second, third = connect(cluster, 1), connect(cluster, 2), connect(cluster, 3)
    channel = first.channel()
    channel.queue_declare("q", durable=True, arguments=QUORUM)
    channel.basic_qos(prefetch_count=2)
    channel.basic_consume("q", lambda *_: None, consumer_tag="tag")
    until(lambda: len(tools.json("ctl", "list_connections")) == 3, "not three connections")
    rows = tools.json("ctl", "list_connections", "pid", "user", "state", "protocol", "node")
    by_node = {row["node"]: row for row in rows}
    assert by_node.keys() == set(tools.names.values())
    assert {(row["user"], row["state"]) for row in rows} == {("guest", "running")}
    assert rows[0]["protocol"] == [0, 9, 1]
    (row,) = tools.json("ctl", "list_channels")
    assert row == {"pid": row["pid"], "user": "guest", "consumer_count": 1,
                   "messages_unacknowledged": 0}  # fmt: skip
    (row,) = tools.json("ctl", "list_consumers")
    assert row == {"queue_name": "q", "channel_pid": row["channel_pid"], "consumer_tag": "tag",
                   "ack_required": True, "prefetch_count": 2, "active": True,
                   "arguments": []}  # fmt: skip
    name = by_node[tools.names[1]]["pid"]
    banner = f"Closing connection {name}, reason: moving house...\n"
    assert tools.run("ctl", "close_connection", name, "moving house") == banner
    assert closed_with(first) == "CONNECTION_FORCED - moving house"
    done = tools.run("ctl", "-n", tools.names[2], "close_all_connections", "--global", "bye")
    assert done.splitlines()[1] == "Closed 1 connections"
    assert closed_with(second) == "CONNECTION_FORCED - bye"
    tools.run("ctl", "close_all_user_connections", "guest", "you too")
    assert closed_with(third) == "CONNECTION_FORCED - you too"
    tools.run("ctl", "-q", "delete_queue", "q")


def test_policies_and_definitions_act(start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster(1)
    tools = Tools(cluster)
    connection = connect(cluster)
    connection.channel().queue_declare("q", durable=True, arguments=QUORUM)
    tools.run("ctl", "set_policy", "p", "^q", '{"delivery-limit": 3}', "--apply-to", "queues")
    columns = ("name", "policy", "effective_policy_definition")
    assert tools.json("ctl", "list_queues", *columns) == [
        {"name": "q", "policy": "p",
         "effective_policy_definition": [["delivery-limit", "signedint", 3]]}
    ]  # fmt: skip
    found = tools.json("diagnostics", "list_policies_that_match", "q")
    policy = {"vhost": "/", "name": "p", "pattern": "^q", "apply-to": "queues",
              "definition": {"delivery-limit": 3}, "priority": 0}  # fmt: skip
    assert found == {"result": "ok", "policies": [policy]}
    tools.run("ctl", "set_vhost_limits", '{"max-connections": 0}')
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        connect(cluster)
    tools.run("ctl", "clear_vhost_limits")
    file = tmp_path / "definitions.json"
    tools.run("ctl", "export_definitions", file)
    tools.run("ctl", "clear_policy", "p")
    tools.run("ctl", "-q", "delete_queue", "q")
    tools.run("ctl", "import_definitions", file)
    assert [row["name"] for row in tools.json("ctl", "list_queues")] == ["q"]
    assert [row["name"] for row in tools.json("ctl", "list_policies")] == ["p"]
    connection.close()


def test_checks_see_what_a_dead_node_means(cluster: LocalCluster) -> None:
    tools = Tools(cluster)
    connection = connect(cluster, 1)
    connection.channel().queue_declare("q", durable=True, arguments=QUORUM)
    connection.close()
    assert tools.run("diagnostics", "-q", "ping") == "Ping succeeded\n"
    tools.run("diagnostics", "check_if_node_is_quorum_critical")
    tools.run("diagnostics", "check_port_connectivity")
    names = list(tools.names.values())
    assert tools.json("ctl", "cluster_status")["running_nodes"] == names
    cluster.kill(3)

    def alone() -> bool:
        return bool(tools.json("ctl", "cluster_status")["running_nodes"] == names[:2])

    until(alone, "node 3 is still listed as running")
    _, err = tools.both("queues", "check_if_node_is_quorum_critical", code=69)
    assert "queue 'q' in vhost '/' will become unavailable if node" in err
    tools.run("upgrade", "await_online_quorum_plus_one", "-t", "1", code=69)
    states = tools.json("queues", "quorum_status", "q")
    assert sorted(row["Raft State"] for row in states) == ["follower", "leader", "nodedown"]

    def metadata_is_led() -> bool:
        replicas = tools.json("diagnostics", "metadata_store_status")
        assert [row["Node Name"] for row in replicas] == names
        states = sorted(row["Raft State"] for row in replicas)
        return states == ["follower", "leader", "nodedown"]

    until(metadata_is_led, "the metadata have no leader")
    used = tools.json("diagnostics", "check_if_any_deprecated_features_are_used")
    assert used == {"result": "ok"}
    # Whoever still runs is asked; the dead node itself cannot be.
    cluster.kill(1)
    assert tools.run("diagnostics", "-q", "ping") == "Ping succeeded\n"
    tools.run("diagnostics", "-n", names[0], "ping", code=69)
    # No majority is left: what is known can be read, nothing can be changed.
    assert "guest" in tools.run("ctl", "list_users")
    tools.run("ctl", "-t", "3", "add_user", "x", "x", code=75)
    cluster.start_node(1)
    tools.run("ctl", "-n", 1, "await_startup", "-t", "30")
    tools.run("ctl", "-t", "30", "await_online_nodes", 2)
    assert tools.run("ctl", "forget_cluster_node", names[2]) == (
        f"Removing node {names[2]} from the cluster\n"
    )
    assert tools.json("ctl", "cluster_status")["disk_nodes"] == names[:2]
    tools.run("ctl", "forget_cluster_node", names[2], code=69)


def test_a_drained_node_fails_the_checks_of_its_ports(tools: Tools) -> None:
    node = tools.names[2]
    tools.run("upgrade", "-n", node, "drain")
    tools.run("upgrade", "drain", 3)

    def refuses() -> bool:
        try:
            tools.run("diagnostics", "-n", node, "check_port_connectivity", code=69)
        except AssertionError:
            return False
        return True

    until(refuses, "the drained node takes connections")
    status = tools.json("ctl", "cluster_status")["maintenance_status"]
    assert [status[name] for name in tools.names.values()] == [
        "not under maintenance", "marked for maintenance", "marked for maintenance"
    ]  # fmt: skip
    assert tools.json("ctl", "-n", node, "status")["is_under_maintenance"]
    tools.run("upgrade", "revive", node)
    tools.run("upgrade", "-n", tools.names[3], "revive")


def test_alarms_are_told_where_they_are(start_cluster: StartCluster) -> None:
    cluster = start_cluster(3, settings={"disk_free_limit.absolute": "1000TB"})
    tools = Tools(cluster)
    until(lambda: len(tools.json("ctl", "cluster_status")["alarms"]) == 3, "not three alarms")
    text = f"Free disk space alarm on node {tools.names[2]}"
    assert text in tools.run("diagnostics", "-n", tools.names[2], "-q", "alarms")
    _, err = tools.both("diagnostics", "-n", 2, "-q", "check_local_alarms", code=69)
    assert err == f"Error:\n{text}\n"
    _, err = tools.both("diagnostics", "-q", "check_alarms", code=69)
    assert len(err.splitlines()) == 3


def test_watermarks_move_while_a_node_runs(cluster: LocalCluster) -> None:
    tools = Tools(cluster)
    node = tools.names[2]
    before = tools.json("ctl", "-n", node, "status")

    def alarms() -> Any:
        return tools.json("diagnostics", "-n", node, "alarms").get("local", [])

    assert tools.run("ctl", "-n", node, "set_disk_free_limit", "900TB") == (
        f"Setting disk free limit on {node} to 900TB bytes ...\n"
    )
    tools.run("ctl", "-n", node, "set_vm_memory_high_watermark", "absolute", "1MB")
    until(lambda: len(alarms()) == 2, "not both alarms of node 2")
    tools.run("ctl", "-q", "-n", node, "set_vm_memory_high_watermark", "0.5")
    tools.run("ctl", "-q", "-n", node, "set_disk_free_limit", "mem_relative", "0.001")
    until(lambda: not alarms(), "the alarms of node 2 do not end")
    after = tools.json("ctl", "-n", node, "status")
    # Three nodes of one machine share 0.6 of its memory.
    whole = before["vm_memory_high_watermark_limit"] / (0.6 / 3)
    assert abs(after["vm_memory_high_watermark_limit"] - whole / 2) < 10
    assert abs(after["disk_free_limit"] - whole / 1000) < 10
    assert tools.json("ctl", "-n", 1, "status")["disk_free_limit"] == before["disk_free_limit"]
    for words in (["set_disk_free_limit", "x"], ["set_vm_memory_high_watermark", "1.5"],
                  ["set_vm_memory_high_watermark", "absolute", "x"]):  # fmt: skip
        tools.run("ctl", *words, code=65)
    # RabbitMQ's way to stop all publishers.
    tools.run("ctl", "-n", node, "set_vm_memory_high_watermark", "0")
    until(lambda: bool(alarms()), "no alarm at the watermark 0")


def test_runbooks_run_under_rabbitmqs_names(tools: Tools, tmp_path: Path) -> None:
    cluster = tools.cluster
    tools.run("ctl", "--install-names", tmp_path)
    script = """
        set -e
        rabbitmqctl await_startup --timeout 60
        rabbitmqctl -q add_user app secret
        rabbitmqctl -q set_permissions -p / app '.*' '.*' '.*'
        rabbitmq-diagnostics -q check_running
        rabbitmq-diagnostics check_port_listener "$PORT" > /dev/null
        rabbitmq-queues -q check_if_node_is_quorum_critical
        rabbitmq-upgrade await_online_quorum_plus_one -t 20 > /dev/null
        rabbitmqctl list_users -s | cut -f1 | sort | tr '\\n' ' '
        rabbitmqctl -q delete_user app
        if rabbitmqctl -q delete_user app 2> /dev/null; then exit 1; fi
    """
    done = subprocess.run(
        ["bash", "-c", script],
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "CONVOY_DATA_DIR": str(cluster.data),
            "PORT": str(cluster.nodes[0].amqp_port),
        },
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.splitlines() == [
        f"RabbitMQ on node {tools.names[1]} is fully booted and running",
        f"Node {tools.names[1]} reported no queues/streams with minimum quorum",
        "app guest ",
    ]


def test_a_frozen_node_is_a_time_out(tools: Tools) -> None:
    cluster = tools.cluster
    cluster.kill(2, signal.SIGSTOP)
    data = str(cluster.data / "node-2" / "data")
    try:
        tools.run("ctl", "-t", "1", "list_users", code=75, CONVOY_DATA_DIR=data)
    finally:
        cluster.kill(2, signal.SIGCONT)
