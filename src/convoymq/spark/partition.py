"""Parts of a read that are handed to tasks. Small and without secrets: Spark pickles it into the
task."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition


@dataclass(frozen=True, slots=True)
class StreamRange(InputPartition):
    """Offsets [start, end) of a stream's partition."""

    stream: str
    partition: int
    start: int
    end: int
    group: int = 0
    """The stream's incarnation: offsets mean nothing in another one of its name. 0 = not known."""


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
