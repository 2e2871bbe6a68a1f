"""Browsing quorum queues, and operations on chosen messages (docs/browse.md)."""

from __future__ import annotations

import json
import time
import uuid

from convoymq.cli.ctl.arguments import Switch
from convoymq.cli.ctl.command import Command, Invocation, in_vhost, json_word, object_of, rows_of
from convoymq.cli.ctl.failures import DATA, UNAVAILABLE, Failure, Misused, Problem
from convoymq.cli.ctl.outputs import Output, Rows
from convoymq.model.json import Json, JsonObject

POLL_S = 0.1
WAIT_S = 60
FILTER = (
    Switch("position-from", int),
    Switch("position-to", int),
    Switch("time-from", int),
    Switch("time-to", int),
    Switch("headers", str),
    Switch("header-exists", str),
    Switch("first-queue", str),
    Switch("first-reason", str),
    Switch("last-queue", str),
    Switch("last-reason", str),
)
SELECTION = (*FILTER, Switch("all"), Switch("operation", str), Switch("wait", int))
TARGET = (Switch("to-queue", str), Switch("to-exchange", str), Switch("routing-key", str))
SHOWN = (
    "position", "id", "enqueued_at", "routing_key", "first_death_queue", "first_death_reason",
    "payload_bytes", "payload",
)  # fmt: skip
OPERATION = (
    "operation", "state", "selected", "gone", "deleted", "moved", "returned", "waiting",
    "waits_for",
)  # fmt: skip
MESSAGES = "convoy/queues/{vhost}/{queue}/messages/"
OPERATIONS = "convoy/queues/{vhost}/{queue}/operations"
QUEUE_MISSING = (
    (
        "queues/{vhost}/{queue}",
        Problem(DATA, "Target queue was not found in virtual host '{vhost}'"),
    ),
)


def _filter(invocation: Invocation) -> dict[str, Json]:
    """Returns the filter that the switches ask for."""
    made: dict[str, Json] = {}
    for name in ("position", "time"):
        bounds: dict[str, Json] = {
            end: invocation.value(f"{name}_{end}", 0)
            for end in ("from", "to")
            if f"{name}_{end}" in invocation.values
        }
        if bounds:
            made[name] = bounds
    headers = invocation.value("headers", "")
    if headers:
        made["headers"] = _headers(headers)
    exists = invocation.value("header_exists", "")
    if exists:
        made["header_exists"] = list(exists.split(","))
    for which in ("first", "last"):
        asked: dict[str, Json] = {
            part: invocation.value(f"{which}_{part}", "")
            for part in ("queue", "reason")
            if f"{which}_{part}" in invocation.values
        }
        if asked:
            made[f"{which}_death"] = asked
    return made


def _headers(text: str) -> Json:
    """`{"name": value}`, or `name=text,…`."""
    if text.startswith("{"):
        return json_word(text)
    made: dict[str, Json] = {}
    for word in text.split(","):
        name, equals, value = word.partition("=")
        if not equals:
            raise Misused(f"Bad argument: '{word}' is not NAME=VALUE", DATA)
        made[name] = value
    return made


def _browse(invocation: Invocation) -> Output:
    count = invocation.value("count", 100)
    body: dict[str, Json] = {
        "filter": _filter(invocation),
        "truncate": invocation.value("truncate", 200),
    }
    cursor = invocation.value("cursor", "")
    rows: list[JsonObject] = []
    while len(rows) < count:
        more: dict[str, Json] = {"cursor": cursor} if cursor else {}
        asked = {**body, **more, "count": count - len(rows)}
        page = object_of(invocation.call("POST", MESSAGES + "browse", asked))
        rows += rows_of(page["messages"])  # type: ignore[arg-type]
        cursor = str(page["cursor"] or "")
        if not cursor:
            break
    for row in rows:
        for which in ("first", "last"):
            death = object_of(row.pop(f"{which}_death", None))  # type: ignore[arg-type]
            row[f"{which}_death_queue"] = death.get("queue")
            row[f"{which}_death_reason"] = death.get("reason")
        row["properties"] = json.dumps(row.get("properties"))
    chosen = invocation.value("columns", "")
    columns = tuple(chosen.split(",")) if chosen else SHOWN
    return Rows(columns, [{name: row.get(name) for name in columns} for row in rows])


def _check_chosen(invocation: Invocation) -> None:
    """Some messages are chosen, in one way."""
    ways = bool(invocation.rest), bool(_filter(invocation)), invocation.flag("all")
    if sum(ways) != 1:
        raise Misused("Choose messages by their ids, by a filter, or with --all", DATA)


def _check_target(invocation: Invocation) -> None:
    _check_chosen(invocation)
    if ("to_queue" in invocation.values) == ("to_exchange" in invocation.values):
        raise Misused("Say either --to-queue or --to-exchange", DATA)


