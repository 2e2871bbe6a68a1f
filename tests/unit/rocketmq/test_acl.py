"""Accounts, permissions and signatures, as RocketMQ's plain_acl.yml has them."""

from __future__ import annotations

import pytest

from convoymq.model.errors import AccessRefused, SyntaxFault
from convoymq.rocketmq.broker.acl import Accounts
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Request
from convoymq.rocketmq.remoting.command import Command, request
from convoymq.rocketmq.remoting.signing import signature

FILE = """
globalWhiteRemoteAddresses:
- 10.10.*.*
- 192.168.0.{1,2}

accounts:
- accessKey: RocketMQ
  secretKey: 12345678   # a comment
  whiteRemoteAddress:
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms:
  - topicA=DENY
  - topicB=PUB|SUB
  - topicC=SUB
  groupPerms:
  # the group should convert to retry topic
  - groupA=DENY
- accessKey: admin
  secretKey: "87654321"
  whiteRemoteAddress: 172.16.0.*
  admin: true
"""
ACCOUNTS = Accounts(FILE)


def signed(code: int, key: str = "RocketMQ", secret: bytes = b"12345678", body: bytes = b"",
           **fields: str) -> Command:  # fmt: skip
    made = request(code, {**fields, "AccessKey": key}, body)
    made.fields["Signature"] = signature(made, secret)
    return made


def test_a_signature_is_that_of_rocketmqs_clients() -> None:
    """The example of its own tests."""
    made = request(1, {"a": "Rocket"}, b"MQ")
    assert signature(made, b"12345678") == "IUc8rrO/0gDch8CjObLQsW2rsiA="


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (signed(Request.SEND_MESSAGE_V2, b="topicB"), ""),
        (signed(Request.SEND_MESSAGE_V2, b="topicC"), "No default permission for topicC"),
        (signed(Request.SEND_MESSAGE, topic="topicA"), "No default permission for topicA"),
        (signed(Request.SEND_MESSAGE, topic="other"), "No default permission for other"),
        (signed(Request.SEND_MESSAGE, topic="%RETRY%groupB"), ""),
        (signed(Request.PULL_MESSAGE, topic="topicC", consumerGroup="g"), ""),
        (
            signed(Request.PULL_MESSAGE, topic="topicC", consumerGroup="groupA"),
            "No default permission for groupA",
        ),
        (signed(Request.UPDATE_AND_CREATE_TOPIC), "Need admin permission for request code=17"),
        (signed(Request.UPDATE_AND_CREATE_TOPIC, "admin", b"87654321"), ""),
        (signed(Request.GET_MAX_OFFSET, topic="topicA"), ""),
        (signed(Request.GET_MAX_OFFSET, "nobody"), "No acl config for nobody"),
        (signed(Request.GET_MAX_OFFSET, secret=b"wrong"), "Check signature failed for accessKey"),
        (request(Request.GET_MAX_OFFSET), "No accessKey is configured"),
    ],
)
def test_permissions(command: Command, problem: str) -> None:
    if not problem:
        ACCOUNTS.check("127.0.0.1", command)
        return
    with pytest.raises(AccessRefused) as refused:
        ACCOUNTS.check("127.0.0.1", command)
    assert refused.value.text.startswith(problem)


def test_a_heartbeat_names_groups_and_topics() -> None:
    def beat(group: str, topic: str) -> Command:
        consumer = {"groupName": group, "subscriptionDataSet": [{"topic": topic}]}
        body = json.dumps({"clientID": "c", "consumerDataSet": [consumer]})
        return signed(Request.HEART_BEAT, body=body)

    ACCOUNTS.check("127.0.0.1", beat("g", "topicC"))
    for group, topic in (("groupA", "topicC"), ("g", "topicA")):
        with pytest.raises(AccessRefused):
            ACCOUNTS.check("127.0.0.1", beat(group, topic))


@pytest.mark.parametrize("address", ["10.10.1.2", "192.168.0.2"])
def test_addresses_of_the_white_list_need_no_account(address: str) -> None:
    ACCOUNTS.check(address, request(Request.UPDATE_AND_CREATE_TOPIC))


def test_an_account_has_addresses_of_its_own() -> None:
    command = request(Request.UPDATE_AND_CREATE_TOPIC, {"AccessKey": "admin"})
    ACCOUNTS.check("172.16.0.9", command)
    for address in ("192.168.0.3", "10.11.1.1", "172.16.1.1"):
        with pytest.raises(AccessRefused):
            ACCOUNTS.check(address, command)


@pytest.mark.parametrize(
    "text",
    [
        "accounts:\n- accessKey: a", "accounts:\n- accessKey: a\n  secretKey: b\n  odd: c",
        "- x", "a: {", "accounts:\n- accessKey: a\n  secretKey: b\n  defaultTopicPerm: ALL",
        "other:\n- accessKey: a",
    ],
)  # fmt: skip
def test_files_that_are_refused(text: str) -> None:
    with pytest.raises(SyntaxFault):
        Accounts(text)
