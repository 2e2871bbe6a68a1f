"""Groups of brokers in this process: roles, locks, escape, metadata, with a real name server."""

from __future__ import annotations

import asyncio

import pytest

from convoymq.model.errors import StorageFault, Unavailable
from convoymq.rocketmq.acting import key_log
from convoymq.rocketmq.acting.escape import KEY_FIELD, KEY_PROPERTY, home_number
from convoymq.rocketmq.acting.lock_requests import place_of
from convoymq.rocketmq.acting.locks import Queue
from convoymq.rocketmq.acting.metadata import Metadata
from convoymq.rocketmq.acting.roles import State
from convoymq.rocketmq.broker.service import Broker
from convoymq.rocketmq.broker.users import User
from convoymq.rocketmq.broker.values import LockBody, LockedBody, MessageQueue
from convoymq.rocketmq.namesrv.tables import TIMEOUT_MS, Registration, Replica
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command
from convoymq.rocketmq.remoting.values import EscapeKeys, RouteData, TopicConfig, TopicTable
from convoymq.rocketmq.special.pop import Pops
from convoymq.rocketmq.special.pop_records import Ack, Receipt
from convoymq.rocketmq.special.service import SpecialServices
from convoymq.rocketmq.store.types import Draft, Message, PutStatus, encode_properties
from tests.patience import PATIENCE_S
from tests.rocketmq.broker_client import Client, records
from tests.rocketmq.groups import Groups, eventually
from tests.running import until

POP_MS = 24 * 3600 * 1000
"""Invisible time of popped messages."""


def queue(number: int = 0) -> MessageQueue:
    return MessageQueue("orders", "n", number)


async def lock(client: Client, client_id: str, *queues: MessageQueue) -> list[MessageQueue]:
    body = LockBody(consumer_group="g", client_id=client_id, mq_set=list(queues))
    answer = await client.ask(Request.LOCK_BATCH_MQ, body)
    assert answer.code == Answer.SUCCESS
    return json.loads(answer.body, LockedBody).locked


async def unlock(client: Client, client_id: str, *queues: MessageQueue) -> None:
    body = LockBody(consumer_group="g", client_id=client_id, mq_set=list(queues))
    assert (await client.ask(Request.UNLOCK_BATCH_MQ, body)).code == Answer.SUCCESS


# --- roles -------------------------------------------------------------------------------------


def listed(
    groups: Groups, name: str, number: int, port: int, ha_address: str = "",
    timeout_ms: int = TIMEOUT_MS,
) -> Replica:  # fmt: skip
    """Has the name server list a replica that is not there."""
    replica = Replica(cluster="c", broker=name, id=number, address=f"127.0.0.1:{port}")
    registration = Registration(
        replica=replica, ha_address=ha_address, timeout_ms=timeout_ms, enable_acting_master=True,
        topics=TopicTable({"a": TopicConfig("a"), "b": TopicConfig("b")}),
    )  # fmt: skip
    groups.name_server.tables.register(registration, object(), groups.now_ms())
    return replica


