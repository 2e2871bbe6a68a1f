"""Bugs of classic queues."""

from __future__ import annotations

from typing import Any

from tests.sim.planted.registry import late, planting

plant = planting("classic")
_local = late("convoymq.queues.classic.queue:LocalQueue")
_machine = late("convoymq.queues.classic.machine:ClassicMachine")
_backing = late("convoymq.queues.classic.backing:Backing")
_log = late("convoymq.queues.classic.log:ClassicLog")


@plant("a durable queue confirms before its disk has the message", "crash,spike")
def confirmed_before_the_flush() -> None:
    local = _local()
    write = local._write

    def planted(self: Any) -> Any:
        write(self)
        return []

    local._write = planted


@plant("a flush of a classic queue's file is not waited for", "crash,torn")
def classic_flush_without_sync() -> None:
    from convoymq.queues.classic import log_writer

    log_writer._sync = lambda files, failed: files.clear()


@plant("a message is lost where a run is cut", "none")
def lost_at_a_cut() -> None:
    from convoymq.queues.classic.runs import Run

    cut = Run.cut

    def planted(self: Any, first: int, count: int) -> Any:
        return cut(self, first, count - 1 if first and count > 1 else count)

    Run.cut = planted  # type: ignore[method-assign]


@plant("a transient message survives a restart", "crash,kill,stop")
def transient_survives() -> None:
    from convoymq.queues.classic import recovery

    merge = recovery._merge
    recovery._merge = lambda indexes, *, keeps_transient: merge(indexes, keeps_transient=True)


@plant("the time of messages begins anew at a restart", "crash,kill,stop")
def time_begins_anew() -> None:
    backing = _backing()
    recovered_runs = backing.recovered_runs

    def planted(self: Any, stored: Any, count: int, level: int) -> Any:
        if stored.position < self.recovered.upto:
            stored.time_ms = self.recovered.now_ms
        return recovered_runs(self, stored, count, level)

    backing.recovered_runs = planted


@plant("what was acknowledged comes back after a restart", "crash,kill,stop")
def settled_is_not_written() -> None:
    _log().add_settled = lambda self, pairs: None


@plant("recovery of a full file ends at its last record but one", "crash,kill,stop")
def last_record_is_cut() -> None:
    log = _log()
    read_file = log._read_file

    def planted(self: Any, file: Any, number: int, *, may_be_torn: bool) -> Any:
        found = list(read_file(self, file, number, may_be_torn=may_be_torn))
        return iter(found if may_be_torn else found[:-1])

    log._read_file = planted


@plant("a link that breaks leaves the sessions that came over it", "break")
def sessions_outlive_their_link() -> None:
    _local().node_down = lambda self, node, now_ms: None


@plant("publishes of a home that is lost count as safe", "break,crash")
def lost_home_confirms() -> None:
    from convoymq.queues.classic.remote_queue import RemoteQueue

    def planted(self: Any) -> None:
        self._cancel_all("home node is down")
        self.end(self.host.home_down(self.record), published_ok=True)

    RemoteQueue.home_lost = planted  # type: ignore[method-assign]


@plant("a gap in a session is passed over", "loss,break,stale")
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


@plant("a returned message goes behind those that nobody had", "none")
def returned_behind_fresh() -> None:
    backing = _backing()
    give_back = backing.give_back

    def planted(self: Any, run: Any) -> None:
        give_back(self, run)
        line = self.lines[run.block.level]
        line.waiting.extend(line.returned)
        line.returned.clear()

    backing.give_back = planted


@plant("a batch that is read back lacks its first message", "none")
def paging_loses_the_head() -> None:
    backing = _backing()
    take_batch = backing._take_batch
    backing._take_batch = lambda self, line, span: take_batch(self, line, span)[1:]


