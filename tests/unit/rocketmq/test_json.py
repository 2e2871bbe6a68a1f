"""JSON as RocketMQ's own servers write it."""

from __future__ import annotations

import json as standard
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoymq.model.errors import SyntaxFault
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.values import (
    BrokerData,
    DataVersion,
    MemberGroup,
    MemberGroupBody,
    RegisterBrokerBody,
    TopicConfig,
    TopicTable,
    decode_registration,
)
from tests.rocketmq.registrations import compressed

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_json_is_read_as_anybody_reads_it(value: Any) -> None:
    text = standard.dumps(value, ensure_ascii=False).encode()
    assert json._Reader(text).value() == value
    assert json.loads(text, object) == value
    assert json.loads(json.dumps(value), object) == value


def test_numbers_may_be_names() -> None:
    text = (
        b'{ "brokerMemberGroup":{"brokerAddrs":{0:"a:1",2:"b:1"},"brokerName":"n","cluster":"c"}}'
    )
    found = json.loads(text, MemberGroupBody)
    assert found.broker_member_group == MemberGroup("c", "n", {0: "a:1", 2: "b:1"})


def test_objects_may_be_names() -> None:
    text = b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"t"}:{"maxOffset":3}}}'
    found = json.loads(text, dict[str, dict[str, dict[str, int]]])
    assert found == {
        "offsetTable": {'{"brokerName":"b","queueId":0,"topic":"t"}': {"maxOffset": 3}}
    }


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b'{"a"}', b'{"a":}', b"[1,]", b"{1:2,}", b"[1 2]", b'"\x00"', b"{} {}", b"\xff",
     b'"a', b"[" * 100_000, b"{1:" * 100_000, b"{a:tru}"],
)  # fmt: skip
def test_nonsense_is_refused(text: bytes) -> None:
    with pytest.raises(SyntaxFault):
        json.loads(text, object)


def test_another_type_is_refused() -> None:
    with pytest.raises(SyntaxFault, match="not as expected"):
        json.loads(b'{"counter":[]}', DataVersion)


def test_no_blank_is_written() -> None:
    data = BrokerData("c", "n", {0: "127.0.0.1:10911", 1: "127.0.0.1:10921"})
    assert json.dumps(data) == (
        b'{"cluster":"c","brokerName":"n",'
        b'"brokerAddrs":{"0":"127.0.0.1:10911","1":"127.0.0.1:10921"}}'
    )


REGISTRATION = RegisterBrokerBody(
    TopicTable(
        {
            "a": TopicConfig("a", 4, 2, 6),
            "b": TopicConfig("b", 1, 1, 7, attributes={"+message.type": "DELAY FIFO"}),
        },
        DataVersion(0, 1_700_000_000_000, 7),
    ),
    ["127.0.0.1:9"],
)


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_registration_comes_back(*, is_compressed: bool) -> None:
    body = compressed(REGISTRATION) if is_compressed else json.dumps(REGISTRATION)
    assert decode_registration(body, compressed=is_compressed, version=413) == REGISTRATION


@given(cut=st.integers(0, 200), noise=st.binary(max_size=20))
def test_a_broken_registration_is_refused(cut: int, noise: bytes) -> None:
    body = compressed(REGISTRATION)
    broken = body[:cut] + noise
    if broken == body:
        return
    try:
        decode_registration(broken, compressed=True, version=413)
    except SyntaxFault:
        return
    # Something behind the end of the stream is passed over.
    assert broken.startswith(body)
