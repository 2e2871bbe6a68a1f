"""A message of AMQP 1.0 leaves as it came; header and annotations follow the rules."""

from __future__ import annotations

import pytest
from hypothesis import given

from convoymq.messages.amqp091 import HEADER_BYTES_MAX, Properties
from convoymq.messages.amqp10.message import stored_of, transfer_of
from convoymq.messages.amqp10.sections import DATA, VALUE, Annotations, Header, section, split
from convoymq.messages.amqp10.values import (
    Array,
    Float,
    Long,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    encode,
)
from convoymq.messages.deaths import Death, dead_letter
from convoymq.messages.encodings import AMQP_10
from convoymq.messages.record import content_of, names_of, read_record, read_stored
from convoymq.model.errors import PeerError
from convoymq.model.tables import Field, Table
from tests.unit.messages.amqp10.strategies import FEW, MESSAGE_PROPERTIES, MESSAGES, SIMPLE
from tests.unit.messages.amqp10.test_values import same

BODY = section(DATA, b"hello")


def content_in(payload: bytes) -> bytes:
    stored = stored_of(payload)
    return content_of(stored.properties, stored.body, AMQP_10)


def notes_of(payload: bytes) -> Annotations:
    return split(payload).annotations


@given(MESSAGES)
@FEW
def test_a_message_leaves_as_it_came(payload: bytes) -> None:
    sent = split(payload)
    left = transfer_of("x", "key", content_in(payload))
    found = split(left)
    assert left[found.bare_at :] == payload[sent.bare_at :]
    own = {"x-exchange": "x", "x-routing-key": "key"}
    expected = dict(sent.annotations)
    expected |= {Symbol(name): word for name, word in own.items()}
    assert same(dict(found.annotations), expected)
    assert found.delivery_annotations == {}
    assert found.header == Header(
        durable=sent.header.durable,
        priority=sent.header.priority,
        ttl_ms=sent.header.ttl_ms,
        first_acquirer=True,
    )


@given(MESSAGES)
@FEW
def test_every_message_has_a_record_that_all_readers_take(payload: bytes) -> None:
    record = names_of("x", "key") + content_in(payload)
    stored, plain = read_stored(record), read_record(record)
    assert stored.properties.headers == plain.properties.headers
    assert (plain.exchange, plain.routing_key) == ("x", "key")


@given(MESSAGE_PROPERTIES, SIMPLE[bytes])
@FEW
def test_every_message_of_amqp_091_has_a_transfer(properties: Properties, body: bytes) -> None:
    payload = transfer_of("x", "key", content_of(properties, body))
    found = split(payload)
    assert found.header.durable is (properties.delivery_mode == 2)
    if found.body_kind == DATA and properties.type != "amqp-1.0":
        assert payload[found.body_at] == section(DATA, body)


@pytest.mark.parametrize(
    ("acquired", "failed", "header", "notes"),
    [
        (0, 0, Header(first_acquirer=True), {}),
        (1, 0, Header(), {"x-acquired-count": 1}),
        (3, 2, Header(delivery_count=2), {"x-acquired-count": 3, "x-delivery-count": 2}),
    ],
)
def test_counts_are_told(acquired: int, failed: int, header: Header, notes: dict[str, int]) -> None:
    for content in (content_in(BODY), content_of(Properties(), b"hello")):
        payload = transfer_of("", "q", content, acquired_count=acquired, failed_count=failed)
        found = split(payload)
        assert found.header == header
        assert found.annotations == {"x-exchange": "", "x-routing-key": "q"} | notes
        assert all(type(found.annotations[Symbol(name)]) is Long for name in notes)


def test_the_offset_in_a_stream_is_told() -> None:
    for content in (content_in(BODY), content_in(section(0x72, {Symbol("x-a"): 1}) + BODY)):
        offset = notes_of(transfer_of("", "s", content, stream_offset=1 << 40))["x-stream-offset"]
        assert (offset, type(offset)) == (1 << 40, Long)


def test_annotations_of_the_queue_count_before_others() -> None:
    payload = section(0x72, {Symbol("x-a"): 1, Symbol("x-b"): 2}) + BODY
    more = encode({Symbol("x-a"): Float(1.5), Symbol("x-n"): None, Symbol("x-exchange"): "mine"})
    notes = notes_of(transfer_of("x", "k", content_in(payload), annotations=more))
    expected = {"x-a": 1.5, "x-b": 2, "x-n": None, "x-exchange": "mine", "x-routing-key": "k"}
    assert notes == expected
    assert type(notes[Symbol("x-a")]) is Float
    for broken in (b"\x41", more + b"\x41", encode({"x-a": 1}), more[:-1]):
        with pytest.raises(PeerError):
            transfer_of("x", "k", content_in(payload), annotations=broken)