@pytest.mark.provokes(
    "rocketmq.role", "rocketmq.online", "rocketmq.services_started", "rocketmq.services_stopped",
    "rocketmq.member_silent",
)  # fmt: skip
async def test_a_slave_alone_acts_until_a_master_takes_over(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a broker that may have its messages, until that is not listed any more."""
    monkeypatch.setattr(key_log, "HOLDER_MS", 1)
    listed(groups, "gone", 0, 1, timeout_ms=1000)
    slave = await groups.online("n", 1)
    assert slave.group.state is State.ACTING
    assert slave.group.services_run
    assert slave.group.failures
    client = groups.client(slave)
    assert (await client.send("TBW102")).code == Answer.SERVICE_NOT_AVAILABLE
    answer = await client.ask(Request.HAND_OVER_SERVICES, brokerName="n")
    assert answer.code == Answer.SUCCESS
    assert not slave.group.services_run


async def test_a_slave_waits_for_no_broker_that_it_has_never_sent_to(groups: Groups) -> None:
    """Delayed messages of a group must not wait until a broker of another one is dropped."""
    slave = await groups.online("n", 1)
    await groups.stop_broker(slave)
    listed(groups, "gone", 0, 1, timeout_ms=1 << 40)
    slave = await groups.online("n", 1)
    assert slave.group.services_run


@pytest.mark.provokes("rocketmq.pre_online_waits")
async def test_a_master_waits_for_the_members_that_are_listed(groups: Groups) -> None:
    """They may have what it lacks."""
    slave = listed(groups, "n", 1, 1)
    master = await groups.broker("n", 0)
    await until(lambda: master.group.failures)
    assert master.role.is_isolated
    groups.name_server.tables.unregister([slave])
    await until(lambda: master.group.state is State.MASTER)


@pytest.mark.provokes("rocketmq.step_failed")
async def test_a_replica_that_skips_pre_online_is_online_at_once(groups: Groups) -> None:
    """Its master is listed and does not answer: what has to be asked of it is asked again."""
    listed(groups, "n", 0, 1)
    slave = await groups.online("n", 1, skipPreOnline=True)
    assert slave.group.state is State.SLAVE
    await until(lambda: slave.group.failures)


@pytest.mark.provokes("rocketmq.attached", "rocketmq.detached")
async def test_a_slave_follows_where_slaves_do_not_act(groups: Groups) -> None:
    first = listed(groups, "n", 0, 1, "127.0.0.1:2")
    slave = await groups.online("n", 1, enableSlaveActingMaster=False)
    await until(lambda: slave.group.master == "127.0.0.1:1")
    groups.name_server.tables.unregister([first])
    listed(groups, "n", 0, 3, "127.0.0.1:4")
    await slave.registrar.register_all()
    await until(lambda: slave.group.master == "127.0.0.1:3")
    assert slave.group.state is State.SLAVE


async def test_of_two_slaves_the_smaller_acts(groups: Groups) -> None:
    first = await groups.online("n", 1)
    second = await groups.online("n", 2)
    assert (first.group.state, second.group.state) == (State.ACTING, State.SLAVE)
    await groups.stop_broker(first)
    await until(lambda: second.group.state is State.ACTING)


async def test_an_isolated_replica_serves_nothing(groups: Groups) -> None:
    groups.address = "127.0.0.1:9"
    master = await groups.broker("n", 0)
    assert master.role.is_isolated
    client = groups.client(master)
    assert (await client.send("TBW102")).code == Answer.SERVICE_NOT_AVAILABLE


# --- metadata ----------------------------------------------------------------------------------


# --- locks -------------------------------------------------------------------------------------


def place(number: int) -> Queue:
    return place_of(queue(number))


async def test_one_of_two_locks_alone_where_it_is_not_strict(groups: Groups) -> None:
    slave = await groups.online("n", 1)
    assert await lock(groups.client(slave), "a", queue()) == [queue()]


async def test_a_pull_without_the_lock_waits_for_its_next_turn(groups: Groups) -> None:
    """RocketMQ's broker answers whoever asks: the former holder of the lock reads on."""
    master = await groups.online("n", 0)
    master.topics.create(TopicConfig("orders", 4, 4, 6))
    first, second = groups.client(master), groups.client(master)
    await first.heartbeat("a", orders="*")
    await second.heartbeat("b", orders="*")
    assert await lock(first, "a", queue())
    assert (await first.pull("orders")).code == Answer.PULL_NOT_FOUND
    assert (await second.pull("orders")).code == Answer.SYSTEM_BUSY
    await unlock(first, "a", queue())
    assert await lock(second, "b", queue())
    assert (await first.pull("orders")).code == Answer.SYSTEM_BUSY
    assert (await second.pull("orders")).code == Answer.PULL_NOT_FOUND


# --- escape ------------------------------------------------------------------------------------


def draft(offset: int, topic: str = "orders") -> Draft:
    properties = encode_properties({KEY_PROPERTY: f"n:SCHEDULE_TOPIC_XXXX:3:{offset}"})
    return Draft(topic, 0, b"late", properties)


async def count(broker: Broker, topic: str = "orders") -> int:
    config = broker.topics.get(topic)
    assert config is not None
    return sum(broker.store.queue_max(topic, n) for n in range(config.write_queue_nums))


@pytest.mark.provokes("rocketmq.escape_repeated")
async def test_a_message_escapes_once(groups: Groups) -> None:
    """RocketMQ stores what it is sent: a time-out, or a master that returns, doubles it."""
    target = await groups.online("m", 0, totalReplicas=1)
    target.topics.create(TopicConfig("orders", 4, 4, 6))
    acting = await groups.online("n", 1)
    await eventually(lambda: route_of(groups, "orders"))
    for offset in (5, 6, 6, 7, 5):
        placed = await acting.escape.put(draft(offset))
        assert placed.status is PutStatus.PUT_OK
    await until(lambda: target.store.dispatched == target.store.max_offset)
    assert await count(target) == 3
    # After a restart the log tells.
    await groups.stop_broker(target)
    (groups.directory / "m-0" / "config" / "escapeKeys.json").unlink()
    target = await groups.online("m", 0, totalReplicas=1)
    await eventually(lambda: route_of(groups, "orders"))
    async with asyncio.timeout(PATIENCE_S):
        while (await acting.escape.put(draft(6))).status is not PutStatus.PUT_OK:
            await asyncio.sleep(0.05)
    assert await count(target) == 3
    answer = await groups.client(target).ask(Request.GET_ESCAPE_KEYS, brokerName="n")
    assert b'"ranges":{"SCHEDULE_TOPIC_XXXX:3":[[5,8]]}' in bytes(answer.body)


async def test_what_a_replica_sent_before_another_took_over_is_refused(groups: Groups) -> None:
    """It may have been under way while the next one asked what had left: RocketMQ stores it, and
    the next one sends the message again."""
    target = await groups.online("m", 0, totalReplicas=1)
    target.topics.create(TopicConfig("orders", 4, 4, 6))
    acting = await groups.online("n", 1)
    await until(lambda: acting.group.services_run)
    await eventually(lambda: route_of(groups, "orders"))
    assert (await acting.escape.put(draft(1))).status is PutStatus.PUT_OK
    client = groups.client(target)
    ahead = acting.now_ms() + 1_000_000
    await client.ask(Request.GET_ESCAPE_KEYS, brokerName="n", generation=ahead)
    assert (await acting.escape.put(draft(2))).status is PutStatus.PUT_TO_REMOTE_BROKER_FAIL
    # After a restart as well; and a replica whose clock is behind finds out.
    await groups.stop_broker(acting)
    await groups.stop_broker(target)
    target = await groups.online("m", 0, totalReplicas=1)
    refused = await groups.client(target).send(
        "orders", escapeKey="n:SCHEDULE_TOPIC_XXXX:3:2", escapeGeneration=ahead - 1
    )
    assert refused.code == Answer.SERVICE_NOT_AVAILABLE
    acting = await groups.online("n", 1)
    await until(lambda: acting.group.services_run)
    await eventually(lambda: route_of(groups, "orders"))
    assert (await acting.escape.put(draft(2))).status is PutStatus.PUT_OK
    assert await count(target) == 2


async def route_of(groups: Groups, topic: str, broker: str = "") -> RouteData | None:
    found = groups.name_server.tables.route(topic)
    names = [] if found is None else [queue.broker_name for queue in found.queue_datas]
    return found if not broker or broker in names else None


async def test_brokers_of_the_cluster_are_looked_for_as_often_as_members(groups: Groups) -> None:
    """Found by seed 900616 of the load `acting`: a slave that looked each five seconds knew nothing
    of a broker that had just started, had got messages of another slave, and was down."""
    slave = await groups.online("n", 1)
    calls: list[str] = []
    servers, learner = slave.registrar.servers, slave.group.learner
    members, look = servers.members, learner.look_for_holders

    async def count_members() -> dict[int, str] | None:
        calls.append("members")
        return await members()

    async def count_looks() -> bool:
        calls.append("brokers")
        return await look()

    servers.members = count_members  # type: ignore[method-assign]
    learner.look_for_holders = count_looks  # type: ignore[method-assign]
    await until(lambda: len(calls) > 10)
    assert abs(calls.count("members") - calls.count("brokers")) <= 1


async def test_a_slave_that_named_its_targets_begins_with_no_other(groups: Groups) -> None:
    """The replica that asked does not ask other brokers what they have."""
    for name in ("m", "o"):
        target = await groups.online(name, 0, totalReplicas=1)
        target.topics.create(TopicConfig(f"of-{name}", 4, 4, 6))
        await eventually(lambda name=name: route_of(groups, f"of-{name}"))
    acting = await groups.online("n", 1)
    await until(lambda: acting.group.services_run)
    assert (await acting.escape.put(draft(1, "of-m"))).status is PutStatus.PUT_OK
    fields = {"brokerName": "n", "generation": acting.now_ms() + 1_000_000}
    answer = await groups.client(acting).ask(Request.GET_ESCAPE_KEYS, **fields)
    assert json.loads(answer.body, EscapeKeys).targets == ["m"]
    assert (await acting.escape.put(draft(2, "of-m"))).status is PutStatus.PUT_OK
    placed = await acting.escape.put(draft(3, "of-o"))
    assert placed.status is PutStatus.PUT_TO_REMOTE_BROKER_FAIL


async def test_a_target_that_one_slave_names_is_waited_for(groups: Groups) -> None:
    """Though another slave does not name its own, and no name server lists this one. Found by the
    simulator: a timed message was delivered twice."""
    more = {"totalReplicas": 3}
    target = await groups.online("m", 0, totalReplicas=1)
    target.topics.create(TopicConfig("orders", 4, 4, 6))
    await eventually(lambda: route_of(groups, "orders"))
    acting = await groups.online("n", 1, **more)
    await until(lambda: acting.group.services_run)
    assert (await acting.escape.put(draft(1))).status is PutStatus.PUT_OK
    await groups.stop_broker(target)
    other = await groups.online("n", 2, **more)
    await until(lambda: 1 in other.group.members)
    with pytest.raises(Unavailable, match=r"\['m'\] may have messages of n, and are not listed"):
        await other.group.learner.learn()


async def test_a_target_that_cannot_promise_anything_is_waited_for(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is full, and it has messages of the group. Found by the simulator: its answer was
    taken for that of a broker of RocketMQ's, and a timed message was delivered twice."""
    target = await groups.online("m", 0, totalReplicas=1)
    target.topics.create(TopicConfig("orders", 4, 4, 6))
    acting = await groups.online("n", 1)
    await until(lambda: acting.group.services_run)
    await eventually(lambda: route_of(groups, "orders"))
    assert (await acting.escape.put(draft(1))).status is PutStatus.PUT_OK

    def is_full(*_: object) -> None:
        raise StorageFault("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(target.group._keys, "persist", is_full)
        with pytest.raises(Unavailable, match="m may have messages of n, and does not answer"):
            await acting.group.learner.learn()
    await acting.group.learner.learn()


@pytest.mark.provokes("rocketmq.escape_failed")
async def test_a_message_that_cannot_escape_waits(groups: Groups) -> None:
    acting = await groups.online("n", 1)
    failed = PutStatus.PUT_TO_REMOTE_BROKER_FAIL
    assert (await acting.escape.put(draft(1))).status is failed
    target = await groups.online("m", 0, totalReplicas=1)
    target.topics.create(TopicConfig("orders", 1, 1, 4))
    target.topics.create(TopicConfig("writable", 1, 1, 6))
    await eventually(lambda: route_of(groups, "orders"))
    # Nobody may write to the topic.
    assert (await acting.escape.put(draft(1))).status is failed
    await eventually(lambda: route_of(groups, "writable"))
    # The name server has not heard yet that the topic takes nothing any more.
    target.topics.table["writable"].perm = 4
    assert (await acting.escape.put(draft(2, "writable"))).status is failed
    target.topics.table["writable"].perm = 6
    async with asyncio.timeout(PATIENCE_S):
        while (await acting.escape.put(draft(2, "writable"))).status is not PutStatus.PUT_OK:
            await asyncio.sleep(0.05)
    assert await count(target, "writable") == 1


async def test_records_of_pop_escape_to_the_broker_of_a_number(groups: Groups) -> None:
    acting = await groups.online("n", 1)
    assert await acting.escape.home("revive") is None
    for name in ("m", "o"):
        target = await groups.online(name, 0, totalReplicas=1)
        target.topics.create(TopicConfig("revive", 1, 1, 6))
        await eventually(lambda name=name: route_of(groups, "revive", name))
    home = await acting.escape.home("revive")
    assert home in map(home_number, "mo")
    for offset in range(3):
        placed = await acting.escape.put_at(draft(offset, "revive"), home_number("o"))
        assert placed.status is PutStatus.PUT_OK
    assert await count(target, "revive") == 3
    message = await acting.escape.get("revive", 0, 2, "o")
    assert message is not None
    assert message.properties[KEY_PROPERTY].endswith(":2")
    assert await acting.escape.get("revive", 0, 77, "o") is None
    assert await acting.escape.get("revive", 0, 0, "gone") is None
    failed = await acting.escape.put_at(draft(3, "revive"), home_number("gone"))
    assert failed.status is PutStatus.PUT_TO_REMOTE_BROKER_FAIL


async def taken(client: Client, at: str, count: int) -> list[tuple[str, Message]]:
    """Pops from a queue; returns messages with their receipts."""
    answer = await client.ask(
        Request.POP_MESSAGE, consumerGroup="g", topic="pops", queueId=0, maxMsgNums=count,
        invisibleTime=POP_MS, pollTime=0, bornTime=0, initMode=0, expType="TAG", exp="*",
        order=False,
    )  # fmt: skip
    found = []
    for message in records(answer) if answer.code == Answer.SUCCESS else []:
        info = message.properties.get("POP_CK")
        if info is None:
            start, fields = answer.fields["startOffsetInfo"].split(" ")[2], answer.fields
            info = f"{start} {fields['popTime']} {fields['invisibleTime']} {fields['reviveQid']}"
            info += f" 0 {at} 0 {message.queue_offset}"
        found.append((info, message))
    return found


def pops_of(broker: Broker) -> Pops:
    (found,) = broker.specials
    assert isinstance(found, SpecialServices)
    return found.state.pops


async def acknowledge(client: Client, info: str, message: Message) -> int:
    answer = await client.ask(
        Request.ACK_MESSAGE, consumerGroup="g", topic="pops", queueId=0, extraInfo=info,
        offset=message.queue_offset,
    )  # fmt: skip
    return answer.code


async def test_acknowledged_pops_do_not_come_again_when_a_second_slave_acts(
    groups: Groups,
) -> None:
    """Each replica acknowledges what the one before it gave out, and goes on behind it. RocketMQ's
    slaves let records of one pop leave for different brokers, and begin at old offsets."""
    settings = {"totalReplicas": 3, "brokerNotActiveTimeoutMillis": 500}
    targets = [await groups.online(name, 0, totalReplicas=1) for name in ("m", "o")]
    for target in targets:
        target.topics.create(TopicConfig("pops", 1, 1, 6))
    master = await groups.online("n", 0, brokerRole="SYNC_MASTER", inSyncReplicas=3, **settings)
    master.topics.create(TopicConfig("pops", 1, 1, 6))
    slaves = [await groups.online("n", number, **settings) for number in (1, 2)]
    client = groups.client(master)
    for number in range(6):
        while (await client.send("pops", b"%d" % number)).code != Answer.SUCCESS:
            # Nothing is stored before both slaves follow.
            await asyncio.sleep(0.05)
    of_master = await taken(client, "n", 2)
    await until(lambda: all("pops" in slave.topics.table for slave in slaves))
    await groups.stop_broker(master)
    await until(lambda: slaves[0].group.services_run)
    client = groups.client(slaves[0])
    assert await acknowledge(client, *of_master[0]) == Answer.SUCCESS
    of_first = await taken(client, "n", 2)
    assert [bytes(m.body) for _, m in (*of_master, *of_first)] == [b"0", b"1", b"2", b"3"]
    assert await acknowledge(client, *of_first[0]) == Answer.SUCCESS
    await groups.stop_broker(slaves[0])
    await until(lambda: slaves[1].group.services_run)
    client = groups.client(slaves[1])
    # Popped at the first slave, whose checkpoint is at another broker.
    assert await acknowledge(client, *of_first[1]) == Answer.SUCCESS
    of_second = await taken(client, "n", 1)
    assert [bytes(m.body) for _, m in of_second] == [b"4"]
    back = await groups.online("n", 0, brokerRole="SYNC_MASTER", inSyncReplicas=2, **settings)
    await until(lambda: back.group.services_run)
    client = groups.client(back)
    assert await acknowledge(client, *of_second[0]) == Answer.SUCCESS
    assert [bytes(m.body) for _, m in await taken(client, "n", 8)] == [b"5"]
    # Message 0 was acknowledged at the first slave.
    popped = Receipt.parse(of_master[0][0])
    both = Ack(start=popped.start, group="g", topic="pops", queue=0, pop_ms=popped.pop_ms,
               broker="n", offsets=[0, 1])  # fmt: skip
    assert [each.offset for _, each in pops_of(back).keys_of(both)] == [1]
    # Of all pops, those of messages 1 and 5 are open.
    await until(lambda: len(pops_of(back)) == 2)
    for target in targets:
        await until(lambda target=target: not len(pops_of(target)))
    # An operator's reset is not undone by what was learned before.
    back.offsets.reset("g", "pops", 0, 1)
    await back.group.learner.learn()
    assert back.offsets.get("g", "pops", 0) == 1


async def test_without_remote_escape_nothing_leaves(groups: Groups) -> None:
    target = await groups.online("m", 0, totalReplicas=1)
    target.topics.create(TopicConfig("orders", 1, 1, 6))
    acting = await groups.online("n", 1, enableRemoteEscape=False)
    await eventually(lambda: route_of(groups, "orders"))
    assert (await acting.escape.put(draft(1))).status is PutStatus.SERVICE_NOT_AVAILABLE


async def test_a_broken_key_is_refused(groups: Groups) -> None:
    target = await groups.online("m", 0, totalReplicas=1)
    target.topics.create(TopicConfig("orders", 1, 1, 6))
    answer = await groups.client(target).send("orders", **{KEY_FIELD: "nonsense"})
    assert answer.code == Answer.SUCCESS


# --- what does not go well -----------------------------------------------------------------------


# --- master and slaves ---------------------------------------------------------------------------


@pytest.mark.provokes(
    "rocketmq.role", "rocketmq.online", "rocketmq.services_started", "rocketmq.services_stopped",
    "rocketmq.attached", "rocketmq.detached",
)  # fmt: skip
async def test_a_slave_acts_while_its_master_is_away(groups: Groups) -> None:
    master = await groups.online("n", 0)
    slave = await groups.online("n", 1)
    assert (master.group.state, slave.group.state) == (State.MASTER, State.SLAVE)
    await groups.stop_broker(master)
    await until(lambda: slave.group.state is State.ACTING)
    await until(lambda: slave.group.services_run)
    client = groups.client(slave)
    # Offsets, locks and their ends are served; sends are not.
    assert (await client.ask(Request.GET_MAX_OFFSET, topic="TBW102", queueId=0)).code == 0
    assert await lock(client, "c1", queue()) == [queue()]
    assert (await client.send("TBW102")).code == Answer.SERVICE_NOT_AVAILABLE
    back = await groups.online("n", 0)
    await until(lambda: slave.group.state is State.SLAVE)
    await until(lambda: not slave.group.services_run)
    assert back.group.state is State.MASTER
    assert (await groups.client(back).send("TBW102")).code in (0, Answer.NO_PERMISSION)


async def test_old_name_servers_are_asked_by_route(groups: Groups) -> None:
    master = await groups.online("n", 0, compatibleWithOldNameSrv=True)
    slave = await groups.online("n", 1, compatibleWithOldNameSrv=True)
    assert slave.group.state is State.SLAVE
    await groups.stop_broker(master)
    await until(lambda: slave.group.state is State.ACTING)


async def test_a_slave_copies_and_a_master_takes_over(groups: Groups) -> None:
    """RocketMQ's master takes offsets over by version, so that it may forget its own later ones or
    the slave's, and neither topics nor groups."""
    master = await groups.online("n", 0)
    master.topics.create(TopicConfig("orders", 4, 4, 6))
    master.offsets.commit("g", "orders", 0, 7)
    master.offsets.commit("g", "orders", 1, 9)
    master.groups.find("g")
    slave = await groups.online("n", 1)
    await until(lambda: slave.offsets.get("g", "orders", 0) == 7)
    assert slave.topics.get("orders") is not None
    # Groups are asked for last.
    await until(lambda: "g" in slave.groups.table)
    await groups.stop_broker(master)
    await until(lambda: slave.group.state is State.ACTING)
    # Fewer commits than a version has.
    slave.offsets.commit("g", "orders", 0, 12)
    slave.offsets.commit("g", "orders", 1, 3)
    slave.topics.create(TopicConfig("made-meanwhile", 2, 2, 6))
    slave.groups.find("joined-meanwhile")
    back = await groups.online("n", 0)
    assert back.offsets.of("g", "orders") == {0: 12, 1: 9}
    assert back.topics.get("made-meanwhile") is not None
    assert back.topics.get("orders") is not None
    assert "joined-meanwhile" in back.groups.table


@pytest.mark.provokes("rocketmq.tables_sent")
async def test_a_slave_that_was_away_when_its_master_came_back_brings_what_was_made(
    groups: Groups,
) -> None:
    """The slave acted, and was killed. What the master deleted since does not come back."""
    master = await groups.online("n", 0)
    for topic in ("kept", "deleted"):
        master.topics.create(TopicConfig(topic, 1, 1, 6))
    slave = await groups.online("n", 1)
    await until(lambda: slave.topics.get("deleted") is not None)
    await groups.stop_broker(master)
    await until(lambda: slave.group.state is State.ACTING)
    slave.topics.create(TopicConfig("made", 2, 2, 6))
    slave.groups.find("joined")
    await asyncio.sleep(0)
    await groups.stop_broker(slave)
    back = await groups.online("n", 0)
    assert back.topics.get("made") is None
    back.topics.delete("deleted", back.store.max_offset)
    slave = await groups.online("n", 1)
    await until(lambda: slave.topics.get("deleted") is None)
    for replica in (back, slave):
        assert replica.topics.get("deleted") is None
        made = replica.topics.get("made")
        assert made is not None
        assert made.write_queue_nums == 2
        assert "joined" in replica.groups.table
    client = groups.client(slave)
    refused = await client.ask(Request.TAKE_TABLES, {"topics": {}, "groups": {}})
    assert refused.code == Answer.SERVICE_NOT_AVAILABLE


async def sent(groups: Groups, master: Broker, count: int, *slaves: Broker) -> None:
    """Sends messages to one queue; all slaves have them."""
    client = groups.client(master)
    for _ in range(count):
        assert (await client.send("orders", queue=0)).code == Answer.SUCCESS
    for slave in slaves:
        await until(lambda slave=slave: slave.store.queue_max("orders", 0) == count)  # type: ignore[misc]


async def test_offsets_of_an_acting_slave_reach_a_master_that_returned_first(
    groups: Groups,
) -> None:
    """The slave acted, and was killed. What an operator set since is not overwritten."""
    master = await groups.online("n", 0)
    slave = await groups.online("n", 1)
    for group in ("g", "reset"):
        master.groups.find(group)
    await sent(groups, master, 5, slave)
    master.offsets.commit("g", "orders", 0, 1)
    await until(lambda: slave.offsets.get("g", "orders", 0) == 1)
    await groups.stop_broker(master)
    await until(lambda: slave.group.state is State.ACTING)
    for group in ("g", "reset"):
        slave.offsets.commit(group, "orders", 0, 4)
    await groups.stop_broker(slave)
    back = await groups.online("n", 0)
    assert back.offsets.get("g", "orders", 0) == 1
    back.offsets.reset("reset", "orders", 0, 2)
    slave = await groups.online("n", 1)
    await until(lambda: back.offsets.get("g", "orders", 0) == 4)
    await until(lambda: slave.offsets.get("reset", "orders", 0) == 2)
    assert not slave.offsets.unsent
    assert back.offsets.get("reset", "orders", 0) == 2
    # A client that has an old route.
    slave.offsets.commit("g", "orders", 0, 5)
    await until(lambda: back.offsets.get("g", "orders", 0) == 5)


async def test_slaves_without_a_master_have_each_other_s_offsets(groups: Groups) -> None:
    """The first one acts, and ends before the second does; then it comes back to act again."""
    master = await groups.online("n", 0, totalReplicas=3)
    first = await groups.online("n", 1, totalReplicas=3)
    second = await groups.online("n", 2, totalReplicas=3)
    await sent(groups, master, 5, first, second)
    await groups.stop_broker(master)
    await until(lambda: first.group.state is State.ACTING)
    first.offsets.commit("g", "orders", 0, 3)
    # A message that only this one has.
    first.offsets.commit("ahead", "orders", 0, 7)
    first.topics.create(TopicConfig("made", 2, 2, 6))
    await until(lambda: second.offsets.get("g", "orders", 0) == 3)
    assert second.offsets.get("ahead", "orders", 0) == 5
    assert second.topics.get("made") is not None
    await groups.stop_broker(first)
    await until(lambda: second.group.state is State.ACTING)
    second.offsets.commit("g", "orders", 0, 4)
    first = await groups.online("n", 1, totalReplicas=3)
    assert first.offsets.get("g", "orders", 0) == 4
    await groups.stop_broker(second)
    back = await groups.online("n", 0, totalReplicas=3)
    assert back.offsets.get("g", "orders", 0) == 4


async def delete(broker: Broker, client: Client) -> None:
    """Deletes topic `t`, group `g` and user `u`."""
    broker.users.delete("u")
    for asked in (
        (Request.DELETE_TOPIC_IN_BROKER, {"topic": "t"}),
        (Request.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g", "cleanOffset": "true"}),
    ):
        assert (await client.ask(asked[0], **asked[1])).code == Answer.SUCCESS


def has(broker: Broker) -> list[object]:
    """Returns what is left of topic `t`, group `g` and user `u`."""
    return [
        "t" in broker.topics.table, "g" in broker.groups.table, "u" in broker.users.table,
        "t" in broker.store.topics(), broker.offsets.of("g", "t"), broker.offsets.of("g", "kept"),
    ]  # fmt: skip


NOTHING: list[object] = [False, False, False, False, {}, {}]


async def fill(broker: Broker, client: Client) -> None:
    for topic in ("t", "kept"):
        broker.topics.create(TopicConfig(topic, 1, 1, 6))
    for _ in range(5):
        assert (await client.send("t")).code == Answer.SUCCESS
    broker.groups.find("g")
    broker.users.put(User("u", "word"))
    broker.offsets.commit("g", "t", 0, 5)
    broker.offsets.commit("g", "kept", 0, 3)


async def test_a_slave_keeps_nothing_of_what_its_master_deletes(groups: Groups) -> None:
    """RocketMQ's keeps queues and offsets: a topic that is made again loses its first messages."""
    master = await groups.online("n", 0)
    slave = await groups.online("n", 1)
    client = groups.client(master)
    await fill(master, client)
    await until(lambda: has(slave) == [True, True, True, True, {0: 5}, {0: 3}])
    await delete(master, client)
    await until(lambda: has(slave) == NOTHING)
    # Between two looks of the slave at its master's tables.
    await fill(master, client)
    await until(lambda: slave.store.queue_max("t", 0) == 5)
    await delete(master, client)
    master.topics.create(TopicConfig("t", 1, 1, 6))
    await client.send("t", b"first")
    master.offsets.commit("g", "t", 0, 0)
    await until(lambda: slave.store.queue_max("t", 0) == 1)
    await until(lambda: slave.offsets.of("g", "t") == {0: 0})
    answer = await groups.client(slave).pull("t", 0)
    assert [bytes(record.body) for record in records(answer)] == [b"first"]


@pytest.mark.parametrize("by_slave", [False, True])
async def test_a_returning_master_brings_back_nothing(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, by_slave: bool
) -> None:
    """Deleted by the master that dies before its slave copies it, or by the slave that acts."""
    master = await groups.online("n", 0)
    slave = await groups.online("n", 1)
    await fill(master, groups.client(master))
    await until(lambda: has(slave) == has(master))
    await until(lambda: slave.store.dispatched == master.store.dispatched)
    with monkeypatch.context() as frozen:
        frozen.setattr(Metadata, "copy_changes", copy_nothing)
        frozen.setattr(Metadata, "copy", copy_nothing)
        if not by_slave:
            await delete(master, groups.client(master))
        await groups.stop_broker(master)
        await until(lambda: slave.group.state is State.ACTING)
        if by_slave:
            await delete(slave, groups.client(slave))
        assert has(slave)[0] is not by_slave
    back = await groups.online("n", 0)
    assert has(back) == NOTHING


async def test_a_slave_serves_a_topic_that_it_has_not_copied(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocketMQ's slave refuses it (17), though it has its confirmed messages."""
    master = await groups.online("n", 0, brokerRole="SYNC_MASTER", inSyncReplicas=2)
    with monkeypatch.context() as frozen:
        frozen.setattr(Metadata, "copy_changes", copy_nothing)
        frozen.setattr(Metadata, "copy", copy_nothing)
        slave = await groups.online("n", 1)
        master.topics.create(TopicConfig("new", 4, 4, 7))
        await until(lambda: master.replication.begin() and master.replication.refusal() is None)
        assert (await groups.client(master).send("new", b"x", e=2)).code == Answer.SUCCESS
        await groups.stop_broker(master)
        await until(lambda: slave.group.state is State.ACTING)
        assert slave.topics.table["new"] == TopicConfig("new", 3, 3, 6)
        assert len(records(await groups.client(slave).pull("new", 0, 2))) == 1
    back = await groups.online("n", 0, brokerRole="SYNC_MASTER", inSyncReplicas=2)
    assert back.topics.table["new"] == TopicConfig("new", 4, 4, 7)
    await until(lambda: slave.topics.table["new"] == TopicConfig("new", 4, 4, 7))


async def copy_nothing(_self: Metadata, _master: str) -> None:
    """Replaces copies of a slave."""


async def test_a_lock_needs_a_majority_where_it_is_strict(groups: Groups) -> None:
    settings = {"lockInStrictMode": True, "totalReplicas": 3}
    master = await groups.online("n", 0, **settings)
    first = await groups.online("n", 1, **settings)
    second = await groups.online("n", 2, **settings)
    client = groups.client(master)
    # Each asks the members that a name server listed when it asked last.
    await until(lambda: all(len(b.group.members) == 2 for b in (master, first, second)))
    assert await lock(client, "a", queue(0), queue(1)) == [queue(0), queue(1)]
    await groups.stop_broker(master)
    await until(lambda: first.group.state is State.ACTING)
    acting = groups.client(first)
    # The other replicas know the holder.
    assert await lock(acting, "b", queue(0)) == []
    assert await lock(acting, "a", queue(0)) == [queue(0)]
    await unlock(acting, "a", queue(1))
    await eventually(lambda: lock(acting, "b", queue(1)))
    await groups.stop_broker(second)
    await until(lambda: not first.group.members)
    # One of three is no majority, and what it won alone is given back at once.
    assert await lock(acting, "c", queue(2)) == []
    assert first.locks.holder("g", place(2), first.now_ms()) is None


async def test_a_replica_remembers_which_epochs_it_voted_for(groups: Groups) -> None:
    """Its table is lost with the process, and its clock may have jumped."""
    settings = {"lockInStrictMode": True, "totalReplicas": 3}

    async def vote(broker: Broker, client_id: str, epoch: int) -> Command:
        body = {
            "consumerGroup": "g", "clientId": client_id, "onlyThisBroker": True, "epoch": epoch,
            "mqSet": [queue()],
        }  # fmt: skip
        return await groups.client(broker).ask(Request.LOCK_BATCH_MQ, body)

    voter = await groups.online("n", 1, **settings)
    ahead = voter.now_ms() + 1_000_000
    assert b'"epochs":[]' in bytes((await vote(voter, "a", ahead)).body)
    await groups.stop_broker(voter)
    voter = await groups.online("n", 1, **settings)
    floor = voter.locks.floor
    assert floor > ahead
    refused = await vote(voter, "b", ahead)
    assert f",{floor}]]".encode() in bytes(refused.body)
    assert voter.locks.holder("g", place(0), voter.steady_ms()) is None
    await vote(voter, "b", floor + 1)
    assert voter.locks.holder("g", place(0), voter.steady_ms()) == "b"
    assert (await vote(voter, "b", 1 << 60)).code == Answer.INVALID_PARAMETER


async def test_a_slave_that_does_not_act_locks_nothing_for_clients(groups: Groups) -> None:
    """RocketMQ's slave locks in its own table, beside its master's."""
    await groups.online("n", 0)
    slave = await groups.online("n", 1)
    assert await lock(groups.client(slave), "a", queue()) == []
