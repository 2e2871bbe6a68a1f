"""A broker on loopback: delayed and timed messages, transactions, pop, as clients use them."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from convoymq.model.errors import SyntaxFault
from convoymq.rocketmq.broker.names import HALF_TOPIC
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command
from convoymq.rocketmq.remoting.values import TopicConfig
from convoymq.rocketmq.special.pop_records import Receipt
from convoymq.rocketmq.special.service import SpecialServices
from convoymq.rocketmq.store.types import Message
from tests.rocketmq.broker_client import Client, Running, batch, records
from tests.rocketmq.groups import Groups
from tests.running import until

LEVELS = "1s 2s 1h"


async def begin(directory: Path, **settings: object) -> Running:
    return await Running.begin(
        directory, messageDelayLevel=LEVELS, transactionTimeOut=300, transactionCheckInterval=300,
        flushConsumerOffsetInterval=500, **settings,
    )  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One broker for all tests of the file: each has topics and groups of its own."""
    made = await begin(tmp_path_factory.mktemp("broker"), recallMessageEnable=True)
    yield made
    await made.stop()


pytestmark = pytest.mark.asyncio(loop_scope="module")


def properties(**pairs: object) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in pairs.items())


async def pull_all(client: Client, topic: str, count: int) -> list[Message]:
    """Waits for so many messages of a topic's first queue."""
    found: list[Message] = []
    while len(found) < count:
        found += records(await client.pull(topic, len(found), wait_ms=30_000))
    return found


# --- delay ---------------------------------------------------------------------------------------


async def test_delayed_and_timed_messages_arrive(running: Running) -> None:
    client, topic = running.client, "later"
    await client.send(topic, b"now")
    begin_ms = running.broker.now_ms()
    sent = await client.send(topic, b"level", i=properties(DELAY=1, TAGS="a"))
    assert sent.code == Answer.SUCCESS
    await client.send(topic, b"time", i=properties(TIMER_DELAY_MS=1500))
    await client.send(topic, b"at", i=properties(TIMER_DELIVER_MS=begin_ms + 100))
    found = await pull_all(client, topic, 4)
    due_ms = {b"now": 0, b"level": 1000, b"time": 1500, b"at": 100}
    assert {bytes(m.body) for m in found} == set(due_ms)
    for message in found[1:]:
        assert message.stored_ms >= begin_ms + due_ms[bytes(message.body)]
        assert "DELAY" not in message.properties


async def test_a_time_that_is_too_far_is_refused(running: Running) -> None:
    sent = await running.client.send("far", i=properties(TIMER_DELAY_SEC=3 * 86_400 + 60))
    assert sent.code == 13
    assert "max delay 259200000ms" in (sent.remark or "")


@pytest.mark.provokes("rocketmq.special_message_waits")
async def test_a_message_that_cannot_be_put_waits(running: Running) -> None:
    client, topic = running.client, "waits"
    await client.send(topic, b"now")
    await client.send(topic, b"later", i=properties(DELAY=1))
    running.broker.role.is_isolated = True
    outbox = running.broker.specials[0].state.levels.outbox  # type: ignore[attr-defined]
    await until(lambda: any(line.wait_ms for line in outbox._lines.values()))
    running.broker.role.is_isolated = False
    assert [bytes(m.body) for m in await pull_all(client, topic, 2)] == [b"now", b"later"]


@pytest.mark.provokes("rocketmq.special_message_refused")
async def test_a_message_that_no_queue_takes_is_given_up(running: Running) -> None:
    """Only somebody who writes to the system topic himself makes one."""
    client = running.client
    made = properties(REAL_TOPIC="no topic!", REAL_QID=0, TIMER_OUT_MS=1)
    assert (await client.send("rmq_sys_wheel_timer", b"x", i=made)).code == Answer.SUCCESS
    wheel = running.broker.specials[0].state.wheel  # type: ignore[attr-defined]
    await until(lambda: wheel.enqueued > 0 and not wheel.count and not len(wheel.outbox))


