"""Parts of a read that are handed to tasks. Small and without secrets: Spark pickles it into the
task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from convoymq.topics.rules.lineage import FIRST_USER_OFFSET


@dataclass(frozen=True, slots=True)
class StreamRange(InputPartition):
    """Offsets [start, end) of a stream's partition."""

    stream: str
    partition: int
    start: int
    end: int
    group: int = 0
    """The stream's incarnation: offsets mean nothing in another one of its name. 0 = not known."""

    @property
    def subject(self) -> str:
        """Returns what is read, for texts."""
        return f"stream {self.stream}"

    @property
    def constants(self) -> Mapping[str, object]:
        """Returns the columns that have one value in all rows."""
        return {"topic": self.stream, "partition": self.partition}

    def shown(self, offset: int) -> int:
        """Returns an offset as people know it."""
        return offset


@dataclass(frozen=True, slots=True)
class TopicRange(StreamRange):
    """A part of a topic's partition, which is read as a stream: `start` and `end` are offsets of
    that stream, whose first message is the partition's message `FIRST_USER_OFFSET`."""

    topic: str = ""
    logical: int = 1
    hash_seed: int = 0
    created_version: int = 0
    """Route version that created the partition."""

    @property
    def subject(self) -> str:
        return f"topic {self.topic}, partition {self.partition}"

    @property
    def constants(self) -> Mapping[str, object]:
        return {
            "topic": self.topic,
            "partition": self.partition,
            "pid": self.partition,
            "route_version": self.created_version,
        }

    def shown(self, offset: int) -> int:
        return offset + FIRST_USER_OFFSET


@dataclass(frozen=True, slots=True)
class RocketRange(InputPartition):
    """Offsets [start, end) of a queue of RocketMQ."""

    topic: str
    broker: str
    queue: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ReservationRange(InputPartition):
    """Offsets [start, end) of a reservation, or of a lease, of a queue, in one epoch of it."""

    queue: str
    reservation: str
    epoch: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Browse(InputPartition):
    """Read of what is ready in a queue."""

    queue: str
