"""`convoy namesrv`, `convoy broker`, `convoy broker-container`: a role of RocketMQ's in this
process, with its options."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import structlog

from convoymq.model.config import ConfigError, LogConfig
from convoymq.model.errors import BrokerError, InvariantViolated
from convoymq.node import logs
from convoymq.rocketmq.settings import keys_of, load, text_of

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

UMASK = 0o027


class Role(Protocol):
    """A server that runs until it is told to stop."""

    async def start(self) -> int:
        """Begins to serve; returns the port."""

    async def stop(self) -> None:
        """Ends."""


MakeRole: TypeAlias = Callable[[], Role]


def namesrv(arguments: Sequence[str]) -> int:
    """`convoy namesrv`; returns the exit code."""
    from convoymq.rocketmq.namesrv.service import NameServer
    from convoymq.rocketmq.namesrv.settings import UNSERVED, NamesrvSettings

    parser = argparse.ArgumentParser(
        prog="convoy namesrv",
        description="Run a RocketMQ name server in the foreground, until SIGTERM or Ctrl-C.",
    )
    _add_options(parser)
    chosen = parser.parse_args(arguments)
    try:
        settings, passed_over = load(NamesrvSettings, chosen.config, chosen.set, UNSERVED)
    except ConfigError as error:
        print(f"convoy namesrv: {error.text}", file=sys.stderr)
        return 2
    if chosen.print:
        for name, (field, _) in keys_of(NamesrvSettings).items():
            print(f"{name}={text_of(getattr(settings, field))}")
        return 0
    make = lambda: NameServer(settings, lambda: time.monotonic_ns() // 1_000_000)  # noqa: E731
    return run("namesrv", make, passed_over)


def broker(arguments: Sequence[str]) -> int:
    """`convoy broker`; returns the exit code."""
    from convoymq.rocketmq.broker.configuration import Configuration
    from convoymq.rocketmq.broker.service import Broker

    parser = argparse.ArgumentParser(
        prog="convoy broker",
        description="Run a RocketMQ broker in the foreground, until SIGTERM or Ctrl-C.",
    )
    _add_options(parser)
    chosen = parser.parse_args(arguments)
    try:
        configuration = Configuration.load(chosen.config, chosen.set)
    except ConfigError as error:
        print(f"convoy broker: {error.text}", file=sys.stderr)
        return 2
    if chosen.print:
        for name, value, _ in configuration.pairs():
            print(f"{name}={value}")
        return 0
    return run("broker", lambda: Broker(configuration), configuration.passed_over)


def broker_container(arguments: Sequence[str]) -> int:
    """`convoy broker-container`; returns the exit code."""
    from convoymq.rocketmq.acting.container import Container, ContainerSettings

    parser = argparse.ArgumentParser(
        prog="convoy broker-container",
        description="Run several RocketMQ brokers in one process, until SIGTERM or Ctrl-C.",
    )
    _add_options(parser)
    chosen = parser.parse_args(arguments)
    try:
        settings, passed_over = Container.load(chosen.config, chosen.set)
    except ConfigError as error:
        print(f"convoy broker-container: {error.text}", file=sys.stderr)
        return 2
    if chosen.print:
        for name, (field, _) in keys_of(ContainerSettings).items():
            print(f"{name}={text_of(getattr(settings, field))}")
        return 0
    return run("broker-container", lambda: Container(settings), passed_over)


def _add_options(parser: argparse.ArgumentParser) -> None:
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


def run(name: str, make: MakeRole, passed_over: Sequence[str]) -> int:
    """Runs a role in this process until it is told to stop; returns the exit code.

    Args:
        passed_over: keys of its configuration that have no meaning here.
    """
    import uvloop

    logs.set_up(LogConfig())
    os.umask(os.umask(UMASK) | UMASK)
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


async def _serve(name: str, make: MakeRole, log: FilteringBoundLogger) -> None:
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
