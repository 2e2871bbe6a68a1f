"""Permissions and topic permissions."""

from __future__ import annotations

from collections.abc import Callable

from convoymq.cli.ctl.arguments import VHOST
from convoymq.cli.ctl.command import (
    CTL,
    DIAGNOSTICS,
    VHOST_PRESENT,
    Command,
    Invocation,
    Request,
    plain,
)
from convoymq.cli.ctl.failures import NO_USER, UNAVAILABLE, Problem
from convoymq.cli.ctl.outputs import Output
from convoymq.cli.ctl.transport import segment
from convoymq.model.json import Json

NO_SUCH_USER = ("users/{username}", Problem(NO_USER, "User {username} does not exist"))
UNKNOWN_USER = ("users/{username}", Problem(UNAVAILABLE, 'User "{username}" does not exist'))
PERMISSIONS = ("configure", "write", "read")
CHANGED = (NO_SUCH_USER, VHOST_PRESENT)


def _sets(path: str, *names: str) -> Callable[[Invocation], Output]:
    """Returns a command that replaces what a user may do."""

    def run(invocation: Invocation) -> Output:
        invocation.need_present()
        invocation.call("PUT", path, {name: invocation.word(name) for name in names})
        return None

    return run


def _set_globally(invocation: Invocation) -> Output:
    """Replaces what a user may do in each virtual host that there is now."""
    invocation.need_present()
    body: Json = {name: invocation.word(name) for name in PERMISSIONS}
    for row in invocation.get("vhosts"):
        path = f"permissions/{segment(str(row['name']))}/{{username}}"
        invocation.call("PUT", path, body)
    return None


def _clear_topic_permissions(invocation: Invocation) -> Output:
    exchange = invocation.word("exchange")
    where = f' on "{exchange}"' if exchange else ""
    invocation.print_banner(
        invocation.text(
            f'Clearing topic permissions{where} for user "{{username}}" in vhost "{{vhost}}" ...'
        )
    )
    invocation.need_present()
    path = "topic-permissions/{vhost}/{username}" + ("/{exchange}" if exchange else "")
    invocation.call("DELETE", path)
    return None


COMMANDS = (
    Command(
        "set_permissions username configure write read",
        "Sets user permissions for a vhost",
        switches=(VHOST,),
        banner='Setting permissions for user "{username}" in vhost "{vhost}" ...',
        run=_sets("permissions/{vhost}/{username}", *PERMISSIONS),
        missing=CHANGED,
    ),
    Command(
        "set_permissions_globally username configure write read",
        "Sets user permissions for all virtual hosts.",
        run=_set_globally,
        missing=(NO_SUCH_USER,),
    ),
    Command(
        "clear_permissions username",
        "Revokes user permissions for a vhost",
        switches=(VHOST,),
        banner='Clearing permissions for user "{username}" in vhost "{vhost}" ...',
        request=Request("DELETE", "permissions/{vhost}/{username}"),
        missing=CHANGED,
        absent_ok=True,
    ),
    Command(
        "list_permissions",
        "Lists user permissions in a virtual host",
        tools=(CTL, DIAGNOSTICS),
        switches=(VHOST,),
        banner='Listing permissions for vhost "{vhost}" ...',
        request=Request("GET", "vhosts/{vhost}/permissions"),
        columns=plain("user", "configure", "write", "read"),
    ),
    Command(
        "list_user_permissions username",
        "Lists permissions of a user across all virtual hosts",
        tools=(CTL, DIAGNOSTICS),
        banner='Listing permissions for user "{username}" ...',
        request=Request("GET", "users/{username}/permissions"),
        columns=plain("vhost", "configure", "write", "read"),
        missing=(UNKNOWN_USER,),
    ),
    Command(
        "set_topic_permissions username exchange write read",
        "Sets user topic permissions for an exchange",
        switches=(VHOST,),
        banner='Setting topic permissions on "{exchange}" for user "{username}" in vhost '
        '"{vhost}" ...',
        run=_sets("topic-permissions/{vhost}/{username}", "exchange", "write", "read"),
        missing=CHANGED,
    ),
    Command(
        "clear_topic_permissions username exchange?",
        "Clears user topic permissions for a vhost or exchange",
        switches=(VHOST,),
        run=_clear_topic_permissions,
        missing=CHANGED,
        absent_ok=True,
    ),
    Command(
        "list_topic_permissions",
        "Lists topic permissions in a virtual host",
        tools=(CTL, DIAGNOSTICS),
        switches=(VHOST,),
        banner='Listing topic permissions for vhost "{vhost}" ...',
        request=Request("GET", "vhosts/{vhost}/topic-permissions"),
        columns=plain("user", "exchange", "write", "read"),
        missing=(VHOST_PRESENT,),
    ),
    Command(
        "list_user_topic_permissions username",
        "Lists user topic permissions",
        tools=(CTL, DIAGNOSTICS),
        banner='Listing topic permissions for user "{username}" ...',
        request=Request("GET", "users/{username}/topic-permissions"),
        columns=plain("vhost", "exchange", "write", "read"),
        missing=(UNKNOWN_USER,),
    ),
)
