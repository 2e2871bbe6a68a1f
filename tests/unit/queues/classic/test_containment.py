"""One classic queue fails: its clients are answered, it is named, and the others go on."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convoymq.queues.classic.crashes import REOPEN_MS_MAX
from convoymq.queues.classic.host import TICK_MS
from convoymq.queues.classic.log import ClassicLog
from convoymq.queues.classic.queue import LocalQueue
from convoymq.queues.classic.remote_queue import RemoteQueue
from convoymq.storage.files import RealDirectory
from tests.unit.queues.classic.support import Channel, Node, Time, queue_record, settle

TEXT = "queue 'q' in vhost '/' has crashed and failed to restart"


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, group: int = 1) -> None:
    """Has a method raise the next time that the queue of that group calls it."""
    real = getattr(owner, name)
    left = [1]

    def raising(self: Any, *arguments: Any, **named: Any) -> Any:
        mine = group
        if isinstance(self, LocalQueue | RemoteQueue):
            mine = self.group
        elif isinstance(self, ClassicLog):
            mine = int(self._path)
        if left and mine == group:
            left.pop()
            raise KeyError("a fault of our own")
        return real(self, *arguments, **named)

    monkeypatch.setattr(owner, name, raising)


def crashes(node: Node) -> list[dict[str, Any]]:
    return [fields for event, fields in node.notes if event == "queue.crashed"]


def open_again(nodes: dict[int, Node], time: Time) -> Any:
    """Lets the time pass until node 1 opens its crashed queue anew, and does that."""
    host = nodes[1].host
    for _ in range(100):
        settle(nodes)
        if host.due():
            break
        time.pass_by(1_000)
    (group,) = host.due()
    return nodes[1].open(queue_record(durable=True, group=group))


WAYS: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("apply", lambda patch: fail_once(patch, LocalQueue, "_carry_out")),
    ("write", lambda patch: fail_once(patch, LocalQueue, "_store")),
    ("log", lambda patch: fail_once(patch, ClassicLog, "add_messages")),
    ("written", lambda patch: fail_once(patch, LocalQueue, "_tell_waiting")),
]


@pytest.mark.provokes("queue.crashed", "queue.restarted")
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("how", [way for _, way in WAYS], ids=[name for name, _ in WAYS])
def test_a_queue_that_fails_in_a_round_fails_alone(
    nodes: dict[int, Node],
    time: Time,
    monkeypatch: pytest.MonkeyPatch,
    how: Callable[[pytest.MonkeyPatch], None],
    place: int,
) -> None:
    nodes[1].open(queue_record(durable=True))
    mine = nodes[place].channel(nodes[place].open(queue_record(durable=True)))
    mine.consume(prefetch=1)
    mine.publish(b"a", b"b", tag=1)
    settle(nodes)
    mine.heard.clear()
    other = nodes[1].open(queue_record("other", group=2, durable=True))
    theirs = nodes[1].channel(other)
    how(monkeypatch)
    # Marked first, and served first.
    mine.publish(b"c", tag=3)
    mine.client.get(no_ack=True)
    theirs.publish(b"d", tag=1)
    settle(nodes)
    assert ("published", [1, 1], True) in theirs.heard
    assert ("published", [3, 3], False) in mine.heard
    assert ("cancelled", 1, "crashed") in mine.heard
    (crash,) = crashes(nodes[1])
    assert crash["queue"] == "q"
    assert crash["reason"] == "KeyError: 'a fault of our own'"
    rows = {row["group"]: row for row in nodes[1].host.rows()}
    assert rows[1]["state"] == "crashed"
    assert rows[1]["stopped_members"] == {1: crash["reason"]}
    assert rows[2]["state"] == "running"
    # It is answered until the queue is open again; then everything confirmed is there.
    mine.heard.clear()
    again = nodes[place].channel(nodes[place].open(queue_record(durable=True)))
    again.publish(b"e", tag=1)
    settle(nodes)
    assert again.heard == [("published", [1, 1], False)]
    queue = open_again(nodes, time)
    assert [event for event, _ in nodes[1].notes if event == "queue.restarted"]
    assert queue.machine.ready_count >= 2
    last = nodes[place].channel(nodes[place].open(queue_record(durable=True)))
    last.consume()
    last.publish(b"f", tag=1)
    settle(nodes)
    assert ("published", [1, 1], True) in last.heard
    assert last.deliveries()[0] == b"a"
    assert last.deliveries()[-1] == b"f"


def test_a_handle_of_a_queue_elsewhere_fails_alone(
    nodes: dict[int, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = nodes[1].open(queue_record())
    mine = nodes[2].channel(nodes[2].open(queue_record()))
    mine.consume()
    settle(nodes)
    nodes[1].open(queue_record("other", group=2))
    theirs = nodes[2].channel(nodes[2].open(queue_record("other", group=2)))
    fail_once(monkeypatch, RemoteQueue, "end_of_round")
    mine.publish(b"a", tag=1)
    theirs.publish(b"b", tag=1)
    settle(nodes)
    assert ("published", [1, 1], True) in theirs.heard
    assert ("published", [1, 1], False) in mine.heard
    assert ("cancelled", 1, "crashed") in mine.heard
    assert len(crashes(nodes[2])) == 1
    # The home node has nothing left of it.
    assert home.machine.sessions == {}
    # Nobody has to open anything: the next one who asks gets a new handle.
    queue = nodes[2].host.find(queue_record(), nodes[2].host.queues[2].arguments)
    again = nodes[2].channel(queue)
    again.publish(b"c", tag=1)
    settle(nodes)
    assert again.heard == [("published", [1, 1], True)]


FAULTS = ["on_published", "on_deliver", "on_get", "on_subscribed", "on_cancel_ok", "on_flow"]


@pytest.mark.provokes("queue.client_failed")
@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_a_channel_that_fails_ends_neither_its_queue_nor_other_channels(
    nodes: dict[int, Node], monkeypatch: pytest.MonkeyPatch, name: str, place: int, always: bool
) -> None:
    """Whether it fails once or in all that it hears; the others are on both nodes."""
    nodes[1].open(queue_record(durable=True))
    bad, near, far = (
        nodes[each].channel(nodes[each].open(queue_record(durable=True)))
        for each in (place, place, 3 - place)
    )
    for healthy in (near, far):
        healthy.consume(prefetch=1)
    settle(nodes)
    session = bad.client.session
    left = [1]
    real = getattr(bad, name)

    def raising(*arguments: Any) -> None:
        if always or left:
            left.clear()
            raise KeyError("a fault of a channel")
        real(*arguments)

    for each in FAULTS if always else (name,):
        monkeypatch.setattr(bad, each, raising)
    bad.consume(prefetch=1)
    bad.publish(b"a", b"b", b"c", tag=1)
    settle(nodes)
    bad.client.cancel(1)
    bad.client.get(no_ack=False)
    settle(nodes)
    queue = nodes[place].host.queues[1]
    queue.tell_all(lambda client: client.on_flow(True))
    near.publish(b"d", tag=1)
    far.publish(b"e", tag=1)
    settle(nodes)
    assert crashes(nodes[1]) == crashes(nodes[2]) == []
    failed = [fields for event, fields in nodes[place].notes if event == "queue.client_failed"]
    assert (failed[0]["queue"], failed[0]["session"]) == ("q", session)
    assert "a fault of a channel" in failed[0]["reason"]
    for healthy in (near, far):
        assert ("published", [1, 1], True) in healthy.heard
        assert not [each for each in healthy.heard if each[0] == "cancelled"]
    # What the failing one held is handed to the others.
    got: set[bytes] = set()
    for _ in range(10):
        for healthy in (near, far):
            for number, message_id, body, _ in healthy.got:
                got.add(body)
                healthy.client.settle(number, (message_id, message_id))
            healthy.got.clear()
        settle(nodes)
    taken = {each[1] for each in bad.heard if each[0] == "got"}
    assert got | taken | set(bad.deliveries()) >= {b"a", b"b", b"c", b"d", b"e"}
    if always:
        assert got == {b"a", b"b", b"c", b"d", b"e"}
        return
    # It goes on in a new session.
    assert bad.client.session != session
    bad.heard.clear()
    bad.publish(b"f", tag=9)
    settle(nodes)
    assert bad.heard == [("published", [9, 9], True)]


@pytest.mark.parametrize("name", ["tick", "node_down", "configure"])
def test_what_goes_through_all_queues_passes_over_one_that_fails(
    nodes: dict[int, Node], time: Time, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    nodes[1].open(queue_record())
    other = nodes[1].open(queue_record("other", group=2), x_message_ttl=1000)
    mine = nodes[2].channel(nodes[2].open(queue_record("other", group=2)))
    mine.publish(b"a")
    mine.consume(prefetch=1)
    settle(nodes)
    if name == "configure":
        # At the end of its configuration a queue does what the new settings ask for.
        fail_once(monkeypatch, LocalQueue, "settle_round")
        with pytest.raises(KeyError):
            nodes[1].host.queues[1].configure({"max-length": 1})
        return
    fail_once(monkeypatch, LocalQueue, name)
    if name == "tick":
        for queue in nodes[1].host.queues.values():
            queue.wake()
        time.pass_by(TICK_MS)
    else:
        nodes[1].host.on_node_down(2)
        assert other.machine.ready_count == 1
    assert len(crashes(nodes[1])) == 1


def test_a_dead_letter_sender_that_fails_stops_its_queue(
    nodes: dict[int, Node], time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convoymq.queues.classic.dead_letter_sender import DeadLetterSender

    queue = nodes[1].open(
        queue_record(durable=True), x_dead_letter_exchange="x", x_message_ttl=1000
    )
    channel = nodes[1].channel(queue)
    channel.publish(b"a", tag=1)
    settle(nodes)
    fail_once(monkeypatch, DeadLetterSender, "_publish")
    time.pass_by(2_000)
    settle(nodes)
    time.pass_by(2_000)
    assert len(crashes(nodes[1])) == 1
    assert queue.ended is not None


def test_a_queue_that_crashes_again_and_again_waits_longer(
    nodes: dict[int, Node], time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = nodes[1].open(queue_record(durable=True))
    for _ in range(9):
        fail_once(monkeypatch, LocalQueue, "_carry_out")
        nodes[1].channel(queue).publish(b"a")
        settle(nodes)
        queue = open_again(nodes, time)
    waits = [crash["again_ms"] for crash in crashes(nodes[1])]
    assert waits[:3] == [1_000, 2_000, 4_000]
    assert waits[-1] == REOPEN_MS_MAX


@pytest.mark.parametrize("durable", [False, True])
def test_a_crashed_queue_can_be_deleted(
    nodes: dict[int, Node], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, durable: bool
) -> None:
    channel = nodes[1].channel(nodes[1].open(queue_record(durable=durable)))
    channel.publish(b"a", tag=1)
    settle(nodes)
    fail_once(monkeypatch, LocalQueue, "_carry_out")
    channel.publish(b"a")
    settle(nodes)
    assert list(nodes[1].host.crashed) == [1]
    nodes[1].host.delete(1)
    assert list(nodes[1].host.crashed) == []
    assert not (tmp_path / "node-1" / "1").exists()


def test_a_queue_whose_files_cannot_be_opened_answers_and_is_tried_again(
    nodes: dict[int, Node], time: Time, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = nodes[1].channel(nodes[1].open(queue_record(durable=True)))
    channel.publish(b"a", tag=1)
    settle(nodes)
    nodes[1].host.stop()
    Node(1, nodes, tmp_path, time)
    real = RealDirectory.open

    def refuse(*arguments: Any, **named: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(RealDirectory, "open", refuse)
    queue = nodes[1].open(queue_record(durable=True))
    assert str(queue.ended) == TEXT
    (crash,) = crashes(nodes[1])
    assert "Too many open files" in crash["reason"]
    # A message for it is refused; it must not go past it.
    channel = nodes[1].channel(nodes[1].host.find(queue_record(durable=True), queue.arguments))
    channel.publish(b"b", tag=1)
    settle(nodes)
    assert channel.heard == [("published", [1, 1], False)]
    monkeypatch.setattr(RealDirectory, "open", real)
    assert open_again(nodes, time).machine.ready_count == 1


def test_a_first_message_without_descriptors_is_refused_and_the_queue_goes_on(
    nodes: dict[int, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RealDirectory.open

    def refuse(*arguments: Any, **named: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    channels = []
    for group in (1, 2, 3):
        queue = nodes[1].open(queue_record(str(group), group=group, durable=True))
        channels.append(nodes[1].channel(queue))
    monkeypatch.setattr(RealDirectory, "open", refuse)
    for channel in channels:
        channel.publish(b"a", tag=1)
    settle(nodes)
    assert [channel.heard for channel in channels] == 3 * [[("published", [1, 1], False)]]
    assert crashes(nodes[1]) == []
    monkeypatch.setattr(RealDirectory, "open", real)
    for channel in channels:
        channel.publish(b"b", tag=2)
    settle(nodes)
    assert all(channel.heard[-1] == ("published", [2, 2], True) for channel in channels)


def with_expiration(text: bytes) -> bytes:
    """A record whose expiration is whatever it is."""
    properties = bytes([2, len(text)]) + text
    payload = struct.pack(">HHQH", 60, 0, 1, 1 << 12 | 1 << 8) + properties
    header = struct.pack(">BHI", 2, 1, len(payload)) + payload + b"\xce"
    return b"\x00\x01q" + header + struct.pack(">BHI", 3, 1, 1) + b"a\xce"


@pytest.mark.parametrize("text", [b"abc", b"", b"1_0", b" 5", b"-1", b"\xff", b"9" * 255])
def test_an_expiration_that_is_no_number_is_none(
    nodes: dict[int, Node], tmp_path: Path, time: Time, text: bytes
) -> None:
    """Neither while it is queued nor when the queue is opened with it."""
    queue = nodes[1].open(queue_record(durable=True))
    channel = nodes[1].channel(queue)
    channel.client.target.publish([with_expiration(text)], 1, 1, 4)
    settle(nodes)
    assert channel.heard == [("published", [1, 1], True)]
    time.pass_by(100_000)
    settle(nodes)
    assert queue.machine.ready_count == 1
    nodes[1].host.stop()
    Node(1, nodes, tmp_path, time)
    assert nodes[1].open(queue_record(durable=True)).machine.ready_count == 1
    assert nodes[1].notes == []


@pytest.mark.provokes("queue.records_dropped")
@pytest.mark.parametrize("whole", [False, True])
def test_recovery_drops_a_record_that_cannot_be_read_and_names_it(
    nodes: dict[int, Node], tmp_path: Path, time: Time, whole: bool
) -> None:
    channel = nodes[1].channel(nodes[1].open(queue_record(durable=True)))
    for number in range(3):
        if number == 1 and whole:
            # A message that is no message, as the disk was given it.
            channel.client.target.publish([b"\x00\x01q\x02"], 1, 0)
        else:
            channel.publish(b"%d" % number, tag=number + 1)
        settle(nodes)
    nodes[1].host.stop()
    if not whole:
        (path,) = (tmp_path / "node-1" / "1").glob("*.log")
        data = bytearray(path.read_bytes())
        data[data.index(b"1\xce")] ^= 1
        path.write_bytes(data)
    Node(1, nodes, tmp_path, time)
    queue = nodes[1].open(queue_record(durable=True))
    again = nodes[1].channel(queue)
    again.consume()
    settle(nodes)
    assert again.deliveries() == [b"0", b"2"]
    (note,) = nodes[1].notes
    assert note[0] == "queue.records_dropped"
    assert (note[1]["places"], note[1]["messages"]) == ((0, 1) if whole else (1, 0))
    assert note[1]["queue"] == "q"


@pytest.mark.provokes("queue.commands_lost")
def test_lost_commands_end_a_session_and_its_client_hears_so(nodes: dict[int, Node]) -> None:
    nodes[1].open(queue_record())
    channel = nodes[2].channel(nodes[2].open(queue_record()))
    channel.consume()
    settle(nodes)
    channel.publish(b"a", tag=1)
    nodes[2].host.end_of_round()
    nodes[1].inbox.clear()
    channel.publish(b"b", tag=2)
    settle(nodes)
    assert ("published", [1, 1], False) in channel.heard
    assert ("published", [2, 2], False) in channel.heard
    assert ("cancelled", 1, "crashed") in channel.heard
    assert [event for event, _ in nodes[1].notes] == ["queue.commands_lost"]
    assert nodes[1].host.queues[1].machine.sessions == {}
    again = nodes[2].channel(nodes[2].open(queue_record()))
    again.consume()
    again.publish(b"c", tag=1)
    settle(nodes)
    assert again.deliveries() == [b"c"]
    assert ("published", [1, 1], True) in again.heard


def test_what_comes_after_the_files_are_closed_is_answered(nodes: dict[int, Node]) -> None:
    nodes[1].open(queue_record(durable=True))
    channel: Channel = nodes[2].channel(nodes[2].open(queue_record(durable=True)))
    channel.consume()
    channel.publish(b"a", tag=1)
    settle(nodes)
    nodes[1].host.stop()
    channel.publish(b"b", tag=2)
    settle(nodes)
    assert ("published", [2, 2], False) in channel.heard
    assert ("cancelled", 1, "home node is down") in channel.heard
    assert crashes(nodes[1]) == []
