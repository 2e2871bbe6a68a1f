"""A broker's administration, as `mqadmin` asks for it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from convoymq.model.json import JsonObject
from convoymq.rocketmq.namesrv.service import NameServer
from convoymq.rocketmq.namesrv.settings import NamesrvSettings
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.remoting.signing import signature
from tests.rocketmq.broker_client import Client, Running, records
from tests.running import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One broker, and the name server that it registers with, for all tests of the file."""
    directory: Path = tmp_path_factory.mktemp("broker")
    server = NameServer(
        NamesrvSettings(port=0, host="127.0.0.1", kv_path=str(directory / "kv.json")), lambda: 1
    )
    port = await server.start()
    made = await Running.begin(directory / "store", namesrvAddr=f"127.0.0.1:{port}")
    made.names, made.names_port = server, port
    await until(lambda: server.tables.route("TBW102") is not None)
    yield made
    await made.stop()
    await server.stop()


def content(answer: Command) -> JsonObject:
    assert answer.code == Answer.SUCCESS, answer.remark
    return json.loads(answer.body, dict[str, object])


async def create(client: Client, topic: str, **fields: object) -> Command:
    known = {
        "topic": topic, "defaultTopic": "TBW102", "readQueueNums": 2, "writeQueueNums": 2,
        "perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": False,
    }  # fmt: skip
    return await client.ask(Request.UPDATE_AND_CREATE_TOPIC, **known | fields)


@pytest.mark.provokes("rocketmq.topic_changed", "rocketmq.topic_deleted", "rocketmq.group_created")
async def test_a_topic_is_made_changed_and_deleted(running: Running) -> None:
    client, tables = running.client, running.names.tables
    assert (await create(client, "made", attributes="+a=1,+b=2")).code == Answer.SUCCESS
    found = content(await client.ask(Request.GET_TOPIC_CONFIG, topic="made"))
    assert (found["readQueueNums"], found["attributes"]) == (2, {"a": "1", "b": "2"})
    # The name server knows it before the answer.
    assert tables.route("made").queue_datas[0].read_queue_nums == 2
    await create(client, "made", readQueueNums=8, attributes="-a,+b=3")
    found = content(await client.ask(Request.GET_TOPIC_CONFIG, topic="made"))
    assert (found["readQueueNums"], found["attributes"]) == (8, {"b": "3"})
    await client.send("made")
    await client.pull("made", consumerGroup="mg", sysFlag=5, commitOffset=1)
    content(await client.ask(Request.GET_ALL_TOPIC_CONFIG))["topicConfigTable"]["made"]
    assert (await client.ask(Request.DELETE_TOPIC_IN_BROKER, topic="made")).code == Answer.SUCCESS
    assert (await client.ask(Request.GET_TOPIC_CONFIG, topic="made")).code == Answer.TOPIC_NOT_EXIST
    asked = {"consumerGroup": "mg", "topic": "made", "queueId": 0}
    found = await client.ask(Request.QUERY_CONSUMER_OFFSET, **asked)
    assert found.code == Answer.QUERY_NOT_FOUND
    await create(client, "made")
    assert (await client.pull("made")).code == Answer.PULL_NOT_FOUND


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({"topic": "a b"}, 29, "contains illegal characters"),
        ({"topic": "SELF_TEST_TOPIC"}, 29, "is conflict with system topic."),
        ({"topic": "b"}, 29, "is conflict with system topic."),
        ({"readQueueNums": 1 << 20}, 29, "a topic has at most 65536 queues"),
        ({"readQueueNums": -1}, 29, "a topic has at most 65536 queues"),
        ({"perm": "x"}, 1, "the custom field <perm> is no number"),
        ({"attributes": "x"}, 1, "add/alter attribute format is wrong"),
    ],
)
async def test_topics_that_are_refused(
    running: Running, fields: dict[str, object], code: int, remark: str
) -> None:
    answer = await create(running.client, **{"topic": "refused", **fields})
    assert (answer.code, remark in str(answer.remark)) == (code, True)


async def test_a_topic_that_may_not_be_read(running: Running) -> None:
    """Sends are not refused, as by RocketMQ's brokers: clients see permissions in routes."""
    client = running.client
    await create(client, "writeonly", perm=2)
    answer = await client.pull("writeonly")
    assert (answer.code, answer.fields["forbiddenType"]) == (16, "3")
    await create(client, "readonly", perm=4)
    assert (await client.send("readonly")).code == Answer.SUCCESS


