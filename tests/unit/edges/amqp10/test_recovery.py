"""Links that go on in another connection, over real queues of three nodes; names that are taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from convoymq.edges.amqp10.opening import PLAIN_HEADER
from convoymq.edges.amqp10.performatives import (
    Accepted,
    Attach,
    Detach,
    Disposition,
    Error,
    Modified,
    Open,
    Rejected,
    Source,
    Target,
    Transfer,
)
from convoymq.edges.amqp10.recovery import ATTACH_BYTES_MAX, reduce_map
from convoymq.model.tables import Field
from tests.unit.edges.amqp10.fakes import Client, message, of_kind
from tests.unit.queues.fake_cluster import FakeCluster, until

QUORUM = {"x-queue-type": Field("S", b"quorum")}
KEPT = {**QUORUM, "x-link-resume-timeout": Field("l", 600_000)}
STOLEN = "amqp:link:stolen"
IN, OUT = 0, 1


class LinkClient(Client):
    """A client of one node, whose links have the same names in all of its connections."""

    def __init__(self, cluster: FakeCluster, node: int = 1) -> None:
        super().__init__(cluster.nodes[node].broker)  # type: ignore[arg-type]
        self.cluster = cluster

    async def rest(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)
            self.shell.output += self.connection.take_output()
        await until(lambda: not len(self.shell.tasks))
        self.shell.output += self.connection.take_output()

    async def hear(self, kind: type) -> Any:
        """Returns the next performative of a kind."""
        found: list[Any] = []
        while not of_kind(found, kind):
            found += await self.heard()
        return of_kind(found, kind)[0]

    async def receive(self, count: int, credit: int = 0, **fields: Any) -> list[Transfer]:
        """Attaches the receiver, and returns so many deliveries."""
        self.payloads.clear()
        self.attached = of_kind(await self.attach_receiver("/queues/q", IN, **fields), Attach)
        while not self.attached:
            self.attached = of_kind(await self.heard(), Attach)
        if credit:
            self.credit(credit, IN)
        return await self.receive_more(count)

    async def receive_more(self, count: int) -> list[Transfer]:
        """Returns so many deliveries more."""
        found: list[Transfer] = []
        while len(found) < count:
            found += of_kind(await self.heard(), Transfer)
        return found

    @property
    def answered(self) -> Any:
        """Map of the answer to the last attach."""
        return self.attached[0].unsettled

    async def send_from(self, name: str = "out", address: str = "/queues/q", **fields: Any) -> Any:
        """Attaches the sender, and returns the answer."""
        asked: dict[str, Any] = {"initial_delivery_count": 0, "snd_settle_mode": 0}
        target = Target(address=address)
        self.send(Attach(name=name, handle=OUT, role=False, target=target, **(asked | fields)))
        return await self.hear(Attach)

    def counts(self) -> tuple[int, int]:
        """(ready, unacknowledged)"""
        backlog = self.machine().backlog
        return backlog.stored(), backlog.unacked

    def machine(self) -> Any:
        queue = self.cluster.nodes[1].broker.queue_admin.find_queue("/", "q", 0)
        group = self.cluster.groups[queue.group]
        return group.replicas[group.leader].machine


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        made.raise_versions()
        await made.queue(1, "q", arguments=KEPT)
        await made.queue(1, "plain", arguments=QUORUM)
        yield made


@pytest.fixture
async def client(cluster: FakeCluster) -> LinkClient:
    """A client that has published a, b, c to the queue."""
    made = await opened(cluster)
    await made.send_from("fill")
    for each in (b"a", b"b", b"c"):
        made.transfer(message(each), OUT)
    await until_counts(made, (3, 0))
    made.send(Detach(handle=OUT, closed=True))
    await made.hear(Detach)
    return made


async def opened(cluster: FakeCluster, node: int = 1) -> LinkClient:
    made = LinkClient(cluster, node)
    await made.open()
    await made.begin()
    return made


async def until_counts(client: LinkClient, counts: tuple[int, int]) -> None:
    while client.counts() != counts:
        await client.heard()


def tags(found: list[Transfer]) -> list[bytes | None]:
    return [each.delivery_tag for each in found]


def tag(message_id: int) -> bytes:
    return message_id.to_bytes(4, "big")


def states(*ids: int) -> dict[Any, Any]:
    return dict.fromkeys(map(tag, ids))


async def lost(client: LinkClient, node: int = 1) -> LinkClient:
    """The client's connection is lost, and it has another one."""
    client.connection.lost()
    return await opened(client.cluster, node)


