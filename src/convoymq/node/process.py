"""A node as a process: its log, its permissions, its loop and its exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from convoymq.kernels.sockets import tune_malloc
from convoymq.model.config import ConfigError
from convoymq.model.errors import BrokerError, InvariantViolated, ReplicaStopped
from convoymq.model.late_imports import reserve_descriptors
from convoymq.model.machine_checks import raise_open_files
from convoymq.node import logs
from convoymq.node.logs import EXIT_FAULT
from convoymq.node.node import Node
from convoymq.node.preflight import check_addresses, check_files, check_machine

if TYPE_CHECKING:
    from convoymq.model.config import Config
    from convoymq.node.supervised import Supervised


def run(
    config: Config,
    supervised: Supervised | None = None,
    load: Callable[[], Config] | None = None,
) -> int:
    """Runs a node in this process until it is told to stop; returns the exit code.

    Args:
        supervised: what it has in common with other processes of its machine.
        load: reads the configuration again.
    """
    try:
        output = logs.set_up(config.log)
    except OSError as error:
        print(f"convoy node: log.file: {error}", file=sys.stderr)
        return 1
    logs.restrict_files()
    tune_malloc()
    raise_open_files()
    reserve_descriptors()
    log = structlog.get_logger().bind(node=config.node.id)
    node = Node(config, output, supervised, load)
    try:
        check_machine(config)
        check_files(config)
        check_addresses(config, has_clients=supervised is not None)
        if config.node.loop == "uvloop":
            import uvloop

            uvloop.run(node.run())
        else:
            asyncio.run(node.run())
    except (BrokerError, ConfigError) as error:
        log.error("node.failed", reason=error.text)
        return EXIT_FAULT if isinstance(error, ReplicaStopped) else 1
    except OSError as error:
        log.error("node.failed", reason=str(error))
        return 1
    except InvariantViolated as error:
        logs.report_fault(log, "node", error)
    return 0
