"""Every reader of records takes messages of AMQP 1.0: deliveries, columns, HTTP, queues, topics."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given

from convoymq.edges.amqp091 import codec
from convoymq.edges.http.messages import row_of
from convoymq.edges.http.selections import edited_record
from convoymq.kernels import batch, columns
from convoymq.kernels.column_frame import ColumnFrame
from convoymq.kernels.message_attributes import attribute_runs
from convoymq.kernels.ordered_runs import order_key
from convoymq.messages.amqp091 import Properties
from convoymq.messages.amqp10.encoding import ENCODING
from convoymq.messages.amqp10.message import annotated, stored_of, transfer_of
from convoymq.messages.amqp10.sections import DATA, VALUE, section, split
from convoymq.messages.amqp10.values import (
    Float,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    Value,
    encode,
)
from convoymq.messages.attributes import flags_of
from convoymq.messages.columns import ColumnWriter
from convoymq.messages.deaths import dead_letter, dead_letter_run, first_death, history_of
from convoymq.messages.encodings import AMQP_10
from convoymq.messages.record import (
    content_of,
    cut_body,
    names_of,
    read_record,
    read_stored,
    split_of,
    telling_deaths,
    traits_of,
)
from convoymq.metadata.machine import User
from convoymq.model.errors import PeerError, PreconditionFailed
from convoymq.model.tables import Field, Table
from convoymq.queues.message_checks import check_message
from tests.unit.kernels.test_frames import make_buffer
from tests.unit.kernels.test_frames import split as frames_in
from tests.unit.messages.amqp10.strategies import FEW, MESSAGES
from tests.unit.messages.test_record import REJECTED, block_of, replace_queue

BODY = section(DATA, b"hello")


def record_of(payload: bytes, *, exchange: str = "x", key: str = "k") -> bytes:
    stored = stored_of(payload)
    return names_of(exchange, key) + content_of(stored.properties, stored.body, AMQP_10)


def noted(notes: dict[str, Value], more: bytes = BODY) -> bytes:
    return section(0x72, {Symbol(name): value for name, value in notes.items()}) + more


def expected_of(payload: bytes) -> tuple[Properties, bytes]:
    stored = stored_of(payload)
    return ENCODING.to_amqp091(stored.properties, stored.body)


@FEW
@given(MESSAGES)
def test_a_client_of_amqp_091_gets_it(payload: bytes) -> None:
    ear, (channel,) = make_buffer([3])
    deliveries = channel.add_consumer(None, 1, b"tag", False, False, False)
    channel.deliver(deliveries, 5, block_of([record_of(payload)]), 0, 0, 1, 1, 1)
    kinds = []
    body = b""
    for frame in frames_in(ear.buffer.take_output()):
        kinds.append(frame[0])
        if frame[0] == 2:
            properties = codec.decode_header(frame[7:-1]).properties
        elif frame[0] == 3:
            body += frame[7:-1]
    wanted, wanted_body = expected_of(payload)
    assert kinds[:2] == [1, 2]
    assert body == wanted_body
    assert repr(properties) == repr(wanted)


@FEW
@given(MESSAGES)
def test_columns_have_it(payload: bytes) -> None:
    _, wanted_body = expected_of(payload)
    writer = ColumnWriter(columns.VALUE | columns.HEADERS, 100, 1 << 20)
    assert writer.append(block_of([record_of(payload)]), 0, 0, 1, 0, 0) == 1
    frame = ColumnFrame(writer.finish(1))
    _, ends, data = frame.buffers(columns.VALUE)
    start, stop = struct.unpack("<2i", bytes(ends))
    assert bytes(data[start:stop]) == wanted_body


@FEW
@given(MESSAGES)
def test_http_shows_it(payload: bytes) -> None:
    record = record_of(payload)
    _, body = expected_of(payload)
    row = row_of(record, 1, 0, "base64", None)
    assert "unreadable" not in row
    assert (row["exchange"], row["routing_key"], row["payload_bytes"]) == ("x", "k", len(body))
    assert read_record(cut_body(record, 2)).body == body[:2]


def test_what_an_operator_edits_is_a_message_of_amqp_091() -> None:
    user = user_named("guest")
    record = record_of(noted({"x-a": UByte(1)}, section(0x74, {"k": "v"}) + section(VALUE, 1)))
    same = read_record(edited_record(record, {}, user, 1000))
    assert (same.properties.type, same.body) == ("amqp-1.0", section(VALUE, 1))
    # It becomes the value again for 1.0.
    left = transfer_of("x", "k", same.content)
    assert left[split(left).body_at] == section(VALUE, 1)
    other = read_stored(edited_record(record, {"payload": "new"}, user, 1000))
    assert other.body == b"new"
    assert other.headers.get("k") == Field("S", b"v")


ASKED: dict[str, Value] = {
    "x-group-id": "g",
    "x-order-key": "o",
    "x-stream-producer": "p",
    "x-stream-sequence": 7,
}


@pytest.mark.parametrize("by", ["annotations", "application properties"])
def test_queues_act_on_it(by: str) -> None:
    header = section(0x70, [True, UByte(9), UInt(60)])
    asked = noted(ASKED, b"") if by == "annotations" else section(0x74, ASKED)
    record = record_of(header + asked + BODY)
    stored = stored_of(header + asked + BODY)
    assert attribute_runs(block_of([record]), 0, 0, 1) == [0, 1, len(stored.body), 9, 60]
    assert order_key(record) == b"o"
    traits = traits_of(record)
    assert traits[:3] == (True, 9, 60)
    checked = check_message(split_content(record), "k", user=user_named("u"))
    assert checked.producer == (b"p", 7)
    assert checked.asked == "expiration"
    assert checked.flags == flags_of(checked.properties) == 2 | 4 | 8


def test_it_is_checked_as_others_are() -> None:
    def check(payload: bytes) -> tuple[str, ...]:
        return check_message(
            split_content(record_of(payload)), "k", user=user_named("u")
        ).routing_keys

    assert check(noted({"x-cc": ["a", "k", "b"]})) == ("k", "a", "b")
    assert check(section(0x74, {"CC": ["a"]}) + BODY) == ("k",)
    assert check(section(0x73, [None, b"u"]) + BODY) == ("k",)
    for refused in (
        noted({"x-cc": "a"}),
        section(0x73, [None, b"other"]) + BODY,
        noted({"x-opt-delivery-time": Timestamp(1 << 60)}),
        noted({"x-delay": 5, "x-deliver-at": 5}),
        noted({"x-basic-expiration": "soon"}),
    ):
        with pytest.raises(PreconditionFailed):
            check(refused)


def test_a_delay_is_read_by_queues() -> None:
    at = 1_900_000_000_000
    for asked in ({"x-opt-delivery-time": Timestamp(at)}, {"x-deliver-at": at}):
        record = record_of(noted(asked))
        checked = check_message(split_content(record), "k", user=user_named("u"))
        assert checked.asked == "x-deliver-at"
        assert checked.headers is not None
        assert checked.headers.get("x-deliver-at") == Field("l", at)
        # Its stored form is what was published.
        assert split(transfer_of("x", "k", checked.content)).annotations.keys() >= asked.keys()


@FEW
@given(MESSAGES)
def test_it_dies_in_the_kernel_and_in_python_alike(payload: bytes) -> None:
    record = record_of(payload)
    letter = dead_letter(record, REJECTED)
    run = dead_letter_run(block_of([record]), 0, 0, 1, REJECTED, first_death(REJECTED))
    if run is not None:
        assert batch.record(run.records, 0, 0) == b"".join(letter.parts)
    again = dead_letter(b"".join(letter.parts), replace_queue("dlq"))
    for each, count in ((letter, 1), (again, 2)):
        stored = read_stored(b"".join(each.parts))
        assert stored.body == stored_of(payload).body
        history = history_of(stored.content, stored.headers)
        assert history is not None
        assert history.first.queue == "q"
        assert len(each.deaths) == count


@FEW
@given(MESSAGES)
def test_annotations_are_added_for_every_reader(payload: bytes) -> None:
    more = {Symbol("x-why"): "bad", Symbol("x-rate"): Float(0.5), Symbol("x-list"): [1]}
    record = annotated(record_of(payload), encode(more))
    left = transfer_of("x", "k", read_stored(record).content)
    found = split(left)
    assert left[found.bare_at :] == payload[split(payload).bare_at :]
    assert {key: found.annotations[key] for key in more} == more
    headers = read_record(record).headers
    assert headers.get("x-why") == Field("S", b"bad")
    assert headers.get("x-rate") == Field("f", 0.5)


def test_annotations_are_added_to_a_message_of_amqp_091() -> None:
    record = names_of("x", "k") + content_of(Properties(headers=Table.of({"k": 1})), b"body")
    made = read_record(annotated(record, encode({Symbol("x-why"): "bad"})))
    assert made.headers.to_plain() == {"k": 1, "x-why": "bad"}
    assert made.body == b"body"
    with pytest.raises(PeerError):
        annotated(record, encode({"x-why": 1}))


def test_annotations_of_consumers_neither_route_a_message_nor_tell_of_deaths() -> None:
    record = record_of(BODY)
    for name in ("x-cc", "x-opt-delivery-time", "x-first-death-queue", "x-last-death-reason"):
        assert annotated(record, encode({Symbol(name): ["k"]})) == annotated(record, encode({}))


def test_a_damaged_message_is_refused_by_its_readers() -> None:
    for stored in (b"", b"\xff", section(0x73, []), noted({})[:-1], BODY[:-3]):
        record = names_of("x", "k") + content_of(Properties(), stored, AMQP_10)
        with pytest.raises(PeerError):
            read_record(record)
        assert row_of(record, 0, 0, "auto", None)["unreadable"] is True
        # Queues read the header alone.
        assert split_of(record)[0] == len(stored)


def test_a_mark_of_deaths_stays() -> None:
    content = telling_deaths(split_content(record_of(BODY)), told=True)
    assert split(transfer_of("x", "k", content)).header.first_acquirer is False


def split_content(record: bytes) -> bytes:
    return read_stored(record).content


def user_named(name: str) -> User:
    return User(name=name)
