"""A classic queue through its public handle: at home, from another node, over a restart."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from convoymq.model.tables import EMPTY
from convoymq.queues.classic import host as host_module
from convoymq.queues.classic.log import ClassicLog
from tests.unit.queues.classic.support import Channel, Node, Time, queue_record, settle


def restart(nodes: dict[int, Node], node: int, directory: Path, time: Time) -> Node:
    nodes[node].host.stop()
    return Node(node, nodes, directory, time)


def test_what_is_too_much_after_a_restart_goes(
    nodes: dict[int, Node], tmp_path: Path, time: Time
) -> None:
    record = queue_record(durable=True)
    channel = nodes[1].channel(nodes[1].open(record, x_max_length=2))
    channel.consume(prefetch=2)
    channel.publish(*[b"%d" % n for n in range(4)])
    settle(nodes)
    queue = restart(nodes, 1, tmp_path, time).open(record, x_max_length=2)
    time.pass_by(host_module.TICK_MS)
    assert queue.machine.ready_count == 2


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("durable", [False, True])
def test_messages_are_confirmed_and_delivered_in_order(
    nodes: dict[int, Node], place: int, durable: bool
) -> None:
    record = queue_record(durable=durable)
    nodes[1].open(record)
    queue = nodes[1].host.queues[1] if place == 1 else nodes[2].open(record)
    channel = nodes[place].channel(queue)
    channel.consume(prefetch=2)
    channel.publish(b"a", b"b", b"c", tag=1)
    settle(nodes)
    assert ("published", [1, 3], True) in channel.heard
    assert channel.heard[0] == ("subscribed", 1, None)
    assert channel.deliveries() == [b"a", b"b"]
    channel.client.settle(1, [0, 0])
    settle(nodes)
    assert channel.deliveries() == [b"a", b"b", b"c"]


@pytest.mark.parametrize("place", [1, 2])
def test_credit_of_nothing_lifts_the_limit(nodes: dict[int, Node], place: int) -> None:
    record = queue_record()
    nodes[1].open(record)
    channel = nodes[place].channel(nodes[place].open(record))
    channel.consume(prefetch=2)
    channel.publish(*[b"%d" % number for number in range(9)])
    settle(nodes)
    assert len(channel.deliveries()) == 2
    channel.client.set_credit(1, 0)
    settle(nodes)
    assert len(channel.deliveries()) == 9


@pytest.mark.parametrize("place", [1, 2])
def test_settled_is_said_when_it_is_applied(nodes: dict[int, Node], place: int) -> None:
    record = queue_record()
    home = nodes[1].open(record)
    channel = nodes[place].channel(nodes[place].open(record))
    channel.consume()
    channel.publish(b"a", b"b", b"c")
    settle(nodes)
    held: list[tuple[bool, int]] = []

    def note(ok: bool) -> None:
        held.append((ok, home.machine.ready_count))

    channel.client.cancel(1)
    channel.client.settle(1, [0, 0])
    channel.client.discard(1, [2, 2])
    channel.client.return_(1, [1, 1], failed=False)
    channel.client.when_settled(note)
    assert held == []
    settle(nodes)
    assert held == [(True, 1)]


def test_what_a_lost_home_did_not_settle_is_said(nodes: dict[int, Node]) -> None:
    record = queue_record(durable=True)
    nodes[1].open(record)
    channel = nodes[2].channel(nodes[2].open(record))
    channel.consume()
    channel.publish(b"a")
    settle(nodes)
    held: list[bool] = []
    nodes[2].wire.down.add(1)
    channel.client.settle(1, [0, 0])
    channel.client.when_settled(held.append)
    nodes[2].host.on_node_down(1)
    settle(nodes)
    assert held == [False]
    channel.client.when_settled(held.append)
    settle(nodes)
    assert held == [False, False]


def test_settles_of_a_deleted_queue_are_answered(nodes: dict[int, Node]) -> None:
    channel = nodes[1].channel(nodes[1].open(queue_record()))
    channel.consume()
    channel.publish(b"a")
    settle(nodes)
    held: list[bool] = []
    channel.client.settle(1, [0, 0])
    channel.client.when_settled(held.append)
    nodes[1].host.delete(1)
    settle(nodes)
    assert held == [True]


def test_a_durable_queue_confirms_only_what_is_on_disk(nodes: dict[int, Node]) -> None:
    queue = nodes[1].open(queue_record(durable=True))
    channel = nodes[1].channel(queue)
    channel.publish(b"a", tag=1)
    settle(nodes, disk=False)
    assert channel.heard == []
    settle(nodes)
    assert channel.heard == [("published", [1, 1], True)]


def test_what_was_answered_is_not_answered_again_when_the_home_is_lost(
    nodes: dict[int, Node],
) -> None:
    """The answers come at once, the commands count as applied when the disk has the publish."""
    nodes[1].open(queue_record(durable=True))
    channel = nodes[2].channel(nodes[2].open(queue_record(durable=True)))
    channel.publish(b"a", tag=1)
    channel.client.get(no_ack=False)
    channel.consume()
    channel.client.cancel(1)
    channel.client.purge()
    settle(nodes, disk=False)
    answers = [heard[0] for heard in channel.heard]
    assert answers == ["got", "subscribed", "cancel-ok", "purged"]
    nodes[2].host.on_node_down(1)
    assert [heard[0] for heard in channel.heard] == [*answers, "published"]


def test_what_was_moved_is_read_before_it_is_written(
    nodes: dict[int, Node], tmp_path: Path, time: Time
) -> None:
    """Old messages keep their file, and are moved behind the others. After a restart they were on
    disk only, and for a moment at a place that was not written yet."""
    record = queue_record(durable=True)

    def again() -> Channel:
        nodes[1].host.stop()
        return Node(1, nodes, tmp_path, time, file_bytes_max=600).channel(nodes[1].open(record))

    def publish(first: int, last: int) -> None:
        for number in range(first, last + 1):
            channel.publish(b"%d" % number)
            settle(nodes)

    channel = again()
    publish(0, 9)
    channel.consume(prefetch=10)
    settle(nodes)
    channel.client.settle(1, [3, 9])
    settle(nodes)
    channel = again()
    channel.consume(prefetch=1)
    publish(10, 22)
    writes = threading.Event()
    nodes[1].worker.submit(writes.wait, lambda _result, _error: None)
    nodes[1].host.gather_ms = 0
    for number in range(2):
        channel.client.settle(1, [number, number])
        settle(nodes, disk=False)
    writes.set()
    assert channel.deliveries() == [b"0", b"1", b"2"]
    assert [event for event, _ in nodes[1].notes] == []


@pytest.mark.parametrize("place", [1, 2])
def test_get_settles_and_requeues_to_the_former_place(nodes: dict[int, Node], place: int) -> None:
    record = queue_record()
    nodes[1].open(record)
    queue = nodes[place].open(record)
    channel = nodes[place].channel(queue)
    channel.client.get(no_ack=False)
    channel.publish(b"a", b"b", b"c")
    channel.client.get(no_ack=False)
    channel.client.get(no_ack=True)
    channel.client.return_(0, [0, 0], failed=False)
    channel.client.get(no_ack=False)
    settle(nodes)
    assert channel.heard == [
        ("got", None, 0, 0, 0, None),
        ("got", b"a", 0, 0, 2, None),
        ("got", b"b", 1, 0, 1, None),
        ("got", b"a", 2, 1, 1, None),
    ]


def test_consumers_take_turns_and_priority_comes_first(nodes: dict[int, Node]) -> None:
    queue = nodes[1].open(queue_record())
    one, two, high = (nodes[1].channel(queue) for _ in range(3))
    one.consume()
    two.consume()
    high.consume(prefetch=1, priority=5)
    for body in (b"a", b"b", b"c", b"d", b"e"):
        one.publish(body)
        settle(nodes)
    assert high.deliveries() == [b"a"]
    assert one.deliveries() == [b"b", b"d"]
    assert two.deliveries() == [b"c", b"e"]


def test_a_closed_channel_gives_back_in_order_and_flagged(nodes: dict[int, Node]) -> None:
    queue = nodes[1].open(queue_record())
    one, two = nodes[1].channel(queue), nodes[1].channel(queue)
    one.consume(prefetch=3)
    one.publish(b"a", b"b", b"c", b"d")
    settle(nodes)
    one.client.settle(1, [1, 1])
    one.client.close()
    two.consume()
    settle(nodes)
    assert [(body, acquired) for _, _, body, acquired in two.got] == [
        (b"a", 1), (b"c", 1), (b"d", 0),
    ]  # fmt: skip
    queue.machine.check_invariants()


def test_an_exclusive_consumer_is_alone(nodes: dict[int, Node]) -> None:
    queue = nodes[1].open(queue_record())
    one, two = nodes[1].channel(queue), nodes[1].channel(queue)
    one.consume(exclusive=True)
    two.consume()
    settle(nodes)
    assert one.heard == [("subscribed", 1, None)]
    assert two.heard == [("subscribed", 1, "queue 'q' in vhost '/' in exclusive use")]
    one.client.cancel(1)
    two.consume(2)
    settle(nodes)
    assert two.heard[-1] == ("subscribed", 2, None)


def test_one_single_active_consumer_at_a_time(nodes: dict[int, Node]) -> None:
    queue = nodes[1].open(queue_record(), x_single_active_consumer=True)
    one, two = nodes[1].channel(queue), nodes[1].channel(queue)
    one.consume()
    two.consume()
    one.publish(b"a", b"b")
    settle(nodes)
    assert (one.deliveries(), two.deliveries()) == ([b"a", b"b"], [])
    two.client.get(no_ack=True)
    assert "single active consumer" in two.heard[-1][-1]
    one.client.cancel(1)
    two.publish(b"c")
    settle(nodes)
    # It follows when the cancelled one holds nothing, so nothing is overtaken.
    assert two.deliveries() == []
    one.client.settle(1, [0, 0])
    settle(nodes)
    assert two.deliveries() == []
    one.client.return_(1, [1, 1], failed=False)
    settle(nodes)
    assert two.deliveries() == [b"b", b"c"]


def test_a_cancelled_single_active_consumer_whose_channel_closes_is_followed(
    nodes: dict[int, Node],
) -> None:
    queue = nodes[1].open(queue_record(), x_single_active_consumer=True)
    one, two = nodes[1].channel(queue), nodes[1].channel(queue)
    one.consume(prefetch=1)
    two.consume(prefetch=1)
    one.publish(b"a", b"b")
    settle(nodes)
    one.client.cancel(1)
    settle(nodes)
    assert (two.deliveries(), queue.info()["single_active_consumer_tag"]) == ([], None)
    one.client.close()
    settle(nodes)
    assert two.deliveries() == [b"a"]


def test_a_single_active_consumer_can_be_followed_at_once(nodes: dict[int, Node]) -> None:
    queue = nodes[1].open(
        queue_record(), x_single_active_consumer=True, x_single_active_take_over="immediate"
    )
    one, two = nodes[1].channel(queue), nodes[1].channel(queue)
    one.consume(prefetch=1)
    two.consume(prefetch=1)
    one.publish(b"a", b"b")
    settle(nodes)
    one.client.cancel(1)
    settle(nodes)
    assert two.deliveries() == [b"b"]


def test_the_last_consumer_to_leave_is_reported(nodes: dict[int, Node]) -> None:
    queue = nodes[1].open(queue_record())
    one, two = nodes[1].channel(queue), nodes[1].channel(queue)
    one.client.get(no_ack=True)
    settle(nodes)
    one.consume()
    two.consume()
    one.client.cancel(1)
    settle(nodes)
    assert nodes[1].reports == []
    two.client.close()
    settle(nodes)
    assert nodes[1].reports == [("unused", 1)]


def test_purge_drops_ready_messages_only(nodes: dict[int, Node]) -> None:
    queue = nodes[1].open(queue_record())
    channel = nodes[1].channel(queue)
    channel.consume(prefetch=1)
    channel.publish(b"a", b"b", b"c")
    channel.client.purge()
    settle(nodes)
    assert ("purged", 2, None) in channel.heard
    channel.client.return_(1, [0, 0], failed=True)
    settle(nodes)
    assert channel.deliveries() == [b"a", b"a"]


def test_messages_expire_at_the_head(nodes: dict[int, Node], time: Time) -> None:
    queue = nodes[1].open(queue_record(), x_message_ttl=1000)
    channel = nodes[1].channel(queue)
    channel.publish(b"long")
    channel.publish(b"short", expiration="10")
    settle(nodes)
    time.pass_by(500)
    assert queue.machine.ready_count == 2
    time.pass_by(600)
    assert queue.machine.ready_count == 0
    queue.machine.check_invariants()


def test_a_time_of_0_is_for_who_takes_the_message_at_once(nodes: dict[int, Node]) -> None:
    queue = nodes[1].open(queue_record(), x_message_ttl=0)
    channel = nodes[1].channel(queue)
    channel.publish(b"a")
    channel.client.get(no_ack=True)
    settle(nodes)
    assert channel.heard[-1] == ("got", None, 0, 0, 0, None)
    assert queue.machine.ready_count == 0
    channel.consume(prefetch=1)
    channel.publish(b"b", b"c")
    settle(nodes)
    assert channel.deliveries() == [b"b"]
    assert queue.machine.ready_count == 0
    channel.client.return_(1, [0, 0], failed=False)
    settle(nodes)
    queue.machine.check_invariants()


@pytest.mark.parametrize("taker", ["get", "consumer", "reservation"])
def test_what_expired_behind_a_live_head_is_not_handed_out(
    nodes: dict[int, Node], time: Time, taker: str
) -> None:
    queue = nodes[1].open(queue_record())
    channel = nodes[1].channel(queue)
    channel.publish(b"a")
    channel.publish(b"b", expiration="10")
    channel.publish(b"c")
    settle(nodes)
    time.pass_by(20)
    machine = queue.machine
    if taker == "get":
        for _ in range(3):
            channel.client.get(no_ack=True)
        settle(nodes)
        assert [heard[1] for heard in channel.heard if heard[0] == "got"] == [b"a", b"c", None]
    elif taker == "consumer":
        channel.consume()
        settle(nodes)
        assert channel.deliveries() == [b"a", b"c"]
    else:
        op = {"op": "lease", "reservation": "s", "ttl_ms": 1000, "max": 5}
        _, answer = machine.reservation(op, 1, time.ms)
        assert answer is not None
        assert answer["next"] == 2
    assert machine.ready_count == 0
    machine.check_invariants()


def test_an_unused_queue_expires_after_its_time_and_not_before(
    nodes: dict[int, Node], time: Time
) -> None:
    nodes[1].open(queue_record(), x_expires=5000)
    for _ in range(4):
        time.pass_by(1000)
    assert nodes[1].reports == []
    time.pass_by(1000)
    assert nodes[1].reports == [("expired", 1)]


@pytest.mark.parametrize("how", ["requeue", "close"])
def test_the_length_holds_after_a_requeue(nodes: dict[int, Node], how: str) -> None:
    queue = nodes[1].open(queue_record(), x_max_length=2)
    channel, publisher = nodes[1].channel(queue), nodes[1].channel(queue)
    channel.consume(prefetch=1)
    publisher.publish(b"a", b"b", b"c")
    settle(nodes)
    assert queue.machine.ready_count == 2
    if how == "requeue":
        channel.client.cancel(1)
        channel.client.return_(1, [0, 0], failed=False)
    else:
        channel.client.close()
    settle(nodes)
    assert queue.machine.ready_count == 2
    publisher.client.get(no_ack=True)
    settle(nodes)
    assert publisher.heard[-1][1] == b"b"
    queue.machine.check_invariants()


def test_an_unused_queue_expires(nodes: dict[int, Node], time: Time) -> None:
    queue = nodes[1].open(queue_record(), x_expires=5000)
    channel = nodes[1].channel(queue)
    channel.consume()
    settle(nodes)
    time.pass_by(9000)
    assert nodes[1].reports == []
    channel.client.cancel(1)
    settle(nodes)
    time.pass_by(4000)
    assert nodes[1].reports == [("unused", 1)]
    time.pass_by(2000)
    assert nodes[1].reports[-1] == ("expired", 1)


def test_a_full_queue_drops_its_head_or_refuses(nodes: dict[int, Node]) -> None:
    dropping = nodes[1].open(queue_record(), x_max_length=2)
    channel = nodes[1].channel(dropping)
    channel.publish(b"a", b"b", b"c", tag=1)
    channel.client.get(no_ack=True)
    settle(nodes)
    assert channel.heard == [("got", b"b", 0, 0, 1, None), ("published", [1, 3], True)]
    refusing = nodes[1].open(
        queue_record("r", group=2), x_max_length=1, x_overflow="reject-publish"
    )
    channel = nodes[1].channel(refusing)
    channel.publish(b"a", tag=1)
    settle(nodes)
    channel.publish(b"b", tag=2)
    settle(nodes)
    assert channel.heard == [("published", [1, 1], True), ("published", [2, 2], False)]


@pytest.mark.parametrize("place", [1, 2])
def test_a_deleted_queue_answers_all_who_wait(nodes: dict[int, Node], place: int) -> None:
    record = queue_record()
    nodes[1].open(record)
    channel = nodes[place].channel(nodes[place].open(record))
    channel.consume()
    settle(nodes)
    channel.publish(b"a", tag=1)
    channel.client.get(no_ack=True)
    for node in nodes.values():
        node.host.delete(1)
    settle(nodes)
    text = "no queue 'q' in vhost '/'"
    assert ("cancelled", 1, "deleted") in channel.heard
    assert ("published", [1, 1], True) in channel.heard
    assert ("got", None, 0, 0, 0, text) in channel.heard
    channel.publish(b"b", tag=2)
    settle(nodes)
    assert channel.heard[-1] == ("published", [2, 2], True)


def test_a_node_that_is_lost_in_the_round_of_its_commands_leaves_no_session(
    nodes: dict[int, Node],
) -> None:
    """They were applied behind its loss, and its consumer took messages for ever."""
    home = nodes[1].open(queue_record())
    far = nodes[2].channel(nodes[2].open(queue_record()))
    far.consume()
    nodes[2].host.end_of_round()
    for sender, data in nodes[1].inbox:
        nodes[1].control.on_frame(sender, data)
    nodes[1].inbox.clear()
    nodes[1].host.on_node_down(2)
    nodes[1].host.end_of_round()
    assert not home.machine.sessions
    assert home.machine.consumer_count == 0


def test_a_lost_home_refuses_publishes_and_ends_consumers(nodes: dict[int, Node]) -> None:
    record = queue_record(durable=True)
    home = nodes[1].open(record)
    channel = nodes[2].channel(nodes[2].open(record))
    channel.consume()
    channel.publish(b"a", tag=1)
    settle(nodes)
    assert channel.deliveries() == [b"a"]
    channel.publish(b"b", tag=2)
    for node, other in ((1, 2), (2, 1)):
        nodes[node].wire.down.add(other)
        nodes[node].host.on_node_down(other)
    settle(nodes)
    assert ("cancelled", 1, "home node is down") in channel.heard
    assert channel.heard[-1] == ("published", [2, 2], False)
    assert home.machine.ready_count == 1
    for node in nodes.values():
        node.wire.down.clear()
    again = nodes[2].channel(nodes[2].open(record))
    again.consume()
    settle(nodes)
    assert again.got == [(1, 0, b"a", 1)]


def test_a_home_that_does_not_know_the_queue_says_so(nodes: dict[int, Node]) -> None:
    channel = nodes[2].channel(nodes[2].open(queue_record()))
    channel.publish(b"a", tag=1)
    settle(nodes)
    assert channel.heard == [("published", [1, 1], False)]


def test_persistent_messages_survive_a_restart(
    nodes: dict[int, Node], tmp_path: Path, time: Time
) -> None:
    record = queue_record(durable=True)
    channel = nodes[1].channel(nodes[1].open(record))
    channel.publish(b"a", b"b")
    channel.publish(b"transient", persistent=False)
    channel.publish(b"c", b"d")
    channel.consume(prefetch=3)
    settle(nodes)
    channel.client.settle(1, [0, 0])
    settle(nodes)
    restart(nodes, 1, tmp_path, time)
    queue = nodes[1].open(record)
    channel = nodes[1].channel(queue)
    channel.consume()
    channel.publish(b"e")
    settle(nodes)
    queue.machine.check_invariants()
    assert [(body, acquired) for _, _, body, acquired in channel.got] == [
        (b"b", 1), (b"c", 1), (b"d", 0), (b"e", 0),
    ]  # fmt: skip
    channel.client.settle(1, [0, 3])
    settle(nodes)
    restart(nodes, 1, tmp_path, time)
    queue = nodes[1].open(record)
    assert queue.machine.ready_count == 0
    assert queue.machine.next_position >= 5


def test_transient_messages_of_a_durable_queue_need_no_disk(
    nodes: dict[int, Node], tmp_path: Path, time: Time
) -> None:
    record = queue_record(durable=True)
    queue = nodes[1].open(record)
    channel = nodes[1].channel(queue)
    for n in range(3):
        channel.publish(b"%d" % n, tag=n + 1, persistent=False)
        settle(nodes, disk=False)
    assert channel.heard == [("published", [n, n], True) for n in (1, 2, 3)]
    channel.consume(prefetch=2)
    settle(nodes, disk=False)
    channel.client.settle(1, [0, 0])
    settle(nodes)
    assert channel.deliveries() == [b"0", b"1", b"2"]
    assert not (tmp_path / "node-1" / "1").exists()
    queue.machine.check_invariants()
    channel.client.close()
    settle(nodes)
    restart(nodes, 1, tmp_path, time)
    assert nodes[1].open(record).machine.ready_count == 0


def test_a_transient_message_is_confirmed_behind_a_persistent_one(
    nodes: dict[int, Node], tmp_path: Path, time: Time
) -> None:
    record = queue_record(durable=True)
    channel = nodes[1].channel(nodes[1].open(record))
    channel.publish(b"a", tag=1)
    settle(nodes, disk=False)
    channel.publish(b"b", tag=2, persistent=False)
    settle(nodes, disk=False)
    assert channel.heard == []
    settle(nodes)
    assert channel.heard == [("published", [1, 1], True), ("published", [2, 2], True)]
    channel.publish(b"c", b"d", tag=3)
    settle(nodes)
    restart(nodes, 1, tmp_path, time)
    # Their positions are not used again by what comes: the log has those behind.
    queue = nodes[1].open(record)
    channel = nodes[1].channel(queue)
    channel.publish(b"e")
    channel.consume()
    settle(nodes)
    assert channel.deliveries() == [b"a", b"c", b"d", b"e"]
    queue.machine.check_invariants()


def test_a_torn_tail_is_cut(nodes: dict[int, Node], tmp_path: Path, time: Time) -> None:
    record = queue_record(durable=True)
    channel = nodes[1].channel(nodes[1].open(record))
    for body in (b"a", b"b"):
        channel.publish(body)
        settle(nodes)
    (path,) = (tmp_path / "node-1" / "1").glob("*.log")
    nodes[1].host.stop()
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    Node(1, nodes, tmp_path, time)
    queue = nodes[1].open(record)
    assert queue.machine.ready_count == 1
    assert [event for event, _ in nodes[1].notes] == ["storage.torn_tail"]


@pytest.mark.parametrize("durable", [False, True])
def test_a_backlog_waits_on_disk(
    nodes: dict[int, Node], durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes[1].host.memory, "target_bytes", 20_000)
    queue = nodes[1].open(queue_record(durable=durable))
    channel = nodes[1].channel(queue)
    bodies = [b"%03d" % i * 300 for i in range(100)]
    for body in bodies:
        channel.publish(body)
        settle(nodes)
    assert queue.machine.backing.memory_bytes <= 20_000
    channel.consume(prefetch=5)
    settle(nodes)
    for i in range(100):
        channel.client.settle(1, [i, i])
        settle(nodes)
    assert channel.deliveries() == bodies
    assert queue.machine.backing.memory_bytes == 0
    queue.machine.check_invariants()


def test_publishes_wait_for_room_on_the_link_home(nodes: dict[int, Node]) -> None:
    record = queue_record()
    home = nodes[1].open(record)
    away = nodes[2].open(record)
    channel = nodes[2].channel(away)
    settle(nodes)
    nodes[2].wire.full.add(1)
    for tag in (1, 2):
        channel.publish(b"body", tag=tag)
        settle(nodes)
    assert home.machine.ready_count == 0
    assert channel.heard.count(("flow", True)) == 1
    late = nodes[2].channel(away)
    settle(nodes)
    assert ("flow", True) in late.heard
    nodes[2].make_room(1)
    settle(nodes)
    assert home.machine.ready_count == 2
    assert ("flow", False) in channel.heard
    assert ("flow", False) in late.heard


def test_who_comes_while_the_disk_is_behind_waits_as_well(
    nodes: dict[int, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = nodes[1].open(queue_record(durable=True))
    transient = nodes[1].open(queue_record("r", group=2))
    channel = nodes[1].channel(durable)
    writer = nodes[1].host.writer
    monkeypatch.setattr(writer, "backlog_bytes", host_module.FLOW_ON_BYTES + 1)
    channel.client.settle(0, ())
    settle(nodes)
    assert channel.heard == [("flow", True)]
    late, beside = nodes[1].channel(durable), nodes[1].channel(transient)
    settle(nodes)
    assert late.heard == [("flow", True)]
    assert beside.heard == []
    writer.backlog_bytes = 0
    channel.client.settle(0, ())
    settle(nodes)
    assert late.heard == channel.heard == [("flow", True), ("flow", False)]


def test_a_queue_that_ends_holds_no_publisher(
    nodes: dict[int, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk that publishers wait for is not theirs any more."""
    durable = nodes[1].open(queue_record(durable=True))
    channel = nodes[1].channel(durable)
    monkeypatch.setattr(nodes[1].host.writer, "backlog_bytes", host_module.FLOW_ON_BYTES + 1)
    channel.client.settle(0, ())
    settle(nodes)
    durable.crash(nodes[1].host.home_down(durable.record))
    assert channel.heard == [("flow", True), ("flow", False)]


