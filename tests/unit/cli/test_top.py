"""`convoy top`: what keys do, what is asked for, what the screen says."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from convoymq.cli.top import HELP_LINE, LISTS, Snapshot, View

QUEUE = {
    "name": "[red]orders", "vhost": "/", "type": "quorum", "leader": "n1", "members": [1, 2, 3],
    "online": [1, 2], "messages_ready": 7, "messages_unacknowledged": 2, "consumers": 1,
    "state": "running", "message_stats": {"publish_details": {"rate": 12.4}},
}  # fmt: skip
OVERVIEW = {
    "cluster_name": "c",
    "object_totals": {"connections": 3, "queues": 1},
    "queue_totals": {"messages_ready": 7, "messages_unacknowledged": 2},
    "message_stats": {"publish_details": {"rate": 12.4}},
}


def screen(view: View, found: Snapshot, count: int = 10) -> str:
    console = Console(width=120, height=30, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(view.render(found, count))
    return console.export_text()


def test_queues_are_shown_with_their_rates_and_members() -> None:
    text = screen(View(), Snapshot(OVERVIEW, [QUEUE], 2))
    assert "c: 3 connections, 1 queues, 7 ready, 2 unacked · in 12/s, out 0/s · 2 replicas" in text
    (row,) = [line.split() for line in text.splitlines() if "[red]orders" in line]
    assert row == ["[red]orders", "/", "quorum", "n1", "2/3", "7", "2", "12", "0", "1", "running"]
    assert "queues by in/s" in text
    assert HELP_LINE in text


def test_a_node_that_does_not_answer_is_named_and_the_last_rows_stay() -> None:
    text = screen(View(), Snapshot(OVERVIEW, [QUEUE], error="http://a: no answer within 5 s"))
    assert "http://a: no answer within 5 s" in text
    assert "[red]orders" in text
    assert "no answer yet" in screen(View(), Snapshot(error="why"))


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ({"running": True}, "running"),
        ({"running": False}, "down"),
        ({"running": True, "mem_alarm": True, "disk_free_alarm": True}, "alarm: mem, disk"),
        ({"running": True, "stale_ms": 4200}, "silent for 4 s"),
        ({"running": True, "being_drained": True}, "drained"),
    ],
)
def test_the_state_of_a_node(row: dict[str, Any], state: str) -> None:
    assert state in screen(View("nodes"), Snapshot(OVERVIEW, [{"name": "n1", **row}]))


def test_keys_choose_list_order_and_rows() -> None:
    view = View()
    assert view.query(10) == (
        "queues?sort=message_stats.publish_details.rate&sort_reverse=true&page=1&page_size=10"
    )
    for key in ("s", "s", "r", "down", "j", "up"):
        assert view.press(key)
    assert (view.order, view.reverse, view.first) == ("ready", False, 1)
    assert view.query(10).endswith("sort=messages_ready&sort_reverse=false&page=1&page_size=11")
    assert view.press("3")
    assert (view.list, view.order, view.first) == ("consumers", "unacked", 0)
    assert view.press("2")
    assert view.query(10) == "nodes"
    for key in ("p", "x", "\x1b"):
        assert view.press(key)
    assert view.paused
    assert "paused" in screen(view, Snapshot())
    assert not any(view.press(key) for key in ("q", "\x03", "\x04"))


def test_orders_come_round_and_more_rows_than_the_api_gives_are_not_asked_for() -> None:
    for name, shown in LISTS.items():
        view = View(name)
        for _ in shown.sorts:
            view.press("s")
        assert view.order == next(iter(shown.sorts))
    assert "page_size=500" in View(first=10_000).query(50)


def test_scrolling_ends_at_the_last_row() -> None:
    view = View(first=99)
    assert "[red]orders" in screen(view, Snapshot(OVERVIEW, [QUEUE]))
    assert view.first == 0
