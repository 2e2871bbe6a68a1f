"""Virtual hosts and their limits."""

from __future__ import annotations

from convoymq.cli.ctl.arguments import VHOST, Switch
from convoymq.cli.ctl.command import (
    CTL,
    DIAGNOSTICS,
    VHOST_PRESENT,
    Command,
    Invocation,
    Request,
    json_word,
    plain,
)
from convoymq.cli.ctl.failures import DATA, UNAVAILABLE, Failure, Problem
from convoymq.cli.ctl.formatting import Erlang, to_json
from convoymq.cli.ctl.outputs import Output, Rows, Text
from convoymq.model.json import Json, JsonObject

METADATA = (
    Switch("description", str),
    Switch("tags", str),
    Switch("default-queue-type", str),
    Switch("rabbitmq-compatibility", str),
)
PROTECTED = (
    "Cannot delete this virtual host: it is protected from deletion. To lift the protection, "
    "inspect and update its metadata"
)


def _metadata(invocation: Invocation) -> dict[str, Json]:
    """Returns the metadata of a virtual host that the switches give."""
    return {
        switch.key: invocation.value(switch.key, "")
        for switch in METADATA
        if switch.key in invocation.values
    }


def _add_vhost(invocation: Invocation) -> Output:
    if invocation.one("vhosts/{vhost}") is None:
        invocation.call("PUT", "vhosts/{vhost}", _metadata(invocation))
    return None


def _update(invocation: Invocation, changes: dict[str, Json]) -> None:
    known = invocation.one("vhosts/{vhost}")
    if known is None:
        raise invocation.failure(VHOST_PRESENT[1])
    kept: dict[str, Json] = {
        "description": str(known.get("description", "")),
        "tags": [str(tag) for tag in _list(known.get("tags"))],
        "default_queue_type": str(known.get("default_queue_type") or ""),
        "rabbitmq_compatibility": str(known.get("rabbitmq_compatibility") or ""),
    }
    invocation.call("PUT", "vhosts/{vhost}", kept | changes)


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []


def _trace_on(invocation: Invocation) -> Output:
    _update(invocation, {"tracing": True})
    return Text(f"Trace enabled for vhost {invocation.vhost}")


def _trace_off(invocation: Invocation) -> Output:
    _update(invocation, {"tracing": False})
    return Text(f"Trace disabled for vhost {invocation.vhost}")


def _update_metadata(invocation: Invocation) -> Output:
    _update(invocation, _metadata(invocation))
    return None


def _set_tags(invocation: Invocation) -> Output:
    shown = ", ".join(invocation.rest)
    invocation.print_banner(
        invocation.text(f'Setting tags for virtual host "{{vhost}}" to [{shown}] ...')
    )
    _update(invocation, {"tags": list[Json](invocation.rest)})
    return None


def _set_limits(invocation: Invocation) -> Output:
    limits = json_word(invocation.word("definition"))
    if not isinstance(limits, dict):
        raise Failure(UNAVAILABLE, "limits are not a JSON object")
    invocation.need_present()
    path = "parameters/vhost-limits/{vhost}/limits"
    invocation.call("PUT", path, {"value": limits})
    for name in _limits(invocation):
        if name not in limits:
            invocation.words["limit"] = name
            invocation.call("DELETE", "vhost-limits/{vhost}/{limit}")
    return None


def _limits(invocation: Invocation) -> JsonObject:
    rows = invocation.get("vhost-limits/{vhost}")
    value = rows[0]["value"] if rows else {}
    return value if isinstance(value, dict) else {}


def _clear_limits(invocation: Invocation) -> Output:
    invocation.need_present()
    for name in _limits(invocation):
        invocation.words["limit"] = name
        invocation.call("DELETE", "vhost-limits/{vhost}/{limit}")
    return None


