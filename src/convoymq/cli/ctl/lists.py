"""Lists of queues, exchanges, bindings, connections, channels and consumers; queues deleted and
purged, connections closed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from convoymq.cli.ctl.arguments import VHOST, Switch
from convoymq.cli.ctl.command import (
    CTL,
    DIAGNOSTICS,
    Columns,
    Command,
    Invocation,
    Request,
    Row,
    dig,
    plain,
)
from convoymq.cli.ctl.failures import UNAVAILABLE, USAGE, Failure, Problem
from convoymq.cli.ctl.formatting import Table, Tuple
from convoymq.cli.ctl.outputs import Output, Text

LIST_TIMEOUT_S = 60
"""Time-out for a list of queues that RabbitMQ's tools print."""
OFFLINE_STATES = frozenset(("down", "minority", "crashed", "stopped"))
BOTH = (CTL, DIAGNOSTICS)


def _table(name: str) -> Columns:
    def read(row: Row) -> object:
        value = row.get(name)
        return Table(value if isinstance(value, dict) else {})

    return {name: read}


def _protocol(row: Row) -> object:
    """`{0,9,1}` as RabbitMQ prints it."""
    name = str(row.get("protocol", ""))
    digits = name.removeprefix("AMQP ").split("-")
    return Tuple(map(int, digits)) if all(map(str.isdecimal, digits)) else name


def _persistent(name: str) -> Callable[[Row], object]:
    """Returns a reader of how much of a queue is on disk: everything in a replicated one, nothing
    in a transient one. Durable classic queues do not count it: nothing is shown."""

    def read(row: Row) -> object:
        if row.get("type") != "classic":
            return row.get(name)
        return None if row.get("durable") else 0

    return read


def _nothing(_row: Row) -> object:
    """Shows nothing, as RabbitMQ for quorum queues and streams; not known of classic queues."""
    return None


EXCLUSIVE_TAG = "exclusive_consumer_tag"
QUEUE_COLUMNS: Columns = {
    **plain("name", "type", "durable", "auto_delete", "exclusive"),
    **_table("arguments"),
    **plain("state", "policy", "operator_policy", "rabbitmq_compatibility"),
    **_table("effective_policy_definition"),
    **plain("leader", "members", "online", "node", "vhost"),
    **plain("messages", "messages_ready", "messages_unacknowledged"),
    **plain("message_bytes", "message_bytes_ready", "message_bytes_unacknowledged"),
    **plain("messages_dlx", "message_bytes_dlx", "dead_letter_strategy", "dead_letter_warning"),
    **plain("messages_delayed", "message_bytes_delayed", "messages_deduplicated"),
    **plain("messages_blocked", "message_bytes_blocked"),
    **plain("deduplication_ids", "deduplication_bytes"),
    **_table("messages_by_priority"),
    **_table("effective_settings"),
    **_table("slave_nodes"),
    **_table("synchronised_slave_nodes"),
    **_table("slave_pids"),
    **_table("synchronised_slave_pids"),
    **plain("sync_messages"),
    **plain("consumers", "memory", "single_active_consumer_tag", EXCLUSIVE_TAG, "delivery_limit"),
    **plain("messages_ram", "messages_ready_ram", "messages_unacknowledged_ram"),
    **plain("message_bytes_ram", "messages_paged_out", "message_bytes_paged_out"),
    **_table("backing_queue_status"),
    "messages_persistent": _persistent("messages"),
    "message_bytes_persistent": _persistent("message_bytes"),
    "head_message_timestamp": _nothing,
    **plain("consumer_utilisation", "consumer_capacity", "user_who_performed_action"),
}
EXCHANGE_COLUMNS: Columns = {
    **plain("name", "type", "durable", "auto_delete", "internal"),
    **_table("arguments"),
    **plain("policy", "user_who_performed_action"),
}
BINDING_COLUMNS: Columns = {
    "source_name": "source",
    "source_kind": lambda _row: "exchange",
    "destination_name": "destination",
    "destination_kind": "destination_type",
    "routing_key": "routing_key",
    **_table("arguments"),
    "vhost": "vhost",
}
CONNECTION_COLUMNS: Columns = {
    # There are no Erlang processes: a connection is known by its name.
    "pid": "name",
    **plain("name", "node", "port", "host", "peer_port", "peer_host", "ssl"),
    "protocol": _protocol,
    **plain("auth_mechanism", "user", "vhost", "timeout", "frame_max", "channel_max"),
    **_table("client_properties"),
    **plain("connected_at", "recv_oct", "send_oct", "send_pend", "state", "channels"),
    **plain("user_provided_name", "type", "container_id"),
}
CHANNEL_COLUMNS: Columns = {
    "pid": "name",
    "connection": "connection_details.name",
    **plain("name", "number", "user", "vhost", "node", "transactional", "confirm"),
    **plain("consumer_count", "messages_unacknowledged", "messages_unconfirmed"),
    **plain("prefetch_count", "global_prefetch_count", "state"),
}
CONSUMER_COLUMNS: Columns = {
    "queue_name": "queue.name",
    "channel_pid": "channel_details.name",
    **plain("consumer_tag", "ack_required", "prefetch_count", "active"),
    **_table("arguments"),
    **plain("activity_status", "exclusive"),
}


