"""Users and their rules, as RocketMQ has them since 5.3: who a request is from, and whether that
user may send it.

| step | refused (code 16) |
|---|---|
| user | unknown, disabled, or another signature |
| super user | nothing |
| rule | the most specific rule that matches resource, action and address refuses, or none matches |

A name is more specific than a prefix, a longer prefix than a shorter one, one kind than all. Rules
of type Default count where none of type Custom matches.

`RULES` says what a request needs. What is not there needs a user and no rule. RocketMQ lets each
user change the configuration of a broker, topics in lists and groups; here that needs
`Cluster:NAME`.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import msgspec

from convoymq.model.errors import SyntaxFault
from convoymq.rocketmq.broker.acl import Accounts, subscribed
from convoymq.rocketmq.broker.config_files import ConfigFile
from convoymq.rocketmq.broker.names import RETRY_PREFIX, group_of_retry
from convoymq.rocketmq.broker.settings import BrokerSettings
from convoymq.rocketmq.broker.values import enter_deletion, next_version
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal
from convoymq.rocketmq.remoting.signing import Signer, signature
from convoymq.rocketmq.remoting.values import DataVersion

SUPER, NORMAL = "Super", "Normal"
ENABLE, DISABLE = "enable", "disable"
CUSTOM, DEFAULT = "Custom", "Default"
ALLOW, DENY = "Allow", "Deny"
ALL = "All"
TOPIC, GROUP, CLUSTER = "Topic", "Group", "Cluster"
KINDS = ("Any", CLUSTER, "Namespace", TOPIC, GROUP)
ACTIONS = (ALL, "Pub", "Sub", "Create", "Update", "Delete", "Get", "List")
USERS_MAX = 10_000
RULES_OF_USER_MAX = 10_000

_PUB, _SUB = frozenset(("Pub",)), frozenset(("Sub",))
_GET, _UPDATE = frozenset(("Get",)), frozenset(("Update",))
_T, _G = (TOPIC, "topic"), (GROUP, "consumerGroup")
Needed = tuple[frozenset[str], tuple[tuple[str, str], ...]]
RULES: dict[int, Needed] = {
    **dict.fromkeys((Request.SEND_MESSAGE, Request.SEND_REPLY_MESSAGE, Request.END_TRANSACTION,
                     Request.RECALL_MESSAGE), (_PUB, (_T,))),
    **dict.fromkeys((Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE,
                     Request.SEND_REPLY_MESSAGE_V2), (_PUB, ((TOPIC, "b"),))),
    **dict.fromkeys((Request.PULL_MESSAGE, Request.LITE_PULL_MESSAGE, Request.POP_MESSAGE,
                     Request.ACK_MESSAGE, Request.PEEK_MESSAGE, Request.NOTIFICATION,
                     Request.CHANGE_MESSAGE_INVISIBLETIME, Request.CONSUME_MESSAGE_DIRECTLY),
                    (_SUB, (_T, _G))),
    Request.CONSUMER_SEND_MSG_BACK: (_SUB, ((GROUP, "group"),)),
    Request.UNREGISTER_CLIENT: (_PUB | _SUB, (_G,)),
    Request.GET_CONSUMER_LIST_BY_GROUP: (_SUB | _GET, (_G,)),
    Request.QUERY_MESSAGE: (_SUB | _GET, (_T,)),
    Request.QUERY_CONSUMER_OFFSET: (_SUB | _GET, (_T, _G)),
    Request.UPDATE_CONSUMER_OFFSET: (_SUB | _UPDATE, (_T, _G)),
    **dict.fromkeys((Request.SEARCH_OFFSET_BY_TIMESTAMP, Request.GET_MAX_OFFSET,
                     Request.GET_MIN_OFFSET, Request.GET_EARLIEST_MSG_STORETIME,
                     Request.VIEW_MESSAGE_BY_ID, Request.GET_TOPIC_STATS_INFO,
                     Request.QUERY_TOPIC_CONSUME_BY_WHO, Request.GET_TOPIC_CONFIG),
                    (_GET, (_T,))),
    **dict.fromkeys((Request.GET_CONSUMER_CONNECTION_LIST, Request.GET_CONSUMER_RUNNING_INFO),
                    (_GET, (_G,))),
    **dict.fromkeys((Request.QUERY_TOPICS_BY_CONSUMER, Request.GET_SUBSCRIPTIONGROUP_CONFIG),
                    (_GET, ((GROUP, "group"),))),
    **dict.fromkeys((Request.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, Request.QUERY_CONSUME_TIME_SPAN,
                     Request.QUERY_SUBSCRIPTION_BY_CONSUMER), (_GET, (_T, (GROUP, "group")))),
    **dict.fromkeys((Request.GET_CONSUME_STATS, Request.QUERY_CONSUME_QUEUE, Request.POLLING_INFO),
                    (_GET, (_T, _G))),
    Request.QUERY_CORRECTION_OFFSET: (_GET, (_T, (GROUP, "compareGroup"))),
    Request.UPDATE_AND_CREATE_TOPIC: (frozenset(("Create",)), (_T,)),
    Request.DELETE_TOPIC_IN_BROKER: (frozenset(("Delete",)), (_T,)),
    Request.DELETE_SUBSCRIPTIONGROUP: (frozenset(("Delete",)), ((GROUP, "groupName"),)),
    **dict.fromkeys((Request.INVOKE_BROKER_TO_RESET_OFFSET, Request.UPDATE_AND_GET_GROUP_FORBIDDEN),
                    (_UPDATE, (_T, (GROUP, "group")))),
    Request.CLONE_GROUP_OFFSET: (_UPDATE, (_T, (GROUP, "destGroup"))),
    **dict.fromkeys((Request.GET_BROKER_CONFIG, Request.VIEW_BROKER_STATS_DATA,
                     Request.GET_BROKER_CONSUME_STATS, Request.GET_ALL_PRODUCER_INFO,
                     Request.GET_PRODUCER_CONNECTION_LIST, Request.AUTH_GET_USER,
                     Request.AUTH_LIST_USER, Request.AUTH_GET_ACL, Request.AUTH_LIST_ACL,
                     Request.GET_USERS, Request.GET_BROKER_HA_STATUS),
                    (_GET, ((CLUSTER, ""),))),
    **dict.fromkeys((Request.UPDATE_BROKER_CONFIG, Request.UPDATE_AND_CREATE_TOPIC_LIST,
                     Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
                     Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
                     Request.CLEAN_UNUSED_TOPIC, Request.CLEAN_EXPIRED_CONSUMEQUEUE,
                     Request.DELETE_EXPIRED_COMMITLOG, Request.SET_MESSAGE_REQUEST_MODE,
                     Request.NOTIFY_MIN_BROKER_ID_CHANGE, Request.EXCHANGE_BROKER_HA_INFO,
                     Request.COMPARE_LOGS, Request.FETCH_LOG, Request.HAND_OVER_SERVICES,
                     Request.TAKE_TABLES,
                     Request.AUTH_CREATE_USER, Request.AUTH_UPDATE_USER, Request.AUTH_DELETE_USER,
                     Request.AUTH_CREATE_ACL, Request.AUTH_UPDATE_ACL, Request.AUTH_DELETE_ACL),
                    (_UPDATE, ((CLUSTER, ""),))),
}  # fmt: skip
"""Needs of requests: one of the actions, for the resources that its fields name."""
MAY_NAME_NOTHING = frozenset((Request.UNREGISTER_CLIENT,))
"""A producer that leaves names no group."""


class User(msgspec.Struct, rename="camel"):
    """A user. In a request to change one, None is what stays."""

    username: str = ""
    password: str | None = None
    user_type: str | None = None
    user_status: str | None = None


class Entry(msgspec.Struct, rename="camel"):
    """A rule: what its resource may be used for, from which addresses."""

    resource: str = ""
    actions: list[str] = msgspec.field(default_factory=list)
    source_ips: list[str] | None = None
    decision: str | None = None


class Policy(msgspec.Struct, rename="camel"):
    """Rules of one type."""

    policy_type: str | None = CUSTOM
    entries: list[Entry] | None = None


class Acl(msgspec.Struct, rename="camel"):
    """All rules of a user, `User:name`."""

    subject: str = ""
    policies: list[Policy] | None = None


class UserTable(msgspec.Struct, rename="camel"):
    """The file, and what replicas send each other. `deleted`: user -> ms, `deleted_policies`
    likewise (`enter_deletion`)."""

    users: dict[str, User] = msgspec.field(default_factory=dict)
    policies: dict[str, list[Policy]] = msgspec.field(default_factory=dict)
    data_version: DataVersion = DataVersion()
    deleted: dict[str, int] = msgspec.field(default_factory=dict)
    deleted_policies: dict[str, int] = msgspec.field(default_factory=dict)


class _InnerAccount(msgspec.Struct, rename="camel"):
    access_key: str
    secret_key: str


def refused(remark: str) -> Refusal:
    """Returns the refusal of a request by a user or a rule."""
    return Refusal(Answer.NO_PERMISSION, remark)


class Users:
    """The users of a broker. A change is in the file when its method returns."""

    def __init__(
        self, settings: Callable[[], BrokerSettings], file: ConfigFile, now_ms: Callable[[], int]
    ) -> None:
        self._settings = settings
        self._file = file
        self._now_ms = now_ms
        found = file.read(UserTable) or UserTable()
        self.table = found.users
        self.policies = found.policies
        self.version: DataVersion = found.data_version
        self.deleted = found.deleted
        self.deleted_policies = found.deleted_policies

    def begin(self) -> Signer | None:
        """Makes the users that the settings name, and returns the signer of requests to other
        brokers. Raises SyntaxFault, StorageFault."""
        settings = self._settings()
        signer = None
        first: list[User] = []
        if settings.first_user:
            first.append(json.loads(settings.first_user.encode(), User))
        if settings.inner_account:
            inner = json.loads(settings.inner_account.encode(), _InnerAccount)
            first.append(User(inner.access_key, inner.secret_key))
            signer = Signer(inner.access_key, inner.secret_key)
        for user in first:
            if not user.username or not user.password:
                raise SyntaxFault("initAuthenticationUser: needs username and password")
            if user.username not in self.table:
                self.put(User(user.username, user.password, SUPER, ENABLE))
        return signer

    # --- changes -------------------------------------------------------------------------------

    def put(self, user: User) -> None:
        """Makes or changes a user."""
        self._change(self.table | {user.username: user}, self.policies)

    def put_policies(self, name: str, policies: list[Policy]) -> None:
        """Gives a user other rules; none: it has none any more."""
        others = {each: found for each, found in self.policies.items() if each != name}
        if not policies:
            enter_deletion(self.deleted_policies, name, self._now_ms())
        self._change(self.table, others | {name: policies} if policies else others)

    def delete(self, name: str) -> None:
        """Removes a user and its rules."""
        if name in self.table:
            others = {each: user for each, user in self.table.items() if each != name}
            policies = {each: found for each, found in self.policies.items() if each != name}
            for deleted in (self.deleted, self.deleted_policies):
                enter_deletion(deleted, name, self._now_ms())
            self._change(others, policies)

    def _change(self, users: dict[str, User], policies: dict[str, list[Policy]]) -> None:
        version = next_version(self.version, self._now_ms())
        self.replace(UserTable(users, policies, version, self.deleted, self.deleted_policies))

    def replace(self, table: UserTable) -> None:
        """Takes a whole table over. Raises StorageFault."""
        self._file.write(table)
        self.table, self.policies = table.users, table.policies
        self.version = table.data_version
        self.deleted, self.deleted_policies = table.deleted, table.deleted_policies

    def content(self) -> UserTable:
        """Returns all users and rules, with their version."""
        return UserTable(
            self.table, self.policies, self.version, self.deleted, self.deleted_policies
        )

    # --- requests ------------------------------------------------------------------------------

    def is_super(self, command: Command) -> bool:
        """Returns whether a request is from a super user, or from nobody where users are not looked
        at."""
        name = command.fields.get("AccessKey")
        user = self.table.get(name) if name else None
        return not name or (user is not None and user.user_type == SUPER)

    def check(self, address: str, command: Command, accounts: Accounts | None) -> None:
        """Raises Refusal, AccessRefused for a request that its sender may not make. Where there are
        `accounts` as well, they judge who is no user."""
        settings = self._settings()
        name = command.fields.get("AccessKey")
        if accounts is not None and not (settings.authentication and name in self.table):
            accounts.check(address, command)
            return
        if not settings.authentication or str(command.code) in settings.open_requests.split(","):
            return
        if not name:
            raise refused("username cannot be null.")
        user = self.table.get(name)
        if user is None:
            raise refused(f"User:{name:.64} is not found.")
        if user.user_status == DISABLE:
            raise refused(f"User:{name} is disabled.")
        right = signature(command, (user.password or "").encode())
        if not hmac.compare_digest(command.fields.get("Signature", "").encode(), right.encode()):
            raise refused("check signature failed.")
        if (
            not settings.authorization
            or user.user_type == SUPER
            or str(command.code) in settings.free_requests.split(",")
        ):
            return
        for actions, kind, resource in needs(command, settings.cluster):
            why = self._judge(name, actions, f"{kind}:{resource}", address)
            if why:
                raise refused(
                    f"User:{name} has no permission to access {kind}:{resource:.256} from "
                    f"{address}, {why}"
                )

    def _judge(self, name: str, actions: frozenset[str], resource: str, address: str) -> str:
        """Returns why a user may not do one of the actions; "" = it may."""
        policies = {policy.policy_type: policy for policy in self.policies.get(name, ())}
        for kind in (CUSTOM, DEFAULT):
            found = [
                entry
                for entry in (policies[kind].entries or () if kind in policies else ())
                if matches(entry.resource, resource)
                and (ALL in entry.actions or not actions.isdisjoint(entry.actions))
                and is_from(address, entry.source_ips)
            ]
            if found:
                best = min(found, key=_rank)
                return "" if best.decision == ALLOW else "the decision is deny."
        return "no matched policies."


def needs(command: Command, cluster: str) -> Iterator[tuple[frozenset[str], str, str]]:
    """Yields what a request asks a permission for: actions, kind, name. Raises Refusal."""
    if command.code == Request.HEART_BEAT:
        for kind, name in subscribed(command):
            yield _SUB, TOPIC if kind == "topic" else GROUP, name
        return
    actions, fields = RULES.get(command.code, (frozenset(), ()))
    named = False
    for kind, field in fields:
        name = cluster if kind == CLUSTER else command.fields.get(field, "")
        if not name:
            continue
        named = True
        if kind == TOPIC and name.startswith(RETRY_PREFIX):
            # The right to consume as a group is that to send its messages back.
            kind, name, chosen = GROUP, group_of_retry(name), actions | _SUB
        else:
            chosen = actions
        yield chosen, kind, name
    if fields and not named and command.code not in MAY_NAME_NOTHING:
        raise refused(f"request {command.code} names no {' or '.join(k for k, _ in fields)}")


def matches(pattern: str, resource: str) -> bool:
    """Returns whether a rule's resource (`*`, `Topic:*`, `Topic:a*`, `Topic:a`) names one."""
    if pattern == "*":
        return True
    kind, _, name = pattern.partition(":")
    wanted, _, given = resource.partition(":")
    if kind != wanted:
        return False
    return given.startswith(name[:-1]) if name.endswith("*") else given == name


def _rank(entry: Entry) -> tuple[bool, bool, int, bool]:
    """Orders rules for one resource: the most specific first; a refusal before a permission."""
    pattern = entry.resource
    return pattern == "*", pattern.endswith("*"), -len(pattern), entry.decision != DENY


@lru_cache(1024)
def network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Returns the addresses that a text names. Raises ValueError."""
    return ipaddress.ip_network(text.strip(), strict=False)


def is_from(address: str, sources: Iterable[str] | None) -> bool:
    """Returns whether an address is one of the sources; no sources: any address."""
    if not sources:
        return True
    try:
        given = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(given in network(source) for source in sources)