# Receivers


@pytest.mark.parametrize("node", [1, 2])
async def test_deliveries_are_resumed_without_their_messages(client: LinkClient, node: int) -> None:
    await client.receive(3, 3)
    again = await lost(client, node)
    found = await again.receive(2, 10, unsettled=states(0, 2))
    assert again.answered == states(0, 2)
    assert [(each.delivery_id, each.resume, each.settled) for each in found[:2]] == [
        (0, True, False),
        (1, True, False),
    ]
    assert tags(found[:2]) == [tag(0), tag(2)]
    assert again.payloads[:2] == [b"", b""]
    # What the client did not name comes as a new delivery, under the next tag.
    rest = found[2:] or await again.receive_more(1)
    assert [(each.delivery_tag, each.resume) for each in rest] == [(tag(3), False)]
    again.settle(0, Accepted(), last=2)
    await until_counts(again, (0, 0))


async def test_outcomes_of_the_map_are_taken(client: LinkClient) -> None:
    await client.receive(3, 3)
    again = await lost(client)
    known = {tag(0): Accepted(), tag(1): Rejected(), tag(2): Modified(delivery_failed=True)}
    await again.receive(0, unsettled=known)
    assert not again.answered
    await until_counts(again, (1, 0))
    backlog = again.machine().backlog
    assert (backlog.acked, backlog.dropped["rejected"]) == (1, 1)


async def test_resumed_transfers_use_credit_and_go_first(client: LinkClient) -> None:
    await client.receive(2, 2)
    again = await lost(client)
    assert tags(await again.receive(1, 1, unsettled=states(0, 1))) == [tag(0)]
    assert not of_kind(await again.heard(), Transfer)
    again.credit(2, IN, counted=1)
    found = await again.receive_more(2)
    assert [(each.delivery_tag, each.resume) for each in found] == [
        (tag(1), True),
        (tag(2), False),
    ]


async def test_without_a_map_everything_comes_again(client: LinkClient) -> None:
    await client.receive(3, 3)
    again = await lost(client)
    found = await again.receive(3, 3)
    assert again.answered is None
    assert not any(each.resume for each in found)


async def test_a_map_with_other_tags_resumes_nothing(client: LinkClient) -> None:
    await client.receive(3, 3)
    again = await lost(client)
    await again.receive(3, 3, unsettled={b"other": None, b"": None, tag(7): None})
    assert not again.answered
    assert again.counts() == (0, 3)


async def test_a_bad_outcome_detaches_the_link(client: LinkClient) -> None:
    await client.receive(1, 1)
    again = await lost(client)
    known: dict[Any, Any] = {tag(0): Modified(message_annotations={"bad": 1})}
    again.send(
        Attach(
            name=f"link {IN}", handle=IN, role=True, unsettled=known,
            source=Source(address="/queues/q"), target=Target(),
        )
    )  # fmt: skip
    detach = await again.hear(Detach)
    assert isinstance(detach.error, Error)
    assert detach.error.condition == "amqp:invalid-field"
    await until_counts(again, (3, 0))


async def test_a_detached_link_is_kept_and_a_closed_one_is_not(client: LinkClient) -> None:
    await client.receive(2, 2)
    client.send(Detach(handle=IN))
    await client.hear(Detach)
    assert client.counts() == (1, 2)
    assert tags(await client.receive(2, 2, unsettled=states(0, 1))) == [tag(0), tag(1)]
    client.send(Detach(handle=IN, closed=True))
    await client.hear(Detach)
    assert client.counts() == (3, 0)


async def test_the_name_of_a_link_is_taken_by_the_next_one(client: LinkClient) -> None:
    await client.receive(2, 2)
    again = await opened(client.cluster, 2)
    assert tags(await again.receive(2, 2, unsettled=states(0, 1))) == [tag(0), tag(1)]
    detach = await client.hear(Detach)
    assert detach.error.condition == STOLEN
    client.send(Detach(handle=IN, closed=True))
    await client.heard()
    assert again.counts() == (1, 2), "the older link gives nothing back"
    again.settle(0, Accepted(), last=1)
    await until_counts(again, (1, 0))


