"""`convoy topics`: command lines, what they ask for, what they print, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.test_ctl import FakeApi, printed

from convoymq.cli.ctl import tools, topics, transport
from convoymq.cli.ctl.command import TOPICS
from convoymq.cli.ctl.main import main
from convoymq.cli.ctl.topic_page import Sample, topic_page
from convoymq.model.json import Json, JsonObject

ORDERS = "topics/%2F/orders"
SPLIT = {"change_id": "c1", "kind": "split", "phase": "done", "base_version": 0, "next_version": 1,
         "attempt": 1, "sources": [0], "targets": [2, 3]}  # fmt: skip
ROWS = [{"pid": 0, "lo": 0, "hi": 512, "node": "n1", "state": "open", "sealed_version": None},
        {"pid": 1, "lo": 512, "hi": 1024, "node": None, "state": "open"}]  # fmt: skip


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    made = FakeApi()
    monkeypatch.setattr(transport, "connect", lambda **_switches: made)
    monkeypatch.setattr(topics, "POLL_S", 0)
    return made


def run(*arguments: str) -> int:
    return main(TOPICS, arguments)


def test_the_commands_are_those_of_the_documentation() -> None:
    assert set(tools.commands_of(TOPICS)) == {
        "create", "delete", "list", "describe", "route", "split", "merge", "move", "changes",
        "abort", "drain", "seal", "declare-lost", "groups", "delete-group", "lag", "seek",
        "accept-loss", "park", "create-group", "losses", "drains",
        "revive", "show", "autoscale", "durations",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (("create", "orders", "--partitions", "4"), ("PUT", ORDERS, {"partitions": 4})),
        (
            ("create", "orders", "--partitions", "4", "--logical", "64", "--mode", "weak"),
            ("PUT", ORDERS, {"partitions": 4, "logical": 64, "mode": "weak"}),
        ),
        (
            (
                "create",
                "orders",
                "--partitions",
                "1",
                "--max-age",
                "7D",
                "--max-length-bytes",
                "9",
                "--stream-max-segment-size-bytes",
                "5",
                "--group-ttl",
                "1h",
            ),
            (
                "PUT",
                ORDERS,
                {
                    "partitions": 1,
                    "max-age": "7D",
                    "max-length-bytes": 9,
                    "stream-max-segment-size-bytes": 5,
                    "group-ttl": "1h",
                },
            ),
        ),
        (("accept-loss", "orders", "g"), ("POST", ORDERS + "/groups/g/accept-loss", None)),
        (("delete", "orders", "--vhost", "a/b"), ("DELETE", "topics/a%2Fb/orders", None)),
        (
            ("declare-lost", "orders", "3"),
            ("POST", ORDERS + "/declare-lost", {"pid": 3}),
        ),
        (
            ("seek", "orders", "g", "--earliest"),
            ("POST", ORDERS + "/groups/g/seek", {"position": "earliest"}),
        ),
        (
            ("seek", "orders", "g", "--time", "1700"),
            ("POST", ORDERS + "/groups/g/seek", {"time": 1700}),
        ),
        (
            ("seek", "orders", "g", "--vector", "0=5, 1=7"),
            ("POST", ORDERS + "/groups/g/seek", {"vector": {"0": 5, "1": 7}}),
        ),
        (
            ("park", "resume", "orders", "g", "k1", "k2"),
            (
                "POST",
                ORDERS + "/groups/g/park/resume",
                {"keys": ["k1", "k2"], "encoding": "string"},
            ),
        ),
        (
            ("park", "skip", "orders", "g", "a2V5", "--base64"),
            ("POST", ORDERS + "/groups/g/park/skip", {"keys": ["a2V5"], "encoding": "base64"}),
        ),
        (
            ("park", "retry", "orders", "g", "k"),
            ("POST", ORDERS + "/groups/g/park/retry", {"keys": ["k"], "encoding": "string"}),
        ),
        (
            ("park", "replace", "orders", "g", "k", "--body", "better"),
            (
                "POST",
                ORDERS + "/groups/g/park/replace",
                {
                    "keys": ["k"],
                    "encoding": "string",
                    "payload": "better",
                    "payload_encoding": "string",
                },
            ),
        ),
        (
            (
                "create",
                "orders",
                "--partitions",
                "1",
                "--autoscale",
                "on",
                "--autoscale-unit",
                "500",
            ),
            ("PUT", ORDERS, {"partitions": 1, "autoscale": "on", "autoscale-unit": 500}),
        ),
        (
            (
                "autoscale",
                "orders",
                "set",
                "--autoscale",
                "on",
                "--autoscale-target-bytes",
                "9",
                "--autoscale-unit",
                "default",
            ),
            (
                "PUT",
                ORDERS + "/autoscale",
                {"autoscale": "on", "autoscale-target-bytes": 9, "autoscale-unit": None},
            ),
        ),
        (("abort", "orders", "c1"), ("DELETE", ORDERS + "/changes/c1", None)),
        (("create-group", "orders", "g"), ("PUT", ORDERS + "/groups/g", {})),
        (
            ("create-group", "orders", "g", "--advance", "dag", "--latest"),
            ("PUT", ORDERS + "/groups/g", {"advance": "dag", "position": "latest"}),
        ),
        (("revive", "n1"), ("DELETE", "convoy/topics/drains/n1", None)),
        (("delete-group", "orders", "g"), ("DELETE", ORDERS + "/groups/g", None)),
    ],
)
def test_what_a_command_asks_for(
    api: FakeApi, arguments: tuple[str, ...], asked: tuple[str, str, Any]
) -> None:
    method, path, body = asked
    api.takes(method, path)
    assert run(*arguments) == 0
    assert api.asked == [(method, path, body)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("create", "orders"), "--partitions N"),
        (("split", "orders", "one"), "a partition is a number, not 'one'"),
        (("split", "orders", "1", "--at", "5,x"), "a cut point is a number, not 'x'"),
        (("merge", "orders", "1"), "two or more"),
        (("merge", "orders", "1", "-2"), "a partition is a number, not '-2'"),
        (("move", "orders", "1"), "--to NODE"),
        (("route", "orders", "--version", "-1"), "a version is a number"),
        (("route", "orders", "--version", "1", "--lineage"), "leave --version out"),
        (("seek", "orders", "g"), "one of --earliest"),
        (("seek", "orders", "g", "--earliest", "--latest"), "one of --earliest"),
        (("create-group", "orders", "g", "--earliest", "--latest"), "one of --earliest"),
        (("seek", "orders", "g", "--vector", "0=1,0=2"), "partition 0 twice"),
        (("seek", "orders", "g", "--vector", "0"), "an offset is a number, not ''"),
        (("declare-lost", "orders", "x"), "a partition is a number"),
        (("park", "drop", "orders", "g"), "action is one of"),
        (("autoscale", "orders", "guess"), "action is one of set, explain"),
        (("autoscale", "orders", "set"), "needs some of --autoscale"),
        (("autoscale", "orders", "explain", "--autoscale", "on"), "no other action"),
        (
            ("autoscale", "orders", "set", "--autoscale-unit", "1s"),
            "--autoscale-unit is a number, not '1s'",
        ),
        (("park", "list", "orders", "g", "k"), "takes no keys"),
        (("park", "resume", "orders", "g"), "take some"),
        (("park", "replace", "orders", "g", "k"), "needs --body"),
        (("park", "skip", "orders", "g", "k", "--body", "b"), "needs --body"),
        (("park", "replace", "orders", "g", "k", "l", "--body", "b"), "takes one key"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_asked(
    api: FakeApi, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str
) -> None:
    assert run(*arguments) == 65
    assert text in printed(capsys)[1]
    assert not api.asked


@pytest.mark.parametrize(
    "arguments",
    [
        ("create", "orders", "--partitions", "many"),
        ("create", "orders", "--partitions", "2", "--mode", "lax"),
        ("create",),
        ("autoscale", "orders"),
        ("describe", "orders", "more"),
    ],
)
def test_wrong_command_lines(
    api: FakeApi, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert run(*arguments) == 64
    assert printed(capsys)[1]
    assert not api.asked


@pytest.mark.parametrize(
    ("status", "exit_code", "code"),
    [
        (400, 65, "BAD_CUT"),
        (404, 65, None),
        (409, 69, "CHANGE_RUNNING"),
        (410, 65, "DATA_EXPIRED"),
        (503, 69, None),
    ],
)
def test_refusals_have_an_exit_code_and_the_reason_of_the_node(
    api: FakeApi,
    capsys: pytest.CaptureFixture[str],
    status: int,
    exit_code: int,
    code: str | None,
) -> None:
    content = {"error": "x", "reason": "because"} | ({"code": code} if code else {})
    api.has(ORDERS + "/split", content, status, "POST")
    assert run("split", "orders", "0") == exit_code
    assert "because" in printed(capsys)[1]
    assert run("split", "orders", "0", "--format", "json") == exit_code
    wanted = {"result": "error", "message": "because"} | ({"code": code} if code else {})
    assert json.loads(printed(capsys)[1]) == wanted


SCALING = {
    "vhost": "/", "name": "orders", "node": "n1", "version": 4, "at_ms": 7, "held": "too soon",
    "policy": {"autoscale": "on", "target_messages": 10.0, "target_bytes": 4e6,
               "partitions_min": 1, "partitions_max": 8, "changes_per_hour": 12, "unit_ms": 60000},
    "decision": "nothing", "rule": "",
    "considered": [{"subject": "split of partition 3", "rule": "load over 2 units is above 5 "
                    "targets", "outcome": "held back: too soon", "inputs": {"load": 6.25}}],
    "partitions": [{"pid": 3, "node": "n2", "age_units": 2.5, "messages": [62.5, 1, 1, 1],
                    "bytes": [1, 1, 1, 1], "is_replicated": False}],
    "groups": [{"group": "g", "cv": 3, "spare_members": 1, "lag_s": {"3": 1.5},
                "drain_rate": {}}],
    "hot": [{"pid": 3, "lp": 9, "keys": ["k"]}],
    "history": [{"time_ms": 1, "decision": "merge of partitions 1 and 2", "rule": "both_small",
                 "change_id": "auto-merge-1", "error": ""}],
}  # fmt: skip


def test_what_the_autoscaler_decides_is_explained(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.has(ORDERS + "/autoscale", SCALING)
    assert run("autoscale", "orders", "explain", "--format", "json") == 0
    assert json.loads(printed(capsys)[0]) == SCALING
    assert run("autoscale", "orders", "explain") == 0
    text = printed(capsys)[0]
    for wanted in (
        "autoscale on, decided by n1, route version 4",
        "unit u = 60 s; targets: 10 messages/s",
        "partition 3 on n2, 2.5 u old: messages/s 62.5 1 1 1",
        "a replica is behind",
        "group g at version 3, spare members 1, lag in s by partition: 3: 1.5",
        "hot: logical partition 9 of partition 3, largest keys: k",
        "(load=6.25): held back: too soon",
        "no change now: too soon",
        "decision: nothing",
        "done: merge of partitions 1 and 2 by rule both_small: auto-merge-1",
    ):
        assert wanted in text
    api.has(ORDERS + "/autoscale", {**SCALING, "at_ms": None})
    assert run("autoscale", "orders", "explain") == 0
    assert "no look was taken yet" in printed(capsys)[0]


def test_routes_and_their_columns(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.has(ORDERS + "/route?", ROWS)
    assert run("route", "orders", "--format", "json") == 0
    found = json.loads(printed(capsys)[0])
    assert found[0] == {"pid": 0, "lo": 0, "hi": 512, "node": "n1", "state": "open"}
    assert found[1]["node"] is None
    api.has(ORDERS + "/route?version=2", ROWS[:1])
    assert run("route", "orders", "--version", "2", "-q") == 0
    assert printed(capsys)[0] == "pid\tlo\thi\tnode\tstate\n0\t0\t512\tn1\topen\n"
    api.has(ORDERS + "/route?lineage=true", ROWS)
    assert run("route", "orders", "--lineage", "--format", "json") == 0
    assert json.loads(printed(capsys)[0])[0]["sealed_version"] is None


@pytest.mark.parametrize(
    ("arguments", "verb", "body"),
    [
        (("split", "orders", "0"), "split", {"pid": 0, "at": []}),
        (("split", "orders", "0", "--at", "100,200"), "split", {"pid": 0, "at": [100, 200]}),
        (("merge", "orders", "0", "1"), "merge", {"pids": [0, 1]}),
        (("move", "orders", "0", "--to", "2"), "move", {"pid": 0, "node": "2"}),
        (("seal", "orders", "0"), "seal", {"pid": 0}),
    ],
)
def test_changes_are_waited_for(
    api: FakeApi,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    verb: str,
    body: Any,
) -> None:
    api.has(f"{ORDERS}/{verb}", {**SPLIT, "phase": "prepared"}, method="POST")
    api.has(ORDERS + "/changes/c1", SPLIT)
    assert run(*arguments, "--format", "json") == 0
    assert json.loads(printed(capsys)[0]) == [SPLIT]
    assert api.asked == [("POST", f"{ORDERS}/{verb}", body)]


def test_a_change_that_does_not_end_in_time(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.has(ORDERS + "/split", {**SPLIT, "phase": "sealing"}, method="POST")
    assert run("split", "orders", "0", "--wait", "0") == 69
    assert "sealing" in printed(capsys)[0]


def test_lists(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"name": "orders", "vhost": "/", "mode": "strict", "logical": 1024, "partitions": 2,
           "version": 0, "groups": ["g"], "change": "c1", "partition_rows": ROWS}  # fmt: skip
    api.has("topics/%2F", [row])
    assert run("list", "--format", "json") == 0
    assert json.loads(printed(capsys)[0])[0]["groups"] == ["g"]
    api.has(ORDERS, row)
    assert run("describe", "orders") == 0
    shown = printed(capsys)[0]
    assert "logical     1024" in shown
    assert "partition_rows" not in shown
    assert run("describe", "orders", "--format", "json") == 0
    assert json.loads(printed(capsys)[0]) == row
    api.has(ORDERS + "/groups", [{"group": "g", "cv": 0}])
    assert run("groups", "orders", "-q") == 0
    assert "g\t0" in printed(capsys)[0]
    api.has("convoy/topics/drains", [{"node": "n1", "state": "read_only", "sealed": 3}])
    assert run("drains", "--format", "json") == 0
    assert json.loads(printed(capsys)[0])[0]["sealed"] == 3
    api.has(ORDERS + "/losses", [{"group": "g", "pid": 0, "end": None}])
    assert run("losses", "orders", "--format", "json") == 0
    assert json.loads(printed(capsys)[0])[0]["end"] is None
    api.has(ORDERS + "/groups/g/lag", [{"pid": 0, "lag": 7}])
    assert run("lag", "orders", "g", "--format", "json") == 0
    assert json.loads(printed(capsys)[0])[0]["lag"] == 7
    api.has(ORDERS + "/groups/g/park", [{"key": "k", "lp": 3}])
    assert run("park", "list", "orders", "g", "--format", "json") == 0
    assert json.loads(printed(capsys)[0])[0]["lp"] == 3


def test_a_page_shows_route_history_rates_and_groups(
    api: FakeApi, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [{"pid": 1, "state": "open", "end_offset": 11}, {"pid": 0, "state": "sealed"}]
    api.has(ORDERS, {"name": "or<ders", "vhost": "/", "version": 1, "logical": 1024,
                     "partitions": 2, "partition_rows": rows})  # fmt: skip
    lineage = [{"pid": 0, "lo": 0, "hi": 1024, "state": "sealed", "created_version": 0,
                "sealed_version": 1},
               {"pid": 1, "lo": 0, "hi": 1023, "state": "open", "created_version": 1,
                "sealed_version": None},
               {"pid": 2, "lo": 1023, "hi": 1024, "state": "open", "created_version": 1,
                "sealed_version": None}]  # fmt: skip
    api.has(ORDERS + "/route?lineage=true", lineage)
    api.has(ORDERS + "/durations",
            [{"change_id": "split-1", "kind": "split", "phase": "done",
              "phases_ms": {"prepared": 10, "targets_ready": 0, "sealing": 25, "sealed": 5,
                            "published": 40}},
             {"change_id": "m<1", "kind": "merge", "phase": "sealed",
              "phases_ms": {"sealing": 20}}])  # fmt: skip
    api.has(ORDERS + "/groups", [{"group": "g&", "cv": 0, "latest": 1}])
    api.has(ORDERS + "/groups/g%26/lag",
            [{"pid": 0, "state": "sealed", "lag": 7, "owner": "m", "waits_for": []},
             {"pid": 1, "state": "open", "lag": None, "owner": "", "waits_for": [0]}])  # fmt: skip
    file = tmp_path / "page.html"
    assert run("show", "orders", "--html", str(file), "--seconds", "0") == 0
    assert str(file) in printed(capsys)[0]
    text = file.read_text()
    drawn, _, rest = text.partition("<h2>Durations of changes, by phase</h2>")
    changed, _, rates = rest.partition("<h2>Messages per second")
    assert (drawn.count("<rect"), rates.count("<td class='bar'>")) == (3, 1), "one has a rate"
    assert changed.count("<rect") == 5 + 5 + 1, "a legend, a part of a bar for each phase"
    bar = 900 - 300 - 80
    assert f"width='{bar * 25 / 80:.1f}'" in changed, "the longest change is as wide as there is"
    assert "<title>split split-1: published 40 ms</title>" in changed
    assert "<td>split-1</td><td>split</td><td>done</td><td>10</td><td>0</td>" in changed
    assert "<td>sealed</td><td>unknown</td><td>unknown</td><td>20</td>" in changed
    assert "merge m&lt;1" in changed
    assert "partition 0: 0 to 1023, sealed, versions 0 to 0" in text
    assert "partition 1: 0 to 1022, open, versions 1 to 1" in text
    assert "<td>g&amp;</td><td>0 of 1</td><td>0</td>" in text
    assert "<td>7</td>" in text
    assert "<td>partition 0</td>" in text
    assert "or&lt;ders" in text
    assert "http" not in text, "the page needs no network"
    assert run("show", "orders", "--html", str(tmp_path / "none" / "p"), "--seconds", "0") == 65
    assert run("show", "orders") == 65


@pytest.mark.parametrize(
    ("arguments", "body"),
    [
        (("split", "orders", "0"), {"pid": 0, "at": []}),
        (("merge", "orders", "0", "1"), {"pids": [0, 1]}),
        (("move", "orders", "0", "--to", "n2"), {"pid": 0, "node": "n2"}),
    ],
)
def test_a_change_may_be_given_its_id(
    api: FakeApi, arguments: tuple[str, ...], body: dict[str, Any]
) -> None:
    path = f"{ORDERS}/{arguments[0]}"
    api.has(path, SPLIT, method="POST")
    assert run(*arguments, "--change-id", "c1") == 0
    assert api.asked == [("POST", path, body | {"change_id": "c1"})]


def test_durations_of_changes_are_listed(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"change_id": "c1", "kind": "split", "phase": "done", "phases_ms": {"prepared": 10}}
    api.has(ORDERS + "/durations", [row])
    assert run("durations", "orders", "--format", "json") == 0
    assert json.loads(printed(capsys)[0]) == [row]


def test_a_long_id_is_cut_beside_its_bar_and_whole_in_the_table() -> None:
    sample = Sample({"name": "t", "vhost": "/"}, {})
    change: JsonObject = {"change_id": "c" * 64, "kind": "move", "phases_ms": {"prepared": 1}}
    text = topic_page([], [], [change], sample, sample, 2.0)
    assert f">move {'c' * 40}…</text>" in text
    assert f"<td>{'c' * 64}</td>" in text


def test_rates_and_the_time_for_a_lag_are_those_between_two_samples() -> None:
    def sample(end: int, watermark: int) -> Sample:
        rows: list[Json] = [{"pid": 4, "state": "open", "end_offset": end}]
        topic: JsonObject = {"name": "t", "vhost": "/", "partition_rows": rows}
        lag: JsonObject = {"pid": 4, "lag": end - watermark, "watermark": watermark}
        return Sample(topic, {"g": [lag]})

    text = topic_page([], [{"group": "g"}], [], sample(100, 10), sample(300, 60), 2.0)
    assert "has seen no change" in text
    assert "<td class='number'>100</td>" in text, "200 messages in 2 s"
    assert "<td>240</td><td>9.6</td>" in text, "240 messages at 25 a second"
    still = topic_page([], [{"group": "g"}], [], sample(100, 10), sample(100, 10), 2.0)
    assert "<td>90</td><td>unknown</td>" in still


def test_a_drain_fails_when_a_partition_stays(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"vhost": "/", "topic": "orders", "pid": 1, "to_pid": 4, "node": "n2", "error": ""}
    api.has("topics/drain", [row], method="POST")
    assert run("drain", "n1", "--format", "json") == 0
    assert api.asked[-1] == ("POST", "topics/drain", {"node": "n1"})
    assert json.loads(printed(capsys)[0]) == [row]
    api.has("topics/drain", [row | {"error": "no"}], method="POST")
    assert run("drain", "n1") == 69


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("help") == 0
    assert "declare-lost" in printed(capsys)[0]
    assert run("--version") == 0
    assert printed(capsys)[0].count(".") >= 2
    for name, command in tools.commands_of(TOPICS).items():
        assert run("help", name) == 0
        assert command.summary in printed(capsys)[0]
