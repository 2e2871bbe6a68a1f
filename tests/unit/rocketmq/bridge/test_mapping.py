"""Messages that cross a bridge: both ways and back, whatever is in them."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from convoymq.kernels.column_frame import ColumnFrame
from convoymq.rocketmq.bridge import amqp, mapping
from convoymq.rocketmq.bridge.mapping import AmqpMessage, RocketMessage, to_amqp, to_rocketmq
from convoymq.rocketmq.store.types import decode_properties, encode_properties

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
NAMES = st.one_of(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    st.sampled_from([
        "KEYS", "TAGS", "DELAY", "rocketmq-KEYS", "rocketmq-TAGS", "rocketmq-DELAY", "AMQP_x",
        "rocketmq-rocketmq-KEYS", "AMQP_HEADERS", "AMQP_content_type", "AMQP_TOMBSTONE", "x-match",
        "__SHARDINGKEY", "TIMER_OUT_MS", "rocketmq-origin", "rocketmq-properties", "ESCAPE_KEY",
    ]),
)  # fmt: skip
MESSAGES = st.builds(
    AmqpMessage,
    body=st.none() | st.binary(max_size=20),
    key=st.none() | st.binary(min_size=1, max_size=20),
    headers=st.dictionaries(
        NAMES.filter(lambda name: name not in mapping.RESERVED),
        st.none() | st.binary(max_size=20), max_size=5,
    ),
    properties=st.dictionaries(st.sampled_from(mapping.PROPERTIES), TEXT, max_size=3),
    time_ms=st.integers(0, 1 << 40),
)  # fmt: skip
PROPERTIES = st.dictionaries(
    NAMES | st.sampled_from(sorted(mapping.RESERVED)), TEXT.filter(bool), max_size=6
).filter(lambda found: not any(c in n + v for n, v in found.items() for c in "\x01\x02"))


@given(MESSAGES)
def test_what_crosses_from_convoymq_comes_back_as_it_was(message: AmqpMessage) -> None:
    there = to_rocketmq(message)
    stored = decode_properties(encode_properties(dict(there.properties)))
    assert stored == there.properties, "a broker keeps every property as it is"
    assert to_amqp(RocketMessage(there.body, stored, there.born_ms)) == message


@given(PROPERTIES, st.binary(max_size=20))
def test_what_crosses_from_rocketmq_keeps_every_property(
    properties: dict[str, str], body: bytes
) -> None:
    """What means something to a broker is not put back as such: it would act again."""
    message = to_amqp(RocketMessage(body, properties, 7, "b:t:0:5"))
    if message.body is None:
        assert properties[mapping.TOMBSTONE] == "true"
        return
    amqp.frame_of([message])
    assert message.headers[mapping.ORIGIN] == b"b:t:0:5"
    back = to_rocketmq(message)
    assert back.body == body
    rest = json.loads(message.headers.get(mapping.REST) or b"{}")
    for name, value in properties.items():
        if name in mapping.TRANSLATED or mapping._property_of(name) == name:
            assert back.properties[name] == value
        elif name == mapping.SHARDING_KEY:
            assert message.key == value.encode()
            assert back.properties[name] == value
        elif name.removeprefix("AMQP_") in message.properties:
            assert back.properties[name] == value
        elif name in rest:
            assert rest[name] == value
        else:
            assert message.headers[f"rocketmq-{name}"] == value.encode()
            assert back.properties.get(name) in (None, back.properties.get(mapping.CARRIED))


@given(st.text(max_size=60))
def test_carried_headers_that_are_not_ours_do_no_harm(text: str) -> None:
    message = to_amqp(RocketMessage(b"x", {mapping.CARRIED: text} if text else {}))
    assert message.body == b"x"


@given(st.lists(MESSAGES, min_size=1, max_size=4))
def test_frames_hold_messages_as_they_are(messages: list[AmqpMessage]) -> None:
    found = amqp.messages_of(ColumnFrame(amqp.frame_of(messages)))
    for before, after in zip(messages, found, strict=True):
        assert (after.body, after.key) == (before.body, before.key)
        assert after.headers == before.headers
        assert after.properties == before.properties
        assert after.time_ms == before.time_ms
