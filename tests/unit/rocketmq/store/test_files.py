"""Files of a store: damage, full disks, what is too old, the index, checkpoints."""

from __future__ import annotations

import random
import zlib

import pytest

from convoymq.kernels import rocketmq_records as records
from convoymq.model.errors import StorageFault
from convoymq.rocketmq.store.checkpoint import Checkpoint, Progress, decode
from convoymq.rocketmq.store.types import (
    Damage,
    Draft,
    GetStatus,
    Message,
    PutStatus,
    encode_properties,
    java_hash,
)
from convoymq.storage.files import MemoryDirectory
from tests.unit.rocketmq.store.stores import Opened

HOUR_MS = 3_600_000


def flip(disk: MemoryDirectory, physical: int) -> None:
    """Damages a byte of the log."""
    inode = disk.names[f"commitlog/{physical - physical % 8192:020d}"]
    assert inode is not None
    inode.content[physical % 8192] ^= 0x55


def filled(count: int = 40, **settings: object) -> tuple[Opened, list[int]]:
    """A store of messages with 300 bytes, and their physical offsets."""
    opened = Opened(**settings)
    placed = [opened.put(Draft("a", 0, bytes([i]) * 300))[0] for i in range(count)]
    return opened, [one.physical for one in placed]


def test_a_damaged_message_is_not_served() -> None:
    opened, places = filled()
    disk = opened.close()
    flip(disk, places[5] + 120)
    again = Opened(disk)
    assert again.store.message_at(places[5]) is None
    named: list[Damage] = []
    again.store.on_damage.append(named.append)
    assert again.store.get("a", 0, 4, 3).next == 7
    got = again.store.get("a", 0, 5, 1)
    assert [damage.offset for damage in named] == [places[5]]
    assert (got.status, got.next) == (GetStatus.MESSAGE_WAS_REMOVING, 6)
    assert len(again.bodies("a", 0, 6)) == 34


CHECKED: dict[str, object] = {"appends_crc": True}


@pytest.mark.parametrize("part", ["topic", "properties", "queue", "born"])
def test_a_flipped_bit_beside_the_body_is_found_with_a_checksum(part: str) -> None:
    """Only the body has a checksum otherwise, in RocketMQ as here: a flipped property is served."""
    properties = encode_properties({"TAGS": "abcd", "KEYS": "k"})
    places = {"topic": 90, "properties": 98, "queue": 15, "born": 45}
    for settings, is_found in (({}, False), (CHECKED, True)):
        opened = Opened(**settings)
        rows = [opened.put(Draft("a", 0, b"x", properties))[0] for _ in range(3)]
        at = rows[1].physical + places[part]
        disk = opened.close()
        flip(disk, at)
        again = Opened(disk, **settings)
        assert (again.store.message_at(rows[1].physical) is None) == is_found
        assert len(again.bodies("a")) == (2 if is_found else 3)
    # After a crash it ends the log, as other damage does.
    opened = Opened(**CHECKED)
    rows = [opened.put(Draft("a", 0, b"x", properties))[0] for _ in range(3)]
    opened.disk.sync_all()
    flip(opened.disk, rows[1].physical + places[part])
    again = Opened(opened.disk, **CHECKED)
    assert again.store.max_offset == rows[1].physical


