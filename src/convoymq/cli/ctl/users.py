"""Users, their passwords, tags and limits."""

from __future__ import annotations

import getpass
import sys

from convoymq.cli.ctl.arguments import Switch
from convoymq.cli.ctl.command import (
    CTL,
    DIAGNOSTICS,
    Command,
    Invocation,
    Request,
    json_word,
    object_of,
    plain,
)
from convoymq.cli.ctl.failures import (
    DATA,
    NO_USER,
    SOFTWARE,
    UNAVAILABLE,
    Failure,
    Misused,
    Problem,
)
from convoymq.cli.ctl.formatting import to_json
from convoymq.cli.ctl.outputs import Note, Output, Rows, Text
from convoymq.model.json import Json, JsonObject

NO_SUCH_USER = ("users/{username}", Problem(NO_USER, 'User "{username}" does not exist'))
HASHING = "sha256"
GRANT_HINT = (
    "Done. Don't forget to grant the user permissions to some virtual hosts! "
    "See 'rabbitmqctl help set_permissions' to learn more."
)


def password_of(invocation: Invocation) -> str:
    """Returns the password that was given, or a line of standard input. Raises Misused."""
    if "password" in invocation.words:
        return invocation.words["password"]
    if sys.stdin.isatty():
        return getpass.getpass("Password: ")
    line = sys.stdin.readline()
    if not line:
        raise Misused("not enough arguments.")
    return line.rstrip("\n")


def _take_password(invocation: Invocation) -> None:
    """Reads the password before anything is printed."""
    invocation.words["password"] = password_of(invocation)


def _hash_password(invocation: Invocation) -> Output:
    found = invocation.call("GET", "auth/hash_password/{password}")
    return Text(str(object_of(found)["ok"]))


def _check_password(invocation: Invocation) -> None:
    _take_password(invocation)
    algorithm = invocation.value("hashing_algorithm", HASHING).lower()
    if algorithm.replace("-", "") != HASHING:
        raise Misused(f"unsupported hashing algorithm: {algorithm}", DATA)
    if not invocation.word("password"):
        raise Misused("password cannot be an empty string", DATA)


def _add_user(invocation: Invocation) -> Output:
    if invocation.one("users/{username}") is not None:
        raise Failure(SOFTWARE, invocation.text('User "{username}" already exists'))
    secret = "password_hash" if invocation.flag("pre_hashed_password") else "password"
    body: Json = {secret: invocation.word("password"), "tags": ""}
    invocation.call("PUT", "users/{username}", body)
    return Note(GRANT_HINT)


def _update(invocation: Invocation, **changes: Json) -> None:
    """Writes a user back with changes."""
    invocation.need_present()
    known = invocation.one("users/{username}") or {}
    body: dict[str, Json] = {
        "password_hash": str(known.get("password_hash", "")),
        "hashing_algorithm": str(known.get("hashing_algorithm", "")),
        "tags": [str(tag) for tag in _tags(known)],
    }
    invocation.call("PUT", "users/{username}", body | changes)


def _tags(row: JsonObject) -> list[object]:
    tags = row.get("tags")
    return list(tags) if isinstance(tags, list) else []


def _change_password(invocation: Invocation) -> Output:
    _update(invocation, password=invocation.word("password"))
    return None


def _clear_password(invocation: Invocation) -> Output:
    _update(invocation, password_hash="")
    return None


def _set_user_tags(invocation: Invocation) -> Output:
    shown = ", ".join(invocation.rest)
    banner = invocation.text(f'Setting tags for user "{{username}}" to [{shown}] ...')
    invocation.print_banner(banner)
    _update(invocation, tags=list[Json](invocation.rest))
    return None


def _authenticate_user(invocation: Invocation) -> Output:
    body: Json = {"password": invocation.word("password")}
    found = object_of(invocation.call("POST", "convoy/users/{username}/authenticate", body))
    if not found.get("authenticated"):
        name = invocation.word("username")
        raise Failure(
            DATA,
            f"Error: failed to authenticate user \"{name}\"\nuser '{name}' - invalid credentials",
        )
    return Text("Success")


