"""What several files of these tests use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.rocketmq.groups import Groups


@pytest.fixture
async def groups(tmp_path: Path) -> AsyncIterator[Groups]:
    made = Groups(tmp_path)
    await made.start()
    yield made
    await made.stop()
