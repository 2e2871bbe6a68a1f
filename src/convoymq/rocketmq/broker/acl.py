"""Accounts and their permissions (RocketMQ's `plain_acl.yml`), and signatures of requests.

A signature is the HMAC-SHA1, in base64, of the values of all fields but itself in the order of
their names, and of the body. Addresses of the white lists need none.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from convoymq.model.errors import AccessRefused, SyntaxFault
from convoymq.rocketmq.broker.names import RETRY_PREFIX, group_of_retry
from convoymq.rocketmq.broker.values import HeartbeatData
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Request
from convoymq.rocketmq.remoting.command import Command
from convoymq.rocketmq.remoting.signing import Signer, signature

PUB, SUB = "PUB", "SUB"
_PERMISSIONS = {"DENY": "", PUB: PUB, SUB: SUB, "PUB|SUB": PUB + SUB, "SUB|PUB": PUB + SUB}
ADMIN_CODES = frozenset((
    Request.UPDATE_AND_CREATE_TOPIC, Request.UPDATE_AND_CREATE_TOPIC_LIST,
    Request.UPDATE_BROKER_CONFIG, Request.DELETE_TOPIC_IN_BROKER,
    Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, Request.DELETE_SUBSCRIPTIONGROUP,
    Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, Request.CLEAN_UNUSED_TOPIC,
    Request.UPDATE_AND_GET_GROUP_FORBIDDEN, Request.INVOKE_BROKER_TO_RESET_OFFSET,
    Request.CLONE_GROUP_OFFSET, Request.SET_MESSAGE_REQUEST_MODE,
    Request.AUTH_CREATE_USER, Request.AUTH_UPDATE_USER, Request.AUTH_DELETE_USER,
    Request.AUTH_GET_USER, Request.AUTH_LIST_USER, Request.AUTH_CREATE_ACL,
    Request.AUTH_UPDATE_ACL, Request.AUTH_DELETE_ACL, Request.AUTH_GET_ACL,
    Request.AUTH_LIST_ACL, Request.GET_USERS, Request.COMPARE_LOGS, Request.FETCH_LOG,
    Request.HAND_OVER_SERVICES, Request.TAKE_TABLES,
))  # fmt: skip
_TOPIC_FIELDS: dict[int, tuple[str, str]] = {
    Request.SEND_MESSAGE: ("topic", PUB), Request.SEND_MESSAGE_V2: ("b", PUB),
    Request.SEND_BATCH_MESSAGE: ("b", PUB), Request.SEND_REPLY_MESSAGE: ("topic", PUB),
    Request.SEND_REPLY_MESSAGE_V2: ("b", PUB), Request.PULL_MESSAGE: ("topic", SUB),
    Request.LITE_PULL_MESSAGE: ("topic", SUB), Request.QUERY_MESSAGE: ("topic", SUB),
    Request.UPDATE_CONSUMER_OFFSET: ("topic", SUB), Request.POP_MESSAGE: ("topic", SUB),
}  # fmt: skip
_GROUP_FIELDS: dict[int, str] = {
    Request.PULL_MESSAGE: "consumerGroup", Request.LITE_PULL_MESSAGE: "consumerGroup",
    Request.UPDATE_CONSUMER_OFFSET: "consumerGroup", Request.UNREGISTER_CLIENT: "consumerGroup",
    Request.GET_CONSUMER_LIST_BY_GROUP: "consumerGroup", Request.CONSUMER_SEND_MSG_BACK: "group",
    Request.POP_MESSAGE: "consumerGroup",
}  # fmt: skip


class _Account(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    access_key: str
    secret_key: str
    white_remote_address: str = ""
    admin: str = "false"
    default_topic_perm: str = "DENY"
    default_group_perm: str = "DENY"
    topic_perms: list[str] = msgspec.field(default_factory=list)
    group_perms: list[str] = msgspec.field(default_factory=list)


class _File(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    accounts: list[_Account] = msgspec.field(default_factory=list)
    global_white_remote_addresses: list[str] = msgspec.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Account:
    """An account. Permissions: words of PUB and SUB by topic, and by group."""

    secret: bytes = field(repr=False)
    is_admin: bool
    addresses: re.Pattern[str] | None
    topics: Mapping[str, str]
    groups: Mapping[str, str]
    topic_default: str
    group_default: str


def read_signer(text: str) -> Signer:
    """Returns the signer of the account in a `tools.yml`. Raises SyntaxFault."""
    found = read_yaml(text)
    name, secret = found.get("accessKey"), found.get("secretKey")
    if not isinstance(name, str) or not isinstance(secret, str) or not name:
        raise SyntaxFault("tools.yml: needs accessKey and secretKey")
    return Signer(name, secret)


class Accounts:
    """All accounts of a file. Raises SyntaxFault for text that is no such file."""

    def __init__(self, text: str) -> None:
        try:
            found = msgspec.convert(read_yaml(text), _File, strict=False)
        except msgspec.ValidationError as error:
            raise SyntaxFault(f"plain_acl.yml: {error}") from None
        self._white = _addresses(found.global_white_remote_addresses)
        self._accounts = {row.access_key: _account(row) for row in found.accounts}

    def check(self, address: str, command: Command) -> None:
        """Raises AccessRefused for a request that its sender may not make."""
        if self._white is not None and self._white.fullmatch(address):
            return
        name = command.fields.get("AccessKey")
        if not name:
            raise AccessRefused("No accessKey is configured")
        account = self._accounts.get(name)
        if account is None:
            raise AccessRefused(f"No acl config for {name:.64}")
        if account.addresses is not None and account.addresses.fullmatch(address):
            return
        given = command.fields.get("Signature", "")
        if not hmac.compare_digest(given.encode(), signature(command, account.secret).encode()):
            raise AccessRefused(f"Check signature failed for accessKey={name}")
        if account.is_admin:
            return
        if command.code in ADMIN_CODES:
            raise AccessRefused(
                f"Need admin permission for request code={command.code}, but accessKey={name} is "
                "not"
            )
        for kind, resource, needed in _needs(command):
            allowed = (
                account.topics.get(resource, account.topic_default)
                if kind == "topic"
                else account.groups.get(resource, account.group_default)
            )
            if needed not in allowed:
                raise AccessRefused(f"No default permission for {resource:.256}")


def subscribed(command: Command) -> Iterator[tuple[str, str]]:
    """Yields what a heartbeat's consumers read: kind and name of groups and topics."""
    for consumer in json.loads(command.body, HeartbeatData).consumer_data_set:
        yield "group", consumer.group_name
        for wanted in consumer.subscription_data_set:
            if not wanted.topic.startswith(RETRY_PREFIX):
                yield "topic", wanted.topic


