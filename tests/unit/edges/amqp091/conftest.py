"""Fixtures of the AMQP edge's tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from convoymq.edges.amqp091.config import AmqpConfig
from tests.unit.edges.amqp091.fakes import Client, FakeBroker


@pytest.fixture
def broker() -> FakeBroker:
    """A broker facade without queues."""
    return FakeBroker()


@pytest.fixture
def make_client(broker: FakeBroker) -> Callable[..., Client]:
    """Makes clients of the same broker."""
    ids = itertools.count(1)

    def make(settings: AmqpConfig | None = None, **options: int) -> Client:
        return Client(broker, settings, next(ids), **options)

    return make


@pytest.fixture
async def client(make_client: Callable[..., Client]) -> Client:
    """A client with an open connection and channel 1."""
    made = make_client()
    await made.open(
        consumer_cancel_notify=True,
        connection__blocked=True,
        authentication_failure_close=True,
    )
    await made.channel()
    return made
