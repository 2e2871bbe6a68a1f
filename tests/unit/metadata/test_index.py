"""The index of queues says what the records say."""

from __future__ import annotations

import random

import pytest

from convoymq.metadata.index import QueueIndex
from convoymq.metadata.records import QueueRecord
from convoymq.routing.types import QueueType


def record(group: int, members: tuple[int, ...], owner: str | None) -> QueueRecord:
    return QueueRecord(
        vhost="/",
        name=f"q{group}",
        group=group,
        type=QueueType.QUORUM,
        durable=True,
        members=members,
        owner=owner,
        created_ms=0,
    )


@pytest.mark.parametrize("seed", range(5))
def test_index_follows_every_change(seed: int) -> None:
    rng = random.Random(seed)
    index = QueueIndex()
    records: dict[int, QueueRecord] = {}
    for _ in range(300):
        group = rng.randint(1, 20)
        if group in records and rng.random() < 0.4:
            index.drop(records.pop(group))
        else:
            members = tuple(rng.sample(range(1, 6), rng.randint(1, 3)))
            owner = rng.choice((None, "1.1.1", "1.1.2", "2.1.1"))
            records[group] = record(group, members, owner)
            index.put(records[group])
        index.check_invariants(list(records.values()))
    for owner in ("1.1.1", "1.1.2", "2.1.1", "nobody"):
        owned = {each.group for each in records.values() if each.owner == owner}
        assert {each.group for each in index.owned_by(owner)} == owned