def test_the_checksum_is_that_of_rocketmq() -> None:
    """Its `createCrc32` writes ten digits, the last first; `checkMessageAndReturnSize` reads them,
    and what a client sent under the name goes."""
    forged = b"__CRC32#\x011111111111\x02"
    body = b"body"
    part = b"".join((
        (46).to_bytes(4, "big"), bytes(8), (7).to_bytes(4, "big"), (4).to_bytes(4, "big"), body,
        (20).to_bytes(2, "big"), forged,
    ))  # fmt: skip
    opened = Opened(**CHECKED)
    for draft in (
        Draft("a", 0, body), Draft("a", 0, body, b"K\x01v"),
        Draft("a", 0, body, b"K\x01v\x02" + forged),
        Draft("a", 0, part * 2, b"C\x01c", is_batch=True),
    ):  # fmt: skip
        (placed,) = opened.put(draft)
        assert placed.status is PutStatus.PUT_OK
    found = opened.store.get("a", 0, 0, 10).records
    assert len(found) == 5
    for record in found:
        digits = bytes(record)[-11:-1].decode()
        assert bytes(record)[-20:-11] == b"__CRC32#\x01"
        assert int(digits[::-1]) == zlib.crc32(record[:-20]) & 0x7FFFFFFF
        assert Message(record).body == body
    assert [Message(record).properties.get("K") for record in found[:3]] == [None, "v", "v"]
    again = Opened(opened.close(), needs_crc=True)
    assert len(again.bodies("a")) == 5
    # Without the key the name is taken away as well: nobody forges what is compared later.
    plain = Opened()
    (placed,) = plain.put(Draft("a", 0, body, b"K\x01v\x02" + forged))
    message = plain.store.message_at(placed.physical)
    assert message is not None
    assert message.properties == {"K": "v"}
    assert Opened(plain.close(), needs_crc=True).store.message_at(placed.physical) is None


def test_damage_ends_the_log_after_a_crash_and_is_named() -> None:
    opened, places = filled()
    opened.disk.sync_all()
    flip(opened.disk, places[30] + 120)
    again = Opened(opened.disk)
    assert again.report.was_aborted
    assert (again.store.max_offset, again.store.queue_max("a", 0)) == (places[30], 30)
    (damage,) = again.report.damages
    assert (damage.file, damage.offset) == (f"commitlog/{8192:020d}", places[30] - 8192)
    assert again.put(Draft("a", 0, b"x"))[0].physical == places[30]


def test_a_missing_file_hides_those_before_it() -> None:
    opened, _ = filled(60)
    disk = opened.close()
    disk.remove(f"commitlog/{8192:020d}")
    again = Opened(disk)
    assert [damage.offset for damage in again.report.damages] == [0]
    assert again.store.min_offset == 16384
    assert again.bodies("a", 0, again.store.queue_min("a", 0))[-1] == bytes([59]) * 300


def test_the_log_may_have_a_directory_of_its_own() -> None:
    disk, log = MemoryDirectory(), MemoryDirectory()
    opened = Opened(disk, log=log)
    opened.put(*[Draft("a", 0, bytes(300))] * 60)
    opened.disk.sync_all()
    assert (len(log.list()), disk.list("commitlog")) == (3, [])
    for _ in range(2):
        again = Opened(disk, log=log)
        assert len(again.bodies("a")) == 60
        again.close()


def test_a_missing_file_of_a_queue_is_passed_over() -> None:
    opened, _ = filled(60)
    disk = opened.close()
    disk.remove(f"consumequeue/a/0/{400:020d}")
    again = Opened(disk)
    got = again.store.get("a", 0, 25, 5)
    assert (got.status, got.next, got.max) == (GetStatus.OFFSET_FOUND_NULL, 40, 60)
    assert len(again.bodies("a", 0, 40)) == 20


@pytest.mark.parametrize(
    "changed", [{"log_file_bytes": 4096}, {"queue_file_bytes": 200}, {"index_slots": 51}]
)
def test_a_directory_keeps_the_sizes_of_its_files(changed: dict[str, int]) -> None:
    opened, _ = filled()
    opened.put(Draft("a", 0, b"", encode_properties({"KEYS": "k"})))
    disk = opened.close()
    with pytest.raises(StorageFault, match=r"mappedFileSize|maxHashSlotNum"):
        Opened(disk, **changed).store.queue_max("a", 0)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_a_full_disk_refuses_until_there_is_room(flush: str) -> None:
    opened, _ = filled(20, flush=flush)
    opened.disk.capacity = opened.disk.used_bytes() + 100
    told: list[object] = []
    placed = [opened.store.put([Draft("a", 0, bytes(300))], 0)[0] for _ in range(5)]
    opened.store.when_flushed(placed[-1].physical + placed[-1].size, told.append)
    opened.settle()
    assert isinstance(told[0], OSError)
    assert opened.store.put([Draft("a", 0, b"x")], 0)[0].status is PutStatus.SERVICE_NOT_AVAILABLE
    opened.disk.capacity = 1 << 40
    opened.now += 1000
    opened.store.tick(opened.now)
    opened.settle()
    assert len(opened.bodies("a")) == 25
    assert opened.put(Draft("a", 0, b"x"))[0].queue_offset == 25
    assert len(Opened(opened.close(), flush=flush).bodies("a")) == 26


