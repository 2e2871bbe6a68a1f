"""`convoy queues …` and `convoy upgrade …`: members, leaders and drained nodes.

Banners, tables and exit codes are those of rabbitmq-queues and rabbitmq-upgrade."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

import typer

from convoymq.cli.cluster import call
from convoymq.cli.output import Format, FormatOption, print_json
from convoymq.model.json import Json

EXIT_USAGE = 64
EXIT_DATA = 65
EXIT_UNAVAILABLE = 69
TIMEOUT_S = 600.0
"""A command for many queues answers when all are done."""
POLL_S = 0.2
STATUS_COLUMNS = (
    "Node Name",
    "Raft State",
    "Membership",
    "Last Log Index",
    "Last Written",
    "Last Applied",
    "Commit Index",
    "Snapshot Index",
    "Term",
    "Machine Version",
)

upgrade_app = typer.Typer(help="Maintenance of a running cluster.", no_args_is_help=True)

UrlOption = Annotated[str, typer.Option("--url", help="HTTP API of any node.")]
UserOption = Annotated[str, typer.Option("--user", help="user:password of an administrator.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No banner.")]
VhostOption = Annotated[str, typer.Option("--vhost", "-p", help="The queue's virtual host.")]
QueueArgument = Annotated[str, typer.Argument(help="Name of the queue.")]
NodeArgument = Annotated[str, typer.Argument(help="Name or number of the node.")]
VhostPatternOption = Annotated[str, typer.Option(help="Only virtual hosts that match.")]
QueuePatternOption = Annotated[str, typer.Option(help="Only queues that match.")]
QueueTypeOption = Annotated[str, typer.Option(help="quorum, stream or all.")]
MembershipOption = Annotated[str, typer.Option(help="promotable, voter or non_voter.")]
ErrorsOnlyOption = Annotated[bool, typer.Option("--errors-only", help="Only what failed.")]
URL_DEFAULT = "http://127.0.0.1:15672"
USER_DEFAULT = "guest:guest"


@dataclass(frozen=True, slots=True)
class Api:
    """The HTTP API of one node."""

    url: str
    user: str

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Json] | None = None,
        missing: str = "not_found",
    ) -> Json:
        """Returns the answer's value; None without one. Ends the command when it is refused.

        Args:
            missing: what is said when what the path names is not there.
        """
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.url.rstrip('/')}/api/{path}"
        try:
            text = call(method, url, TIMEOUT_S, self.user, data)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error, missing) from None
        except OSError as error:
            raise _error(f"{self.url}: {error}", EXIT_UNAVAILABLE) from None
        found: Json = json.loads(text) if text else None
        return found

    def check(self, path: str) -> dict[str, Json]:
        """Returns the answer of a health check, whether it passes or fails. Ends the command when
        there is none."""
        url = f"{self.url.rstrip('/')}/api/health/checks/{path}"
        try:
            text = call("GET", url, TIMEOUT_S, self.user)
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 503:
                    raise _refused(error) from None
                text = error.read()
        except OSError as error:
            raise _error(f"{self.url}: {error}", EXIT_UNAVAILABLE) from None
        found = json.loads(text)
        if not isinstance(found, dict) or "status" not in found:
            raise _error(f"{self.url}: {text.decode(errors='replace')}", EXIT_UNAVAILABLE)
        return found

    def node_name(self) -> str:
        """The node that answers."""
        found = self.call("GET", "overview")
        assert isinstance(found, dict)
        return str(found["node"])


def _refused(error: urllib.error.HTTPError, missing: str = "not_found") -> typer.Exit:
    try:
        reason = str(json.load(error).get("reason", error))
    except ValueError:
        reason = str(error)
    if error.code == 404:
        return _error(missing if reason == "Not Found" else reason, EXIT_DATA)
    return _error(reason, EXIT_USAGE if error.code == 401 else EXIT_UNAVAILABLE)


def _error(reason: str, code: int) -> typer.Exit:
    print(f"Error:\n{reason}", file=sys.stderr)
    return typer.Exit(code)


def _banner(text: str, quiet: bool, format_: Format = Format.TABLE) -> None:
    if not quiet and format_ is Format.TABLE:
        print(text, flush=True)


def _print_rows(columns: list[str], rows: Json, format_: Format) -> None:
    """Tab-separated, with a row of headings, as the original prints; or JSON."""
    assert isinstance(rows, list)
    if format_ is Format.JSON:
        print_json(rows)
        return
    print("\t".join(columns))
    for row in rows:
        assert isinstance(row, dict)
        print("\t".join(str(row.get(column, "")) for column in columns))


def _show_changes(
    rows: Json,
    errors_only: bool,
    format_: Format,
    columns: tuple[str, ...] = ("vhost", "name", "size", "result"),
) -> None:
    """The table of a command for many queues. Exits with 69 when one of them failed."""
    assert isinstance(rows, list)
    failed = [row for row in rows if isinstance(row, dict) and row.get("result") != "ok"]
    shown: Json = list(failed) if errors_only else rows
    _print_rows(list(columns), shown, format_)
    if failed:
        raise typer.Exit(EXIT_UNAVAILABLE)


def _queue_path(vhost: str, name: str) -> str:
    return f"queues/quorum/{quote(vhost, safe='')}/{quote(name, safe='')}"


def _selection(vhost_pattern: str, queue_pattern: str, queue_type: str) -> dict[str, Json]:
    return {
        "vhost_pattern": vhost_pattern,
        "queue_pattern": queue_pattern,
        "queue_type": queue_type,
    }


def add_member(
    queue: QueueArgument,
    node: NodeArgument,
    vhost: VhostOption = "/",
    membership: MembershipOption = "promotable",
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
) -> None:
    """Add a member to a replicated queue."""
    _banner(f"Adding a member for queue {queue} on node {node}...", quiet)
    body: dict[str, Json] = {"node": node, "membership": membership}
    Api(url, user).call("POST", f"{_queue_path(vhost, queue)}/replicas/add", body)


def delete_member(
    queue: QueueArgument,
    node: NodeArgument,
    vhost: VhostOption = "/",
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
) -> None:
    """Take a member out of a replicated queue. The last one is refused."""
    _banner(f"Removing a replica of queue {queue} on node {node}...", quiet)
    path = f"{_queue_path(vhost, queue)}/replicas/delete"
    Api(url, user).call("DELETE", path, {"node": node})


def transfer_leadership(
    queue: QueueArgument,
    node: NodeArgument,
    vhost: VhostOption = "/",
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
) -> None:
    """Make a member the leader of a replicated queue."""
    _banner(f"Transferring leadership of quorum queue {queue} to node {node}...", quiet)
    path = f"{_queue_path(vhost, queue)}/leader/transfer"
    Api(url, user).call("POST", path, {"node": node})


def grow(
    node: NodeArgument,
    strategy: Annotated[str, typer.Argument(help="all, or even: queues with 2, 4, … members.")],
    vhost_pattern: VhostPatternOption = ".*",
    queue_pattern: QueuePatternOption = ".*",
    queue_type: QueueTypeOption = "quorum",
    membership: MembershipOption = "promotable",
    errors_only: ErrorsOnlyOption = False,
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Add a member on a node to all queues that have none there."""
    _banner(f"Growing queues on {node}", quiet, format_)
    rows = Api(url, user).call(
        "POST",
        f"queues/quorum/replicas/on/{quote(node, safe='')}/grow",
        {
            "strategy": strategy,
            **_selection(vhost_pattern, queue_pattern, queue_type),
            "membership": membership,
        },
    )
    _show_changes(rows, errors_only, format_)


