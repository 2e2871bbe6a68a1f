"""Limits on connections and channels, against what all nodes count."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from convoymq.broker.limits import ClientLimits
from convoymq.metadata.machine import MetadataMachine, Vhost
from convoymq.model.errors import NotAllowed
from convoymq.routing.topology import Topology


class Cluster:
    """The lists of all nodes; an answer takes a turn of the loop."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    async def list_connections(self) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        return list(self.rows)

    def add(self, user: str = "u", vhost: str = "/", channels: int = 0) -> None:
        self.rows.append({"user": user, "vhost": vhost, "channels": channels})


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def tree() -> MetadataMachine:
    made = MetadataMachine()
    made.vhosts["/"] = Vhost("/", Topology("/"))
    return made


@pytest.fixture
async def limits(tree: MetadataMachine, cluster: Cluster) -> ClientLimits:
    return ClientLimits(tree, cluster)  # type: ignore[arg-type]


async def refusal(asked: Any) -> str:
    with pytest.raises(NotAllowed) as caught:
        await asked
    return caught.value.text


async def test_without_limits_nobody_is_asked(limits: ClientLimits, tree: MetadataMachine) -> None:
    assert not limits.bound_connections("u", "/")
    assert not limits.bound_channels("u")
    tree.vhosts["/"].limits["max-connections"] = -1
    tree.user_limits["u"] = {"max-connections": -1, "max-channels": -1}
    assert not limits.bound_connections("u", "/")
    assert not limits.bound_channels("u")
    tree.user_limits["u"] = {"max-channels": 5}
    assert limits.bound_channels("u")
    assert not limits.bound_connections("u", "/")


async def test_a_full_virtual_host_admits_nobody(
    limits: ClientLimits, tree: MetadataMachine, cluster: Cluster
) -> None:
    tree.vhosts["/"].limits["max-connections"] = 2
    cluster.add(vhost="other")
    await limits.open_connection("u", "/", cluster.add)
    # Those who come together take turns.
    both = await asyncio.gather(
        limits.open_connection("u", "/", cluster.add),
        limits.open_connection("v", "/", cluster.add),
        return_exceptions=True,
    )
    assert both[0] is None
    assert isinstance(both[1], NotAllowed)
    assert both[1].text == (
        "access to vhost '/' refused for user 'v': connection limit (2) is reached"
    )


async def test_a_user_has_so_many_connections_and_channels_at_most(
    limits: ClientLimits, tree: MetadataMachine, cluster: Cluster
) -> None:
    tree.user_limits["u"] = {"max-connections": 1, "max-channels": 3}
    cluster.add("v", channels=50)
    await limits.open_connection("u", "/", cluster.add)
    assert await refusal(limits.open_connection("u", "/", cluster.add)) == (
        "Connection refused for user 'u': user connection limit (1) is reached"
    )
    cluster.rows[-1]["channels"] = 2
    opened: list[int] = []
    await limits.open_channel("u", lambda: opened.append(1))
    cluster.rows[-1]["channels"] = 3
    assert await refusal(limits.open_channel("u", lambda: opened.append(2))) == (
        "number of channels opened for user 'u' has reached the maximum allowed user limit of (3)"
    )
    assert opened == [1]
