"""Groups of RocketMQ's replicas and ours: either may be the master that dies and returns."""

from __future__ import annotations

import asyncio

import pytest

from convoymq.rocketmq.acting.roles import State
from convoymq.rocketmq.broker.service import Broker
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.values import TopicConfig
from convoymq.rocketmq.store.types import encode_properties
from tests.rocketmq.broker_client import Client, records
from tests.rocketmq.groups import Groups
from tests.rocketmq.upstream import broker as rocketmq_broker
from tests.rocketmq.upstream import needs_rocketmq, ports
from tests.running import until

pytestmark = [needs_rocketmq, pytest.mark.optional]

LONG_S = 90.0
"""RocketMQ's replicas register after ten seconds, and copy metadata once a minute."""


def members(groups: Groups) -> dict[int, str]:
    return groups.name_server.tables.member_group("c", "n").broker_addrs


async def answers(client: Client, code: int, **fields: object) -> dict[str, str]:
    """Asks until the broker answers with success."""
    async with asyncio.timeout(LONG_S):
        while True:
            answer = await client.ask(code, **fields)
            if answer.code == Answer.SUCCESS:
                return answer.fields
            await asyncio.sleep(0.1)


def client_of(groups: Groups, port: int) -> Client:
    made = Client(port)
    groups.clients.append(made)
    return made


def settings(groups: Groups, number: int) -> dict[str, object]:
    """Settings of a replica of RocketMQ's."""
    return ports() | {
        "brokerName": "n", "brokerId": number, "namesrvAddr": groups.address,
        "brokerRole": "SLAVE" if number else "ASYNC_MASTER", "enableSlaveActingMaster": "true",
        "totalReplicas": 2, "slaveReadEnable": "true", "enableRemoteEscape": "true",
        "compatibleWithOldNameSrv": "false", "autoCreateTopicEnable": "true",
        # RocketMQ's master waits for a link from the address that its slave registered.
        "brokerIP2": "127.0.0.1",
    }  # fmt: skip


async def test_our_slave_stands_in_for_a_master_of_rocketmqs(groups: Groups) -> None:
    """It copies, acts when the master is killed, and the master that returns takes its offsets."""
    chosen = settings(groups, 0)
    target = await groups.online("m", 0, totalReplicas=1)
    target.topics.create(TopicConfig("orders", 4, 4, 6))
    home = groups.directory / "master"
    with rocketmq_broker(home, **chosen) as process:
        await until(lambda: 0 in members(groups), LONG_S)
        master = client_of(groups, int(str(chosen["listenPort"])))
        await answers(
            master, Request.UPDATE_AND_CREATE_TOPIC, topic="orders", defaultTopic="TBW102",
            readQueueNums=4, writeQueueNums=4, perm=6, topicFilterType="SINGLE_TAG", order="false",
        )  # fmt: skip
        made = await master.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {"groupName": "g"})
        assert made.code == Answer.SUCCESS
        slave = await groups.online("n", 1, **ports())
        for number in range(20):
            assert (await master.send("orders", b"%d" % number)).code == Answer.SUCCESS
        await answers(
            master, Request.UPDATE_CONSUMER_OFFSET, consumerGroup="g", topic="orders", queueId=0,
            commitOffset=5,
        )  # fmt: skip
        await until(lambda: slave.store.queue_max("orders", 0) == 20, LONG_S)
        await until(lambda: slave.offsets.get("g", "orders", 0) == 5, LONG_S)
        delayed = encode_properties({"DELAY": "3"})
        assert (await master.send("orders", b"late", i=delayed.decode())).code == Answer.SUCCESS
        await until(lambda: slave.store.queue_max("SCHEDULE_TOPIC_XXXX", 2) == 1, LONG_S)
        process.kill()
    await until(lambda: slave.group.state is State.ACTING, LONG_S)
    reader = groups.client(slave)
    pulled = await reader.pull("orders")
    assert [bytes(each.body) for each in records(pulled)] == [b"%d" % n for n in range(20)]
    # The message that was not due yet leaves when it is.
    await until(lambda: sum(target.store.queue_max("orders", n) for n in range(4)) == 1, LONG_S)
    await answers(
        reader, Request.UPDATE_CONSUMER_OFFSET, consumerGroup="g", topic="orders", queueId=0,
        commitOffset=15,
    )  # fmt: skip
    with rocketmq_broker(home, **chosen):
        await until(lambda: 0 in members(groups), LONG_S)
        await until(lambda: slave.group.state is State.SLAVE, LONG_S)
        back = client_of(groups, int(str(chosen["listenPort"])))
        found = await answers(
            back, Request.QUERY_CONSUMER_OFFSET, consumerGroup="g", topic="orders", queueId=0
        )
        assert found["offset"] == "15"
        for number in range(20, 25):
            assert (await back.send("orders", b"%d" % number)).code == Answer.SUCCESS
        await until(lambda: slave.store.queue_max("orders", 0) >= 25, LONG_S)


async def test_a_slave_of_rocketmqs_stands_in_for_our_master(groups: Groups) -> None:
    """Our master that returns takes offsets over by maximum, and goes on with the log."""
    own, chosen = ports(), settings(groups, 1)

    async def begin() -> Broker:
        return await groups.broker("n", 0, **own)

    master = await begin()
    await until(lambda: master.group.state is State.MASTER, LONG_S)
    master.topics.create(TopicConfig("orders", 4, 4, 6))
    master.groups.find("g")
    await until(lambda: 0 in members(groups), LONG_S)
    home = groups.directory / "slave"
    with rocketmq_broker(home, **chosen):
        await until(lambda: 1 in members(groups), LONG_S)
        writer = groups.client(master)
        for number in range(20):
            assert (await writer.send("orders", b"%d" % number)).code == Answer.SUCCESS
        master.offsets.commit("g", "orders", 0, 9)
        slave = client_of(groups, int(str(chosen["listenPort"])))

        async def has(count: int) -> None:
            async with asyncio.timeout(LONG_S):
                while True:
                    found = await slave.ask(Request.GET_MAX_OFFSET, topic="orders", queueId=0)
                    if found.fields.get("offset") == str(count):
                        return
                    await asyncio.sleep(0.1)

        await has(20)
        await answers(slave, Request.GET_TOPIC_CONFIG, topic="orders")
        await answers(slave, Request.GET_SUBSCRIPTIONGROUP_CONFIG, group="g")
        await groups.stop_broker(master)
        await until(lambda: 0 not in members(groups), LONG_S)
        await answers(
            slave, Request.UPDATE_CONSUMER_OFFSET, consumerGroup="g", topic="orders", queueId=1,
            commitOffset=3,
        )  # fmt: skip
        back = await begin()
        await until(lambda: back.group.state is State.MASTER, LONG_S)
        assert back.offsets.of("g", "orders") == {0: 9, 1: 3}
        assert (await groups.client(back).send("orders", b"more")).code == Answer.SUCCESS
        await has(21)
