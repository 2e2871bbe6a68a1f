"""Bugs of classic queues."""

from __future__ import annotations

from typing import Any

from tests.sim.planted.registry import plant


def _local() -> Any:
    from convoymq.queues.classic.queue import LocalQueue

    return LocalQueue


def _machine() -> Any:
    from convoymq.queues.classic.machine import ClassicMachine

    return ClassicMachine


def _log() -> Any:
    from convoymq.queues.classic.log import ClassicLog

    return ClassicLog


@plant("a durable queue confirms before its disk has the message", "crash,spike", "classic")
def confirmed_before_the_flush() -> None:
    local = _local()
    write = local._write

    def planted(self: Any) -> Any:
        write(self)
        return []

    local._write = planted


@plant("a flush of a classic queue's file is not waited for", "crash,torn", "classic")
def classic_flush_without_sync() -> None:
    from convoymq.queues.classic import log_writer

    log_writer._sync = lambda files, failed: files.clear()


@plant("a message is lost where a run is cut", "none", "classic")
def lost_at_a_cut() -> None:
    from convoymq.queues.classic.runs import Run

    cut = Run.cut

    def planted(self: Any, first: int, count: int) -> Any:
        return cut(self, first, count - 1 if first and count > 1 else count)

    Run.cut = planted  # type: ignore[method-assign]


@plant("a transient message survives a restart", "crash,kill,stop", "classic")
def transient_survives() -> None:
    from convoymq.queues.classic import queue

    traits_of = queue.traits_of
    queue.traits_of = lambda record: traits_of(record)._replace(persistent=True)


@plant("the time of messages begins anew at a restart", "crash,kill,stop", "classic")
def time_begins_anew() -> None:
    machine = _machine()
    recover = machine.recover

    def planted(self: Any, block: Any, dead: Any, handed: int, own: Any, now_ms: int) -> None:
        block.time_ms = now_ms
        recover(self, block, dead, handed, own, now_ms)

    machine.recover = planted


@plant("what was acknowledged comes back after a restart", "crash,kill,stop", "classic")
def settled_is_not_written() -> None:
    _log().add_settled = lambda self, pairs: None


@plant("recovery of a full file ends at its last record but one", "crash,kill,stop", "classic")
def last_record_is_cut() -> None:
    log = _log()
    read_file = log._read_file

    def planted(self: Any, file: Any, number: int, *, may_be_torn: bool) -> Any:
        found = list(read_file(self, file, number, may_be_torn=may_be_torn))
        return iter(found if may_be_torn else found[:-1])

    log._read_file = planted


@plant("a link that breaks leaves the sessions that came over it", "break", "classic")
def sessions_outlive_their_link() -> None:
    _local().node_down = lambda self, node, now_ms: None


@plant("publishes of a home that is lost count as safe", "break,crash", "classic")
def lost_home_confirms() -> None:
    from convoymq.queues.classic.queue import RemoteQueue

    def planted(self: Any) -> None:
        self._cancel_all("home node is down")
        self.end(self.host.home_down(self.record), published_ok=True)

    RemoteQueue.home_lost = planted  # type: ignore[method-assign]


@plant("a gap in a session is passed over", "loss,break,stale", "classic")
def gap_is_passed_over() -> None:
    machine = _machine()
    apply = machine.apply

    def planted(self: Any, data: bytes, now_ms: int) -> None:
        from convoymq.kernels.batch import commands

        for _, _, session, seq, *_ in commands(data):
            known = self.sessions.get(session)
            if known is not None and seq > known.seq + 1:
                known.seq = seq - 1
        apply(self, data, now_ms)

    machine.apply = planted


@plant("a returned message goes behind those that nobody had", "none", "classic")
def returned_behind_fresh() -> None:
    machine = _machine()
    give_back = machine.give_back

    def planted(self: Any, runs: list[Any]) -> None:
        give_back(self, runs)
        self.ready.extend(self.returned)
        self.returned.clear()

    machine.give_back = planted
