"""Parameters of shovels: what RabbitMQ 3.10.8 answers to the same ones (amqp10's texts too)."""

from __future__ import annotations

from typing import Any

import pytest

from convoymq.broker.shovel_uris import BadUri, uri_of, without_credentials
from convoymq.broker.shovels import ShovelView, checked, clear_shovel, set_shovel, shovel_of
from convoymq.metadata.commands import PutSetting, PutVhost
from convoymq.metadata.machine import MetadataMachine
from convoymq.model.errors import ValidationFailed

GOOD: dict[str, Any] = {
    "src-uri": "amqp://",
    "src-queue": "a",
    "dest-uri": "amqp://",
    "dest-queue": "b",
}
TEN: dict[str, Any] = {"src-protocol": "amqp10", "dest-protocol": "amqp10", "src-uri": "amqp://",
       "dest-uri": "amqp://"}  # fmt: skip
WORDS = '[<<"no-ack">>,<<"on-publish">>,<<"on-confirm">>]'
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "Must specify 'src-exchange' or 'src-queue'\nKey \"dest-uri\" not found in s\n"
         'Key "src-uri" not found in s'),
    ({"src-uri": 5, "src-queue": "a", "dest-uri": "amqp://"},
     "src-uri should be list, actually was 5"),
    (GOOD | {"foo": 1, "bar": [1]},
     'Unrecognised terms [{<<"bar">>,[1]},{<<"foo">>,1}] in s'),
    (GOOD | {"ack-mode": "x"}, f'ack-mode should be one of {WORDS}, actually was <<"x">>'),
    (GOOD | {"src-exchange": "e"}, "Cannot specify 'src-exchange' and 'src-queue'"),
    (GOOD | {"dest-exchange": "e"}, "Cannot specify 'dest-exchange' and 'dest-queue'"),
    (GOOD | {"src-uri": "http://x"},
     '"http://x" not a valid URI: {{unexpected_uri_scheme,"http"},"http://x"}'),
    (GOOD | {"src-uri": "amqp://h:99999"},
     '"amqp://h:99999" not a valid URI: {{port_out_of_range,99999},"amqp://h:99999"}'),
    (GOOD | {"src-uri": ["amqp://", "bad"]},
     '"bad" not a valid URI: {{unable_to_parse_uri,no_scheme},"bad"}'),
    (GOOD | {"src-uri": "amqp://h/a/b"},
     '"amqp://h/a/b" not a valid URI: {{invalid_vhost,"a/b"},"amqp://h/a/b"}'),
    (GOOD | {"src-uri": "amqp://%zz"},
     "\"amqp://%zz\" not a valid URI: {{invalid_entitiy,['%',122,122]},\"amqp://%zz\"}"),
    (GOOD | {"src-uri": "amqp://:5672"},
     '"amqp://:5672" not a valid URI: {port_requires_host,"amqp://:5672"}'),
    (GOOD | {"src-delete-after": "x"},
     'src-delete-after should be a number greater than or equal to 0, "never" or "queue-length", '
     'actually was <<"x">>'),
    (GOOD | {"src-delete-after": 5, "ack-mode": "no-ack"},
     "Cannot specify 'no-ack' and numerical 'delete-after'"),
    (GOOD | {"reconnect-delay": "x"},
     'reconnect-delay should be a number, actually was <<"x">>'),
    (GOOD | {"dest-add-forward-headers": "x"},
     'dest-add-forward-headers should be boolean, actually was <<"x">>'),
    (GOOD | {"src-queue": 5}, "src-queue should be binary, actually was 5"),
    (GOOD | {"dest-publish-properties": {"delivery_mode": "x", "foo": 1}},
     'Unrecognised terms [{<<"foo">>,1}] in dest-publish-properties\n'
     'delivery_mode should be a number, actually was <<"x">>'),
    (TEN, 'Key "dest-address" not found in s\nKey "src-address" not found in s'),
    (TEN | {"src-address": "a", "dest-address": "b", "dest-message-annotations": {"a": 1}},
     "a should be binary, actually was 1"),
    # RabbitMQ takes these, or answers 500.
    (GOOD | {"src-prefetch-count": -1},
     "src-prefetch-count should be from 0 to 65535, actually was -1"),
    (GOOD | {"src-uri": []}, "src-uri should have a URI"),
    (GOOD | {"src-protocol": "mqtt"},
     'src-protocol should be one of [<<"amqp10">>,<<"amqp091">>], actually was <<"mqtt">>'),
]  # fmt: skip


