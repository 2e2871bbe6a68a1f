"""Rows of the error catalogue that concern classic queues, plain and with mirrors, at the node that
has the queue and at another one; and what policies of mirroring are refused or ignored."""

from __future__ import annotations

import urllib.error
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from pika import spec  # type: ignore[import-untyped]

from tests.clusters import Cluster
from tests.interop.conftest import CLASSIC, Names
from tests.interop.helpers import api, eventually, set_policy
from tests.interop.test_error_codes import (
    LOCKED,
    NO_QUEUE,
    QUORUM,
    declare,
)
from tests.raw_amqp import RawPeer, assert_channel_error, assert_connection_error

INEQUIVALENT = "PRECONDITION_FAILED - inequivalent arg '{}' for {{Q}}: "
MIRRORS = {"ha-mode": "all"}


class Row(NamedTuple):
    """A method that is refused once others have been answered. `{Q}` and `{q}` in the text are the
    test's queue."""

    method: Callable[[str], Any]
    code: int
    text: str
    arguments: dict[str, Any] = {}  # noqa: RUF012
    before: Callable[[RawPeer, str], Any] = lambda _peer, _queue: None
    check: Callable[[RawPeer, int, str], None] = assert_channel_error


def consume(peer: RawPeer, queue: str, **more: Any) -> None:
    peer.call(1, spec.Basic.Consume(queue=queue, **more), spec.Basic.ConsumeOk)


def publish(peer: RawPeer, queue: str) -> None:
    peer.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    peer.publish(1, b"stays", routing_key=queue)
    peer.expect(spec.Basic.Ack)


def get(peer: RawPeer, queue: str) -> None:
    publish(peer, queue)
    peer.call(1, spec.Basic.Get(queue=queue), spec.Basic.GetOk)
    peer.content()


def get_and_settle(peer: RawPeer, queue: str) -> None:
    get(peer, queue)
    peer.send(1, spec.Basic.Ack(delivery_tag=1))


def again(**changed: Any) -> Callable[[str], Any]:
    """The declaration of the queue, but for this."""
    arguments = CLASSIC | changed.pop("arguments", {})
    return lambda q: spec.Queue.Declare(
        queue=q, **({"durable": True, "arguments": arguments} | changed)
    )


ROWS = {
    "get beside a single active consumer": Row(
        lambda q: spec.Basic.Get(queue=q),
        405,
        "RESOURCE_LOCKED - cannot obtain access to locked {Q}. basic.get operations are not"
        " supported by classic queues with single active consumer",
        arguments={"x-single-active-consumer": True},
    ),
    "exclusive consumer beside another": Row(
        lambda q: spec.Basic.Consume(queue=q, exclusive=True),
        403,
        "ACCESS_REFUSED - {Q} in exclusive use",
        before=consume,
    ),
    "consumer beside an exclusive one": Row(
        lambda q: spec.Basic.Consume(queue=q),
        403,
        "ACCESS_REFUSED - {Q} in exclusive use",
        before=lambda peer, queue: consume(peer, queue, exclusive=True),
    ),
    "consumer tag in use": Row(
        lambda q: spec.Basic.Consume(queue=q, consumer_tag="twice"),
        530,
        "NOT_ALLOWED - attempt to reuse consumer tag 'twice'",
        before=lambda peer, queue: consume(peer, queue, consumer_tag="twice"),
        check=assert_connection_error,
    ),
    "consumer priority that is no number": Row(
        lambda q: spec.Basic.Consume(queue=q, arguments={"x-priority": "high"}),
        406,
        "PRECONDITION_FAILED - invalid arg 'x-priority' for {Q}: \"expected integer, got longstr\"",
    ),
    "delete if unused": Row(
        lambda q: spec.Queue.Delete(queue=q, if_unused=True),
        406,
        "PRECONDITION_FAILED - {Q} in use",
        before=consume,
    ),
    "delete if empty": Row(
        lambda q: spec.Queue.Delete(queue=q, if_empty=True),
        406,
        "PRECONDITION_FAILED - {Q} not empty",
        before=publish,
    ),
    "tag that is settled": Row(
        lambda q: spec.Basic.Reject(delivery_tag=1),
        406,
        "PRECONDITION_FAILED - unknown delivery tag 1",
        before=get_and_settle,
    ),
    "tags beyond the last": Row(
        lambda q: spec.Basic.Ack(delivery_tag=2, multiple=True),
        406,
        "PRECONDITION_FAILED - unknown delivery tag 2",
        before=get,
    ),
    "another durability": Row(
        again(durable=False),
        406,
        INEQUIVALENT.format("durable") + "received 'false' but current is 'true'",
    ),
    "another life": Row(
        again(auto_delete=True),
        406,
        INEQUIVALENT.format("auto_delete") + "received 'true' but current is 'false'",
    ),
    "another owner": Row(again(exclusive=True), 405, LOCKED),
    "another type": Row(
        again(arguments=QUORUM),
        406,
        INEQUIVALENT.format("x-queue-type") + "received 'quorum' but current is 'classic'",
    ),
    "another value": Row(
        again(arguments={"x-max-priority": 5}),
        406,
        INEQUIVALENT.format("x-max-priority") + "received '5' but current is '3'",
        arguments={"x-max-priority": 3},
    ),
    "one more argument": Row(
        again(arguments={"x-message-ttl": 100}),
        406,
        INEQUIVALENT.format("x-message-ttl")
        + "received the value '100' of type 'signedint' but current is none",
    ),
    "one argument less": Row(
        again(),
        406,
        INEQUIVALENT.format("x-overflow")
        + "received none but current is the value 'reject-publish-dlx' of type 'longstr'",
        arguments={"x-overflow": "reject-publish-dlx"},
    ),
}


