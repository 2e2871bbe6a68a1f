"""The node /management, over a real broker: pairs of links, and every request with its answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import pytest

from convoymq.broker.audit import AuditLog
from convoymq.broker.identity.backend import Identity
from convoymq.edges.amqp10 import requests
from convoymq.edges.amqp10.performatives import (
    Attach,
    Detach,
    End,
    Flow,
    Source,
    Target,
    Transfer,
)
from convoymq.messages.amqp10.sections import section, section_at, split
from convoymq.messages.amqp10.values import (
    Array,
    Decimal32,
    Long,
    Symbol,
    Timestamp,
    UInt,
    ULong,
    Value,
    decode,
)
from convoymq.metadata.commands import DeletePermission, PutPermission, PutUser, PutVhostLimit
from convoymq.model.config import DefaultsConfig
from convoymq.model.tables import Table
from convoymq.node.logs import LogOutput
from tests.unit.broker.identity.tokens import Tokens
from tests.unit.edges.amqp10.fakes import Client, of_kind
from tests.unit.queues.fake_cluster import FakeCluster, until

PAIRED = {Symbol("paired"): True}
REQUESTS, RESPONSES = 0, 1


class Answer(NamedTuple):
    """A response."""

    status: str
    body: Any
    id: Any
    more: dict[str, Any]


class Manager(Client):
    """A client with a pair of links."""

    async def rest(self) -> None:
        await until(lambda: not len(self.shell.tasks))
        for _ in range(3):
            await asyncio.sleep(0)
        self.shell.output += self.connection.take_output()

    async def pair(self, name: str = "pair", credit: int = 100, base: int = 0) -> list[Any]:
        """Attaches both links and returns what came back."""
        heard = await self.attach_half(False, handle=base + REQUESTS, name=name)
        heard += await self.attach_half(True, handle=base + RESPONSES, name=name)
        if credit:
            self.credit(credit, handle=base + RESPONSES)
        return heard + await self.heard()

    async def attach_half(
        self,
        role: bool,
        *,
        handle: int = 0,
        name: str = "pair",
        own: str = "me",
        properties: Any = PAIRED,
        mode: int = 1,
        **fields: Any,
    ) -> list[Any]:
        there, here = "/management", own
        self.send(
            Attach(
                name=name,
                handle=handle,
                role=role,
                snd_settle_mode=mode,
                source=Source(address=there if role else here),
                target=Target(address=here if role else there),
                properties=properties,
                **({} if role else {"initial_delivery_count": 0} | fields),
            )
        )
        return await self.heard()

    def request(
        self, method: str, path: str, body: Value = None, id: Value = "1", handle: int = REQUESTS
    ) -> None:
        properties = section(0x73, [id, None, path, method, "$me"])
        self.transfer(properties + section(0x77, body), handle=handle, settled=True)

    async def ask(self, method: str, path: str, body: Value = None, id: Value = "1") -> Answer:
        self.request(method, path, body, id)
        (answer,) = await self.answers()
        assert answer.id == id
        return answer

    async def answers(self) -> list[Answer]:
        heard = await self.heard()
        assert not of_kind(heard, Detach) + of_kind(heard, End), heard
        found, self.payloads = self.payloads, []
        return [answer_of(each) for each in found]


Refusals = list[tuple[str, str, Value, str, str]]
"""Method, path, body; status and a part of the text."""


async def check_refused(client: Manager, refusals: Refusals) -> None:
    wrong = []
    for method, path, body, status, text in refusals:
        answer = await client.ask(method, path, body)
        if answer.status != status or text not in answer.body:
            wrong.append((method, path, body, answer.status, answer.body))
    assert wrong == []


def answer_of(payload: bytes) -> Answer:
    found = split(payload)
    _, start = section_at(payload, found.body_at.start, len(payload))
    body, _ = decode(payload, start, len(payload))
    id = found.properties.get("correlation-id")
    return Answer(str(found.properties["subject"]), body, id, found.application_properties)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    settings = DefaultsConfig(operation_timeout_ms=300)
    async with FakeCluster(tmp_path, nodes=3, settings=settings) as made:
        made.raise_versions()
        yield made


@pytest.fixture
async def client(cluster: FakeCluster) -> Manager:
    """A client with a pair."""
    made = await opened(cluster)
    await made.pair()
    return made


async def opened(cluster: FakeCluster, user: str = "guest") -> Manager:
    made = Manager(cluster.nodes[1].broker)  # type: ignore[arg-type]
    await made.open()
    # As if that user had logged in.
    made.connection.user = cluster.nodes[1].machine.users[user]
    await made.begin()
    return made


async def limited(cluster: FakeCluster, **patterns: str) -> Manager:
    """Returns a client with a pair, whose user has these permissions only."""
    store = cluster.nodes[1].store
    await store.execute(PutUser(name="u"))
    rules = {"configure": "", "write": "", "read": "", **patterns}
    await store.execute(PutPermission(user="u", vhost="/", **rules))
    made = await opened(cluster, "u")
    await made.pair()
    return made


# --- links -----------------------------------------------------------------------------------


async def test_a_pair_gets_credit_when_both_links_are_there(cluster: FakeCluster) -> None:
    client = await opened(cluster)
    (attach,) = await client.attach_half(False)
    assert attach.role
    assert attach.target.address == "/management"
    assert attach.properties == PAIRED
    assert attach.max_message_size == 131_072
    attach, flow = await client.attach_half(True, handle=1)
    assert (attach.role, attach.snd_settle_mode, attach.properties) == (False, 1, PAIRED)
    assert isinstance(flow, Flow)
    assert (flow.handle, flow.link_credit) == (0, 8)


async def test_the_receiving_link_may_come_first(cluster: FakeCluster) -> None:
    client = await opened(cluster)
    (first,) = await client.attach_half(True, handle=1)
    assert not first.role
    attach, flow = await client.attach_half(False)
    assert (attach.role, flow.link_credit) == (True, 8)


@pytest.mark.parametrize(
    ("fields", "condition", "text"),
    [
        ({"properties": None}, "amqp:invalid-field", "paired"),
        ({"properties": {Symbol("paired"): False}}, "amqp:invalid-field", "paired"),
        ({"properties": {Symbol("paired"): 1}}, "amqp:invalid-field", "paired"),
        ({"mode": 0}, "amqp:invalid-field", "settled"),
        ({"mode": 2}, "amqp:invalid-field", "settled"),
        ({"initial_delivery_count": None}, "amqp:invalid-field", "initial-delivery-count"),
        ({"own": "other"}, "amqp:precondition-failed", "addresses differ"),
    ],
)
async def test_a_link_that_does_not_pair_is_refused(
    cluster: FakeCluster, fields: dict[str, Any], condition: str, text: str
) -> None:
    client = await opened(cluster)
    await client.attach_half(True, handle=1)
    attach, detach = await client.attach_half(False, **fields)
    assert attach.target is None
    assert (detach.error.condition, detach.closed) == (condition, True)
    assert text in detach.error.description
    # The session goes on, and the right half is still welcome.
    client.send(Detach(handle=0, closed=True))
    assert (await client.attach_half(False))[0].target is not None


async def test_a_third_link_of_that_name_is_refused(client: Manager) -> None:
    _, detach = await client.attach_half(False, handle=2)
    assert detach.error.condition == "amqp:precondition-failed"
    assert (await client.ask("GET", "/queues/none")).status == "404"


async def test_several_pairs_do_not_disturb_each_other(client: Manager) -> None:
    await client.pair("second", base=2)
    client.request("PUT", "/queues/a", {}, id="first")
    client.request("GET", "/queues/none", id="second", handle=2)
    found = {each.id: each.status for each in await client.answers()}
    assert found == {"first": "201", "second": "404"}


async def test_requests_are_worked_through_in_their_order(client: Manager) -> None:
    for number, method in enumerate(("PUT", "GET", "DELETE", "GET")):
        client.request(method, "/queues/q", {} if method == "PUT" else None, id=ULong(number))
    found = await client.answers()
    assert [each.id for each in found] == [0, 1, 2, 3]
    assert [each.status for each in found] == ["201", "200", "200", "404"]


@pytest.mark.parametrize("id", ["text", ULong(7), UUID(int=5), b"bytes", None])
async def test_a_response_names_its_request(client: Manager, id: Value) -> None:
    answer = await client.ask("GET", "/queues/none", id=id)
    assert answer.more == {"http:response": "1.1"}
    assert type(answer.id) is type(id)


async def test_responses_wait_for_credit_and_requests_for_responses(cluster: FakeCluster) -> None:
    client = await opened(cluster)
    await client.pair(credit=0)
    for number in range(8):
        client.request("GET", "/queues/none", id=ULong(number))
    # No credit comes back as long as no response has left.
    assert await client.heard() == []
    client.credit(3, handle=1)
    heard = await client.heard()
    assert len(of_kind(heard, Transfer)) == 3
    assert all(each.settled for each in of_kind(heard, Transfer))
    client.credit(10, handle=1, counted=3)
    heard = await client.heard()
    assert len(of_kind(heard, Transfer)) == 5
    assert of_kind(heard, Flow)[-1].link_credit == 8
    assert [answer_of(each).id for each in client.payloads] == list(range(8))


async def test_requests_beyond_credit_end_their_link(cluster: FakeCluster) -> None:
    client = await opened(cluster)
    await client.pair(credit=0)
    for _ in range(9):
        client.request("GET", "/queues/none")
    (detach,) = of_kind(await client.heard(), Detach)
    assert detach.error.condition == "amqp:link:transfer-limit-exceeded"


async def test_drain_and_echo_of_the_receiving_link_are_answered(client: Manager) -> None:
    client.credit(100, handle=1, echo=True)
    (flow,) = await client.heard()
    assert (flow.handle, flow.link_credit, flow.drain) == (1, 100, False)
    client.credit(100, handle=1, drain=True)
    (flow,) = await client.heard()
    assert (flow.link_credit, flow.delivery_count, flow.drain) == (0, 100, True)


async def test_a_request_of_several_transfers_is_one(client: Manager) -> None:
    whole = section(0x73, ["1", None, "/queues/q", "PUT"]) + section(0x77, {})
    client.transfer(whole[:10], settled=True, more=True)
    client.send(Transfer(handle=0), whole[10:])
    (answer,) = await client.answers()
    assert answer.status == "201", answer


async def test_a_closed_window_holds_responses(client: Manager) -> None:
    client.flow(incoming_window=0)
    client.request("GET", "/queues/none")
    assert not of_kind(await client.heard(), Transfer)
    client.flow()
    assert len(await client.answers()) == 1


async def test_a_pair_ends_and_another_of_its_name_begins(client: Manager) -> None:
    for handle in (0, 1):
        client.send(Detach(handle=handle, closed=True))
    assert [each.handle for each in of_kind(await client.heard(), Detach)] == [0, 1]
    await client.pair()
    assert (await client.ask("GET", "/queues/none")).status == "404"


async def test_without_a_receiving_link_responses_are_dropped(client: Manager) -> None:
    client.request("PUT", "/queues/q", {})
    client.send(Detach(handle=1, closed=True))
    assert not of_kind(await client.heard(), Transfer)
    await client.attach_half(True, handle=1)
    client.credit(100, handle=1)
    assert (await client.ask("GET", "/queues/q")).status == "200"


async def test_a_session_that_ends_drops_its_requests(
    client: Manager, cluster: FakeCluster
) -> None:
    client.request("PUT", "/queues/a", {})
    client.request("PUT", "/queues/b", {})
    client.send(End())
    heard = await client.heard()
    assert not of_kind(heard, Transfer)
    assert "b" not in cluster.nodes[1].machine.vhosts["/"].queues


async def test_a_body_may_be_left_out_or_come_first(client: Manager) -> None:
    properties = section(0x73, ["1", None, "/queues/q", "PUT"])
    client.transfer(section(0x77, {}) + properties, settled=True)
    client.transfer(section(0x73, ["2", None, "/queues/q", "GET"]), settled=True)
    assert [each.status for each in await client.answers()] == ["201", "200"]


@pytest.mark.parametrize("payload", [b"", b"\x00\x53\x77", section(0x76, [1]), b"junk"])
async def test_what_is_no_request_ends_its_link(client: Manager, payload: bytes) -> None:
    client.transfer(payload, settled=True)
    (detach,) = of_kind(await client.heard(), Detach)
    assert detach.error.condition == "amqp:decode-error"


async def test_a_request_that_is_too_large_ends_the_session(client: Manager) -> None:
    client.transfer(b"x" * 100_000, settled=True, more=True)
    client.send(Transfer(handle=0), b"x" * 100_000)
    (end,) = of_kind(await client.heard(), End)
    assert end.error.condition == "amqp:link:message-size-exceeded"


async def test_a_response_that_is_too_large_ends_its_link(cluster: FakeCluster) -> None:
    client = await opened(cluster)
    await client.attach_half(False)
    await client.attach_half(True, handle=1, max_message_size=ULong(20))
    client.send(
        Attach(
            name="small",
            handle=2,
            role=True,
            source=Source(address="/management"),
            target=Target(address="me"),
            properties=PAIRED,
            max_message_size=20,
        )
    )
    await client.attach_half(False, handle=3, name="small")
    client.credit(10, handle=2)
    client.request("GET", "/queues/none", handle=3)
    (detach,) = of_kind(await client.heard(), Detach)
    assert (detach.handle, detach.error.condition) == (2, "amqp:link:message-size-exceeded")


async def test_an_alarm_holds_requests_up(client: Manager, cluster: FakeCluster) -> None:
    cluster.nodes[1].broker.alarms.set("memory", True)
    client.connection.set_alarms()
    assert of_kind(await client.heard(), Flow)[-1].incoming_window == 0
    cluster.nodes[1].broker.alarms.set("memory", False)
    client.connection.set_alarms()
    await client.heard()
    assert (await client.ask("GET", "/queues/none")).status == "404"


async def test_a_fault_of_ours_is_answered(
    client: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(requests.Requests, "_get_queue", broken)
    answer = await client.ask("GET", "/queues/q")
    assert (answer.status, answer.body) == ("500", "internal error")
    assert (await client.ask("GET", "/queues/q/messages")).status == "405"


# --- queues ----------------------------------------------------------------------------------


async def test_a_queue_is_declared_and_shown(client: Manager) -> None:
    arguments = {"x-queue-type": "quorum", "x-max-length": Long(5), "x-overflow": "reject-publish"}
    answer = await client.ask("PUT", "/queues/a%2Fb%C3%BC", {"arguments": arguments})
    assert answer.status == "201", answer
    assert answer.body == {
        "name": "a/bü",
        "vhost": "/",
        "durable": True,
        "auto_delete": False,
        "exclusive": False,
        "type": "quorum",
        "arguments": arguments,
        "leader": answer.body["leader"],
        "replicas": answer.body["replicas"],
        "message_count": 0,
        "consumer_count": 0,
    }
    # RabbitMQ's Java client takes an array only.
    assert isinstance(answer.body["replicas"], Array)
    assert answer.body["leader"] in answer.body["replicas"].items
    assert len(answer.body["replicas"].items) == 3
    assert isinstance(answer.body["message_count"], ULong)
    assert isinstance(answer.body["consumer_count"], UInt)
    # An equal one, and one that differs.
    again = await client.ask("PUT", "/queues/a%2Fb%C3%BC", {"arguments": arguments})
    assert (again.status, again.body) == ("200", answer.body)
    found = await client.ask("GET", "/queues/a%2Fb%C3%BC")
    assert (found.status, found.body) == ("200", answer.body)
    differs = await client.ask(
        "PUT", "/queues/a%2Fb%C3%BC", {"arguments": arguments | {"x-max-length": 6}}
    )
    assert differs.status == "409"
    assert "inequivalent arg 'x-max-length'" in differs.body


async def test_a_classic_queue_has_its_home_as_leader(client: Manager) -> None:
    body = {"exclusive": True, "durable": False, "auto_delete": True, "arguments": {}}
    found = (await client.ask("PUT", "/queues/q", body)).body
    assert (found["type"], found["exclusive"], found["durable"]) == ("classic", True, False)
    assert found["auto_delete"]
    assert found["replicas"] == Array(str, (found["leader"],))


async def test_numbers_of_all_types_are_arguments(client: Manager) -> None:
    for number, value in enumerate((ULong(9), UInt(9), Long(9), 9)):
        body = {"arguments": {Symbol("x-max-length"): value}}
        assert (await client.ask("PUT", f"/queues/q{number}", body)).status == "201"


BAD_QUEUES: Refusals = [
    ("PUT", "/queues/", {}, "400", "name"),
    ("PUT", "/queues/a%0D", {}, "400", "line ends"),
    ("PUT", "/queues/a%0A", {}, "400", "line ends"),
    ("PUT", "/queues/%zz", {}, "400", "bad address"),
    ("PUT", "/queues/%FF", {}, "400", "bad address"),
    ("PUT", "/queues/" + "x" * 256, {}, "400", "255"),
    ("PUT", "/queues/amq.mine", {}, "403", "reserved prefix"),
    ("PUT", "/queues/q", None, "400", "map"),
    ("PUT", "/queues/q", [], "400", "map"),
    ("PUT", "/queues/q", {"other": 1}, "400", "bad queue property other=1"),
    ("PUT", "/queues/q", {"durable": 1}, "400", "bad queue property durable=1"),
    ("PUT", "/queues/q", {"durable": None}, "400", "bad queue property durable"),
    ("PUT", "/queues/q", {"exclusive": "yes"}, "400", "bad queue property exclusive=yes"),
    ("PUT", "/queues/q", {"arguments": []}, "400", "bad queue property arguments"),
    ("PUT", "/queues/q", {1: True}, "400", "bad queue property 1"),
    ("PUT", "/queues/q", {"arguments": {1: 2}}, "400", "bad argument 1"),
    ("PUT", "/queues/q", {"arguments": {"x": Decimal32(b"1234")}}, "400", "bad argument x"),
    ("PUT", "/queues/q", {"arguments": {"x" * 256: 1}}, "400", "bad argument x"),
    ("PUT", "/queues/q", {"arguments": {"x-max-length": "many"}}, "400", "x-max-length"),
    ("PUT", "/queues/q", {"arguments": {"x-max-length": -1}}, "400", "x-max-length"),
    ("PUT", "/queues/q", {"arguments": {"x-queue-type": "none"}}, "400", "x-queue-type"),
    ("PUT", "/queues/q", {"durable": False, "arguments": {"x-queue-type": "quorum"}}, "400", ""),
]


async def test_a_queue_that_cannot_be_declared(client: Manager) -> None:
    await check_refused(client, BAD_QUEUES)


async def test_a_virtual_host_has_as_many_queues_as_it_may(
    client: Manager, cluster: FakeCluster
) -> None:
    await cluster.nodes[1].store.execute(PutVhostLimit(vhost="/", name="max-queues", value=1))
    assert (await client.ask("PUT", "/queues/a", {})).status == "201"
    answer = await client.ask("PUT", "/queues/b", {})
    assert (answer.status, "queue limit in vhost" in answer.body) == ("403", True)
    assert (await client.ask("PUT", "/queues/a", {})).status == "200"


async def test_an_exclusive_queue_of_another_connection_is_locked(
    client: Manager, cluster: FakeCluster
) -> None:
    await client.ask("PUT", "/queues/mine", {"exclusive": True})
    other = await opened(cluster)
    await other.pair()
    for method, path in (
        ("PUT", "/queues/mine"),
        ("GET", "/queues/mine"),
        ("DELETE", "/queues/mine"),
        ("DELETE", "/queues/mine/messages"),
    ):
        answer = await other.ask(method, path, {"exclusive": True} if method == "PUT" else None)
        assert answer.status == "400", method
        assert "cannot obtain exclusive access to locked queue 'mine'" in answer.body
    # It goes with its connection.
    client.connection.lost()
    await client.rest()
    await until(lambda: "mine" not in cluster.nodes[1].machine.vhosts["/"].queues)


async def test_queues_are_deleted_and_purged(client: Manager) -> None:
    await client.ask("PUT", "/queues/q", {})
    await client.attach_sender("/queues/q", handle=5)
    for _ in range(3):
        client.transfer(section(0x75, b"x"), handle=5)
    while (await client.ask("GET", "/queues/q")).body["message_count"] < 3:
        await client.rest()
    purged = await client.ask("DELETE", "/queues/q/messages")
    assert (purged.status, purged.body) == ("200", {"message_count": 3})
    deleted = await client.ask("DELETE", "/queues/q")
    assert (deleted.status, deleted.body) == ("200", {"message_count": 0})
    again = await client.ask("DELETE", "/queues/q")
    assert (again.status, again.body) == ("200", {"message_count": 0})
    assert (await client.ask("GET", "/queues/q")).status == "404"
    answer = await client.ask("DELETE", "/queues/q/messages")
    assert (answer.status, answer.body) == ("404", "no queue 'q' in vhost '/'")


async def test_a_stream_is_not_purged(client: Manager) -> None:
    await client.ask("PUT", "/queues/s", {"arguments": {"x-queue-type": "stream"}})
    answer = await client.ask("DELETE", "/queues/s/messages")
    assert (answer.status, "not supported" in answer.body) == ("400", True)


# --- exchanges -------------------------------------------------------------------------------


async def test_exchanges_are_declared_and_deleted(client: Manager, cluster: FakeCluster) -> None:
    body = {"type": "topic", "durable": False, "arguments": {"alternate-exchange": "amq.fanout"}}
    for _ in range(2):
        answer = await client.ask("PUT", "/exchanges/a%2Fb", body)
        assert (answer.status, answer.body) == ("204", None)
    topology = cluster.nodes[1].machine.vhosts["/"].topology
    assert topology.exchange("a/b").arguments == Table.of({"alternate-exchange": "amq.fanout"})
    differs = await client.ask("PUT", "/exchanges/a%2Fb", {"type": "fanout"})
    assert (differs.status, "inequivalent arg 'type'" in differs.body) == ("409", True)
    assert (await client.ask("PUT", "/exchanges/amq.direct", {})).status == "204"
    for _ in range(2):
        assert (await client.ask("DELETE", "/exchanges/a%2Fb")).status == "204"
    assert topology.find_exchange("a/b") is None


BAD_EXCHANGES: Refusals = [
    ("PUT", "/exchanges/", {}, "403", "default exchange"),
    ("PUT", "/exchanges/amq.mine", {}, "403", "reserved prefix"),
    ("PUT", "/exchanges/x", {"type": "none"}, "400", "none"),
    ("PUT", "/exchanges/x", {"type": 1}, "400", "bad exchange property type=1"),
    ("PUT", "/exchanges/x", {"internal": 0}, "400", "bad exchange property internal=0"),
    ("PUT", "/exchanges/x", {"exclusive": True}, "400", "bad exchange property exclusive"),
    ("PUT", "/exchanges/x", None, "400", "map"),
    ("PUT", "/exchanges/a%0D%0A", {}, "400", "line ends"),
    ("PUT", "/exchanges/x", {"type": "a\nb"}, "400", "line ends"),
    ("DELETE", "/exchanges/", None, "403", "default exchange"),
    ("DELETE", "/exchanges/amq.direct", None, "403", "system exchange 'amq.direct'"),
]


async def test_an_exchange_that_is_refused(client: Manager) -> None:
    await check_refused(client, BAD_EXCHANGES)


# --- bindings --------------------------------------------------------------------------------


async def test_bindings_come_are_listed_and_go(client: Manager) -> None:
    await client.ask("PUT", "/queues/q%3B", {})
    plain = {"source": "amq.topic", "destination_queue": "q;", "binding_key": "k/ü"}
    rich = plain | {"arguments": {"one": Long(1), "two": "2"}}
    for body in (plain | {"arguments": {}}, plain, rich):
        answer = await client.ask("POST", "/bindings", body)
        assert (answer.status, answer.body) == ("204", None)
    listed = await client.ask("GET", "/bindings?src=amq.topic&dstq=q%3B&key=k%2F%C3%BC")
    assert listed.status == "200"
    start = "/bindings/src=amq.topic;dstq=q%3B;key=k%2F%C3%BC;args="
    locations = [each.pop("location") for each in listed.body]
    assert listed.body == [plain | {"arguments": {}}, rich]
    assert locations[0] == start
    assert locations[1].startswith(start)
    assert len(locations[1]) == len(start) + 6
    assert (await client.ask("GET", "/bindings?src=amq.topic&dstq=q%3B&key=other")).body == []
    # The other one stays, and one that is not there is as good as gone.
    for location in (locations[1], locations[1], start + "AAAAAA"):
        assert (await client.ask("DELETE", location)).status == "204"
    (left,) = (await client.ask("GET", "/bindings?key=k%2F%C3%BC&src=amq.topic&dstq=q%3B")).body
    assert left["location"] == start
    assert (await client.ask("DELETE", start)).status == "204"
    assert (await client.ask("GET", "/bindings?src=amq.topic&dstq=q%3B&key=k%2F%C3%BC")).body == []


async def test_exchanges_are_bound(client: Manager) -> None:
    body = {"source": "amq.topic", "destination_exchange": "amq.fanout", "binding_key": "k"}
    assert (await client.ask("POST", "/bindings", body)).status == "204"
    (row,) = (await client.ask("GET", "/bindings?src=amq.topic&dste=amq.fanout&key=k")).body
    location = "/bindings/src=amq.topic;dste=amq.fanout;key=k;args="
    assert row == body | {"arguments": {}, "location": location}
    assert (await client.ask("DELETE", location)).status == "204"


BINDING = {"source": "amq.topic", "destination_queue": "q", "binding_key": "k", "arguments": {}}


def without(*words: str, **more: Value) -> dict[str, Value]:
    return {key: value for key, value in BINDING.items() if key not in words} | more


BAD_BINDINGS: Refusals = [
    ("POST", "/bindings", without(destination_queue="none"), "400", "no queue 'none'"),
    ("POST", "/bindings", without(source="none"), "400", "no exchange 'none'"),
    ("POST", "/bindings", without(source=""), "403", "default exchange"),
    ("POST", "/bindings", without("source"), "400", "source"),
    ("POST", "/bindings", without("binding_key"), "400", "binding_key"),
    ("POST", "/bindings", without("destination_queue"), "400", "destination_queue"),
    ("POST", "/bindings", without(destination_exchange="x"), "400", "destination_queue"),
    ("POST", "/bindings", without(more=1), "400", "bad binding property more=1"),
    ("POST", "/bindings", without(binding_key=1), "400", "bad binding property binding_key=1"),
    ("POST", "/bindings", without(destination_queue="a\r"), "400", "line ends"),
    ("POST", "/bindings", without(binding_key="x" * 256), "400", "255"),
    ("POST", "/bindings", None, "400", "map"),
    ("GET", "/bindings", None, "400", "bad binding path segment"),
    ("GET", "/bindings?src=a&key=k", None, "400", "dstq"),
    ("GET", "/bindings?src=a&dstq=b&dste=c&key=k", None, "400", "dstq"),
    ("GET", "/bindings?src=a&dstq=b", None, "400", "key"),
    ("GET", "/bindings?src=a&src=a&dstq=b&key=k", None, "400", "src=a"),
    ("GET", "/bindings?src=%zz&dstq=b&key=k", None, "400", "bad address"),
    ("DELETE", "/bindings/x", None, "400", "bad binding path segment 'x'"),
    ("DELETE", "/bindings/", None, "400", "bad binding path segment"),
    ("DELETE", "/bindings/src=a;dstq=q;key=k", None, "400", "bad binding path segment"),
    ("DELETE", "/bindings/src=;dstq=q;key=k;args=", None, "403", "default exchange"),
]


async def test_a_binding_that_is_refused(client: Manager) -> None:
    await client.ask("PUT", "/queues/q", {})
    await check_refused(client, BAD_BINDINGS)


# --- paths, tokens, permissions --------------------------------------------------------------


BAD_PATHS: Refusals = [
    ("GET", "/", None, "404", ""),
    ("GET", "", None, "404", ""),
    ("GET", "/nothing", None, "404", ""),
    ("GET", "queues/q", None, "404", ""),
    ("GET", "/queues", None, "404", ""),
    ("GET", "/queues/q/other", None, "404", ""),
    ("GET", "/queues/q/messages/1", None, "404", ""),
    ("GET", "/exchanges/x", None, "405", ""),
    ("POST", "/queues/q", None, "405", ""),
    ("GET", "/queues/q/messages", None, "405", ""),
    ("PUT", "/bindings", None, "405", ""),
    ("GET", "/auth/tokens", None, "405", ""),
    ("get", "/queues/q", None, "405", ""),
    ("", "/queues/q", None, "405", ""),
]


async def test_unknown_paths_and_methods(client: Manager) -> None:
    await check_refused(client, BAD_PATHS)


async def test_a_token_has_permissions_asked_again(client: Manager, cluster: FakeCluster) -> None:
    assert (await client.ask("PUT", "/auth/tokens", b"token")).status == "204"
    assert (await client.ask("PUT", "/auth/tokens", "token")).status == "400"
    assert (await client.ask("PUT", "/auth/tokens", Timestamp(1))).status == "400"


async def test_a_link_that_is_not_allowed_any_more_ends_with_a_token(
    cluster: FakeCluster,
) -> None:
    client = await limited(cluster, configure=".*", write=".*", read=".*")
    await client.ask("PUT", "/queues/q", {})
    await client.attach_sender("/queues/q", handle=5)
    rules = {"configure": "", "write": "", "read": ""}
    await cluster.nodes[1].store.execute(PutPermission(user="u", vhost="/", **rules))
    client.request("PUT", "/auth/tokens", b"token")
    (detach,) = of_kind(await client.heard(), Detach)
    assert (detach.handle, detach.error.condition) == (5, "amqp:unauthorized-access")
    assert answer_of(client.payloads[-1]).status == "204"


async def test_a_token_without_the_virtual_host_closes_the_connection(
    cluster: FakeCluster,
) -> None:
    client = await limited(cluster)
    await cluster.nodes[1].store.execute(DeletePermission(user="u", vhost="/"))
    client.request("PUT", "/auth/tokens", b"token")
    close = (await client.heard())[-1]
    assert close.error.condition == "amqp:unauthorized-access"


async def test_a_token_of_oauth_renews_and_ends(cluster: FakeCluster, tmp_path: Path) -> None:
    issue = Tokens(tmp_path)
    user = await issue.backend.log_in("", issue.token())
    assert isinstance(user, Identity)
    client = await limited(cluster, configure=".*", write=".*", read=".*")
    client.connection.user = user
    assert (await client.ask("PUT", "/queues/q", {})).status == "201"
    renewed = issue.token(exp=int(time.time()) + 1200, scope="rabbitmq.read:*/*")
    assert (await client.ask("PUT", "/auth/tokens", renewed)).status == "204"
    assert isinstance(client.connection.user, Identity)
    assert client.connection.user.expires_s == user.expires_s + 600
    assert (await client.ask("PUT", "/queues/q2", {})).status == "403"
    client.request("PUT", "/auth/tokens", issue.token(sub="somebody else"))
    close = (await client.heard())[-1]
    assert (close.error.condition, close.error.description) == (
        "amqp:unauthorized-access",
        "credential update failed: New secret was refused by one of the backends",
    )


async def test_requests_are_in_the_audit_log(cluster: FakeCluster, tmp_path: Path) -> None:
    client = await limited(cluster, configure=".*", write=".*", read=".*")
    output = LogOutput(str(tmp_path / "audit.log"))
    cluster.nodes[1].broker.audit = AuditLog(output, lambda: "one")
    await client.ask("PUT", "/queues/q%2F1", {})
    await client.ask("GET", "/queues/q%2F1")
    await client.ask("PUT", "/auth/tokens", b"hidden")
    await client.ask("DELETE", "/queues/q/other")
    output.close()
    text = (tmp_path / "audit.log").read_text()
    assert "hidden" not in text
    rows = [json.loads(line) for line in text.splitlines()]
    assert [
        (row["user"], row["via"], row["method"], row["path"], row["status"]) for row in rows
    ] == [
        ("u", "amqp10", "PUT", "/ /queues/q%2F1", 201),
        ("u", "amqp10", "PUT", "/ /auth/tokens", 204),
        ("u", "amqp10", "DELETE", "/ /queues/q/other", 404),
    ]


async def test_an_expired_token_closes_the_connection(cluster: FakeCluster) -> None:
    client = await limited(cluster)
    client.connection.expire()
    close = (await client.heard())[-1]
    assert (close.error.condition, close.error.description) == (
        "amqp:unauthorized-access",
        "credential expired",
    )


FORBIDDEN: list[tuple[dict[str, str], str, str, Value, str]] = [
    ({}, "GET", "/queues/q", None, "read access to queue 'q'"),
    ({}, "PUT", "/queues/q", {}, "configure access to queue 'q'"),
    ({}, "DELETE", "/queues/q", None, "configure access to queue 'q'"),
    ({}, "DELETE", "/queues/q/messages", None, "read access to queue 'q'"),
    ({}, "PUT", "/exchanges/x", {}, "configure access to exchange 'x'"),
    ({}, "DELETE", "/exchanges/x", None, "configure access to exchange 'x'"),
    ({}, "POST", "/bindings", BINDING, "write access to queue 'q'"),
    ({"write": ".*"}, "POST", "/bindings", BINDING, "read access to exchange 'amq.topic'"),
    ({}, "GET", "/bindings?src=x&dstq=q&key=k", None, "read access to exchange 'x'"),
    ({}, "DELETE", "/bindings/src=x;dstq=q;key=k;args=", None, "write access to queue 'q'"),
    (
        {"configure": ".*", "write": ".*"},
        "PUT",
        "/queues/q",
        {"arguments": {"x-dead-letter-exchange": "dlx"}},
        "read access to queue 'q'",
    ),
    (
        {"configure": ".*", "read": ".*"},
        "PUT",
        "/exchanges/x",
        {"arguments": {"alternate-exchange": "other"}},
        "write access to exchange 'other'",
    ),
]


async def test_what_a_user_may_not_is_forbidden(cluster: FakeCluster) -> None:
    client = await limited(cluster)
    for granted, method, path, body, text in FORBIDDEN:
        rules = {"configure": "", "write": "", "read": "", **granted}
        await cluster.nodes[1].store.execute(PutPermission(user="u", vhost="/", **rules))
        answer = await client.ask(method, path, body)
        assert (answer.status, answer.body[: len(text)]) == ("403", text)
    # The session lives.
    assert (await client.ask("GET", "/nothing")).status == "404"


@pytest.mark.parametrize("permission", ["configure", "write", "read"])
async def test_any_permission_shows_a_queue(cluster: FakeCluster, permission: str) -> None:
    await cluster.queue(1, "q")
    client = await limited(cluster, **{permission: "^q$"})
    assert (await client.ask("GET", "/queues/q")).status == "200"


async def test_an_answer_that_needs_a_majority_says_so(
    client: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convoymq.model.errors import Unavailable

    async def late(*_: Any, **__: Any) -> None:
        raise Unavailable("no majority in time")

    declarations = client.broker.declarations
    client.connection.broker = SimpleNamespace(  # type: ignore[assignment]
        **{
            name: getattr(client.broker, name)
            for name in ("access", "route_versions", "queue_admin", "tree")
        },
        declarations=SimpleNamespace(
            declare_exchange=late, check_link=declarations.check_link, bind=late
        ),
    )
    answer = await client.ask("PUT", "/exchanges/x", {})
    assert (answer.status, answer.body) == ("503", "no majority in time")
