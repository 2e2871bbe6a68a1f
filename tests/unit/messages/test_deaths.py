"""The headers of dead letters: what is written, what is believed, what goes round."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.edges.amqp091._spec import Properties
from convoymq.edges.amqp091.codec import ContentHeader, decode_header, encode_header
from convoymq.kernels import batch
from convoymq.kernels.batch import CommandBuilder, PublishTarget
from convoymq.kernels.content import content_parts, split_record
from convoymq.kernels.entries import Entry
from convoymq.messages.amqp091 import HEADER_BYTES_MAX
from convoymq.messages.deaths import (
    DeadLetter,
    Death,
    dead_letter,
    dead_letter_run,
    first_death,
    is_cycle,
)
from convoymq.messages.record import DEATH_CHANNEL
from convoymq.model.errors import BrokerError
from convoymq.model.tables import Field, Table


def frame(kind: int, payload: bytes, channel: int = 1) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def record(body: bytes = b"body", exchange: str = "x", key: str = "k", **properties: Any) -> bytes:
    if isinstance(properties.get("headers"), dict):
        properties["headers"] = Table.of(properties["headers"])
    header = encode_header(ContentHeader(body_size=len(body), properties=Properties(**properties)))
    names = b"".join(bytes((len(text),)) + text for text in (exchange.encode(), key.encode()))
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
    assert again[1:3] == DEATH_CHANNEL.to_bytes(2, "big")
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
    assert is_cycle(letter.deaths, "a")
    assert not is_cycle(letter.deaths, "b")
    letter, _ = dies(b"".join(letter.parts), "b", "maxlen")
    assert is_cycle(letter.deaths, "a")
    letter, _ = dies(b"".join(letter.parts), "c", "rejected")
    assert not is_cycle(letter.deaths, "a")
    assert not is_cycle(letter.deaths, "c")
    letter, _ = dies(b"".join(letter.parts), "d", "expired")
    assert is_cycle(letter.deaths, "d")
    assert not is_cycle(letter.deaths, "b")


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


# --- whole runs of messages ------------------------------------------------------------------


def entry_of(records: Sequence[bytes]) -> tuple[bytes, int]:
    """An entry with one ENQUEUE command, and where that begins."""
    builder = CommandBuilder()
    target = PublishTarget(builder, 1, None)
    for each in records:
        target.publish([each], 0, 0)
    entry: Entry = builder.take_entry(1, 1, 1, 0)
    return entry.data, batch.commands(entry.data)[0][6]


def by_runs(records: Sequence[bytes], death: Death, limit: int = 1000) -> list[tuple[bytes, int]]:
    """(record, length of its run) of what becomes of records; 0: the kernel leaves it to Python."""
    data, command = entry_of(records)
    kernel = first_death(death)
    made: list[tuple[bytes, int]] = []
    while len(made) < len(records):
        run = dead_letter_run(data, command, len(made), limit, death, kernel)
        if run is None:
            letter = dead_letter(records[len(made)], death)
            made.append((b"".join(letter.parts), 0))
            continue
        for i in range(run.count):
            written = batch.record(run.records, 0, i)
            one = dead_letter(records[len(made)], death)
            assert run.keys == one.keys
            assert run.deaths == one.deaths
            assert run.records[5] & one.flags == one.flags
            made.append((written, run.count))
    return made


TEXT = st.text("kµ€ .#", max_size=12)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | TEXT
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
HEADERS = st.dictionaries(
    TEXT | st.sampled_from(["x-group-id", "x-first", "x-last-death", "cC", "BCC", "x-delivery"]),
    VALUES,
    max_size=4,
)
ODD_HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "CC": st.lists(TEXT, max_size=2),
        "x-delay": st.just(5),
        "x-deliver-at": st.just(6),
        "x-death": st.just([{"queue": "q"}]),
        "x-first-death-queue": st.just("forged"),
        "x-last-death-reason": st.just("forged"),
    },
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    names = draw(st.sets(st.sampled_from(sorted(ALL))))
    properties: dict[str, Any] = {name: ALL[name] for name in names}
    if draw(st.booleans()):
        properties["headers"] = draw(HEADERS) | draw(st.just({}) | ODD_HEADERS)
    if draw(st.booleans()):
        properties["expiration"] = str(draw(st.integers(0, 1 << 33)))
    key = draw(st.sampled_from(["k", "k", "other", "ключ"]))
    made = record(draw(st.binary(max_size=40)), draw(st.sampled_from(["x", ""])), key, **properties)
    if draw(st.integers(0, 4)) == 0:
        made = b"".join(dead_letter(made, Death("before", "expired", 1, "x", None)).parts)
    return made


@given(
    st.lists(messages(), min_size=1, max_size=6),
    st.sampled_from([None, "own", ""]),
    st.integers(1, 4),
)
def test_runs_become_what_each_message_becomes(
    records: list[bytes], routing_key: str | None, limit: int
) -> None:
    death = Death("quéue", "maxlen", 1 << 33, "dlx", routing_key)
    made = by_runs(records, death, limit)
    assert [each for each, _ in made] == [
        b"".join(dead_letter(each, death).parts) for each in records
    ]


def test_what_is_a_run_and_what_is_looked_at_more_closely() -> None:
    """With a key of the queue's own the keys of messages make no difference."""
    died = b"".join(dead_letter(record(), Death("a", "expired", 1, "x", None)).parts)
    records = [
        *(record(b"%d" % i, headers={"n": i}, expiration=str(i)) for i in range(3)),
        record(key="other"),
        record(headers={"CC": ["c"]}),
        record(headers={"x-delay": 5}),
        died,
        record(),
    ]
    death = Death("q", "expired", 5, "dlx", None)
    assert [count for _, count in by_runs(records, death)] == [3, 3, 3, 1, 0, 0, 0, 1]
    death = Death("q", "expired", 5, "dlx", "own")
    assert [count for _, count in by_runs(records, death)] == [4, 4, 4, 4, 0, 0, 0, 1]
    assert [count for _, count in by_runs(records[:4], death, 2)] == [2] * 4