@pytest.fixture(params=["plain", "mirrored"])
def declared(
    request: pytest.FixtureRequest, raw_channel: RawPeer, cluster: Cluster, names: Names
) -> Iterator[Callable[..., str]]:
    """Declares a durable classic queue at the first node, in one case with mirrors on the others:
    `declared({"x-max-length": 5})`."""
    if request.param == "mirrored" and cluster.system == "rabbitmq":
        pytest.skip("releases with mirrors have other texts")
    queue = names.queue()
    policy = f"policies/%2F/{queue}"

    def made(arguments: dict[str, Any]) -> str:
        if request.param == "mirrored":
            pattern = f"^{queue.replace('.', '[.]')}$"
            set_policy(cluster, policy, {"pattern": pattern, "definition": MIRRORS})
        declare(raw_channel, queue, CLASSIC | arguments)
        if request.param == "mirrored":
            eventually(lambda: len(row_of(cluster, queue).get("synchronised_slave_nodes", ())) == 2)
        return queue

    yield made
    if request.param == "mirrored":
        set_policy(cluster, policy, None)


def row_of(cluster: Cluster, queue: str) -> dict[str, Any]:
    return dict(api(cluster, "GET", f"queues/%2F/{quote(queue)}"))


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_classic_queue_refuses_what_the_catalogue_says(
    declared: Callable[..., str], cluster: Cluster, row: Row, node: int
) -> None:
    queue = declared(row.arguments)
    with RawPeer(cluster.uris[node]) as peer:
        peer.handshake().open_channel(1)
        row.before(peer, queue)
        peer.send(1, row.method(queue))
        text = row.text.replace("{Q}", f"queue '{queue}' in vhost '/'").replace("{q}", queue)
        row.check(peer, row.code, text)


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(
    "use",
    [
        lambda q: spec.Queue.Declare(queue=q, passive=True),
        lambda q: spec.Queue.Bind(queue=q, exchange="amq.direct", routing_key="k"),
        lambda q: spec.Basic.Consume(queue=q),
        lambda q: spec.Basic.Get(queue=q),
        lambda q: spec.Queue.Purge(queue=q),
    ],
    ids=["passive", "bind", "consume", "get", "purge"],
)
def test_a_classic_queue_that_is_deleted_is_not_found(
    declared: Callable[..., str], raw_channel: RawPeer, cluster: Cluster, use: Any, node: int
) -> None:
    queue = declared({})
    with RawPeer(cluster.uris[node]) as peer:
        peer.handshake().open_channel(1)
        peer.call(1, spec.Queue.Declare(queue=queue, passive=True), spec.Queue.DeclareOk)
        raw_channel.call(1, spec.Queue.Delete(queue=queue), spec.Queue.DeleteOk)
        peer.send(1, use(queue))
        assert_channel_error(peer, 404, NO_QUEUE.replace("interop-absent", queue))


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ({"ha-params": 2}, "ha-mode must be specified to specify ha-params, ha-sync-mode or"),
        ({"ha-mode": "some"}, '<<"some">> is not a valid ha-mode value'),
        ({"ha-mode": "all", "ha-params": 2}, 'ha-mode="all" does not take parameters'),
        ({"ha-mode": "exactly"}, 'ha-mode="exactly" takes an integer, none given'),
        ({"ha-mode": "exactly", "ha-params": "2"}, 'ha-mode="exactly" takes an integer, <<"2">>'),
        ({"ha-mode": "exactly", "ha-params": True}, 'ha-mode="exactly" takes an integer, true'),
        ({"ha-mode": "exactly", "ha-params": ["a"]}, 'ha-mode="exactly" takes an integer, [<<"a"'),
        ({"ha-mode": "nodes", "ha-params": 2}, 'ha-mode="nodes" takes a list, 2 given'),
        ({"ha-mode": "nodes", "ha-params": ["a", 1]}, 'ha-mode="nodes" takes a list of strings'),
    ],
)
def test_parameters_of_mirroring_of_a_wrong_type_are_named(
    cluster: Cluster, definition: dict[str, Any], reason: str
) -> None:
    if cluster.system == "rabbitmq":
        pytest.skip("the HTTP API is ConvoyMQ's")
    body = {"pattern": "^interop-none$", "definition": definition}
    with pytest.raises(urllib.error.HTTPError) as refused:
        set_policy(cluster, "policies/%2F/interop-mirrors", body)
    answer = refused.value.read().decode()
    assert refused.value.code == 400, answer
    assert f"Validation failed\\n\\n{reason}" in answer.replace('\\"', '"')


