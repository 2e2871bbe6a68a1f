"""One check for every way by which a message comes in."""

from __future__ import annotations

import pytest
from hypothesis import given

from convoymq.messages.amqp091 import Properties, decode_properties, encode_properties
from convoymq.messages.attributes import RECORD_HEADERS
from convoymq.messages.deaths import Death, dead_letter
from convoymq.messages.record import names_of, read_record
from convoymq.metadata.records import User
from convoymq.model.errors import PreconditionFailed
from convoymq.model.tables import Field, Table
from convoymq.queues.message_checks import check_message
from tests import hostile

ANN = User(name="ann")


@given(hostile.PROPERTIES, hostile.BODIES)
def test_hostile_messages_pass_and_die_with_all_they_have(sent: Properties, body: bytes) -> None:
    """Read, checked, written as a dead letter twice: nothing raises, nothing is lost."""
    content = hostile.content(sent, body)
    assert encode_properties(decode_properties(encode_properties(sent))) == encode_properties(sent)
    checked = check_message(content, "k", user=ANN)
    assert checked.content == content
    record = names_of("x", "k") + content
    for queue in ("a", "b"):
        record = b"".join(dead_letter(record, Death(queue, "rejected", 1, "dlx", None)).parts)
    found = read_record(record)
    assert found.body == body
    own = [name for name in found.headers if not name.startswith("x-")]
    assert own == [name for name in sent.headers or () if not name.startswith("x-")]
    for name, _ in Properties.FIELDS:
        if name != "headers":
            assert getattr(found.properties, name) == getattr(sent, name)


@pytest.mark.parametrize(
    ("field", "ms"),
    [
        (Field("S", b"5000"), 5000), (Field("S", b"-1"), -1), (Field("d", 1500.9), 1500),
        (Field("f", 2.0), 2), (Field("l", 7), 7), (Field("b", 7), 7),
    ],
)  # fmt: skip
def test_a_delay_comes_as_a_number_or_as_clients_of_the_plugin_send_it(
    field: Field, ms: int
) -> None:
    headers = Table.from_fields([("a", Field("S", b"b")), ("x-delay", field)])
    checked = check_message(hostile.content(Properties(headers=headers)), "k", user=ANN)
    assert checked.asked == ("x-delay" if ms > 0 else None)
    assert checked.flags & RECORD_HEADERS
    stored = read_record(names_of("", "") + checked.content).headers
    found = stored.get("x-delay")
    assert found is not None
    assert (found.value, found.code in "lb") == (ms, True)
    assert stored.keys() == ("a", "x-delay")


@pytest.mark.parametrize("value", [b"soon", b"", b"5 s", b"9" * 14, "１".encode()])
def test_a_delay_that_is_no_number_is_refused(value: bytes) -> None:
    headers = Table.of({"x-delay": value})
    with pytest.raises(PreconditionFailed, match="header 'x-delay'"):
        check_message(hostile.content(Properties(headers=headers)), "k", user=ANN)


def test_the_user_id_is_that_of_the_user_or_anything_for_an_impersonator() -> None:
    for user, name, refused in (
        (ANN, "ann", False),
        (ANN, "bob", True),
        (ANN, "", True),
        (User(name="ann", tags=("impersonator",)), "bob", False),
    ):
        content = hostile.content(Properties(user_id=name))
        if refused:
            with pytest.raises(PreconditionFailed, match="authenticated user was 'ann'"):
                check_message(content, "k", user=user)
        else:
            assert check_message(content, "k", user=user).content == content