async def test_lists_of_topics_and_groups_are_made_at_once(running: Running) -> None:
    client = running.client
    topics = [{"topicName": f"list{n}", "readQueueNums": 1, "writeQueueNums": 1} for n in range(3)]
    body = {"topicConfigList": topics}
    assert (await client.ask(Request.UPDATE_AND_CREATE_TOPIC_LIST, body)).code == Answer.SUCCESS
    assert (await client.send("list2")).code == Answer.SUCCESS
    body = {"groupConfigList": [{"groupName": f"lg{n}"} for n in range(3)]}
    code = Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST
    assert (await client.ask(code, body)).code == Answer.SUCCESS
    assert running.broker.groups.get("lg2") is not None


@pytest.mark.provokes("rocketmq.group_deleted")
async def test_a_group_is_made_changed_and_deleted(running: Running) -> None:
    client = running.client
    body = {"groupName": "made-group", "retryMaxTimes": 3, "consumeEnable": False}
    code = Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    assert (await client.ask(code, body)).code == Answer.SUCCESS
    found = content(await client.ask(Request.GET_SUBSCRIPTIONGROUP_CONFIG, group="made-group"))
    assert found["retryMaxTimes"] == 3
    await create(client, "of-group")
    answer = await client.pull("of-group", consumerGroup="made-group")
    assert (answer.code, answer.fields["forbiddenType"]) == (16, "2")
    table = content(await client.ask(Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG))
    assert "made-group" in table["subscriptionGroupTable"]
    await client.ask(Request.DELETE_SUBSCRIPTIONGROUP, groupName="made-group", cleanOffset=True)
    assert running.broker.groups.get("made-group") is None
    assert (await client.ask(code, {"groupName": "a b"})).code == Answer.INVALID_PARAMETER


async def test_a_group_is_forbidden_a_topic(running: Running) -> None:
    client = running.another()
    await create(client, "forbidden")
    await client.heartbeat("c", "fg", forbidden="*")
    asked = {"group": "fg", "topic": "forbidden"}
    found = content(await client.ask(Request.UPDATE_AND_GET_GROUP_FORBIDDEN, **asked))
    assert found["readable"] is True
    await client.ask(Request.UPDATE_AND_GET_GROUP_FORBIDDEN, readable=False, **asked)
    answer = await client.pull("forbidden", consumerGroup="fg", sysFlag=0)
    assert (answer.code, answer.fields["forbiddenType"]) == (16, "5")
    await client.ask(Request.UPDATE_AND_GET_GROUP_FORBIDDEN, readable=True, **asked)
    answer = await client.pull("forbidden", consumerGroup="fg", sysFlag=0)
    assert answer.code == Answer.PULL_NOT_FOUND


async def test_statistics_of_topics_and_groups(running: Running) -> None:
    client = running.another()
    await create(client, "counted", readQueueNums=1, writeQueueNums=1)
    for _ in range(3):
        await client.send("counted")
    await client.pull("counted", consumerGroup="cg", sysFlag=5, commitOffset=1)
    queue = '{"topic":"counted","brokerName":"b","queueId":0}'
    found = content(await client.ask(Request.GET_TOPIC_STATS_INFO, topic="counted"))
    assert found["offsetTable"][queue]["maxOffset"] == 3
    found = content(await client.ask(Request.GET_CONSUME_STATS, consumerGroup="cg"))
    row = found["offsetTable"][queue]
    assert (row["brokerOffset"], row["consumerOffset"]) == (3, 1)
    found = content(await client.ask(Request.GET_BROKER_CONSUME_STATS, isOrder=False))
    assert any("cg" in row for row in found["consumeStatsList"])
    assert found["totalDiff"] >= 2
    found = content(await client.ask(Request.QUERY_TOPIC_CONSUME_BY_WHO, topic="counted"))
    assert found["groupList"] == ["cg"]
    found = content(await client.ask(Request.QUERY_TOPICS_BY_CONSUMER, group="cg"))
    assert found["topicList"] == ["counted"]
    found = content(await client.ask(Request.QUERY_CONSUME_TIME_SPAN, topic="counted", group="cg"))
    assert found["consumeTimeSpanSet"][0]["messageQueue"]["topic"] == "counted"
    stats = {"statsName": "TOPIC_PUT_NUMS", "statsKey": "counted"}
    found = content(await client.ask(Request.VIEW_BROKER_STATS_DATA, **stats))
    assert found["statsMinute"]["sum"] == 3
    stats["statsKey"] = "absent"
    assert (await client.ask(Request.VIEW_BROKER_STATS_DATA, **stats)).code == 1
    found = content(
        await client.ask(
            Request.QUERY_CONSUME_QUEUE, topic="counted", queueId=0, index=2, count=9,
            consumerGroup="cg",
        )
    )  # fmt: skip
    assert (len(found["queueData"]), found["maxQueueIndex"]) == (1, 3)
    absent = await client.ask(Request.GET_TOPIC_STATS_INFO, topic="absent")
    assert (absent.code, absent.remark) == (17, "topic[absent] not exist")


