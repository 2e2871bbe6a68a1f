"""A broker on loopback: sends, pulls, consumers and their offsets, as clients ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import BINARY, request
from tests.patience import PATIENCE_S
from tests.rocketmq.broker_client import Client, Running, batch, records
from tests.running import until


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One broker for all tests of the file: each has topics and groups of its own."""
    directory: Path = tmp_path_factory.mktemp("broker")
    made = await Running.begin(directory, enablePropertyFilter=True)
    yield made
    await made.stop()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_message_is_pulled_as_it_was_sent(running: Running) -> None:
    client = running.client
    sent = await client.send("plain", b"hello", i="TAGS\x01a\x02KEYS\x01k1 k2\x02")
    assert sent.code == Answer.SUCCESS
    assert sent.fields["queueId"] == "0"
    assert sent.fields["queueOffset"] == "0"
    assert sent.fields["MSG_REGION"] == "DefaultRegion"
    assert len(sent.fields["msgId"]) == 32
    pulled = await client.pull("plain")
    assert (pulled.code, pulled.remark) == (Answer.SUCCESS, "FOUND")
    (message,) = records(pulled)
    assert bytes(message.body) == b"hello"
    assert message.properties["TAGS"] == "a"
    assert message.properties["UNIQ_KEY"] == sent.fields["transactionId"]
    assert message.properties["CLUSTER"] == "c"
    assert message.message_id == sent.fields["msgId"]
    assert pulled.fields["nextBeginOffset"] == "1"
    viewed = await client.ask(Request.VIEW_MESSAGE_BY_ID, offset=message.physical)
    assert bytes(records(viewed)[0].body) == b"hello"


async def test_all_sends_of_a_turn_are_answered(running: Running) -> None:
    client = running.client
    await client.send("turn")
    answers = await asyncio.gather(*(client.send("turn", b"%d" % i) for i in range(100)))
    offsets = [int(answer.fields["queueOffset"]) for answer in answers]
    assert offsets == list(range(1, 101))


async def test_a_binary_send_has_a_binary_answer(running: Running) -> None:
    await running.client.send("plain-binary")
    command = request(Request.SEND_MESSAGE_V2, {
        "a": "p", "b": "plain-binary", "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": "1",
        "h": "0", "i": "",
    }, b"b")  # fmt: skip
    command.encoding = BINARY
    connection = await running.client.remoting.connected(running.client.address, PATIENCE_S)
    answer = await connection.request(command, PATIENCE_S)
    assert (answer.code, answer.encoding) == (Answer.SUCCESS, BINARY)
    command = request(Request.PULL_MESSAGE, {
        "consumerGroup": "g", "topic": "plain-binary", "queueId": "1", "queueOffset": "0",
        "maxMsgNums": "1", "sysFlag": "4", "subscription": "*",
    })  # fmt: skip
    command.encoding = BINARY
    answer = await connection.request(command, PATIENCE_S)
    assert [bytes(message.body) for message in records(answer)] == [b"b"]


async def test_a_batch_is_several_messages(running: Running) -> None:
    client = running.client
    await client.send("batches")
    body = batch((b"one", "TAGS\x01a\x02"), (b"two", ""), (b"three", "UNIQ_KEY\x01u3\x02"))
    sent = await client.ask(
        Request.SEND_BATCH_MESSAGE, body, a="p", b="batches", c="TBW102", d=4, e=0, f=0, g=1, h=0,
        i="", m=True,
    )  # fmt: skip
    assert sent.code == Answer.SUCCESS
    assert sent.fields["queueOffset"] == "1"
    assert len(sent.fields["msgId"].split(",")) == 3
    found = await client.all("batches", 1)
    assert [bytes(message.body) for message in found] == [b"one", b"two", b"three"]
    assert found[2].properties["UNIQ_KEY"] == "u3"
    assert found[0].properties["CLUSTER"] == "c"


async def test_a_pull_waits_for_a_message(running: Running) -> None:
    client = running.client
    await client.send("waits")
    first = asyncio.create_task(client.pull("waits", 1, wait_ms=600_000))
    second = asyncio.create_task(client.pull("waits", 1, wait_ms=600_000))
    await until(lambda: running.broker.puller.held == 2)
    await client.send("waits", b"late")
    for pull in (first, second):
        assert [bytes(message.body) for message in records(await pull)] == [b"late"]
    assert running.broker.puller.held == 0