def test_a_quorum_queue_ignores_a_policy_of_mirroring_as_a_whole(
    raw_channel: RawPeer, cluster: Cluster, names: Names
) -> None:
    """A classic queue beside it has the policy; of the others the next one that matches acts."""
    if cluster.system == "rabbitmq":
        pytest.skip("releases without mirrors refuse the policy")
    quorum, classic = names.queue("quorum"), names.queue("classic")
    stem = quorum.removesuffix("quorum").replace(".", "[.]")
    policies = {
        "interop-mirrors": ({**MIRRORS, "max-length": 1}, 2),
        "interop-limit": ({"max-length": 2}, 1),
    }
    for name, (definition, priority) in policies.items():
        body = {"pattern": f"^{stem}", "definition": definition, "priority": priority}
        set_policy(cluster, f"policies/%2F/{name}", body)
    try:
        declare(raw_channel, quorum, QUORUM)
        declare(raw_channel, classic, CLASSIC)
        eventually(lambda: row_of(cluster, classic).get("policy") == "interop-mirrors")
        eventually(lambda: len(row_of(cluster, classic).get("slave_nodes", ())) == 2)
        found = row_of(cluster, quorum)
        assert found["policy"] == "interop-limit"
        assert not any(key.startswith(("slave", "synchronised_slave")) for key in found)
        raw_channel.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
        for _ in range(3):
            raw_channel.publish(1, b"x", routing_key=quorum)
            raw_channel.expect(spec.Basic.Ack)
        left = spec.Queue.Declare(queue=quorum, passive=True)
        assert raw_channel.call(1, left, spec.Queue.DeclareOk).message_count == 2
    finally:
        for name in policies:
            set_policy(cluster, f"policies/%2F/{name}", None)
