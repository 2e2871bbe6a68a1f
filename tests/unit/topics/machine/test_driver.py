"""How partitions come to be, and what clients may not do with their queues."""

from __future__ import annotations

import pytest

from convoymq.broker import drivers as _registered  # noqa: F401
from convoymq.model.errors import AccessRefused, PreconditionFailed
from convoymq.model.tables import Table
from convoymq.queues.driver import group_driver_of
from convoymq.replication import versions
from convoymq.routing.declarations import check_binding, check_queue
from convoymq.routing.topology import Topology
from convoymq.routing.types import Destination, DestinationKind, QueueType
from convoymq.topics.machine.group_machine import PartitionGroupMachine

NAME = "amq.partition.orders.3"
FIXED = {
    "x-queue-type": "partition",
    "x-partition-topic": "orders",
    "x-partition-pid": 3,
    "x-partition-lo": 0,
    "x-partition-hi": 8,
    "x-partition-version": 2,
}


def test_the_arguments_of_its_queue_make_the_machine() -> None:
    arguments = Table.of({**FIXED, "x-max-length-bytes": 1000})
    machine = group_driver_of("partition").make_machine(arguments, "")
    assert isinstance(machine, PartitionGroupMachine)
    state = machine.state
    assert (state.pid, state.lo, state.hi, state.created_version) == (3, 0, 8, 2)
    assert machine.settings["max_bytes"] == 1000


def test_the_announced_versions_are_those_of_the_machine() -> None:
    machine = PartitionGroupMachine
    assert versions.announced()["partition"] == (machine.OLDEST_VERSION, machine.VERSION)


def test_clients_declare_no_partitions() -> None:
    topology = Topology("/")
    with pytest.raises(AccessRefused, match="reserved prefix"):
        check_queue(topology, NAME, durable=True, arguments=Table.of(FIXED))
    with pytest.raises(PreconditionFailed, match="unsupported queue type 'partition'"):
        check_queue(topology, "mine", durable=True, arguments=Table.of(FIXED))
    own = Table.of({"x-queue-type": "quorum", "x-partition-pid": 1})
    with pytest.raises(PreconditionFailed, match="x-partition-pid"):
        check_queue(topology, "mine", durable=True, arguments=own)


def test_clients_bind_no_partitions() -> None:
    topology = Topology("/")
    topology.declare_queue(NAME, QueueType.PARTITION, durable=True, arguments=Table.of(FIXED))
    with pytest.raises(AccessRefused, match="is a partition of a topic"):
        check_binding(topology, "amq.topic", Destination(DestinationKind.QUEUE, NAME), "#")
