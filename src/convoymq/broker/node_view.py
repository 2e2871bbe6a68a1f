"""Facts of a node beside its broker, for lists, metrics and operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from convoymq.broker.alarms import Watermarks
from convoymq.model.json import JsonObject
from convoymq.queues.interface import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """Facts of one node. They are looked up when they are asked for."""

    info: Callable[[], JsonObject] = dict
    """Process, machine and places, under the names of RabbitMQ's HTTP API."""
    links: Callable[[], list[Row]] = list
    """One row per link to another node."""
    clock_skew: Callable[[], tuple[int, bool]] = lambda: (0, False)
    """Returns how far this node's wall clock is ahead (ms), and whether it is too far."""
    watermarks: Watermarks | None = None
    """Thresholds of this node's alarms; None = nobody watches memory and disk."""
    reload: Callable[[], JsonObject] = dict
    """Reads the configuration again; see `node.live_settings`. Raises BrokerError."""
    set_log_level: Callable[[str], None] = lambda _level: None
    """Leaves out lines of the log below a level."""
    reopen_log: Callable[[], None] = lambda: None
    """Has the log go on in a new file of its name."""
