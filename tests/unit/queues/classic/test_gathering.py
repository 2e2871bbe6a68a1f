"""Commands gather while a write is under way, and only confirms wait for a flush (ADR 0170)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoymq.queues.classic.host import TICK_MS
from convoymq.queues.classic.log_writer import Job, Kind, carry_out
from convoymq.storage.files import RealDirectory, RealFile
from tests.unit.queues.classic.support import Channel, Node, Time, queue_record, settle


@pytest.fixture
def held(nodes: dict[int, Node]) -> Iterator[threading.Event]:
    """The disk stands still until the event is set."""
    writes = threading.Event()
    nodes[1].worker.submit(writes.wait, lambda _result, _error: None)
    yield writes
    writes.set()


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were flushed."""
    found: list[str] = []
    sync = RealFile.sync

    def noted(file: RealFile) -> None:
        found.append(file.name)
        sync(file)

    monkeypatch.setattr(RealFile, "sync", noted)
    return found


def opened(nodes: dict[int, Node]) -> Channel:
    return nodes[1].channel(nodes[1].open(queue_record(durable=True)))


def received(nodes: dict[int, Node]) -> int:
    """Returns how many messages came to the queue."""
    return int(nodes[1].host.queues[1].machine.next_position)


def publish(nodes: dict[int, Node], channel: Channel, number: int) -> None:
    channel.publish(b"%d" % number, tag=number)
    settle(nodes, disk=False)


def test_commands_gather_until_a_write_is_done(
    nodes: dict[int, Node], held: threading.Event
) -> None:
    channel = opened(nodes)
    for number in (1, 2, 3):
        publish(nodes, channel, number)
    assert received(nodes) == 1
    held.set()
    settle(nodes)
    assert channel.heard == [("published", [1, 1], True), ("published", [2, 3], True)]


def test_what_gathers_is_handed_out_in_time_while_the_disk_stands_still(
    nodes: dict[int, Node], held: threading.Event, time: Time
) -> None:
    channel = opened(nodes)
    channel.consume()
    for number in (1, 2):
        publish(nodes, channel, number)
    assert channel.deliveries() == [b"1"]
    time.pass_by(nodes[1].host.gather_ms)
    settle(nodes, disk=False)
    assert channel.deliveries() == [b"1", b"2"]


@pytest.mark.usefixtures("held")
def test_a_count_sees_what_gathers(nodes: dict[int, Node]) -> None:
    channel = opened(nodes)
    for number in (1, 2):
        publish(nodes, channel, number)
    with pytest.raises(StopIteration) as answer:
        nodes[1].host.queues[1].counts().send(None)
    assert answer.value.value == (2, 0)


def test_what_gathers_is_written_when_the_node_stops(
    nodes: dict[int, Node], held: threading.Event, tmp_path: Path, time: Time
) -> None:
    channel = opened(nodes)
    for number in (1, 2):
        publish(nodes, channel, number)
    threading.Timer(0.01, held.set).start()
    nodes[1].host.stop()
    again = Node(1, nodes, tmp_path, time).open(queue_record(durable=True))
    assert again.machine.ready_count == 2


@pytest.mark.usefixtures("held")
def test_commands_of_other_nodes_do_not_wait_again(nodes: dict[int, Node]) -> None:
    here = opened(nodes)
    there = nodes[2].channel(nodes[2].open(queue_record(durable=True)))
    for number in (1, 2):
        publish(nodes, there, number)
    assert received(nodes) == 2
    publish(nodes, here, 3)
    assert received(nodes) == 2


@pytest.mark.usefixtures("held")
def test_a_question_does_not_wait(nodes: dict[int, Node]) -> None:
    channel = opened(nodes)
    for number in (1, 2):
        publish(nodes, channel, number)
    channel.client.get(no_ack=True)
    settle(nodes, disk=False)
    assert [heard[:2] for heard in channel.heard] == [("got", b"1")]
    publish(nodes, channel, 3)
    assert received(nodes) == 2


def test_acknowledgements_are_flushed_with_the_next_messages_or_within_a_second(
    nodes: dict[int, Node], syncs: list[str], time: Time
) -> None:
    channel = opened(nodes)
    channel.consume()
    for number in (1, 2, 3):
        channel.publish(b"%d" % number)
    settle(nodes)
    syncs.clear()
    for number in range(2):
        channel.client.settle(1, [number, number])
        settle(nodes)
    assert not syncs
    for _ in range(2):
        time.pass_by(TICK_MS)
        settle(nodes)
        assert syncs == ["1/00000001.log"]


def test_a_flush_concerns_what_was_written_without_one(tmp_path: Path, syncs: list[str]) -> None:
    file = RealDirectory(tmp_path).open("f", create=True)
    jobs = [
        Job(Kind.WRITE, file, 0, [b"a"], False, print),
        Job(Kind.WRITE, file, 1, [b"b"], True, print),
    ]
    carry_out(jobs)
    assert syncs == ["f"]
    assert file.pread(2, 0) == b"ab"
    carry_out([Job(Kind.WRITE, file, 2, [b"c"], False, print)])
    assert syncs == ["f"]