def _announce_queues(invocation: Invocation) -> None:
    """The time-out that the banner shows."""
    invocation.words["timeout"] = f"{float(invocation.value('timeout', LIST_TIMEOUT_S)):.1f}"


def _queue_shown(invocation: Invocation, row: Row) -> bool:
    offline = row.get("state") in OFFLINE_STATES
    if invocation.flag("online") and not invocation.flag("offline") and offline:
        return False
    if invocation.flag("offline") and not invocation.flag("online") and not offline:
        return False
    return not invocation.flag("local") or row.get("node") == invocation.node


def _add_exclusive_tags(invocation: Invocation, columns: Sequence[str], rows: list[Row]) -> None:
    """Tags of exclusive consumers, which only the list of consumers has."""
    if EXCLUSIVE_TAG not in columns or not rows:
        return
    tags = {
        dig(consumer, "queue.name"): consumer["consumer_tag"]
        for consumer in invocation.get("consumers/{vhost}")
        if consumer.get("exclusive")
    }
    for row in rows:
        row[EXCLUSIVE_TAG] = tags.get(row["name"])


def _delete_queue(invocation: Invocation) -> Output:
    conditions = [name for name in ("empty", "unused") if invocation.flag(f"if_{name}")]
    only = " and".join(f" if queue is {name}" for name in conditions)
    invocation.print_banner(
        invocation.text(f"Deleting queue '{{queue}}' on vhost '{{vhost}}'{only} ...")
    )
    row = invocation.one("queues/{vhost}/{queue}")
    if row is None:
        invocation.need_present()
        missing = Failure(USAGE, "No such queue was found")
        raise invocation.named(missing, "queues/{vhost}/{queue}")
    query = "&".join(f"if-{name}=true" for name in conditions)
    answer = invocation.api.request("DELETE", invocation.path("queues/{vhost}/{queue}?") + query)
    if answer.status >= 300:
        raise _not_deleted(answer.reason)
    ready = row.get("messages_ready", 0)
    return Text(f"Queue was successfully deleted with {ready} ready messages")


def _not_deleted(reason: str) -> Failure:
    if reason.endswith("in use"):
        return Failure(USAGE, "The queue is in use")
    if "not empty" in reason:
        return Failure(USAGE, "The queue is not empty")
    if "exclusive access to locked queue" in reason:
        return Failure(USAGE, "The queue is locked or protected from deletion")
    return Failure(UNAVAILABLE, reason)


def _reason(invocation: Invocation) -> dict[str, str]:
    """Returns the header with the explanation; control characters can't be in it."""
    return {"X-Reason": " ".join(invocation.word("explanation").split())}


def _close_connection(invocation: Invocation) -> Output:
    invocation.call("DELETE", "connections/{connection}", headers=_reason(invocation))
    return None


def _close_all_connections(invocation: Invocation) -> Output:
    everywhere = invocation.flag("global")
    if not everywhere:
        invocation.need_present()
    limit = invocation.value("limit", 0)
    many = str(limit) if limit else "all"
    where = (
        f"to node {invocation.node} (across all vhosts)"
        if everywhere
        else f"in vhost {invocation.vhost}"
    )
    reason = invocation.word("explanation")
    invocation.print_banner(f"Closing {many} connections {where}, reason: {reason}...")
    key, value = ("node", invocation.node) if everywhere else ("vhost", invocation.vhost)
    rows = [row for row in invocation.get("connections") if row.get(key) == value]
    closed = 0
    for row in rows[: limit or None]:
        invocation.words["connection"] = str(row["name"])
        answer = invocation.api.request(
            "DELETE", invocation.path("connections/{connection}"), headers=_reason(invocation)
        )
        closed += answer.status < 300
        time.sleep(invocation.value("per_connection_delay", 0) / 1000)
    return Text(f"Closed {closed} connections")


