"""`convoy recover`: shows and carries out the way back from a lost majority."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from convoymq.cli.output import Format, FormatOption, fail, print_json, show, table
from convoymq.model.errors import BrokerError
from convoymq.node.admin_socket import ask

SHOWN_MAX = 200
"""Rows of a table; `--format json` has all."""


class ShownGroup(TypedDict):
    """A group, as a node tells of it."""

    group: int
    vhost: str
    name: str
    members: list[int]
    reachable: list[int]
    outcome: str
    survivor: int
    last_term: int
    last_index: int
    last_time_ms: int
    loss: str


class ShownPlan(TypedDict):
    """A plan, as a node tells of it."""

    cluster: str
    reachable: list[int]
    missing: list[int]
    groups: list[ShownGroup]


class ShownRecovery(TypedDict):
    """A recovery that the cluster has recorded."""

    time_ms: int
    former_id: str
    cluster_id: str
    lost_nodes: list[int]
    groups: list[ShownGroup]


def recover(
    data_dir: Annotated[Path, typer.Option("--data-dir", help="Data directory of a running node.")],
    plan: Annotated[bool, typer.Option(
        "--plan", help="Show what would be done. Changes nothing.")] = False,
    execute: Annotated[bool, typer.Option(
        "--execute", help="Carry the plan out, after a typed confirmation.")] = False,
    history: Annotated[bool, typer.Option(
        "--history", help="What earlier recoveries recorded.")] = False,
    format_: FormatOption = Format.TABLE,
) -> None:  # fmt: skip
    """Bring groups back whose majority is lost for good. What only lost nodes had stays lost."""
    if plan + execute + history != 1:
        raise fail("choose one of --plan, --execute and --history", 2)
    try:
        if history:
            _show_history(ask(data_dir, {"op": "recover.history"}, _progress), format_)
            return
        found = ask(data_dir, {"op": "recover.plan"}, _progress)
        _show_plan(found, format_)
        if not execute:
            raise typer.Exit(3 if found["needed"] else 0)
        if not found["needed"]:
            return
        words = found["confirmation"]
        print(f"To carry this out, type: {words}", file=sys.stderr)
        if sys.stdin.readline().strip() != words:
            raise fail("not confirmed; nothing was changed")
        request = {"op": "recover.execute", "digest": found["digest"], "confirmation": words}
        done = ask(data_dir, request, _progress)
    except BrokerError as error:
        raise fail(error.text) from None
    if format_ is Format.JSON:
        print_json(done)
    else:
        print(
            f"cluster {done['cluster']}: {done['recovered']} groups recovered, {done['lost']} lost"
        )
    for text in done["failed"]:
        print(f"convoy: {text}", file=sys.stderr)
    if done["failed"]:
        raise typer.Exit(1)


def _progress(text: str) -> None:
    print(text, file=sys.stderr)


def _when(time_ms: int) -> str:
    if not time_ms:
        return "–"
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _show_plan(found: ShownPlan, format_: Format) -> None:
    if format_ is Format.JSON:
        print_json(found)
        return
    print(f"cluster   {found['cluster']}")
    print(f"reachable {_numbers(found['reachable'])}")
    print(f"missing   {_numbers(found['missing'])}")
    intact = sum(group["outcome"] == "intact" for group in found["groups"])
    print(f"{intact} of {len(found['groups'])} groups have a majority")
    rows = [
        [
            group["group"],
            group["name"] if not group["vhost"] else f"{group['vhost']} {group['name']}",
            _numbers(group["members"]),
            _numbers(group["reachable"]),
            group["outcome"],
            group["survivor"] or None,
            f"{group['last_term']}/{group['last_index']}",
            _when(group["last_time_ms"]),
            group["loss"],
        ]
        for group in found["groups"]
        if group["outcome"] != "intact"
    ]
    if rows:
        columns = ["group", "queue", "members", "reachable", "plan", "goes on at"]
        columns += ["last term/index", "last entry", "may be lost"]
        show(table(columns, rows[:SHOWN_MAX]))
        if len(rows) > SHOWN_MAX:
            print(f"… and {len(rows) - SHOWN_MAX} more: --format json shows all")


def _show_history(rows: list[ShownRecovery], format_: Format) -> None:
    if format_ is Format.JSON:
        print(json.dumps(rows, indent=1))
        return
    if not rows:
        print("no recovery is recorded")
    for row in rows:
        print(f"{_when(row['time_ms'])}: cluster {row['former_id']} became {row['cluster_id']},"
              f" nodes lost: {_numbers(row['lost_nodes'])}")  # fmt: skip
        for group in row["groups"]:
            print(f"  {group['vhost']} {group['name']} ({group['outcome']}): {group['loss']}")


def _numbers(nodes: list[int]) -> str:
    return ", ".join(map(str, nodes)) or "none"