def _list_user_limits(invocation: Invocation) -> Output:
    if invocation.flag("global"):
        invocation.print_banner("Listing limits for all users ...")
        rows = [
            {"user": row["user"], "limits": to_json(row["value"])}
            for row in invocation.get("user-limits")
        ]
        return Rows(("user", "limits"), rows)
    user = invocation.words["username"] = invocation.value("user", "guest")
    invocation.print_banner(f'Listing limits for user "{user}" ...')
    invocation.need_present()
    rows = invocation.get("user-limits/{username}")
    return Text(to_json(rows[0]["value"]) if rows else "{}")


def _set_user_limits(invocation: Invocation) -> Output:
    invocation.need_present()
    limits = json_word(invocation.word("definition"))
    if not isinstance(limits, dict):
        raise Failure(UNAVAILABLE, "limits are not a JSON object")
    for name, value in limits.items():
        invocation.words["limit"] = name
        invocation.call("PUT", "user-limits/{username}/{limit}", {"value": value})
    return None


def _clear_user_limits(invocation: Invocation) -> Output:
    limit = invocation.word("limit")
    what = "all limits" if limit == "all" else f'"{limit}" limit'
    invocation.print_banner(invocation.text(f'Clearing {what} for user "{{username}}" ...'))
    invocation.need_present()
    rows = invocation.get("user-limits/{username}")
    known = object_of(rows[0]["value"]) if rows else {}  # type: ignore[arg-type]
    for name in known if limit == "all" else [limit]:
        if name in known:
            invocation.words["limit"] = name
            invocation.call("DELETE", "user-limits/{username}/{limit}")
    return None


COMMANDS = (
    Command(
        "add_user username password?",
        "Creates a new user in the internal database. This user will have no permissions "
        "for any virtual hosts by default.",
        switches=(Switch("pre-hashed-password"),),
        check=_take_password,
        banner='Adding user "{username}" ...',
        run=_add_user,
    ),
    Command(
        "delete_user username",
        "Removes a user from the internal database",
        banner='Deleting user "{username}" ...',
        request=Request("DELETE", "users/{username}"),
        missing=(NO_SUCH_USER,),
    ),
    Command(
        "change_password username password?",
        "Changes the user password",
        check=_take_password,
        banner='Changing password for user "{username}" ...',
        run=_change_password,
        missing=(NO_SUCH_USER,),
    ),
    Command(
        "clear_password username",
        "Clears (resets) password and disables password login for a user",
        banner='Clearing password for user "{username}" ...',
        run=_clear_password,
        missing=(NO_SUCH_USER,),
    ),
    Command(
        "authenticate_user username password?",
        "Attempts to authenticate a user. Exits with a non-zero code if authentication fails.",
        check=_take_password,
        banner='Authenticating user "{username}" ...',
        run=_authenticate_user,
    ),
    Command(
        "hash_password password?",
        "Hashes a plaintext password",
        switches=(Switch("hashing-algorithm", str),),
        check=_check_password,
        banner="Will hash provided password",
        run=_hash_password,
    ),
    Command(
        "set_user_tags username tag*", "Sets user tags", run=_set_user_tags, missing=(NO_SUCH_USER,)
    ),
    Command(
        "list_users",
        "List user names and tags",
        tools=(CTL, DIAGNOSTICS),
        banner="Listing users ...",
        request=Request("GET", "users"),
        columns={"user": "name", **plain("tags")},
    ),
    Command(
        "list_user_limits",
        "Displays configured user limits",
        tools=(CTL, DIAGNOSTICS),
        switches=(Switch("global"), Switch("user", str)),
        run=_list_user_limits,
        missing=(NO_SUCH_USER,),
    ),
    Command(
        "set_user_limits username definition",
        "Sets user limits",
        banner='Setting user limits to "{definition}" for user "{username}" ...',
        run=_set_user_limits,
        missing=(("users/{username}", Problem(UNAVAILABLE, NO_SUCH_USER[1].text)),),
    ),
    Command(
        "clear_user_limits username limit",
        "Clears user connection/channel limits",
        run=_clear_user_limits,
        missing=(NO_SUCH_USER,),
    ),
)