def home_and_consumer(nodes: dict[int, Node]) -> tuple[Any, Any]:
    """A channel at the queue's home, and one with a consumer on the other node."""
    record = queue_record()
    home = nodes[1].channel(nodes[1].open(record))
    channel = nodes[2].channel(nodes[2].open(record))
    channel.consume()
    settle(nodes)
    return home, channel


def test_a_suspicion_loses_nothing_that_waits_for_room(nodes: dict[int, Node]) -> None:
    home, channel = home_and_consumer(nodes)
    for one, other in ((1, 2), (2, 1)):
        nodes[one].wire.full.add(other)
    home.publish(b"a")
    channel.publish(b"b", tag=1)
    settle(nodes)
    for one, other in ((1, 2), (2, 1)):
        nodes[one].suspect(other)
    settle(nodes)
    assert channel.got == []
    for one, other in ((1, 2), (2, 1)):
        nodes[one].make_room(other)
    settle(nodes)
    assert channel.deliveries() == [b"a", b"b"]
    assert ("published", [1, 1], True) in channel.heard
    assert channel.heard.count(("flow", True)) == channel.heard.count(("flow", False))


def test_what_waits_for_a_node_that_is_gone_goes_too(nodes: dict[int, Node]) -> None:
    home, channel = home_and_consumer(nodes)
    for one, other in ((1, 2), (2, 1)):
        nodes[one].wire.full.add(other)
    home.publish(b"a")
    channel.publish(b"b", tag=1)
    settle(nodes)
    for one, other in ((1, 2), (2, 1)):
        nodes[one].wire.full.discard(other)
        nodes[one].wire.down.add(other)
        nodes[one].suspect(other)
        nodes[one].host.on_node_down(other)
    settle(nodes)
    assert nodes[1].lines == nodes[2].lines == {}
    assert channel.got == []
    assert ("published", [1, 1], False) in channel.heard
    assert channel.heard[-1] != ("flow", True)
    assert nodes[1].host.queues[1].machine.ready_count == 1


