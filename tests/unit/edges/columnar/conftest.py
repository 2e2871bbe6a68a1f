"""Fixtures of the columnar server's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.edges.columnar.support import Peer, Rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as made:
        yield made


@pytest.fixture
async def client(rig: Rig) -> Peer:
    return await rig.client()
