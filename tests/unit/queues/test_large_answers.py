"""Large answers to other nodes: with and without room on the link, in turn, in time, for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from convoymq.broker import cluster_queries
from convoymq.kernels.link_frames import FRAME_CONTROL, frame_header
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import Refused, ReservationRefused, Unavailable
from convoymq.queues.large_answers import LargeAnswers
from convoymq.queues.reservation_reads import RunsRequest
from convoymq.transport.frame_kinds import KIND_RESERVATION, KIND_STREAM
from tests.unit.queues.classic.support import Channel, Time, body_of
from tests.unit.queues.fake_cluster import FakeCluster, FakeHost, until

SOON = 5_000
LARGE = 2_000
"""More than any answer has around its messages."""


class Links:
    """A link that is filled by what is answered on it."""

    def __init__(self) -> None:
        self.full: set[int] = set()
        self.away: set[int] = set()
        self.waiting: list[tuple[int, Any]] = []
        self.sent: list[Any] = []
        self.takes = 1 << 30
        """Answers until the link is full again."""

    def is_connected(self, node: int) -> bool:
        return node not in self.away

    def await_room(self, node: int, item: Any) -> None:
        if (node, item) not in self.waiting:
            self.waiting.append((node, item))

    def send(self, node: int, what: Any) -> None:
        self.sent.append(what)
        self.takes -= 1
        if not self.takes:
            self.full.add(node)

    def make_room(self, node: int, takes: int = 1 << 30) -> None:
        self.full.discard(node)
        self.takes = takes
        waiting, self.waiting = self.waiting, []
        for at, item in waiting:
            item.on_room(at)

    def lose(self, node: int) -> None:
        self.away.add(node)
        waiting, self.waiting = self.waiting, []
        for at, item in waiting:
            item.on_lost(at)


@pytest.fixture
def links() -> Links:
    return Links()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def answers(links: Links, time: Time) -> LargeAnswers:
    return LargeAnswers(links, links.await_room, time)


def test_an_answer_is_made_at_once_on_a_link_with_room(answers: LargeAnswers, links: Links) -> None:
    links.full.add(3)
    answers.when_room(2, lambda: links.send(2, "a"), 1 << 60)
    assert links.sent == ["a"]
    assert answers.waiting == 0


def test_requests_wait_in_order_and_are_answered_while_there_is_room(
    answers: LargeAnswers, links: Links
) -> None:
    links.full.add(2)
    for name in range(2_000):
        answers.when_room(2, lambda name=name: links.send(2, name), 1 << 60)
    assert (links.sent, answers.waiting) == ([], 2_000)
    links.make_room(2, takes=3)
    assert (links.sent, answers.waiting) == ([0, 1, 2], 1_997)
    # Who comes while others wait comes behind them.
    answers.when_room(2, lambda: links.send(2, "last"), 1 << 60)
    links.make_room(2)
    assert links.sent == [*range(2_000), "last"]
    assert (answers.waiting, links.waiting) == (0, [])


def test_who_has_given_up_is_not_answered_and_not_kept(
    answers: LargeAnswers, links: Links, time: Time
) -> None:
    """A link that stays full for long keeps what the other node has open, not what it had."""
    links.full.add(2)
    for name in range(100):
        answers.when_room(2, lambda name=name: links.send(2, name), time.ms + SOON)
        time.pass_by(1_000)
        assert answers.waiting <= 5
    links.make_room(2)
    assert links.sent == [96, 97, 98, 99]


def test_nothing_is_kept_for_a_lost_node(answers: LargeAnswers, links: Links) -> None:
    links.full.update((2, 3))
    for node in (2, 2, 3):
        answers.when_room(node, lambda node=node: links.send(node, node), 1 << 60)
    answers.on_lost(2)
    assert answers.waiting == 1
    links.make_room(2)
    links.make_room(3)
    assert links.sent == [3]
    # Nor is anything read for a node that is away by the time.
    links.away.add(2)
    answers.when_room(2, lambda: links.send(2, 2), 1 << 60)
    assert (links.sent, answers.waiting) == ([3], 0)


async def steps() -> None:
    """Lets every task come to its next wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_answers_that_take_long_are_made_one_at_a_time(
    answers: LargeAnswers, links: Links
) -> None:
    """Or all that wait would begin in the moment in which there is room for one."""
    begun: list[int] = []
    go_on = asyncio.Event()

    async def answer(name: int) -> None:
        async with answers.room(2, 1 << 60):
            begun.append(name)
            await go_on.wait()
            links.send(2, name)

    links.takes = 2
    tasks = [asyncio.create_task(answer(name)) for name in range(4)]
    await steps()
    assert begun == [0]
    answers.when_room(2, lambda: links.send(2, "short"), 1 << 60)
    assert links.sent == []
    go_on.set()
    await steps()
    assert links.sent == [0, 1]
    links.make_room(2)
    await asyncio.gather(*tasks)
    assert links.sent == [0, 1, 2, 3, "short"]
    assert answers.waiting == 0


