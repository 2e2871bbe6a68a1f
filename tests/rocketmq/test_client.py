"""The client of RocketMQ's protocol, which signs, with a broker that wants signatures."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import lz4.frame
import pytest
import pytest_asyncio

from convoymq.model.errors import Refused, Unavailable
from convoymq.rocketmq.acting.escape import KEY_PROPERTY, Key
from convoymq.rocketmq.client.client import NoTopic, Queue, RocketClient, content_of, send_fields
from convoymq.rocketmq.namesrv.service import NameServer
from convoymq.rocketmq.namesrv.settings import NamesrvSettings
from convoymq.rocketmq.remoting.codes import Answer, Request
from tests.rocketmq.broker_client import Running
from tests.running import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = {"count": 32, "bytes_max": 1 << 20}
QUEUE = Queue("b", 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RocketClient]:
    directory: Path = tmp_path_factory.mktemp("client")
    server = NameServer(
        NamesrvSettings(port=0, host="127.0.0.1", kv_path=str(directory / "kv.json")), lambda: 1
    )
    names = f"127.0.0.1:{await server.start()}"
    file = directory / "conf" / "plain_acl.yml"
    file.parent.mkdir()
    file.write_text("accounts:\n- accessKey: user\n  secretKey: word\n  admin: true\n")
    made = await Running.begin(
        directory / "store", namesrvAddr=names, aclEnable=True, rocketmqHome=directory
    )
    await until(lambda: server.tables.route("TBW102") is not None)
    found = RocketClient(f"{names};127.0.0.1:9", "g", ("user", "word"))
    # The first send makes a topic.
    await found.send("TBW102", Queue("b", 0), b"", {})
    yield found
    await found.stop()
    await made.stop()
    await server.stop()


async def begin(client: RocketClient, topic: str, count: int) -> None:
    fields = {
        "topic": topic, "defaultTopic": "TBW102", "readQueueNums": "2", "writeQueueNums": "2",
        "perm": "6", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false",
    }  # fmt: skip
    made = await client.ask("TBW102", "b", Request.UPDATE_AND_CREATE_TOPIC, fields)
    assert made.code == Answer.SUCCESS
    for number in range(count):
        await client.send(topic, QUEUE, b"%d" % number, {"TAGS": "t", "KEYS": f"k{number}"})


async def test_a_queue_is_written_and_read(client: RocketClient) -> None:
    await begin(client, "plain", 5)
    assert await client.queues("plain") == [Queue("b", 0), QUEUE]
    assert await client.writable("plain") == {"b": 2}
    assert await client.ends("plain", QUEUE) == (0, 5)
    found = await client.pull("plain", QUEUE, 2, **LIMITS)
    assert [content_of(m) for m in found.messages] == [b"2", b"3", b"4"]
    assert (found.next, found.min, found.max) == (5, 0, 5)
    assert not (await client.pull("plain", QUEUE, 5, hold_ms=0, **LIMITS)).messages
    assert await client.offset_at("plain", QUEUE, 0) == 0
    assert await client.offset_at("plain", QUEUE, found.messages[-1].stored_ms + 1) == 5
    assert await client.committed("plain", QUEUE) is None
    await client.commit("plain", QUEUE, 3)
    assert await client.committed("plain", QUEUE) == 3
    assert [content_of(m) for m in await client.with_key("plain", "b", "k1")] == [b"1"]
    assert await client.with_key("plain", "b", "k9") == []


async def test_a_message_with_a_key_is_stored_once_and_earlier_attempts_are_refused(
    client: RocketClient,
) -> None:
    await begin(client, "once", 0)
    key = Key("spark.x.0", "once", 1, 7)
    for _ in range(2):
        await client.send("once", QUEUE, b"a", {}, key=key, once=True)
    found = await client.pull("once", QUEUE, 0, **LIMITS)
    assert [m.properties[KEY_PROPERTY] for m in found.messages] == [str(key)]
    known = await client.keys("once", "b", key.broker, 5)
    assert known is not None
    assert (known.ranges, known.generation) == ({"once:1": [(7, 8)]}, 5)
    later = key._replace(offset=8)
    with pytest.raises(Unavailable, match=r"spark\.x\.0 sends by another replica now"):
        await client.send("once", QUEUE, b"b", {}, key=later, once=True, generation=4)
    await client.send("once", QUEUE, b"b", {}, key=later, once=True, generation=5)


async def test_bodies_are_uncompressed(client: RocketClient) -> None:
    await begin(client, "packed", 0)
    fields = send_fields(
        group="g", topic="packed", broker="b", queue=1, properties="", born_ms=1, sys_flag=0x101
    )
    body = lz4.frame.compress(b"content" * 100)
    assert (await client.ask("packed", "b", Request.SEND_MESSAGE_V2, fields, body)).code == 0
    found = await client.pull("packed", QUEUE, 0, **LIMITS)
    assert [content_of(m) for m in found.messages] == [b"content" * 100]


async def test_errors_say_what_is_wrong(client: RocketClient) -> None:
    await begin(client, "errors", 0)
    with pytest.raises(NoTopic, match="knows topic missing"):
        await client.queues("missing")
    with pytest.raises(Unavailable, match="broker x of topic errors has no master now"):
        await client.ends("errors", Queue("x", 0))
    with pytest.raises(Unavailable, match="queueId"):
        await client.pull("errors", Queue("b", 9), 0, **LIMITS)
    with pytest.raises(Refused, match="bytes of properties"):
        await client.send("errors", QUEUE, b"", {"p": "x" * 40_000})
    stranger = RocketClient(";".join(client.name_servers), "g", ("user", "wrong"))
    with pytest.raises(Unavailable, match="Check signature failed"):
        await stranger.ends("errors", QUEUE)
    nowhere = RocketClient("127.0.0.1:9", "g")
    with pytest.raises(Unavailable, match=r"no name server answers of 127\.0\.0\.1:9"):
        await nowhere.queues("errors")
    for each in (stranger, nowhere):
        await each.stop()
