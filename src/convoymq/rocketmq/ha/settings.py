"""Configuration of replication, under RocketMQ's names: a part of the broker's."""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.model.config.keys import Section, key
from convoymq.model.config.values import parse_bytes
from convoymq.replication.group.stream import BLOCK_BYTES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class HaSettings(Section):
    """Copies of messages, and the links between a master and its slaves."""

    in_sync: int = key(
        "inSyncReplicas", 1, "Copies of an acknowledged message, the master's among them. With "
        "SYNC_MASTER and 2 or more none is lost with the master.", low=1, high=16,
    )  # fmt: skip
    in_sync_min: int = key(
        "minInSyncReplicas", 1, "As few copies are enough while slaves are away, with "
        "`enableAutoInSyncReplicas`. Fewer than 2: acknowledged messages may be lost then.",
        low=1, high=16,
    )  # fmt: skip
    auto: bool = key(
        "enableAutoInSyncReplicas", False, "Messages need as many copies as there are replicas in "
        "sync, between the two numbers above.",
    )  # fmt: skip
    gap_bytes_max: int = key(
        "haMaxGapNotInSync", 256 << 20, "A slave that is further behind is not in sync.",
        parse=parse_bytes, low=1, high=1 << 40,
    )  # fmt: skip
    block_bytes_max: int = key(
        "haTransferBatchSize", 32 << 10, "Size of a block for RocketMQ's slaves.",
        parse=parse_bytes, low=1024, high=BLOCK_BYTES_MAX,
    )  # fmt: skip
    heartbeat_ms: int = key(
        "haSendHeartbeatInterval", 5000, "Time between two signs of life on a link on which "
        "nothing else is sent.", unit="ms", low=10,
    )  # fmt: skip
    silence_ms: int = key(
        "haHousekeepingInterval", 20_000, "A link on which nothing arrives for so long is closed.",
        unit="ms", low=50,
    )  # fmt: skip

    def check(self) -> None:
        """See `Section`."""
        if self.auto and self.in_sync_min > self.in_sync:
            raise ValueError("minInSyncReplicas must not be larger than inSyncReplicas")