async def test_a_pull_waits_for_its_tag_only(running: Running) -> None:
    client = running.client
    await client.send("tags")
    pull = asyncio.create_task(client.pull("tags", 1, wait_ms=600_000, subscription="b || c"))
    await until(lambda: running.broker.puller.held == 1)
    await client.send("tags", b"no", i="TAGS\x01a\x02")
    await client.send("tags", b"yes", i="TAGS\x01c\x02")
    answer = await pull
    assert [bytes(message.body) for message in records(answer)] == [b"yes"]
    assert answer.fields["nextBeginOffset"] == "3"


async def test_a_pull_whose_time_is_over_is_answered(running: Running) -> None:
    client = running.client
    await client.send("times")
    answer = await client.pull("times", 1, wait_ms=1)
    assert answer.code == Answer.PULL_NOT_FOUND
    assert answer.fields["nextBeginOffset"] == "1"
    await client.send("times", i="TAGS\x01a\x02")
    answer = await client.pull("times", 1, wait_ms=1, subscription="b")
    assert answer.code == Answer.PULL_RETRY_IMMEDIATELY
    assert answer.fields["nextBeginOffset"] == "2"


@pytest.mark.parametrize(
    ("offset", "code", "remark", "next_offset"),
    [
        (0, Answer.SUCCESS, "FOUND", 2),
        (2, Answer.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", 2),
        (9, Answer.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", 2),
        (-5, Answer.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL", 0),
    ],
)
async def test_statuses_of_pulls(
    running: Running, offset: int, code: int, remark: str, next_offset: int
) -> None:
    client = running.client
    topic = f"status{offset}".replace("-", "m")
    for _ in range(2):
        await client.send(topic)
    answer = await client.pull(topic, offset)
    assert (answer.code, answer.remark) == (code, remark)
    if code != Answer.SUCCESS:
        assert answer.fields["nextBeginOffset"] == str(next_offset)
    empty = await client.pull(topic, 5, 3)
    assert empty.code == Answer.PULL_OFFSET_MOVED
    assert (await client.pull(topic, 0, 3)).code == Answer.PULL_NOT_FOUND


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({"b": ""}, 29, "The specified topic is blank."),
        ({"b": "a b"}, 29, "The specified topic: a b, contains illegal characters, allowing only"),
        ({"b": "t" * 128}, 29, "is longer than topic max length: 127"),
        ({"b": "SCHEDULE_TOPIC_XXXX"}, 16, "Sending message to topic[SCHEDULE_TOPIC_XXXX] is"),
        ({"b": "unmade", "c": "nothing"}, 17, "topic[unmade] not exist, apply first please!"),
        ({"b": "refusals", "e": 4}, 29, "request queueId[4] is illegal, refusals Producer: "),
        ({"b": "refusals", "i": "a\x01" + "b" * 33_000 + "\x02"}, 13, "the message is illegal"),
        ({"b": "refusals", "e": "x"}, 1, "the custom field <e> is no number: x"),
        ({"b": "%RETRY%" + "g" * 10, "m": True}, 13, "batch request does not support retry group"),
    ],
)
async def test_refusals_of_sends(
    running: Running, fields: dict[str, object], code: int, remark: str
) -> None:
    await running.client.send("refusals")
    answer = await running.client.send("refusals", **fields)
    assert answer.code == code
    assert remark in str(answer.remark)


async def test_numbers_that_are_too_large_harm_no_send_beside_them(running: Running) -> None:
    """They arrive in one turn: one append of the store."""
    client, topic = running.client, "numbers"
    await client.send(topic)
    for letter in "fhj":
        for number in (1 << 31, -(1 << 31) - 1, (1 << 63) - 1):
            sends = client.send(topic), client.send(topic, **{letter: number}), client.send(topic)
            codes = [answer.code for answer in await asyncio.gather(*sends)]
            assert codes == [Answer.SUCCESS, Answer.MESSAGE_ILLEGAL, Answer.SUCCESS]
    most = await client.send(topic, j=(1 << 31) - 1)
    fields = {"group": "again", "offset": int(most.fields["msgId"][16:], 16), "delayLevel": 0}
    assert (await client.ask(Request.CONSUMER_SEND_MSG_BACK, **fields)).code == Answer.SUCCESS
    assert [m.queue_offset for m in await client.all(topic)] == list(range(20))


async def test_a_body_that_is_too_large_is_refused(running: Running) -> None:
    answer = await running.client.send("large", bytes((4 << 20) + 1))
    assert answer.code == Answer.MESSAGE_ILLEGAL
    assert "msg body length limit 4194304B" in str(answer.remark)
    assert (await running.client.send("large")).code == Answer.SUCCESS


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({"topic": "absent"}, 17, "topic[absent] not exist, apply first please!"),
        ({"consumerGroup": "a b"}, 26, "subscription group [a b] does not exist"),
        ({"queueId": 4}, 29, "queueId[4] is illegal, topic:[pulls] topicConfig.readQueueNums:[4]"),
        ({"sysFlag": 0}, 24, "the consumer's group info not exist"),
        ({"expressionType": "SQL92", "subscription": "a >"}, 23, "parse the consumer's"),
        ({"expressionType": "odd", "subscription": "a"}, 23, "parse the consumer's"),
        ({"queueOffset": "x"}, 1, "the custom field <queueOffset> is no number"),
    ],
)
async def test_refusals_of_pulls(
    running: Running, fields: dict[str, object], code: int, remark: str
) -> None:
    await running.client.send("pulls")
    answer = await running.client.pull("pulls", **fields)
    assert answer.code == code
    assert remark in str(answer.remark)


