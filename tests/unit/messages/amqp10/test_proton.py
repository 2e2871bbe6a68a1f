"""Qpid Proton's codec reads and writes the same messages."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from convoymq.messages.amqp10.message import split, stored_of, transfer_of
from convoymq.messages.encodings import AMQP_10
from convoymq.messages.record import as_amqp091, content_of

proton = pytest.importorskip("proton", reason="Qpid Proton is not there: make test-amqp10")


def values() -> dict[str, Any]:
    """One of every type."""
    array, data = proton.Array, proton.Data
    return {
        "null": None,
        "boolean": True,
        "ubyte": proton.ubyte(200),
        "ushort": proton.ushort(60_000),
        "uint": proton.uint(2**32 - 1),
        "ulong": proton.ulong(2**64 - 1),
        "byte": proton.byte(-5),
        "short": proton.short(-300),
        "int": proton.int32(-70_000),
        "long": -(2**60),
        "float": proton.float32(1.5),
        "double": 2.25,
        "decimal32": proton.decimal32(7),
        "decimal64": proton.decimal64(12_345),
        "decimal128": proton.decimal128(b"\1" * 16),
        "char": proton.char("€"),
        "timestamp": proton.timestamp(1_700_000_000_000),
        "uuid": uuid.UUID(int=5),
        "utf8": "é" * 300,
        "symbol": proton.symbol("s"),
        "list": [1, "a", [2]],
        "map": {"k": 1, proton.symbol("q"): 2},
        "array": array(proton.UNDESCRIBED, data.UINT, 1, 2, 300),
        "symbols": array(proton.UNDESCRIBED, data.SYMBOL, proton.symbol("a")),
        "described array": array(proton.symbol("d"), data.INT, 1, 2),
        "described": proton.Described(proton.symbol("x"), "v"),
    }


LOST = {
    *("array", "symbols", "described array", "list", "map"),
    *("decimal32", "decimal64", "decimal128"),
}
"""Application properties that a message of AMQP 0-9-1 does not give back."""


@pytest.mark.parametrize("body", [{"a": 1}, b"binary", "text", [1, 2]], ids=str)
def test_what_proton_sends_comes_back_to_it(body: object) -> None:
    notes = {proton.symbol(f"x-{name}"): value for name, value in values().items()}
    sent = proton.Message(
        id=uuid.UUID(int=9),
        body=body,
        inferred=isinstance(body, bytes | list),
        durable=True,
        priority=7,
        ttl=5.0,
        address="/queues/q",
        reply_to="/queues/r%2F1",
        correlation_id=proton.ulong(9),
        content_type="text/plain",
        user_id=b"guest",
        group_id="g",
        properties=values(),
        annotations=notes,
        instructions={proton.symbol("x-now"): 1},
    )
    payload = sent.encode()
    stored = stored_of(payload)
    content = content_of(stored.properties, stored.body, AMQP_10)
    left = transfer_of("x", "k", content)
    assert left[split(left).bare_at :] == payload[split(payload).bare_at :]
    got = proton.Message()
    got.decode(left)
    own = {"x-exchange": "x", "x-routing-key": "k"}
    assert got.annotations == {**notes, **{proton.symbol(key): each for key, each in own.items()}}
    assert (got.durable, got.priority, got.ttl, got.first_acquirer) == (True, 7, 5.0, True)
    # What AMQP 0-9-1 can say of it.
    got.decode(transfer_of("x", "k", as_amqp091(content)))
    assert (got.id, got.reply_to, got.correlation_id) == (sent.id, "/queues/r%2F1", "9")
    assert (got.body, got.content_type, got.group_id) == (body, "text/plain", "g")
    changed = {"ulong": str(2**64 - 1), "uuid": uuid.UUID(int=5).urn, "described": "v"}
    kept = {name: value for name, value in values().items() if name not in LOST}
    assert got.properties == kept | changed
