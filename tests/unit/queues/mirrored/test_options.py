"""What the configuration says reaches the host that serves classic queues."""

from __future__ import annotations

from pathlib import Path

from convoymq.model.config.client_sections import DefaultsConfig
from convoymq.queues.classic.host import ClassicHost
from convoymq.queues.driver import MEMORY_TARGET_BYTES
from tests.unit.queues.fake_cluster import FakeCluster


def host_of(cluster: FakeCluster) -> ClassicHost:
    host = cluster.nodes[1].broker.local.hosts["classic"]
    assert isinstance(host, ClassicHost)
    return host


async def test_classic_queues_share_the_memory_that_is_configured(tmp_path: Path) -> None:
    target = MEMORY_TARGET_BYTES // 2
    settings = DefaultsConfig(classic_memory_target_bytes=target)
    async with FakeCluster(tmp_path, settings=settings) as cluster:
        assert host_of(cluster).memory.target_bytes == target
