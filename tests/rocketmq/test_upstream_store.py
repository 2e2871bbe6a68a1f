"""Data directories go from RocketMQ's broker to this store and back, with every message."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from pathlib import Path

import pytest

from convoymq.rocketmq.namesrv.service import NameServer
from convoymq.rocketmq.namesrv.settings import NamesrvSettings
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.connection import Unreachable
from convoymq.rocketmq.store.settings import StoreSettings
from convoymq.rocketmq.store.store import MessageStore
from convoymq.rocketmq.store.types import Draft, Message, encode_properties, java_hash
from convoymq.storage.files import RealDirectory
from tests.patience import PATIENCE_S
from tests.ports import single_port
from tests.rocketmq.broker_client import Client, batch, records
from tests.rocketmq.upstream import broker, mqadmin, needs_rocketmq
from tests.running import until
from tests.unit.storage.inline import InlineWorker

pytestmark = needs_rocketmq

SIZES = {
    "mappedFileSizeCommitLog": 64 << 10, "mappedFileSizeConsumeQueue": 2000,
    "maxHashSlotNum": 100, "maxIndexNum": 400,
}  # fmt: skip
CRC = {"enabledAppendPropCRC": "true", "forceVerifyPropCRC": "true"}
"""RocketMQ's broker reads its own log by these checksums at a start."""
ENDS = pytest.mark.parametrize(("is_killed", "crc"), [(False, {}), (True, {}), (True, CRC)])
HOST = bytes([127, 0, 0, 1, 0, 0, 42, 159])
Bodies = dict[tuple[str, int], list[bytes]]


class Ours:
    """This store on a real directory."""

    def __init__(self, directory: Path, crc: dict[str, str]) -> None:
        self.worker = InlineWorker(automatic=True)
        settings = StoreSettings(
            log_file_bytes=SIZES["mappedFileSizeCommitLog"],
            queue_file_bytes=SIZES["mappedFileSizeConsumeQueue"],
            index_slots=SIZES["maxHashSlotNum"], index_units=SIZES["maxIndexNum"],
            appends_crc=bool(crc), needs_crc=bool(crc),
        )  # fmt: skip
        self.store = MessageStore(
            RealDirectory(directory / "store"), settings, self.worker, clock=now_ms,
            store_host=HOST,
        )  # fmt: skip
        self.report = self.store.open()

    def bodies(self, topic: str, queue: int) -> list[bytes]:
        found: list[bytes] = []
        while got := self.store.get(topic, queue, len(found), 32).records:
            found += [bytes(Message(record).body) for record in got]
        return found

    def check(self, expected: Bodies) -> None:
        """Everything is there, and found by its key and by its tag."""
        assert self.report.damages == []
        for (topic, queue), bodies in expected.items():
            assert self.bodies(topic, queue) == bodies, (topic, queue)
            assert self.store.queue_max(topic, queue) == len(bodies)
            for body in bodies[::37]:
                (found,) = self.store.query(topic, body.split()[0].decode(), 9, 0, 1 << 60)
                assert bytes(found.body) == body
            tag = java_hash(f"tag{int(bodies[0].split()[0][1:]) % 3}")
            got = self.store.get(topic, queue, 0, 1, matches=lambda code, _m, tag=tag: code == tag)
            assert Message(got.records[0]).tags_code == tag


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def reachable(client: Client) -> None:
    """Waits until a broker answers."""
    deadline = time.monotonic() + 10 * PATIENCE_S
    while True:
        try:
            answer = await client.ask(Request.GET_BROKER_CONFIG)
            assert answer.code == Answer.SUCCESS
            return
        except Unreachable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


def properties(number: int) -> dict[str, str]:
    return {"KEYS": f"k{number}", "TAGS": f"tag{number % 3}", "UNIQ_KEY": f"u{number}"}


def body(number: int) -> bytes:
    return f"k{number} ".encode() * (1 + number % 90)


