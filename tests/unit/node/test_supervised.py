"""The configurations of a machine's processes."""

from __future__ import annotations

import os

import pytest

from convoymq.edges.configuration import load
from convoymq.edges.http.config import ManagementConfig
from convoymq.model.config import Address, Config, ConfigError
from convoymq.node.supervised import process_config, process_count

MACHINE = {
    "node.id": "2",
    "node.name": "two",
    "data_dir": "/data",
    "cluster.secret": "x",
    "cluster.listen": "10.0.0.2:25672",
    "cluster.peers": "1@10.0.0.1:25672, 2@10.0.0.2:25672",
    "cluster.zone": "hall",
}


def config(**more: str) -> Config:
    return load(None, {}, {**MACHINE, **{key.replace("__", "."): v for key, v in more.items()}})


def test_the_first_process_is_the_node_that_the_machine_was() -> None:
    machine = config()
    first = process_config(machine, 1, 4)
    assert (first.node.id, first.node.data_dir, first.node_name) == (2, "/data", "two")
    assert first.cluster.peers == machine.cluster.peers
    assert first.link_address == machine.link_address
    assert first.of(ManagementConfig) == machine.of(ManagementConfig)


def test_the_others_have_numbers_directories_and_ports_of_their_own_and_only_join() -> None:
    third = process_config(config(), 3, 4)
    node = third.node
    assert (node.id, node.machine, node.process, node.processes) == (66, 2, 3, 1)
    assert (node.data_dir, third.node_name) == ("/data/p3", "two.3")
    assert third.link_address == Address("10.0.0.2", 25674)
    assert third.cluster.peers == (Address("10.0.0.1", 25672), Address("10.0.0.2", 25672))
    assert third.cluster.zone == "hall"
    assert third.of(ManagementConfig) == config().of(ManagementConfig)


def test_a_process_of_a_machine_without_peers_joins_its_first_process() -> None:
    machine = load(None, {}, {"cluster.advertise": "[::1]:25000", "cluster.port": "26000"})
    second = process_config(machine, 2, 2)
    assert second.cluster.peers == (Address("::1", 25000),)
    assert second.cluster.advertise == "[::1]:25001"
    assert second.link_address.port == 26001
    assert second.node_name.startswith("convoy-33@")


def test_limits_of_the_machine_are_divided() -> None:
    machine = config(connection_max="1001")
    each = process_config(machine, 2, 4)
    assert each.alarms.memory_relative == machine.alarms.memory_relative / 4
    assert each.raft.wal_max_size_bytes == machine.raft.wal_max_size_bytes // 4
    assert each.cluster.link_backlog_max_bytes == machine.cluster.link_backlog_max_bytes // 4
    assert each.listeners.connections_max == 251
    absolute = config(vm_memory_high_watermark__absolute="4GiB")
    assert process_config(absolute, 1, 4).alarms.memory_absolute == 1 << 30


def test_numbers_of_processes() -> None:
    assert process_count(config()) == 1
    assert process_count(config(node__processes="8")) == 8
    cores = len(os.sched_getaffinity(0))
    assert process_count(config(node__processes="auto")) == max(1, min(cores - 1, 8))
    with pytest.raises(ConfigError, match="leave numbers for 8"):
        process_count(config(node__processes="9"))
    assert process_count(config(node__processes="16", node__id_step="16")) == 16
    for wrong in ("0", "-1", "many"):
        with pytest.raises(ConfigError, match=r"node\.processes"):
            config(node__processes=wrong)