async def test_messages_are_filtered_by_their_properties(running: Running) -> None:
    client = running.client
    for number in range(6):
        await client.send("sql", b"%d" % number, i=f"n\x01{number}\x02")
    found = await client.all("sql", expressionType="SQL92", subscription="n > 1 AND n <> 4")
    assert [bytes(message.body) for message in found] == [b"2", b"3", b"5"]


async def test_expressions_are_checked_before_a_pull(running: Running) -> None:
    for text, code in (("n > 1", Answer.SUCCESS), ("n >", Answer.SUBSCRIPTION_PARSE_FAILED)):
        body = {"clientId": "c", "group": "g", "subscriptionData": {
            "topic": "sql", "subString": text, "expressionType": "SQL92"}}  # fmt: skip
        assert (await running.client.ask(Request.CHECK_CLIENT_CONFIG, body)).code == code


async def test_a_lite_pull_is_a_pull(running: Running) -> None:
    await running.client.send("lite", b"x")
    fields = {"consumerGroup": "g", "topic": "lite", "queueId": 0, "queueOffset": 0,
              "maxMsgNums": 1, "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0,
              "subscription": "*", "subVersion": 0, "expressionType": "TAG"}  # fmt: skip
    answer = await running.client.ask(Request.LITE_PULL_MESSAGE, **fields)
    assert [bytes(message.body) for message in records(answer)] == [b"x"]