def _close_all_user_connections(invocation: Invocation) -> Output:
    invocation.call("DELETE", "connections/username/{username}", headers=_reason(invocation))
    return None


COMMANDS = (
    Command(
        "list_queues column*",
        "Lists queues and their properties",
        tools=BOTH,
        switches=(VHOST, Switch("online"), Switch("offline"), Switch("local")),
        check=_announce_queues,
        banner="Timeout: {timeout} seconds ...\nListing queues for vhost {vhost} ...",
        request=Request("GET", "queues/{vhost}"),
        columns=QUEUE_COLUMNS,
        shown=("name", "messages"),
        keep=_queue_shown,
        complete=_add_exclusive_tags,
    ),
    Command(
        "list_exchanges column*",
        "Lists exchanges",
        tools=BOTH,
        switches=(VHOST,),
        banner="Listing exchanges for vhost {vhost} ...",
        request=Request("GET", "exchanges/{vhost}"),
        columns=EXCHANGE_COLUMNS,
        shown=("name", "type"),
    ),
    Command(
        "list_bindings column*",
        "Lists all bindings on a vhost",
        tools=BOTH,
        switches=(VHOST,),
        banner="Listing bindings for vhost {vhost}...",
        request=Request("GET", "bindings/{vhost}"),
        columns=BINDING_COLUMNS,
        shown=tuple(name for name in BINDING_COLUMNS if name != "vhost"),
    ),
    Command(
        "list_connections column*",
        "Lists AMQP 0.9.1 and AMQP 1.0 connections",
        tools=BOTH,
        banner="Listing connections ...",
        request=Request("GET", "connections"),
        columns=CONNECTION_COLUMNS,
        shown=("user", "peer_host", "peer_port", "state"),
    ),
    Command(
        "list_channels column*",
        "Lists all channels",
        tools=BOTH,
        banner="Listing channels ...",
        request=Request("GET", "channels"),
        columns=CHANNEL_COLUMNS,
        shown=("pid", "user", "consumer_count", "messages_unacknowledged"),
    ),
    Command(
        "list_consumers column*",
        "Lists all consumers for a vhost",
        tools=BOTH,
        switches=(VHOST,),
        banner="Listing consumers in vhost {vhost} ...",
        request=Request("GET", "consumers/{vhost}"),
        columns=CONSUMER_COLUMNS,
        shown=(
            "queue_name",
            "channel_pid",
            "consumer_tag",
            "ack_required",
            "prefetch_count",
            "active",
            "arguments",
        ),
    ),
    Command(
        "delete_queue queue",
        "Deletes a queue",
        switches=(VHOST, Switch("if-empty", short="e"), Switch("if-unused", short="u")),
        run=_delete_queue,
    ),
    Command(
        "purge_queue queue",
        "Purges a queue (removes all messages in it)",
        switches=(VHOST,),
        banner="Purging queue '{queue}' in vhost '{vhost}' ...",
        request=Request("DELETE", "queues/{vhost}/{queue}/contents"),
        problems={404: Problem(UNAVAILABLE, "not_found")},
    ),
    Command(
        "sync_queue queue",
        "Instructs a mirrored queue with unsynchronised mirrors to synchronise them",
        switches=(VHOST,),
        banner="Synchronising queue '{queue}' in vhost '{vhost}' ...",
        request=Request("POST", "queues/{vhost}/{queue}/actions", lambda _: {"action": "sync"}),
        problems={404: Problem(UNAVAILABLE, "not_found")},
    ),
    Command(
        "cancel_sync_queue queue",
        "Instructs a synchronising mirrored queue to stop synchronising itself",
        switches=(VHOST,),
        banner="Stopping synchronising queue '{queue}' in vhost '{vhost}' ...",
        request=Request(
            "POST", "queues/{vhost}/{queue}/actions", lambda _: {"action": "cancel_sync"}
        ),
        problems={404: Problem(UNAVAILABLE, "not_found")},
    ),
    Command(
        "close_connection connection explanation",
        "Instructs the broker to close the connection of that name",
        banner="Closing connection {connection}, reason: {explanation}...",
        run=_close_connection,
        absent_ok=True,
    ),
    Command(
        "close_all_connections explanation",
        "Instructs the broker to close all connections for the specified vhost or entire node",
        switches=(
            VHOST,
            Switch("global"),
            Switch("limit", int),
            Switch("per-connection-delay", int),
        ),
        run=_close_all_connections,
    ),
    Command(
        "close_all_user_connections username explanation",
        "Instructs the broker to close all connections of the specified user",
        banner="Closing connections of user {username}, reason: {explanation}...",
        run=_close_all_user_connections,
    ),
)