async def test_properties_that_just_fit_do_not_lose_a_message(running: Running) -> None:
    client, topic = running.client, "big"
    await client.send(topic, b"now")
    for size in range(32_700, 32_000, -1):
        # The largest that is taken: no room for a key is left.
        sent = await client.send(topic, b"later", i=properties(DELAY=1, P="x" * size))
        if sent.code == Answer.SUCCESS:
            break
    found = await pull_all(client, topic, 2)
    assert "ESCAPE_KEY" not in found[1].properties


@pytest.mark.provokes("rocketmq.timer_checkpoint_unreadable")
async def test_a_checkpoint_that_cannot_be_read_costs_time_only(tmp_path: Path) -> None:
    running = await begin(tmp_path)
    await running.client.send("t", b"time", i=properties(TIMER_DELAY_MS=1500))
    await running.stop()
    (tmp_path / "config" / "timercheck").write_bytes(b"abc")
    running = await begin(tmp_path)
    assert bytes((await pull_all(running.client, "t", 1))[0].body) == b"time"
    await running.stop()


@pytest.mark.provokes("rocketmq.special_services")
async def test_what_waits_outlives_a_restart(tmp_path: Path) -> None:
    running = await begin(tmp_path)
    await running.client.send("t", b"level", i=properties(DELAY=2))
    await running.client.send("t", b"time", i=properties(TIMER_DELAY_MS=2000))
    await running.client.send("t", b"early", i=properties(DELAY=1))
    await pull_all(running.client, "t", 1)
    await running.stop()
    running = await begin(tmp_path)
    found = await pull_all(running.client, "t", 3)
    assert sorted(bytes(m.body) for m in found) == [b"early", b"level", b"time"]
    offsets = await running.client.ask(Request.GET_ALL_DELAY_OFFSET)
    assert b'"offsetTable":{"1":1,"2":1,"3":0}' in bytes(offsets.body)
    point = await running.client.ask(Request.GET_TIMER_CHECK_POINT)
    assert len(point.body) == 56
    assert (await running.client.ask(Request.GET_TIMER_METRICS)).code == Answer.SUCCESS
    await running.stop()


