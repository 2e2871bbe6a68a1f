"""Parts of the change-data demo: what it takes for out of order, and what the reader sends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package `cdc` lies beside the demo."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in [name for name in sys.modules if name == "cdc" or name.startswith("cdc.")]:
        del sys.modules[name]


def test_every_delivery_is_judged_as_it_came() -> None:
    from cdc.order import Change, Order

    order = Order()
    hand = [Change("a", "4", 0, 9), Change("b", "7", 0, 10)]
    for key, place, offset, redelivered in (
        ("a", "1", 1, False), ("b", "5", 2, False), ("a", "3", 4, False), ("a", "2", 3, False),
        ("a", "3", 4, True), ("a", "3", 4, False), ("a", "4", 9, False), ("b", "5", 7, False),
    ):  # fmt: skip
        order.note(Change(key, place, 0, offset, "1 at port 5", redelivered), hand)
    assert (order.seen, order.violations, order.late) == (5, 1, [3])
    assert (order.repeats_flagged, order.repeats_unflagged, order.stored_twice) == (1, 1, 1)
    assert [order.busy_key(rank) for rank in (0, 1, 9)] == ["a", "b", "b"]
    assert order.changes == [("a", "1"), ("b", "5"), ("a", "3"), ("a", "2"), ("a", "4")]
    assert [str(finding) for finding in order.findings] == [
        "out of order: key a, place 2 (partition 0 offset 3, member 1 at port 5) behind place 3 "
        "(partition 0 offset 4, member 1 at port 5); its member had 2 more in its hands, of the "
        "key place 4",
        "stored twice: key b, place 5 (partition 0 offset 7, member 1 at port 5) behind place 5 "
        "(partition 0 offset 2, member 1 at port 5); its member had 2 more in its hands, of the "
        "key place 7",
    ]


def test_a_source_that_is_read_twice_does_not_pass() -> None:
    """Every change stored a second time, the later one behind: copies of messages, not repeats."""
    from cdc.order import Change, Order

    order = Order()
    for offset, place in enumerate("12341234"):
        order.note(Change("a", place, 0, offset))
    assert (order.seen, order.violations, order.stored_twice) == (4, 0, 4)
    assert len(order.findings) == 4


def test_the_checker_says_what_its_member_had(monkeypatch: pytest.MonkeyPatch) -> None:
    from cdc import order as cdc_order

    class Method:
        delivery_tag = 7
        routing_key = "other"
        redelivered = True

    class Properties:
        headers: ClassVar = {"x-order-key": "t:1", "x-pid": 3, "x-offset": 12}

    body = b'{"op": "u", "source": {"place": "05", "table": "t"}}'
    change = cdc_order.change_of(Method(), Properties(), body, "2 at port 9")
    assert change == cdc_order.Change("t:1", "05", 3, 12, "2 at port 9", True)
    order = cdc_order.Order()
    checker = cdc_order.GroupChecker([1], "topic/g", order)
    settled: list[tuple[str, int]] = []

    class Channel:
        def basic_ack(self, tag: int) -> None:
            settled.append(("ack", tag))

        def basic_reject(self, tag: int, requeue: bool) -> None:
            settled.append(("reject", tag))

    first, second = cdc_order.Change("k", "2", 0, 2), cdc_order.Change("k", "1", 0, 1)
    hand = deque([(1, first), (2, second), (3, first)])
    for checker.poison in ("", "", "k"):
        checker._process(Channel(), hand)
    assert settled == [("ack", 1), ("ack", 2), ("reject", 3)]
    assert checker.rejected == "k"
    (finding,) = order.findings
    assert (finding.change, finding.behind, finding.hand) == (second, first, (first,))


@pytest.mark.parametrize(
    ("told", "fits"),
    [
        ("mariadbd  Ver 10.11.0-MariaDB-1 for debian-linux-gnu", True),
        ("mariadbd  Ver 11.8.3-MariaDB-0+deb13u1 from Debian", True),
        ("mariadbd  Ver 10.5.29-MariaDB-0+deb11u1 for debian-linux-gnu", False),
        ("mariadbd  Ver 8.0.40 for Linux on x86_64", False),
    ],
)
def test_a_database_that_is_too_old_is_refused_by_name(
    tmp_path: Path, told: str, fits: bool
) -> None:
    from cdc.database import Missing, check_version

    server = tmp_path / "mariadbd"
    server.write_text(f"#!/bin/sh\necho '{told}'\n")
    server.chmod(0o755)
    # The script that installs it says the same; with sysbench it would go on no further.
    sysbench = tmp_path / "sysbench"
    sysbench.write_text("#!/bin/sh\n")
    sysbench.chmod(0o755)
    script = subprocess.run(
        [EXAMPLES.parent / "tools" / "install_mariadb.sh"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if fits:
        check_version(str(server))
        assert (script.returncode, script.stderr) == (0, "")
    else:
        with pytest.raises(
            Missing, match=r"needs MariaDB 10\.11 or newer; .*mariadbd is: mariadbd"
        ):
            check_version(str(server))
        assert script.returncode == 1
        assert "the demo needs MariaDB 10.11 or newer" in script.stderr


def test_the_changes_of_the_autoscaler_are_read_from_the_logs_of_nodes(tmp_path: Path) -> None:
    import demo_cdc

    said = {"event": "topics.autoscaled", "decision": "split of partition 0 at 4", "rule": "load_2"}
    for node, lines in {
        1: [{**said, "change": "auto-2", "timestamp": "2026-01-01T00:00:02Z"}],
        2: [
            {**said, "change": "auto-1", "timestamp": "2026-01-01T00:00:01Z"},
            {"event": "link.up"},
        ],
    }.items():
        log = tmp_path / f"node-{node}" / "convoy.log"
        log.parent.mkdir()
        log.write_text("\n".join(map(json.dumps, lines)) + '\n{"event": "topics.autoscaled", "ch')
    found = demo_cdc.scaled_changes(tmp_path)
    assert [each.change_id for each in found] == ["auto-1", "auto-2"]
    assert found[0].rule == "load_2"


def test_the_page_shows_every_partition(tmp_path: Path) -> None:
    from cdc.order import Change, Order
    from cdc.report import Difference, Event, Found, pauses_of, write_report

    said = {"event": "stored", "time_s": 100.0, "gtid": "0-1-5", "messages": 1, "wait_s": 0.01}
    lines = [said, {**said, "time_s": 101.0, "wait_s": 0.02}, {"event": "follow", "after": ""}]
    log = tmp_path / "reader.log"
    log.write_text(
        "convoy: text\n" + "\n".join(map(json.dumps, lines)) + '\n{"event": "stored", "ti'
    )
    pauses = pauses_of(log)
    assert pauses == [(100.0, 0.01), (101.0, 0.02)]
    lineage = [
        {"pid": 0, "lo": 0, "hi": 8, "created_version": 0, "sealed_version": 1},
        {"pid": 41, "lo": 0, "hi": 4, "created_version": 1, "sealed_version": None},
        {"pid": 42, "lo": 4, "hi": 8, "created_version": 1, "sealed_version": None},
    ]
    topic, modulo = Order(), Order()
    for offset in range(4):
        topic.note(Change("a", str(offset), 0, offset))
    for place in "0213":
        modulo.note(Change("a", place, 0))
    topic.stalls = [(100.2, 0.1)]
    found = Found([Difference("sbtest1", 1000, 999, 1)], topic, modulo, 2, ["sbtest1 <differs>"])
    page = write_report(
        tmp_path / "page.html",
        found,
        [Event(100.5, "split <0>"), Event(100.7, "node 1 was killed", True)],
        lineage,
        pauses,
        [("split of partition 0 at 4", "load_2", "auto-split-1")],
    )
    text = page.read_text()
    assert "<td>split of partition 0 at 4</td><td>load_2</td><td>auto-split-1</td>" in text
    assert text.count("<svg") == 3
    assert "split &lt;0&gt;" in text
    assert "<li class='fault'>node 1 was killed</li>" in text
    assert "<p class='fault'>sbtest1 &lt;differs&gt;</p>" in text
    assert "<td>sbtest1</td><td>1,000</td><td>999</td><td>1</td>" in text
    assert "<td>4</td><td>0</td><td>0</td><td>0</td><td>0</td>" in text, "the topic's row"
    assert "<td>4</td><td>1</td><td>0</td><td>0</td><td>0</td>" in text, "the row of modulo"
    assert "modulo queues: 1 of 4 out of order" in text
    assert_well_formed(text)
    for pid in (41, 42):
        assert f"<!-- {pid} -->" in text


def assert_well_formed(text: str) -> None:
    """Every element that has to be closed is."""
    open_tags: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "br"):
                open_tags.append(tag)

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Checker().feed(text)
    assert not open_tags
