"""Configuration of a store, under RocketMQ's names: a part of the broker's."""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.kernels import rocketmq_records as records
from convoymq.model.config.keys import Section, key

ENTRY_BYTES = 20
"""Of a consume queue's entry."""
DELAY_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


def parse_delays(text: str) -> list[int]:
    """Returns the delay of each level in ms. Raises ValueError."""
    delays = []
    for word in text.split():
        number, unit = word[:-1], word[-1]
        if not number.isdigit() or unit not in "smhd":
            raise ValueError(f"messageDelayLevel: {word} is no delay, as 10s or 2h is")
        delays.append(int(number) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit] * 1000)
    return delays


def parse_hours(text: str) -> frozenset[int]:
    """Returns hours of the day. Raises ValueError."""
    hours = frozenset(int(word) for word in text.split(";") if word)
    if not all(0 <= hour < 24 for hour in hours):
        raise ValueError(f"deleteWhen: {text} are no hours of a day")
    return hours


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings(Section):
    """Files of a store: their sizes, when they are flushed, and when they go."""

    log_path: str = key(
        "storePathCommitLog", "",
        "Directory of the commit log; without it, `commitlog` in `storePathRootDir`.",
    )  # fmt: skip
    log_file_bytes: int = key(
        "mappedFileSizeCommitLog", 1 << 30,
        "Size of a file of the commit log. A directory keeps the size that it was made with.",
        unit="bytes", low=4096, high=1 << 31,
    )  # fmt: skip
    queue_file_bytes: int = key(
        "mappedFileSizeConsumeQueue", 300_000 * ENTRY_BYTES,
        "Size of a file of a consume queue: 20 bytes a message. A directory keeps its size.",
        unit="bytes", low=ENTRY_BYTES, high=1 << 30,
    )  # fmt: skip
    appends_crc: bool = key(
        "enabledAppendPropCRC", False, "A message gets a checksum of all its bytes, property "
        "`__CRC32#`, which starts after a crash and readers compare. Turn it on at all replicas.",
    )  # fmt: skip
    needs_crc: bool = key(
        "forceVerifyPropCRC", False, "A message without that checksum is damaged."
    )
    flush: str = key(
        "flushDiskType", "ASYNC_FLUSH",
        "SYNC_FLUSH: a message is acknowledged when it is on the disk. ASYNC_FLUSH: when the "
        "operating system has it; a power failure loses what was not flushed yet.",
        choices=("ASYNC_FLUSH", "SYNC_FLUSH"),
    )  # fmt: skip
    flush_ms: int = key(
        "flushIntervalCommitLog", 500, "Time between two flushes of the commit log with "
        "ASYNC_FLUSH.", unit="ms", low=10, high=60_000,
    )  # fmt: skip
    flush_pages: int = key(
        "flushCommitLogLeastPages", 4,
        "Pages of 4096 bytes below which the commit log is not flushed.", low=0, high=1 << 20,
    )  # fmt: skip
    flush_thorough_ms: int = key(
        "flushCommitLogThoroughInterval", 10_000,
        "Time after which the commit log is flushed whatever there is.",
        unit="ms", low=10, high=3_600_000,
    )  # fmt: skip
    queue_flush_ms: int = key(
        "flushIntervalConsumeQueue", 1000,
        "Time between two writes of consume queues and index, which follow from the log.",
        unit="ms", low=10, high=60_000,
    )  # fmt: skip
    index_enabled: bool = key("messageIndexEnable", True, "Messages can be found by key.")
    index_slots: int = key(
        "maxHashSlotNum", 5_000_000, "Hash slots of an index file. A directory keeps its number.",
        low=1, high=100_000_000,
    )  # fmt: skip
    index_units: int = key(
        "maxIndexNum", 20_000_000, "Keys of an index file. A directory keeps its number.",
        low=2, high=100_000_000,
    )  # fmt: skip
    query_count_max: int = key(
        "maxMsgsNumBatch", 64, "Messages that a query by key finds.", low=1, high=1024
    )
    reserved_hours: int = key(
        "fileReservedTime", 72, "How long messages are kept.", unit="h", low=1, high=87_600
    )
    delete_when: str = key(
        "deleteWhen",
        "04",
        "Hours of the day (00 to 23, UTC, with `;` between) at which old files go.",
    )
    disk_ratio_max: int = key(
        "diskMaxUsedSpaceRatio", 75,
        "Share of the disk in use from which on old files go at any hour.",
        unit="percent", low=10, high=95,
    )  # fmt: skip
    remove_forcibly: bool = key(
        "cleanFileForciblyEnable", True,
        "From 85 percent of the disk on, the oldest files go before their time.",
    )  # fmt: skip
    message_bytes_max: int = key(
        "maxMessageSize", 4 << 20, "Size of a message's body.", unit="bytes", low=1, high=1 << 29
    )
    delay_levels: str = key(
        "messageDelayLevel", DELAY_LEVELS, "Delays of the levels 1, 2, …, with spaces between."
    )

    @property
    def checked(self) -> int:
        """Returns what readers compare (`kernels.rocketmq_records`)."""
        return (
            records.RECORD_ALWAYS
            if self.needs_crc
            else records.RECORD
            if self.appends_crc
            else records.BODY
        )

    @property
    def is_sync(self) -> bool:
        """Returns whether messages are on the disk when they are acknowledged."""
        return self.flush == "SYNC_FLUSH"

    def check(self) -> None:
        """See `Section`."""
        if self.queue_file_bytes % ENTRY_BYTES:
            raise ValueError(f"mappedFileSizeConsumeQueue must be a multiple of {ENTRY_BYTES}")
        parse_delays(self.delay_levels)
        parse_hours(self.delete_when)