def test_old_files_go_at_their_hour_and_take_queues_and_index_with_them() -> None:
    opened = Opened(reserved_hours=10, delete_when="04")
    for hour in range(40):
        opened.now = hour * HOUR_MS
        keys = encode_properties({"KEYS": f"k{hour}"})
        opened.put(*[Draft("a", 0, bytes(700), keys)] * 8)
        opened.store.tick(opened.now)
        opened.settle()
    day = 24 * HOUR_MS
    opened.store.clean(2 * day + 3 * HOUR_MS)
    opened.store.tick(opened.now)
    begin = opened.store.min_offset
    assert begin > 0
    oldest = opened.store.earliest_time("a", 0)
    assert 0 < oldest <= 18 * HOUR_MS
    assert opened.store.queue_min("a", 0) > 0
    assert opened.store.get("a", 0, 0, 1).status is GetStatus.OFFSET_TOO_SMALL
    while opened.store.clean(2 * day + 4 * HOUR_MS + 1):
        pass
    opened.store.tick(opened.now)
    opened.settle()
    assert opened.store.min_offset > begin
    assert opened.store.queue_max("a", 0) == 320
    assert len(opened.disk.list("consumequeue/a/0")) == 1
    again = Opened(opened.close())
    assert (again.store.min_offset, again.store.queue_max("a", 0)) == (
        opened.store.min_offset, 320,
    )  # fmt: skip


def test_a_full_disk_takes_the_oldest_files_before_their_time() -> None:
    opened, _ = filled(100)
    opened.store._disk_used = lambda: 0.8
    assert opened.store.clean(opened.now) == 0
    opened.store._disk_used = lambda: 0.86
    assert opened.store.clean(opened.now) > 0
    opened.store._disk_used = lambda: 0.91
    opened.store.clean(opened.now)
    assert opened.store.put([Draft("a", 0, b"x")], 0)[0].status is PutStatus.SERVICE_NOT_AVAILABLE


def test_a_topic_goes_and_begins_anew() -> None:
    opened, _ = filled()
    opened.put(Draft("b", 0, b"x"))
    opened.store.tick(opened.now)
    opened.settle()
    opened.store.delete_topic("a")
    assert (opened.store.queue_max("a", 0), opened.store.queue_max("b", 0)) == (0, 1)
    assert opened.disk.list("consumequeue") == ["b"]
    assert opened.put(Draft("a", 0, b"new"))[0].queue_offset == 0
    opened.disk.sync_all()
    crashed = Opened(opened.disk)
    assert crashed.report.was_aborted
    assert crashed.bodies("a") == [b"new"]
    assert Opened(crashed.close()).bodies("a") == [b"new"]


def test_messages_are_found_by_each_of_their_keys() -> None:
    """Over several files, some rows entered and some not; both ends of the time."""
    opened = Opened()
    for number in range(300):
        opened.now = 1_000_000 + number * 1000
        keys = {"KEYS": f"k{number} all  x{number % 7}", "UNIQ_KEY": f"Ä{number}"}
        opened.put(Draft("a", 0, b"x", encode_properties(keys)))
        if number % 50 == 49 and number < 250:
            opened.store.tick(opened.now)
            opened.settle()
    assert len(opened.disk.list("index")) > 2
    store = opened.store
    for number in (0, 57, 249, 250, 299):
        for key in (f"k{number}", f"Ä{number}"):
            (found,) = store.query("a", key, 10, 0, 1 << 60)
            assert found.queue_offset == number
    assert store.query("b", "k1", 10, 0, 1 << 60) == []
    found = store.query("a", "all", 10, 0, 1 << 60)
    assert [message.queue_offset for message in found] == list(range(299, 289, -1))
    found = store.query("a", "x1", 10, 1_100_000, 1_120_000)
    assert [message.queue_offset for message in found] == [120, 113, 106]
    again = Opened(opened.close())
    assert len(again.store.query("a", "all", 64, 0, 1 << 60)) == 64
    assert len(again.store.query("a", "x1", 64, 0, 1 << 60)) == 43


