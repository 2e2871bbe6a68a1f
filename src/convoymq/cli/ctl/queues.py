"""Members and leaders of replicated queues, as `rabbitmq-queues` has them."""

from __future__ import annotations

import json
import re
import time

from convoymq.cli.ctl.arguments import VHOST, Switch
from convoymq.cli.ctl.command import (
    CTL,
    DIAGNOSTICS,
    QUEUES,
    Command,
    Invocation,
    Request,
    object_of,
    plain,
    rows_of,
)
from convoymq.cli.ctl.failures import DATA, UNAVAILABLE, Failure, Misused, Problem
from convoymq.cli.ctl.outputs import Output, Rows
from convoymq.model.json import Json, JsonObject
from convoymq.model.replica_status import REPLICA_COLUMNS

POLL_S = 0.2
SELECTION = (
    Switch("vhost-pattern", str),
    Switch("queue-pattern", str),
    Switch("queue-type", str),
    Switch("membership", str),
    Switch("errors-only"),
)
# Words of the broker's requests. RabbitMQ's tools print the refusals of wrong ones in quotes.
STRATEGIES = ("all", "even")
MEMBERSHIPS = ("promotable", "non_voter", "voter")
QUEUE_TYPES = ("all", "quorum", "stream")
REBALANCED = {
    "all": "all replicated queues",
    "classic": "replicated (mirrored, non-exclusive) classic queues",
    "quorum": "quorum queues",
    "stream": "stream queues",
}
LED = {
    "quorum": "Number of quorum queues",
    "classic": "Number of replicated classic queues",
    "stream": "Number of streams",
}
MEASURES = ("count", "load")
LISTED_DEFAULT = 100
SCHEDULED_PAGE = 1_000
SCHEDULED = (
    "id", "deliver_at", "reason", "exchange", "routing_key", "message_id", "payload_bytes",
    "delivery_count",
)  # fmt: skip
CHANGES = ("vhost", "name", "size", "result")
MIGRATED_TO = ("quorum", "classic", "stream", "mirrored")
MIGRATION_WAIT_S = 2
PLANNED = (
    "vhost", "name", "type", "to", "messages", "consumers", "state", "dropped_arguments", "notes",
    "reason",
)  # fmt: skip
MIGRATED = ("vhost", "name", "type", "to", "messages", "copied", "state", "reason")
NOT_FOUND = {404: Problem(DATA, "not_found")}


def _selection(invocation: Invocation, **more: Json) -> dict[str, Json]:
    return {
        "vhost_pattern": invocation.value("vhost_pattern", ".*"),
        "queue_pattern": invocation.value("queue_pattern", ".*"),
        "queue_type": invocation.value("queue_type", "quorum"),
        "membership": invocation.value("membership", "promotable"),
        **more,
    }


def _changes(invocation: Invocation, content: Json, columns: tuple[str, ...] = CHANGES) -> Output:
    """Returns the table of a command for many queues. Fails when one of them failed."""
    rows = rows_of(content)
    failed = [row for row in rows if row.get("result") != "ok"]
    shown = Rows(columns, failed if invocation.flag("errors_only") else rows)
    if failed:
        raise Failure(UNAVAILABLE, "", rows=shown)
    return shown


def _grow(invocation: Invocation) -> Output:
    body = _selection(invocation, strategy=invocation.word("strategy"))
    return _changes(
        invocation, invocation.call("POST", "queues/quorum/replicas/on/{target}/grow", body)
    )


def _check_strategy(invocation: Invocation) -> None:
    strategy = invocation.word("strategy")
    if strategy not in STRATEGIES:
        raise Misused(f"\"strategy '{strategy}' is not recognised.\"")
    _check_selection(invocation)


def _check_selection(invocation: Invocation) -> None:
    _check_membership(invocation)
    queue_type = invocation.value("queue_type", "quorum")
    if queue_type not in QUEUE_TYPES:
        raise Misused(f"\"queue type '{queue_type}' is not recognised.\"")


def _check_membership(invocation: Invocation) -> None:
    membership = invocation.value("membership", "promotable")
    if membership not in MEMBERSHIPS:
        raise Misused(f"\"voter status '{membership}' is not recognised.\"")


def _check_count(invocation: Invocation) -> None:
    count = invocation.word("count")
    if not count.removeprefix("-").isdecimal():
        raise Misused("Bad argument: count is not a number", DATA)
    if int(count) < 1:
        raise Misused(f"\"node count '{count}' must be greater than 0.\"")
    _check_strategy(invocation)


def _grow_to_count(invocation: Invocation) -> Output:
    count, strategy = int(invocation.word("count")), invocation.word("strategy")
    body = _selection(invocation, count=count, strategy=strategy)
    return _changes(
        invocation, invocation.call("POST", "queues/quorum/replicas/grow_to_count", body)
    )