async def test_connections_of_groups(running: Running) -> None:
    client = running.another()
    await client.heartbeat("both", "ccg", "pcg", some="a||b")
    found = content(await client.ask(Request.GET_CONSUMER_CONNECTION_LIST, consumerGroup="ccg"))
    assert found["connectionSet"][0]["clientId"] == "both"
    assert found["subscriptionTable"]["some"]["subString"] == "a||b"
    found = content(await client.ask(Request.GET_PRODUCER_CONNECTION_LIST, producerGroup="pcg"))
    assert found["connectionSet"][0]["language"] == "PYTHON"
    found = content(await client.ask(Request.GET_ALL_PRODUCER_INFO))
    assert found["data"]["pcg"][0]["clientId"] == "both"
    asked = {"group": "ccg", "topic": "some"}
    found = content(await client.ask(Request.QUERY_SUBSCRIPTION_BY_CONSUMER, **asked))
    assert found["subscriptionData"]["topic"] == "some"
    absent = await client.ask(Request.GET_CONSUMER_CONNECTION_LIST, consumerGroup="absent")
    assert (absent.code, absent.remark) == (206, "the consumer group[absent] not online")
    absent = await client.ask(Request.GET_PRODUCER_CONNECTION_LIST, producerGroup="absent")
    assert (absent.code, absent.remark) == (1, "the producer group[absent] not exist")


async def test_a_consumer_answers_through_the_broker(running: Running) -> None:
    client, consumer = running.client, running.another()
    await create(client, "through")
    sent = await client.send("through")
    await consumer.heartbeat("asked", "tg", through="*")
    consumer.replies[Request.GET_CONSUMER_RUNNING_INFO] = b'{"properties":{}}'
    asked = {"consumerGroup": "tg", "clientId": "asked"}
    found = await client.ask(Request.GET_CONSUMER_RUNNING_INFO, **asked)
    assert bytes(found.body) == b'{"properties":{}}'
    found = await client.ask(
        Request.CONSUME_MESSAGE_DIRECTLY, msgId=sent.fields["msgId"], topic="through", **asked
    )
    assert found.code == Answer.SUCCESS
    pushed = consumer.pushed[-1]
    assert pushed.fields["brokerName"] == "b"
    assert records(pushed)[0].topic == "through"
    asked["clientId"] = "absent"
    found = await client.ask(Request.GET_CONSUMER_RUNNING_INFO, **asked)
    assert (found.code, found.remark) == (1, "The Consumer <tg> <absent> not online")
    table = b'{"messageQueueTable":{{"brokerName":"b","queueId":0,"topic":"through"}:5}}'
    consumer.replies[Request.GET_CONSUMER_STATUS_FROM_CLIENT] = table
    asked = {"topic": "through", "group": "tg"}
    found = content(await client.ask(Request.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, **asked))
    assert list(found["consumerTable"]["asked"].values()) == [5]


async def test_offsets_are_reset_and_cloned(running: Running) -> None:
    """The next pull is sent to the offset that an operator set, once."""
    client = running.client
    await create(client, "resets", readQueueNums=1, writeQueueNums=1)
    for _ in range(3):
        await client.send("resets")
    await client.pull("resets", consumerGroup="reg", sysFlag=5, commitOffset=3)
    asked = {"topic": "resets", "group": "reg", "isForce": True}
    code = Request.INVOKE_BROKER_TO_RESET_OFFSET
    found = content(await client.ask(code, timestamp=0, **asked))
    assert list(found["offsetTable"].values()) == [0]
    place = {"consumerGroup": "reg", "topic": "resets", "queueId": 0}
    answer = await client.ask(Request.UPDATE_CONSUMER_OFFSET, commitOffset=3, **place)
    assert answer.remark == "Offset has been previously reset"
    answer = await client.pull("resets", 3, consumerGroup="reg")
    assert (answer.code, answer.remark) == (Answer.PULL_OFFSET_MOVED, "OFFSET_RESET")
    assert answer.fields["nextBeginOffset"] == "0"
    assert len(await client.all("resets", 0, consumerGroup="reg")) == 3
    answer = await client.ask(code, timestamp=-1, queueId=0, offset=2, **asked)
    assert list(content(answer)["offsetTable"].values()) == [2]
    answer = await client.ask(code, timestamp=-1, queueId=0, offset=9, **asked)
    assert answer.remark == "Target offset 9 not in consume queue range [0-3]"
    clone = {"srcGroup": "reg", "destGroup": "cloned", "topic": "resets", "isOffline": True}
    await client.ask(Request.CLONE_GROUP_OFFSET, **clone)
    assert running.broker.offsets.of("cloned", "resets") == {0: 2}
    asked = {"topic": "resets", "compareGroup": "cloned", "filterGroups": ""}
    found = content(await client.ask(Request.QUERY_CORRECTION_OFFSET, **asked))
    assert found["correctionOffsets"] == {"0": 2}
    table = content(await client.ask(Request.GET_ALL_CONSUMER_OFFSET))
    assert table["offsetTable"]["resets@reg"] == {"0": 2}