def test_large_messages_make_short_runs() -> None:
    records = [record(b"x" * 100_000) for _ in range(30)]
    counts = [count for _, count in by_runs(records, Death("q", "expired", 5, "dlx", None))]
    assert counts[0] == 11
    assert len(counts) == 30


def test_headers_that_have_no_room_for_deaths_are_left_to_python() -> None:
    death = Death("q", "rejected", 5, "dlx", None)
    found = set()
    for size in range(HEADER_BYTES_MAX - 400, HEADER_BYTES_MAX - 250, 3):
        content = record(headers={"big": "x" * size})
        letter = dead_letter(content, death)
        ((made, count),) = by_runs([content], death)
        assert made == b"".join(letter.parts)
        assert count == len(letter.deaths)
        found.add(count)
    assert found == {0, 1}


@given(st.data())
def test_a_damaged_record_is_refused_or_left_to_python(data: st.DataObject) -> None:
    """One byte differs, or the end is missing: nothing outside of it is read or written."""
    content = bytearray(data.draw(messages()))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(content[: data.draw(st.integers(1, len(content)))])
    block, command = entry_of([record(), damaged, record()])
    death = Death("q", "rejected", 5, "dlx", None)
    run = dead_letter_run(block, command, 1, 1, death, first_death(death))
    if run is not None:
        assert run.count == 1
        assert split_record(batch.record(run.records, 0, 0))


@pytest.mark.parametrize(("first", "limit"), [(-1, 1), (2, 1), (0, 0), (5, 1)])
def test_records_that_are_not_there(first: int, limit: int) -> None:
    block, command = entry_of([record(), record()])
    death = Death("q", "rejected", 5, "dlx", None)
    with pytest.raises(ValueError):
        dead_letter_run(block, command, first, limit, death, first_death(death))
    with pytest.raises(ValueError):
        dead_letter_run(block, command + 8, 0, 1, death, first_death(death))


def test_a_run_is_published_as_its_messages_are() -> None:
    """The same entry, tags included; the flags of some message are those of its command."""
    death = Death("q", "rejected", 5, "dlx", None)
    records = [record(b"b" * (i % 3), priority=i % 2 or None) for i in range(5)]
    block, command = entry_of(records)
    run = dead_letter_run(block, command, 0, 9, death, first_death(death))
    assert run is not None
    made = []
    for alone in (False, True):
        builder = CommandBuilder()
        target = PublishTarget(builder, 3, None)
        if alone:
            for i, each in enumerate(records):
                dead_letter(each, death).publish(target, 7 + i)
        else:
            run.publish(target, 7)
        data = builder.take_entry(1, 1, 1, 0).data
        made.append((data, [(each.tags, each.messages) for each in target.pending]))
    assert made[0] == made[1]
    assert made[0][1] == [([7, 11], 5)]
    assert run.size == len(run.records)


def test_records_that_are_damaged_are_not_published() -> None:
    target = PublishTarget(CommandBuilder(), 3, None)
    death = Death("q", "rejected", 5, "dlx", None)
    block, command = entry_of([record()])
    run = dead_letter_run(block, command, 0, 9, death, first_death(death))
    assert run is not None
    for damaged, count in ((run.records, 2), (run.records[:-8], 1), (b"", 0)):
        with pytest.raises(ValueError):
            target.publish_records(damaged, count, 1)
    with pytest.raises(ValueError):
        target.publish_records(batch.slice_records(*entry_of([b"x"]), 0, 1), 1, 1)
