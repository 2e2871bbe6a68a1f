"""The hot loops of `convoy perf`."""

from collections.abc import Mapping, Sequence

STAMP_SIZE: int

def clock_us() -> int: ...

class Histogram:
    total: int
    largest: int
    def merge(self, other: Histogram) -> None: ...
    def percentile(self, fraction: float) -> int: ...
    def summary(self) -> dict[str, int]: ...

class Ledger:
    confirmed: int
    unique: int
    duplicates: int
    def missing(self) -> int: ...

class _Socket:
    fd: int
    closed: bool
    awaits_write: bool
    bad: int
    others: list[tuple[int, int, bytes]]
    measuring: bool
    @property
    def wants_write(self) -> bool: ...
    def write(self, data: bytes) -> None: ...
    def feed(self, data: bytes) -> None: ...
    def lost(self) -> None: ...
    def on_readable(self) -> None: ...
    def on_writable(self) -> None: ...

class Publisher(_Socket):
    ledger: Ledger
    window: int
    next_seq: int
    outstanding: int
    published: int
    resent: int
    nacked: int
    returned: int
    last_confirm_us: int
    longest_gap_us: int
    longest_gap_end_us: int
    def __init__(
        self, ledger: Ledger, publisher: int, run: int, window: int, confirm_latency: Histogram
    ) -> None: ...
    def connect(
        self, fd: int, template: bytes, stamp_at: int, number_at: int, distinct: int
    ) -> None: ...
    def pump(self, limit: int, stop: bool) -> int: ...

class Consumer(_Socket):
    consumed: int
    redelivered: int
    foreign: int
    out_of_order: int
    gaps: int
    last_deliver_us: int
    longest_gap_us: int
    longest_gap_end_us: int
    def __init__(
        self,
        ledgers: Sequence[Ledger],
        run: int,
        ack_every: int,
        no_ack: bool,
        e2e_latency: Histogram,
        verify: bool,
    ) -> None: ...
    def connect(self, fd: int) -> None: ...
    def ack_all(self) -> None: ...

def work_through(
    events: list[tuple[int, int]], workers: Mapping[int, Publisher | Consumer]
) -> list[int]: ...