@plant("a span is read back twice", "none")
def span_is_read_twice() -> None:
    backing = _backing()
    take_batch = backing._take_batch

    def planted(self: Any, line: Any, span: Any) -> Any:
        before = span.start, span.first, span.count, span.bytes
        runs = take_batch(self, line, span)
        if line.count % 2:
            span.start, span.first, span.count, span.bytes = before
            line.count += sum(run.count for run in runs)
            self.count += sum(run.count for run in runs)
        return runs

    backing._take_batch = planted


@plant("settled messages of a span come back after a restart", "crash,kill,stop")
def dead_in_a_span_are_ignored() -> None:
    from convoymq.queues.classic.positions import PositionSet

    PositionSet.within = lambda self, position, count: []  # type: ignore[method-assign]


@plant("messages that were read back have no end of their time", "none")
def time_is_lost_on_disk() -> None:
    from convoymq.queues.classic.times_to_live import TimesToLive

    TimesToLive.at = lambda self, position: (0, None)  # type: ignore[method-assign]


@plant("messages that wait have the time of the day after a restart", "policy,kill,stop")
def time_of_the_day_after_a_restart() -> None:
    from convoymq.queues.classic import queue

    recover = queue.recover

    def planted(log: Any, machine: Any, now_ms: int, **more: Any) -> Any:
        found = log.recover
        log.times.join = lambda: setattr(log.times, "entries", [(0, machine.limits.message_ttl_ms)])
        assert found is not None
        return recover(log, machine, now_ms, **more)

    queue.recover = planted


@plant("a file does not say the time of the messages that come to it", "policy,kill,stop")
def new_files_say_no_time() -> None:
    log = _log()
    roll = log._roll_if_full

    def planted(self: Any) -> None:
        said = self._index.times
        roll(self)
        self._index.times = said

    log._roll_if_full = planted


@plant("a span stays whose messages are all read, and ends with what others moved there")
def span_outlives_its_messages() -> None:
    from convoymq.queues.classic.runs import Run

    def planted(self: Any, line: Any) -> bool:
        while line.waiting:
            span = line.waiting[0]
            if isinstance(span, Run):
                return True
            runs = self._take_batch(line, span)
            if span.start >= span.end:
                line.waiting.popleft()
                self._give_up(line, span)
            line.waiting.extendleft(reversed(runs))
        return False

    _backing()._fill = planted


@plant("a limit drops from the highest priority", "none")
def limit_drops_the_highest() -> None:
    backing = _backing()
    backing.bottom = backing.top


@plant("the lowest priority is handed out first", "none")
def lowest_priority_first() -> None:
    backing = _backing()
    backing.top = backing.bottom


@plant("a record of several priorities is not taken apart", "none")
def priorities_stay_together() -> None:
    from convoymq.queues.classic import machine

    def planted(data: bytes, command: int, count: int, level_max: int) -> Any:
        size = machine.enqueue_bytes(data, command)
        return [(machine_level(data, command, level_max), None, count, size)]

    from convoymq.kernels.classic_records import level_of as machine_level

    machine.split_levels = planted


@plant("a drained grant of a classic queue goes on", "none")
def drained_grant_goes_on() -> None:
    from convoymq.queues.classic import machine
    from convoymq.queues.outcomes import FLAG_DRAIN

    grant = machine.grant
    machine.grant = lambda queue, consumer, flags, body: grant(
        queue, consumer, flags & ~FLAG_DRAIN, body
    )


@plant("a classic queue gives a message to a consumer that called it undeliverable", "none")
def undeliverable_at_home_again() -> None:
    from convoymq.queues.classic import notes

    def planted(machine: Any, avoiding: Any) -> Any:
        return next((each for each in machine.service if each.room() > 0), None)

    notes._next_without = planted


@plant("a restart forgets what consumers said of messages", "stop")
def restart_forgets_notes() -> None:
    _log().add_noted = lambda self, first, last, note: None


@plant("a resting queue is not woken by what it carries out", "none")
def carrying_out_wakes_nothing() -> None:
    from convoymq.queues.classic.resting import Ticked

    Ticked.wake = lambda self, queue: None  # type: ignore[method-assign]
