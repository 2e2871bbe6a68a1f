"""Dead letters of classic queues, by pika on a cluster of three nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest

from tests.clusters import Cluster
from tests.interop.conftest import CLASSIC, Names
from tests.interop.helpers import Inbox, api, eventually, publish_confirmed, set_policy

NODES = (0, 1, 2)


def deaths(properties: Any) -> list[tuple[str, str, int]]:
    return [
        (death["queue"], death["reason"], death["count"]) for death in properties.headers["x-death"]
    ]


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_rejected_message_tells_of_its_death(
    channel: Any,
    names: Names,
    declare_classic: Callable[..., str],
    open_connection: Callable[[int], Any],
    node: int,
    kind: str,
) -> None:
    """From every node, to a target of either type, with the keys in CC."""
    exchange = names.exchange()
    channel.exchange_declare(exchange, "direct", durable=True)
    work = declare_classic("work", x_dead_letter_exchange=exchange)
    dead = names.queue("dead")
    channel.queue_declare(dead, durable=True, arguments={"x-queue-type": kind})
    channel.queue_bind(dead, exchange, work)
    channel.queue_bind(dead, exchange, "copied")
    there = open_connection(node).channel()
    properties = pika.BasicProperties(
        delivery_mode=2, expiration="60000", message_id="m", headers={"CC": ["copied"], "n": 1}
    )
    publish_confirmed(there, work, [b"body"], properties=properties)
    inbox = Inbox(there, work)
    inbox.wait(1)
    there.basic_nack(inbox.deliveries[0][0].delivery_tag, requeue=False)
    found = Inbox(there, dead, auto_ack=True)
    assert found.wait(1) == [b"body"]
    method, properties, _ = found.deliveries[0]
    assert (method.exchange, method.routing_key, method.redelivered) == (exchange, work, False)
    assert deaths(properties) == [(work, "rejected", 1)]
    death = properties.headers["x-death"][0]
    assert (death["exchange"], death["routing-keys"]) == ("", [work, "copied"])
    assert death["original-expiration"] == "60000"
    for when in ("first", "last"):
        assert properties.headers[f"x-{when}-death-reason"] == "rejected"
        assert properties.headers[f"x-{when}-death-queue"] == work
    assert (properties.expiration, properties.message_id) == (None, "m")
    assert (properties.headers["CC"], properties.headers["n"]) == (["copied"], 1)
    found.settle()
    assert len(found.bodies) == 1, "a queue gets one copy, however many keys lead to it"


def test_a_retry_by_time_to_live_counts_its_rounds(
    channel: Any, names: Names, declare_classic: Callable[..., str]
) -> None:
    """The usual retry: rejected into a queue with a TTL, which sends it back."""
    wait = names.queue("wait")
    work = declare_classic("work", x_dead_letter_exchange="", x_dead_letter_routing_key=wait)
    back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": work}
    channel.queue_declare(wait, durable=True, arguments={**CLASSIC, **back, "x-message-ttl": 100})
    publish_confirmed(channel, work, [b"task"])
    inbox = Inbox(channel, work)
    for round_ in range(3):
        inbox.wait(round_ + 1)
        channel.basic_nack(inbox.deliveries[round_][0].delivery_tag, requeue=False)
    inbox.wait(4)
    assert deaths(inbox.deliveries[3][1]) == [(wait, "expired", 3), (work, "rejected", 3)]


def test_what_is_too_much_is_a_dead_letter(
    channel: Any, declare_classic: Callable[..., str]
) -> None:
    dead = declare_classic("dead")
    to_dead = {"x_dead_letter_exchange": "", "x_dead_letter_routing_key": dead}
    head = declare_classic("head", x_max_length=2, **to_dead)
    publish_confirmed(channel, head, [b"1", b"2", b"3", b"4"])
    inbox = Inbox(channel, dead, auto_ack=True)
    assert inbox.wait(2) == [b"1", b"2"]
    refusing = declare_classic(
        "refusing", x_max_length=1, x_overflow="reject-publish-dlx", **to_dead
    )
    publish_confirmed(channel, refusing, [b"a"])
    with pytest.raises(pika.exceptions.NackError):
        channel.basic_publish("", refusing, b"b")
    assert inbox.wait(3)[2] == b"b"
    reasons = [deaths(properties)[0] for _, properties, _ in inbox.deliveries]
    assert reasons == [(head, "maxlen", 1), (head, "maxlen", 1), (refusing, "maxlen", 1)]


def test_a_policy_gives_a_running_queue_an_exchange(
    cluster: Cluster, channel: Any, declare: Callable[..., str]
) -> None:
    if cluster.system != "convoy":
        pytest.skip("policies are set by ConvoyMQ's HTTP API")
    dead = declare("dead")
    work = declare("work")
    publish_confirmed(channel, work, [b"before", b"with", b"after"])
    inbox = Inbox(channel, work)
    inbox.wait(3)
    tags = [method.delivery_tag for method, _, _ in inbox.deliveries]
    channel.basic_reject(tags[0], requeue=False)
    definition = {"dead-letter-exchange": "", "dead-letter-routing-key": dead}
    name = f"policies/%2F/{work}"
    set_policy(cluster, name, {"pattern": f"^{work}$", "definition": definition})
    try:
        eventually(lambda: strategy_of(cluster, work) == "at_most_once")
        channel.basic_reject(tags[1], requeue=False)
        found = Inbox(channel, dead, auto_ack=True)
        assert found.wait(1) == [b"with"]
    finally:
        set_policy(cluster, name, None)
    eventually(lambda: strategy_of(cluster, work) == "disabled")
    channel.basic_reject(tags[2], requeue=False)
    found.settle()
    assert found.bodies == [b"with"]


def strategy_of(cluster: Cluster, queue: str) -> str:
    return str(api(cluster, "GET", f"queues/%2F/{queue}")["dead_letter_strategy"])