async def send(client: Client, first: int, count: int, expected: Bodies) -> None:
    """Sends single messages and batches to two topics."""
    for number in range(first, first + count):
        place = (f"t{number % 2}", number // 2 % 3)
        text = encode_properties(properties(number)).decode()
        if number % 10:
            content, fields = body(number), {"i": text}
        else:
            content, fields = batch((body(number), text)), {"m": True}
        answer = await client.send(place[0], content, e=place[1], **fields)
        assert answer.code == Answer.SUCCESS, answer.remark
        assert int(answer.fields["queueOffset"]) == len(expected[place])
        expected[place].append(body(number))


@ENDS
async def test_a_directory_of_upstream_is_opened(
    tmp_path: Path, *, is_killed: bool, crc: dict[str, str]
) -> None:
    """Over many files of each kind; twice: what ours adds is there the next time."""
    expected: Bodies = defaultdict(list)
    port = single_port()
    client = Client(port)
    with broker(tmp_path, listenPort=port, **SIZES, **crc) as process:
        await reachable(client)
        await send(client, 0, 900, expected)
        late = encode_properties({**properties(1), "DELAY": "18"}).decode()
        assert (await client.send("t0", b"late", i=late)).code == Answer.SUCCESS
        if is_killed:
            process.kill()
            process.wait()
    await client.stop()
    ours = Ours(tmp_path, crc)
    assert ours.report.was_aborted is is_killed
    ours.check(expected)
    (record,) = ours.store.get("SCHEDULE_TOPIC_XXXX", 17, 0, 9).records
    due: list[int] = []
    ours.store.get("SCHEDULE_TOPIC_XXXX", 17, 0, 1, matches=lambda at, _m: bool(due.append(at)))
    assert due == [Message(record).stored_ms + 7_200_000]
    put(ours, 5000, 100, expected)
    ours.store.close()
    again = Ours(tmp_path, crc)
    assert not again.report.was_aborted
    again.check(expected)


def put(ours: Ours, first: int, count: int, expected: Bodies) -> list[str]:
    """Puts messages as `send` does. Returns their ids."""
    ids = []
    for number in range(first, first + count):
        place = (f"t{number % 2}", number // 2 % 3)
        draft = Draft(
            *place, body(number), encode_properties(properties(number)), born_ms=now_ms(),
            born_host=HOST,
        )  # fmt: skip
        (placed,) = ours.store.put([draft], now_ms())
        ours.store.kick()
        if number % 50 == 0:
            ours.store.tick(now_ms() + number * 100)
        assert placed.queue_offset == len(expected[place])
        expected[place].append(draft.body)
        ids.append(placed.message_id)
    return ids


@ENDS
async def test_a_directory_of_ours_is_opened_by_upstream(
    tmp_path: Path, *, is_killed: bool, crc: dict[str, str]
) -> None:
    """Its broker serves everything, by its tools as well, and goes on where ours was."""
    expected: Bodies = defaultdict(list)
    ours = Ours(tmp_path, crc)
    ids = put(ours, 0, 900, expected)
    if not is_killed:
        ours.store.close()
    settings = NamesrvSettings(port=0, host="127.0.0.1", kv_path=str(tmp_path / "kv"))
    names = NameServer(settings, now_ms)
    address = f"127.0.0.1:{await names.start()}"
    port = single_port()
    client = Client(port)
    with broker(tmp_path, listenPort=port, namesrvAddr=address, brokerName="b", **SIZES, **crc):
        await reachable(client)
        for topic in ("t0", "t1"):
            created = await client.ask(
                Request.UPDATE_AND_CREATE_TOPIC, topic=topic, defaultTopic="TBW102",
                readQueueNums=3, writeQueueNums=3, perm=6, topicFilterType="SINGLE_TAG",
                topicSysFlag=0, order=False,
            )  # fmt: skip
            assert created.code == Answer.SUCCESS
        for (topic, queue), bodies in expected.items():
            found = [bytes(one.body) for one in await pulled(client, topic, queue)]
            assert found == bodies, (topic, queue)
        for number in (0, 450, 899):
            answer = await client.ask(
                Request.QUERY_MESSAGE, topic=f"t{number % 2}", key=f"k{number}", maxNum=9,
                beginTimestamp=0, endTimestamp=1 << 60,
            )  # fmt: skip
            assert [bytes(one.body) for one in records(answer)] == [body(number)]
            shown = await client.ask(
                Request.VIEW_MESSAGE_BY_ID, offset=int(ids[number][16:], 16), topic="t0"
            )
            assert [bytes(one.body) for one in records(shown)] == [body(number)]
        # Its broker registers a new topic a moment later.
        await until(lambda: names.tables.route("t1") is not None)
        text = await asyncio.to_thread(
            mqadmin, tmp_path, "queryMsgByKey", "-n", address, "-t", "t1", "-k", "k899"
        )
        assert "u899" in text
        await send(client, 900, 60, expected)
    await client.stop()
    await names.stop()
    again = Ours(tmp_path, crc)
    again.check(expected)
    put(again, 1000, 10, expected)
    again.store.close()


async def pulled(client: Client, topic: str, queue: int) -> list[Message]:
    """Everything in a queue."""
    found: list[Message] = []
    while True:
        answer = await client.pull(topic, len(found), queue)
        if answer.code != Answer.SUCCESS:
            return found
        found += records(answer)