def _shrink(invocation: Invocation) -> Output:
    path = "queues/quorum/replicas/on/{target}/shrink"
    return _changes(invocation, invocation.call("DELETE", path, _selection(invocation)))


def _check_rebalance(invocation: Invocation) -> None:
    queue_type, by = invocation.word("type"), invocation.value("by", "count")
    if queue_type not in REBALANCED:
        raise Misused(f"type {queue_type} is not supported. Try one of {', '.join(REBALANCED)}.")
    if by not in MEASURES:
        raise Misused(f"--by {by} is not supported. Try one of {', '.join(MEASURES)}.")


def rebalance(invocation: Invocation) -> Output:
    """Spreads the leaders over the nodes, and waits until that is done."""
    body: JsonObject = {
        "type": invocation.word("type"),
        "vhost_pattern": invocation.value("vhost_pattern", ".*"),
        "queue_pattern": invocation.value("queue_pattern", ".*"),
        "by": invocation.value("by", "count"),
        "rate": invocation.value("rate", 50),
        "dry_run": invocation.flag("dry_run"),
    }
    if invocation.flag("dry_run"):
        moves = rows_of(invocation.call("POST", "rebalance/queues", body))  # type: ignore[arg-type]
        return Rows(("vhost", "name", "from", "to"), moves)
    invocation.print_banner(f"Re-balancing leaders of {REBALANCED[invocation.word('type')]}...")
    invocation.call("POST", "rebalance/queues", body)  # type: ignore[arg-type]
    while True:
        found = object_of(invocation.call("GET", "convoy/rebalance"))
        if not found["running"]:
            break
        time.sleep(POLL_S)
    if found["ended"] != "done" or found["failed"]:
        raise Failure(UNAVAILABLE, str(found["failed"] or found["ended"] or "interrupted"))
    leaders = found["leaders"]
    assert isinstance(leaders, dict)
    rows: list[JsonObject] = [
        {"Node name": node, **{column: led[kind] for kind, column in LED.items()}}
        for node, led in leaders.items()
    ]
    return Rows(("Node name", *LED.values()), rows)


def _check_migrate(invocation: Invocation) -> None:
    to = invocation.value("to", "")
    if to not in MIGRATED_TO:
        raise Misused(f"--to {to} is not supported. Try one of {', '.join(MIGRATED_TO)}.")
    if invocation.flag("pattern"):
        try:
            re.compile(invocation.word("queue"))
        except re.error as error:
            raise Misused(f"the pattern of queues is not valid: {error}") from None
    if invocation.value("rate", 0) < 0:
        raise Misused("--rate is a number of messages a second")


def _migrate(invocation: Invocation) -> Output:
    # Queues that are of the type are passed over, so that the command can be repeated.
    is_many, is_dry = invocation.flag("pattern"), invocation.flag("dry_run")
    names = _to_migrate(invocation) if is_many else [invocation.word("queue")]
    rows: list[JsonObject] = []
    for number, name in enumerate(names, 1):
        if is_many and not is_dry:
            invocation.print_banner(f"{number} of {len(names)}: {name}")
        invocation.words["queue"] = name
        try:
            rows.append(_migrate_one(invocation))
        except Failure as failure:
            if not is_many:
                raise
            row: JsonObject = {"vhost": invocation.vhost, "name": name, "state": "refused"}
            rows.append(row | {"to": invocation.value("to", ""), "reason": failure.text})
    found = Rows(PLANNED if is_dry else MIGRATED, rows)
    if any(row["state"] not in ("migrated", "dry run") for row in rows):
        raise Failure(UNAVAILABLE, "", rows=found)
    return found


def _to_migrate(invocation: Invocation) -> list[str]:
    pattern, to = re.compile(invocation.word("queue")), invocation.value("to", "")
    rows = invocation.get("queues/{vhost}")
    found = [str(row["name"]) for row in rows if row.get("type") != to]
    return sorted(name for name in found if pattern.search(name))


def _migrate_one(invocation: Invocation) -> JsonObject:
    template = "convoy/queues/{vhost}/{queue}/migration"
    body: JsonObject = {
        "to": invocation.value("to", ""),
        "dry_run": invocation.flag("dry_run"),
        "drop_arguments": invocation.flag("drop_arguments"),
        "rate": invocation.value("rate", 0),
        "wait": MIGRATION_WAIT_S,
    }
    row = object_of(invocation.call("POST", template, body))  # type: ignore[arg-type]
    while row["state"] == "migrating":
        query = f"?successor={row['successor']}&wait={MIGRATION_WAIT_S}"
        known = object_of(invocation.call("GET", template + query))
        # Who leads the new queue does not know how many messages were copied.
        row |= known if known["messages"] else {"state": known["state"], "reason": known["reason"]}
    if row["state"] == "migrated":
        row["copied"] = row["messages"]
    for key in ("dropped_arguments", "notes"):
        texts = row[key]
        assert isinstance(texts, list)
        row[key] = "; ".join(str(text) for text in texts)
    return row


