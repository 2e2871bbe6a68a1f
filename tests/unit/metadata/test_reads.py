"""Reads of the metadata that must not be stale: who is asked, and what is waited for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from convoymq.metadata import reads as metadata_reads
from convoymq.metadata.reads import MetadataReads
from convoymq.model.errors import Unavailable
from convoymq.transport.control import ControlPlane
from tests.unit.transport.test_control import Wire


class Nodes:
    """Three nodes with logs of the metadata that end where a test says."""

    def __init__(self, ends: dict[int, int], voters: tuple[int, ...] = (1, 2, 3)) -> None:
        self.wire = Wire()
        self.replicas: dict[int, Any] = {}
        self.reads: dict[int, MetadataReads] = {}
        for node, end in ends.items():
            control = self.wire.planes[node] = ControlPlane(node, self.wire.of(node))
            log = SimpleNamespace(last_index=end)
            replica = SimpleNamespace(members=voters, log=log, last_applied=end)
            self.replicas[node] = replica
            host: Any = SimpleNamespace(replica=lambda _group, replica=replica: replica)
            self.reads[node] = MetadataReads(node, control, host)


async def test_a_node_that_is_behind_waits_until_it_has_applied_what_others_have() -> None:
    nodes = Nodes({1: 5, 2: 9, 3: 7})
    waiting = asyncio.ensure_future(nodes.reads[1].catch_up())
    await asyncio.sleep(5 * metadata_reads.PAUSE_S)
    nodes.replicas[1].last_applied = 8
    await asyncio.sleep(5 * metadata_reads.PAUSE_S)
    assert not waiting.done()
    nodes.replicas[1].last_applied = 9
    await waiting


async def test_a_node_that_is_not_behind_does_not_wait() -> None:
    await Nodes({1: 9, 2: 9, 3: 4}).reads[1].catch_up()


async def test_a_majority_of_the_voters_must_answer() -> None:
    await Nodes({1: 5, 2: 5}).reads[1].catch_up()
    with pytest.raises(Unavailable, match="a majority"):
        await Nodes({1: 5}).reads[1].catch_up()
    # A node that is no voter counts for nothing.
    with pytest.raises(Unavailable, match="a majority"):
        await Nodes({1: 5, 2: 5}, voters=(2, 3, 4)).reads[1].catch_up()


async def test_voters_that_a_node_did_not_know_are_asked_as_well() -> None:
    """Node 1 learns by catching up with node 2 that node 4 votes in the place of node 3."""
    nodes = Nodes({1: 5, 2: 7, 3: 7, 4: 9})
    waiting = asyncio.ensure_future(nodes.reads[1].catch_up())
    await asyncio.sleep(5 * metadata_reads.PAUSE_S)
    nodes.replicas[1].members = (1, 2, 4)
    nodes.replicas[1].last_applied = nodes.replicas[1].log.last_index = 7
    del nodes.wire.planes[2]
    await asyncio.sleep(5 * metadata_reads.PAUSE_S)
    assert not waiting.done()
    nodes.replicas[1].last_applied = 9
    await waiting


async def test_who_does_not_get_that_far_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_reads, "APPLY_TIMEOUT_S", 0.05)
    with pytest.raises(Unavailable, match="is behind"):
        await Nodes({1: 5, 2: 9, 3: 9}, voters=(1, 2, 3)).reads[1].catch_up()


async def test_a_node_without_a_copy_knows_nothing() -> None:
    nodes = Nodes({1: 5, 2: 5, 3: 5})
    nothing: Any = SimpleNamespace(replica=lambda _group: None)
    nodes.wire.planes[4] = ControlPlane(4, nodes.wire.of(4))
    with pytest.raises(Unavailable, match="no copy"):
        await MetadataReads(4, nodes.wire.planes[4], nothing).catch_up()