@pytest.mark.provokes("rocketmq.special_services")
async def test_a_copied_key_loses_no_message(tmp_path: Path) -> None:
    """Programs send what they received with all its properties, to brokers of the same names."""
    running = await begin(tmp_path)
    client = running.client
    fields = await half(client, "t", b"half")
    await client.send("t", b"level", i=properties(DELAY=2))
    await client.send("t", b"time", i=properties(TIMER_DELAY_MS=2000))
    for topic in ("RMQ_SYS_TRANS_HALF_TOPIC", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"):
        queue = 1 if topic == "SCHEDULE_TOPIC_XXXX" else 0
        key = properties(ESCAPE_KEY=f"b:{topic}:{queue}:0")
        await client.send("copies", b"x", i=key)
        await client.send("copies", batch((b"y", f"a\x01b\x02{key}"), (b"z", key)), m=True)
        refused = await client.send("copies", b"x", i=key, escapeKey=f"b:{topic}:{queue}:0")
        assert refused.code == Answer.INVALID_PARAMETER
    copies = await client.all("copies")
    assert [bytes(m.body) for m in copies] == [b"x", b"y", b"z"] * 3
    assert not [m for m in copies if "ESCAPE_KEY" in m.properties]
    assert copies[1].properties["a"] == "b"
    await running.stop()
    running = await begin(tmp_path)
    assert (await end(running.client, fields, 8)).code == Answer.SUCCESS
    found = await pull_all(running.client, "t", 3)
    assert sorted(bytes(m.body) for m in found) == [b"half", b"level", b"time"]
    await running.stop()


async def test_a_timed_message_is_recalled(running: Running) -> None:
    client, topic = running.client, "recall"
    await client.send(topic, b"now")
    gone = await client.send(topic, b"gone", i=properties(TIMER_DELAY_MS=1500))
    await client.send(topic, b"stays", i=properties(TIMER_DELAY_MS=1500))
    handle = gone.fields["recallHandle"]
    done = await client.ask(Request.RECALL_MESSAGE, topic=topic, recallHandle=handle)
    assert (done.code, done.fields["msgId"]) == (Answer.SUCCESS, gone.fields["transactionId"])
    await client.send(topic, b"last", i=properties(TIMER_DELAY_MS=2500))
    found = await pull_all(client, topic, 3)
    assert [bytes(m.body) for m in found] == [b"now", b"stays", b"last"]
    over = await client.ask(Request.RECALL_MESSAGE, topic=topic, recallHandle=handle)
    assert (over.code, over.remark) == (604, "recall failed, timestamp invalid")


@pytest.mark.parametrize(
    ("topic", "handle", "code"),
    [
        ("recalls", "", 604), ("recalls", "!", 604), ("recalls", "djEgYSBi", 604),
        ("recalls", base64.urlsafe_b64encode(b"v1 other b 1 u").decode(), 604),
        ("recalls", base64.urlsafe_b64encode(b"v1 recalls x 1 u").decode(), 604),
        ("nowhere", "x", 17),
    ],
)  # fmt: skip
async def test_a_wrong_recall_is_refused(
    running: Running, topic: str, handle: str, code: int
) -> None:
    await running.client.send("recalls")
    answer = await running.client.ask(Request.RECALL_MESSAGE, topic=topic, recallHandle=handle)
    assert answer.code == code


# --- transactions --------------------------------------------------------------------------------


async def half(client: Client, topic: str, body: bytes) -> dict[str, object]:
    sent = await client.send(topic, body, f=4, i=properties(TRAN_MSG="true", PGROUP="producers"))
    assert sent.code == Answer.SUCCESS
    return {
        "producerGroup": "producers", "tranStateTableOffset": sent.fields["queueOffset"],
        "commitLogOffset": int(sent.fields["msgId"][16:], 16), "msgId": sent.fields["msgId"],
        "transactionId": sent.fields["transactionId"],
    }  # fmt: skip


async def end(client: Client, fields: dict[str, object], number: int, **more: object) -> Command:
    known = {"commitOrRollback": number, "fromTransactionCheck": False} | fields | more
    return await client.ask(Request.END_TRANSACTION, **known)


async def test_a_transaction_ends(running: Running) -> None:
    client, topic = running.another(), "ends"
    await client.send(topic, b"first")
    committed, rolled = await half(client, topic, b"yes"), await half(client, topic, b"no")
    assert (await end(client, rolled, 12)).code == Answer.SUCCESS
    answers = await asyncio.gather(*(end(client, committed, 8) for _ in range(5)))
    assert {answer.code for answer in answers} == {Answer.SUCCESS}
    await client.send(topic, b"last")
    found = await pull_all(client, topic, 3)
    assert [bytes(m.body) for m in found] == [b"first", b"yes", b"last"]
    wrong = await end(client, committed, 8, producerGroup="others")
    assert (wrong.code, wrong.remark) == (1, "The producer group wrong")


async def test_a_producer_is_asked(running: Running) -> None:
    client, topic = running.another(), "asked"
    await client.send(topic, b"first")
    await client.heartbeat("producer", "", producer="producers")
    fields = await half(client, topic, b"half")
    await until(lambda: bool(client.pushed))
    check = client.pushed[0]
    assert check.code == Request.CHECK_TRANSACTION_STATE
    assert check.fields["commitLogOffset"] == str(fields["commitLogOffset"])
    assert check.fields["transactionId"] == fields["transactionId"]
    (message,) = records(check)
    assert (message.topic, bytes(message.body)) == (topic, b"half")
    assert message.queue_offset == int(check.fields["tranStateTableOffset"])
    await end(client, fields, 8, fromTransactionCheck=True)
    assert bytes((await pull_all(client, topic, 2))[1].body) == b"half"


# --- pop -----------------------------------------------------------------------------------------


async def fill(client: Client, topic: str, count: int) -> None:
    """Sends messages to a topic's first queue in one turn: one read has all of them."""
    await client.send(topic, b"another", e=3)
    await asyncio.gather(*(client.send(topic, b"%d" % n) for n in range(count)))


async def pop(client: Client, topic: str, /, **fields: object) -> Command:
    known = {
        "consumerGroup": "g", "topic": topic, "queueId": 0, "maxMsgNums": 32,
        "invisibleTime": 60_000, "pollTime": 0, "bornTime": 0, "initMode": 0, "expType": "TAG",
        "exp": "*", "order": False,
    } | fields  # fmt: skip
    return await client.ask(Request.POP_MESSAGE, **known)


def receipt(answer: Command, queue: int = 0) -> str:
    """What Java's client makes of an answer."""
    (start,) = [
        part.split(" ")[2]
        for part in answer.fields["startOffsetInfo"].split(";")
        if part.split(" ")[1] == str(queue)
    ]
    fields = answer.fields
    return (
        f"{start} {fields['popTime']} {fields['invisibleTime']} {fields['reviveQid']} 0 b {queue}"
    )


async def ack(client: Client, topic: str, info: str, offset: int, queue: int = 0) -> int:
    answer = await client.ask(
        Request.ACK_MESSAGE, consumerGroup="g", topic=topic, queueId=queue, extraInfo=info,
        offset=offset,
    )  # fmt: skip
    return answer.code


async def test_a_pop_hides_messages_and_brings_them_back(running: Running) -> None:
    client, topic = running.client, "pops"
    await fill(client, topic, 3)
    found = await pop(client, topic, invisibleTime=1000)
    assert (found.code, found.remark) == (Answer.SUCCESS, "FOUND")
    assert found.fields["startOffsetInfo"] == "0 0 0"
    assert found.fields["msgOffsetInfo"] == "0 0 0,1,2"
    assert [bytes(m.body) for m in records(found)] == [b"0", b"1", b"2"]
    again = await pop(client, topic)
    assert (again.code, again.remark) == (210, "NO_MESSAGE_IN_QUEUE")
    assert await ack(client, topic, receipt(found), 1) == Answer.SUCCESS
    back: list[Message] = []
    while len(back) < 2:
        back += records(await pop(client, topic, pollTime=30_000))
    assert [(bytes(m.body), m.topic, m.reconsume_times) for m in back] == [
        (b"0", topic, 1), (b"2", topic, 1),
    ]  # fmt: skip
    assert await ack(client, topic, receipt(found), 2) == 208
    held = Receipt.parse(back[0].properties["POP_CK"])
    assert held.retry == "1"
    assert held.offset == back[0].queue_offset
    code = await ack(client, f"%RETRY%g_{topic}", str(held), back[0].queue_offset)
    assert code == Answer.SUCCESS


async def test_a_pop_waits_for_a_message(running: Running) -> None:
    client, topic = running.client, "poll"
    await client.send(topic, b"first")
    await pop(client, topic)
    waiting = asyncio.create_task(pop(client, topic, pollTime=60_000, queueId=-1))
    told = asyncio.create_task(
        client.ask(
            Request.NOTIFICATION,
            consumerGroup="other",
            topic=topic,
            queueId=1,
            pollTime=60_000,
            bornTime=0,
        )
    )
    while True:
        info = await client.ask(Request.POLLING_INFO, consumerGroup="g", topic=topic, queueId=-1)
        if info.fields["pollingNum"] == "1":
            break
    await client.send(topic, b"second", e=1)
    assert [bytes(m.body) for m in records(await waiting)] == [b"second"]
    assert (await told).fields["hasMsg"] == "true"


async def test_a_message_is_shown_later(running: Running) -> None:
    client, topic = running.client, "change"
    await client.send(topic, b"a")
    found = await pop(client, topic, invisibleTime=1000)
    changed = await client.ask(
        Request.CHANGE_MESSAGE_INVISIBLETIME, consumerGroup="g", topic=topic, queueId=0,
        extraInfo=receipt(found), offset=0, invisibleTime=2500,
    )  # fmt: skip
    assert changed.code == Answer.SUCCESS
    assert int(changed.fields["popTime"]) > int(found.fields["popTime"])
    (back,) = records(await pop(client, topic, pollTime=30_000))
    assert back.stored_ms >= int(changed.fields["popTime"]) + 2500


async def test_acknowledgements_come_in_batches(running: Running) -> None:
    client, topic = running.client, "batch-acks"
    await fill(client, topic, 4)
    found = await pop(client, topic, invisibleTime=1000)
    bits = base64.b64encode(bytes([0b1011])).decode()
    acks = {
        "c": "g", "t": topic, "r": "0", "so": 0, "q": 0, "rq": int(found.fields["reviveQid"]),
        "pt": int(found.fields["popTime"]), "it": 1000, "b": bits,
    }  # fmt: skip
    answer = await client.ask(Request.BATCH_ACK_MESSAGE, {"brokerName": "b", "acks": [acks]})
    assert answer.code == Answer.SUCCESS
    back = records(await pop(client, topic, pollTime=30_000))
    assert [bytes(m.body) for m in back] == [b"2"]


async def test_ordered_pops_hold_a_queue(running: Running) -> None:
    client, topic = running.client, "ordered"
    await fill(client, topic, 3)
    order = {"order": True, "maxMsgNums": 2, "invisibleTime": 1500}
    first = await pop(client, topic, **order)
    assert [bytes(m.body) for m in records(first)] == [b"0", b"1"]
    assert first.fields["orderCountInfo"] == "0 0 0"
    assert (await pop(client, topic, **order)).code == 210
    info = receipt(first)
    assert Receipt.parse(info).revive_queue == 999
    assert await ack(client, topic, info, 0) == Answer.SUCCESS
    second = await pop(client, topic, pollTime=30_000, **order)
    assert [bytes(m.body) for m in records(second)] == [b"1", b"2"]
    assert second.fields["orderCountInfo"] == "0 qo0%1 1;0 0 0"
    for offset in (1, 2):
        assert await ack(client, topic, receipt(second), offset) == Answer.SUCCESS
    assert await ack(client, topic, receipt(second), 7) == 208
    await client.send(topic, b"3")
    third = await pop(client, topic, pollTime=30_000, **order)
    assert [bytes(m.body) for m in records(third)] == [b"3"]


async def test_acknowledged_pops_outlive_a_restart(tmp_path: Path) -> None:
    running = await begin(tmp_path)
    await fill(running.client, "t", 4)
    found = await pop(running.client, "t", maxMsgNums=3, invisibleTime=2000)
    assert await ack(running.client, "t", receipt(found), 0) == Answer.SUCCESS
    await running.stop()
    running = await begin(tmp_path)
    got: list[bytes] = []
    while len(got) < 3:
        got += [bytes(m.body) for m in records(await pop(running.client, "t", pollTime=30_000))]
    assert sorted(got) == [b"1", b"2", b"3"]
    await running.stop()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "nowhere"}, 17), ({"maxMsgNums": 33}, 29), ({"queueId": 99}, 29),
        ({"exp": "a >", "expType": "SQL92"}, 23), ({"maxMsgNums": "x"}, 1),
        ({"consumerGroup": "a b"}, 26),
    ],
)  # fmt: skip
async def test_a_wrong_pop_is_refused(
    running: Running, fields: dict[str, object], code: int
) -> None:
    await running.client.send("wrong")
    assert (await pop(running.client, "wrong", **fields)).code == code


