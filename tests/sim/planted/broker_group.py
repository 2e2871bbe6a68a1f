"""Bugs of broker groups: of the cores of a master, of a slave, and of what compares them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.sim.planted.registry import late, planting

plant = planting("group")
_master = late("convoymq.replication.group.master:Master")
_slave = late("convoymq.replication.group.slave:Slave")
_settings = late("convoymq.replication.group.types:GroupSettings")
FAULTS = "crash,torn,kill,isolate,wipe"


@plant("a slave reports what its disk does not have yet", "none")
def report_before_the_flush() -> None:
    slave = _slave()
    report = slave._report

    def planted(self: Any, now_ms: int) -> Any:
        settings = self.settings
        self.settings = replace(settings, flushes=False)
        try:
            return report(self, now_ms)
        finally:
            self.settings = settings

    slave._report = planted


@plant("a slave's first report has what its disk does not have yet", "break,slow")
def first_report_before_the_flush() -> None:
    from convoymq.replication.group.types import SlaveState

    slave = _slave()
    slave.is_due = lambda self, now_ms: self.state is SlaveState.READY and now_ms >= self._due_ms
    report_before_the_flush()


@plant("one confirmation too few is enough", "isolate")
def one_copy_too_few() -> None:
    master = _master()
    reached = master._reached
    master._reached = lambda self, need: reached(self, max(2, need - 1))


@plant("what was reported on an earlier connection counts on the next", FAULTS)
def reports_outlive_their_link() -> None:
    master = _master()
    on_hello = master._on_hello
    last: dict[Any, int] = {}

    def planted(self: Any, link: Any, slave: int) -> None:
        for other in self.links.values():
            if other.slave == slave:
                last[slave] = max(last.get(slave, -1), other.acked)
        on_hello(self, link, slave)
        link.acked = max(link.acked, last.get(slave, -1), self.pushed)

    master._on_hello = planted


@plant("a slave is sent the log without a comparison of the tails", FAULTS)
def no_tail_check() -> None:
    from convoymq.replication.group import slave, tails

    slave.slave_step = lambda log, lives, common: tails.Step.STREAM  # type: ignore[attr-defined]


@plant("a slave cuts what its master lacks at once", FAULTS)
def cut_before_it_is_fetched() -> None:
    from convoymq.replication.group import slave, tails

    step = tails.slave_step

    def planted(log: Any, lives: Any, common: Any) -> Any:
        found = step(log, lives, common)
        return tails.Step.CUT if found is tails.Step.WAIT else found

    slave.slave_step = planted  # type: ignore[attr-defined]


@plant("a master that returns takes writes without what its slaves have", FAULTS)
def master_returns_at_once() -> None:
    _settings().slaves_to_compare = property(lambda self: 0)


@plant("one slave is enough for a master that returns, whichever it is", FAULTS)
def any_slave_will_do() -> None:
    _settings().slaves_to_compare = property(lambda self: 1)


@plant("a master's log counts as whole after a crash that lost its end", FAULTS)
def whole_after_a_loss() -> None:
    master = _master()
    init = master.__init__

    def planted(self: Any, settings: Any, log: Any, book: Any, save: Any, **rest: Any) -> None:
        init(self, settings, log, replace(book, is_whole=True), save, **{**rest, "is_intact": True})

    master.__init__ = planted


@plant("a slave that has nothing begins at its master's last file", "wipe,kill")
def copy_begins_at_the_last_file() -> None:
    def planted(self: Any, link: Any, offset: int) -> int:
        end = self.log.max_offset
        return offset or max(self.log.min_offset, end - end % self.log.file_bytes)

    _master()._start = planted


@plant("a slave is sent what its master has not stored yet", "none")
def sent_before_it_is_stored() -> None:
    from convoymq.rocketmq.ha.log import StoreLog

    StoreLog.stored = StoreLog.max_offset  # type: ignore[assignment]