def test_keys_outlive_a_crash_without_a_checkpoint_of_ours() -> None:
    """As RocketMQ leaves a directory: it removes such a file of the index, with all its keys."""
    opened = Opened()
    for number in range(150):
        opened.put(Draft("a", 0, bytes(200), encode_properties({"KEYS": f"k{number}"})))
        opened.now += 1000
        opened.store.tick(opened.now)
        opened.settle()
    inode = opened.disk.names["checkpoint"]
    assert inode is not None
    times = Checkpoint(log_ms=opened.now - 20_000, queues_ms=opened.now - 20_000)
    inode.content[:] = times.encode()
    opened.disk.sync_all()
    again = Opened(opened.disk)
    assert 0 < again.report.records_checked < 150
    for number in range(150):
        assert len(again.store.query("a", f"k{number}", 9, 0, 1 << 60)) == 1


def test_without_an_index_no_start_makes_one() -> None:
    opened = Opened(index_enabled=False)
    opened.put(Draft("a", 0, b"x", encode_properties({"KEYS": "k"})))
    opened.disk.sync_all()
    again = Opened(opened.disk, index_enabled=False)
    assert again.bodies("a") == [b"x"]
    assert again.store.query("a", "k", 9, 0, 1 << 60) == []
    assert [name for name in again.close().names if name.startswith("index/")] == []


def test_a_checkpoint_counts_with_its_times_only() -> None:
    checkpoint = Checkpoint(1, 2, 3, 4, 5, Progress(6, 7, 8))
    content = checkpoint.encode()
    assert decode(content) == checkpoint
    assert decode(b"\0" * 7 + b"\2" + content[8:]).progress is None
    assert decode(content[:70]).progress is None
    assert decode(b"") == Checkpoint()


def test_a_batch_becomes_messages_with_the_properties_of_both() -> None:
    def part(body: bytes, properties: bytes) -> bytes:
        length = 22 + len(body) + len(properties)
        return b"".join((
            length.to_bytes(4, "big"), bytes(8), (7).to_bytes(4, "big"),
            len(body).to_bytes(4, "big"), body, len(properties).to_bytes(2, "big"), properties,
        ))  # fmt: skip

    opened = Opened()
    body = part(b"one", b"TAGS\x01t") + part(b"two", b"K\x01v\x02") + part(b"", b"")
    (placed,) = opened.put(Draft("a", 0, body, b"CLUSTER\x01c\x02", is_batch=True))
    assert (placed.count, placed.queue_offset) == (3, 0)
    messages = [Message(record) for record in opened.store.get("a", 0, 0, 5).records]
    assert ",".join(message.message_id for message in messages) == placed.message_id
    assert [bytes(message.body) for message in messages] == [b"one", b"two", b""]
    assert [message.flag for message in messages] == [7, 7, 7]
    assert [message.properties for message in messages] == [
        {"TAGS": "t", "CLUSTER": "c"}, {"K": "v", "CLUSTER": "c"}, {"CLUSTER": "c"},
    ]  # fmt: skip
    assert placed.size == sum(message.size for message in messages)
    for cut in range(1, len(body)):
        damaged = opened.store.put([Draft("a", 0, body[:cut], is_batch=True)], 0)[0]
        whole = cut in (len(part(b"one", b"TAGS\x01t")), len(body) - 22)
        assert (damaged.status is PutStatus.PUT_OK) is whole


