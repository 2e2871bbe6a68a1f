"""`convoy top`: what a cluster does now, in a terminal.

    fetch ─▶ `Snapshot` ─▶ `View.render` ─▶ screen
                keys ─▶ `View.press` ──┘

`View` decides what is shown; the loop asks a node once an interval and reads keys meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from convoymq.cli.api import base_of, get_json
from convoymq.model.errors import BrokerError
from convoymq.queues.interface import Row

if TYPE_CHECKING:
    from rich.console import RenderableType

ROWS_MAX = 500
"""Rows of a page of the HTTP API."""
ONCE_ROWS = 20
HEAD_LINES = 6
"""Lines of a screen that are not rows."""
ASK_S = 5.0

Column = tuple[str, Callable[[Row], object]]


def _rate(row: Row, *names: str) -> float:
    stats = row.get("message_stats") or {}
    return float(sum((stats.get(f"{name}_details") or {}).get("rate", 0.0) for name in names))


def _size(value: object) -> str:
    number = float(value) if isinstance(value, int | float) else 0.0
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def _members(row: Row) -> str:
    members = row.get("members") or []
    return f"{len(row.get('online') or [])}/{len(members)}" if members else ""


def _share(row: Row) -> str:
    prefetch = int(row.get("prefetch_count") or 0)
    unacked = int(row.get("messages_unacknowledged") or 0)
    return f"{100 * unacked // prefetch} %" if prefetch else ""


def _state(row: Row) -> str:
    if not row.get("running"):
        return "down"
    alarms = [name for name in ("mem", "disk_free") if row.get(f"{name}_alarm")]
    if alarms:
        return "alarm: " + ", ".join(each.removesuffix("_free") for each in alarms)
    if row.get("stale_ms"):
        return f"silent for {int(row['stale_ms']) // 1000} s"
    return "drained" if row.get("being_drained") else "running"


@dataclass(frozen=True, slots=True)
class List:
    """A list of the HTTP API, its columns, and the orders in which it may be shown."""

    path: str
    columns: Sequence[Column]
    sorts: Mapping[str, str]
    """Name of an order -> field of a row."""
    paged: bool = True


RATE = "message_stats.publish_details.rate"
LISTS: Mapping[str, List] = {
    "queues": List(
        "queues",
        (
            ("queue", lambda row: row["name"]),
            ("vhost", lambda row: row["vhost"]),
            ("type", lambda row: row["type"]),
            ("leader", lambda row: row.get("leader") or row.get("node")),
            ("online", _members),
            ("ready", lambda row: int(row.get("messages_ready") or 0)),
            ("unacked", lambda row: int(row.get("messages_unacknowledged") or 0)),
            ("in/s", lambda row: round(_rate(row, "publish"))),
            ("out/s", lambda row: round(_rate(row, "deliver_get"))),
            ("consumers", lambda row: int(row.get("consumers") or 0)),
            ("state", lambda row: row.get("state")),
        ),
        {
            "in/s": RATE,
            "out/s": "message_stats.deliver_get_details.rate",
            "ready": "messages_ready",
            "unacked": "messages_unacknowledged",
            "memory": "memory",
        },
    ),
    "nodes": List(
        "nodes",
        (
            ("node", lambda row: row["name"]),
            ("state", _state),
            ("memory", lambda row: _size(row.get("mem_used"))),
            ("of", lambda row: _size(row.get("mem_limit"))),
            ("disk free", lambda row: _size(row.get("disk_free"))),
            ("files", lambda row: row.get("fd_used")),
            ("connections", lambda row: row.get("connections")),
            ("up", lambda row: f"{int(row.get('uptime') or 0) // 3_600_000} h"),
        ),
        {"node": "name", "memory": "mem_used", "connections": "connections"},
        paged=False,
    ),
    "consumers": List(
        "channels",
        (
            ("channel", lambda row: row["name"]),
            ("user", lambda row: row.get("user")),
            ("consumers", lambda row: int(row.get("consumer_count") or 0)),
            ("prefetch", lambda row: int(row.get("prefetch_count") or 0)),
            ("unacked", lambda row: int(row.get("messages_unacknowledged") or 0)),
            ("of prefetch", _share),
            ("out/s", lambda row: round(_rate(row, "deliver_get"))),
            ("acks/s", lambda row: round(_rate(row, "ack"))),
            ("state", lambda row: row.get("state")),
        ),
        {"unacked": "messages_unacknowledged", "consumers": "consumer_count"},
    ),
}
"""The lists, by name. Slow consumers are those with most unacknowledged messages."""
KEYS = {"1": "queues", "2": "nodes", "3": "consumers"}
HELP_LINE = "1 queues  2 nodes  3 slow consumers  s order  r reverse  ↑↓ rows  p pause  q quit"


@dataclass(slots=True)
class Snapshot:
    """Holds the last answer of a node. `error`: why no newer one came."""

    overview: Row = field(default_factory=dict)
    rows: Sequence[Row] = ()
    behind: int = 0
    error: str = ""


@dataclass(slots=True)
class View:
    """Decides what is shown, and how keys change it."""

    list: str = "queues"
    sort: str = ""
    reverse: bool = True
    first: int = 0
    paused: bool = False

    def press(self, key: str) -> bool:
        """Acts on a key; False: the user wants to end."""
        sorts = list(self.shown.sorts)
        match key:
            case "q" | "\x03" | "\x04":
                return False
            case "s":
                at = sorts.index(self.order)
                self.sort = sorts[(at + 1) % len(sorts)]
            case "r":
                self.reverse = not self.reverse
            case "p":
                self.paused = not self.paused
            case "up" | "k":
                self.first = max(0, self.first - 1)
            case "down" | "j":
                self.first += 1
            case _ if key in KEYS:
                self.list, self.sort, self.first = KEYS[key], "", 0
        return True

    @property
    def shown(self) -> List:
        """Returns the list that is shown."""
        return LISTS[self.list]

    @property
    def order(self) -> str:
        """Returns the name of its order."""
        return self.sort or next(iter(self.shown.sorts))

    def query(self, count: int) -> str:
        """Returns the path of the rows in the HTTP API."""
        if not self.shown.paged:
            return self.shown.path
        sort = {"sort": self.shown.sorts[self.order], "sort_reverse": str(self.reverse).lower()}
        size = min(ROWS_MAX, self.first + count)
        return f"{self.shown.path}?{urlencode({**sort, 'page': 1, 'page_size': size})}"

    def render(self, found: Snapshot, count: int) -> RenderableType:
        """Returns the screen."""
        from rich.console import Group
        from rich.text import Text

        from convoymq.cli.output import table

        rows = found.rows
        if not self.shown.paged:
            key = self.shown.sorts[self.order]
            reverse = self.reverse != (key == "name")
            rows = sorted(rows, key=lambda row: _sortable(row.get(key)), reverse=reverse)
        self.first = min(self.first, max(0, len(rows) - 1))
        visible = rows[self.first : self.first + count]
        cells = [[make(row) for _, make in self.shown.columns] for row in visible]
        made = table([name for name, _ in self.shown.columns], cells)
        made.expand, made.box, made.pad_edge = True, None, False
        head = Text(_head(found), "bold")
        state = f"{self.list} by {self.order}{'' if self.reverse else ', rising'}"
        if self.paused:
            state += " · paused"
        lines: list[RenderableType] = [head, Text(state, "dim")]
        if found.error:
            lines.append(Text(found.error, "red"))
        return Group(*lines, made, Text(HELP_LINE, "dim"))


def _sortable(value: object) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int | float) else (0.0, str(value))


def _head(found: Snapshot) -> str:
    overview = found.overview
    if not overview:
        return "no answer yet"
    totals, queues = overview.get("object_totals", {}), overview.get("queue_totals", {})
    incoming, outgoing = _rate(overview, "publish"), _rate(overview, "deliver_get")
    return (
        f"{overview.get('cluster_name')}: {totals.get('connections', 0)} connections, "
        f"{totals.get('queues', 0)} queues, {queues.get('messages_ready', 0)} ready, "
        f"{queues.get('messages_unacknowledged', 0)} unacked · in {incoming:.0f}/s, "
        f"out {outgoing:.0f}/s · {found.behind} replicas behind"
    )


class Source:
    """Asks nodes of a cluster: the next one when one does not answer."""

    def __init__(self, urls: Sequence[str], user: str) -> None:
        self._bases = [base_of(url, user) for url in urls]

    def take(self, view: View, count: int, before: Snapshot) -> Snapshot:
        """Returns what a node says, or what was said before with the reason."""
        error = ""
        for _ in self._bases:
            base, user = self._bases[0]
            name, _, password = user.partition(":")

            login = name, password
            try:
                rows = get_json(f"{base}/api/{view.query(count)}", ASK_S, *login)
                overview = get_json(f"{base}/api/overview", ASK_S, *login)
                own = get_json(f"{base}/api/convoy/node", ASK_S, *login)
                found = Snapshot(overview, rows.get("items", ()) if view.shown.paged else rows)
                found.behind = int(own.get("replicas_behind") or 0)
                return found
            except (BrokerError, LookupError) as failed:
                error = failed.text if isinstance(failed, BrokerError) else f"{failed}: not found"
                self._bases.append(self._bases.pop(0))
        before.error = error
        return before


def run(urls: Sequence[str], user: str, interval_s: float, view: View) -> None:
    """Shows the view until the user ends it. Raises Misuse."""
    from rich.console import Console
    from rich.live import Live

    source, console, found = Source(urls, user), Console(), Snapshot()
    with _keys() as read_key, Live(console=console, screen=True, auto_refresh=False) as live:
        due = 0.0
        while True:
            count = max(1, console.height - HEAD_LINES)
            if time.monotonic() >= due and not view.paused:
                found = source.take(view, count, found)
                due = time.monotonic() + interval_s
            live.update(view.render(found, count), refresh=True)
            key = read_key(interval_s if view.paused else max(0.0, due - time.monotonic()))
            if key:
                shown = view.query(count)
                if not view.press(key):
                    return
                if view.query(count) != shown:
                    due = 0.0


def once(urls: Sequence[str], user: str, view: View) -> str:
    """Returns one look as JSON: the head, and the list's columns. Raises Misuse, Unavailable."""
    from convoymq.model.errors import Unavailable

    found = Source(urls, user).take(view, ONCE_ROWS, Snapshot())
    if found.error:
        raise Unavailable(found.error)
    rows = [{name: make(row) for name, make in view.shown.columns} for row in found.rows]
    return json.dumps({"cluster": _head(found), view.list: rows[:ONCE_ROWS]}, indent=1)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Makes the terminal give keys at once; gives what waits for one: "" when none comes."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    arrows = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}

    def read_key(seconds: float) -> str:
        ready, _, _ = select.select([terminal], [], [], seconds)
        if not ready:
            return ""
        text = os.read(terminal, 64).decode(errors="replace")
        return arrows.get(text, text[:1]) or "q"

    try:
        tty.setcbreak(terminal)
        yield read_key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
