"""A replicated machine is added in its own folder and with one line: simulated, and for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoymq.replication import versions
from convoymq.sim.machines import run_machine
from tests.examples.machine.client import CounterClient
from tests.examples.machine.machine import CounterMachine
from tests.running import Nodes, until

GROUP = 1 << 20
"""Far from those that the tree numbers."""


@pytest.mark.parametrize("seed", range(1, 6))
def test_the_counter_counts_every_command_once_under_faults(seed: int) -> None:
    world = run_machine(seed, CounterMachine, CounterClient)
    confirmed = sum(sum(client.amounts[: client.applied]) for client in world.clients)
    submitted = sum(sum(client.amounts) for client in world.clients)
    assert submitted > 0
    # A client whose node died does not know what became of its last commands.
    assert [confirmed <= machine.total <= submitted for machine in world.machines] == [
        True
    ] * world.plan.nodes


async def test_the_counter_runs_on_three_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The registration: in the source this is a line of the list.
    machines = [*versions.MACHINES, "tests.examples.machine.machine"]
    monkeypatch.setattr(versions, "MACHINES", machines)
    async with Nodes(tmp_path, 3) as nodes:
        clients = {number: CounterClient() for number in nodes.running}
        for number, client in clients.items():
            host = nodes[number].host
            host.create_group(GROUP, [1, 2, 3], CounterMachine(), client, leader_hint=1)
            client.attach(host.builder_of(GROUP), number << 56 | 1)
        assert nodes[1].links.hello_of(2).supports["counter"] == (1, 1)
        for number, client in clients.items():
            for amount in (1, 10, 100):
                client.add(number * amount)
        await until(lambda: not any(client.waits_for() for client in clients.values()))
        # A leader that goes away costs nothing that was confirmed.
        await nodes.stop(1)
        clients[2].add(1000)
        await until(lambda: not clients[2].waits_for())
        replicas = [nodes[number].host.groups[GROUP] for number in (2, 3)]
        await until(lambda: len({replica.last_applied for replica in replicas}) == 1)
        assert [replica.machine.total for replica in replicas] == [1666, 1666]