async def test_turns_of_who_ends_early_go_to_the_next_one(
    answers: LargeAnswers, links: Links, time: Time
) -> None:
    """Before the turn, in the moment in which it comes, and in it."""

    async def answer(name: int, error: Exception | None = None) -> None:
        async with answers.room(2, time.ms + SOON):
            if error is not None:
                raise error
            links.send(2, name)

    links.full.add(2)
    tasks = [asyncio.create_task(answer(name)) for name in range(3)]
    tasks.append(asyncio.create_task(answer(3, ValueError("in its turn"))))
    tasks.append(asyncio.create_task(answer(4)))
    await steps()
    tasks[0].cancel()
    await steps()
    links.make_room(2)
    tasks[1].cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in done[:2]] == [asyncio.CancelledError] * 2
    assert isinstance(done[3], ValueError)
    assert (links.sent, answers.waiting) == ([2, 4], 0)


async def test_who_waits_for_a_node_that_is_lost_or_for_too_long_is_told(
    answers: LargeAnswers, links: Links, time: Time
) -> None:
    async def answer() -> None:
        async with answers.room(2, time.ms + SOON):
            links.send(2, "never")

    links.full.add(2)
    for end in ("late", "lost"):
        task = asyncio.create_task(answer())
        await steps()
        if end == "late":
            time.pass_by(SOON)
            links.make_room(2)
            links.full.add(2)
        else:
            links.lose(2)
        with pytest.raises(Unavailable, match="no room"):
            await task
    assert (links.sent, answers.waiting) == ([], 0)


# --- brokers that ask each other ---------------------------------------------------------


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    settings = DefaultsConfig(operation_timeout_ms=10_000)
    async with FakeCluster(tmp_path, nodes=2, settings=settings) as made:
        yield made


class Reads:
    """A queue of node 1 with messages, read by node 2, which has no replica of it."""

    def __init__(self, cluster: FakeCluster, arguments: dict[str, Any]) -> None:
        self.cluster = cluster
        self.arguments = arguments
        self.sent: list[int] = []
        """Sizes of the control frames from node 1 to node 2."""
        self.asked = 0
        send = cluster.nodes[1].control.transport.send
        ask = cluster.nodes[2].control.transport.send

        def counted(node: int, frame: bytes, body: Sequence[bytes] = ()) -> None:
            if frame_header(frame)[1] == FRAME_CONTROL:
                self.sent.append(len(frame) + sum(map(len, body)))
            send(node, frame, body)

        def asking(node: int, frame: bytes, body: Sequence[bytes] = ()) -> None:
            self.asked += frame_header(frame)[5] in (KIND_RESERVATION, KIND_STREAM)
            ask(node, frame, body)

        cluster.nodes[1].control.transport.send = counted  # type: ignore[method-assign]
        cluster.nodes[2].control.transport.send = asking  # type: ignore[method-assign]
        self.epoch = 0

    @property
    def host(self) -> FakeHost:
        return self.cluster.nodes[1].host

    @property
    def full(self) -> set[int]:
        return self.cluster.nodes[1].control.transport.full

    def queue(self, node: int) -> Any:
        return self.cluster.nodes[node].broker.queue_admin.find_queue("/", "q")

    async def fill(self) -> None:
        await self.cluster.queue(1, "q", arguments=self.arguments)
        await until(lambda: "q" in self.cluster.nodes[2].machine.vhosts["/"].queues)
        channel = Channel()
        channel.client = self.queue(1).client(self.cluster.nodes[1].new_session(), channel)
        channel.publish(bytes(LARGE), tag=1)
        await until(lambda: channel.heard)
        if "stream" not in self.arguments.values():
            opened = await self.op({"op": "open", "owner": "me", "ttl_ms": 60_000})
            self.epoch = opened["epoch"]
            await self.op(
                {
                    "op": "take",
                    "epoch": self.epoch,
                    "fencing_token": opened["fencing_token"],
                    "max": 1,
                    "after": 0,
                }
            )
            channel.publish(bytes(LARGE), tag=2)
            await until(lambda: len(channel.heard) == 2)
        self.sent.clear()

    async def op(self, op: dict[str, Any]) -> Any:
        return await self.queue(1).reservation({"reservation": "s", **op})

    async def stream(self) -> list[bytes]:
        chunks = await self.queue(2).fetch_chunks(0, None, 100, 1 << 30, 0)
        return [body_of(*run[:3]) for run in chunks.runs]

    async def reservation(self) -> list[bytes]:
        found = await self.queue(2).reservation_runs(
            RunsRequest("s", self.epoch, 0, 1, 100, 1 << 30)
        )
        return [body_of(*run[:3]) for run in found[2]]

    async def browse(self) -> list[bytes]:
        found = await self.queue(2).browse(None, 100, 1 << 30)
        return [body_of(*run[:3]) for run in found[1]]


ALONE = {"x-queue-type": "quorum", "x-quorum-initial-group-size": 1}
CLASSIC = {"x-queue-type": "classic"}
STREAM = {"x-queue-type": "stream", "x-initial-cluster-size": 1}
Read = Callable[[Reads], Awaitable[list[bytes]]]