def test_deliveries_wait_in_order_for_room_on_the_link(nodes: dict[int, Node]) -> None:
    home, channel = home_and_consumer(nodes)
    nodes[1].wire.full.add(2)
    for body in (b"a", b"b"):
        home.publish(body)
        settle(nodes)
    channel.client.cancel(1)
    settle(nodes)
    assert channel.got == []
    assert ("cancel-ok", 1) not in channel.heard
    nodes[1].make_room(2)
    settle(nodes)
    assert [got[2] for got in channel.got] == [b"a", b"b"]
    assert channel.heard[-1] == ("cancel-ok", 1)


# --- settings that change ---------------------------------------------------------------------


def test_a_lower_length_drops_at_once_and_a_higher_one_lets_in_again(
    nodes: dict[int, Node],
) -> None:
    queue = nodes[1].open(queue_record(durable=True))
    channel = nodes[1].channel(queue)
    channel.publish(*(b"%d" % number for number in range(10)))
    settle(nodes)
    queue.configure({"max-length": 3})
    assert (queue.machine.ready_count, queue.left()) == (3, {("disabled", "maxlen"): 7})
    queue.machine.check_invariants()
    queue.configure({"max-length-bytes": 2})
    assert queue.machine.ready_count == 2
    queue.configure({})
    channel.publish(b"a", b"b", b"c", b"d")
    channel.consume()
    settle(nodes)
    assert channel.deliveries() == [b"8", b"9", b"a", b"b", b"c", b"d"]


