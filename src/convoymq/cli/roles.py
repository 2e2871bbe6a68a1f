"""`convoy namesrv`, `broker`, `broker-container` and `bridge`: a role of RocketMQ's in this
process, with its options."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import structlog

from convoymq.model.config import ConfigError, LogConfig
from convoymq.model.config.keys import Section
from convoymq.model.errors import BrokerError, InvariantViolated
from convoymq.node import logs
from convoymq.rocketmq.clocks import steady_ms
from convoymq.rocketmq.settings import load, pairs_of

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


class Role(Protocol):
    """A server that runs until it is told to stop."""

    async def start(self) -> int:
        """Begins to serve; returns the port."""

    async def stop(self) -> None:
        """Ends."""


class Configured(NamedTuple):
    """A role's configuration: what holds, which keys have no meaning here, and the role."""

    pairs: Iterable[tuple[str, str]]
    passed_over: Sequence[str]
    make: Callable[[], Role]


def namesrv(arguments: Sequence[str]) -> int:
    """`convoy namesrv`; returns the exit code."""
    from convoymq.rocketmq.namesrv.service import NameServer
    from convoymq.rocketmq.namesrv.settings import UNSERVED, NamesrvSettings

    def configure(path: str | None, changes: Sequence[str]) -> Configured:
        settings, passed_over = load(NamesrvSettings, path, changes, UNSERVED)
        return Configured(_pairs(settings), passed_over, lambda: NameServer(settings, steady_ms))

    return _run("namesrv", "a RocketMQ name server", configure, arguments)


def broker(arguments: Sequence[str]) -> int:
    """`convoy broker`; returns the exit code."""
    from convoymq.rocketmq.broker.configuration import Configuration
    from convoymq.rocketmq.broker.service import Broker

    def configure(path: str | None, changes: Sequence[str]) -> Configured:
        found = Configuration.load(path, changes)
        pairs = ((name, value) for name, value, _ in found.pairs(shown=True))
        return Configured(pairs, found.passed_over, lambda: Broker(found))

    return _run("broker", "a RocketMQ broker", configure, arguments)


def broker_container(arguments: Sequence[str]) -> int:
    """`convoy broker-container`; returns the exit code."""
    from convoymq.rocketmq.acting.container import Container

    def configure(path: str | None, changes: Sequence[str]) -> Configured:
        settings, passed_over = Container.load(path, changes)
        return Configured(_pairs(settings), passed_over, lambda: Container(settings))

    return _run("broker-container", "several RocketMQ brokers in one process", configure, arguments)


def bridge(arguments: Sequence[str]) -> int:
    """`convoy bridge`; returns the exit code: 1 when an operator has to act."""
    from convoymq.rocketmq.bridge.service import Bridge
    from convoymq.rocketmq.bridge.settings import BridgeSettings

    made: list[Bridge] = []

    def make(settings: BridgeSettings) -> Bridge:
        made.append(Bridge(settings, lambda: signal.raise_signal(signal.SIGTERM)))
        return made[0]

    def configure(path: str | None, changes: Sequence[str]) -> Configured:
        settings, passed_over = load(BridgeSettings, path, changes, ())
        shown = ((name, "***" if name == "password" else value) for name, value in _pairs(settings))
        return Configured(shown, passed_over, lambda: make(settings))

    what = "a bridge between ConvoyMQ and a topic of RocketMQ"
    code = _run("bridge", what, configure, arguments)
    return code or int(any(each.failed for each in made))


def _pairs(settings: Section) -> Iterator[tuple[str, str]]:
    return ((name, value) for name, value, _ in pairs_of((settings,), shown=True))


def _run(
    name: str,
    what: str,
    configure: Callable[[str | None, Sequence[str]], Configured],
    arguments: Sequence[str],
) -> int:
    parser = argparse.ArgumentParser(
        prog=f"convoy {name}", description=f"Run {what} in the foreground, until SIGTERM or Ctrl-C."
    )
    parser.add_argument(
        "-c", "--config", metavar="FILE", help="configuration file (key=value, RocketMQ's names)"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one key, over the file; repeatable",
    )
    parser.add_argument("-p", "--print", action="store_true", help="only print the configuration")
    chosen = parser.parse_args(arguments)
    try:
        configured = configure(chosen.config, chosen.set)
    except ConfigError as error:
        print(f"convoy {name}: {error.text}", file=sys.stderr)
        return 2
    if chosen.print:
        for key, value in configured.pairs:
            print(f"{key}={value}")
        return 0
    return run(name, configured.make, configured.passed_over)


def run(name: str, make: Callable[[], Role], passed_over: Sequence[str]) -> int:
    """Runs a role in this process until it is told to stop; returns the exit code.

    Args:
        passed_over: keys of its configuration that have no meaning here.
    """
    import uvloop

    logs.set_up(LogConfig())
    logs.restrict_files()
    log = structlog.get_logger().bind(role=name)
    if passed_over:
        log.info("role.settings_passed_over", keys=list(passed_over))
    try:
        uvloop.run(_serve(name, make, log))
    except (BrokerError, OSError) as error:
        log.error("role.failed", reason=str(error))
        return 1
    except InvariantViolated as error:
        logs.report_fault(log, name, error)
    return 0


async def _serve(name: str, make: Callable[[], Role], log: FilteringBoundLogger) -> None:
    loop = asyncio.get_running_loop()

    def on_fault(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        logs.report_fault(log, context.get("message"), context.get("exception"))

    loop.set_exception_handler(on_fault)
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    role = make()
    port = await role.start()
    log.info("role.ready", port=port)
    try:
        await told.wait()
    finally:
        await role.stop()
        log.info("role.stopped")
