"""Tasks of an object: who hears of an error in one, and how they end."""

from __future__ import annotations

import asyncio

import pytest

from convoymq.model.errors import InvariantViolated
from convoymq.model.tasks import Tasks
from tests.loop_faults import loop_faults
from tests.patience import PATIENCE_S


@pytest.mark.parametrize("error", [RuntimeError("a fault"), InvariantViolated("the term fell")])
async def test_an_error_in_a_task_reaches_the_loop_at_once(error: BaseException) -> None:
    """Held by its traceback, a task is freed late; what was never asked for would come out then."""
    faults = loop_faults()

    async def broken() -> None:
        raise error

    tasks = Tasks()
    task = tasks.spawn(broken())
    await tasks.wait(PATIENCE_S)
    await asyncio.sleep(0)
    assert faults == [error]
    assert not tasks
    assert task.done()


async def test_the_end_of_an_owner_ends_its_tasks() -> None:
    tasks = Tasks()
    task = tasks.spawn(asyncio.sleep(PATIENCE_S))
    await tasks.wait(0)
    assert len(tasks) == 1
    await tasks.stop()
    assert task.cancelled()
    assert not tasks