def test_settings_that_change_refuse_publishes_from_then_on(nodes: dict[int, Node]) -> None:
    queue = nodes[1].open(queue_record())
    channel = nodes[1].channel(queue)
    channel.publish(b"a", tag=1)
    settle(nodes)
    queue.configure({"max-length": 1, "overflow": "reject-publish"})
    channel.publish(b"b", tag=2)
    settle(nodes)
    queue.configure({})
    channel.publish(b"c", tag=3)
    settle(nodes)
    assert [heard for heard in channel.heard if heard[0] == "published"] == [
        ("published", [1, 1], True),
        ("published", [2, 2], False),
        ("published", [3, 3], True),
    ]


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_a_message_keeps_the_time_to_live_that_it_was_published_with(
    nodes: dict[int, Node], tmp_path: Path, time: Time, restarts: int
) -> None:
    """A policy that changes while messages wait counts for later ones, over restarts as well.

    A restart once gave the messages that waited the time of the day.
    """
    record = queue_record(durable=True)
    queue = nodes[1].open(record)
    channel = nodes[1].channel(queue)
    for settings in ({}, {"message-ttl": 1000}, {"message-ttl": 5000}, {}):
        queue.configure(settings)
        channel.publish(b"m")
        settle(nodes)

    def left() -> int:
        nonlocal queue
        for _ in range(restarts):
            restart(nodes, 1, tmp_path, time)
            found = nodes[1].host.open(record, EMPTY, {"message-ttl": 500})
            assert found is not None
            queue = found
        return queue.machine.ready_count

    # The first message has no limit: expiry is looked at from the head on, as in RabbitMQ.
    time.pass_by(1000)
    assert left() == 4
    client = nodes[1].channel(queue)
    client.client.get(no_ack=True)
    settle(nodes)
    assert left() == 2
    time.pass_by(4000)
    settle(nodes)
    assert left() == 1
    time.pass_by(100_000)
    assert left() == 1


