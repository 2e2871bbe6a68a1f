"""Damaged files of mirrored queues: what is confirmed comes from a copy that has it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from convoymq.metadata.commands import ChangeView
from convoymq.queues.classic.new_file import NewFile
from convoymq.queues.classic.queue import LocalQueue
from convoymq.queues.mirrored.copy import MEMBER_FILE, read_member
from convoymq.queues.mirrored.instructions import Messages
from convoymq.storage.files import RealDirectory
from tests.unit.queues.classic.support import Channel, Node, Time, queue_record
from tests.unit.queues.classic.test_containment import fail_once
from tests.unit.queues.classic.test_log import command
from tests.unit.queues.mirrored.support import Cluster

MESSAGES = 40


def fill(cluster: Cluster, size: int = 10) -> list[bytes]:
    channel = cluster.channel(3)
    bodies = [b"<%02d>" % n * size for n in range(MESSAGES)]
    for tag, body in enumerate(bodies, 1):
        channel.publish(body, tag=tag)
        cluster.settle()
    assert len([heard for heard in channel.heard if heard[0] == "published"]) == MESSAGES
    return bodies


def spoil(directory: Path, node: int, how: str) -> None:
    """Spoils the body of a message, or the file that it is in."""
    for path in sorted((directory / f"node-{node}" / "1").glob("*.log")):
        data = path.read_bytes()
        at = data.find(b"<30>")
        if at < 0:
            continue
        if how == "flip":
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        elif how == "truncate":
            path.write_bytes(data[:at])
        elif how == "foreign":
            other = min(path.parent.glob("*.log"))
            path.write_bytes(other.read_bytes())
        else:
            path.unlink()
        return
    raise AssertionError("the message is in no file")


def taken(cluster: Cluster, node: int = 3) -> list[bytes]:
    channel: Channel = cluster.channel(node)
    channel.consume()
    cluster.pass_by(20_000)
    return channel.deliveries()


def events(cluster: Cluster, node: int) -> list[str]:
    return [event for event, _ in cluster.nodes[node].notes]


@pytest.mark.provokes("queue.mirror_failed")
@pytest.mark.parametrize("how", ["truncate", "missing", "foreign"])
def test_a_damaged_mirror_does_not_take_over(cluster: Cluster, tmp_path: Path, how: str) -> None:
    for node in cluster.nodes.values():
        node.host.file_bytes_max = 2_000
    cluster.declare()
    bodies = fill(cluster)
    spoil(tmp_path, 2, how)
    cluster.fail()
    assert "queue.records_dropped" in events(cluster, 2)
    assert "queue.mirror_failed" in events(cluster, 2)
    assert cluster.queue.home == 3
    # It begins anew.
    cluster.until(lambda: len(cluster.master.member.view.live) == 2)
    assert "queue.mirror_failed" not in events(cluster, 3)
    assert taken(cluster) == bodies


@pytest.mark.parametrize("how", ["flip", "truncate", "foreign"])
@pytest.mark.parametrize("size", [10, 2_000])
def test_a_master_that_finds_damage_gives_way(tmp_path: Path, how: str, size: int) -> None:
    cluster = Cluster(tmp_path, Time(), memory_target_bytes=1_000)
    for node in cluster.nodes.values():
        node.host.file_bytes_max = 60 * size
    cluster.declare()
    bodies = fill(cluster, size)
    spoil(tmp_path, 1, how)
    channel: Channel = cluster.channel(3)
    channel.consume(prefetch=1)
    for _ in range(3 * MESSAGES):
        cluster.pass_by(250)
        held = channel.got[-1:]
        for _, number, _, _ in held:
            channel.client.settle(1, [number, number])
    cluster.pass_by(10_000)
    assert "queue.records_dropped" in events(cluster, 1)
    assert cluster.queue.home == 2
    assert sorted(set(channel.deliveries())) == bodies
    assert not {"queue.mirror_failed", "queue.crashed"} & {*events(cluster, 2), *events(cluster, 3)}
    for node in cluster.nodes.values():
        node.host.stop()


def test_mirrors_that_come_later_equal_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirrors that had a message which the master lost are gone before it gave way."""
    cluster = Cluster(tmp_path, Time(), memory_target_bytes=1_000)
    for node in cluster.nodes.values():
        node.host.file_bytes_max = 600
    cluster.declare()
    fill(cluster)
    spoil(tmp_path, 1, "flip")
    master, host = cluster.master, cluster.nodes[1].host
    monkeypatch.setattr(host, "follow_policy", lambda _master: None)
    channel: Channel = cluster.channel(3)
    channel.consume()
    cluster.settle()
    assert len(channel.deliveries()) == MESSAGES - 1
    assert master.depth == MESSAGES
    for number in (2, 3):
        view = cluster.queue.view
        assert view is not None
        gone = view.with_failed(number)
        cluster.record_view(ChangeView(vhost="/", name="q", group=1, view=gone))
        cluster.settle()
    channel.client.settle(1, [0, MESSAGES - 2])
    cluster.settle()
    assert master.depth == 0
    master.is_damaged = False
    monkeypatch.undo()
    host.follow_policy(master)
    cluster.until(cluster.is_synchronised)
    assert cluster.master is master
    for node in cluster.nodes.values():
        node.host.stop()


