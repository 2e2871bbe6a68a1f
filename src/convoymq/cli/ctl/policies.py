"""Policies, operator policies, parameters, global parameters and definitions."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from convoymq.cli.ctl.arguments import VHOST, Switch
from convoymq.cli.ctl.command import (
    CTL,
    DIAGNOSTICS,
    VHOST_PRESENT,
    Command,
    Invocation,
    Request,
    Row,
    json_word,
    object_of,
    pick,
    plain,
)
from convoymq.cli.ctl.failures import DATA, UNAVAILABLE, Failure, Misused, Problem
from convoymq.cli.ctl.formatting import to_json
from convoymq.cli.ctl.outputs import Note, Output, Raw, Rows
from convoymq.model.json import Json, JsonObject

ABSENT = {404: Problem(UNAVAILABLE, "Parameter does not exist")}
DEFINITION = (Switch("priority", int), Switch("apply-to", str))
OBJECT_MISSING = Problem(DATA, "{kind} '{name}' does not exist in vhost '{vhost}'")
INVALID = "Validation failed"
"""Begins the reasons for which a policy can never be accepted."""
STDIO = "-"
IMPORT_FORMAT = Switch("format", str, choices=("json",))


def _definition(row: Row) -> object:
    return to_json(row.get("definition"))


def _value(row: Row) -> object:
    return to_json(row.get("value"))


POLICY_COLUMNS = {
    **plain("vhost", "name", "pattern", "apply-to"),
    "definition": _definition,
    "priority": "priority",
}


def _policy_commands(word: str, label: str, paths: str) -> tuple[Command, ...]:
    """Returns the commands of policies, or of operator policies."""

    def set_policy(invocation: Invocation) -> Output:
        body: Json = {
            "pattern": invocation.word("pattern"),
            "definition": json_word(invocation.word("definition"), DATA),
            "priority": invocation.value("priority", 0),
            "apply-to": invocation.value("apply_to", "all"),
        }
        try:
            invocation.call("PUT", f"{paths}/{{vhost}}/{{name}}", body)
        except Failure as failure:
            if failure.text.startswith(INVALID):
                raise Failure(DATA, failure.text) from None
            raise
        return None

    def announce(invocation: Invocation) -> None:
        invocation.words["priority"] = str(invocation.value("priority", 0))

    many = paths.replace("-", "_")
    return (
        Command(
            f"set_{word} name pattern definition",
            f"Sets or updates {'a policy' if word == 'policy' else 'an operator policy'}",
            switches=(VHOST, *DEFINITION),
            check=announce,
            banner=f'Setting {label} "{{name}}" for pattern "{{pattern}}" to "{{definition}}" '
            'with priority "{priority}" for vhost "{vhost}" ...',
            run=set_policy,
        ),
        Command(
            f"clear_{word} name",
            f"Clears (removes) {'a policy' if word == 'policy' else 'an operator policy'}",
            switches=(VHOST,),
            banner=f'Clearing {label.removesuffix(" override")} "{{name}}" on vhost "{{vhost}}" '
            "...",
            request=Request("DELETE", f"{paths}/{{vhost}}/{{name}}"),
            problems=ABSENT,
        ),
        Command(
            f"list_{many}",
            f"Lists {paths.replace('-', ' ')} of a virtual host",
            tools=(CTL, DIAGNOSTICS),
            switches=(VHOST,),
            banner=f'Listing {label.replace("policy", "policies", 1)} for vhost "{{vhost}}" ...'
            if word == "policy"
            else 'Listing operator policy overrides for vhost "{vhost}" ...',
            request=Request("GET", f"{paths}/{{vhost}}"),
            columns=POLICY_COLUMNS,
        ),
    )


def _check_object_type(invocation: Invocation) -> None:
    kind = invocation.value("object_type", "queue")
    if kind not in ("queue", "exchange"):
        raise Misused(f"Bad argument: object type is queue or exchange, not {kind}", DATA)
    invocation.words["kind"] = kind


def list_policies_that_match(invocation: Invocation) -> Output:
    """Lists the policies that apply to a queue or an exchange, the one in force first. As in
    RabbitMQ without operator policies. The node decides: it has the rules."""
    matching = invocation.get("convoy/{kind}s/{vhost}/{name}/policies")
    rows = [pick(POLICY_COLUMNS, tuple(POLICY_COLUMNS), row) for row in matching]
    document: JsonObject = {"result": "ok", "policies": list(matching)}
    return Rows(tuple(POLICY_COLUMNS), rows, document=document)


def _set_parameter(invocation: Invocation) -> Output:
    body = {"value": json_word(invocation.word("value"))}
    invocation.call("PUT", "parameters/{component}/{vhost}/{name}", body)
    return None


def _set_global_parameter(invocation: Invocation) -> Output:
    body = {"value": json_word(invocation.word("value"))}
    invocation.call("PUT", "global-parameters/{name}", body)
    return None


def _export_definitions(invocation: Invocation) -> Output:
    target = invocation.word("file_path")
    if target != STDIO:
        invocation.print_banner(f'Exporting definitions in JSON to a file at "{target}" ...')
    text = json.dumps(invocation.call("GET", "definitions"), ensure_ascii=False)
    if target == STDIO:
        return Raw(text)
    try:
        # Hashes of passwords are in it: for the owner alone.
        mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(target, mode, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise Failure(DATA, f"{target}: {error.strerror}") from None
    return None


def _check_import(invocation: Invocation) -> None:
    source = invocation.word("file_path") or STDIO
    if source != STDIO and not Path(source).exists():
        raise Misused(f"Bad argument: File {source} does not exist", DATA)


def _import_definitions(invocation: Invocation) -> Output:
    source = invocation.word("file_path") or STDIO
    where = "standard input" if source == STDIO else f'a file at "{source}"'
    invocation.print_banner(f"Importing definitions in JSON from {where} ...")
    try:
        text = sys.stdin.read() if source == STDIO else Path(source).read_text(encoding="utf-8")
        document = json.loads(text)
    except OSError as error:
        raise Failure(DATA, f"{source}: {error.strerror}") from None
    except ValueError as error:
        reason = f"Failed to deserialise input (format: JSON) (error: {error})"
        raise Failure(DATA, reason) from None
    if not invocation.flag("skip_unsupported"):
        invocation.call("POST", "definitions", document)
        return Note("Successfully imported definitions.")
    found = object_of(invocation.call("POST", "definitions?skip_unsupported=true", document))
    left_out = found["left_out"]
    if not left_out:
        return Note("Successfully imported definitions.")
    assert isinstance(left_out, list)
    return Rows(["left_out"], [{"left_out": text} for text in left_out])


COMMANDS = (
    *_policy_commands("policy", "policy", "policies"),
    *_policy_commands("operator_policy", "operator policy override", "operator-policies"),
    Command(
        "list_policies_that_match name",
        "Lists all policies matching a queue/exchange (only the highest priority policy is active)",
        tools=(DIAGNOSTICS,),
        switches=(VHOST, Switch("object-type", str)),
        formatter="pretty_table",
        check=_check_object_type,
        banner="Listing policies that match {kind} '{name}' in vhost '{vhost}' ...",
        missing=(VHOST_PRESENT, ("{kind}s/{vhost}/{name}", OBJECT_MISSING)),
        run=list_policies_that_match,
    ),
    Command(
        "set_parameter component name value",
        "Sets a runtime parameter.",
        switches=(VHOST,),
        banner='Setting runtime parameter "{name}" for component "{component}" to "{value}" in '
        'vhost "{vhost}" ...',
        run=_set_parameter,
    ),
    Command(
        "clear_parameter component name",
        "Clears a runtime parameter.",
        switches=(VHOST,),
        banner='Clearing runtime parameter "{name}" for component "{component}" on vhost '
        '"{vhost}" ...',
        request=Request("DELETE", "parameters/{component}/{vhost}/{name}"),
        problems=ABSENT,
    ),
    Command(
        "list_parameters",
        "Lists runtime parameters for a virtual host",
        tools=(CTL, DIAGNOSTICS),
        switches=(VHOST,),
        banner='Listing runtime parameters for vhost "{vhost}" ...',
        request=Request("GET", "parameters"),
        columns={"component": "component", "name": "name", "value": _value},
        keep=lambda invocation, row: row.get("vhost") == invocation.vhost,
    ),
    Command(
        "set_global_parameter name value",
        "Sets a global runtime parameter.",
        banner='Setting global runtime parameter "{name}" to "{value}" ...',
        run=_set_global_parameter,
    ),
    Command(
        "clear_global_parameter name",
        "Clears a global runtime parameter",
        banner='Clearing global runtime parameter "{name}" ...',
        request=Request("DELETE", "global-parameters/{name}"),
        problems=ABSENT,
    ),
    Command(
        "list_global_parameters",
        "Lists global runtime parameters",
        tools=(CTL, DIAGNOSTICS),
        banner="Listing global runtime parameters ...",
        request=Request("GET", "global-parameters"),
        columns={"name": "name", "value": _value},
    ),
    Command(
        "set_cluster_name name",
        "Sets the cluster name",
        banner="Setting cluster name to {name} ...",
        request=Request("PUT", "cluster-name", lambda given: {"name": given.word("name")}),
    ),
    Command(
        "export_definitions file_path",
        "Exports definitions in JSON.",
        switches=(IMPORT_FORMAT,),
        run=_export_definitions,
    ),
    Command(
        "import_definitions file_path?",
        "Imports definitions in JSON.",
        switches=(IMPORT_FORMAT, Switch("skip-unsupported")),
        check=_check_import,
        run=_import_definitions,
    ),
)
