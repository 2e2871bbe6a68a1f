"""Users of requests and the rules that let them, as RocketMQ 5.3 has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from convoymq.model.errors import SyntaxFault
from convoymq.rocketmq.broker.acl import Accounts
from convoymq.rocketmq.broker.config_files import ConfigFile
from convoymq.rocketmq.broker.settings import BrokerSettings
from convoymq.rocketmq.broker.users import Entry, Policy, User, Users, is_from, matches
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal, request
from convoymq.rocketmq.remoting.signing import signature
from convoymq.storage.files import RealDirectory

STRICT = BrokerSettings(authentication=True, authorization=True, cluster="c")
Make = Callable[..., Users]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def one(settings: BrokerSettings = STRICT) -> Users:
        made = Users(lambda: settings, ConfigFile(RealDirectory(tmp_path), "users.json"), lambda: 1)
        made.begin()
        return made

    return one


def signed(
    code: int, name: str = "alice", secret: str = "word", body: bytes = b"", **fields: str
) -> Command:
    made = request(code, {**fields, "AccessKey": name}, body)
    made.fields["Signature"] = signature(made, secret.encode())
    return made


def rule(resource: str, *actions: str, decision: str = "Allow", **more: list[str]) -> Entry:
    return Entry(resource, list(actions), decision=decision, **more)


def why(users: Users, command: Command, address: str = "10.0.0.9") -> str:
    """The remark of the refusal; "" = there is none."""
    try:
        users.check(address, command, None)
    except Refusal as refusal:
        return refusal.text if refusal.code == Answer.NO_PERMISSION else f"code {refusal.code}"
    return ""


def with_rules(make: Make, *entries: Entry, kind: str = "Custom") -> Users:
    users = make()
    users.put(User("alice", "word", "Normal", "enable"))
    users.put_policies("alice", [Policy(kind, list(entries))])
    return users


def test_a_request_needs_a_user_that_is_enabled_and_its_signature(make: Make) -> None:
    users = make()
    send = {"b": "t"}
    unsigned = request(Request.SEND_MESSAGE_V2, dict(send))
    assert why(users, unsigned) == "username cannot be null."
    assert why(users, signed(Request.SEND_MESSAGE_V2, **send)) == "User:alice is not found."
    users.put(User("alice", "word", "Super", "disable"))
    assert why(users, signed(Request.SEND_MESSAGE_V2, **send)) == "User:alice is disabled."
    users.put(User("alice", "word", "Super", "enable"))
    assert why(users, signed(Request.SEND_MESSAGE_V2, secret="other", **send)) == (
        "check signature failed."
    )
    assert why(users, signed(Request.SEND_MESSAGE_V2, **send)) == ""
    open_to_all = make(replace(STRICT, open_requests="310,34"))
    assert why(open_to_all, unsigned) == ""
    assert why(make(BrokerSettings()), unsigned) == ""


@pytest.mark.parametrize(
    ("entries", "allowed"),
    [
        ([rule("Topic:t", "Pub")], True),
        ([rule("Topic:t", "Sub")], False),
        ([rule("Topic:t", "All")], True),
        ([rule("Group:t", "All")], False),
        ([rule("Topic:u", "Pub")], False),
        ([rule("*", "Pub")], True),
        ([rule("Topic:*", "Pub"), rule("Topic:t", "Pub", decision="Deny")], False),
        ([rule("*", "Pub", decision="Deny"), rule("Topic:t*", "Pub")], True),
        ([rule("Topic:t*", "Pub", decision="Deny"), rule("Topic:t", "Pub")], True),
        ([rule("Topic:to*", "Pub"), rule("Topic:t*", "Pub", decision="Deny")], False),
        ([rule("Topic:t", "Pub", source_ips=["10.0.0.0/8"])], True),
        ([rule("Topic:t", "Pub", source_ips=["10.0.0.1", "192.168.0.0/16"])], False),
    ],
)  # fmt: skip
def test_the_most_specific_rule_decides(make: Make, entries: list[Entry], allowed: bool) -> None:
    found = why(with_rules(make, *entries), signed(Request.SEND_MESSAGE_V2, b="t"))
    assert (found == "") == allowed
    if found:
        assert found.startswith("User:alice has no permission to access Topic:t from 10.0.0.9, ")


def test_rules_of_type_default_count_where_no_other_matches(make: Make) -> None:
    users = with_rules(make, rule("Topic:*", "Pub"), kind="Default")
    send = signed(Request.SEND_MESSAGE_V2, b="t")
    assert why(users, send) == ""
    refusing = [Policy("Custom", [rule("Topic:t", "Pub", decision="Deny")])]
    users.put_policies("alice", users.policies["alice"] + refusing)
    assert "the decision is deny" in why(users, send)
    assert why(users, signed(Request.SEND_MESSAGE_V2, b="u")) == ""


@pytest.mark.parametrize(
    ("command", "entries"),
    [
        (signed(Request.PULL_MESSAGE, topic="t", consumerGroup="g"), ("Topic:t", "Group:g")),
        (signed(Request.PULL_MESSAGE, topic="%RETRY%g", consumerGroup="g"), ("Group:g",)),
        (signed(Request.SEND_MESSAGE_V2, b="%RETRY%g"), ("Group:g",)),
        (signed(Request.UPDATE_CONSUMER_OFFSET, topic="t", consumerGroup="g"),
         ("Topic:t", "Group:g")),
        (signed(Request.HEART_BEAT, body=json.dumps({"clientID": "x", "consumerDataSet": [
            {"groupName": "g", "subscriptionDataSet": [{"topic": "t"}, {"topic": "%RETRY%g"}]}]})),
         ("Topic:t", "Group:g")),
    ],
)  # fmt: skip
def test_a_consumer_needs_its_topics_and_its_group(
    make: Make, command: Command, entries: tuple[str, ...]
) -> None:
    for missing in entries:
        kept = [rule(each, "Sub") for each in entries if each != missing]
        assert missing in why(with_rules(make, *kept, rule("Group:other", "Sub")), command)
    assert why(with_rules(make, *(rule(each, "Sub") for each in entries)), command) == ""


@pytest.mark.parametrize(
    "code",
    [
        Request.UPDATE_BROKER_CONFIG, Request.AUTH_CREATE_USER, Request.AUTH_DELETE_ACL,
        Request.FETCH_LOG, Request.GET_USERS, Request.AUTH_LIST_USER, Request.GET_BROKER_CONFIG,
        Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    ],
)  # fmt: skip
def test_administration_needs_the_cluster(make: Make, code: int) -> None:
    command = signed(code)
    assert "access Cluster:c from" in why(with_rules(make, rule("Topic:*", "All")), command)
    assert why(with_rules(make, rule("Cluster:c", "Get", "Update")), command) == ""


def test_a_request_that_names_nothing_is_refused(make: Make) -> None:
    users = with_rules(make, rule("*", "All"))
    assert why(users, signed(Request.END_TRANSACTION)) == "request 37 names no Topic"
    assert why(users, signed(Request.UNREGISTER_CLIENT, producerGroup="p")) == ""


def test_accounts_of_plain_acl_judge_who_is_no_user(make: Make) -> None:
    accounts = Accounts("accounts:\n- accessKey: old\n  secretKey: key\n  admin: true\n")
    users = with_rules(make, rule("Topic:t", "Pub"))
    users.check("10.0.0.9", signed(Request.UPDATE_BROKER_CONFIG, "old", "key"), accounts)
    users.check("10.0.0.9", signed(Request.SEND_MESSAGE_V2, b="t"), accounts)
    with pytest.raises(Refusal, match="Cluster:c"):
        users.check("10.0.0.9", signed(Request.UPDATE_BROKER_CONFIG), accounts)


def test_users_of_the_settings_are_made_once_and_stay(make: Make) -> None:
    first = replace(STRICT, first_user='{"username":"root","password":"p"}',
                    inner_account='{"accessKey":"inner","secretKey":"q"}')  # fmt: skip
    users = make(first)
    assert {name: user.user_type for name, user in users.table.items()} == {
        "root": "Super", "inner": "Super",
    }  # fmt: skip
    users.put(User("root", "changed", "Super", "enable"))
    assert make(first).table["root"].password == "changed"
    with pytest.raises(SyntaxFault):
        make(replace(STRICT, first_user='{"username":"empty"}'))
    with pytest.raises(ValueError, match="needs authenticationEnabled"):
        BrokerSettings(authorization=True).check()


def test_resources_and_addresses() -> None:
    assert matches("Topic:*", "Topic:a")
    assert not matches("Topic:*", "Group:a")
    assert is_from("::1", ["::/64"])
    assert not is_from("::1", ["10.0.0.0/8"])
    assert not is_from("unknown", ["0.0.0.0/0"])
