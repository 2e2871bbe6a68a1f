"""`convoy backup` and `convoy restore`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from convoymq.cli.backup.archive import Archive, Manifest
from convoymq.cli.backup.cluster import Cluster
from convoymq.cli.backup.restoring import Restoring, summary_of
from convoymq.cli.backup.store import open_store
from convoymq.cli.backup.taking import Taking
from convoymq.cli.cluster import DATA_DEFAULT, find_cluster, read_state
from convoymq.cli.output import Format, FormatOption, fail, print_json, show, table
from convoymq.model.errors import BrokerError, Misuse

DIFFERS = 3
"""Exit code: restored, and the numbers of messages differ by now; or queues were left out."""

TargetArgument = Annotated[
    str, typer.Argument(help="Directory, or s3://BUCKET/PREFIX[?endpoint=URL].")
]
DataOption = Annotated[
    Path,
    typer.Option("--data", help="Directory of the local cluster; not needed when only one runs."),
]
UrlOption = Annotated[
    list[str],
    typer.Option("--url", help="HTTP API of a node, instead of a local cluster; repeatable."),
]
UserOption = Annotated[
    str, typer.Option("--user", help="user:password of an administrator; guest:guest without it.")
]
PatienceOption = Annotated[
    float, typer.Option(min=0, help="Seconds to wait for a node or queue that does not answer.")
]


def backup(
    target: TargetArgument,
    data: DataOption = DATA_DEFAULT,
    url: UrlOption = [],  # noqa: B006
    user: UserOption = "",
    keep: Annotated[
        int, typer.Option(min=0, help="Remove all but so many backups afterwards; 0 = none.")
    ] = 0,
    skip_unavailable: Annotated[
        bool,
        typer.Option("--skip-unavailable", help="Leave out queues that cannot be read now."),
    ] = False,
    patience: PatienceOption = 60.0,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Copy definitions and messages of a running cluster; unchanged parts are not copied again."""
    with _refusals():
        store = open_store(target)
        archive = Archive(store)
        cluster = Cluster(_urls(data, url), user, patience)
        with store.alone():
            made = Taking(cluster, archive, _say, skips=skip_unavailable).run()
            removed = archive.prune(keep) if keep else 0
    chunks = sum(len(copy.chunks) for copy in made.copies())
    row = {**summary_of(made), "chunks": chunks, "chunks_copied": archive.copied}
    row |= {"backups_removed": removed}
    left_out = [msgspec.to_builtins(each) for each in made.left_out]
    if format_ is Format.JSON:
        print_json({**row, "left_out": left_out})
    else:
        show(table(["what", "value"], list(map(list, row.items()))))
        if left_out:
            rows = [list(each.values()) for each in left_out]
            show(table(["vhost", "queue", "left out, because"], rows))


def restore(
    target: TargetArgument,
    id_: Annotated[str, typer.Option("--backup", help="Its id; the newest without it.")] = "",
    data: DataOption = DATA_DEFAULT,
    url: UrlOption = [],  # noqa: B006
    user: UserOption = "",
    list_: Annotated[bool, typer.Option("--list", help="List the backups, and end.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Read the whole backup and its checksums, and end.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Delete queues of the backup that have messages.")
    ] = False,
    patience: PatienceOption = 60.0,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Bring a backup into a running cluster, of any nodes, and count what came."""
    with _refusals():
        archive = Archive(open_store(target))
        if list_:
            _show_list(archive, format_)
            return
        manifest = _manifest(archive, target, id_)
        if check:
            damages = archive.check(manifest)
            for text in damages:
                print(f"convoy: {text}", file=sys.stderr)
            if damages:
                raise fail(f"backup {manifest.id} is damaged")
            print(f"backup {manifest.id} is whole: {manifest.messages} messages")
            return
        restoring = Restoring(Cluster(_urls(data, url), user, patience), archive, manifest, _say)
        messages = restoring.run(replace=replace)
    row = {"id": manifest.id, "messages": messages, "differences": restoring.differences}
    if format_ is Format.JSON:
        print_json(row)
    else:
        print(f"restored backup {manifest.id}: {messages} messages")
    for text in restoring.differences:
        print(f"convoy: {text}", file=sys.stderr)
    if restoring.differences:
        raise typer.Exit(DIFFERS)


@contextmanager
def _refusals() -> Iterator[None]:
    """Ends the command with one line for whatever is refused."""
    try:
        yield
    except Misuse as error:
        raise fail(error.text, 2) from None
    except BrokerError as error:
        raise fail(error.text) from None


def _manifest(archive: Archive, target: str, id: str) -> Manifest:
    ids = archive.ids()
    if not ids:
        raise fail(f"{target} has no backup", 4)
    if id and id not in ids:
        raise fail(f"{target} has no backup {id!r}; it has {', '.join(ids[-5:])}", 4)
    return archive.manifest(id or ids[-1])


def _show_list(archive: Archive, format_: Format) -> None:
    rows: list[dict[str, object]] = []
    for id in archive.ids():
        try:
            rows.append(dict(summary_of(archive.manifest(id))))
        except BrokerError as error:
            rows.append({"id": id, "damaged": error.text})
    if format_ is Format.JSON:
        print_json(rows)
        return
    columns = ["id", "cluster", "release", "queues", "topics", "messages", "left_out", "damaged"]
    show(table(columns, [[row.get(column) for column in columns] for row in rows]))


def _urls(data: Path, url: list[str]) -> list[str]:
    if url:
        return url
    found = [node for node in read_state(find_cluster(data)) if node.pid is not None]
    if not found:
        raise fail(f"no node of the cluster in {data} runs; give --url")
    return [f"http://127.0.0.1:{node.http_port}" for node in found]


def _say(line: str) -> None:
    print(f"convoy: {line}", file=sys.stderr, flush=True)
