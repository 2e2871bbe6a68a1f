"""Users, permissions and virtual hosts change while clients of other nodes work with them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, serving_cluster
from tests.faults.traffic import until
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

pytestmark = pytest.mark.cluster

BASE_PORT = cluster_ports(__name__)
QUORUM = {"x-queue-type": "quorum"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    limits = {"channel_max": "5", "connection_max": "20"}
    with serving_cluster(tmp_path_factory.mktemp("administration"), BASE_PORT, limits) as made:
        yield made


def api(cluster: LocalCluster, method: str, path: str, body: object = None) -> None:
    """A request that succeeds."""
    status, answer = call(cluster, method, path, (body or {}) if method == "PUT" else None, node=1)
    assert status < 300, answer


def add_user(cluster: LocalCluster, name: str, vhost: str = "%2F", read: str = ".*") -> None:
    api(cluster, "PUT", f"users/{name}", {"password": name, "tags": ""})
    permit(cluster, name, vhost, read=read)


def permit(
    cluster: LocalCluster, name: str, vhost: str = "%2F", *, write: str = ".*", read: str = ".*"
) -> None:
    rules = {"configure": ".*", "write": write, "read": read}
    api(cluster, "PUT", f"permissions/{vhost}/{name}", rules)


def connect(cluster: LocalCluster, user: str, vhost: str = "/", node: int = 2) -> Any:
    return pika.BlockingConnection(
        pika.ConnectionParameters(
            "127.0.0.1",
            cluster.nodes[node - 1].amqp_port,
            vhost,
            pika.PlainCredentials(user, user),
            socket_timeout=5,
            heartbeat=0,
        )
    )


def listen(connection: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        connection.process_data_events(0.05)


def until_closed(connection: Any) -> tuple[int, str]:
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as raised:
        listen(connection)
    return raised.value.reply_code, raised.value.reply_text


def test_a_deleted_virtual_host_takes_its_connections_along(cluster: LocalCluster) -> None:
    api(cluster, "PUT", "vhosts/short")
    add_user(cluster, "tenant", "short")
    connection = connect(cluster, "tenant", "short")
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("q", durable=True, arguments=QUORUM)
    channel.basic_publish("", "q", b"x")
    channel.basic_consume("q", lambda *_: None)
    api(cluster, "DELETE", "vhosts/short")
    assert until_closed(connection) == (320, "CONNECTION_FORCED - vhost 'short' is deleted")
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError) as raised:
        connect(cluster, "tenant", "short")
    assert "NOT_ALLOWED - vhost short not found" in str(raised.value)
    api(cluster, "DELETE", "users/tenant")


def test_a_deleted_user_is_out_at_once(cluster: LocalCluster) -> None:
    add_user(cluster, "leaver")
    connection = connect(cluster, "leaver")
    api(cluster, "DELETE", "users/leaver")
    assert until_closed(connection) == (320, "CONNECTION_FORCED - user 'leaver' is deleted")
    with pytest.raises(pika.exceptions.ProbableAuthenticationError):
        connect(cluster, "leaver")


def test_a_permission_that_is_taken_away_ends_remembered_ones(cluster: LocalCluster) -> None:
    add_user(cluster, "writer")
    connection = connect(cluster, "writer")
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("written", durable=True, arguments=QUORUM)
    channel.basic_publish("", "written", b"x")
    permit(cluster, "writer", write="^$")

    refusals: list[str] = []

    def refused() -> bool:
        # The change reaches this client's node a moment after the answer of the other one.
        try:
            channel.basic_publish("", "written", b"x")
        except pika.exceptions.ChannelClosedByBroker as error:
            refusals.append(error.reply_text)
        return bool(refusals)

    until(refused)
    assert refusals == [
        "ACCESS_REFUSED - write access to exchange 'amq.default' in vhost '/' refused "
        "for user 'writer'"
    ]
    api(cluster, "DELETE", "permissions/%2F/writer")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as raised:
        connection.channel().queue_declare("written", durable=True, arguments=QUORUM)
    assert raised.value.reply_code == 403
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError) as closed:
        connect(cluster, "writer")
    assert "(530) \"NOT_ALLOWED - access to vhost '/' refused for user 'writer'\"" in str(
        closed.value
    )
    connection.close()
    api(cluster, "DELETE", "users/writer")


def test_update_secret_takes_any_secret_and_asks_for_permissions_again(
    cluster: LocalCluster,
) -> None:
    add_user(cluster, "renewer")
    connection = connect(cluster, "renewer")
    channel = connection.channel()
    channel.queue_declare("renewed", durable=True, arguments=QUORUM)
    channel.basic_consume("renewed", lambda *_: None)
    for secret in ("renewer", "stale"):
        connection.update_secret(secret, "rotation")
        assert channel.is_open
    permit(cluster, "renewer", read="^$")

    def closed() -> bool:
        # The change reaches this client's node a moment after the answer of the other one.
        connection.update_secret("renewer", "rotation")
        connection.process_data_events(0.05)
        return bool(channel.is_closed)

    until(closed)
    assert connection.is_open
    connection.channel().queue_delete("renewed")
    connection.close()
    api(cluster, "DELETE", "users/renewer")


def test_channels_beyond_the_limit_are_refused(cluster: LocalCluster) -> None:
    connection = connect(cluster, "guest")
    for _ in range(5):
        connection.channel()
    with pytest.raises(pika.exceptions.NoFreeChannels):
        connection.channel()
    connection.close()


def test_connections_beyond_the_limit_are_closed(cluster: LocalCluster) -> None:
    opened = [connect(cluster, "guest", node=3) for _ in range(20)]
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        connect(cluster, "guest", node=3)
    for connection in opened:
        connection.close()

    def fits() -> bool:
        try:
            connect(cluster, "guest", node=3).close()
        except pika.exceptions.AMQPConnectionError:
            return False
        return True

    until(fits)


def queue_row(cluster: LocalCluster, name: str, vhost: str = "%2F") -> dict[str, Any]:
    found: dict[str, Any] = cluster.api(f"queues/{vhost}/{name}")
    return found


@pytest.mark.parametrize(("wanted", "members"), [(1, 1), (2, 2), (3, 3), (5, 3), (None, 3)])
def test_group_sizes(cluster: LocalCluster, wanted: int | None, members: int) -> None:
    connection = connect(cluster, "guest")
    name = f"size-{wanted}"
    arguments = QUORUM | ({"x-quorum-initial-group-size": wanted} if wanted else {})
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare(name, durable=True, arguments=arguments)
    channel.basic_publish("", name, b"x")
    row = queue_row(cluster, name)
    assert len(row["members"]) == members
    assert row["leader"] in row["members"]
    # The default locator: whoever the client is connected to.
    assert row["leader"] == f"convoy-2@{row['leader'].partition('@')[2]}"
    channel.queue_delete(name)
    connection.close()


def test_balanced_leaders(cluster: LocalCluster) -> None:
    connection = connect(cluster, "guest")
    channel = connection.channel()
    names = [f"balanced-{n}" for n in range(6)]
    arguments = QUORUM | {"x-queue-leader-locator": "balanced"}
    for name in names:
        channel.queue_declare(name, durable=True, arguments=arguments)
    leaders = [queue_row(cluster, name)["leader"] for name in names]
    assert len(set(leaders)) == 3
    for name in names:
        channel.queue_delete(name)
    connection.close()


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_the_virtual_host_says_what_type_a_queue_gets(cluster: LocalCluster, kind: str) -> None:
    api(cluster, "PUT", f"vhosts/typed-{kind}", {"default_queue_type": kind})
    add_user(cluster, "typist", f"typed-{kind}")
    connection = connect(cluster, "typist", f"typed-{kind}")
    channel = connection.channel()
    for _ in range(2):
        # The second declaration has to compare equal.
        channel.queue_declare("plain", durable=True)
    channel.queue_declare("private", exclusive=True)
    assert queue_row(cluster, "plain", f"typed-{kind}")["type"] == kind
    assert queue_row(cluster, "private", f"typed-{kind}")["type"] == "classic"
    other = "quorum" if kind == "classic" else "classic"
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as raised:
        channel.queue_declare("plain", durable=True, arguments={"x-queue-type": other})
    assert raised.value.reply_text == (
        "PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue 'plain' in vhost "
        f"'typed-{kind}': received '{other}' but current is '{kind}'"
    )
    connection.close()
    api(cluster, "DELETE", f"vhosts/typed-{kind}")
    api(cluster, "DELETE", "users/typist")


def test_exclusive_consumers_of_quorum_queues_share(cluster: LocalCluster) -> None:
    """RabbitMQ's quorum queues ignore the flag: nobody is refused."""
    connection = connect(cluster, "guest")
    channel = connection.channel()
    channel.queue_declare("shared", durable=True, arguments=QUORUM)
    channel.basic_consume("shared", lambda *_: None, exclusive=True)
    channel.basic_consume("shared", lambda *_: None, exclusive=True)
    channel.queue_delete("shared")
    connection.close()


def test_topic_permissions_refuse_by_routing_key(cluster: LocalCluster) -> None:
    rules = {"exchange": "amq.topic", "write": "^mine", "read": "^mine"}
    assert call(cluster, "PUT", "topic-permissions/%2F/guest", rules)[0] in (201, 204)
    place = "topic 'other.key' in exchange 'amq.topic' in vhost '/'"
    try:
        with closing(connect(cluster, "guest")) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_publish("amq.topic", "mine.key", b"x")
            with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
                channel.basic_publish("amq.topic", "other.key", b"x")
            text = f"ACCESS_REFUSED - write access to {place} refused for user 'guest'"
            assert (refused.value.reply_code, refused.value.reply_text) == (403, text)
            channel = connection.channel()
            channel.queue_declare("reader", durable=True)
            channel.queue_bind("reader", "amq.topic", "mine.#")
            with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
                channel.queue_bind("reader", "amq.topic", "other.key")
            text = f"ACCESS_REFUSED - read access to {place} refused for user 'guest'"
            assert (refused.value.reply_code, refused.value.reply_text) == (403, text)
    finally:
        call(cluster, "DELETE", "topic-permissions/%2F/guest")