@pytest.mark.provokes("rocketmq.configuration_changed")
async def test_the_configuration_is_read_and_changed(running: Running) -> None:
    client, broker = running.client, running.broker
    found = await client.ask(Request.GET_BROKER_CONFIG)
    lines = dict(line.split("=", 1) for line in bytes(found.body).decode().splitlines())
    assert (lines["brokerName"], lines["flushDiskType"]) == ("b", "ASYNC_FLUSH")
    answer = await client.ask(Request.UPDATE_BROKER_CONFIG, b"brokerPermission=4\n")
    assert answer.code == Answer.SUCCESS
    assert running.names.tables.route("TBW102").queue_datas[0].perm == 4
    await client.ask(Request.UPDATE_BROKER_CONFIG, b"brokerPermission=6\n")
    assert broker.settings.permission == 6
    answer = await client.ask(Request.UPDATE_BROKER_CONFIG, b"brokerConfigPath=/x\n")
    assert (answer.code, answer.remark) == (16, "Can not update config in black list.")
    answer = await client.ask(Request.UPDATE_BROKER_CONFIG, b"brokerPermissionn=6\n")
    assert "unknown key brokerPermissionn; did you mean brokerPermission?" in str(answer.remark)
    answer = await client.ask(Request.UPDATE_BROKER_CONFIG, b"\xff=1")
    assert answer.code == 1


async def test_what_a_broker_does(running: Running) -> None:
    client = running.client
    table = content(await client.ask(Request.GET_BROKER_RUNTIME_INFO))["table"]
    assert (table["brokerVersionDesc"], table["brokerActive"]) == ("V5_3_3", "true")
    for code in (
        Request.CLEAN_EXPIRED_CONSUMEQUEUE, Request.DELETE_EXPIRED_COMMITLOG,
        Request.CLEAN_UNUSED_TOPIC,
    ):  # fmt: skip
        assert (await client.ask(code)).code == Answer.SUCCESS
    found = content(await client.ask(Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER))
    assert "SCHEDULE_TOPIC_XXXX" in found["topicList"]


async def test_queues_are_assigned_to_consumers(running: Running) -> None:
    clients = [running.another() for _ in range(2)]
    await create(clients[0], "assigned", readQueueNums=3, writeQueueNums=3)
    for number, client in enumerate(clients):
        await client.heartbeat(f"a{number}", "ag", assigned="*")

    async def assigned(number: int, strategy: str) -> list[int]:
        body = {
            "topic": "assigned", "consumerGroup": "ag", "clientId": f"a{number}",
            "strategyName": strategy, "messageModel": "CLUSTERING",
        }  # fmt: skip
        found = content(await clients[0].ask(Request.QUERY_ASSIGNMENT, body))
        rows = found.get("messageQueueAssignments", [])
        return [row["messageQueue"]["queueId"] for row in rows]

    assert [await assigned(n, "AVG") for n in range(2)] == [[0, 1], [2]]
    assert [await assigned(n, "AVG_BY_CIRCLE") for n in range(2)] == [[0, 2], [1]]
    assert await assigned(0, "ODD") == []
    mode = {"topic": "assigned", "consumerGroup": "ag", "mode": "POP", "popShareQueueNum": -1}
    answer = await clients[0].ask(Request.SET_MESSAGE_REQUEST_MODE, mode)
    assert answer.code == Answer.SUCCESS
    assert await assigned(0, "AVG") == [-1]
    found = content(await clients[0].ask(Request.GET_ALL_MESSAGE_REQUEST_MODE))
    assert found["messageRequestModeMap"]["assigned"]["ag"]["mode"] == "POP"
    for change, code in (
        ({"topic": "%RETRY%g"}, 16), ({"topic": "absent"}, 17), ({"consumerGroup": "a b"}, 26),
        ({"mode": "PUSH"}, 29),
    ):  # fmt: skip
        answer = await clients[0].ask(Request.SET_MESSAGE_REQUEST_MODE, mode | change)
        assert answer.code == code