async def test_wrong_acknowledgements_are_refused(running: Running) -> None:
    client, topic = running.client, "wrong-acks"
    await client.send(topic)
    assert await ack(client, topic, "x", 0) == 1
    assert await ack(client, topic, "0 1 2 0 0 b 0", 99) == 208
    assert await ack(client, topic, "0 1 2 0 0 b 0", 0, queue=99) == 13
    assert await ack(client, "nowhere", "0 1 2 0 0 b 0", 0) == 17
    assert await ack(client, topic, "0 1 2 0 0 b 0", 0) == 208
    peeked = await client.ask(
        Request.PEEK_MESSAGE, consumerGroup="g", topic=topic, queueId=0, maxMsgNums=4
    )
    assert len(records(peeked)) == 1


# --- an acting slave -----------------------------------------------------------------------------


async def test_an_acting_slave_goes_on_with_what_its_master_left(tmp_path: Path) -> None:
    """Its log is all that it has. RocketMQ's slave refuses END_TRANSACTION."""
    groups = Groups(tmp_path)
    await groups.start()
    levels = {"messageDelayLevel": "1s 4s 1h", "totalReplicas": 1, "transactionTimeOut": 3000}
    master = await groups.online("n", 0, **levels)
    client = groups.client(master)
    await client.send("orders", b"now")
    for body, asked in ((b"level", {"DELAY": 2}), (b"time", {"TIMER_DELAY_MS": 4000})):
        await client.send("orders", body, i=properties(**asked))
    await client.send("orders", b"early", i=properties(DELAY=1))
    ended = await half(client, "orders", b"ended")
    await half(client, "orders", b"open")
    await pull_all(client, "orders", 2)
    await groups.stop_broker(master)
    shutil.copytree(tmp_path / "n-0" / "commitlog", tmp_path / "n-1" / "commitlog")
    target = await groups.online("m", 0, **levels)
    target.topics.create(TopicConfig("orders", 1, 1, 6))
    acting = await groups.online("n", 1, messageDelayLevel="1s 4s 1h", transactionTimeOut=3000)
    await until(lambda: acting.role.is_acting)
    answer = None
    while answer is None or answer.code != Answer.SUCCESS:
        # The name server may not know the topic's new place yet.
        answer = await end(groups.client(acting), ended, 8)
        await asyncio.sleep(0.05)
    found = await pull_all(groups.client(target), "orders", 3)
    assert sorted(bytes(m.body) for m in found) == [b"ended", b"level", b"time"]
    await until(lambda: target.store.queue_max(HALF_TOPIC, 0) == 1)
    services = acting.specials[0]
    assert isinstance(services, SpecialServices)
    await until(lambda: len(services.state.transactions) == 0)
    assert target.store.queue_max("orders", 0) == 3
    await groups.stop()


