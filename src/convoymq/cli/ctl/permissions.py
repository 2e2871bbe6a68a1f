"""Permissions and topic permissions."""

from __future__ import annotations

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

NO_SUCH_USER = ("users/{username}", Problem(NO_USER, "User {username} does not exist"))
UNKNOWN_USER = ("users/{username}", Problem(UNAVAILABLE, 'User "{username}" does not exist'))
CHANGED = (NO_SUCH_USER, VHOST_PRESENT)


def set_permissions(invocation: Invocation) -> Output:
    """Replaces what a user may do in a virtual host."""
    invocation.need_present()
    names = ("configure", "write", "read")
    body = {name: invocation.word(name) for name in names}
    invocation.call("PUT", "permissions/{vhost}/{username}", dict(body))
    return None


def set_topic_permissions(invocation: Invocation) -> Output:
    """Replaces what a user may do with a topic exchange."""
    invocation.need_present()
    names = ("exchange", "write", "read")
    body = {name: invocation.word(name) for name in names}
    invocation.call("PUT", "topic-permissions/{vhost}/{username}", dict(body))
    return None


def clear_topic_permissions(invocation: Invocation) -> Output:
    """Removes the rules for one exchange, or for all."""
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
        name="set_permissions",
        summary="Sets user permissions for a vhost",
        arguments=("username", "configure", "write", "read"),
        switches=(VHOST,),
        banner='Setting permissions for user "{username}" in vhost "{vhost}" ...',
        run=set_permissions,
        missing=CHANGED,
    ),
    Command(
        name="clear_permissions",
        summary="Revokes user permissions for a vhost",
        arguments=("username",),
        switches=(VHOST,),
        banner='Clearing permissions for user "{username}" in vhost "{vhost}" ...',
        request=Request("DELETE", "permissions/{vhost}/{username}"),
        missing=CHANGED,
        absent_ok=True,
    ),
    Command(
        name="list_permissions",
        summary="Lists user permissions in a virtual host",
        tools=(CTL, DIAGNOSTICS),
        switches=(VHOST,),
        banner='Listing permissions for vhost "{vhost}" ...',
        request=Request("GET", "vhosts/{vhost}/permissions"),
        columns=plain("user", "configure", "write", "read"),
    ),
    Command(
        name="list_user_permissions",
        summary="Lists permissions of a user across all virtual hosts",
        tools=(CTL, DIAGNOSTICS),
        arguments=("username",),
        banner='Listing permissions for user "{username}" ...',
        request=Request("GET", "users/{username}/permissions"),
        columns=plain("vhost", "configure", "write", "read"),
        missing=(UNKNOWN_USER,),
    ),
    Command(
        name="set_topic_permissions",
        summary="Sets user topic permissions for an exchange",
        arguments=("username", "exchange", "write", "read"),
        switches=(VHOST,),
        banner='Setting topic permissions on "{exchange}" for user "{username}" in vhost '
        '"{vhost}" ...',
        run=set_topic_permissions,
        missing=CHANGED,
    ),
    Command(
        name="clear_topic_permissions",
        summary="Clears user topic permissions for a vhost or exchange",
        arguments=("username", "exchange?"),
        switches=(VHOST,),
        run=clear_topic_permissions,
        missing=CHANGED,
        absent_ok=True,
    ),
    Command(
        name="list_topic_permissions",
        summary="Lists topic permissions in a virtual host",
        tools=(CTL, DIAGNOSTICS),
        switches=(VHOST,),
        banner='Listing topic permissions for vhost "{vhost}" ...',
        request=Request("GET", "vhosts/{vhost}/topic-permissions"),
        columns=plain("user", "exchange", "write", "read"),
        missing=(VHOST_PRESENT,),
    ),
    Command(
        name="list_user_topic_permissions",
        summary="Lists user topic permissions",
        tools=(CTL, DIAGNOSTICS),
        arguments=("username",),
        banner='Listing topic permissions for user "{username}" ...',
        request=Request("GET", "users/{username}/topic-permissions"),
        columns=plain("vhost", "exchange", "write", "read"),
        missing=(UNKNOWN_USER,),
    ),
)