def test_a_publishers_annotations_do_not_stand_for_the_brokers() -> None:
    forged = {Symbol("x-exchange"): "false", Symbol("x-acquired-count"): 7}
    notes = notes_of(transfer_of("x", "k", content_in(section(0x72, forged) + BODY)))
    assert notes == {"x-exchange": "x", "x-routing-key": "k", "x-acquired-count": 7}
    again = transfer_of("x", "k", content_in(section(0x72, forged) + BODY), acquired_count=1)
    assert notes_of(again)[Symbol("x-acquired-count")] == 1


DEATH = Death("q", "rejected", 1_700_000_000, "dlx", None)


@pytest.mark.parametrize("first", [True, False])
def test_deaths_are_annotations(first: bool) -> None:
    ttl = section(0x70, [True, None, UInt(60_000)])
    bare = section(0x73, [ULong(5)]) + section(0x74, {"k": "v"}) + section(VALUE, {"a": 1})
    record = names_of("x", "key") + content_in(
        ttl + section(0x72, {Symbol("x-opt-deaths"): "forged", Symbol("x-a"): UByte(1)}) + bare
    )
    letter = dead_letter(record, DEATH)
    if not first:
        letter = dead_letter(b"".join(letter.parts), DEATH)
    payload = transfer_of("dlx", "key", letter.parts[1])
    found = split(payload)
    # The message is what it was; its time limit and its place are not.
    assert payload[found.bare_at :] == bare
    assert found.header == Header(durable=True)
    death = {
        "count": ULong(1 if first else 2),
        "reason": Symbol("rejected"),
        "queue": "q",
        "first-time": Timestamp(1_700_000_000_000),
        "exchange": "x",
        "routing-keys": Array(str, ("key",)),
        "ttl": UInt(60_000),
    }
    if first:
        death["last-time"] = Timestamp(1_700_000_000_000)
    deaths = found.annotations.pop(Symbol("x-opt-deaths"))
    assert isinstance(deaths, Array)
    assert deaths.kind is dict
    (told,) = deaths.items
    assert isinstance(told, dict)
    assert same(sorted(told.items()), sorted((Symbol(key), value) for key, value in death.items()))
    last = "x" if first else "dlx"
    assert found.annotations == {
        "x-a": 1,
        "x-exchange": "dlx",
        "x-routing-key": "key",
        "x-first-death-queue": "q",
        "x-first-death-reason": "rejected",
        "x-first-death-exchange": "x",
        "x-last-death-queue": "q",
        "x-last-death-reason": "rejected",
        "x-last-death-exchange": last,
    }


def test_deaths_of_a_message_of_amqp_091_are_annotations() -> None:
    properties = Properties(headers=Table.of({"x-a": 1, "k": 2}))
    letter = dead_letter(names_of("x", "key") + content_of(properties, b"b"), DEATH)
    notes = notes_of(transfer_of("dlx", "key", letter.parts[1]))
    assert isinstance(notes[Symbol("x-opt-deaths")], Array)
    assert Symbol("x-death") not in notes
    assert notes[Symbol("x-first-death-queue")] == "q"
    # What a publisher tells of deaths is an annotation as others are.
    forged = Properties(headers=Table.of({"x-death": [{"queue": "z"}]}))
    notes = notes_of(transfer_of("x", "key", content_of(forged, b"b")))
    assert notes[Symbol("x-death")] == [{"queue": "z"}]
    assert Symbol("x-opt-deaths") not in notes


def test_copies_end_with_a_dead_letter_routing_key() -> None:
    record = names_of("x", "k") + content_in(section(0x72, {Symbol("x-cc"): ["two"]}) + BODY)
    kept = dead_letter(record, DEATH)
    assert kept.keys == ("k", "two")
    assert Symbol("x-cc") in notes_of(transfer_of("dlx", "k", kept.parts[1]))
    moved = dead_letter(record, Death("q", "rejected", 1, "dlx", "other"))
    assert moved.keys == ("other",)
    assert Symbol("x-cc") not in notes_of(transfer_of("dlx", "other", moved.parts[1]))


def test_headers_that_do_not_fit_are_left_out_of_the_view_alone() -> None:
    large = {"large": "a" * 200_000, "small": 5, **{f"k{n}": "v" * 2000 for n in range(100)}}
    payload = section(0x74, large) + BODY
    content = content_in(payload)
    properties = read_stored(names_of("", "q") + content).properties
    assert properties.headers is not None
    assert properties.headers.get("small") == Field("l", 5)
    assert "large" not in properties.headers
    assert 100_000 < len(properties.headers.encoded) < HEADER_BYTES_MAX
    left = transfer_of("", "q", content)
    assert left[split(left).bare_at :] == payload
    # There is room for its deaths.
    assert dead_letter(names_of("", "q") + content, DEATH).deaths == (("q", "rejected"),)
