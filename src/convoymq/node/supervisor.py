"""The supervisor of a machine with several processes: forks them, and starts those again that end.

    bind the addresses of clients ─▶ import what a node imports ─▶ fork process 1, 2, …
    process ended by a fault      ─▶ the same process again, later each time
    process ended in order        ─▶ it stays away; the last one ends the supervisor
    SIGTERM, SIGINT               ─▶ SIGTERM to all; the end when all have ended
    SIGHUP                        ─▶ SIGHUP to all
    the supervisor itself dies    ─▶ its channels close, and the processes end in order

It has no event loop and no thread, and does nothing for messages: a process is a node like any
other (ADR 0221).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from convoymq.edges.registry import import_edges
from convoymq.model.config import Config, ConfigError
from convoymq.model.errors import BrokerError
from convoymq.node import logs
from convoymq.node.logs import EXIT_FAULT
from convoymq.node.preflight import bind_clients, check_files
from convoymq.node.process import run
from convoymq.node.service_manager import READY, ServiceManager
from convoymq.node.supervised import Supervised, process_config, process_count
from convoymq.transport.shared_sockets import ClientCounts, SharedSockets, TurnSockets, end

RESTART_MIN_S = 0.1
RESTART_MAX_S = 10.0
STEADY_S = 60.0
"""A process that has run for so long is started again at once when it ends."""
KILL_MARGIN_S = 10.0
"""Beyond twice the time of an orderly stop; then a process that does not end is killed."""
REPORT_BYTES_MAX = 4096
LATE = (
    "convoymq.broker.facade",
    "convoymq.broker.node_view",
    "convoymq.edges.http.app",
    "convoymq.edges.http.http_server",
    "convoymq.kernels.route_cache",
    "convoymq.node.registration",
)
"""Modules that a node imports while it starts: the processes share their memory."""


@dataclass(slots=True)
class Process:
    """One process of the machine."""

    number: int
    config: Config
    pid: int = 0
    """0: it does not run."""
    channel: socket.socket | None = None
    started_s: float = 0.0
    heard_s: float = 0.0
    """Last sign of life."""
    ready: bool = False
    failures: int = 0
    restart_s: float | None = None
    """Time of its next start; None: it runs, or has ended in order."""


class Supervisor:
    """The processes of one machine.

    Args:
        config: of the machine.
        count: number of processes.
        run_node: runs a node in a forked process; returns its exit code.
    """

    def __init__(
        self,
        config: Config,
        count: int,
        run_node: Callable[[Config, Supervised], int] = run,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log = structlog.get_logger().bind(node=config.node.id)
        self.processes = [Process(k, process_config(config, k, count)) for k in range(1, count + 1)]
        self._run_node = run_node
        self._clock = clock
        self._shared = [(bound, ClientCounts(count)) for bound in bind_clients(config)]
        """Sockets of AMQP, sockets of HTTP, and what the processes say of them."""
        self._manager = ServiceManager()
        self._selector = selectors.PollSelector()
        self._kill_after_s = KILL_MARGIN_S + 2 * config.node.stop_timeout_ms / 1000
        self._stop_by_s: float | None = None
        self._told_ready = False
        self._was_ready = False
        self._code = 0

    def run(self) -> int:
        """Runs the processes until all have ended; returns the exit code."""
        wakeup, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = (wakeup, write)
        self._selector.register(wakeup, selectors.EVENT_READ, None)
        former = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        numbers = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        try:
            for process in self.processes:
                self._start(process)
            while any(p.pid or p.restart_s is not None for p in self.processes):
                self._turn()
        finally:
            signal.set_wakeup_fd(former)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._selector.close()
            for each in self._wakeup:
                os.close(each)
            for bound, _ in self._shared:
                for sockets in bound.values():
                    for sock in sockets:
                        sock.close()
        return self._code

    # -- processes ----------------------------------------------------------------------------

    def _start(self, process: Process) -> None:
        own, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process.restart_s = None
        process.ready = False
        pid = os.fork()
        if not pid:
            # Whatever happens, only the parent goes on behind this line.
            code = EXIT_FAULT
            try:
                own.close()
                self._leave_behind()
                (amqp, clients), (http, turns) = self._shared
                supervised = Supervised(
                    SharedSockets(amqp, clients, process.number),
                    TurnSockets(http, turns, process.number),
                    channel,
                )
                code = self._run_node(process.config, supervised)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        channel.close()
        own.setblocking(False)
        process.pid, process.channel = pid, own
        process.started_s = process.heard_s = self._clock()
        self._selector.register(own, selectors.EVENT_READ, process)

    def _leave_behind(self) -> None:
        """Gives up, in a forked process, what only the supervisor uses."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        for each in self._wakeup:
            os.close(each)
        for process in self.processes:
            if process.channel is not None:
                process.channel.close()

    def _ended(self, process: Process, code: int) -> None:
        assert process.channel is not None
        self._hear(process)
        self._selector.unregister(process.channel)
        process.channel.close()
        process.pid, process.channel = 0, None
        # What it has written there counts no more.
        for bound, counts in self._shared:
            end(bound, counts, process.number)
        again_s: float | None = None
        if self._stop_by_s is None and code:
            if code == 1 and not self._was_ready:
                # A refusal, before any process served: the next start would be refused as well.
                self._code = code
                self._stop()
            else:
                again_s = self._pause(process)
                process.restart_s = self._clock() + again_s
        elif code and not self._code:
            self._code = code
        process.ready = False
        (self.log.warning if code else self.log.info)(
            "machine.process_ended",
            process=process.number, code=code, restart_after_s=again_s,
        )  # fmt: skip

    def _pause(self, process: Process) -> float:
        lived_s = self._clock() - process.started_s
        process.failures = 0 if lived_s >= STEADY_S else process.failures + 1
        if not process.failures:
            return 0.0
        return min(RESTART_MAX_S, RESTART_MIN_S * 2.0 ** (process.failures - 1))

    def _stop(self) -> None:
        if self._stop_by_s is None:
            self._manager.stopping()
            self._stop_by_s = self._clock() + self._kill_after_s
        for process in self.processes:
            process.restart_s = None
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            if process.pid:
                # Not reaped yet, so the number is still its own.
                os.kill(process.pid, number)

    # -- turns --------------------------------------------------------------------------------

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            if key.data is None:
                self._on_signals(os.read(key.fd, 512))
            else:
                self._hear(key.data)
        for process in self.processes:
            if process.pid:
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if pid:
                    self._ended(process, os.waitstatus_to_exitcode(status))
        now = self._clock()
        for process in self.processes:
            if process.restart_s is not None and now >= process.restart_s:
                self._start(process)
        if self._stop_by_s is not None and now >= self._stop_by_s:
            self._signal(signal.SIGKILL)
        self._watch(now)

    def _wait_s(self) -> float:
        """Returns how long nothing is due."""
        due = [p.restart_s for p in self.processes if p.restart_s is not None]
        if self._stop_by_s is not None:
            due.append(self._stop_by_s)
        first = min(due, default=self._clock() + 1.0) - self._clock()
        return max(0.0, min(1.0, first))

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self._stop()
        if signal.SIGHUP in numbers:
            self._signal(signal.SIGHUP)

    def _hear(self, process: Process) -> None:
        """Reads what a process reports."""
        assert process.channel is not None
        with contextlib.suppress(OSError):
            while report := process.channel.recv(REPORT_BYTES_MAX):
                process.heard_s = self._clock()
                if READY in report.decode().splitlines():
                    process.ready = self._was_ready = True
        if all(p.ready for p in self.processes) and not self._told_ready:
            self._told_ready = True
            count = len(self.processes)
            self._manager.ready(f"{count} processes serve clients")
            self.log.info("machine.ready", processes=count)

    def _watch(self, now: float) -> None:
        """Kills a process that hangs, where a service manager watches, and tells that it watches
        them."""
        limit_s = self._manager.watchdog_s
        for process in self.processes:
            if limit_s and process.ready and process.pid and now - process.heard_s > limit_s:
                os.kill(process.pid, signal.SIGKILL)
        self._manager.beat()


def run_machine(config: Config) -> int:
    """Runs as many processes as the configuration says; returns the exit code."""
    try:
        count = process_count(config)
    except ConfigError as error:
        print(f"convoy node: {error.text}", file=sys.stderr)
        return 2
    return _supervise(config, count) if count > 1 else run(config)


def _supervise(config: Config, count: int) -> int:
    try:
        output = logs.set_up(config.log)
    except OSError as error:
        print(f"convoy node: log.file: {error}", file=sys.stderr)
        return 1
    log = structlog.get_logger().bind(node=config.node.id)
    try:
        check_files(config)
        supervisor = Supervisor(config, count)
    except (BrokerError, ConfigError) as error:
        log.error("node.failed", reason=error.text)
        return 1
    import_edges()
    for name in (*LATE, *(("uvloop",) if config.node.loop == "uvloop" else ())):
        importlib.import_module(name)
    gc.collect()
    # Collections of the processes leave alone what they share.
    gc.freeze()
    try:
        return supervisor.run()
    finally:
        output.close()
