"""Transactions of clients, over real queues of one process: declare, post, retire, discharge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from convoymq.edges.amqp10.config import Amqp10Config
from convoymq.edges.amqp10.performatives import (
    Accepted,
    Attach,
    Composite,
    Coordinator,
    Declare,
    Declared,
    Detach,
    Discharge,
    Disposition,
    End,
    Error,
    Modified,
    Rejected,
    Released,
    Source,
    TransactionalState,
    Transfer,
)
from convoymq.messages.amqp10.values import Described, Symbol, ULong, encode
from convoymq.model.tables import Field
from tests.unit.edges.amqp10.fakes import Client, message, of_kind
from tests.unit.queues.fake_cluster import FakeCluster, until

CONTROL, TO_A, TO_B, FROM_A = 0, 1, 2, 3
QUORUM = {"x-queue-type": Field("S", b"quorum")}
ROLLBACK = "amqp:transaction:rollback"


class TransactedClient(Client):
    """A client with a link to the coordinator, and links to queues a and b."""

    def __init__(self, cluster: FakeCluster, **settings: Any) -> None:
        super().__init__(
            cluster.nodes[1].broker,  # type: ignore[arg-type]
            Amqp10Config(**settings),
        )
        self.cluster = cluster
        self.heard_before: list[Any] = []

    async def rest(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)
            self.shell.output += self.connection.take_output()
        await until(lambda: not len(self.shell.tasks))
        self.shell.output += self.connection.take_output()

    async def begin_work(self, credit: int = 10) -> None:
        await self.open()
        await self.begin()
        await self.attach_control()
        await self.attach_sender("/queues/a", TO_A)
        await self.attach_sender("/queues/b", TO_B)
        await self.attach_receiver("/queues/a", FROM_A)
        self.credit(credit, FROM_A)
        await self.heard()

    async def attach_control(self, **fields: Any) -> list[Any]:
        asked: dict[str, Any] = {"initial_delivery_count": 0, "target": Coordinator()}
        self.send(Attach(name="control", handle=CONTROL, role=False, **(asked | fields)))
        return await self.heard()

    async def ask(self, request: Composite, **fields: Any) -> Any:
        """Returns the outcome of a request to the coordinator."""
        body = encode(Described(ULong(0x77), request.described()))
        id = self.transfer(body, CONTROL, **fields)
        return await self.state_of(id)

    async def state_of(self, id: int) -> Any:
        self.heard_before += await self.heard()
        found = [
            each
            for each in of_kind(self.heard_before, Disposition)
            if each.role and each.first <= id <= (each.first if each.last is None else each.last)
        ]
        assert all(each.settled for each in found)
        return found[-1].state if found else None

    async def declare(self) -> bytes:
        declared = await self.ask(Declare())
        assert isinstance(declared, Declared)
        return declared.txn_id

    async def post(self, id: bytes, handle: int = TO_A, body: bytes = b"x", **fields: Any) -> Any:
        state = TransactionalState(txn_id=id)
        return await self.state_of(self.transfer(message(body), handle, state=state, **fields))

    async def retire(
        self, id: bytes, first: int, outcome: Any = None, *, settled: bool = False, **fields: Any
    ) -> list[Any]:
        state = TransactionalState(txn_id=id, outcome=outcome or Accepted())
        self.send(Disposition(role=True, first=first, settled=settled, state=state, **fields))
        return await self.heard()

    async def discharge(self, id: bytes, *, fail: bool = False) -> Any:
        return await self.ask(Discharge(txn_id=id, fail=fail))

    async def fill(self, *bodies: bytes) -> None:
        """Publishes to a, and takes what comes."""
        for body in bodies:
            self.transfer(message(body), TO_A, settled=True)
        self.heard_before += await self.heard()

    def counts(self, name: str) -> tuple[int, int]:
        """(ready, unacknowledged)"""
        machine = self.machine(name)
        return machine.backlog.stored(), machine.backlog.unacked

    def machine(self, name: str) -> Any:
        queue = self.cluster.nodes[1].broker.queue_admin.find_queue("/", name, 0)
        group = self.cluster.groups[queue.group]
        return group.replicas[group.leader].machine


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        made.raise_versions()
        for name in ("a", "b"):
            await made.queue(1, name, arguments=QUORUM)
        await made.queue(1, "classic", arguments={"x-queue-type": Field("S", b"classic")})
        yield made


@pytest.fixture
async def client(cluster: FakeCluster) -> TransactedClient:
    made = TransactedClient(cluster)
    await made.begin_work()
    return made


def condition(outcome: Any) -> str:
    assert isinstance(outcome, Rejected)
    assert isinstance(outcome.error, Error)
    return str(outcome.error.condition)


def text(outcome: Any) -> str:
    assert isinstance(outcome.error, Error)
    return str(outcome.error.description)


# What ends well


async def test_the_coordinator_says_what_it_can(cluster: FakeCluster) -> None:
    made = TransactedClient(cluster)
    await made.open()
    await made.begin()
    attach, flow = await made.attach_control()
    assert attach.target.capabilities == ("amqp:local-transactions", "amqp:multi-txns-per-ssn")
    assert flow.link_credit > 0


async def test_messages_of_a_transaction_enter_together(client: TransactedClient) -> None:
    id = await client.declare()
    assert await client.post(id, TO_A) == TransactionalState(txn_id=id, outcome=Accepted())
    await client.post(id, TO_B, settled=True)
    assert (client.counts("a"), client.counts("b")) == ((0, 0), (0, 0))
    assert await client.discharge(id) == Accepted()
    assert (client.counts("a"), client.counts("b")) == ((0, 1), (1, 0))
    assert not client.machine("a").transactions.is_open
    assert not client.machine("b").transactions.is_open


async def test_one_queue_takes_one_entry(client: TransactedClient) -> None:
    await client.fill(b"in")
    id = await client.declare()
    await client.post(id)
    await client.retire(id, 0)
    index = client.machine("a").index
    assert await client.discharge(id) == Accepted()
    # And one of the credit that it has used up.
    assert client.machine("a").index - index <= 2
    assert client.machine("a").backlog.acked == 1


async def test_a_commit_settles_what_its_client_has_not(client: TransactedClient) -> None:
    await client.fill(b"1", b"2", b"3")
    id = await client.declare()
    await client.retire(id, 0)
    await client.retire(id, 1, Rejected(), settled=True)
    await client.retire(id, 2, Modified(delivery_failed=True))
    assert client.counts("a") == (0, 3)
    assert await client.discharge(id) == Accepted()
    told = [d for d in of_kind(client.heard_before, Disposition) if not d.role]
    assert [(d.first, d.settled, type(d.state)) for d in told] == [
        (0, True, Accepted),
        (2, True, Modified),
    ]
    backlog = client.machine("a").backlog
    assert (backlog.acked, backlog.dropped["rejected"], backlog.returns) == (1, 1, 1)


async def test_an_empty_transaction_commits(client: TransactedClient) -> None:
    assert await client.discharge(await client.declare()) == Accepted()


async def test_transactions_of_a_session_do_not_mix(client: TransactedClient) -> None:
    one, other = await client.declare(), await client.declare()
    await client.post(one, TO_B, b"1")
    await client.post(other, TO_B, b"2")
    assert await client.discharge(one, fail=True) == Accepted()
    assert await client.discharge(other) == Accepted()
    assert client.counts("b") == (1, 0)


# Rollback


async def test_a_rollback_leaves_deliveries_as_they_were(client: TransactedClient) -> None:
    await client.fill(b"1", b"2")
    id = await client.declare()
    await client.post(id, TO_B)
    await client.retire(id, 0)
    await client.retire(id, 1, settled=True)
    assert await client.discharge(id, fail=True) == Accepted()
    assert client.counts("b") == (0, 0)
    # What the client has forgotten comes again; the other one it may still settle.
    assert len(of_kind(client.heard_before, Transfer)) == 3
    client.settle(0, Accepted())
    await client.heard()
    assert client.counts("a") == (0, 1)
    assert client.machine("a").backlog.acked == 1


@pytest.mark.parametrize("how", ["detach", "end"])
async def test_the_end_of_the_coordinator_rolls_back(client: TransactedClient, how: str) -> None:
    await client.fill(b"1")
    id = await client.declare()
    await client.post(id, TO_B)
    await client.retire(id, 0, settled=True)
    client.send(Detach(handle=CONTROL, closed=True) if how == "detach" else End())
    await client.heard()
    session = client.connection.sessions_open.get(0)
    assert session is None or not session.transactions.open
    assert sum(client.counts("a")) == 1
    assert client.counts("b") == (0, 0)


async def test_a_transaction_that_takes_too_long(cluster: FakeCluster) -> None:
    client = TransactedClient(cluster, transaction_timeout_ms=5_000)
    await client.begin_work()
    id = await client.declare()
    await client.post(id, TO_B)
    client.shell.advance(6)
    late = await client.post(id, TO_B)
    assert condition(late.outcome) == "amqp:transaction:timeout"
    refused = await client.discharge(id)
    assert condition(refused) == "amqp:transaction:timeout"
    assert text(refused) == "transaction not discharged within 5000 ms"
    assert client.counts("b") == (0, 0)


async def test_a_delivery_that_went_back_fails_the_commit(client: TransactedClient) -> None:
    await client.fill(b"1")
    id = await client.declare()
    await client.post(id, TO_B)
    await client.retire(id, 0)
    client.send(Detach(handle=FROM_A, closed=True))
    await client.heard()
    refused = await client.discharge(id)
    assert condition(refused) == ROLLBACK
    assert "a delivery of the transaction went back to it" in text(refused)
    assert (client.counts("a"), client.counts("b")) == ((1, 0), (0, 0))


async def test_a_queue_that_does_not_commit_undoes_the_others(client: TransactedClient) -> None:
    await client.fill(b"1")
    id = await client.declare()
    await client.post(id, TO_B)
    await client.retire(id, 0)
    # The queue has taken it back, and nobody here knows.
    machine = client.machine("a")
    (consumer,) = machine.consumers.all()
    machine.deliveries.give_back_all(consumer, 0)
    refused = await client.discharge(id)
    assert condition(refused) == ROLLBACK
    assert "not held by its consumer any more" in text(refused)
    assert client.counts("b") == (0, 0)
    assert not client.machine("b").transactions.is_open
    told = [d for d in of_kind(client.heard_before, Disposition) if not d.role]
    assert [(d.first, d.state) for d in told] == [(0, Released())]


# Refusals


async def test_a_transaction_that_nobody_declared(client: TransactedClient) -> None:
    refused = await client.discharge(b"none")
    assert condition(refused) == "amqp:transaction:unknown-id"
    assert text(refused) == "unknown transaction 'none'"
    await client.fill(b"1")
    found = await client.retire(b"none", 0)
    (detach,) = of_kind(found, Detach)
    assert (detach.handle, detach.error.condition) == (FROM_A, "amqp:transaction:unknown-id")
    await client.heard()
    assert client.counts("a") == (1, 0)
    assert condition(await client.post(b"none", TO_B)) == "amqp:transaction:unknown-id"
    await client.post(b"none", TO_B, settled=True)
    (detach,) = [d for d in of_kind(client.heard_before, Detach) if d.handle == TO_B]
    assert detach.error.condition == "amqp:transaction:unknown-id"


async def test_a_queue_that_takes_no_part_breaks_the_transaction(client: TransactedClient) -> None:
    await client.attach_sender("/queues/classic", 5)
    id = await client.declare()
    await client.post(id, TO_B)
    state = await client.post(id, 5)
    assert state.txn_id == id
    assert condition(state.outcome) == "amqp:not-implemented"
    assert text(state.outcome).endswith("of type classic takes no part in transactions")
    refused = await client.discharge(id)
    assert (condition(refused), text(refused)) == (ROLLBACK, text(state.outcome))
    assert client.counts("b") == (0, 0)


async def test_a_delivery_of_a_queue_that_takes_no_part(client: TransactedClient) -> None:
    await client.attach_sender("/queues/classic", 5)
    await client.attach_receiver("/queues/classic", 6)
    client.credit(1, 6)
    client.transfer(message(), 5, settled=True)
    (transfer,) = of_kind(await client.heard(), Transfer)
    id = await client.declare()
    (detach,) = of_kind(await client.retire(id, transfer.delivery_id), Detach)
    assert (detach.handle, detach.error.condition) == (6, "amqp:not-implemented")
    assert condition(await client.discharge(id)) == ROLLBACK


async def test_a_message_that_reaches_no_queue_breaks_the_transaction(
    client: TransactedClient,
) -> None:
    await client.attach_sender("/exchanges/amq.direct/nowhere", 5)
    id = await client.declare()
    state = await client.post(id, 5)
    assert state == TransactionalState(txn_id=id, outcome=Released())
    refused = await client.discharge(id)
    assert (condition(refused), text(refused)) == (
        ROLLBACK,
        "a message of the transaction reaches no queue",
    )


async def test_a_settled_message_that_is_refused_detaches_its_link(
    client: TransactedClient,
) -> None:
    await client.attach_sender("/queues/classic", 5)
    id = await client.declare()
    await client.post(id, 5, settled=True)
    (detach,) = of_kind(client.heard_before, Detach)
    assert (detach.handle, detach.error.condition) == (5, "amqp:not-implemented")
    assert condition(await client.discharge(id)) == ROLLBACK


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"transaction_messages_max": 1}, "transactions of a session have at most 1 messages"),
        ({"transaction_bytes_max": 200}, "transactions of a session hold at most 200 bytes"),
    ],
)
async def test_a_transaction_has_limits(
    cluster: FakeCluster, limits: dict[str, int], said: str
) -> None:
    client = TransactedClient(cluster, **limits)
    await client.begin_work()
    id = await client.declare()
    await client.post(id, TO_B, b"x")
    state = await client.post(id, TO_B, bytes(300))
    assert condition(state.outcome) == "amqp:resource-limit-exceeded"
    assert text(state.outcome) == said
    assert condition(await client.discharge(id)) == ROLLBACK


async def test_so_many_transactions_of_a_connection(cluster: FakeCluster) -> None:
    client = TransactedClient(cluster, transactions_max=1)
    await client.begin_work()
    id = await client.declare()
    refused = await client.ask(Declare())
    assert condition(refused) == "amqp:resource-limit-exceeded"
    assert text(refused) == "a connection has at most 1 transactions at a time"
    await client.discharge(id)
    await client.declare()


async def test_distributed_transactions_are_refused(client: TransactedClient) -> None:
    assert condition(await client.ask(Declare(global_id=b"g"))) == "amqp:not-implemented"


@pytest.mark.parametrize(
    ("payload", "fields", "wanted"),
    [
        (encode(Described(ULong(0x77), Accepted().described())), {}, "amqp:not-implemented"),
        (b"\x00", {}, "amqp:decode-error"),
        (message(), {}, "amqp:decode-error"),
        (
            encode(Described(ULong(0x77), Declare().described())),
            {"settled": True},
            "amqp:invalid-field",
        ),
    ],
)
async def test_requests_that_a_coordinator_does_not_know(
    client: TransactedClient, payload: bytes, fields: dict[str, Any], wanted: str
) -> None:
    state = await client.state_of(client.transfer(payload, CONTROL, **fields))
    if wanted == "amqp:not-implemented":
        assert condition(state) == wanted
        return
    (detach,) = of_kind(client.heard_before, Detach)
    assert (detach.handle, detach.error.condition) == (CONTROL, wanted)


async def test_a_client_that_hears_no_rejections_is_detached(cluster: FakeCluster) -> None:
    client = TransactedClient(cluster)
    await client.open()
    await client.begin()
    await client.attach_control(source=Source(outcomes=("amqp:accepted:list",)))
    await client.discharge(b"none")
    (detach,) = of_kind(client.heard_before, Detach)
    assert detach.error.condition == "amqp:transaction:unknown-id"


@pytest.mark.parametrize(
    "fields",
    [
        {"snd_settle_mode": 1},
        {"initial_delivery_count": None},
        {"role": True, "source": Source(address="/queues/a")},
    ],
)
async def test_a_link_that_no_coordinator_takes(
    cluster: FakeCluster, fields: dict[str, Any]
) -> None:
    client = TransactedClient(cluster)
    await client.open()
    await client.begin()
    asked = {"name": "control", "handle": 0, "role": False, "initial_delivery_count": 0}
    client.send(Attach(**(asked | {"target": Coordinator()} | fields)))  # type: ignore[arg-type]
    (detach,) = of_kind(await client.heard(), Detach)
    assert detach.error.condition == "amqp:invalid-field"


async def test_acquisition_in_a_transaction_is_refused(client: TransactedClient) -> None:
    client.credit(1, FROM_A, properties={Symbol("txn-id"): await client.declare()})
    (detach,) = of_kind(await client.heard(), Detach)
    assert (detach.handle, detach.error.condition) == (FROM_A, "amqp:not-implemented")


async def test_an_outcome_that_is_none_ends_the_session(client: TransactedClient) -> None:
    await client.fill(b"1")
    id = await client.declare()
    (end,) = of_kind(await client.retire(id, 0, Declared(txn_id=b"")), End)
    assert end.error.condition == "amqp:invalid-field"


async def test_queues_of_an_older_release_take_no_part(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path, nodes=1) as cluster:
        for name in ("a", "b"):
            await cluster.queue(1, name, arguments=QUORUM)
        client = TransactedClient(cluster)
        await client.open()
        await client.begin()
        await client.attach_control()
        await client.attach_sender("/queues/a", TO_A)
        state = await client.post(await client.declare(), TO_A)
        assert condition(state.outcome) == "amqp:not-implemented"
