"""Paging of classic queues (ADR 0126): what leaves memory, what comes back, and a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convoymq.queues.classic import machine as machine_module
from convoymq.queues.classic.backing import Span
from tests.unit.queues.classic.support import Channel, Node, Time, queue_record
from tests.unit.queues.classic.support import settle as settled

TARGET = 40_000


def made(tmp_path: Path, time: Time, **more: int) -> Node:
    return Node(1, {}, tmp_path, time, memory_target_bytes=TARGET, **more)


def fill(node: Node, channel: Channel, count: int, *, batch: int = 1, **properties: Any) -> None:
    for first in range(0, count, batch):
        channel.publish(*(b"%05d" % n for n in range(first, first + batch)), **properties)
        settled(node.nodes)


def spans(queue: Any) -> list[Span]:
    lines = queue.machine.backing.lines
    return [item for line in lines for item in line.waiting if isinstance(item, Span)]


def drain(node: Node, queue: Any, count: int) -> list[bytes]:
    reader = node.channel(queue)
    reader.consume(prefetch=50)
    settled(node.nodes)
    while len(reader.deliveries()) < count:
        before = len(reader.deliveries())
        reader.client.settle(1, [0, before - 1])
        settled(node.nodes)
        assert len(reader.deliveries()) > before
    return reader.deliveries()


@pytest.mark.parametrize(("durable", "persistent"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("batch", [1, 20])
def test_a_backlog_stays_within_the_target(
    tmp_path: Path, time: Time, durable: bool, persistent: bool, batch: int
) -> None:
    node = made(tmp_path, time, file_bytes_max=20_000)
    queue = node.open(queue_record(durable=durable))
    fill(node, node.channel(queue), 2000, batch=batch, persistent=persistent)
    machine = queue.machine
    machine.check_invariants()
    assert machine.footprint <= TARGET
    status = queue.info()["backing_queue_status"]
    assert status["len"] == 2000
    assert status["delta"][2] + sum(status[q] for q in ("q1", "q2", "q3", "q4")) == 2000
    assert status["delta"][2] > 1000
    assert status["q4"]
    assert queue.info()["messages_paged_out"] > 1000
    assert drain(node, queue, 2000) == [b"%05d" % n for n in range(2000)]
    machine.check_invariants()
    assert not spans(queue)
    node.host.stop()


def test_a_short_queue_never_touches_delta(tmp_path: Path, time: Time) -> None:
    node = made(tmp_path, time)
    queue = node.open(queue_record(durable=True))
    channel = node.channel(queue)
    for _ in range(50):
        fill(node, channel, 20)
        assert not spans(queue)
        assert queue.info()["backing_queue_status"]["q4"] == 20
        channel.client.purge()
        settled(node.nodes)
    assert queue.info()["backing_queue_status"]["target_ram_count"] == "infinity"
    node.host.stop()


@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_restart_with_a_large_delta_reads_no_messages(
    tmp_path: Path, time: Time, is_indexed: bool
) -> None:
    node = made(tmp_path, time, file_bytes_max=20_000)
    queue = node.open(queue_record(durable=True))
    channel = node.channel(queue)
    fill(node, channel, 2000)
    channel.consume(prefetch=10)
    settled(node.nodes)
    channel.client.settle(1, [0, 4])
    settled(node.nodes)
    node.host.stop()
    if not is_indexed:
        for path in (tmp_path / "node-1" / "1").glob("*.idx"):
            path.unlink()
    again = made(tmp_path, time)
    queue = again.open(queue_record(durable=True))
    assert queue.machine.ready_count == 1995
    assert queue.machine.backing.memory_bytes == 0
    assert queue.machine.backing.run_count < 40
    reader = again.channel(queue)
    reader.consume(prefetch=10)
    settled(again.nodes)
    assert [acquired for _, _, _, acquired in reader.got] == [1] * 10
    reader.client.close()
    settled(again.nodes)
    assert drain(again, queue, 1995) == [b"%05d" % n for n in range(5, 2000)]
    again.host.stop()


def test_a_purge_takes_what_is_on_disk_and_nothing_else(tmp_path: Path, time: Time) -> None:
    node = made(tmp_path, time, file_bytes_max=20_000)
    queue = node.open(queue_record(durable=True))
    channel = node.channel(queue)
    channel.consume(prefetch=3)
    fill(node, channel, 1000)
    assert spans(queue)
    channel.client.purge()
    settled(node.nodes)
    assert ("purged", 997, None) in channel.heard
    channel.publish(b"later")
    settled(node.nodes)
    node.host.stop()
    again = made(tmp_path, time)
    queue = again.open(queue_record(durable=True))
    assert drain(again, queue, 4) == [b"00000", b"00001", b"00002", b"later"]
    again.host.stop()


def test_what_can_be_read_again_comes_back(tmp_path: Path, time: Time) -> None:
    """A record is given up, its neighbours are paged out again, and now the disk returns it: the
    span has more than it counts, and all of it is taken in one round."""
    node = made(tmp_path, time, file_bytes_max=20_000)
    queue = node.open(queue_record(durable=True))
    fill(node, node.channel(queue), 600)
    file = tmp_path / "node-1" / "1" / "00000003.log"
    intact = file.read_bytes()
    file.write_bytes(intact[:5_000] + bytes([intact[5_000] ^ 0xFF]) + intact[5_001:])
    reader = node.channel(queue)
    before = 0
    while not node.notes:
        reader.client.get(no_ack=True)
        settled(node.nodes)
        before += 1
        assert before < 600
    ((event, facts),) = node.notes
    assert (event, facts["messages"]) == ("queue.records_dropped", 1)
    assert queue.machine.ready_count == 600 - before - 1
    file.write_bytes(intact)
    for _ in range(600):
        reader.client.get(no_ack=True)
    settled(node.nodes)
    assert queue.ended is None
    bodies = [heard[1] for heard in reader.heard if heard[0] == "got"]
    assert [body for body in bodies if body] == [b"%05d" % n for n in range(600)]
    queue.machine.check_invariants()
    assert not any(queue.log._live.values())
    node.host.stop()


def test_damage_in_a_paged_out_part_is_named_and_passed_over(tmp_path: Path, time: Time) -> None:
    node = made(tmp_path, time, file_bytes_max=20_000)
    queue = node.open(queue_record(durable=True))
    fill(node, node.channel(queue), 1000)
    file = tmp_path / "node-1" / "1" / "00000003.log"
    data = bytearray(file.read_bytes())
    data[5_000] ^= 0xFF
    file.write_bytes(data)
    got = drain(node, queue, 999)
    assert len(got) == 999
    assert got == sorted(got)
    queue.machine.check_invariants()
    (facts,) = [fields for event, fields in node.notes if event == "queue.records_dropped"]
    assert (facts["file"], facts["places"]) == ("1/00000003.log", 1)
    node.host.stop()


def test_transient_messages_that_were_paged_out_are_gone_after_a_restart(
    tmp_path: Path, time: Time
) -> None:
    node = made(tmp_path, time, file_bytes_max=20_000)
    queue = node.open(queue_record(durable=True))
    channel = node.channel(queue)
    for n in range(1000):
        channel.publish(b"%05d" % n, persistent=bool(n % 2))
        settled(node.nodes)
    assert sum(span.count for span in spans(queue)) > 500
    node.host.stop()
    again = made(tmp_path, time)
    queue = again.open(queue_record(durable=True))
    assert queue.machine.ready_count == 500
    assert drain(again, queue, 500) == [b"%05d" % n for n in range(1, 1000, 2)]
    again.host.stop()


def test_transient_messages_that_are_partly_gone_are_paged_out(tmp_path: Path, time: Time) -> None:
    node = made(tmp_path, time, file_bytes_max=20_000)
    queue = node.open(queue_record(durable=True))
    channel, reader = node.channel(queue), node.channel(queue)
    fill(node, channel, 40, batch=20, persistent=False)
    reader.consume(prefetch=40)
    settled(node.nodes)
    for n in range(0, 40, 2):
        reader.client.settle(1, [n, n])
    reader.client.close()
    fill(node, channel, 2000, persistent=False)
    assert queue.machine.unwritten < 50
    queue.machine.check_invariants()
    odd = [b"%05d" % n for n in range(1, 40, 2)]
    assert drain(node, queue, 2020) == [*odd, *(b"%05d" % n for n in range(2000))]
    assert queue.machine.unwritten == 0
    node.host.stop()
    again = made(tmp_path, time)
    assert again.open(queue_record(durable=True)).machine.ready_count == 0
    again.host.stop()


def test_messages_on_disk_expire_and_keep_the_time_they_came_with(
    tmp_path: Path, time: Time
) -> None:
    node = made(tmp_path, time, file_bytes_max=20_000)
    queue = node.open(queue_record(durable=True), x_message_ttl=10_000)
    channel = node.channel(queue)
    fill(node, channel, 600)
    time.pass_by(6_000)
    queue.configure({"message-ttl": 60_000})
    fill(node, channel, 400, expiration="30000")
    time.pass_by(5_000)
    settled(node.nodes)
    assert queue.machine.ready_count == 400
    time.pass_by(26_000)
    settled(node.nodes)
    assert queue.machine.ready_count == 0
    queue.machine.check_invariants()
    node.host.stop()


def test_a_limit_by_policy_drops_what_is_on_disk(tmp_path: Path, time: Time) -> None:
    node = made(tmp_path, time, file_bytes_max=20_000)
    queue = node.open(queue_record(durable=True))
    fill(node, node.channel(queue), 1000)
    queue.configure({"max-length": 10})
    settled(node.nodes)
    assert drain(node, queue, 10) == [b"%05d" % n for n in range(990, 1000)]
    node.host.stop()


def test_priorities_are_paged_out_each_by_itself(tmp_path: Path, time: Time) -> None:
    node = made(tmp_path, time, file_bytes_max=20_000)
    queue = node.open(queue_record(durable=True), x_max_priority=3)
    channel = node.channel(queue)
    for n in range(1200):
        channel.publish(b"%05d" % n, priority=n % 4)
        settled(node.nodes)
    assert queue.machine.footprint <= TARGET
    assert spans(queue)
    queue.machine.check_invariants()
    node.host.stop()
    again = made(tmp_path, time, file_bytes_max=20_000)
    queue = again.open(queue_record(durable=True), x_max_priority=3)
    assert queue.machine.ready_count == 1200
    expected = [b"%05d" % n for level in (3, 2, 1, 0) for n in range(level, 1200, 4)]
    assert drain(again, queue, 1200) == expected
    again.host.stop()


async def test_a_browse_shows_what_is_on_disk(tmp_path: Path, time: Time) -> None:
    node = made(tmp_path, time, file_bytes_max=20_000)
    queue = node.open(queue_record(durable=True))
    fill(node, node.channel(queue), 500)
    assert spans(queue)
    before = queue.machine.footprint
    cursor, rows = None, 0
    while True:
        cursor, runs = await queue.browse(cursor, 100, 1 << 20)
        rows += sum(run[3] for run in runs)
        if cursor is None:
            break
    assert rows == 500
    assert queue.machine.footprint == before
    node.host.stop()


def test_the_memory_of_an_idle_queue_goes_to_a_busy_one(tmp_path: Path, time: Time) -> None:
    node = made(tmp_path, time, file_bytes_max=20_000)
    idle = node.open(queue_record("idle", group=2, durable=True))
    fill(node, node.channel(idle), 50)
    assert not spans(idle)
    before = idle.machine.footprint
    busy = node.open(queue_record(durable=True))
    channel = node.channel(busy)
    fill(node, channel, 200)
    channel.consume(prefetch=5)
    settled(node.nodes)
    for n in range(3):
        time.pass_by(1_000)
        channel.client.settle(1, [5 * n, 5 * n + 4])
        fill(node, channel, 40)
    assert idle.machine.footprint < before
    assert node.host.memory.used_bytes <= TARGET
    node.host.stop()


def test_a_purge_leaves_what_is_held_between_messages_on_disk(tmp_path: Path, time: Time) -> None:
    """Of another priority, with a position in the midst of a span."""
    node = made(tmp_path, time, file_bytes_max=20_000)
    queue = node.open(queue_record(durable=True), x_max_priority=1)
    channel = node.channel(queue)
    for n in range(600):
        channel.publish(b"%05d" % n, priority=int(n == 300))
        settled(node.nodes)
    channel.consume(prefetch=1)
    settled(node.nodes)
    assert channel.deliveries() == [b"00300"]
    channel.client.purge()
    settled(node.nodes)
    node.host.stop()
    again = made(tmp_path, time)
    queue = again.open(queue_record(durable=True), x_max_priority=1)
    assert drain(again, queue, 1) == [b"00300"]
    again.host.stop()


def test_a_file_stays_until_what_was_moved_out_of_it_is_on_disk(tmp_path: Path, time: Time) -> None:
    node = Node(1, {}, tmp_path, time, file_bytes_max=2_000)
    queue = node.open(queue_record(durable=True))
    channel = node.channel(queue)
    channel.consume(prefetch=0)
    fill(node, channel, 90)
    file = tmp_path / "node-1" / "1" / "00000001.log"
    channel.client.settle(1, [1, 88])
    settled(node.nodes, disk=False)
    (run,) = [r for r in queue.machine._all_runs() if r.position == 0]
    assert run.block.where.file > 1
    queue.log.collect()
    assert file.exists()
    settled(node.nodes)
    assert not file.exists()
    node.host.stop()


@pytest.mark.parametrize("how", ["expire", "exceed"])
def test_what_is_dropped_in_masses_goes_step_by_step(
    tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(machine_module, "DROPS_MAX", 10)
    node = made(tmp_path, time, file_bytes_max=20_000)
    queue = node.open(queue_record(durable=True))
    channel = node.channel(queue)
    fill(node, channel, 100, expiration="5000" if how == "expire" else "")
    if how == "exceed":
        queue.configure({"max-length": 0})
        settled(node.nodes)
        assert queue.machine.ready_count == 90
    else:
        time.pass_by(5_001)
        channel.client.get(no_ack=True)
        settled(node.nodes)
        # Nothing is handed out that is late, though more is to be dropped.
        assert channel.heard[-1][:2] == ("got", None)
        assert 0 < queue.machine.ready_count < 100
    for _ in range(12):
        time.pass_by(2)
        settled(node.nodes)
    assert queue.machine.ready_count == 0
    queue.machine.check_invariants()
    node.host.stop()