def _force_checkpoint(invocation: Invocation) -> Output:
    content = invocation.call("POST", "convoy/queues/checkpoint", _selection(invocation))
    return _changes(invocation, content, ("vhost", "name", "result"))


def _force_boot(invocation: Invocation) -> Output:
    content = invocation.call("POST", "convoy/queues/force_boot")
    return _changes(invocation, content, ("vhost", "name", "result"))


def _peek(invocation: Invocation) -> Output:
    found = object_of(invocation.call("GET", "queues/quorum/{vhost}/{queue}/peek/{position}"))
    return Rows(
        ("keys", "values"),
        [
            {"keys": key, "values": json.dumps(value) if isinstance(value, dict | list) else value}
            for key, value in found.items()
        ],
    )


def _list_scheduled(invocation: Invocation) -> Output:
    limit = invocation.value("limit", LISTED_DEFAULT)
    rows: list[JsonObject] = []
    after = ""
    while len(rows) < limit:
        most = min(limit - len(rows), SCHEDULED_PAGE)
        template = "convoy/queues/{vhost}/{queue}/scheduled" + f"?limit={most}{after}"
        found = object_of(invocation.call("GET", template))
        messages = found["messages"]
        assert isinstance(messages, list)
        for row in rows_of(messages):
            properties = row.get("properties")
            known = properties if isinstance(properties, dict) else {}
            rows.append({**row, "message_id": known.get("message_id", "")})
        if found["next"] is None:
            break
        after = f"&after={found['next']}"
    return Rows(SCHEDULED, rows)


def _cancel_scheduled(invocation: Invocation) -> Output:
    body: dict[str, Json] = {"ids": list[Json](invocation.rest)}
    found = object_of(
        invocation.call("POST", "convoy/queues/{vhost}/{queue}/scheduled/cancel", body)
    )
    return Rows(("cancelled",), [found])


def _check_limit(invocation: Invocation) -> None:
    if invocation.value("limit", LISTED_DEFAULT) < 1:
        raise Misused("Bad argument: limit must be at least 1", DATA)


def _check_ids(invocation: Invocation) -> None:
    if not invocation.rest:
        raise Misused("Bad argument: name at least one message", DATA)


def _check_position(invocation: Invocation) -> None:
    if not invocation.word("position").isdecimal() or int(invocation.word("position")) < 1:
        raise Misused("Bad argument: position is not a number from 1 on", DATA)


def _prefetch_in_body(invocation: Invocation) -> Json:
    return {"prefetch_count": int(invocation.word("prefetch_count"))}


def _check_prefetch(invocation: Invocation) -> None:
    if not invocation.word("prefetch_count").isdecimal():
        raise Misused("Bad argument: prefetch_count is not a number", DATA)


def _node_in_body(invocation: Invocation) -> Json:
    return {"node": invocation.word("target")}


def _member_in_body(invocation: Invocation) -> Json:
    membership = invocation.value("membership", "promotable")
    return {"node": invocation.word("target"), "membership": membership}


def _members_status(name: str, text: str, subject: str) -> Command:
    """Returns a command that shows the members of a replicated queue, of either type."""
    return Command(
        f"{name} queue",
        text,
        tools=(QUEUES, DIAGNOSTICS),
        switches=(VHOST,),
        formatter="pretty_table",
        banner=f"Status of {subject} {{queue}} on node {{node}} ...",
        request=Request("GET", "queues/quorum/{vhost}/{queue}/status"),
        columns=plain(*REPLICA_COLUMNS),
        problems={404: Problem(UNAVAILABLE, "not_found")},
    )


