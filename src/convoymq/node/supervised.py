"""One process of a machine: its configuration, and what it has in common with the others.

The machine's configuration is that of its process 1 without its share of memory. Limits that are
about the machine are divided by the number of processes.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from convoymq.model.config import Address, AlarmsConfig, Config, ConfigError
from convoymq.model.machines import node_number, processes_max
from convoymq.transport.shared_sockets import SharedSockets, TurnSockets

WAL_BYTES_MIN = 1 << 20
BACKLOG_BYTES_MIN = 1 << 20


@dataclass(frozen=True, slots=True)
class Supervised:
    """Parts that a process has from the supervisor of its machine."""

    sockets: SharedSockets
    http: TurnSockets
    channel: socket.socket
    """Takes reports (`service_manager`), and ends with the supervisor."""


def process_count(config: Config) -> int:
    """Returns how many processes the machine has. Raises ConfigError."""
    node = config.node
    limit = processes_max(node.id, node.id_step)
    if not node.processes:
        return max(1, min(len(os.sched_getaffinity(0)) - 1, limit))
    if node.processes > limit:
        raise ConfigError(
            f"node.processes = {node.processes}: node.id = {node.id} and node.id_step = "
            f"{node.id_step} leave numbers for {limit}"
        )
    return node.processes


def process_config(config: Config, process: int, count: int) -> Config:
    """Returns the configuration of one of a machine's `count` processes."""
    above = process - 1
    node, cluster, raft = config.node, config.cluster, config.raft
    directory = Path(node.data_dir)
    trace = config.trace
    first = cluster.advertise or str(config.link_address)
    if process > 1:
        directory /= f"p{process}"
        # With addresses that have no numbers, and not its own, a node only joins.
        known = [replace(peer, node=0) for peer in cluster.peers]
        cluster = replace(
            cluster,
            peers=tuple(dict.fromkeys((*known, _address(first)))),
            size_hint=0,
            dns_name="",
            advertise=_moved(cluster.advertise, above),
            address=replace(config.link_address, port=config.link_address.port + above),
            port=0,
        )
        if trace.directory:
            trace = replace(trace, directory=str(Path(trace.directory) / f"p{process}"))
    return replace(
        config,
        node=replace(
            node,
            id=node_number(node.id, process, node.id_step),
            name=f"{node.name}.{process}" if node.name and above else node.name,
            data_dir=str(directory),
            processes=1,
            machine=node.id,
            process=process,
        ),
        cluster=replace(
            cluster,
            link_backlog_max_bytes=max(BACKLOG_BYTES_MIN, cluster.link_backlog_max_bytes // count),
        ),
        raft=replace(raft, wal_max_size_bytes=max(WAL_BYTES_MIN, raft.wal_max_size_bytes // count)),
        trace=trace,
        alarms=_alarms(config.alarms, count),
        listeners=replace(
            config.listeners, connections_max=-(-config.listeners.connections_max // count)
        ),
        defaults=replace(
            config.defaults,
            publish_pending_max_bytes=max(
                1 << 20, config.defaults.publish_pending_max_bytes // count
            ),
            classic_memory_target_bytes=config.defaults.classic_memory_target_bytes // count,
        ),
    )


def _alarms(alarms: AlarmsConfig, count: int) -> AlarmsConfig:
    return replace(
        alarms,
        memory_relative=alarms.memory_relative / count,
        memory_absolute=alarms.memory_absolute and alarms.memory_absolute // count,
    )


def _moved(address: str, above: int) -> str:
    found = _address(address) if address else None
    return str(replace(found, port=found.port + above)) if found else ""


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))
