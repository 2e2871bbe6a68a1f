"""A partition's handle: refused publishers, commands that are answered once, reads of groups."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.kernels import batch, link_frames
from convoymq.model.errors import AccessRefused, NotFound, Unavailable
from convoymq.queues.session_client import OVER_AFTER_MS
from convoymq.queues.sessions import REPLIES_KEPT_MAX
from convoymq.topics.machine.client import UNDER_WAY_MAX
from convoymq.topics.machine.reads import Fetch, Fetched
from convoymq.topics.rules import commands as c
from convoymq.topics.rules.answers import (
    AckAnswer,
    Answer,
    CursorAnswer,
    RunAnswer,
    RunsAnswer,
    SealAnswer,
)
from convoymq.topics.rules.commands import ProducedRun as Run
from convoymq.topics.rules.order_token import OrderToken
from convoymq.topics.rules.refusals import Code
from tests.unit.queues.quorum.cluster import publish
from tests.unit.queues.stream.cluster import Result, reading, start
from tests.unit.queues.stream.test_queue import run
from tests.unit.topics.machine.cluster import PartitionCluster
from tests.unit.topics.machine.support import OPEN, SEAL, enqueue_of


def owned(messages: int = 0, **settings: Any) -> PartitionCluster:
    """A partition with messages 1 … that the group g has leased by epoch 1."""
    cluster = PartitionCluster(**settings)
    cluster.tell(c.OpenCursor("g", 1))
    cluster.tell(c.Lease("g", 1, 1, "m"))
    publish(cluster.nodes[1].open()[0], 1, messages)
    cluster.run()
    return cluster


def asks(offset: int = -1, **more: Any) -> Fetch:
    fields = {"max_messages": 100, "max_bytes": 1 << 20, "park_version": -1, **more}
    return Fetch("g", 1, fields.pop("epoch", 1), offset, **fields)


def fetched(cluster: PartitionCluster, node: int, request: Fetch) -> Fetched:
    result = Result()
    cluster.nodes[node].queue.fetch(request, result)
    cluster.run()
    found: Fetched = result.found
    return found


def messages(found: Fetched) -> list[tuple[int, int]]:
    """(offset, tag) of what was read."""
    return [
        (
            run.offset + i,
            int.from_bytes(batch.record(run.block, run.command, run.first + i)[:4], "big"),
        )
        for run in found.runs
        for i in range(run.messages)
    ]


# --- publishers ------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [1, 2, 4])
def test_a_publisher_hears_what_was_stored_and_then_what_was_refused(node: int) -> None:
    cluster = PartitionCluster()
    client, events = cluster.nodes[node].open()
    publish(client, 1, 3)
    cluster.run()
    cluster.tell(SEAL)
    publish(client, 4, 2)
    client.target.command(batch.CMD_SETTLE, 0, 0, 0)
    publish(client, 6, 1)
    cluster.run()
    assert events.confirmed == [1, 2, 3]
    assert [closed[:3] for closed in events.closed] == [
        ([4, 5], "CLOSED", 4),
        ([6, 6], "CLOSED", 4),
    ]
    # With the records, for those who send them elsewhere.
    assert batch.record(events.closed[0][3], 0, 1)[:4] == (5).to_bytes(4, "big")
    assert client.refusal is Code.CLOSED
    assert not client.target.pending


def test_a_partition_that_opens_takes_the_messages_of_new_clients_only() -> None:
    cluster = PartitionCluster(created_version=2)
    client, events = cluster.nodes[2].open()
    publish(client, 1, 1)
    cluster.run()
    cluster.tell(OPEN)
    publish(client, 2, 1)
    cluster.run()
    assert [closed[:3] for closed in events.closed] == [
        ([1, 1], "NOT_OPEN", 0),
        ([2, 2], "NOT_OPEN", 0),
    ]
    client, events = cluster.nodes[2].open()
    publish(client, 3, 1)
    cluster.run()
    assert (events.confirmed, events.closed) == ([3], [])


def test_refusals_that_are_lost_are_told_again_and_nothing_is_confirmed() -> None:
    cluster = PartitionCluster()
    client, events = cluster.nodes[4].open()
    publish(client, 1, 1)
    cluster.run()
    cluster.drop_frames.add(link_frames.FRAME_APPLIED)
    publish(client, 2, 1)
    cluster.run()
    cluster.tell(SEAL)
    for tag in range(3, 103):
        publish(client, tag, 1)
        cluster.run()
    assert events.confirmed == [1]
    cluster.drop_frames.clear()
    cluster.elect(2)
    cluster.wait(5000)
    assert events.confirmed == [1, 2]
    assert [tags[0] for tags, *_ in events.closed] == list(range(3, 103))


def test_a_publisher_waits_for_a_leader_for_as_long_as_it_takes() -> None:
    cluster = PartitionCluster()
    client, events = cluster.nodes[2].open()
    cluster.elect(None)
    publish(client, 1, 1)
    cluster.wait(20_000)
    assert events.refused == []
    cluster.elect(3)
    cluster.wait(2000)
    assert events.confirmed == [1]


def test_what_is_under_way_into_a_deleted_partition_is_not_confirmed() -> None:
    cluster = PartitionCluster()
    client, events = cluster.nodes[2].open()
    publish(client, 1, 1)
    cluster.nodes[2].queue.on_deleted()
    assert (events.confirmed, events.refused) == ([], [1])


def test_what_is_under_way_into_a_partition_that_is_given_up_is_refused() -> None:
    cluster = PartitionCluster()
    client, events = cluster.nodes[2].open()
    publish(client, 1, 1)
    cluster.run()
    cluster.elect(None)
    publish(client, 2, 2)
    cluster.nodes[2].queue.give_up()
    cluster.nodes[2].queue.give_up()
    assert (events.confirmed, events.refused) == ([1], [2, 3])
    # The publisher goes on when the partition is back.
    cluster.elect(3)
    publish(client, 4, 1)
    cluster.wait(2000)
    assert events.confirmed == [1, 4]


def test_the_log_is_read_as_that_of_a_stream() -> None:
    cluster = owned(5)
    client, events = cluster.nodes[4].open()
    client.subscribe(reading(start("first")))
    cluster.run()
    assert len(events.messages) == 5


def test_clients_purge_no_partition() -> None:
    cluster = owned(1)
    client, events = cluster.nodes[2].open()
    client.purge()
    cluster.run()
    (purged,) = events.heard
    assert purged[:2] == ("purged", 0)
    assert isinstance(purged[2], AccessRefused)


# --- producers with sequences ----------------------------------------------------------------


def send(cluster: PartitionCluster, client: Any, *runs: Run) -> Result:
    """Sends runs without waiting."""
    result = Result()
    client.produce(5, 1, list(runs), enqueue_of(runs), result)
    return result


@pytest.mark.parametrize("node", [1, 2, 4])
def test_runs_are_answered_on_any_node_and_go_on_after_a_refusal(node: int) -> None:
    cluster = PartitionCluster()
    client, events = cluster.nodes[node].open()
    first, second = send(cluster, client, Run(1, 1, 2)), send(cluster, client, Run(1, 2, 2))
    gap = send(cluster, client, Run(1, 9, 1))
    cluster.run()
    assert first.found == RunsAnswer((RunAnswer(Code.OK, 1, 2, 3),))
    assert second.found == RunsAnswer((RunAnswer(Code.OK, 3, 1, 4),))
    assert gap.found.code is Code.OUT_OF_SEQ
    cluster.tell(SEAL)
    closed = send(cluster, client, Run(1, 4, 1))
    cluster.run()
    assert (closed.found.code, closed.found.targets) == (Code.CLOSED, SEAL.targets)
    assert (events.closed, client.refusal) == ([], None)
    assert not client.is_waiting()


def test_an_answer_to_runs_that_is_lost_is_asked_for_again() -> None:
    cluster = PartitionCluster()
    client, _ = cluster.nodes[4].open()
    cluster.drop_frames.add(link_frames.FRAME_APPLIED)
    lost = send(cluster, client, Run(1, 1, 1))
    cluster.run()
    cluster.drop_frames.clear()
    # Its answer says that both are applied.
    later = send(cluster, client, Run(1, 2, 1))
    cluster.run()
    assert lost.found.runs == (RunAnswer(Code.OK, 1, 1, 2),)
    assert later.found.runs == (RunAnswer(Code.OK, 2, 1, 3),)


def test_nobody_knows_what_became_of_runs_whose_session_ended() -> None:
    cluster = PartitionCluster()
    client, _ = cluster.nodes[2].open()
    stored = send(cluster, client, Run(1, 1, 1))
    cluster.run()
    assert stored.found.code is Code.OK
    cluster.cut.add(2)
    unknown = send(cluster, client, Run(1, 2, 1))
    cluster.nodes[1].queue.on_node_down(2, definite=True)
    cluster.run()
    cluster.cut.clear()
    cluster.wait(OVER_AFTER_MS + 5000)
    assert isinstance(unknown.error, Unavailable)
    again = send(cluster, client, Run(1, 1, 2))
    cluster.run()
    assert again.found.code is Code.OK
    assert again.found.runs[0].expected == 3


def test_runs_under_way_into_a_deleted_partition_have_no_outcome() -> None:
    cluster = PartitionCluster()
    client, _ = cluster.nodes[2].open()
    result = send(cluster, client, Run(1, 1, 1))
    cluster.nodes[2].queue.on_deleted()
    assert isinstance(result.error, NotFound)


def test_runs_under_way_into_a_partition_that_is_given_up_have_no_outcome() -> None:
    cluster = PartitionCluster()
    client, _ = cluster.nodes[2].open()
    assert send_and_run(cluster, client, Run(1, 1, 1)).found.code is Code.OK
    cluster.elect(None)
    unknown = send(cluster, client, Run(1, 2, 1))
    cluster.nodes[2].queue.give_up()
    assert isinstance(unknown.error, Unavailable)
    cluster.elect(3)
    again = send(cluster, client, Run(1, 2, 2))
    cluster.wait(2000)
    assert again.found.code is Code.OK


def send_and_run(cluster: PartitionCluster, client: Any, *runs: Run) -> Result:
    result = send(cluster, client, *runs)
    cluster.run()
    return result


def test_a_session_takes_no_more_runs_than_answers_are_kept() -> None:
    cluster = PartitionCluster()
    client, _ = cluster.nodes[3].open()
    results = []
    while client.takes_runs:
        results.append(send(cluster, client, Run(1, len(results) + 1, 1)))
    assert 10 < 2 * len(results) < REPLIES_KEPT_MAX
    cluster.run()
    assert client.takes_runs
    assert all(result.found.code is Code.OK for result in results)


# --- commands --------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [1, 3, 4])
def test_a_command_is_answered_on_any_node(node: int) -> None:
    cluster = PartitionCluster()
    assert cluster.tell(c.OpenCursor("g", 1), node) == CursorAnswer(Code.OK)
    sealed = cluster.tell(SEAL, node)
    assert isinstance(sealed, SealAnswer)
    assert (sealed.code, sealed.close_offset) == (Code.OK, 1)
    assert run(cluster, cluster.nodes[node].queue.ask(SEAL)) == sealed


def test_an_answer_that_is_lost_is_asked_for_again() -> None:
    cluster = PartitionCluster()
    told = Result()
    cluster.drop_frames.add(link_frames.FRAME_APPLIED)
    cluster.nodes[4].queue.tell(c.OpenCursor("g", 1), told)
    cluster.run()
    later = Result()
    cluster.drop_frames.clear()
    # Its answer says that both are applied.
    cluster.nodes[4].queue.tell(c.Lease("g", 1, 1, "m"), later)
    cluster.run()
    assert (told.found, later.found) == (CursorAnswer(Code.OK), Answer(Code.OK))


def test_commands_survive_the_end_of_their_session() -> None:
    cluster = PartitionCluster()
    cluster.tell(c.OpenCursor("g", 1), 2)
    cluster.cut.add(2)
    told = Result()
    cluster.nodes[2].queue.tell(c.Lease("g", 1, 1, "m"), told)
    cluster.nodes[1].queue.on_node_down(2, definite=True)
    cluster.run()
    cluster.cut.clear()
    cluster.wait(OVER_AFTER_MS + 5000)
    assert told.found == Answer(Code.OK)
    assert cluster.nodes[1].own.machine.state.groups["g"].member == "m"  # type: ignore[union-attr]


def test_more_commands_than_answers_are_kept_wait_for_their_turn() -> None:
    cluster = owned()
    results = [Result() for _ in range(3 * UNDER_WAY_MAX)]
    for result in results:
        cluster.nodes[3].queue.tell(c.AckRanges("g", 1, 1, ()), result)
    assert cluster.nodes[3].queue._teller.target.seq < REPLIES_KEPT_MAX
    cluster.run()
    assert all(result.found == AckAnswer(Code.OK) for result in results)


def test_who_tells_a_deleted_partition_hears_so() -> None:
    cluster = PartitionCluster()
    queue = cluster.nodes[2].queue
    under_way, late = Result(), Result()
    queue.tell(OPEN, under_way)
    queue.on_deleted()
    queue.tell(OPEN, late)
    assert isinstance(under_way.error, NotFound)
    assert isinstance(late.error, NotFound)


def test_who_asks_without_a_leader_waits_only_for_so_long() -> None:
    cluster = PartitionCluster()
    cluster.elect(None)
    with pytest.raises(Unavailable, match="did not answer in time"):
        run(cluster, cluster.nodes[2].queue.ask(OPEN, timeout_s=0.01), wait_ms=1 << 40)


# --- reads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [1, 2, 4])
def test_an_owner_reads_from_its_cursor_on_with_a_view(node: int) -> None:
    cluster = owned(6)
    cluster.tell(c.AckRanges("g", 1, 1, (1, 2, 4, 4)))
    cluster.tell(c.Park("g", 1, 1, 5, b"k", 3, b"five", follow=False))
    found = fetched(cluster, node, asks(max_messages=3))
    assert messages(found) == [(3, 3), (4, 4), (5, 5)]
    assert found[2:5] == (6, 7, -1)
    assert found.view is not None
    assert found.view.acked == (3, 4, 6)
    assert found.view.parked == {b"k": None}
    more = fetched(cluster, node, asks(found.next_offset, park_version=found.view.park_version))
    assert (messages(more), more.next_offset, more.view) == ([(6, 6)], 7, None)


@pytest.mark.parametrize("node", [1, 2, 4])
def test_a_fetch_waits_for_messages_and_for_close(node: int) -> None:
    cluster = owned(1)
    queue = cluster.nodes[node].queue
    result = Result()
    queue.fetch(asks(2, park_version=0, wait_ms=60_000), result)
    cluster.run()
    assert not result.calls
    publish(cluster.nodes[3].open()[0], 7, 1)
    cluster.run()
    assert messages(result.found) == [(2, 7)]
    closed = Result()
    queue.fetch(asks(3, park_version=0, wait_ms=60_000), closed)
    cluster.run()
    assert not closed.calls
    cluster.tell(SEAL)
    assert closed.found[1:5] == ([], 3, 3, 3)
    # Who knows of CLOSE waits for parked keys only.
    parked = Result()
    queue.fetch(asks(3, park_version=0, close_offset=3, wait_ms=60_000), parked)
    cluster.run()
    assert not parked.calls
    cluster.tell(c.Park("g", 1, 1, 2, b"k", 3, b"x", follow=False))
    assert parked.found.view.parked == {b"k": None}


@pytest.mark.parametrize("node", [1, 2, 4])
def test_a_fetch_waits_only_for_so_long(node: int) -> None:
    cluster = owned(1)
    result = Result()
    cluster.nodes[node].queue.fetch(asks(2, park_version=0, wait_ms=500), result)
    cluster.run()
    assert not result.calls
    cluster.wait(500)
    assert result.found == Fetched(Code.OK, [], 2, 2, -1, None)


@pytest.mark.parametrize("node", [1, 2, 4])
def test_who_lost_the_lease_reads_nothing(node: int) -> None:
    cluster = owned(2)
    # A lease that is not known there may be one that comes yet.
    assert fetched(cluster, node, asks(1, epoch=2)).code is Code.NOT_VISIBLE
    result = Result()
    cluster.nodes[node].queue.fetch(asks(3, park_version=0, wait_ms=60_000), result)
    cluster.run()
    cluster.tell(c.Lease("g", 1, 2, "n"))
    assert result.found.code is Code.LEASE_FENCED
    assert fetched(cluster, node, asks(1, epoch=2)).code is Code.OK
    assert fetched(cluster, node, asks(1)._replace(group="h")).code is Code.NOT_VISIBLE


def test_a_replica_that_has_not_applied_the_lease_is_not_read_from() -> None:
    cluster = owned(3)
    cluster.nodes[2].stalled = True
    cluster.tell(c.Lease("g", 1, 2, "n"))
    assert messages(fetched(cluster, 2, asks(1, epoch=2))) == [(1, 1), (2, 2), (3, 3)]
    assert cluster.asked[-1][:2] == (2, 1)


def test_a_reader_asks_the_next_leader() -> None:
    cluster = owned(1)
    waiting = Result()
    cluster.nodes[4].queue.fetch(asks(2, park_version=0, wait_ms=60_000), waiting)
    cluster.run()
    cluster.elect(2)
    cluster.run()
    assert isinstance(waiting.error, Unavailable)
    assert messages(fetched(cluster, 4, asks())) == [(1, 1)]
    cluster.elect(None)
    result = Result()
    cluster.nodes[4].queue.fetch(asks(), result)
    assert isinstance(result.error, Unavailable)


def test_a_group_below_the_start_of_the_log_is_told_so() -> None:
    cluster = owned(segment_bytes=10, max_bytes=20)
    client, _ = cluster.nodes[1].open()
    for tag in range(1, 9):
        publish(client, tag, 1)
        cluster.run()
    assert fetched(cluster, 2, asks()).code is Code.DATA_EXPIRED
    (lost,) = cluster.tell(c.AcceptLoss("g")).losses
    assert fetched(cluster, 2, asks()).code is Code.LEASE_FENCED
    cluster.tell(c.Lease("g", 1, 2, "m"))
    assert messages(fetched(cluster, 2, asks(epoch=2)))[0] == (lost[2], lost[2])


@pytest.mark.parametrize("node", [1, 2, 4])
def test_a_partition_describes_itself(node: int) -> None:
    cluster = owned(4)
    queue = cluster.nodes[node].queue
    cluster.tell(c.AckRanges("g", 1, 1, (1, 1, 3, 3)))
    cluster.tell(c.Park("g", 1, 1, 4, b"k", 3, b"four", follow=False))
    made = run(cluster, queue.description())
    assert made[:6] == ("OPEN", 5, -1, 0, 4, 32)
    group = made.groups["g"]
    assert group == (1, 2, 2, 1, "m", 1, 4, False, False, False)
    drained = Result()
    queue.drained("g", 1, drained)
    cluster.run()
    assert drained.found is False
    cluster.tell(c.AckRanges("g", 1, 1, (2, 2)))
    cluster.tell(SEAL)
    for epoch, expected in ((1, True), (2, False)):
        drained = Result()
        queue.drained("g", epoch, drained)
        cluster.run()
        assert drained.found is expected
    assert run(cluster, queue.description()).state == "SEALED"


@pytest.mark.parametrize("node", [1, 4])
def test_parked_keys_are_listed_in_pages(node: int) -> None:
    cluster = owned(3)
    queue = cluster.nodes[node].queue
    for offset, key in ((1, b"c"), (2, b"a"), (3, b"b")):
        cluster.tell(c.Park("g", 1, 1, offset, key, 3, b"%d" % offset, follow=False))
    cluster.tell(c.ResumeParked("g", b"b"))
    rows = run(cluster, queue.parked("g", limit=2))
    assert rows == [
        (b"a", 3, False, 1, 1, OrderToken(0, 2), b"2"),
        (b"b", 3, True, 1, 1, OrderToken(0, 3), b"3"),
    ]
    assert [row.key for row in run(cluster, queue.parked("g", rows[-1].key))] == [b"c"]
    assert run(cluster, queue.parked("h")) == []


@pytest.mark.parametrize("node", [1, 4])
def test_malformed_requests_of_other_nodes_are_answered(node: int) -> None:
    cluster = owned(1)
    queue = cluster.nodes[node].queue
    answers: list[Any] = []
    for request in (["fetch", 7], ["fetch", 7, "g", 1, 1, "x", 1, 1], ["drained", 7], ["parked"]):
        queue.serve(request, answers.append, 3)
    cluster.run()
    assert [answer[0] for answer in answers] == ["away"] * 4
