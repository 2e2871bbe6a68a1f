"""What brokers record for the audit while their master is away; `tests/spark` kills it."""

from __future__ import annotations

from pathlib import Path

from convoymq.model import trace as words
from convoymq.rocketmq.acting.escape import KEY_PROPERTY
from convoymq.rocketmq.acting.roles import State
from convoymq.rocketmq.broker.service import Broker
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.values import TopicConfig
from convoymq.rocketmq.store.types import Draft, PutStatus, encode_properties
from tests.rocketmq.broker_client import Client
from tests.rocketmq.groups import Groups, eventually
from tests.running import until
from tests.unit.trace.broker_group_support import judge
from tests.unit.trace.support import rows_of

TRACED = {"auditTraceEnable": True, "slaveReadEnable": True}


async def read(client: Client, offset: int, end: int) -> None:
    """Pulls up to an offset, which one answer need not reach, and commits it."""
    while offset < end:
        answer = await client.pull("orders", offset)
        assert answer.code == Answer.SUCCESS
        offset = int(answer.fields["nextBeginOffset"])
    done = await client.ask(
        Request.UPDATE_CONSUMER_OFFSET, consumerGroup="g", topic="orders", queueId=0,
        commitOffset=offset,
    )  # fmt: skip
    assert done.code == Answer.SUCCESS


async def test_a_trace_tells_of_a_slave_that_acted(groups: Groups) -> None:
    target = await groups.online("m", 0, totalReplicas=1, **TRACED)
    for name in ("orders", "late"):
        target.topics.create(TopicConfig(name, 1, 1, 6))
    slave = await groups.broker("n", 1, **TRACED)
    master = await groups.online("n", 0, **TRACED)
    master.topics.create(TopicConfig("orders", 1, 1, 6))
    slave.topics.create(TopicConfig("orders", 1, 1, 6))
    for each in (master, slave):
        each.groups.find("g")
    sender = groups.client(master)
    for _ in range(10):
        assert (await sender.send("orders")).code == Answer.SUCCESS
    await until(lambda: slave.store.dispatched == master.store.dispatched > 0)
    await read(sender, 0, 10)
    await groups.stop_broker(master)
    await until(lambda: slave.group.state is State.ACTING and slave.group.services_run)
    await read(groups.client(slave), 4, 10)
    late = Draft("late", 0, b"x", encode_properties({KEY_PROPERTY: "n:SCHEDULE_TOPIC_XXXX:3:1"}))

    async def is_stored() -> bool:
        return (await slave.escape.put(late)).status is PutStatus.PUT_OK

    await eventually(is_stored)
    assert await is_stored()
    master = await groups.online("n", 0, **TRACED)
    sender = groups.client(master)
    for _ in range(10):
        assert (await sender.send("orders")).code == Answer.SUCCESS
    await read(sender, 10, 20)
    await read(sender, 15, 20)
    end = master.store.dispatched
    await until(lambda: slave.store.dispatched == end)
    for each in (master, slave, target):
        await groups.stop_broker(each)
    check(groups.directory, master)


def check(directory: Path, master: Broker) -> None:
    name = master.role.name
    places = [directory / f"{name}-{number}" / "trace" for number in (0, 1)]
    rows = [row for place in places for row in rows_of(place)]
    found = judge(*places)
    assert {key: n for key, n in found.items() if key.startswith("group_")} == {}
    assert found["confirmed"] == 20
    assert found["fate 5"] == 5
    lives = [row["position_command"] for row in rows if row["kind"] == words.LIFE]
    assert lives == [life.number for life in master.replication.lives]
    acted = [row["flags"] for row in rows if row["kind"] == words.ACTING]
    assert acted[:2] == [words.CAME, words.GONE]
    escaped = {row["seq"] for row in rows if row["kind"] == words.ESCAPED}
    taken = [row for row in rows_of(directory / "m-0" / "trace") if row["kind"] == words.TAKEN]
    assert escaped == {row["seq"] for row in taken}
    assert sorted(row["count"] for row in taken)[-2:] == [0, 1]