@pytest.mark.provokes(
    "rocketmq.client_silent", "rocketmq.not_persisted", "rocketmq.store_open", "rocketmq.registered"
)
async def test_silent_clients_are_forgotten_and_files_written_again(
    running: Running, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{running.names_port}"
    made = await Running.begin(
        tmp_path, channelExpiredTimeout=100, flushConsumerOffsetInterval=10, namesrvAddr=address,
        brokerName="silent",
    )  # fmt: skip
    client = made.client
    await client.heartbeat("silent", "sg", topic="*")
    await until(lambda: not made.broker.clients.consumers)
    made.broker.offsets.commit("sg", "topic", 0, 1)
    path = made.broker.config_path / "consumerOffset.json"
    await until(path.exists)
    shutil.rmtree(made.broker.config_path)
    made.broker.config_path.write_text("in the way")
    made.broker.offsets.commit("sg", "topic", 0, 2)
    await until(lambda: made.broker.persist_failures > 0)
    made.broker.config_path.unlink()
    await until(lambda: path.exists() and msgspec.json.decode(path.read_bytes())["offsetTable"])
    await made.stop()


@pytest.mark.provokes("rocketmq.accounts_read", "rocketmq.accounts_unreadable")
async def test_accounts_are_needed_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "conf" / "plain_acl.yml"
    file.parent.mkdir()
    account = "accounts:\n- accessKey: user\n  secretKey: word\n  admin: true\n"
    file.write_text(account)
    made = await Running.begin(
        tmp_path / "store", aclEnable=True, rocketmqHome=tmp_path, channelExpiredTimeout=100
    )
    client = made.client
    answer = await client.send("closed")
    assert (answer.code, answer.remark) == (1, "No accessKey is configured")
    fields = {"a": "p", "b": "closed", "c": "TBW102", "d": 1, "e": 0, "f": 0, "g": 1, "h": 0}
    signed = request(0, {name: str(value) for name, value in fields.items()}, b"x")
    signed.fields["AccessKey"] = "user"
    fields["Signature"] = signature(signed, b"word")
    answer = await client.ask(Request.SEND_MESSAGE_V2, b"x", AccessKey="user", **fields)
    assert answer.code == Answer.SUCCESS
    file.write_text("accounts: x")
    with capture_logs() as logs:
        await until(lambda: any(e["event"] == "rocketmq.accounts_unreadable" for e in logs))
    answer = await client.ask(Request.SEND_MESSAGE_V2, b"x", AccessKey="user", **fields)
    assert answer.code == Answer.SUCCESS
    file.write_text(account.replace("word", "another"))
    written = made.broker.accounts_read
    await until(lambda: made.broker.accounts_read > written)
    answer = await client.ask(Request.SEND_MESSAGE_V2, b"x", AccessKey="user", **fields)
    assert answer.remark == "Check signature failed for accessKey=user"
    await made.stop()


@pytest.mark.provokes("rocketmq.not_persisted")
async def test_all_new_groups_of_a_heartbeat_are_one_write(tmp_path: Path) -> None:
    """Each group has a retry topic, too. A file that cannot be written is written later."""
    made = await Running.begin(tmp_path, flushConsumerOffsetInterval=10_000)
    written: list[str] = []
    for file in (made.broker.topics.file, made.broker.groups.file):
        write = file.write
        file.write = lambda value, file=file, write=write: (  # type: ignore[method-assign]
            written.append(file.name), write(value),
        )  # fmt: skip
    config = made.broker.config_path
    config.mkdir(exist_ok=True)
    config.rename(tmp_path / "aside")
    config.write_text("in the way")
    groups = [{"groupName": f"many{n}", "subscriptionDataSet": []} for n in range(200)]
    answer = await made.client.ask(Request.HEART_BEAT, {"clientID": "c", "consumerDataSet": groups})
    assert answer.code == Answer.SUCCESS
    assert sorted(written) == ["config/subscriptionGroup.json", "config/topics.json"]
    config.unlink()
    made.broker.persist()
    table = msgspec.json.decode((config / "topics.json").read_bytes())["topicConfigTable"]
    assert "%RETRY%many199" in table
    await made.stop()
