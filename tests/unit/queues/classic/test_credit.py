"""Credit of consumers of classic queues, here and on another node, and their removal."""

from __future__ import annotations

import pytest

from convoymq.queues.classic.machine import SUBSCRIBED
from tests.unit.queues.classic.support import Node, queue_record, settle

PLACES = pytest.mark.parametrize("place", [1, 2])


@PLACES
def test_credit_counts_from_the_start_and_settling_grants_nothing(
    nodes: dict[int, Node], place: int
) -> None:
    record = queue_record()
    nodes[1].open(record)
    channel = nodes[place].channel(nodes[place].open(record))
    channel.publish(*[b"%d" % number for number in range(9)])
    channel.consume(credited=True)
    settle(nodes)
    assert channel.deliveries() == []
    channel.client.grant(1, 3)
    settle(nodes)
    assert channel.deliveries() == [b"0", b"1", b"2"]
    assert channel.heard[-1] == ("credit", 1, 3, 6)
    channel.client.settle(1, [0, 2])
    channel.client.grant(1, 3)
    settle(nodes)
    assert len(channel.deliveries()) == 3
    channel.client.grant(1, 100, drain=True)
    settle(nodes)
    assert len(channel.deliveries()) == 9
    assert channel.heard[-1] == ("credit", 1, 9, 0)
    channel.publish(b"later")
    settle(nodes)
    assert len(channel.deliveries()) == 9, "a drained grant is over"


@PLACES
def test_an_inactive_consumer_is_drained_at_once(nodes: dict[int, Node], place: int) -> None:
    record = queue_record()
    single = {"x_single_active_consumer": True}
    nodes[1].open(record, **single)
    channel = nodes[place].channel(nodes[place].open(record, **single))
    channel.publish(b"a")
    channel.consume(1, credited=True)
    channel.consume(2, credited=True)
    channel.client.grant(2, 5, drain=True)
    settle(nodes)
    heard = [each for each in channel.heard if each[0] in ("activity", "credit")]
    assert heard == [("activity", 1, True), ("activity", 2, False), ("credit", 2, 0, 0)]
    channel.client.cancel(1)
    settle(nodes)
    assert channel.heard[-2:] == [("activity", 2, True), ("cancel-ok", 1)]


@PLACES
def test_a_removed_consumer_gives_back_what_it_holds(nodes: dict[int, Node], place: int) -> None:
    record = queue_record()
    home = nodes[1].open(record)
    channel = nodes[place].channel(nodes[place].open(record))
    channel.publish(b"a", b"b")
    channel.consume(1)
    settle(nodes)
    channel.client.remove(1)
    settle(nodes)
    assert channel.heard[-1] == ("cancel-ok", 1)
    assert home.machine.ready_count == 2
    assert not home.machine.unsettled_count


def test_a_node_of_an_older_release_gives_no_credit(nodes: dict[int, Node]) -> None:
    record = queue_record()
    home = nodes[1].open(record)
    channel = nodes[1].channel(home)
    channel.publish(b"a")
    settle(nodes)
    channel.consume(1, credited=True)
    effect = (SUBSCRIBED, channel.client.session, 1, None)
    channel.client.on_effect(effect)  # type: ignore[attr-defined]
    kind, number, error = channel.heard[-1]
    assert (kind, number) == ("subscribed", 1)
    assert "older release" in error
