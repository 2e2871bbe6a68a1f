"""Addresses of RabbitMQ's format v2."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.edges.amqp10.addresses import Destination, source_of, target_of
from convoymq.model.errors import PreconditionFailed

NAMES = st.text(min_size=1, max_size=20)


@given(NAMES)
def test_any_queue_has_an_address(queue: str) -> None:
    address = f"/queues/{quote(queue, safe='')}"
    assert source_of(address) == queue
    assert target_of(address) == Destination("", queue)


@given(NAMES.filter(lambda name: name != "amq.default"), st.text(max_size=20))
def test_any_exchange_and_key_have_an_address(exchange: str, key: str) -> None:
    address = f"/exchanges/{quote(exchange, safe='')}"
    assert target_of(address) == target_of(address + "/") == Destination(exchange, "")
    assert target_of(f"{address}/{quote(key, safe='')}") == Destination(exchange, key)


def test_a_plus_is_a_plus_and_a_slash_is_escaped() -> None:
    assert source_of("/queues/a+b") == "a+b"
    assert source_of("/queues/topic%2Fgroup") == "topic/group"
    assert target_of("/exchanges/amq.topic/a.%C3%A9%2f") == Destination("amq.topic", "a.é/")


@pytest.mark.parametrize(
    "address",
    [
        None, b"/queues/q", 7, "", "q", "/queue/q", "/queues/", "/queues/a/b", "/queues/%",
        "/queues/%zz", "/queues/%ff", "queues/q",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_and_the_form_is_named(address: object) -> None:
    for parse in (source_of, target_of):
        with pytest.raises(PreconditionFailed, match="'/queues/QUEUE', '/exchanges/EXCHANGE'"):
            parse(address)


@pytest.mark.parametrize(
    "address",
    [
        "/exchanges/", "/exchanges//k", "/exchanges/amq.default", "/exchanges/amq.default/k",
        "/exchanges/x/k/", "/exchanges/x/a/b", "/exchange/x", "/exchanges/x/%2",
    ],
)  # fmt: skip
def test_exchanges_that_are_no_targets(address: str) -> None:
    with pytest.raises(PreconditionFailed):
        target_of(address)


def test_an_exchange_is_no_source() -> None:
    with pytest.raises(PreconditionFailed):
        source_of("/exchanges/x/k")