def _operate(invocation: Invocation, verb: str, body: dict[str, Json]) -> Output:
    """Begins an operation and waits for its end."""
    id = invocation.value("operation", "") or uuid.uuid4().hex
    body = {"operation": id, **body}
    invocation.words["operation"] = id
    found = object_of(invocation.call("POST", MESSAGES + verb, body))
    until = time.monotonic() + invocation.value("wait", WAIT_S)
    while found["state"] != "done" and time.monotonic() < until:
        time.sleep(POLL_S)
        found = object_of(invocation.call("GET", OPERATIONS + "/{operation}"))
    shown = Rows(OPERATION, [{name: found[name] for name in OPERATION}])
    if found["state"] != "done":
        raise Failure(
            UNAVAILABLE,
            f"Operation {id} goes on: {found['waits_for'] or 'it is not done yet'}",
            rows=shown,
        )
    return shown


def _chosen(invocation: Invocation) -> dict[str, Json]:
    if invocation.rest:
        return {"ids": list(invocation.rest)}
    return {"filter": _filter(invocation)}


def _target(invocation: Invocation) -> dict[str, Json]:
    made: dict[str, Json] = {}
    if "to_queue" in invocation.values:
        made["queue"] = invocation.value("to_queue", "")
    if "to_exchange" in invocation.values:
        made["exchange"] = invocation.value("to_exchange", "")
    if "routing_key" in invocation.values:
        made["routing_key"] = invocation.value("routing_key", "")
    return made


def _delete_messages(invocation: Invocation) -> Output:
    return _operate(invocation, "delete", _chosen(invocation))


def _move_messages(invocation: Invocation) -> Output:
    return _operate(invocation, "move", {**_chosen(invocation), **_target(invocation)})


def _retry_messages(invocation: Invocation) -> Output:
    body = {**_chosen(invocation), "to": invocation.value("to", "first")}
    return _operate(invocation, "retry", body)


def _republish_message(invocation: Invocation) -> Output:
    body: dict[str, Json] = {"id": invocation.word("id"), **_target(invocation)}
    if "to" in invocation.values:
        body["to"] = invocation.value("to", "first")
    if "properties" in invocation.values:
        body["properties"] = json_word(invocation.value("properties", ""))
    if "payload" in invocation.values:
        body["payload"] = invocation.value("payload", "")
        body["payload_encoding"] = invocation.value("payload_encoding", "string")
    return _operate(invocation, "republish", body)


def _check_one_target(invocation: Invocation) -> None:
    if sum(name in invocation.values for name in ("to_queue", "to_exchange", "to")) > 1:
        raise Misused("Say one of --to-queue, --to-exchange and --to", DATA)


def _list_operations(invocation: Invocation) -> Output:
    rows = rows_of(invocation.call("GET", OPERATIONS))
    return Rows(OPERATION, [{name: row[name] for name in OPERATION} for row in rows])


def _cancel_operation(invocation: Invocation) -> Output:
    found = object_of(invocation.call("DELETE", OPERATIONS + "/{operation}"))
    return Rows(OPERATION, [{name: found[name] for name in OPERATION}])


TO = Switch("to", str, choices=("first", "last", "origin"))
UNKNOWN = {404: Problem(DATA, "The message or operation is not known")}

COMMANDS = in_vhost(
    Command(
        "browse queue",
        "Shows the ready messages of a quorum queue, by a filter; they stay",
        switches=(
            *FILTER,
            Switch("count", int),
            Switch("cursor", str),
            Switch("truncate", int),
            Switch("columns", str),
        ),
        banner="Browsing quorum queue {queue}...",
        run=_browse,
        missing=QUEUE_MISSING,
    ),
    Command(
        "delete_messages queue id*",
        "Deletes chosen messages of a quorum queue",
        switches=SELECTION,
        check=_check_chosen,
        banner="Deleting messages of quorum queue {queue}...",
        run=_delete_messages,
        missing=QUEUE_MISSING,
    ),
    Command(
        "move_messages queue id*",
        "Moves chosen messages of a quorum queue to another queue or to an exchange",
        switches=(*SELECTION, *TARGET),
        check=_check_target,
        banner="Moving messages of quorum queue {queue}...",
        run=_move_messages,
        missing=QUEUE_MISSING,
    ),
    Command(
        "retry_messages queue id*",
        "Sends chosen dead letters of a quorum queue back to where they came from",
        switches=(*SELECTION, TO),
        check=_check_chosen,
        banner="Retrying messages of quorum queue {queue}...",
        run=_retry_messages,
        missing=QUEUE_MISSING,
    ),
    Command(
        "republish_message queue id",
        "Publishes a message of a quorum queue with other properties or another payload",
        switches=(
            *TARGET,
            TO,
            Switch("properties", str),
            Switch("payload", str),
            Switch("payload-encoding", str, choices=("string", "base64")),
            Switch("operation", str),
            Switch("wait", int),
        ),
        check=_check_one_target,
        banner="Publishing message {id} of quorum queue {queue}...",
        run=_republish_message,
        missing=QUEUE_MISSING,
        problems=UNKNOWN,
    ),
    Command(
        "list_operations queue",
        "Lists operations on chosen messages of a quorum queue",
        banner="Listing operations of quorum queue {queue}...",
        run=_list_operations,
        missing=QUEUE_MISSING,
    ),
    Command(
        "cancel_operation queue operation",
        "Ends an operation on chosen messages; those that are not on their way come back",
        banner="Cancelling operation {operation} of quorum queue {queue}...",
        run=_cancel_operation,
        missing=QUEUE_MISSING,
        problems=UNKNOWN,
    ),
)
