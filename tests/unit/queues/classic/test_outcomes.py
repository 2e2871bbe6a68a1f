"""What consumers of classic queues say of messages that they give back, here and elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convoymq.messages.amqp10.values import Symbol, decode, encode
from convoymq.queues.classic.notes import AVOIDED_MAX, NOTHING, Note, pack_note, unpack_note
from convoymq.queues.interface import Modification
from tests.unit.queues.classic.support import Channel, Node, Time, queue_record, settle
from tests.unit.queues.dead_letter_targets import FakeQueue

PLACES = pytest.mark.parametrize("place", [1, 2])


def annotations(**values: str) -> bytes:
    return encode({Symbol(f"x-{name}"): value for name, value in values.items()})


def opened(nodes: dict[int, Node], place: int = 1, **arguments: Any) -> tuple[Any, Channel]:
    record = queue_record()
    home = nodes[1].open(record, **arguments)
    channel = nodes[place].channel(nodes[place].open(record, **arguments))
    return home, channel


def consume(nodes: dict[int, Node], channel: Channel, *numbers: int) -> None:
    for number in numbers:
        channel.consume(number, credited=True)
        channel.client.grant(number, 100)
    settle(nodes)


def give_back(
    nodes: dict[int, Node], channel: Channel, number: int, message_id: int, **said: Any
) -> None:
    failed = said.pop("failed", False)
    channel.client.return_(
        number, [message_id, message_id], failed=failed, modification=Modification(**said)
    )
    settle(nodes)


@PLACES
def test_what_is_said_of_a_message_comes_with_it(nodes: dict[int, Node], place: int) -> None:
    _, channel = opened(nodes, place)
    channel.publish(b"a", b"b")
    consume(nodes, channel, 1)
    give_back(nodes, channel, 1, 0, failed=True, annotations=annotations(a="1", b="1"))
    give_back(nodes, channel, 1, 2, failed=True, annotations=annotations(b="2"))
    give_back(nodes, channel, 1, 3)
    failed, said = channel.said[-1]
    assert failed == 2
    assert decode(said, 0, len(said))[0] == {"x-a": "1", "x-b": "2"}
    assert channel.deliveries() == [b"a", b"b", b"a", b"a", b"a"]
    assert channel.said[1] == (0, b"")


@PLACES
def test_an_undeliverable_message_goes_to_others_until_none_is_left(
    nodes: dict[int, Node], place: int
) -> None:
    home, channel = opened(nodes, place, x_dead_letter_exchange="dlx")
    nodes[1].routes.queues = [FakeQueue(20, "dead")]
    channel.publish(b"a")
    consume(nodes, channel, 1, 2)
    give_back(nodes, channel, 1, 0, undeliverable=True, annotations=annotations(why="no"))
    assert channel.deliveries(2) == [b"a"]
    give_back(nodes, channel, 2, 0)
    assert channel.deliveries(2) == [b"a", b"a"]
    give_back(nodes, channel, 2, 1, undeliverable=True)
    assert not home.machine.aside.count
    assert home.machine.leaving.left["at_most_once", "rejected"] == 1


def test_a_message_that_waits_for_a_consumer_holds_nothing_up(nodes: dict[int, Node]) -> None:
    home, channel = opened(nodes)
    channel.publish(b"a")
    consume(nodes, channel, 1)
    channel.consume(2, credited=True)
    settle(nodes)
    give_back(nodes, channel, 1, 0, undeliverable=True)
    channel.publish(b"b")
    settle(nodes)
    assert channel.deliveries(1) == [b"a", b"b"]
    assert (home.machine.ready_count, home.machine.aside.count) == (0, 1)
    assert home.info()["messages"] == 2
    home.machine.check_invariants()
    channel.client.grant(2, 1)
    settle(nodes)
    assert channel.deliveries(2) == [b"a"]
    assert not home.machine.aside.count


def test_it_is_ready_again_when_all_that_do_not_get_it_are_gone(nodes: dict[int, Node]) -> None:
    home, channel = opened(nodes)
    channel.publish(b"a")
    consume(nodes, channel, 1)
    channel.consume(2, credited=True)
    settle(nodes)
    give_back(nodes, channel, 1, 0, undeliverable=True)
    channel.client.remove(1)
    settle(nodes)
    assert (home.machine.ready_count, home.machine.aside.count) == (1, 0)


def test_more_than_a_bound_leave_as_rejected(nodes: dict[int, Node]) -> None:
    home, channel = opened(nodes)
    channel.publish(*[b"%d" % number for number in range(AVOIDED_MAX + 3)])
    channel.consume(1, credited=True)
    channel.consume(2, credited=True)
    channel.client.grant(1, 1_000)
    settle(nodes)
    channel.client.return_(
        1, [0, AVOIDED_MAX], failed=False, modification=Modification(undeliverable=True)
    )
    settle(nodes)
    assert home.machine.aside.count + home.machine.leaving.left["disabled", "rejected"] == (
        AVOIDED_MAX + 1
    )
    assert home.machine.aside.count <= AVOIDED_MAX


@PLACES
def test_a_message_waits_for_its_time(nodes: dict[int, Node], time: Time, place: int) -> None:
    home, channel = opened(nodes, place)
    channel.publish(b"a")
    consume(nodes, channel, 1)
    give_back(nodes, channel, 1, 0, due_ms=time.now_ms() + 500)
    time.pass_by(499)
    settle(nodes)
    assert channel.deliveries() == [b"a"]
    assert home.machine.aside.count == 1
    time.pass_by(1)
    settle(nodes)
    assert channel.deliveries() == [b"a", b"a"]
    give_back(nodes, channel, 1, 1, due_ms=time.now_ms() - 1)
    assert channel.deliveries() == [b"a"] * 3


def test_what_is_set_aside_is_purged(nodes: dict[int, Node], time: Time) -> None:
    home, channel = opened(nodes)
    channel.publish(b"a", b"b")
    consume(nodes, channel, 1)
    give_back(nodes, channel, 1, 0, due_ms=time.now_ms() + 500)
    channel.client.purge()
    settle(nodes)
    assert channel.heard[-1] == ("purged", 1, None)
    assert (home.machine.aside.count, home.machine.noted_count) == (0, 0)


def test_a_rejections_error_is_on_the_dead_letter(nodes: dict[int, Node]) -> None:
    home, channel = opened(nodes, x_dead_letter_exchange="dlx")
    channel.publish(b"a")
    consume(nodes, channel, 1)
    give_back(nodes, channel, 1, 0, annotations=annotations(mine="kept"))
    error = encode([Symbol("app:bad"), "why", None])
    channel.client.discard(1, [1, 1], failed=True, error=error)
    nodes[1].host.end_of_round()
    run, reason = home.machine.leaving.runs[0]
    assert reason == "rejected"
    assert decode(run.note.annotations, 0, len(run.note.annotations))[0] == {
        "x-mine": "kept",
        "x-opt-rejected-condition": "app:bad",
        "x-opt-rejected-description": "why",
    }


@pytest.mark.parametrize("file_bytes_max", [600, 64 << 20])
def test_a_restart_keeps_what_was_said(
    nodes: dict[int, Node], tmp_path: Path, time: Time, file_bytes_max: int
) -> None:
    """Also when the files are full, and compaction moves the messages."""
    record = queue_record(durable=True)

    def again() -> Channel:
        nodes[1].host.stop()
        node = Node(1, nodes, tmp_path, time, file_bytes_max=file_bytes_max)
        return node.channel(nodes[1].open(record))

    channel = again()
    channel.publish(b"0", b"1", b"2", b"3")
    consume(nodes, channel, 1)
    give_back(nodes, channel, 1, 1, failed=True, annotations=annotations(a="1"))
    give_back(nodes, channel, 1, 2, due_ms=time.now_ms() + 500)
    # It holds what it was given again.
    for number in range(10, 50):
        channel.publish(b"%d" % number)
        settle(nodes)
        channel.client.settle(1, [number - 5, number - 5])
        settle(nodes)
    oldest = min((tmp_path / "node-1" / "1").glob("*.log"))
    assert (oldest.name == "00000001.log") == (file_bytes_max > 600), "nothing was moved"
    channel = again()
    consume(nodes, channel, 1)
    found = dict(zip(channel.deliveries(), channel.said, strict=True))
    assert found[b"1"] == (1, annotations(a="1"))
    assert found[b"0"] == found[b"3"] == (0, b"")
    assert b"2" not in found
    time.pass_by(500)
    settle(nodes)
    assert channel.deliveries()[-1] == b"2"


def test_a_consumer_without_credit_gives_back_as_before(nodes: dict[int, Node]) -> None:
    """Nodes of older releases know no other way."""
    home, channel = opened(nodes)
    channel.publish(b"a")
    channel.consume(1)
    settle(nodes)
    give_back(nodes, channel, 1, 0, failed=True, undeliverable=True)
    assert channel.deliveries() == [b"a", b"a"]
    assert not home.machine.noted_count


def test_notes_are_read_back() -> None:
    note = Note(3, b"said", ((1, 2), (3, 4)), 99)
    for each in (note, NOTHING):
        assert len(pack_note(each)) % 8 == 0
        assert unpack_note(pack_note(each)) == each
    for broken in (b"", pack_note(note)[:8], b"\4\0\0\0abcd"):
        with pytest.raises(ValueError, match="malformed note"):
            unpack_note(broken)