COMMANDS = (
    Command(
        "add_member queue target",
        "Adds a quorum queue member (replica) on the given node.",
        switches=(VHOST, Switch("membership", str)),
        check=_check_membership,
        banner="Adding a member for queue {queue} on node {target}...",
        request=Request("POST", "queues/quorum/{vhost}/{queue}/replicas/add", _member_in_body),
        problems=NOT_FOUND,
    ),
    Command(
        "delete_member queue target",
        "Removes a quorum queue member (replica) on the given node.",
        switches=(VHOST,),
        banner="Removing a replica of queue {queue} on node {target}...",
        request=Request("DELETE", "queues/quorum/{vhost}/{queue}/replicas/delete", _node_in_body),
        problems=NOT_FOUND,
    ),
    Command(
        "transfer_leadership queue target",
        "Makes a member the leader of a replicated queue.",
        switches=(VHOST,),
        banner="Transferring leadership of quorum queue {queue} to node {target}...",
        request=Request("POST", "queues/quorum/{vhost}/{queue}/leader/transfer", _node_in_body),
        problems=NOT_FOUND,
    ),
    Command(
        "grow target strategy",
        "Grows quorum queue clusters by adding a member (replica) on the specified node "
        "for all matching queues",
        switches=SELECTION,
        check=_check_strategy,
        banner="Growing queues on {target}",
        run=_grow,
        problems=NOT_FOUND,
    ),
    Command(
        "grow_to_count count strategy",
        "Adds members to all matching queues that have fewer than the given count",
        switches=SELECTION,
        check=_check_count,
        banner="Growing queues to {count} members",
        run=_grow_to_count,
    ),
    Command(
        "shrink target",
        "Shrinks quorum queue clusters by removing any members (replicas) on the given node.",
        switches=SELECTION,
        check=_check_selection,
        banner="Shrinking queues on {target}...",
        run=_shrink,
        problems=NOT_FOUND,
    ),
    Command(
        "rebalance type",
        "Rebalances leaders of replicated queues: all, classic, quorum or stream.",
        switches=(
            Switch("vhost-pattern", str),
            Switch("queue-pattern", str),
            Switch("by", str),
            Switch("rate", int),
            Switch("dry-run"),
        ),
        check=_check_rebalance,
        run=rebalance,
    ),
    _members_status("quorum_status", "Displays quorum status of a quorum queue", "queue"),
    _members_status("stream_status", "Displays the status of a stream", "stream"),
    Command(
        "peek queue position",
        "Shows the message at a position of a quorum queue, counted from 1; it stays",
        switches=(VHOST,),
        check=_check_position,
        banner="Peeking at quorum queue {queue} at position {position}...",
        run=_peek,
        missing=(
            (
                "queues/{vhost}/{queue}",
                Problem(DATA, "Target queue was not found in virtual host '{vhost}'"),
            ),
        ),
        problems={404: Problem(DATA, "Target queue does not have a message at that position")},
    ),
    Command(
        "reclaim_quorum_memory queue",
        "Empties the write-ahead logs of a quorum queue's nodes and gives its memory back",
        tools=(QUEUES, DIAGNOSTICS),
        switches=(VHOST,),
        banner="Will flush Raft WAL of quorum queue {queue} ...",
        request=Request("POST", "convoy/queues/{vhost}/{queue}/memory/reclaim"),
        problems=NOT_FOUND,
    ),
    Command(
        "force_checkpoint",
        "Has all members of the matching queues save a snapshot",
        switches=SELECTION,
        check=_check_selection,
        banner="Forcing checkpoint for all matching quorum queues...",
        run=_force_checkpoint,
    ),
    Command(
        "force_boot",
        "Opens mirrored queues from the copies that are there, without nodes that do not run",
        tools=(CTL,),
        banner="Opening mirrored queues without nodes that do not run ...",
        run=_force_boot,
    ),
    Command(
        "list_scheduled queue",
        "Lists messages of a quorum queue that wait for a time, the next first",
        switches=(VHOST, Switch("limit", int)),
        check=_check_limit,
        banner="Listing messages that wait in queue {queue} ...",
        run=_list_scheduled,
        problems=NOT_FOUND,
    ),
    Command(
        "cancel_scheduled queue id*",
        "Drops messages of a quorum queue that wait for a time, by their ids",
        switches=(VHOST,),
        check=_check_ids,
        banner="Cancelling messages that wait in queue {queue} ...",
        run=_cancel_scheduled,
        problems=NOT_FOUND,
    ),
    Command(
        "migrate queue",
        "Migrates a queue, with clients and bindings, to another type under its name",
        switches=(
            Switch("to", str),
            Switch("pattern"),
            Switch("dry-run"),
            Switch("drop-arguments"),
            Switch("rate", int),
            VHOST,
        ),
        check=_check_migrate,
        banner="Migrating queue {queue} ...",
        run=_migrate,
        problems=NOT_FOUND,
    ),
    Command(
        "set_prefetch queue consumer_tag prefetch_count",
        "Changes the prefetch of a consumer that runs; 0 = no limit",
        switches=(VHOST,),
        check=_check_prefetch,
        banner="Setting the prefetch of consumer {consumer_tag} of queue {queue} to "
        "{prefetch_count}...",
        request=Request(
            "PUT", "convoy/consumers/{vhost}/{queue}/{consumer_tag}/prefetch", _prefetch_in_body
        ),
        problems=NOT_FOUND,
    ),
)