async def test_what_left_is_passed_over(running: Running) -> None:
    """As a master does when it gets online: what other replicas say is taken over."""
    client, topic = running.client, "left"
    await client.send(topic, b"now")
    await client.send(topic, b"later", i=properties(DELAY=2))
    services = running.broker.specials[0]
    assert isinstance(services, SpecialServices)
    levels = services.state.levels.offsets
    services.pass_over({"SCHEDULE_TOPIC_XXXX:1": [(levels[2], levels[2] + 1)]})
    await client.send(topic, b"last", i=properties(DELAY=2))
    assert [bytes(m.body) for m in await pull_all(client, topic, 2)] == [b"now", b"last"]
    services.follow({1: 0, 2: 0, 3: 7}, bytes(56))
    assert services.state.levels.offsets[3] == 7
    with pytest.raises(SyntaxFault, match="has 3 bytes"):
        services.follow({}, b"abc")


async def test_a_log_that_lost_its_end_says_what_waits(tmp_path: Path) -> None:
    """A slave that had more than its master: what waits and what was delivered follow from the log
    that is left."""
    running = await begin(tmp_path)
    client, store = running.client, running.broker.store
    await client.send("t", b"now")
    await client.send("t", b"before", i=properties(TIMER_DELAY_MS=1500))
    await client.send("t", b"delivered", i=properties(DELAY=1))
    await client.send("t", b"half", f=4, i=properties(TRAN_MSG="true", PGROUP="p"))
    end = store.max_offset
    await client.send("t", b"cut", i=properties(TIMER_DELAY_MS=1500))
    await client.send("t", b"cut", f=4, i=properties(TRAN_MSG="true", PGROUP="p"))
    assert bytes((await pull_all(client, "t", 2))[1].body) == b"delivered"
    running.broker.persist()
    store.truncate(end)
    services = running.broker.specials[0]
    assert isinstance(services, SpecialServices)
    assert services.state.wheel.count == 1
    assert len(services.state.transactions) == 1
    await client.send("t", b"after", i=properties(TIMER_DELAY_MS=1500))
    found = await pull_all(client, "t", 4)
    assert [bytes(m.body) for m in found[1:]] == [b"delivered", b"before", b"after"]
    await running.stop()
