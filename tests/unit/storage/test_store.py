"""The whole storage on a disk in memory: what it holds while running and after losing power."""

from __future__ import annotations

import pytest

from tests.unit.storage.disk import Node, run_until_power_loss


@pytest.mark.parametrize("seed", range(30))
def test_storage_holds_what_the_model_holds(seed: int) -> None:
    node = Node(seed)
    for at in range(150):
        node.step()
        if at % 50 == 0:
            node.check()
    node.run()
    node.check()


@pytest.mark.parametrize("seed", range(150))
def test_nothing_confirmed_is_lost_when_the_power_goes(seed: int) -> None:
    node = Node(seed)
    for _ in range(6):
        run_until_power_loss(node, 300, node.random.randint(1, 120))
        node.crash()
    node.run()
    node.check()


KEEP = {"nothing": lambda: False, "all": lambda: True, "some": None}


@pytest.mark.parametrize("seed", [3, 8])
@pytest.mark.parametrize("kept", ["nothing", "all", "some"])
def test_the_power_may_go_at_every_single_file_operation(seed: int, kept: str) -> None:
    operation = 1
    while True:
        node = Node(seed)
        if not run_until_power_loss(node, 90, operation):
            break
        node.crash(KEEP[kept])
        for group in list(node.groups):
            node.append(group, 1)
        node.run()
        node.check()
        operation += 1
    assert operation > 40
