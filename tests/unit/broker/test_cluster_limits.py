"""Limits of what a whole cluster may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoymq.metadata.commands import PutVhost
from convoymq.model.config import DefaultsConfig
from convoymq.model.errors import PreconditionFailed
from tests.unit.queues.fake_cluster import FakeCluster

PREDECLARED = 7


async def test_queues_of_all_virtual_hosts_count(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path, settings=DefaultsConfig(cluster_queues_max=2)) as cluster:
        declarations = cluster.nodes[1].broker.declarations
        await cluster.nodes[1].store.execute(PutVhost(name="v"))
        await cluster.queue(1, "a")
        await declarations.declare_queue("v", "b", durable=True, exclusive=False, auto_delete=False)
        with pytest.raises(PreconditionFailed) as refused:
            await cluster.queue(1, "c")
        text = "cannot declare queue 'c': queue limit in cluster (2) is reached"
        assert refused.value.text == text
        await cluster.queue(1, "a")
        await cluster.nodes[1].broker.queue_admin.delete_queue("/", "a")
        await cluster.queue(1, "c")


async def test_exchanges_count_with_those_that_are_always_there(tmp_path: Path) -> None:
    settings = DefaultsConfig(cluster_exchanges_max=PREDECLARED + 1)
    async with FakeCluster(tmp_path, settings=settings) as cluster:
        declarations = cluster.nodes[1].broker.declarations
        flags = {"durable": True, "auto_delete": False, "internal": False}
        assert await declarations.declare_exchange("/", "a", "direct", **flags)
        with pytest.raises(PreconditionFailed) as refused:
            await declarations.declare_exchange("/", "b", "direct", **flags)
        assert refused.value.text == (
            f"cannot declare exchange 'b' in vhost '/': exchange limit of {PREDECLARED + 1} is "
            "reached"
        )
        assert not await declarations.declare_exchange("/", "a", "direct", **flags)