def _needs(command: Command) -> Iterator[tuple[str, str, str]]:
    """Yields what a request asks a permission for: kind, name, permission."""
    fields = command.fields
    if command.code == Request.HEART_BEAT:
        for kind, name in subscribed(command):
            yield kind, name, SUB
        return
    group = fields.get(_GROUP_FIELDS.get(command.code, ""))
    if group:
        yield "group", group, SUB
    name, needed = _TOPIC_FIELDS.get(command.code, ("", ""))
    topic = fields.get(name)
    if topic is None:
        return
    if topic.startswith(RETRY_PREFIX):
        # Who may consume as a group may send its messages back.
        yield "group", group_of_retry(topic), SUB
    else:
        yield "topic", topic, needed


def _account(row: _Account) -> Account:
    return Account(
        row.secret_key.encode(),
        row.admin == "true",
        _addresses([row.white_remote_address] if row.white_remote_address else []),
        dict(map(_permission, row.topic_perms)),
        dict(map(_permission, row.group_perms)),
        _permission(f"default={row.default_topic_perm}")[1],
        _permission(f"default={row.default_group_perm}")[1],
    )


def _permission(text: str) -> tuple[str, str]:
    name, _, word = text.partition("=")
    if word.strip() not in _PERMISSIONS:
        raise SyntaxFault(f"plain_acl.yml: {text} ends with none of {', '.join(_PERMISSIONS)}")
    return name.strip(), _PERMISSIONS[word.strip()]


def _addresses(patterns: list[str]) -> re.Pattern[str] | None:
    """Returns what matches addresses: `10.0.*.*`, `10.0.0.{1,2}`."""
    if not patterns:
        return None
    made = []
    for pattern in patterns:
        parts = re.split(r"(\*|\{[^}]*\})", pattern.strip())
        made.append("".join(map(_part, parts)))
    return re.compile("|".join(made))


def _part(text: str) -> str:
    if text == "*":
        return r"[0-9a-fA-F]+"
    if text.startswith("{"):
        return "(?:" + "|".join(re.escape(one.strip()) for one in text[1:-1].split(",")) + ")"
    return re.escape(text)


_LINE = re.compile(r"( *)(- *)?(?:([A-Za-z]+) *:(?: +(.*))?|(.+))")


def read_yaml(text: str) -> dict[str, object]:
    """Reads the part of YAML that the file is written in: names with a text or a list, whose items
    are texts or groups of names. Raises SyntaxFault."""
    top: dict[str, object] = {}
    holder, holder_indent = top, -1
    items: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if not line or line == "---":
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise SyntaxFault(f"plain_acl.yml, line {number}: cannot be read")
        indent, dash, name, value, item = match.groups()
        depth = len(indent) + len(dash or "")
        if name is None:
            if not dash or items is None:
                raise SyntaxFault(f"plain_acl.yml, line {number}: not an item of a list")
            items.append(_plain(item))
            continue
        if dash:
            holder = {}
            holder_indent = depth
            accounts = top.get("accounts")
            if not isinstance(accounts, list):
                raise SyntaxFault(f"plain_acl.yml, line {number}: only accounts have names")
            accounts.append(holder)
        elif depth < holder_indent or depth == 0:
            holder, holder_indent = top, -1
        if value:
            holder[name] = _plain(value)
        else:
            items = []
            holder[name] = items if name.endswith(("Perms", "Addresses", "accounts")) else ""
    return top


def _plain(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