def test_a_body_that_cannot_be_read(cluster: Cluster, tmp_path: Path) -> None:
    """What is known of the message is in memory, its body is not."""
    cluster.declare()
    bodies = fill(cluster)
    for run in cluster.master.machine._all_runs():
        cluster.master.machine.drop_body(run.block)
    spoil(tmp_path, 1, "flip")
    channel: Channel = cluster.channel(3)
    channel.consume()
    cluster.pass_by(30_000)
    assert cluster.queue.home == 2
    assert channel.deliveries() == bodies
    # Nothing that clients asked for was refused.
    assert channel.heard == [("flow", True), ("flow", False), ("subscribed", 1, None)]


@pytest.mark.parametrize("how", ["truncate", "missing", "foreign", "member"])
def test_a_damaged_last_master_does_not_open_the_queue(
    cluster: Cluster, tmp_path: Path, how: str
) -> None:
    """All nodes were stopped: a mirror that has all opens it, and does not wait for the master."""
    for node in cluster.nodes.values():
        node.host.file_bytes_max = 2_000
    cluster.declare()
    bodies = fill(cluster)

    def damage() -> None:
        if how == "member":
            path = tmp_path / "node-1" / "1" / "member"
            path.write_bytes(path.read_bytes()[:-1] + b"\x02")
        else:
            spoil(tmp_path, 1, how)

    cluster.restart(damage)
    cluster.until(lambda: cluster.queue.home != 1)
    assert events(cluster, 1)[0] == "queue.mirror_failed"
    assert taken(cluster) == bodies


def test_an_intact_last_master_opens_the_queue(cluster: Cluster, tmp_path: Path) -> None:
    cluster.declare()
    bodies = fill(cluster)
    cluster.restart(lambda: spoil(tmp_path, 2, "flip"))
    cluster.settle()
    assert cluster.queue.home == 1
    assert taken(cluster) == bodies


@pytest.mark.provokes("queue.lost_with_disk")
def test_a_plain_queue_of_a_lost_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there and empty."""
    cluster = Cluster(tmp_path, Time(), size=1)
    cluster.queue = queue_record(durable=True)
    cluster._tell()
    cluster.channel(1).publish(b"a", tag=1)
    cluster.settle()
    cluster.restart(lambda: None)
    assert "queue.lost_with_disk" not in events(cluster, 1)
    monkeypatch.setattr(Node, "lost_groups", 1)
    cluster.restart(lambda: None)
    assert "queue.lost_with_disk" not in events(cluster, 1)
    cluster.restart(lambda: shutil.rmtree(tmp_path / "node-1"))
    assert events(cluster, 1) == ["queue.lost_with_disk"]
    assert cluster.nodes[1].host.queues[1].machine.ready_count == 0
    cluster.nodes[1].host.stop()


def test_messages_that_overlap_known_ones_are_not_believed(cluster: Cluster) -> None:
    """Both mirrors name what the master said, and begin anew."""
    cluster.declare()
    channel = cluster.channel(1)
    bodies = [b"one", b"two", b"three"]
    for tag, body in enumerate(bodies, 1):
        channel.publish(body, tag=tag)
    cluster.settle()
    cluster.master.log.tell(Messages(1, 0, command(1)))
    cluster.master.send()
    cluster.settle()
    for node in (2, 3):
        reasons = [
            fields["reason"]
            for event, fields in cluster.nodes[node].notes
            if event == "queue.mirror_failed"
        ]
        assert reasons == ["messages 1 to 1 overlap 0 to 2"]
    cluster.until(lambda: len(cluster.master.member.view.full()) == 3)
    assert cluster.master.member.view.synchronised == (1,)
    assert taken(cluster) == bodies


@pytest.mark.parametrize(
    "node", [1, pytest.param(2, marks=pytest.mark.provokes("queue.mirror_failed"))]
)
def test_a_mark_that_the_disk_refused_is_written_later(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int
) -> None:
    refused: list[str] = []
    write = NewFile.pwrite

    def pwrite(self: NewFile, buffers: list[bytes | memoryview], offset: int) -> None:
        folder = self._directory.path  # type: ignore[attr-defined]
        if self.name.endswith(MEMBER_FILE) and folder.name == f"node-{node}" and len(refused) < 3:
            refused.append(self.name)
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.name)
        write(self, buffers, offset)

    monkeypatch.setattr(NewFile, "pwrite", pwrite)
    cluster.declare()
    assert len(refused) == 3
    bodies = fill(cluster)
    for number in cluster.nodes:
        assert read_member(RealDirectory(tmp_path / f"node-{number}"), 1) is not None
    cluster.fail()
    assert taken(cluster) == bodies


@pytest.mark.provokes("queue.crashed", "queue.restarted")
def test_a_master_that_crashed_is_opened_after_a_while_and_runs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.declare()
    bodies = fill(cluster)
    host = cluster.nodes[1].host
    fail_once(monkeypatch, LocalQueue, "_carry_out")
    cluster.channel(3).publish(b"refused")
    cluster.settle()
    assert host.crashed
    # A change of the view is no reason to open it before its files are free.
    host.follow(cluster.queue, cluster.arguments, cluster.settings)
    assert host.crashed
    cluster.until(lambda: 1 in host.due())
    host.open(cluster.queue, cluster.arguments, cluster.settings)
    cluster.until(lambda: host.master_of(1) is not None and not host.crashed)
    assert [row["state"] for row in host.rows([1])] == ["running"]
    assert taken(cluster)[:MESSAGES] == bodies