async def test_names_are_taken_in_one_node_whatever_the_queue_keeps(cluster: FakeCluster) -> None:
    names: dict[bytes, Any] = {}
    first, second = await opened(cluster), await opened(cluster)
    first.connection.names = second.connection.names = names
    for each in (first, second):
        await each.attach_receiver("/queues/plain", IN)
        assert await each.send_from(address="/queues/plain")
    found = of_kind(await first.heard(), Detach)
    assert sorted((each.handle, str(each.error.condition)) for each in found) == [
        (IN, STOLEN),
        (OUT, STOLEN),
    ]
    assert len(names) == 2
    second.connection.lost()
    assert not names


async def test_links_of_other_directions_and_containers_have_other_names(
    cluster: FakeCluster,
) -> None:
    first = await opened(cluster)
    second = LinkClient(cluster)
    second.connection.names = first.connection.names
    await second.log_in()
    second.write(PLAIN_HEADER)
    second.send(Open(container_id="other"))
    await second.begin()
    for each in (first, second):
        await each.attach_receiver("/queues/plain", IN)
        await each.send_from(f"link {IN}", "/queues/plain")
    assert len(first.connection.names) == 4
    assert not of_kind(await first.heard(), Detach)


@pytest.mark.parametrize("role", [True, False])
async def test_a_queue_that_keeps_nothing_says_so(cluster: FakeCluster, role: bool) -> None:
    client = await opened(cluster)
    client.send(
        Attach(
            name="x", handle=3, role=role, unsettled={b"1": None},
            source=Source(address="/queues/plain") if role else Source(),
            target=Target() if role else Target(address="/queues/plain"),
            initial_delivery_count=None if role else 0,
        )
    )  # fmt: skip
    detach = await client.hear(Detach)
    assert (detach.error.condition, detach.error.description) == (
        "amqp:not-implemented",
        "Link recovery not supported",
    )


def test_a_map_is_bounded_by_the_frame_of_its_client() -> None:
    known: dict[Any, Any] = {tag(each): None for each in range(10)}
    found = reduce_map((0, 9), known, ATTACH_BYTES_MAX + 33)
    assert found.kept == [0, 1, 2]
    assert found.returned == [(each, each) for each in range(3, 10)]


def test_only_ids_that_are_held_are_of_a_map() -> None:
    known: dict[Any, Any] = {tag(each): None for each in (0, 1, 2, 3, 4, 5, 9)}
    assert reduce_map((1, 2, 4, 4), known, 1 << 20).kept == [1, 2, 4]
    assert reduce_map((), known, 1 << 20).kept == []


# Publishers


async def publish(client: LinkClient, *bodies: bytes) -> None:
    """Publishes, with the bodies as tags, and waits until they are in the queue."""
    ready = client.counts()[0]
    for each in bodies:
        client.transfer(message(each), OUT, delivery_tag=each)
    await until_counts(client, (ready + len(bodies), 0))


@pytest.mark.parametrize("node", [1, 2])
async def test_the_answer_tells_which_messages_have_come(client: LinkClient, node: int) -> None:
    assert (await client.send_from()).unsettled is None
    await publish(client, b"x", b"y")
    again = await lost(client, node)
    attach = await again.send_from(unsettled={b"x": None, b"y": None, b"z": None})
    assert attach.unsettled == {b"x": Accepted(), b"y": Accepted()}
    again.transfer(b"", OUT, delivery_tag=b"x", resume=True)
    told = await again.hear(Disposition)
    assert (told.first, told.settled, told.state) == (0, True, Accepted())
    again.transfer(b"", OUT, delivery_tag=b"y", resume=True, settled=True)
    again.transfer(message(b"z"), OUT, delivery_tag=b"z", resume=True)
    again.transfer(message(b"z"), OUT, delivery_tag=b"z")
    assert (await again.hear(Disposition)).first == 3
    assert again.counts() == (6, 0), "what is resumed and not known is ignored"


async def test_a_message_that_is_late_is_refused(client: LinkClient) -> None:
    await client.send_from()
    again = await opened(client.cluster, 2)
    await again.send_from(unsettled={b"x": None})
    client.transfer(message(b"x"), OUT, delivery_tag=b"x")
    detach = await client.hear(Detach)
    assert detach.error.condition == STOLEN
    await publish(again, b"x")
    assert again.counts() == (4, 0)


async def test_a_link_without_a_map_begins_anew(client: LinkClient) -> None:
    await client.send_from()
    await publish(client, b"x")
    again = await lost(client)
    await again.send_from()
    await publish(again, b"x")
    third = await lost(again)
    assert (await third.send_from(unsettled={b"x": None})).unsettled == {b"x": Accepted()}
    assert third.counts() == (5, 0)
