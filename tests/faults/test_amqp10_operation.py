"""What an operator sees and does while clients of AMQP 1.0 are connected, with Qpid Proton: lists,
metrics, permissions, limits, alarms, TLS, traces, and connections that are closed."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import trustme

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, serving_cluster
from tests.faults.test_tools import Tools
from tests.faults.traffic import until
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

proton = pytest.importorskip("proton", reason="Qpid Proton is not there: make test-amqp10")
from proton.utils import BlockingConnection, LinkDetached, SendException  # noqa: E402

pytestmark = pytest.mark.cluster

BASE_PORT = cluster_ports(__name__)
TLS_PORT = BASE_PORT + 40
DEVICE = "device-7"
ALL = {"configure": ".*", "write": ".*", "read": ".*"}
_numbers = itertools.count(1)


@dataclass
class Setup:
    """One node that offers TLS, and who signs for it."""

    cluster: LocalCluster
    authority: trustme.CA
    directory: Path

    def api(self, method: str, path: str, body: object = None) -> Any:
        status, found = call(self.cluster, method, path, body)
        assert status < 300, (status, found)
        return found

    def user(self, name: str, **rules: str) -> str:
        self.api("PUT", f"users/{name}", {"password": name, "tags": ""})
        self.api("PUT", f"permissions/%2F/{name}", ALL | rules)
        return name

    def metrics(self, protocol: str = "amqp10") -> dict[str, float]:
        """Returns `rabbitmq_global_…` of a protocol, without that prefix."""
        port = self.cluster.nodes[0].metrics_port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as got:
            lines = got.read().decode().splitlines()
        label = f'{{protocol="{protocol}"}} '
        found = [line.partition(label) for line in lines if label in line]
        return {name.removeprefix("rabbitmq_global_"): float(value) for name, _, value in found}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    directory = tmp_path_factory.mktemp("operation")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    pem = directory / "node.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
    settings = {
        "listeners.ssl.default": f"127.0.0.1:{TLS_PORT}",
        "ssl_options.certfile": str(pem),
        "ssl_options.keyfile": str(pem),
        "ssl_options.cacertfile": str(directory / "ca.pem"),
        "ssl_options.verify": "verify_peer",
        "auth_mechanisms": "PLAIN EXTERNAL",
        "ssl_cert_login_from": "common_name",
        "alarms.interval": "100",
    }
    with serving_cluster(directory / "cluster", BASE_PORT, settings, nodes=1) as cluster:
        made = Setup(cluster, authority, directory)
        for name in ("q", "other"):
            body = {"durable": True, "arguments": {"x-queue-type": "quorum"}}
            made.api("PUT", f"queues/%2F/{name}", body)
        yield made


@pytest.fixture
def dial(setup: Setup) -> Iterator[Callable[..., Any]]:
    """Opens blocking connections: `dial(user)`."""
    opened: list[Any] = []

    def one(user: str = "guest", url: str = "", **options: Any) -> Any:
        port = setup.cluster.nodes[0].amqp_port
        url = url or f"amqp://{user}:{user}@127.0.0.1:{port}"
        options = {"timeout": PATIENCE_S, "allowed_mechs": "PLAIN", **options}
        opened.append(BlockingConnection(url, **options))
        return opened[-1]

    yield one
    for each in opened:
        with suppress(Exception):
            each.close()


def send(sender: Any, *bodies: str) -> None:
    for body in bodies:
        assert sender.send(proton.Message(body=body)).remote_state == proton.Delivery.ACCEPTED


def own_rows(setup: Setup, user: str = "guest") -> list[Any]:
    rows = setup.api("GET", "connections")
    return [row for row in rows if (row["protocol"], row["user"]) == ("AMQP 1-0", user)]


def is_closed(connection: Any) -> bool:
    with suppress(Exception):
        connection.wait(lambda: False, timeout=0.05)
    return bool(connection.conn.state & proton.Endpoint.REMOTE_CLOSED) or connection.disconnected


def test_sessions_and_links_are_listed(setup: Setup, dial: Callable[..., Any]) -> None:
    user = setup.user("lister")
    connection = dial(user)
    sender = connection.create_sender("/queues/q", name="in")
    connection.create_sender(None, name="anonymous")
    receiver = connection.create_receiver("/queues/q", name="out", credit=5)
    send(sender, "a", "b")
    receiver.receive(timeout=PATIENCE_S)
    (row,) = own_rows(setup, user)
    assert row["container_id"] == connection.container.container_id
    assert row["channels"] == 1
    path = f"connections/{quote(row['name'])}/sessions"

    def delivered() -> bool:
        return bool(setup.api("GET", path)[0]["outgoing_links"][0]["delivery_count"] == 2)

    until(delivered, "the list stays behind")
    (session,) = setup.api("GET", path)
    incoming = {link["link_name"]: link for link in session.pop("incoming_links")}
    (outgoing,) = session.pop("outgoing_links")
    assert session["channel_number"] == 0
    assert session["outgoing_unsettled_deliveries"] == 2
    assert {"handle_max", "next_incoming_id", "incoming_window", "next_outgoing_id",
            "remote_incoming_window", "remote_outgoing_window"} < session.keys()  # fmt: skip
    assert incoming["anonymous"]["target_address"] is None
    link = incoming["in"]
    assert {name: link[name] for name in (
        "snd_settle_mode", "target_address", "delivery_count", "unconfirmed_messages",
    )} == {
        "snd_settle_mode": "mixed", "target_address": "/queues/q", "delivery_count": 2,
        "unconfirmed_messages": 0,
    }  # fmt: skip
    assert link["credit"] > 0
    assert {name: outgoing[name] for name in (
        "link_name", "source_address", "queue_name", "send_settled", "max_message_size", "filter",
        "credit", "consumer_timeout",
    )} == {
        "link_name": "out", "source_address": "/queues/q", "queue_name": "q",
        "send_settled": False, "max_message_size": "unlimited", "filter": [], "credit": 3,
        "consumer_timeout": False,
    }  # fmt: skip
    assert setup.api("GET", f"connections/{quote(row['name'])}/channels") == []
    # The tool of operators has the same.
    tools = Tools(setup.cluster)
    columns = ("pid", "protocol", "container_id", "channels", "user", "vhost", "state")
    (shown,) = [
        each for each in tools.json("ctl", "list_connections", *columns) if each["user"] == user
    ]
    assert shown["pid"] == row["name"]
    assert (shown["container_id"], shown["channels"]) == (row["container_id"], 1)
    (consumer,) = [
        each
        for each in tools.json("ctl", "list_consumers", "queue_name", "channel_pid", "consumer_tag")
        if each["channel_pid"].startswith(row["name"])
    ]
    assert (consumer["queue_name"], consumer["consumer_tag"]) == ("q", str(outgoing["handle"]))
    receiver.accept()
    receiver.close()
    setup.api("DELETE", "queues/%2F/q/contents")


def test_other_protocols_have_no_sessions(setup: Setup) -> None:
    from benchmarks.systems import connect

    with connect(f"amqp://127.0.0.1:{setup.cluster.nodes[0].amqp_port}") as connection:
        connection.channel()
        rows = setup.api("GET", "connections")
        (name,) = [row["name"] for row in rows if row["protocol"] == "AMQP 0-9-1"]
        status, found = call(setup.cluster, "GET", f"connections/{quote(name)}/sessions")
    assert status == 400
    assert found["reason"] == "connection does not use AMQP 1.0"
    assert call(setup.cluster, "GET", "connections/none/sessions")[0] == 404


def test_messages_are_counted_by_protocol(setup: Setup, dial: Callable[..., Any]) -> None:
    before, others = setup.metrics(), setup.metrics("amqp091")
    connection = dial()
    send(connection.create_sender("/queues/other"), "a", "b")
    with suppress(Exception):
        connection.create_sender("/exchanges/amq.direct/none").send(proton.Message(body="x"))
    receiver = connection.create_receiver("/queues/other", credit=2)
    for _ in range(2):
        receiver.receive(timeout=PATIENCE_S)
        receiver.accept()
    # What was accepted goes out with what comes next.
    connection.create_receiver("/queues/q", name="second")

    def grown() -> dict[str, float]:
        now = setup.metrics()
        return {name: now[name] - before[name] for name in now if now[name] != before[name]}

    wanted = {
        "messages_received_total": 3, "messages_confirmed_total": 2,
        "messages_unroutable_returned_total": 1, "messages_delivered_total": 2,
        "messages_delivered_consume_manual_ack_total": 2, "messages_acknowledged_total": 2,
        "consumers": 2, "publishers": 2,
    }  # fmt: skip
    until(lambda: grown() == wanted, "the counters differ")
    assert setup.metrics("amqp091") == others


def test_permissions_are_asked_by_link(setup: Setup, dial: Callable[..., Any]) -> None:
    user = setup.user("bounded", write="^amq\\.(default|topic)$", read="^q$")
    setup.api("POST", "bindings/%2F/e/amq.topic/q/q", {"routing_key": "#"})
    topic = {"exchange": "amq.topic", "write": "^mine\\.", "read": ".*"}
    setup.api("PUT", f"topic-permissions/%2F/{user}", topic)
    connection = dial(user)
    with pytest.raises(LinkDetached, match="read access to queue 'other'"):
        connection.create_receiver("/queues/other")
    with pytest.raises(LinkDetached, match=r"write access to exchange 'amq\.direct'"):
        connection.create_sender("/exchanges/amq.direct/k")
    send(connection.create_sender("/exchanges/amq.topic/mine.x"), "a")
    with pytest.raises(SendException) as refused:
        connection.create_sender("/exchanges/amq.topic/yours.x").send(proton.Message(body="x"))
    assert refused.value.state == proton.Delivery.REJECTED
    connection.create_receiver("/queues/q")
    connection.close()
    setup.api("DELETE", "queues/%2F/q/contents")
    setup.api("DELETE", "bindings/%2F/e/amq.topic/q/q/%23")


def test_limits_of_users_and_virtual_hosts(setup: Setup, dial: Callable[..., Any]) -> None:
    user = setup.user("limited")
    setup.api("PUT", f"user-limits/{user}/max-connections", {"value": 1})
    first = dial(user)
    first.create_sender("/queues/q")
    with pytest.raises(proton.ConnectionException, match="limit"):
        dial(user)
    setup.api("DELETE", f"user-limits/{user}/max-connections")
    setup.api("PUT", "vhost-limits/%2F/max-connections", {"value": 1})
    with pytest.raises(proton.ConnectionException, match="limit"):
        dial()
    setup.api("DELETE", "vhost-limits/%2F/max-connections")
    # Sessions are channels: one is open.
    setup.api("PUT", f"user-limits/{user}/max-channels", {"value": 1})
    until(lambda: own_rows(setup, user)[0]["channels"] == 1, "no session is listed")
    session = first.conn.session()
    session.open()
    first.wait(lambda: session.state & proton.Endpoint.REMOTE_CLOSED, timeout=PATIENCE_S)
    assert session.remote_condition.name == "amqp:resource-limit-exceeded"
    setup.api("DELETE", f"user-limits/{user}/max-channels")


@contextmanager
def memory_alarm(setup: Setup) -> Iterator[None]:
    path = "convoy/node/watermarks"
    setup.api("PUT", path, {"memory": {"absolute": 1}})
    until(lambda: setup.api("GET", "nodes")[0]["mem_alarm"], "no alarm")
    try:
        yield
    finally:
        setup.api("PUT", path, {"memory": {"relative": 0.6}})


def test_an_alarm_holds_publishers_and_nobody_else(setup: Setup, dial: Callable[..., Any]) -> None:
    connection, other = dial(), dial()
    sender = connection.create_sender("/queues/other")
    receiver = other.create_receiver("/queues/other", credit=10)
    send(sender, "before")
    with memory_alarm(setup):
        states = [row["state"] for row in own_rows(setup)]
        assert sorted(states) == ["blocked", "running"]
        assert receiver.receive(timeout=PATIENCE_S).body == "before"
        receiver.accept()
        delivery = sender.link.send(proton.Message(body="held"))
        late = connection.create_sender("/queues/other", name="late")
        assert late.link.credit == 0
        assert not delivery.settled
    connection.wait(lambda: delivery.settled, timeout=PATIENCE_S)
    assert delivery.remote_state == proton.Delivery.ACCEPTED
    assert receiver.receive(timeout=PATIENCE_S).body == "held"
    receiver.accept()


def ssl_domain(setup: Setup, name: str = "") -> Any:
    domain = proton.SSLDomain(proton.SSLDomain.MODE_CLIENT)
    domain.set_trusted_ca_db(str(setup.directory / "ca.pem"))
    if name:
        pem = setup.directory / f"{name}.pem"
        certificate = setup.authority.issue_cert(common_name=name)
        certificate.private_key_and_cert_chain_pem.write_to_path(pem)
        domain.set_credentials(str(pem), str(pem), None)
    domain.set_peer_authentication(proton.SSLDomain.VERIFY_PEER)
    return domain


def test_tls_with_a_password_and_with_a_certificate(setup: Setup, dial: Callable[..., Any]) -> None:
    url = f"amqps://guest:guest@127.0.0.1:{TLS_PORT}"
    connection = dial(url=url, ssl_domain=ssl_domain(setup))
    body = "x" * 300_000
    send(connection.create_sender("/queues/other"), body)
    setup.user(DEVICE)
    own = dial(
        url=f"amqps://127.0.0.1:{TLS_PORT}",
        ssl_domain=ssl_domain(setup, DEVICE),
        allowed_mechs="EXTERNAL",
    )
    receiver = own.create_receiver("/queues/other", credit=1)
    assert receiver.receive(timeout=PATIENCE_S).body == body
    receiver.accept()
    (row,) = own_rows(setup, DEVICE)
    assert (row["ssl"], row["auth_mechanism"]) == (True, "EXTERNAL")


@pytest.mark.parametrize("by", ["api", "tool", "user"])
def test_an_operator_closes_connections(setup: Setup, dial: Callable[..., Any], by: str) -> None:
    user = setup.user(f"victim{next(_numbers)}")
    connection, stays = dial(user), dial()
    connection.create_receiver("/queues/other")
    name = own_rows(setup, user)[0]["name"]
    if by == "api":
        setup.api("DELETE", f"connections/{quote(name)}")
    elif by == "tool":
        Tools(setup.cluster).run("ctl", "close_connection", name, "go away")
    else:
        setup.api("DELETE", f"connections/username/{user}")
    until(lambda: is_closed(connection), "the connection lives")
    condition = connection.conn.remote_condition
    assert condition.name == "amqp:internal-error"
    assert condition.description.startswith("Connection forced: ")
    until(lambda: own_rows(setup, user) == [], "it stays in the list")
    assert not is_closed(stays)


def test_traces_have_what_1_0_publishes_and_gets(setup: Setup, dial: Callable[..., Any]) -> None:
    setup.api("PUT", "queues/%2F/copies", {"durable": True, "arguments": {}})
    setup.api("POST", "bindings/%2F/e/amq.rabbitmq.trace/q/copies", {"routing_key": "#"})
    setup.api("PUT", "vhosts/%2F", {"tracing": True})
    until(lambda: setup.api("GET", "vhosts/%2F")["tracing"], "no tracing")
    connection = dial()
    send(connection.create_sender("/queues/other"), "traced")
    receiver = connection.create_receiver("/queues/other", credit=1)
    receiver.receive(timeout=PATIENCE_S)
    receiver.accept()
    setup.api("PUT", "vhosts/%2F", {"tracing": False})
    copies: list[Any] = []

    def all_there() -> bool:
        body = {"count": 5, "ackmode": "ack_requeue_false", "encoding": "auto"}
        copies.extend(setup.api("POST", "queues/%2F/copies/get", body))
        return len(copies) >= 2

    until(all_there, "copies are missing")
    keys = [each["routing_key"] for each in copies]
    assert keys == ["publish.", "deliver.other"]
    assert all(each["properties"]["headers"]["user"] == "guest" for each in copies[:1])
    setup.api("DELETE", "queues/%2F/copies")


def test_the_load_tool_checks_what_goes_in_and_out(setup: Setup) -> None:
    uri = f"amqp://guest:guest@127.0.0.1:{setup.cluster.nodes[0].amqp_port}"
    words = (
        "--protocol",
        "amqp10",
        "--uri",
        uri,
        "--count",
        "2000",
        "--size",
        "200000",
        "--verify",
    )
    for more in (
        (),
        ("--size", "16", "--header", "k=v"),
        ("--size", "16", "--queue-type", "classic"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "convoymq.cli.perf", *words, *more, "--format", "json"]
            + ([] if more else ["--count", "50"]),
            capture_output=True,
            timeout=PATIENCE_S,
            check=True,
        )
        report = json.loads(done.stdout)
        count = 2000 if more else 50
        assert report["protocol"] == "amqp10"
        assert (report["confirmed"], report["consumed"], report["missing"]) == (count, count, 0)
        assert report["out_of_order"] == report["bad"] == 0
