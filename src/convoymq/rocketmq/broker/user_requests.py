"""Requests about users and rules: 3001 to 3010, and the table that slaves copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import structlog

from convoymq.rocketmq.broker import users
from convoymq.rocketmq.broker.users import Acl, Entry, Policy, User, refused
from convoymq.rocketmq.remoting import json
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, Refusal
from convoymq.rocketmq.remoting.connection import Connection, Handler

if TYPE_CHECKING:
    from convoymq.rocketmq.broker.service import Broker

log = structlog.get_logger()

USER_PREFIX = "User:"


class UserRequests:
    """See the module text."""

    def __init__(self, parts: Broker) -> None:
        self._users = parts.users
        handlers: dict[int, Handler] = {
            Request.AUTH_CREATE_USER: self._create_user,
            Request.AUTH_UPDATE_USER: self._update_user,
            Request.AUTH_DELETE_USER: self._delete_user,
            Request.AUTH_GET_USER: self._get_user,
            Request.AUTH_LIST_USER: self._list_users,
            Request.AUTH_CREATE_ACL: self._put_acl,
            Request.AUTH_UPDATE_ACL: self._put_acl,
            Request.AUTH_DELETE_ACL: self._delete_acl,
            Request.AUTH_GET_ACL: self._get_acl,
            Request.AUTH_LIST_ACL: self._list_acls,
            Request.GET_USERS: self._table,
        }
        for code, handler in handlers.items():
            parts.register(code, handler)

    # --- users -----------------------------------------------------------------------------

    def _create_user(self, connection: Connection, command: Command) -> Command:
        user = _user_of(command)
        self._look_at_super(command, user, "create")
        if not user.password:
            raise refused("password can not be blank")
        made = User(user.username, user.password, user.user_type or users.NORMAL,
                    user.user_status or users.ENABLE)  # fmt: skip
        known = self._users.table.get(user.username)
        # `mqadmin -c` sends it to a master and its slaves, which may have copied it by then.
        if known is not None and known != made:
            raise refused("The user is existed")
        if known is None:
            if len(self._users.table) >= users.USERS_MAX:
                raise refused(f"there are {users.USERS_MAX} users")
            self._users.put(made)
            self._note(connection, command, user.username)
        return command.answer()

    def _update_user(self, connection: Connection, command: Command) -> Command:
        user = _user_of(command)
        self._look_at_super(command, user, "update")
        known = self._known(user.username)
        self._look_at_super(command, known, "update")
        self._users.put(
            User(user.username, user.password or known.password,
                 user.user_type or known.user_type, user.user_status or known.user_status)
        )  # fmt: skip
        self._note(connection, command, user.username)
        return command.answer()

    def _delete_user(self, connection: Connection, command: Command) -> Command:
        name = _name_of(command)
        known = self._users.table.get(name)
        if known is not None:
            self._look_at_super(command, known, "update")
            self._users.delete(name)
            self._note(connection, command, name)
        return command.answer()

    def _get_user(self, _connection: Connection, command: Command) -> Command:
        found = self._users.table.get(_name_of(command))
        return command.answer(body=b"" if found is None else json.dumps(found))

    def _list_users(self, _connection: Connection, command: Command) -> Command:
        part = command.fields.get("filter") or ""
        found = [user for name, user in sorted(self._users.table.items()) if part in name]
        return command.answer(body=json.dumps(found) if found else b"")

    def _known(self, name: str) -> User:
        found = self._users.table.get(name)
        if found is None:
            raise refused("The user is not exist")
        return found

    def _look_at_super(self, command: Command, user: User, verb: str) -> None:
        if user.user_type == users.SUPER and not self._users.is_super(command):
            raise Refusal(Answer.SYSTEM_ERROR, f"The super user can only be {verb} by super user")

    def _note(self, connection: Connection, command: Command, name: str) -> None:
        log.info("rocketmq.user_changed", user=name, request=int(command.code),
                 by=command.fields.get("AccessKey", ""), peer=connection.name)  # fmt: skip

    # --- rules -----------------------------------------------------------------------------

    def _subject(self, command: Command) -> str:
        kind, colon, name = command.needed("subject").partition(":")
        if not colon or kind.lower() != "user" or not name:
            raise refused("The subject type is null.")
        if name not in self._users.table:
            raise refused(f"The subject of {USER_PREFIX}{name} is not exist.")
        return name

    def _put_acl(self, connection: Connection, command: Command) -> Command:
        name = self._subject(command)
        acl = json.loads(command.body, Acl) if command.body else Acl()
        if not acl.policies:
            raise refused("The body of acl is null")
        known = {policy.policy_type: policy for policy in self._users.policies.get(name, ())}
        for policy in map(_valid_policy, acl.policies):
            before = known.get(policy.policy_type)
            entries = {entry.resource: entry for entry in (before.entries or () if before else ())}
            entries |= {entry.resource: entry for entry in policy.entries or ()}
            if len(entries) > users.RULES_OF_USER_MAX:
                raise refused(f"there are {users.RULES_OF_USER_MAX} rules")
            known[policy.policy_type] = Policy(policy.policy_type, list(entries.values()))
        self._users.put_policies(name, list(known.values()))
        self._note(connection, command, name)
        return command.answer()

    def _delete_acl(self, connection: Connection, command: Command) -> Command:
        name = self._subject(command)
        if name not in self._users.policies:
            raise refused("The acl is not exist.")
        resource = command.fields.get("resource")
        kept: list[Policy] = []
        if resource:
            wanted = _resource(resource)
            kind = _named(command.fields.get("policyType") or users.CUSTOM,
                          (users.CUSTOM, users.DEFAULT), "policy type")  # fmt: skip
            for policy in self._users.policies[name]:
                entries = [
                    entry for entry in policy.entries or ()
                    if policy.policy_type != kind or entry.resource != wanted
                ]  # fmt: skip
                kept += [Policy(policy.policy_type, entries)] if entries else []
        self._users.put_policies(name, kept)
        self._note(connection, command, name)
        return command.answer()

    def _get_acl(self, _connection: Connection, command: Command) -> Command:
        name = self._subject(command)
        found = self._users.policies.get(name)
        acl = Acl(USER_PREFIX + name, found)
        return command.answer(body=json.dumps(acl) if found else b"")

    def _list_acls(self, _connection: Connection, command: Command) -> Command:
        subjects = command.fields.get("subjectFilter") or ""
        resources = command.fields.get("resourceFilter") or ""
        found = []
        for name, policies in sorted(self._users.policies.items()):
            subject = USER_PREFIX + name
            if subjects not in subject:
                continue
            shown = [
                Policy(policy.policy_type, entries)
                for policy in policies
                if (entries := [e for e in policy.entries or () if resources in e.resource])
            ]
            if shown:
                found.append(Acl(subject, shown))
        return command.answer(body=json.dumps(found) if found else b"")

    def _table(self, _connection: Connection, command: Command) -> Command:
        return command.answer(body=json.dumps(self._users.content()))


def _name_of(command: Command) -> str:
    name = command.fields.get("username") or ""
    if not name.strip():
        raise Refusal(Answer.INVALID_PARAMETER, "The username is blank")
    return name


def _user_of(command: Command) -> User:
    """Returns the user of a request, its words as they are kept."""
    name = _name_of(command)
    found = json.loads(command.body, User) if command.body else User()
    return User(
        name,
        found.password,
        found.user_type
        and _named(found.user_type, (users.SUPER, users.NORMAL), "user type"),
        found.user_status
        and _named(found.user_status, (users.ENABLE, users.DISABLE), "user status"),
    )  # fmt: skip


def _named(word: str, words: tuple[str, ...], what: str) -> str:
    """Returns a word as it is kept: RocketMQ takes it in capitals or not."""
    for known in words:
        if word.strip().lower() == known.lower():
            return known
    raise refused(f"The {what} is null or illegal.")


def _valid_policy(policy: Policy) -> Policy:
    if not policy.entries:
        raise refused("The policy entries is empty.")
    kind = _named(policy.policy_type or users.CUSTOM, (users.CUSTOM, users.DEFAULT), "policy type")
    return Policy(kind, list(map(_valid_entry, policy.entries)))


def _valid_entry(entry: Entry) -> Entry:
    if not entry.actions:
        raise refused("The actions is empty.")
    for source in entry.source_ips or ():
        try:
            users.network(source)
        except ValueError:
            raise refused("The source ip is invalid.") from None
    return msgspec.structs.replace(
        entry,
        resource=_resource(entry.resource),
        actions=[_named(action, users.ACTIONS, "action") for action in entry.actions],
        source_ips=entry.source_ips or None,
        decision=_named(entry.decision or "", (users.ALLOW, users.DENY), "decision"),
    )


def _resource(text: str) -> str:
    """Returns a resource as it is kept: `*`, `Topic:*`, `Topic:prefix*`, `Topic:name`."""
    if text == "*":
        return text
    kind, colon, name = text.partition(":")
    if not colon or not name:
        raise refused("The resource is null.")
    return f"{_named(kind, users.KINDS, 'resource type')}:{name}"