@pytest.mark.parametrize("text", ["", "TagA", "a" * 300, "ü", "日本", "\U0001f600x"])
def test_hashes_are_java_s(text: str) -> None:
    """Against the definition: s[0]*31^(n-1) + … over UTF-16 units."""
    data = text.encode("utf-16-be")
    units = [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]
    expected = 0
    for unit in units:
        expected = (expected * 31 + unit) % (1 << 32)
    assert java_hash(text) % (1 << 32) == expected
    opened = Opened()
    opened.put(Draft("a", 0, b"", encode_properties({"TAGS": text})))
    asked: list[int] = []
    opened.store.get("a", 0, 0, 1, matches=lambda code, _message: bool(asked.append(code)))
    assert asked == [java_hash(text)]
    assert java_hash("TagA") == 2598919


def test_a_delayed_message_has_its_time_for_a_tags_code() -> None:
    opened = Opened()
    properties = encode_properties({"DELAY": "3", "TAGS": "t"})
    opened.put(Draft("SCHEDULE_TOPIC_XXXX", 2, b"", properties))
    asked: list[int] = []
    opened.store.get(
        "SCHEDULE_TOPIC_XXXX", 2, 0, 1, matches=lambda code, _message: bool(asked.append(code))
    )
    assert asked == [opened.now + 10_000]


def test_damaged_bytes_never_break_the_reader() -> None:
    """It reads to the end, finds less, or says why: nothing else, and never beyond its block."""
    random_ = random.Random(7)
    opened = Opened(log_file_bytes=1 << 20)
    keys = encode_properties({"TAGS": "t", "KEYS": "a b", "UNIQ_KEY": "u", "DELAY": "2"})
    for topic in ("a", "SCHEDULE_TOPIC_XXXX", "long" * 40):
        opened.put(*[Draft(topic, 0, random_.randbytes(40), keys, born_host=bytes(20))] * 4)
    block = bytes(opened.store.read_raw(0, 1 << 20))
    for _ in range(5000):
        data = bytearray(block)
        for _ in range(random_.randrange(1, 4)):
            at = random_.randrange(len(data))
            data[at : at + random_.choice((0, 1, 4))] = random_.randbytes(random_.choice((0, 1, 4)))
        data = data[: random_.randrange(len(data) + 1)]
        for check in (records.RECORD, records.UNCHECKED):
            why, read, size, count, _, runs, rows = records.scan(data, 0, 0, check, [1000, 5000])
            assert records.ENDED <= why <= records.DAMAGED
            assert 0 <= read <= len(data)
            assert sum(run[3] for run in runs) <= count
            assert len(rows) % 20 == 0
            assert size >= 0
            for run in runs:
                assert len(run[4]) == 20 * run[3]
                for at in range(0, len(run[4]), 20):
                    place = int.from_bytes(run[4][at : at + 8], "big")
                    length = int.from_bytes(run[4][at + 8 : at + 12], "big")
                    message = Message(memoryview(bytes(data[place : place + length])))
                    assert len(message.body) + len(message.properties_bytes) < length
                    assert message.keys
        records.is_record(data, 0, records.RECORD_ALWAYS)


def test_damaged_batches_are_refused_or_whole() -> None:
    """Whatever is accepted becomes records that a reader takes."""
    random_ = random.Random(11)
    part = b"".join((
        (30).to_bytes(4, "big"), bytes(8), (7).to_bytes(4, "big"), (4).to_bytes(4, "big"), b"body",
        (4).to_bytes(2, "big"), b"K\x01v\x02",
    ))  # fmt: skip
    accepted = 0
    for _ in range(3000):
        data = bytearray(part * 3)
        for _ in range(random_.randrange(3)):
            data[random_.randrange(len(data))] = random_.choice((0, 1, 4, 30, 255))
        draft = Draft("a", 0, bytes(data[: random_.randrange(60, 91)]), b"C\x01c", is_batch=True)
        offsets = {("a", 0): 5}
        block, rows = records.encode([draft], 0, 1 << 20, 1 << 20, 0, offsets, 1, bytes(8), False)
        ((size, count, _, _),) = rows
        assert (size == len(block)) if block else size < 0
        why, read, _, found, *_ = records.scan(block, 0, 0, records.BODY, [])
        assert (why, read, found) == (records.ENDED, len(block), count if block else 0)
        assert offsets["a", 0] == 5 + found
        accepted += found > 0
    assert 0 < accepted < 3000