def grow_to_count(
    count: Annotated[int, typer.Argument(help="Members that each queue shall have.")],
    strategy: Annotated[str, typer.Argument(help="all, or even: queues with 2, 4, … members.")],
    vhost_pattern: VhostPatternOption = ".*",
    queue_pattern: QueuePatternOption = ".*",
    queue_type: QueueTypeOption = "quorum",
    membership: MembershipOption = "promotable",
    errors_only: ErrorsOnlyOption = False,
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Add members to all queues that have fewer."""
    _banner(f"Growing queues to {count} members", quiet, format_)
    rows = Api(url, user).call(
        "POST",
        "queues/quorum/replicas/grow_to_count",
        {
            "count": count,
            "strategy": strategy,
            **_selection(vhost_pattern, queue_pattern, queue_type),
            "membership": membership,
        },
    )
    _show_changes(rows, errors_only, format_)


def shrink(
    node: NodeArgument,
    vhost_pattern: VhostPatternOption = ".*",
    queue_pattern: QueuePatternOption = ".*",
    queue_type: QueueTypeOption = "quorum",
    errors_only: ErrorsOnlyOption = False,
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Take a node out of all queues that it is a member of."""
    _banner(f"Shrinking queues on {node}...", quiet, format_)
    rows = Api(url, user).call(
        "DELETE",
        f"queues/quorum/replicas/on/{quote(node, safe='')}/shrink",
        _selection(vhost_pattern, queue_pattern, queue_type),
    )
    _show_changes(rows, errors_only, format_)


def rebalance(
    type_: Annotated[str, typer.Argument(metavar="TYPE", help="all, quorum or stream.")],
    vhost_pattern: VhostPatternOption = ".*",
    queue_pattern: QueuePatternOption = ".*",
    by: Annotated[str, typer.Option(help="count of leaders, or load: messages.")] = "count",
    rate: Annotated[int, typer.Option(help="Leaderships moved per second at most.")] = 50,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would move.")] = False,
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Spread the leaders of replicated queues over the nodes."""
    api = Api(url, user)
    body: dict[str, Json] = {
        "type": type_,
        "vhost_pattern": vhost_pattern,
        "queue_pattern": queue_pattern,
        "by": by,
        "rate": rate,
        "dry_run": dry_run,
    }
    if dry_run:
        moves = api.call("POST", "rebalance/queues", body)
        _print_rows(["vhost", "name", "from", "to"], moves, format_)
        return
    _banner("Re-balancing leaders of quorum queues...", quiet, format_)
    api.call("POST", "rebalance/queues", body)
    while True:
        found = api.call("GET", "convoy/rebalance")
        assert isinstance(found, dict)
        if not found["running"]:
            break
        time.sleep(POLL_S)
    leaders = found["leaders"]
    assert isinstance(leaders, dict)
    rows: Json = [
        {"Node name": name, "Number of quorum queues": count} for name, count in leaders.items()
    ]
    _print_rows(["Node name", "Number of quorum queues"], rows, format_)
    if found["ended"] != "done" or found["failed"]:
        raise _error(str(found["failed"] or found["ended"] or "interrupted"), EXIT_UNAVAILABLE)


def quorum_status(
    queue: QueueArgument,
    vhost: VhostOption = "/",
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Show the state of each member of a replicated queue."""
    api = Api(url, user)
    if not quiet and format_ is Format.TABLE:
        _banner(f"Status of queue {queue} on node {api.node_name()} ...", quiet, format_)
    rows = api.call("GET", f"{_queue_path(vhost, queue)}/status")
    _print_rows(list(STATUS_COLUMNS), rows, format_)


def peek(
    queue: QueueArgument,
    position: Annotated[int, typer.Argument(metavar="POS", help="From 1 on.", min=1)],
    vhost: VhostOption = "/",
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Show a ready message of a quorum queue, which stays where it is."""
    _banner(f"Peeking at quorum queue {queue} at position {position}...", quiet, format_)
    found = Api(url, user).call(
        "GET",
        f"{_queue_path(vhost, queue)}/peek/{position}",
        missing=f"Target queue was not found in virtual host '{vhost}'",
    )
    assert isinstance(found, dict)
    rows: Json = [
        {"keys": key, "values": json.dumps(value) if isinstance(value, dict | list) else value}
        for key, value in found.items()
    ]
    _print_rows(["keys", "values"], rows, format_)


def reclaim_quorum_memory(
    queue: QueueArgument,
    vhost: VhostOption = "/",
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
) -> None:
    """Empty the write-ahead logs of a queue's nodes, and give its memory back."""
    _banner(f"Will flush Raft WAL of quorum queue {queue} ...", quiet)
    path = f"convoy/queues/{quote(vhost, safe='')}/{quote(queue, safe='')}/memory/reclaim"
    Api(url, user).call("POST", path)


def force_checkpoint(
    vhost_pattern: VhostPatternOption = ".*",
    queue_pattern: QueuePatternOption = ".*",
    queue_type: QueueTypeOption = "quorum",
    errors_only: ErrorsOnlyOption = False,
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Have all members of the selected queues save a snapshot now."""
    _banner("Forcing checkpoint for all matching quorum queues...", quiet, format_)
    body = _selection(vhost_pattern, queue_pattern, queue_type)
    rows = Api(url, user).call("POST", "convoy/queues/checkpoint", body)
    _show_changes(rows, errors_only, format_, ("vhost", "name", "result"))


def _show_check(
    found: dict[str, Json], passed: str, message: str, lines: list[str], format_: Format
) -> None:
    """What a health check of queues says. Exits with 69 when it failed."""
    failed = found["status"] != "ok"
    if format_ is Format.JSON:
        if failed:
            print_json({"result": "error", "queues": found.get("queues", []), "message": message})
        else:
            print_json({"result": "ok", "message": passed} if passed else {"result": "ok"})
    elif failed:
        print("\n".join(lines or [message]), file=sys.stderr)
    else:
        print(passed)
    if failed:
        raise typer.Exit(EXIT_UNAVAILABLE)


def _names(found: dict[str, Json]) -> list[str]:
    queues = found.get("queues", [])
    assert isinstance(queues, list)
    return [str(row["readable_name"]) for row in queues if isinstance(row, dict)]


def check_if_node_is_quorum_critical(
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Fail while queues would become unavailable if the node at --url stopped."""
    api = Api(url, user)
    node = api.node_name()
    _banner(f"Checking if node {node} is critical for quorum of any queues/streams ...", quiet,
            format_)  # fmt: skip
    found = api.check("node-is-quorum-critical")
    passed = f"Node {node} reported no queues/streams with minimum quorum"
    if found.get("reason") == "single node cluster":
        passed = (
            f"Node {node} seems to be the only one in a single node cluster, the check does not "
            "apply"
        )
    elif format_ is Format.JSON:
        passed = ""
    _show_check(
        found,
        passed,
        f"Node {node} reported local queues with minimum online quorum",
        [f"{name} will become unavailable if node {node} stops" for name in _names(found)],
        format_,
    )


def check_if_new_quorum_queue_replicas_have_finished_initial_sync(
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Fail while new replicas on the node at --url have no vote yet."""
    api = Api(url, user)
    node = api.node_name()
    _banner(f"Checking if node {node} runs promotable replicas of any queues ...", quiet, format_)
    found = api.check("quorum-queue-replicas-initial-sync")
    _show_check(
        found,
        ""
        if format_ is Format.JSON
        else f"Node {node} reported no queues with promotable replicas",
        f"Node {node} reported local queues promotable replicas",
        [
            f"{name} hasn't finished synchronization with target node {node}."
            for name in _names(found)
        ],
        format_,
    )


def check_for_quorum_queues_without_an_elected_leader(
    pattern: Annotated[str, typer.Argument(help="Only queues whose names match.")] = ".*",
    vhost: VhostOption = "/",
    across_all_vhosts: Annotated[
        bool, typer.Option("--across-all-vhosts", help="In all virtual hosts.")
    ] = False,
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Fail while a quorum queue has no leader, and list such queues."""
    api = Api(url, user)
    node = api.node_name()
    where = "all vhosts" if across_all_vhosts else f"vhost '{vhost}'"
    _banner(f"Checking for quorum queues without an elected leader that match '{pattern}' in "
            f"{where} ...", quiet, format_)  # fmt: skip
    scope = "all-vhosts" if across_all_vhosts else f"vhost/{quote(vhost, safe='')}"
    found = api.check(
        f"quorum-queues-without-elected-leaders/{scope}/pattern/{quote(pattern, safe='')}"
    )
    _show_check(
        found,
        "" if format_ is Format.JSON else f"Node {node} reported all quorum queues as healthy",
        f"Node {node} reported unhealthy quorum queues",
        [f"{name} has no elected leader" for name in _names(found)],
        format_,
    )


def set_prefetch(
    queue: Annotated[str, typer.Argument(help="Queue that is consumed.")],
    consumer_tag: Annotated[str, typer.Argument(help="Tag of the consumer.")],
    prefetch_count: Annotated[int, typer.Argument(help="Messages at a time; 0 = no limit.")],
    vhost: VhostOption = "/",
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
) -> None:
    """Change the prefetch of a consumer that runs."""
    _banner(f"Setting the prefetch of consumer {consumer_tag} of queue {queue} to "
            f"{prefetch_count}...", quiet)  # fmt: skip
    place = "/".join(quote(part, safe="") for part in (vhost, queue, consumer_tag))
    body: dict[str, Json] = {"prefetch_count": prefetch_count}
    Api(url, user).call("PUT", f"convoy/consumers/{place}/prefetch", body)


def register(app: typer.Typer) -> None:
    """Adds the commands of `convoy queues`, under the names of rabbitmq-queues."""
    for command in (
        add_member,
        check_for_quorum_queues_without_an_elected_leader,
        check_if_new_quorum_queue_replicas_have_finished_initial_sync,
        check_if_node_is_quorum_critical,
        delete_member,
        force_checkpoint,
        grow,
        grow_to_count,
        peek,
        quorum_status,
        rebalance,
        reclaim_quorum_memory,
        set_prefetch,
        shrink,
        transfer_leadership,
    ):
        app.command(command.__name__)(command)


@upgrade_app.command("drain")
def drain(
    node: NodeArgument,
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
) -> None:
    """Put a node into maintenance mode: no clients, no leaders, until it is revived."""
    _banner(f"Will put node {node} into maintenance mode. The node will no longer serve any "
            "client traffic!", quiet)  # fmt: skip
    Api(url, user).call("POST", f"convoy/nodes/{quote(node, safe='')}/drain")


@upgrade_app.command("revive")
def revive(
    node: NodeArgument,
    url: UrlOption = URL_DEFAULT,
    user: UserOption = USER_DEFAULT,
    quiet: QuietOption = False,
) -> None:
    """End `drain`: the node serves clients again."""
    _banner(f"Will revive node {node} from maintenance and make it serve client traffic", quiet)
    Api(url, user).call("POST", f"convoy/nodes/{quote(node, safe='')}/revive")
