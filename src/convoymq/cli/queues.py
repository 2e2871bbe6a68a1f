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

    def call(self, method: str, path: str, body: dict[str, Json] | None = None) -> Json:
        """Returns the answer's value; None without one. Ends the command when it is refused."""
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.url.rstrip('/')}/api/{path}"
        try:
            text = call(method, url, TIMEOUT_S, self.user, data)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error) from None
        except OSError as error:
            raise _error(f"{self.url}: {error}", EXIT_UNAVAILABLE) from None
        found: Json = json.loads(text) if text else None
        return found


def _refused(error: urllib.error.HTTPError) -> typer.Exit:
    try:
        reason = str(json.load(error).get("reason", error))
    except ValueError:
        reason = str(error)
    if error.code == 404:
        return _error("not_found", EXIT_DATA)
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


def _show_changes(rows: Json, errors_only: bool, format_: Format) -> None:
    """The table of a command for many queues. Exits with 69 when one of them failed."""
    assert isinstance(rows, list)
    failed = [row for row in rows if isinstance(row, dict) and row.get("result") != "ok"]
    shown: Json = list(failed) if errors_only else rows
    _print_rows(["vhost", "name", "size", "result"], shown, format_)
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
        delete_member,
        grow,
        grow_to_count,
        rebalance,
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