async def test_members_of_a_group_hear_of_each_other(running: Running) -> None:
    one, two = running.another(), running.another()
    answer = await one.heartbeat("one", "members", topic="*")
    assert answer.fields == {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"}
    # The push comes before the answer, as that of RocketMQ's brokers.
    assert [push.code for push in one.pushed] == [Request.NOTIFY_CONSUMER_IDS_CHANGED]
    await two.heartbeat("two", "members", topic="*")
    await until(lambda: len(one.pushed) == 2)
    found = await one.ask(Request.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="members")
    assert bytes(found.body) == b'{"consumerIdList":["one","two"]}'
    await two.stop()
    await until(lambda: len(one.pushed) == 3)
    found = await one.ask(Request.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="members")
    assert bytes(found.body) == b'{"consumerIdList":["one"]}'
    await one.ask(Request.UNREGISTER_CLIENT, clientID="one", consumerGroup="members")
    found = await one.ask(Request.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="members")
    assert (found.code, found.remark) == (1, "no consumer for this group, members")


async def test_a_heartbeat_says_what_pulls_want(running: Running) -> None:
    client = running.another()
    for tag in ("a", "b"):
        await client.send("beats", tag.encode(), i=f"TAGS\x01{tag}\x02")
    await client.heartbeat("c1", "beating", beats="b")
    found = await client.all("beats", consumerGroup="beating", sysFlag=0)
    assert [bytes(message.body) for message in found] == [b"b"]
    pulled = await client.pull("beats", consumerGroup="beating", sysFlag=0, subVersion=8)
    assert pulled.code == Answer.SUBSCRIPTION_NOT_LATEST
    pulled = await client.pull("plain", consumerGroup="beating", sysFlag=0)
    assert pulled.code == Answer.SUBSCRIPTION_NOT_EXIST


async def test_offsets_of_groups(running: Running) -> None:
    client = running.client
    await client.send("offsets")
    asked = {"consumerGroup": "og", "topic": "offsets", "queueId": 0}
    answer = await client.ask(Request.UPDATE_CONSUMER_OFFSET, commitOffset=1, **asked)
    assert answer.code == Answer.SUBSCRIPTION_GROUP_NOT_EXIST
    await client.pull("offsets", consumerGroup="og")
    found = await client.ask(Request.QUERY_CONSUMER_OFFSET, **asked)
    assert found.fields["offset"] == "0"
    found = await client.ask(Request.QUERY_CONSUMER_OFFSET, setZeroIfNotFound=False, **asked)
    assert found.code == Answer.QUERY_NOT_FOUND
    answer = await client.ask(Request.UPDATE_CONSUMER_OFFSET, commitOffset=1, **asked)
    assert answer.code == Answer.SUCCESS
    found = await client.ask(Request.QUERY_CONSUMER_OFFSET, **asked)
    assert found.fields["offset"] == "1"
    await client.pull("offsets", 1, consumerGroup="og", sysFlag=5, commitOffset=7)
    found = await client.ask(Request.QUERY_CONSUMER_OFFSET, **asked)
    assert found.fields["offset"] == "7"
    answer = await client.ask(
        Request.UPDATE_CONSUMER_OFFSET, commitOffset=1, **asked | {"topic": "absent"}
    )
    assert answer.code == Answer.TOPIC_NOT_EXIST


async def test_places_of_a_queue(running: Running) -> None:
    client = running.client
    for _ in range(3):
        await client.send("places")
    (message, *_) = records(await client.pull("places"))
    asked = {"topic": "places", "queueId": 0}
    assert (await client.ask(Request.GET_MAX_OFFSET, **asked)).fields["offset"] == "3"
    assert (await client.ask(Request.GET_MIN_OFFSET, **asked)).fields["offset"] == "0"
    earliest = await client.ask(Request.GET_EARLIEST_MSG_STORETIME, **asked)
    assert earliest.fields["timestamp"] == str(message.stored_ms)
    found = await client.ask(Request.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=1, **asked)
    assert found.fields["offset"] == "0"


async def test_a_queue_is_locked_by_one_client(running: Running) -> None:
    client = running.client
    queue = {"topic": "ordered", "brokerName": "b", "queueId": 0}
    body = {"consumerGroup": "lg", "clientId": "one", "mqSet": [queue]}
    locked = await client.ask(Request.LOCK_BATCH_MQ, body)
    assert b'"queueId":0' in bytes(locked.body)
    locked = await client.ask(Request.LOCK_BATCH_MQ, body | {"clientId": "two"})
    assert bytes(locked.body) == b'{"lockOKMQSet":[]}'
    await client.ask(Request.UNLOCK_BATCH_MQ, body)
    locked = await client.ask(Request.LOCK_BATCH_MQ, body | {"clientId": "two"})
    assert b'"queueId":0' in bytes(locked.body)


async def test_a_message_comes_back_and_dies(running: Running) -> None:
    """Sent back with a level, it goes to the retry topic; with a negative one to dead letters."""
    client = running.client
    await client.send("comesback", b"again")
    (message,) = records(await client.pull("comesback", consumerGroup="bg"))
    asked = {"offset": message.physical, "group": "bg", "originTopic": "comesback"}
    answer = await client.ask(Request.CONSUMER_SEND_MSG_BACK, delayLevel=-1, **asked)
    assert answer.code == Answer.SUCCESS
    (dead,) = records(await client.pull("%DLQ%bg"))
    assert bytes(dead.body) == b"again"
    assert dead.reconsume_times == 1
    assert dead.properties["RETRY_TOPIC"] == "comesback"
    assert dead.properties["ORIGIN_MESSAGE_ID"] == message.message_id
    asked["offset"] = 999_999_999
    answer = await client.ask(Request.CONSUMER_SEND_MSG_BACK, delayLevel=0, **asked)
    assert (answer.code, answer.remark) == (1, "look message by offset failed, 999999999")


async def test_a_send_to_a_retry_topic_may_be_a_dead_letter(running: Running) -> None:
    client = running.client
    await client.send("%RETRY%rg", b"first", j=1)
    await client.send("%RETRY%rg", b"last", j=17)
    assert [bytes(m.body) for m in records(await client.pull("%RETRY%rg"))] == [b"first"]
    assert [bytes(m.body) for m in records(await client.pull("%DLQ%rg"))] == [b"last"]


async def test_a_reply_is_pushed_to_the_client_that_asked(running: Running) -> None:
    asker = running.another()
    await asker.heartbeat("asker", "", "askers")
    properties = "REPLY_TO_CLIENT\x01asker\x02CORRELATION_ID\x01c1\x02"
    answer = await running.client.ask(
        Request.SEND_REPLY_MESSAGE_V2, b"42", a="p", b="c_REPLY_TOPIC", c="TBW102", d=4, e=0, f=0,
        g=1, h=0, i=properties,
    )  # fmt: skip
    assert answer.code == Answer.SUCCESS
    (push,) = asker.pushed
    assert (push.code, bytes(push.body)) == (Request.PUSH_REPLY_MESSAGE_TO_CLIENT, b"42")
    assert "CORRELATION_ID\x01c1" in push.fields["properties"]
    answer = await running.client.ask(
        Request.SEND_REPLY_MESSAGE_V2, b"42", a="p", b="c_REPLY_TOPIC", c="TBW102", d=4, e=0, f=0,
        g=1, h=0, i="REPLY_TO_CLIENT\x01nobody\x02",
    )  # fmt: skip
    assert (answer.code, answer.remark) == (
        1, "push reply message fail, channel of <nobody> not found."
    )  # fmt: skip


async def test_an_unknown_request_is_refused(running: Running) -> None:
    answer = await running.client.ask(9999)
    assert (answer.code, answer.remark) == (3, " request type 9999 not supported")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"clientID":1}', b'{"clientID":null}'])
