"""The headers of dead letters: what is written, what is believed, what goes round."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from convoymq.amqp._spec import Properties
from convoymq.amqp.codec import ContentHeader, decode_header, encode_header
from convoymq.kernels.content import content_parts, split_record
from convoymq.model.errors import BrokerError
from convoymq.model.tables import Field, Table
from convoymq.queues.deaths import CHANNEL, HEADER_BYTES_MAX, DeadLetter, Death, dead_letter


def frame(kind: int, payload: bytes, channel: int = 1) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def record(body: bytes = b"body", exchange: str = "x", key: str = "k", **properties: Any) -> bytes:
    if isinstance(properties.get("headers"), dict):
        properties["headers"] = Table.of(properties["headers"])
    header = encode_header(ContentHeader(body_size=len(body), properties=Properties(**properties)))
    names = b"".join(bytes((len(text),)) + text.encode() for text in (exchange, key))
    return names + frame(2, header) + frame(3, body)


def dies(
    content: bytes, queue: str = "q", reason: str = "rejected", **more: Any
) -> tuple[DeadLetter, Properties]:
    death = Death(queue, reason, more.get("time_s", 5), "dlx", more.get("routing_key"))
    letter = dead_letter(content, death)
    return letter, decode_header(content_parts(letter.parts[1])[0]).properties


def deaths_of(properties: Properties) -> list[dict[str, object]]:
    assert properties.headers is not None
    found = properties.headers.get("x-death")
    assert found is not None
    assert isinstance(found.value, tuple)
    return [each.value.to_plain() for each in found.value if isinstance(each.value, Table)]


ALL = {
    "content_type": "text/plain",
    "content_encoding": "utf-8",
    "delivery_mode": 2,
    "priority": 3,
    "correlation_id": "c",
    "reply_to": "r",
    "message_id": "m",
    "timestamp": 1234,
    "type": "t",
    "user_id": "guest",
    "app_id": "a",
    "cluster_id": "i",
}


def test_the_first_death_and_everything_else_as_it_was() -> None:
    letter, properties = dies(record(**ALL, headers={"n": 1}, expiration="250"))
    assert properties.expiration is None
    assert {name: getattr(properties, name) for name in ALL} == ALL
    assert properties.headers is not None
    assert properties.headers.keys() == (
        "n", "x-death", "x-first-death-reason", "x-first-death-queue", "x-first-death-exchange",
        "x-last-death-reason", "x-last-death-queue", "x-last-death-exchange",
    )  # fmt: skip
    (death,) = deaths_of(properties)
    assert list(death.items()) == [
        ("count", 1), ("reason", "rejected"), ("queue", "q"), ("time", 5), ("exchange", "x"),
        ("routing-keys", ["k"]), ("original-expiration", "250"),
    ]  # fmt: skip
    entry = properties.headers.get("x-death")
    assert entry is not None
    assert isinstance(entry.value, tuple)
    table = entry.value[0].value
    assert isinstance(table, Table)
    assert "".join(field.code for _, field in table.items()) == "lSSTSAS"
    assert letter.parts[0] == b"\x03dlx\x01k"
    assert content_parts(letter.parts[1])[1] == b"body"
    assert (letter.body_size, letter.flags, letter.keys) == (4, 2, ("k",))
    assert (letter.properties.correlation_id, letter.properties.message_id) == ("c", "m")
    assert letter.properties.timestamp == 1234


def test_a_message_without_properties() -> None:
    letter, properties = dies(record())
    assert letter.flags == 0
    assert [death["count"] for death in deaths_of(properties)] == [1]


def test_a_repeat_counts_up_and_moves_to_the_front() -> None:
    """Time, exchange and keys stay those of the first such death; the first death stays."""
    letter, _ = dies(record(expiration="9"), "a", "expired", time_s=1)
    letter, _ = dies(b"".join(letter.parts), "b", "rejected", time_s=2)
    letter, properties = dies(b"".join(letter.parts), "a", "expired", time_s=3)
    assert [(d["queue"], d["reason"], d["count"], d["time"]) for d in deaths_of(properties)] == [
        ("a", "expired", 2, 1),
        ("b", "rejected", 1, 2),
    ]
    assert deaths_of(properties)[0]["original-expiration"] == "9"
    assert properties.headers is not None
    plain = properties.headers.to_plain()
    assert (plain["x-first-death-queue"], plain["x-first-death-exchange"]) == ("a", "x")
    assert (plain["x-last-death-queue"], plain["x-last-death-exchange"]) == ("a", "dlx")
    letter, properties = dies(b"".join(letter.parts), "a", "rejected")
    assert [d["reason"] for d in deaths_of(properties)] == ["rejected", "expired", "rejected"]


def test_what_a_publisher_sends_under_these_names_means_nothing() -> None:
    forged = {
        "x-death": [{"queue": "q", "reason": "rejected", "count": 41}],
        "x-first-death-queue": "forged",
        "x-last-death-reason": "forged",
    }
    letter, properties = dies(record(headers=forged))
    assert [death["count"] for death in deaths_of(properties)] == [1]
    assert b"forged" not in letter.parts[1]
    # Republished by a client: it has the channel of that client.
    again = letter.parts[1]
    assert again[1:3] == CHANNEL.to_bytes(2, "big")
    published = letter.parts[0] + again[:1] + b"\0\x07" + again[3:]
    _, properties = dies(published)
    assert [death["count"] for death in deaths_of(properties)] == [1]


def test_keys_of_cc_are_kept_unless_the_queue_has_a_key_of_its_own() -> None:
    content = record(headers={"CC": ["a", "k", "b"]})
    letter, properties = dies(content)
    assert letter.keys == ("k", "a", "b")
    assert deaths_of(properties)[0]["routing-keys"] == ["k", "a", "k", "b"]
    assert properties.headers is not None
    assert "CC" in properties.headers
    letter, properties = dies(content, routing_key="own")
    assert letter.keys == ("own",)
    assert letter.parts[0] == b"\x03dlx\x03own"
    assert properties.headers is not None
    assert "CC" not in properties.headers
    assert deaths_of(properties)[0]["routing-keys"] == ["k", "a", "k", "b"]


def test_a_cycle_is_one_unless_somebody_rejected_in_it() -> None:
    letter, _ = dies(record(), "a", "expired")
    assert letter.is_cycle("a")
    assert not letter.is_cycle("b")
    letter, _ = dies(b"".join(letter.parts), "b", "maxlen")
    assert letter.is_cycle("a")
    letter, _ = dies(b"".join(letter.parts), "c", "rejected")
    assert not letter.is_cycle("a")
    assert not letter.is_cycle("c")
    letter, _ = dies(b"".join(letter.parts), "d", "expired")
    assert letter.is_cycle("d")
    assert not letter.is_cycle("b")


def test_headers_that_have_no_room_for_deaths_go_on_without() -> None:
    for size in (HEADER_BYTES_MAX - 100, HEADER_BYTES_MAX - 300):
        letter, properties = dies(record(headers={"big": "x" * size}))
        assert properties.headers is not None
        assert properties.headers.keys() == ("big",)
        assert letter.parts[1][1:3] == b"\0\0"
        assert letter.deaths == ()


@pytest.mark.parametrize("cut", [0, 1, 5, 20])
def test_a_broken_record_is_said_to_be_broken(cut: int) -> None:
    with pytest.raises((BrokerError, ValueError)):
        dies(record()[:cut])


def test_a_death_that_somebody_else_wrote_oddly_is_still_read() -> None:
    odd = Field("A", (Field("F", Table.of({"queue": 7})), Field("S", b"text")))
    content = record(headers=Table.from_fields([("x-death", odd)]))
    marked = content.replace(b"\x02\0\x01", b"\x02\xff\xff", 1)
    names, _ = split_record(marked)
    assert names == b"\x01x\x01k"
    letter, properties = dies(marked)
    assert [d.get("queue") for d in deaths_of(properties)] == ["q", 7]
    assert letter.deaths == (("q", "rejected"), ("", ""))


def test_a_dead_letter_does_not_wait_again_and_keeps_its_group() -> None:
    headers = {"x-delay": 5, "x-deliver-at": 6, "x-group-id": "g"}
    letter, properties = dies(record(headers=headers))
    assert properties.headers is not None
    assert "x-delay" not in properties.headers
    assert "x-deliver-at" not in properties.headers
    assert properties.headers.get("x-group-id") == Field("S", b"g")
    assert letter.flags == 8
    assert dies(record(headers={"x-delay": 5}, priority=1))[0].flags == 2