@pytest.mark.parametrize("stops", [1, 4])
def test_the_time_to_live_counts_from_the_publish_over_restarts(
    nodes: dict[int, Node], tmp_path: Path, time: Time, stops: int
) -> None:
    """Both of the queue and of the message."""
    names = {1: {"x_message_ttl": 20_000}, 2: {}}
    for group, arguments in names.items():
        queue = nodes[1].open(queue_record(str(group), group=group, durable=True), **arguments)
        own = {} if arguments else {"expiration": "20000"}
        nodes[1].channel(queue).publish(b"m", tag=1, **own)
    settle(nodes)
    queues = []
    for _ in range(stops):
        time.pass_by(19_000 // stops)
        restart(nodes, 1, tmp_path, time)
        queues = [
            nodes[1].open(queue_record(str(group), group=group, durable=True), **arguments)
            for group, arguments in names.items()
        ]
        assert [queue.machine.ready_count for queue in queues] == [1, 1]
    time.pass_by(2_000)
    settle(nodes)
    assert [queue.machine.ready_count for queue in queues] == [0, 0]


def test_a_message_of_a_log_without_times_counts_from_the_recovery(
    nodes: dict[int, Node], tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before 0.4.0; and a clock that was set back makes none live longer."""
    real = ClassicLog.add_messages
    monkeypatch.setattr(
        ClassicLog,
        "add_messages",
        lambda self, position, command, time_ms=0, **more: real(
            self, position, command, 0 if position == 0 else time_ms + 1_000_000, **more
        ),
    )
    queue = nodes[1].open(queue_record(durable=True), x_message_ttl=20_000)
    nodes[1].channel(queue).publish(b"old", tag=1)
    settle(nodes)
    nodes[1].channel(queue).publish(b"ahead", tag=1)
    settle(nodes)
    time.pass_by(6_000)
    restart(nodes, 1, tmp_path, time)
    queue = nodes[1].open(queue_record(durable=True), x_message_ttl=20_000)
    time.pass_by(19_000)
    settle(nodes)
    assert queue.machine.ready_count == 2
    time.pass_by(2_000)
    settle(nodes)
    assert queue.machine.ready_count == 0


def test_expiry_of_an_idle_queue_counts_from_when_it_was_set(
    nodes: dict[int, Node], time: Time
) -> None:
    queue = nodes[1].open(queue_record())
    time.pass_by(60_000)
    queue.configure({"expires": 5000})
    time.pass_by(4000)
    assert nodes[1].reports == []
    time.pass_by(2000)
    assert ("expired", 1) in nodes[1].reports


@pytest.mark.parametrize("is_open", [False, True])
def test_a_session_that_a_late_frame_began_is_ended(nodes: dict[int, Node], is_open: bool) -> None:
    """Its frame was sent before the link broke, and arrives when the next one is up."""
    record = queue_record()
    home = nodes[1].open(record)
    channel = nodes[2].channel(nodes[2].open(record))
    channel.consume(prefetch=1)
    nodes[2].host.end_of_round()
    late = nodes[1].inbox.pop()
    nodes[1].host.on_node_down(2)
    nodes[2].host.on_node_down(1)
    nodes[1].host.on_node_up(2)
    nodes[2].host.on_node_up(1)
    if is_open:
        nodes[2].channel(nodes[2].open(record))
    nodes[1].inbox.append(late)
    settle(nodes)
    nodes[1].channel(home).publish(b"a")
    settle(nodes)
    assert home.machine.unsettled_count == 0
    assert home.machine.ready_count == 1
    assert home.machine.consumer_count == 0