async def test_a_malformed_heartbeat_is_refused(running: Running, body: bytes) -> None:
    answer = await running.client.ask(Request.HEART_BEAT, body)
    assert answer.code == Answer.SYSTEM_ERROR
    assert (await running.client.send("still")).code == Answer.SUCCESS


async def test_what_was_sent_is_there_after_a_restart(tmp_path: Path) -> None:
    made = await Running.begin(tmp_path)
    await made.client.send("kept", b"kept")
    await made.client.pull("kept", 0, consumerGroup="kg", sysFlag=5, commitOffset=1)
    await made.stop()
    made = await Running.begin(tmp_path)
    client: Client = made.client
    assert [bytes(m.body) for m in records(await client.pull("kept"))] == [b"kept"]
    asked = {"consumerGroup": "kg", "topic": "kept", "queueId": 0}
    assert (await client.ask(Request.QUERY_CONSUMER_OFFSET, **asked)).fields["offset"] == "1"
    assert made.broker.topics.get("kept") is not None
    await made.stop()


@pytest.mark.provokes("rocketmq.damaged")
async def test_a_damaged_log_is_said(tmp_path: Path) -> None:
    made = await Running.begin(tmp_path)
    for _ in range(3):
        await made.client.send("damaged")
    (_, second, _) = await made.client.all("damaged")
    place = second.physical
    await made.stop()
    (path,) = (tmp_path / "commitlog").iterdir()
    with path.open("r+b") as file:
        file.seek(place + 90)
        file.write(b"\xff" * 8)
    made = await Running.begin(tmp_path)
    assert len(await made.client.all("damaged")) == 2
    await made.stop()


@pytest.mark.parametrize(
    "bytes_",
    [
        b"\x00\x00\x00\x03abc", b"\x7f\xff\xff\xff", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03",
        b"\x00\x00\x00\x08\x00\x00\x00\x04{}{}", b"\x00\x00\x00\x06\x00\x00\x00\x02{}",
        b"\x00\x00\x00\x08\x01\x00\x00\x04abcd", b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\r\n",
        b"\x00\x00\x00\x08\x05\x00\x00\x04abcd",
    ],
)  # fmt: skip
async def test_what_is_no_command_ends_its_own_connection(running: Running, bytes_: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(bytes_)
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()
    assert (await running.client.send("unharmed")).code == Answer.SUCCESS


@pytest.mark.parametrize("code", sorted(Request))
@pytest.mark.parametrize("fields", ["none", "absurd"])
async def test_absurd_requests_are_answered(running: Running, code: int, fields: str) -> None:
    """Every code without fields, and with fields that nobody means: one answer, and no fault."""
    names = (
        *"abcdefghijklmn", "topic", "consumerGroup", "producerGroup", "group", "queueId",
        "queueOffset", "maxMsgNums", "sysFlag", "offset", "timestamp", "commitOffset", "key",
        "maxNum", "beginTimestamp", "endTimestamp", "delayLevel", "readQueueNums", "perm", "index",
        "writeQueueNums", "count", "clientId", "msgId", "statsName", "statsKey", "srcGroup",
        "destGroup", "groupName", "suspendTimeoutMillis", "subVersion", "brokerName",
    )  # fmt: skip
    given = dict.fromkeys(names, str(1 << 62)) if fields == "absurd" else {}
    answer = await running.client.ask(code, b"\x00\xff{", **given)
    assert "Error:" not in str(answer.remark), answer.remark
