"""Features of classic queues on mirrored ones, with another master in the middle. The first master
is on node 1, the second on node 2: the oldest mirror."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from convoymq.queues.mirrored.master import GATHER_MS
from tests.unit.queues.classic.support import Channel
from tests.unit.queues.mirrored.support import MIRRORED, Cluster

ENDS = pytest.mark.parametrize("stops", [False, True], ids=["killed", "stopped"])
DLX: dict[str, object] = {"dead-letter-exchange": "dlx"}


def consumer(cluster: Cluster, node: int, **more: Any) -> Channel:
    made = cluster.channel(node)
    made.consume(**more)
    cluster.settle()
    return made


def rest(cluster: Cluster) -> list[tuple[bytes, int]]:
    """What a consumer gets that comes now: bodies, and how often others had them."""
    made = consumer(cluster, 3)
    return [(body, acquired) for _, _, body, acquired in made.got]


def publish(cluster: Cluster, *bodies: bytes, node: int = 2, **properties: Any) -> None:
    made = cluster.channel(node)
    made.publish(*bodies, tag=1, **properties)
    cluster.settle()
    assert made.heard == [("published", [1, len(bodies)], True)]


@ENDS
def test_priorities(cluster: Cluster, stops: bool) -> None:
    cluster.declare(x_max_priority=9)
    channel = cluster.channel(2)
    for body, priority in ((b"a", 0), (b"b", 9), (b"c", 2), (b"d", 9), (b"e", 0)):
        channel.publish(body, priority=priority)
    channel.consume(prefetch=2)
    cluster.settle()
    assert channel.got == [(1, 0, b"b", 0), (1, 1, b"d", 0)]
    cluster.fail(stops=stops)
    assert channel.got[2:] == [(1, 2, b"b", 1), (1, 3, b"d", 1)]
    channel.publish(b"f", priority=9)
    # The first two settle what the former master delivered: nothing.
    channel.client.settle(1, [0, 2])
    cluster.settle()
    assert channel.got[4:] == [(1, 4, b"f", 0)]
    channel.client.settle(1, [3, 4])
    cluster.settle()
    assert channel.got[5:] == [(1, 5, b"c", 0), (1, 6, b"a", 0)]


@ENDS
def test_times_of_messages_run_on(cluster: Cluster, stops: bool) -> None:
    cluster.declare(settings=DLX)
    began = cluster.time.ms
    for body, time in ((b"a", "60000"), (b"b", ""), (b"c", "50000")):
        publish(cluster, body, expiration=time)
    cluster.pass_by(10_000)
    cluster.fail(stops=stops)
    cluster.pass_by(59_000 - (cluster.time.ms - began))
    assert cluster.dead.bodies() == []
    cluster.pass_by(2_000)
    # `c` waits behind `b`, and is dropped where it would be next.
    assert cluster.dead.bodies() == [b"a"]
    assert rest(cluster) == [(b"b", 0)]
    cluster.settle()
    assert cluster.dead.bodies() == [b"a", b"c"]
    assert cluster.master.depth == 1


@ENDS
def test_the_time_of_a_queue_runs_on(cluster: Cluster, stops: bool) -> None:
    """Also of messages that somebody held."""
    cluster.declare(settings={**DLX, "message-ttl": 60_000})
    began = cluster.time.ms
    publish(cluster, b"a")
    holder = consumer(cluster, 2, prefetch=1)
    publish(cluster, b"b")
    cluster.pass_by(30_000)
    publish(cluster, b"c")
    holder.client.cancel(1)
    cluster.settle()
    cluster.fail(stops=stops)
    cluster.pass_by(59_000 - (cluster.time.ms - began))
    assert cluster.dead.bodies() == []
    cluster.pass_by(2_000)
    assert cluster.dead.bodies() == [b"a", b"b"]
    # A master says of 1000 messages before that they were handed out.
    assert rest(cluster) == [(b"c", 1)]


@ENDS
def test_the_time_of_an_unused_queue_begins_anew(cluster: Cluster, stops: bool) -> None:
    cluster.declare(settings={"expires": 60_000})
    cluster.pass_by(50_000)
    cluster.fail(stops=stops)
    cluster.pass_by(50_000)
    assert cluster.nodes[2].reports == []
    cluster.pass_by(15_000)
    assert set(cluster.nodes[2].reports) == {("expired", 1)}


@ENDS
def test_a_used_queue_does_not_expire(cluster: Cluster, stops: bool) -> None:
    cluster.declare(settings={"expires": 1})
    consumer(cluster, 3)
    cluster.fail(stops=stops)
    cluster.pass_by(10_000)
    assert cluster.nodes[2].reports == []


@ENDS
def test_a_limit_that_drops(cluster: Cluster, stops: bool) -> None:
    """What somebody held counts again: the oldest are too many, and are so at once."""
    cluster.declare(settings={**DLX, "max-length": 3})
    holder = consumer(cluster, 2, prefetch=2)
    publish(cluster, *[b"%d" % n for n in range(6)])
    assert holder.deliveries() == [b"0", b"1"]
    cluster.settle()
    assert cluster.dead.bodies() == [b"2"]
    holder.client.close()
    cluster.settle()
    assert cluster.dead.bodies() == [b"2", b"0", b"1"]
    holder = consumer(cluster, 2, prefetch=1)
    publish(cluster, b"6")
    cluster.fail(stops=stops)
    # The consumer gets its message back before anything is too much.
    assert holder.deliveries() == [b"3", b"3"]
    assert cluster.dead.bodies() == [b"2", b"0", b"1"]
    publish(cluster, b"7")
    assert cluster.dead.bodies() == [b"2", b"0", b"1", b"4"]
    assert rest(cluster) == [(b"5", 1), (b"6", 1), (b"7", 0)]


@ENDS
def test_a_limit_that_drops_is_kept_by_a_new_master(cluster: Cluster, stops: bool) -> None:
    """Nobody is left who held the messages that are too many."""
    cluster.declare(settings={**DLX, "max-length": 2})
    consumer(cluster, 1, prefetch=2)
    publish(cluster, *[b"%d" % n for n in range(4)])
    cluster.fail(stops=stops)
    cluster.pass_by(GATHER_MS + 1_000)
    assert cluster.dead.bodies() == [b"0", b"1"]
    assert cluster.master.depth == 2


@ENDS
@pytest.mark.parametrize("overflow", ["reject-publish", "reject-publish-dlx"])
def test_a_limit_that_refuses(cluster: Cluster, stops: bool, overflow: str) -> None:
    cluster.declare(settings={**DLX, "max-length": 2, "overflow": overflow})
    channel = cluster.channel(3)
    for tag, body in enumerate((b"a", b"b", b"c"), 1):
        channel.publish(body, tag=tag)
        cluster.settle()
    assert channel.heard[-1] == ("published", [3, 3], False)
    cluster.fail(stops=stops)
    channel.publish(b"d", tag=4)
    cluster.settle()
    assert channel.heard[-1] == ("published", [4, 4], False)
    expected = [b"c", b"d"] if overflow.endswith("dlx") else []
    assert cluster.dead.bodies() == expected
    channel.client.get(no_ack=True)
    cluster.settle()
    channel.publish(b"e", tag=5)
    cluster.settle()
    assert channel.heard[-1] == ("published", [5, 5], True)
    # The first had it as well: up to 1000 messages may have been handed out.
    assert [body for body, _ in rest(cluster)] == [b"b", b"e"]


@ENDS
def test_refused_publishes_without_an_answer_stay_refused(cluster: Cluster, stops: bool) -> None:
    """The former master had refused it, and told only its mirrors."""
    cluster.declare(settings={"max-length": 1, "overflow": "reject-publish"})
    publish(cluster, b"a")
    channel = cluster.channel(3)
    channel.publish(b"b", tag=1)
    cluster.nodes[3].wire.down.add(1)
    cluster.settle()
    cluster.nodes[3].wire.down.discard(1)
    cluster.fail(stops=stops)
    assert [heard for heard in channel.heard if heard[0] == "published"] == [
        ("published", [1, 1], False)
    ]
    assert [body for body, _ in rest(cluster)] == [b"a"]


@ENDS
def test_dead_letters_on_their_way(cluster: Cluster, stops: bool) -> None:
    """What is not published yet comes back: rejected messages to consumers, with the flag; what is
    too old or too much leaves again."""
    cluster.declare(settings={**DLX, "max-length": 4})
    channel = consumer(cluster, 3, prefetch=1)
    publish(cluster, b"first", b"rejected")
    channel.client.discard(1, [0, 0])
    cluster.settle()
    [target] = cluster.dead.clients
    target.events.on_flow(target, True)
    publish(cluster, b"late", expiration="1")
    publish(cluster, b"1", b"2", b"3")
    cluster.pass_by(1_000)
    channel.client.discard(1, [1, 1])
    cluster.settle()
    assert cluster.master.machine.leaving.count == 2
    assert channel.deliveries() == [b"first", b"rejected", b"1"]
    cluster.fail(stops=stops)
    assert channel.got[3:] == [(1, 3, b"rejected", 1)]
    assert cluster.dead.bodies() == [b"first", b"late"]
    channel.client.discard(1, [3, 3])
    cluster.settle()
    assert cluster.dead.bodies() == [b"first", b"late", b"rejected"]
    assert channel.got[4:] == [(1, 4, b"1", 1)]


@ENDS
def test_the_order_is_restored(cluster: Cluster, stops: bool) -> None:
    """Of what three consumers hold, one of whom is gone with the master."""
    cluster.declare()
    channels = [consumer(cluster, node, prefetch=2) for node in (1, 2, 3)]
    publish(cluster, *[b"%d" % n for n in range(8)])
    assert [len(each.got) for each in channels] == [2, 2, 2]
    for each in channels[1:]:
        each.client.cancel(1)
    channels[1].client.settle(1, [0, 0])
    settled = channels[1].deliveries()[0]
    cluster.settle()
    cluster.fail(stops=stops)
    left = [b"%d" % n for n in range(8) if b"%d" % n != settled]
    # What they held is with nobody: they have no consumer any more.
    channels[2].client.settle(1, [0, 1])
    cluster.settle()
    assert rest(cluster) == [(body, 1) for body in left]


@ENDS
def test_a_message_that_came_back_keeps_its_place(cluster: Cluster, stops: bool) -> None:
    cluster.declare()
    channel = consumer(cluster, 2, prefetch=3)
    publish(cluster, *[b"%d" % n for n in range(4)])
    channel.client.settle(1, [1, 1])
    channel.client.cancel(1)
    channel.client.return_(1, [2, 2], failed=True)
    channel.client.return_(1, [0, 0], failed=True)
    cluster.settle()
    cluster.fail(stops=stops)
    assert rest(cluster) == [(b"0", 1), (b"2", 1), (b"3", 1)]


@ENDS
def test_an_exclusive_consumer_stays_one(cluster: Cluster, stops: bool) -> None:
    cluster.declare()
    holder = consumer(cluster, 3, exclusive=True)
    cluster.fail(stops=stops)
    other = consumer(cluster, 2)
    assert other.heard[0][2] is not None
    publish(cluster, b"a")
    assert (holder.deliveries(), other.deliveries()) == ([b"a"], [])
    holder.client.close()
    assert [body for body, _ in rest(cluster)] == [b"a"]


@ENDS
@pytest.mark.parametrize("active", [2, 3])
def test_the_active_consumer_stays_active(cluster: Cluster, stops: bool, active: int) -> None:
    cluster.declare(x_single_active_consumer=True)
    first = consumer(cluster, active, prefetch=1)
    second = consumer(cluster, 5 - active, prefetch=1)
    publish(cluster, b"a", b"b")
    cluster.fail(stops=stops)
    assert first.got == [(1, 0, b"a", 0), (1, 1, b"a", 1)]
    first.client.settle(1, [0, 1])
    cluster.settle()
    assert first.got[2:] == [(1, 2, b"b", 1)]
    assert second.got == []
    first.client.close()
    cluster.settle()
    assert second.got == [(1, 0, b"b", 2)]


@ENDS
def test_another_is_active_when_the_active_one_goes_with_the_master(
    cluster: Cluster, stops: bool
) -> None:
    cluster.declare(x_single_active_consumer=True)
    consumer(cluster, 1, prefetch=1)
    second, third = (consumer(cluster, node, prefetch=1) for node in (3, 2))
    publish(cluster, b"a", b"b")
    cluster.fail(stops=stops)
    cluster.pass_by(5_000)
    assert sorted(second.got + third.got) == [(1, 0, b"a", 1)]


@ENDS
def test_priorities_of_consumers(cluster: Cluster, stops: bool) -> None:
    cluster.declare()
    low, high = consumer(cluster, 2, priority=-1), consumer(cluster, 3, priority=5)
    cluster.fail(stops=stops)
    publish(cluster, b"a", b"b")
    assert (high.deliveries(), low.deliveries()) == ([b"a", b"b"], [])


@ENDS
def test_windows_of_consumers(cluster: Cluster, stops: bool) -> None:
    cluster.declare()
    channel = consumer(cluster, 3, prefetch=5)
    publish(cluster, *[b"%d" % n for n in range(4)])
    channel.client.set_credit(1, 2)
    cluster.settle()
    cluster.fail(stops=stops)
    assert channel.got[4:] == [(1, 4, b"0", 1), (1, 5, b"1", 1)]


@ENDS
def test_messages_that_need_no_acknowledgement(cluster: Cluster, stops: bool) -> None:
    """What the client said that it was written does not come again."""
    cluster.declare()
    channel = consumer(cluster, 3, no_ack=True)
    publish(cluster, b"a", b"b")
    channel.client.settle(1, [0, 0])
    cluster.settle()
    cluster.fail(stops=stops)
    assert channel.got[2:] == [(1, 2, b"b", 1)]


@ENDS
def test_what_was_purged_stays_away(cluster: Cluster, stops: bool) -> None:
    cluster.declare()
    holder = consumer(cluster, 2, prefetch=1)
    publish(cluster, b"held", b"a", b"b")
    holder.client.purge()
    publish(cluster, b"c")
    assert ("purged", 2, None) in holder.heard
    cluster.fail(stops=stops)
    assert holder.deliveries() == [b"held", b"held"]
    assert [body for body, _ in rest(cluster)] == [b"c"]


@ENDS
def test_counts_that_decide_about_deleting(cluster: Cluster, stops: bool) -> None:
    cluster.declare()
    channel = consumer(cluster, 3, prefetch=1)
    publish(cluster, b"a", b"b")
    cluster.fail(stops=stops)
    assert asyncio.run(cluster.master.counts()) == (1, 1)
    channel.client.purge()
    channel.client.settle(1, [1, 1])
    channel.client.cancel(1)
    cluster.settle()
    assert asyncio.run(cluster.master.counts()) == (0, 0)


@ENDS
def test_the_last_consumer_leaves_a_new_master(cluster: Cluster, stops: bool) -> None:
    """Queues that delete themselves do so then."""
    cluster.declare()
    first, second = consumer(cluster, 2), consumer(cluster, 3)
    cluster.fail(stops=stops)
    first.client.cancel(1)
    cluster.settle()
    assert cluster.nodes[2].reports == []
    second.client.close()
    cluster.pass_by(GATHER_MS + 1_000)
    assert cluster.nodes[2].reports == [("unused", 1)]


@ENDS
def test_the_last_consumer_goes_with_the_master(cluster: Cluster, stops: bool) -> None:
    cluster.declare()
    consumer(cluster, 1)
    cluster.fail(stops=stops)
    cluster.pass_by(GATHER_MS + 1_000)
    assert cluster.nodes[2].reports == [("unused", 1)]


@ENDS
def test_transient_messages_and_lazy_queues(cluster: Cluster, stops: bool) -> None:
    cluster.declare(x_queue_mode="lazy")
    publish(cluster, b"a", persistent=False)
    publish(cluster, b"b")
    cluster.fail(stops=stops)
    assert rest(cluster) == [(b"a", 0), (b"b", 0)]


@ENDS
def test_transient_messages_are_there_after_a_policy_and_a_failure(
    cluster: Cluster, stops: bool
) -> None:
    cluster.declare_plain(settings={})
    publish(cluster, b"a", b"b", b"c", b"d", persistent=False)
    publish(cluster, b"e")
    reader = consumer(cluster, 3, prefetch=3)
    reader.client.settle(1, [0, 0])
    reader.client.settle(1, [2, 2])
    cluster.settle()
    assert cluster.master.machine.unwritten == 1
    cluster.settings |= MIRRORED | {"ha-sync-mode": "automatic"}
    cluster.master.configure(cluster.settings)
    cluster.until(cluster.is_synchronised)
    assert cluster.master.machine.unwritten == 0
    publish(cluster, b"f", persistent=False)
    reader.client.close()
    cluster.fail(stops=stops)
    assert rest(cluster) == [(b"b", 1), (b"d", 1), (b"e", 1), (b"f", 0)]


@ENDS
def test_a_message_that_was_got(cluster: Cluster, stops: bool) -> None:
    cluster.declare()
    channel = cluster.channel(3)
    publish(cluster, b"a", b"b", b"c")
    for no_ack in (False, True):
        channel.client.get(no_ack=no_ack)
    cluster.settle()
    cluster.fail(stops=stops)
    channel.client.settle(0, [0, 0])
    channel.client.get(no_ack=False)
    cluster.settle()
    assert [heard[1:5] for heard in channel.heard if heard[0] == "got"] == [
        (b"a", 0, 0, 2), (b"b", 1, 0, 1), (b"a", 2, 1, 1),
    ]  # fmt: skip
    channel.client.settle(0, [2, 2])
    cluster.settle()
    assert rest(cluster) == [(b"c", 1)]


@ENDS
def test_credit_goes_on_with_a_new_master(cluster: Cluster, stops: bool) -> None:
    """What was granted counts from the start; a grant without an answer is answered once."""
    cluster.declare()
    publish(cluster, *[b"%d" % n for n in range(9)])
    channel = consumer(cluster, 3, credited=True)
    channel.client.grant(1, 4)
    cluster.settle()
    assert len(channel.got) == 4
    channel.client.grant(1, 5)
    cluster.fail(stops=stops)
    cluster.settle()
    assert len(channel.got) == 5, "one more than the former master has given"
    answers = [each for each in channel.heard if each[0] == "credit"]
    assert [each[2] for each in answers] == [4, 5]
    channel.client.grant(1, 20, drain=True)
    cluster.settle()
    answers = [each for each in channel.heard if each[0] == "credit"]
    assert answers[2:] == [("credit", 1, len(channel.got), 0)]