KINDS = pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (STREAM, Reads.stream),
        (ALONE, Reads.reservation),
        (ALONE, Reads.browse),
        (CLASSIC, Reads.reservation),
        (CLASSIC, Reads.browse),
    ],
    ids=["stream", "quorum reservation", "quorum browse", "classic reservation", "classic browse"],
)


@KINDS
async def test_what_another_node_reads_waits_for_room_on_its_link(
    cluster: FakeCluster, arguments: dict[str, Any], read: Read
) -> None:
    reads = Reads(cluster, arguments)
    await reads.fill()
    (whole,) = await read(reads)
    assert len(whole) == LARGE
    assert max(reads.sent) > LARGE
    reads.sent.clear()
    reads.full.add(2)
    reads.asked = 0
    tasks = [asyncio.ensure_future(read(reads)) for _ in range(3)]
    await until(lambda: reads.asked == 3)
    await until(lambda: reads.host.lines.get(2))
    await steps()
    assert max(reads.sent, default=0) < LARGE
    reads.host.make_room(2)
    assert await asyncio.gather(*tasks) == [[whole]] * 3
    assert len([size for size in reads.sent if size > LARGE]) == 3
    assert cluster.nodes[1].broker.local.answers.waiting == 0


@KINDS
async def test_what_a_lost_node_wanted_to_read_is_forgotten(
    cluster: FakeCluster, arguments: dict[str, Any], read: Read
) -> None:
    reads = Reads(cluster, arguments)
    await reads.fill()
    reads.full.add(2)
    task = asyncio.ensure_future(read(reads))
    await until(lambda: reads.host.lines.get(2))
    reads.host.lose(2)
    cluster.nodes[2].control.on_node_down(1)
    with pytest.raises(Unavailable):
        await task
    assert cluster.nodes[1].broker.local.answers.waiting == 0
    await until(lambda: not cluster.nodes[1].control._tasks)
    assert max(reads.sent, default=0) < LARGE


@pytest.mark.parametrize("arguments", [ALONE, CLASSIC], ids=["quorum", "classic"])
async def test_what_is_small_does_not_wait(cluster: FakeCluster, arguments: dict[str, Any]) -> None:
    """Refusals, and ops on reservations."""
    reads = Reads(cluster, arguments)
    await reads.fill()
    reads.full.add(2)
    with pytest.raises(ReservationRefused):
        await reads.queue(2).reservation_runs(RunsRequest("none", reads.epoch, 0, 1, 100, 1 << 30))
    if arguments is CLASSIC:
        await reads.queue(2).reservation(
            {"op": "open", "reservation": "t", "owner": "me", "ttl_ms": 60_000}
        )
    assert reads.host.lines == {}


class Listed:
    """A connection whose row is large."""

    id, name, vhost = 1, "client", "/"

    def info(self) -> dict[str, Any]:
        return {"name": self.name, "client_properties": "p" * LARGE}

    def sessions(self) -> list[int]:
        return []


async def test_lists_wait_for_room_on_the_link(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_queries, "LIST_TIMEOUT_S", 30.0)
    reads = Reads(cluster, CLASSIC)
    cluster.nodes[1].broker.connections.add(Listed())
    asker = cluster.nodes[2].broker
    assert [row["node"] for row in await asker.cluster.list_connections()] == ["n1"]
    assert max(reads.sent) > LARGE
    reads.sent.clear()
    reads.full.add(2)
    task = asyncio.ensure_future(asker.cluster.list_connections())
    await until(lambda: reads.host.lines.get(2))
    # What alarms are learned from is small: it does not wait.
    assert sorted(await asker.cluster.nodes()) == ["n1", "n2"]
    await steps()
    assert max(reads.sent, default=0) < LARGE
    # A node lists what it has itself without a link.
    assert [row["name"] for row in await cluster.nodes[1].broker.cluster.list_connections()] == [
        "client"
    ]
    reads.host.make_room(2)
    assert len(await task) == 1
    assert len([size for size in reads.sent if size > LARGE]) == 1
    assert cluster.nodes[1].broker.local.answers.waiting == 0


async def test_a_list_for_a_link_that_stays_full_is_dropped(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(cluster, CLASSIC)
    cluster.nodes[1].broker.connections.add(Listed())
    reads.full.add(2)
    monkeypatch.setattr(cluster_queries, "LIST_TIMEOUT_S", 0.05)
    # A node that does not answer in time has no rows.
    assert await cluster.nodes[2].broker.cluster.list_connections() == []
    reads.host.make_room(2)
    await until(lambda: not cluster.nodes[1].control._tasks)
    assert max(reads.sent, default=0) < LARGE


async def test_a_stream_that_is_not_there_is_refused(cluster: FakeCluster) -> None:
    with pytest.raises(Refused, match="not here"):
        await cluster.nodes[2].control.request(1, KIND_STREAM, ["extent", 99], 5)
