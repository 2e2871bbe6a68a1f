"""Fixtures of the AMQP 1.0 edge's tests."""

from __future__ import annotations

import pytest

from tests.unit.edges.amqp10.fakes import Client, FakeBroker


@pytest.fixture
def broker() -> FakeBroker:
    """A broker facade without queues."""
    return FakeBroker()


@pytest.fixture
async def client(broker: FakeBroker) -> Client:
    """A client with an open connection and session 0."""
    made = Client(broker)
    await made.open()
    await made.begin()
    return made