def _list_limits(invocation: Invocation) -> Output:
    everywhere = invocation.flag("global")
    where = "all vhosts" if everywhere else f'vhost "{invocation.vhost}"'
    invocation.print_banner(f"Listing limits for {where} ...")
    rows = invocation.get("vhost-limits" if everywhere else "vhost-limits/{vhost}")
    shown = [{"vhost": row["vhost"], "limits": to_json(row["value"])} for row in rows]
    if everywhere or invocation.values.get("formatter") == "json":
        return Rows(("vhost", "limits"), shown)
    return Text(str(shown[0]["limits"]) if shown else "")


def _cluster_state(row: JsonObject) -> object:
    return {Erlang(node): Erlang(state) for node, state in object_of_row(row).items()}


def object_of_row(row: JsonObject) -> JsonObject:
    """Returns the states of a virtual host by node."""
    state = row.get("cluster_state")
    return state if isinstance(state, dict) else {}


COMMANDS = (
    Command(
        "trace_on",
        "Publishes a copy of each message of a virtual host to amq.rabbitmq.trace",
        switches=(VHOST,),
        banner='Starting tracing for vhost "{vhost}" ...',
        run=_trace_on,
    ),
    Command(
        "trace_off",
        "Ends the tracing of a virtual host",
        switches=(VHOST,),
        banner='Stopping tracing for vhost "{vhost}" ...',
        run=_trace_off,
    ),
    Command(
        "add_vhost vhost",
        "Creates a virtual host",
        switches=METADATA,
        banner='Adding vhost "{vhost}" ...',
        run=_add_vhost,
    ),
    Command(
        "update_vhost_metadata vhost",
        "Updates metadata of a virtual host: description, tags, defaults of new queues",
        switches=METADATA,
        banner='Updating metadata of vhost "{vhost}" ...',
        run=_update_metadata,
    ),
    Command(
        "delete_vhost vhost",
        "Deletes a virtual host",
        banner='Deleting vhost "{vhost}" ...',
        request=Request("DELETE", "vhosts/{vhost}"),
        missing=(VHOST_PRESENT,),
        problems={412: Problem(DATA, PROTECTED)},
    ),
    Command(
        "enable_vhost_deletion_protection vhost",
        "Protects a virtual host from deletion (until the protection is removed)",
        banner='Protecting virtual host "{vhost}" from removal by updating its metadata...',
        request=Request("POST", "vhosts/{vhost}/deletion/protection"),
        missing=(VHOST_PRESENT,),
    ),
    Command(
        "disable_vhost_deletion_protection vhost",
        "Removes deletion protection from a virtual host (so that it can be deleted)",
        banner='Removing deletion protection from virtual host "{vhost}" '
        "by updating its metadata...",
        request=Request("DELETE", "vhosts/{vhost}/deletion/protection"),
        missing=(VHOST_PRESENT,),
    ),
    Command(
        "list_vhosts column*",
        "Lists virtual hosts",
        tools=(CTL, DIAGNOSTICS),
        banner="Listing vhosts ...",
        request=Request("GET", "vhosts"),
        columns={
            **plain("name", "description", "tags", "default_queue_type"),
            **plain("rabbitmq_compatibility", "protected_from_deletion", "tracing"),
            "cluster_state": _cluster_state,
            "metadata": "metadata",
        },
        shown=("name",),
    ),
    Command("set_vhost_tags vhost tag*", "Sets virtual host tags", run=_set_tags),
    Command(
        "set_vhost_limits definition",
        "Sets virtual host limits",
        switches=(VHOST,),
        banner='Setting vhost limits to "{definition}" for vhost "{vhost}" ...',
        run=_set_limits,
    ),
    Command(
        "clear_vhost_limits",
        "Clears virtual host limits",
        switches=(VHOST,),
        banner='Clearing vhost "{vhost}" limits ...',
        run=_clear_limits,
    ),
    Command(
        "list_vhost_limits",
        "Displays configured virtual host limits",
        tools=(CTL, DIAGNOSTICS),
        switches=(VHOST, Switch("global")),
        run=_list_limits,
    ),
)
