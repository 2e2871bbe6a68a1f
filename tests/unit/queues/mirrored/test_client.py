"""What a channel hears of its consumers when masters follow each other, and when none does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from convoymq.queues.mirrored.client import MirroredClient
from tests.unit.queues.classic.support import Channel, Node, Time, queue_record, settle


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[int, Node]]:
    made: dict[int, Node] = {}
    for number in (1, 2):
        Node(number, made, tmp_path, Time()).host.client_class = MirroredClient
    yield made
    for node in made.values():
        node.host.stop()


def asked_again(nodes: dict[int, Node]) -> Channel:
    """A channel with a consumer that a new master is asked for, and has not answered."""
    nodes[1].open(queue_record())
    channel = nodes[2].channel(nodes[2].open(queue_record()))
    channel.consume()
    settle(nodes)
    assert channel.heard == [("subscribed", 1, None)]
    channel.heard.clear()
    assert isinstance(channel.client, MirroredClient)
    channel.client.place()
    channel.client.go_on()
    return channel


def test_a_consumer_that_is_asked_for_again_ends_once_with_its_queue(
    nodes: dict[int, Node],
) -> None:
    channel = asked_again(nodes)
    channel.consume(2)
    nodes[2].host.delete(1)
    error = "no queue 'q' in vhost '/'"
    assert channel.heard == [("cancelled", 1, "deleted"), ("subscribed", 2, error)]


def test_a_consumer_that_is_asked_for_again_ends_once_with_its_client(
    nodes: dict[int, Node],
) -> None:
    channel = asked_again(nodes)
    channel.client.fail()
    assert channel.heard == [("cancelled", 1, "lost")]
    channel.heard.clear()
    channel.consume()
    settle(nodes)
    assert channel.heard == [("subscribed", 1, None)]