@pytest.mark.parametrize(("value", "reason"), REFUSED)
def test_bad_parameters_are_refused_in_rabbitmq_s_words(value: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationFailed) as refused:
        checked("s", value)
    assert refused.value.text == f"Validation failed\n\n{reason}"


@pytest.mark.parametrize("value", ["x", 5, None, [1], True])
def test_a_parameter_is_an_object(value: object) -> None:
    with pytest.raises(ValidationFailed):
        checked("s", value)


def test_defaults_and_names_of_before_3_7() -> None:
    plain = shovel_of("/", "s", GOOD)
    assert (plain.ack_mode, plain.prefetch, plain.delete_after) == ("on-confirm", 1000, "never")
    old = {"prefetch-count": 7, "delete-after": "queue-length", "add-forward-headers": True,
           "publish-properties": {"delivery_mode": 2}, "ack-mode": "no-ack"}  # fmt: skip
    checked("s", GOOD | old)
    shovel = shovel_of("/", "s", GOOD | old)
    assert (shovel.prefetch, shovel.delete_after) == (7, "queue-length")
    assert shovel.forward_headers
    assert shovel.properties == {"delivery_mode": 2}
    # What it would be sent too much must come back.
    assert not shovel.takes_settled
    assert shovel_of("/", "s", GOOD | {"ack-mode": "no-ack"}).takes_settled


def test_a_uri_says_where_and_who() -> None:
    uri = uri_of("amqps://a%40b:p%2Fw@[::1]:4/v%2F?heartbeat=9&verify=verify_peer")
    assert (uri.host, uri.port, uri.tls, uri.vhost) == ("::1", 4, True, "v/")
    assert (uri.user, uri.password, uri.number("heartbeat", 1)) == ("a@b", "p/w", 9)
    assert uri_of("amqp://").is_local
    assert not uri_of("amqp://u:p@/v").is_local
    assert uri_of("amqp:///v").vhost == "v"
    # As the specification has it: not the default one.
    assert uri_of("amqp://h/").vhost == ""
    with pytest.raises(BadUri):
        uri_of("amqp://h:x")


def test_secrets_are_not_shown() -> None:
    shown = without_credentials("amqps://u:p@h:1/v?password=secret")
    assert shown == "amqps://h:1/v"


def test_shovels_of_the_tree() -> None:
    machine = MetadataMachine()
    machine.carry_out(PutVhost(name="v"), 1)
    view = ShovelView(machine)
    machine.carry_out(set_shovel("v", "s\0x", GOOD), 1)
    machine.carry_out(set_shovel("gone", "s", GOOD), 1)
    machine.carry_out(PutSetting(name="shovelling", value="1"), 1)
    (found,) = view.all()
    assert (found.vhost, found.name, found.definition) == ("v", "s\0x", GOOD)
    assert view.find("v", "s\0x") == found
    # Set again, it is another one: it begins anew.
    machine.carry_out(set_shovel("v", "s\0x", GOOD), 1)
    assert view.all() != [found]
    machine.carry_out(clear_shovel(found), 1)
    assert view.all() == []


@pytest.mark.parametrize("name", ["", "x" * 256])
def test_names_have_a_length(name: str) -> None:
    with pytest.raises(ValidationFailed):
        set_shovel("/", name, GOOD)
