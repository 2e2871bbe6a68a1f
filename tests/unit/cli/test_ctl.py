"""RabbitMQ's tools: command lines, output formats, exit codes, launchers."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import subprocess
import sys
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S

from convoymq.broker import selection
from convoymq.broker.balance import Strategy
from convoymq.broker.leadership import BY_COUNT, BY_LOAD
from convoymq.broker.membership import MemberKind
from convoymq.cli.api import NoAnswer
from convoymq.cli.ctl import formatting, queues, tools, transport
from convoymq.cli.ctl.arguments import COMMON, VHOST, Switch, bind, parse
from convoymq.cli.ctl.command import CTL, DIAGNOSTICS, QUEUES, UPGRADE
from convoymq.cli.ctl.failures import Failure, Misused
from convoymq.cli.ctl.formatting import Table, Tuple, cell, rows_as, to_json
from convoymq.cli.ctl.main import main
from convoymq.cli.ctl.transport import Answer, NodeState
from convoymq.model.compatibility import COMPATIBLE_VERSION
from convoymq.model.json import Json
from convoymq.node.admin_socket import SOCKET_NAME

NOT_FOUND = Answer(404, {"error": "Object Not Found", "reason": "Not Found"})
QUEUE = {"name": "q", "vhost": "/", "messages": 3, "state": "running", "node": "n1",
         "arguments": {"x-max-length": 5, "x-a": "b"}, "durable": True, "policy": None,
         "members": ["n1", "n2"], "leader": "n1", "messages_dlx": 2, "message_bytes_dlx": 9,
         "dead_letter_strategy": "at_least_once", "messages_by_priority": {"4": 3},
         "effective_settings": {"message-ttl": 5, "dead-letter-exchange": "x"}}  # fmt: skip


class FakeApi:
    """Answers from a table; 404 for what is not in it."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, str, Json]] = []
        self.headers: list[Mapping[str, str]] = []
        self.running = True

    def state(self) -> NodeState:
        return NodeState("n1", self.running)

    def request(
        self, method: str, path: str, body: Json = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        if method != "GET":
            self.asked.append((method, path, body))
        if headers:
            self.headers.append(headers)
        return self.answers.get(f"{method} {path}", NOT_FOUND)

    def has(self, path: str, content: Any, status: int = 200, method: str = "GET") -> None:
        self.answers[f"{method} {path}"] = Answer(status, content)

    def takes(self, method: str, path: str) -> None:
        self.answers[f"{method} {path}"] = Answer(204, None)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    made = FakeApi()
    monkeypatch.setattr(transport, "connect", lambda **_switches: made)
    monkeypatch.delenv("RABBITMQ_NODENAME", raising=False)
    made.has("vhosts/%2F", {"name": "/"})
    return made


def run(*arguments: str, tool: str = CTL) -> int:
    return main(tool, arguments)


def printed(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    found = capsys.readouterr()
    return found.out, found.err


# --- command lines ---------------------------------------------------------------------------


def test_switches_may_stand_anywhere() -> None:
    parsed = parse(["-n", "a", "list_queues", "--vhost=v", "-q", "name"], [*COMMON, VHOST])
    assert parsed.words == ["list_queues", "name"]
    assert parsed.values == {"node": "a", "vhost": "v", "quiet": True}
    assert not parsed.unknown


def test_a_list_of_a_virtual_host_that_there_is_not_is_refused(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.has("parameters", [])
    for name in ("list_queues", "list_exchanges", "list_bindings", "list_consumers",
                 "list_parameters", "list_policies"):  # fmt: skip
        assert run(name, "-p", "none", "-q") == 65
        assert printed(capsys) == ("", "Virtual host 'none' does not exist\n")


def test_a_wrong_command_line_is_shown_as_it_was_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--script-name", "rabbitmqctl", "list_queues", "--bogus", "--user", "u:secret",
             "--url=http://u:secret@h")  # fmt: skip
    assert run(*words) == 64
    err = printed(capsys)[1]
    assert "Arguments given:\n\tlist_queues --bogus --user u:… --url=http://u:…@h\n" in err
    assert "script-name" not in err


def test_what_is_no_switch_of_the_command_is_told() -> None:
    parsed = parse(["x", "--bogus", "-t", "abc", "--formatter", "erlang", "-n"], COMMON)
    assert parsed.unknown == [("--bogus", ""), ("-t", "abc"), ("--formatter", "erlang"), ("-n", "")]


def test_two_dashes_end_the_switches_and_numbers_and_a_dash_are_words() -> None:
    assert parse(["-1", "-", "--", "-n"], COMMON).words == ["-1", "-", "-n"]


def test_arguments_are_bound_by_name() -> None:
    assert bind(("user", "password?"), ["u"]) == ({"user": "u"}, [])
    assert bind(("user", "tag*"), ["u", "a", "b"]) == ({"user": "u"}, ["a", "b"])
    with pytest.raises(Misused, match="not enough"):
        bind(("user", "password"), ["u"])
    with pytest.raises(Misused, match="too many"):
        bind(("user",), ["u", "v"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["list_queues", "--bogus"], "Invalid options for this command:\n--bogus : "),
        (["list_queues", "nosuch,name"], "Info key(s) nosuch are not supported"),
        (["list_users", "extra"], "too many arguments."),
        (["set_policy", "p"], "not enough arguments."),
        (["set_policy", "p", "x", "{}", "--priority", "high"], "--priority : high"),
        (["list_users", "-p", "/"], "-p : "),
    ],
)
def test_a_wrong_command_line_is_answered_with_the_usage(
    api: FakeApi, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert run(*arguments) == 64
    out, err = printed(capsys)
    assert out == ""
    assert err.startswith("Error (argument validation): ")
    assert text in err
    assert f"Arguments given:\n\t{' '.join(arguments)}\n" in err
    assert f"convoy ctl [--node <node>] [--quiet] {arguments[0]}" in err
    assert api.asked == []


def test_an_unknown_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list_queus") == 64
    assert "Did you mean 'list_queues'?" in printed(capsys)[1]
    assert run("zzz") == 64
    assert "Command 'zzz' not found." in printed(capsys)[1]
    assert run() == 64
    assert "Available commands:" in printed(capsys)[1]


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["help"], ["--help"], ["help", "list_queues"], ["list_queues", "--help"]):
        assert run(*arguments) == 0
        assert "Usage" in printed(capsys)[0]
    assert run("--version") == 0
    assert printed(capsys)[0].strip()


def test_the_name_of_the_tool_is_the_one_it_was_called_by(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--script-name", "rabbitmqctl", "add_user") == 64
    assert "\nrabbitmqctl [--node <node>]" in printed(capsys)[1]


@pytest.mark.parametrize("tool", [CTL, QUEUES, DIAGNOSTICS, UPGRADE])
def test_every_command_has_a_help_text_and_does_something(
    tool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, command in tools.commands_of(tool).items():
        assert run("help", name, tool=tool) == 0
        assert command.summary in printed(capsys)[0]
        assert (command.request is None) == (command.run is not None), name
        assert command.shown == () or set(command.shown) <= set(command.columns), name


def test_names_of_commands_are_unique_in_each_tool() -> None:
    for tool in (CTL, QUEUES, DIAGNOSTICS, UPGRADE):
        names = [command.name for command in tools.COMMANDS if tool in command.tools]
        assert len(names) == len(set(names))


# --- formats ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""), (True, "true"), (3, "3"), ("a\tb", "a\\tb"), (["a", "b"], "[a, b]"), ([], "[]"),
        (Table({"x-max-length": 5, "b": "x", "t": {"c": True}}),
         '[{"x-max-length",5},{"b","x"},{"t",[{"c",true}]}]'),
        (Table(), "[]"), (Tuple((0, 9, 1)), "{0,9,1}"), ({"n1": "running"}, "[{n1, running}]"),
        (Table({"n": None, "l": [1, "a"]}), '[{"n",undefined},{"l",[1,"a"]}]'),
        ("a\x1b[31m\r\n\x85\u2028", "a\\x1b[31m\\r\\n\\x85\\u2028"),
        (Table({"a": "\n"}), '[{"a","\\n"}]'),
    ],
)  # fmt: skip
def test_cells_are_written_as_rabbitmq_writes_them(value: object, text: str) -> None:
    assert cell(value) == text


def test_json_has_arguments_with_their_types() -> None:
    table = Table({"i": 5, "l": 1 << 40, "s": "x", "b": True, "d": 1.5, "v": None, "a": [1],
                   "t": {"k": "v"}})  # fmt: skip
    assert json.loads(to_json({"arguments": table, "p": Tuple((0, 9, 1))})) == {
        "arguments": [
            ["i", "signedint", 5], ["l", "long", 1 << 40], ["s", "longstr", "x"],
            ["b", "bool", True], ["d", "double", 1.5], ["v", "void", None],
            ["a", "array", [["signedint", 1]]], ["t", "table", [["k", "longstr", "v"]]],
        ],
        "p": [0, 9, 1],
    }  # fmt: skip


ROWS = [{"a": 1, "b": 'x"y'}, {"a": None, "b": ["p", "q"]}]


@pytest.mark.parametrize(
    ("formatter", "lines"),
    [
        ("table", ["a\tb", '1\tx"y', "\t[p, q]"]),
        ("csv", ['"a","b"', '"1","x""y"', '"","[p, q]"']),
        ("json", ["[", '{"a":1,"b":"x\\"y"}', ',{"a":"","b":["p","q"]}', "]"]),
        ("pretty_table", ["┌───┬──────┐", "│ a │ b    │", "├───┼──────┤", '│ 1 │ x"y  │',
                          "├───┼──────┤", "│   │ p, q │", "└───┴──────┘"]),
    ],
)  # fmt: skip
def test_lists_in_every_format(formatter: str, lines: list[str]) -> None:
    assert list(rows_as(formatter, ("a", "b"), ROWS, headers=True)) == lines


def test_an_empty_list_has_no_headers() -> None:
    assert list(rows_as("table", ("a",), [], headers=True)) == []
    assert list(rows_as("pretty_table", ("a",), [], headers=True)) == []
    assert json.loads("".join(rows_as("json", ("a",), [], headers=True))) == []


def test_formatting_names_what_the_options_allow() -> None:
    formatters = next(switch for switch in COMMON if switch.name == "formatter")
    for name in formatters.choices:
        assert list(formatting.rows_as(name, ("a",), [{"a": 1}], headers=True))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Timeout: 60.0 seconds ...\nListing queues for vhost / ...\nname\tmessages\nq\t3\n"),
        (["-t", "5"], "Timeout: 5.0 seconds ...\nListing queues for vhost / ...\n"
                      "name\tmessages\nq\t3\n"),
        (["-q"], "name\tmessages\nq\t3\n"),
        (["-s"], "q\t3\n"),
        (["-q", "--no-table-headers"], "q\t3\n"),
        (["-s", "messages", "name"], "3\tq\n"),
        (["-s", "messages,name"], "3\tq\n"),
        (["--formatter", "csv"], '"name","messages"\n"q","3"\n'),
        (["--formatter", "json", "arguments"],
         '[\n{"arguments":[["x-max-length","signedint",5],["x-a","longstr","b"]]}\n]\n'),
        (["-s", "arguments", "policy", "members"],
         '[{"x-max-length",5},{"x-a","b"}]\t\t[n1, n2]\n'),
        (["-s", "messages_dlx", "message_bytes_dlx", "dead_letter_strategy", "dead_letter_warning"],
         "2\t9\tat_least_once\t\n"),
        (["-s", "messages_by_priority", "effective_settings"],
         '[{"4",3}]\t[{"message-ttl",5},{"dead-letter-exchange","x"}]\n'),
        (["-s", "--offline"], ""), (["-s", "--online"], "q\t3\n"), (["-s", "--local"], "q\t3\n"),
    ],
)  # fmt: skip
def test_list_queues(
    api: FakeApi, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    api.has("queues/%2F", [QUEUE])
    assert run("list_queues", *arguments) == 0
    assert printed(capsys) == (text, "")


def test_list_queues_shows_what_is_known_of_a_type(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"durable": True, "messages": 3, "message_bytes": 9, "vhost": "/"}
    api.has("queues/%2F", [
        {**common, "name": "q", "type": "quorum"}, {**common, "name": "s", "type": "stream"},
        {**common, "name": "c", "type": "classic"},
        {**common, "name": "t", "type": "classic", "durable": False},
    ])  # fmt: skip
    columns = ("name", "messages_persistent", "message_bytes_persistent",
               "head_message_timestamp", "consumer_utilisation", "consumer_capacity")  # fmt: skip
    assert run("-s", "list_queues", *columns) == 0
    assert printed(capsys)[0].splitlines() == [
        "q\t3\t9\t\t\t", "s\t3\t9\t\t\t", "c\t\t\t\t\t", "t\t0\t0\t\t\t",
    ]  # fmt: skip
    api.has("consumers/%2F", [
        {"queue": {"name": "c", "vhost": "/"}, "consumer_tag": "one", "exclusive": True},
        {"queue": {"name": "q", "vhost": "/"}, "consumer_tag": "two", "exclusive": False},
    ])  # fmt: skip
    assert run("-s", "list_queues", "name,exclusive_consumer_tag") == 0
    assert printed(capsys)[0].splitlines() == ["q\t", "s\t", "c\tone", "t\t"]
    assert run("list_queues", "disk_reads") == 64
    assert run("list_connections", "recv_cnt") == 64


def test_feature_flags_rise_by_themselves(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = {"name": "a_2", "state": "enabled"}, {"name": "b_2", "state": "disabled"}
    api.has("feature-flags", [old, new])
    assert run("enable_feature_flag", "a_2") == 0
    assert printed(capsys) == ('Enabling feature flag "a_2" ...\n', "")
    for name, text in (("all", "b_2: not enabled yet"), ("b_2", "by themselves"), ("c", "unsupp")):
        assert run("enable_feature_flag", name) == 69
        assert text in printed(capsys)[1]
    api.has("feature-flags", [old])
    assert run("-q", "enable_feature_flag", "all") == 0
    printed(capsys)
    api.has("deprecated-features", [{"name": "x", "deprecation_phase": "permitted_by_default"}])
    assert run("-q", "list_deprecated_features") == 0
    assert printed(capsys)[0] == "name\tdeprecation_phase\nx\tpermitted_by_default\n"


def test_names_are_quoted_in_paths(api: FakeApi) -> None:
    api.has("vhosts/a%2Fb%20c", {"name": "a/b c"})
    api.takes("PUT", "policies/a%2Fb%20c/p%2Fq")
    assert run("set_policy", "-p", "a/b c", "p/q", ".*", '{"max-length": 1}', "--priority=2") == 0
    assert api.asked == [
        ("PUT", "policies/a%2Fb%20c/p%2Fq",
         {"pattern": ".*", "definition": {"max-length": 1}, "priority": 2, "apply-to": "all"}),
    ]  # fmt: skip


# --- exit codes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["delete_user", "x"], 67, 'Error:\nUser "x" does not exist\n'),
        (["change_password", "x", "p"], 67, 'Error:\nUser "x" does not exist\n'),
        (["set_user_tags", "x", "t"], 67, 'Error:\nUser "x" does not exist\n'),
        (["set_permissions", "x", "a", "b", "c"], 67, "Error:\nUser x does not exist\n"),
        (["list_user_permissions", "x"], 69, 'Error:\nUser "x" does not exist\n'),
        (["add_user", "guest", "p"], 70, 'Error:\nUser "guest" already exists\n'),
        (["delete_vhost", "x"], 65, "Virtual host 'x' does not exist\n"),
        (["list_permissions", "-p", "x"], 65, "Virtual host 'x' does not exist\n"),
        (["list_policies", "-p", "x"], 65, "Virtual host 'x' does not exist\n"),
        (["set_permissions", "-p", "x", "guest", "a", "b", "c"], 65,
         "Virtual host 'x' does not exist\n"),
        (["clear_policy", "x"], 69, "Error:\nParameter does not exist\n"),
        (["clear_parameter", "c", "x"], 69, "Error:\nParameter does not exist\n"),
        (["purge_queue", "x"], 69, "Error:\nnot_found\n"),
        (["delete_queue", "x"], 64, "Error:\nNo such queue was found\n"),
        (["set_policy", "p", "x", "nojson"], 65,
         "Error:\nJSON decoding error. Reason: Expecting value: line 1 column 1 (char 0)\n"),
        (["delete_queue", "-p", "x", "q"], 65, "Virtual host 'x' does not exist\n"),
        (["forget_cluster_node", "x"], 69, "Error:\nThe node selected is not in the cluster.\n"),
        (["list_queues", "-t", "0"], 75,
         "Error: operation list_queues on node (local) timed out. Timeout value used: 0\n"),
    ],
)  # fmt: skip
def test_exit_codes_and_texts_are_rabbitmqs(
    api: FakeApi, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    api.has("users/guest", {"name": "guest", "tags": []})
    api.has("nodes", [{"name": "n1", "id": 1}])
    assert run(*arguments) == code
    assert printed(capsys)[1] == text


def test_json_has_failures_as_objects(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("delete_user", "x", "--formatter", "json") == 67
    out, err = printed(capsys)
    assert out == ""
    assert json.loads(err) == {"result": "error", "message": 'User "x" does not exist'}


def test_a_refusal_is_told_without_the_code_for_amqp_clients(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = {"error": "bad_request", "reason": "406 PRECONDITION_FAILED - not so"}
    api.has("policies/%2F/p", reason, 400, "PUT")
    assert run("-q", "set_policy", "p", "x", "{}") == 69
    assert printed(capsys) == ("", "Error:\nnot so\n")


@pytest.mark.parametrize(
    ("reason", "code", "text"),
    [
        ("queue 'q' in vhost '/' in use", 64, "The queue is in use"),
        ("queue 'q' in vhost '/' not empty", 64, "The queue is not empty"),
        ("cannot obtain exclusive access to locked queue 'q' in vhost '/'.", 64,
         "The queue is locked or protected from deletion"),
        ("queue 'q' in vhost '/' is a part of topic 't'", 69,
         "queue 'q' in vhost '/' is a part of topic 't'"),
    ],
)  # fmt: skip
def test_why_a_queue_was_not_deleted(
    api: FakeApi, capsys: pytest.CaptureFixture[str], reason: str, code: int, text: str
) -> None:
    api.has("queues/%2F/q", QUEUE)
    refused = {"error": "bad_request", "reason": f"406 PRECONDITION_FAILED - {reason}"}
    api.has("queues/%2F/q?", refused, 400, "DELETE")
    assert run("-q", "delete_queue", "q") == code
    assert printed(capsys)[1] == f"Error:\n{text}\n"
    assert run("delete_queue", "q", "--force") == 64


@pytest.mark.parametrize("kind", ["policy", "operator_policy"])
def test_a_policy_that_is_not_acceptable_is_bad_data(
    api: FakeApi, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    reason = 'Validation failed\n\n[{<<"bogus">>,1}] are not recognised policy settings\n'
    path = "policies" if kind == "policy" else "operator-policies"
    api.has(f"{path}/%2F/p", {"error": "bad_request", "reason": reason}, 400, "PUT")
    assert run("-q", f"set_{kind}", "p", "x", '{"bogus": 1}') == 65
    assert printed(capsys)[1] == f"Error:\n{reason}\n"


# --- single commands -------------------------------------------------------------------------


def test_changing_a_user_keeps_the_rest_of_it(api: FakeApi) -> None:
    api.has("users/u", {"name": "u", "password_hash": "h", "hashing_algorithm": "a", "tags": ["t"]})
    api.takes("PUT", "users/u")
    assert run("-q", "change_password", "u", "new") == 0
    assert run("-q", "set_user_tags", "u", "administrator", "x") == 0
    assert run("-q", "clear_password", "u") == 0
    assert [body for _, _, body in api.asked] == [
        {"password_hash": "h", "hashing_algorithm": "a", "tags": ["t"], "password": "new"},
        {"password_hash": "h", "hashing_algorithm": "a", "tags": ["administrator", "x"]},
        {"password_hash": "", "hashing_algorithm": "a", "tags": ["t"]},
    ]


def test_a_password_may_come_from_standard_input(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.takes("PUT", "users/u")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a secret\n"))
    assert run("-q", "add_user", "u") == 0
    assert api.asked == [("PUT", "users/u", {"password": "a secret", "tags": ""})]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run("-q", "add_user", "u") == 64


def test_a_virtual_host_that_exists_stays_as_it_is(api: FakeApi) -> None:
    assert run("-q", "add_vhost", "/", "--description", "other") == 0
    assert api.asked == []
    api.takes("PUT", "vhosts/v")
    assert run("-q", "add_vhost", "v", "--tags", "a,b", "--default-queue-type", "quorum") == 0
    assert api.asked == [("PUT", "vhosts/v", {"tags": "a,b", "default_queue_type": "quorum"})]


def test_limits_that_are_not_given_are_removed(api: FakeApi) -> None:
    api.has("vhost-limits/%2F", [{"vhost": "/", "value": {"max-queues": 1, "max-connections": 2}}])
    api.takes("PUT", "parameters/vhost-limits/%2F/limits")
    api.takes("DELETE", "vhost-limits/%2F/max-connections")
    assert run("-q", "set_vhost_limits", '{"max-queues": 7}') == 0
    assert [path for _, path, _ in api.asked] == [
        "parameters/vhost-limits/%2F/limits", "vhost-limits/%2F/max-connections"
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["no json", "[1]"])
def test_limits_must_be_a_json_object(api: FakeApi, word: str) -> None:
    assert run("-q", "set_vhost_limits", word) == 69
    assert api.asked == []


def test_closing_connections_goes_by_virtual_host_node_and_limit(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"name": f"c{n}", "vhost": vhost, "node": node}
            for n, (vhost, node) in enumerate([("/", "n1"), ("/", "n2"), ("v", "n1")])]  # fmt: skip
    api.has("connections", rows)
    for row in rows:
        api.takes("DELETE", f"connections/{row['name']}")
    assert run("close_all_connections", "--limit", "1", "good\r\nbye") == 0
    assert printed(capsys)[0].endswith("Closed 1 connections\n")
    assert run("-q", "close_all_connections", "--global", "bye") == 0
    assert [path for _, path, _ in api.asked] == [f"connections/c{n}" for n in (0, 0, 2)]
    assert api.headers[0] == {"X-Reason": "good bye"}


def test_definitions_go_to_a_file_for_the_owner_alone_and_back(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.has("definitions", {"users": []})
    target = tmp_path / "d.json"
    assert run("export_definitions", str(target)) == 0
    assert json.loads(target.read_text()) == {"users": []}
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    printed(capsys)
    assert run("export_definitions", "-") == 0
    assert json.loads(printed(capsys)[0]) == {"users": []}
    api.takes("POST", "definitions")
    assert run("import_definitions", str(target)) == 0
    assert api.asked == [("POST", "definitions", {"users": []})]
    assert run("import_definitions", str(tmp_path / "none")) == 65
    target.write_text("no json")
    assert run("import_definitions", str(target)) == 65
    assert run("export_definitions", str(tmp_path / "none" / "d.json")) == 65


def test_all_policies_that_match_are_listed_the_one_in_force_first(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"vhost": "/", "name": "p", "pattern": "^q", "apply-to": "all", "priority": 7,
           "definition": {"max-length": 5}}  # fmt: skip
    second = {**row, "name": "r", "priority": 0}
    api.has("queues/%2F/q", {"name": "q"})
    api.has("convoy/queues/%2F/q/policies", [row, second])
    api.has("convoy/exchanges/%2F/q/policies", [second])
    command = ("list_policies_that_match", "q")
    assert run(*command, "--formatter", "json", tool=DIAGNOSTICS) == 0
    assert json.loads(printed(capsys)[0]) == {"result": "ok", "policies": [row, second]}
    assert run(*command, "--object-type", "exchange", "-s", "--formatter", "table",
               tool=DIAGNOSTICS) == 0  # fmt: skip
    assert printed(capsys)[0] == '/\tr\t^q\tall\t{"max-length":5}\t0\n'
    assert run(*command, tool=DIAGNOSTICS) == 0
    lines = printed(capsys)[0].splitlines()
    assert lines[0] == "Listing policies that match queue 'q' in vhost '/' ..."
    assert lines[1][0] == "┌"
    api.has("convoy/queues/%2F/q/policies", [])
    assert run(*command, "--formatter", "json", tool=DIAGNOSTICS) == 0
    assert json.loads(printed(capsys)[0]) == {"result": "ok", "policies": []}
    assert run(*command[:1], "x", tool=DIAGNOSTICS) == 65
    assert "queue 'x' does not exist in vhost '/'" in printed(capsys)[1]
    assert run(*command, "--object-type", "user", tool=DIAGNOSTICS) == 65
    assert printed(capsys)[0] == ""


@pytest.mark.parametrize(
    ("command", "code"), [("check_alarms", 69), ("check_local_alarms", 0), ("alarms", 0)]
)
def test_an_alarm_of_another_node_is_not_local(
    api: FakeApi, capsys: pytest.CaptureFixture[str], command: str, code: int
) -> None:
    found = {"status": "failed", "alarms": [{"node": "n2", "resource": "memory"}]}
    api.has("health/checks/alarms", found, 503)
    assert run("-q", command, tool=DIAGNOSTICS) == code
    assert ("Memory alarm on node n2" in "".join(printed(capsys))) == (
        command != "check_local_alarms"
    )


def test_a_node_that_is_starting_is_not_running(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.running = False
    assert run("-q", "ping", tool=DIAGNOSTICS) == 0
    assert run("-q", "is_booting", tool=DIAGNOSTICS) == 0
    assert printed(capsys)[0] == "Ping succeeded\nRabbitMQ on node n1 is booting\n"
    assert run("-q", "check_running", tool=DIAGNOSTICS) == 69
    assert run("await_startup", "-t", "1") == 75


def test_queues_that_would_lose_their_majority_are_named(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.has("nodes", [{"name": "n1"}])
    assert run("check_if_node_is_quorum_critical", tool=QUEUES) == 0
    assert "the check does not apply" in printed(capsys)[0]
    api.has("nodes", [{"name": "n1"}, {"name": "n2"}])
    row = {"readable_name": "queue 'q' in vhost '/'", "name": "q", "virtual_host": "/",
           "type": "quorum"}  # fmt: skip
    api.has("health/checks/node-is-quorum-critical", {"reason": "x", "queues": [row]}, 503)
    assert run("check_if_node_is_quorum_critical", tool=QUEUES) == 69
    assert "queue 'q' in vhost '/' will become unavailable if node n1 stops" in printed(capsys)[1]
    assert run("check_if_node_is_quorum_critical", "--formatter", "json", tool=DIAGNOSTICS) == 69
    found = json.loads(printed(capsys)[1])
    assert (found["result"], found["queues"]) == ("error", [row])
    assert run("await_online_quorum_plus_one", "-t", "1", tool=UPGRADE) == 69
    api.has("health/checks/node-is-quorum-critical", {"status": "ok"})
    assert run("await_online_quorum_plus_one", "-t", "1", tool=UPGRADE) == 0


def test_changes_of_many_queues_are_listed_and_fail_when_one_failed(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"vhost": "/", "name": "a", "size": 2, "result": "ok"},
            {"vhost": "/", "name": "b", "size": 1, "result": "error: no"}]  # fmt: skip
    path = "queues/quorum/replicas/on/n2/shrink"
    api.has(path, rows, method="DELETE")
    assert run("-q", "shrink", "n2", tool=QUEUES) == 69
    assert printed(capsys) == (
        "vhost\tname\tsize\tresult\n/\ta\t2\tok\n/\tb\t1\terror: no\n", ""
    )  # fmt: skip
    assert run("-s", "shrink", "n2", "--errors-only", tool=QUEUES) == 69
    assert printed(capsys)[0] == "/\tb\t1\terror: no\n"
    api.has(path, rows[:1], method="DELETE")
    assert run("shrink", "n2", "--format", "json", tool=QUEUES) == 0
    assert json.loads(printed(capsys)[0]) == rows[:1]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("grow n2 foo", "\"strategy 'foo' is not recognised.\""),
        ("grow n2 all --membership no", "\"voter status 'no' is not recognised.\""),
        ("grow n2 all --queue-type no", "\"queue type 'no' is not recognised.\""),
        ("grow_to_count 2 foo", "\"strategy 'foo' is not recognised.\""),
        ("grow_to_count 0 all", "\"node count '0' must be greater than 0.\""),
        ("add_member q n2 --membership no", "\"voter status 'no' is not recognised.\""),
        ("shrink n2 --queue-type no", "\"queue type 'no' is not recognised.\""),
        ("rebalance foo", "type foo is not supported. Try one of all, classic, quorum, stream."),
        ("rebalance all --by no", "--by no is not supported. Try one of count, load."),
    ],
)
def test_wrong_words_are_found_before_a_node_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, text: str
) -> None:
    def connect(**_switches: object) -> FakeApi:
        raise AssertionError("connected")

    monkeypatch.setattr(transport, "connect", connect)
    assert run(*command.split(), tool=QUEUES) == 64
    out, err = printed(capsys)
    assert out == ""
    assert err.startswith(f"Error (argument validation): {text}\n")


def test_the_words_that_are_checked_are_those_of_the_broker() -> None:
    assert set(queues.STRATEGIES) == set(Strategy)
    assert set(queues.MEMBERSHIPS) == set(MemberKind)
    assert queues.QUEUE_TYPES == selection.TYPES
    assert queues.MEASURES == (BY_COUNT, BY_LOAD)


# --- transport -------------------------------------------------------------------------------


def test_without_a_node_the_exit_code_is_69(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("-q", "list_users", "--data", str(tmp_path)) == 69
    assert "unable to perform an operation on node '(local)'" in printed(capsys)[1]


def test_a_socket_of_somebody_else_is_no_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / SOCKET_NAME).touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert run("-q", "list_users", "--data", str(tmp_path)) == 77
    assert "is not yours" in printed(capsys)[1]


@pytest.mark.parametrize(("status", "code"), [(401, 77), (403, 77), (503, 69)])
def test_a_user_that_may_not_is_no_permission(
    monkeypatch: pytest.MonkeyPatch, status: int, code: int
) -> None:
    def refuse(_method: str, url: str, *_rest: object) -> bytes:
        body = io.BytesIO(b'{"error":"x","reason":"Not permitted"}')
        raise urllib.error.HTTPError(url, status, "no", None, body)  # type: ignore[arg-type]

    monkeypatch.setattr(transport, "call", refuse)
    assert run("-q", "list_users", "--url", "http://h", "--user", "a:b") == code


@pytest.mark.parametrize(("late", "code"), [(True, 75), (False, 69)])
def test_no_answer_over_http(monkeypatch: pytest.MonkeyPatch, late: bool, code: int) -> None:
    def fail(*_: object) -> bytes:
        raise NoAnswer("no answer", timed_out=late)

    monkeypatch.setattr(transport, "call", fail)
    assert run("-q", "list_users", "--url", "http://h") == code


def test_the_url_may_have_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def answer(_method: str, url: str, _timeout: float, user: str, *_rest: object) -> bytes:
        asked.append((url, user))
        return b"[]"

    monkeypatch.setattr(transport, "call", answer)
    assert run("-q", "list_users", "--url", "http://a%3A:p%40@h:1/") == 0
    assert run("-q", "list_user_limits", "--global", "--url", "http://h:1") == 0
    assert asked == [
        ("http://h:1/api/users", "a::p@"),
        ("http://h:1/api/user-limits", "guest:guest"),
    ]


def test_a_user_goes_with_a_url(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="goes with --url"):
        transport.connect(user="a:b", data=str(tmp_path))


def test_the_configuration_says_where_the_data_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.conf"
    config.write_text(f"data_dir = {tmp_path}/x\n")
    monkeypatch.delenv("CONVOY_DATA_DIR", raising=False)
    monkeypatch.setenv("CONVOY_CONFIG_FILE", str(config))
    assert transport._default_directory() == f"{tmp_path}/x"
    monkeypatch.setenv("CONVOY_DATA_DIR", "/y")
    assert transport._default_directory() == "/y"


# --- launchers -------------------------------------------------------------------------------

LAUNCHERS = ["rabbitmq-diagnostics", "rabbitmq-queues", "rabbitmq-upgrade", "rabbitmqctl"]


def test_launchers_run_the_tools_under_rabbitmqs_names(tmp_path: Path) -> None:
    assert run("--install-names", str(tmp_path)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == LAUNCHERS
    for name in LAUNCHERS:
        done = subprocess.run(
            [tmp_path / name, "help"], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        assert re.search(rf"^{name} \[--node", done.stdout, re.MULTILINE)
    # Again: its own files are replaced.
    assert run("--install-names", str(tmp_path)) == 0


def test_files_of_others_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rabbitmqctl").write_text("#!/bin/sh\nthe real one\n")
    assert run("--install-names", str(tmp_path)) == 70
    assert "rabbitmqctl" in printed(capsys)[1]
    assert [path.name for path in tmp_path.iterdir()] == ["rabbitmqctl"]
    assert run("--install-names") == 64
    none = tmp_path / "none"
    for place, text in ((none, "does not exist"), (tmp_path / "rabbitmqctl", "is not a directory")):
        printed(capsys)
        assert run("--install-names", str(place)) == 70
        assert printed(capsys)[1] == f"convoy: {place} {text}: give a directory of the PATH\n"


def test_output_that_nobody_reads_to_its_end_is_no_error() -> None:
    command = [sys.executable, "-m", "convoymq.cli", "ctl", "help"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_switch_without_a_value_is_a_flag() -> None:
    assert Switch("dry-run").usage == "[--dry-run]"
    assert Switch("rate", int).usage == "[--rate <rate>]"


def test_a_password_is_hashed_by_sha256_alone(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.has("auth/hash_password/a%2Fsecret", {"ok": "aGFzaA=="})
    for words in ((), ("--hashing-algorithm", "SHA-256")):
        assert run("-q", "hash_password", "a/secret", *words) == 0
        assert printed(capsys)[0] == "aGFzaA==\n"
    assert run("hash_password", "") == 65
    assert run("hash_password", "secret", "--hashing-algorithm", "md5") == 65
    assert "unsupported hashing algorithm: md5" in printed(capsys)[1]


def test_permissions_are_set_in_every_virtual_host(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("set_permissions_globally", "u", "a", "b", "c") == 67
    api.has("users/u", {"name": "u"})
    api.has("vhosts", [{"name": "/"}, {"name": "v"}])
    for vhost in ("%2F", "v"):
        api.takes("PUT", f"permissions/{vhost}/u")
    assert run("set_permissions_globally", "u", "a", "b", "c") == 0
    body = {"configure": "a", "write": "b", "read": "c"}
    assert api.asked == [("PUT", f"permissions/{vhost}/u", body) for vhost in ("%2F", "v")]


@pytest.mark.parametrize(
    ("command", "path", "tool"),
    [
        ("has_reached_target_cluster_size", "reached-target-cluster-size", UPGRADE),
        ("check_if_metadata_store_is_initialized", "metadata-store/initialized", DIAGNOSTICS),
        ("check_if_metadata_store_is_initialized_with_data",
         "metadata-store/initialized/with-data", DIAGNOSTICS),
    ],
)  # fmt: skip
def test_checks_of_the_cluster_end_with_69_and_the_reason(
    api: FakeApi, capsys: pytest.CaptureFixture[str], command: str, path: str, tool: str
) -> None:
    api.has(f"health/checks/{path}", {"status": "ok"})
    assert run(command, tool=tool) == 0
    api.has(f"health/checks/{path}", {"status": "failed", "reason": "2 of 3 nodes run"}, 503)
    assert run(command, tool=tool) == 69
    assert "2 of 3 nodes run" in printed(capsys)[1]


# --- reports ---------------------------------------------------------------------------------


def test_memory_is_shown_by_what_takes_it(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"binary": 250_000_000, "other_proc": 750_000_000}
    api.has("nodes/n1/memory", {"memory": {**parts, "strategy": "rss", "total": {"rss": 10**9}}})
    assert run("-q", "memory_breakdown", tool=DIAGNOSTICS) == 0
    assert printed(capsys)[0] == "other_proc: 0.75 gb (75.0%)\nbinary: 0.25 gb (25.0%)\n"
    assert run("-q", "memory_breakdown", "--unit", "MB", tool=DIAGNOSTICS) == 0
    assert printed(capsys)[0].splitlines()[1] == "binary: 250 mb (25.0%)"
    assert run("memory_breakdown", "--formatter", "json", tool=DIAGNOSTICS) == 0
    found = json.loads(printed(capsys)[0])
    assert found["binary"] == {"bytes": 250_000_000, "percentage": 25.0}
    assert run("memory_breakdown", "--unit", "kb", tool=DIAGNOSTICS) == 64
    assert "Please use one of: bytes, mb, gb" in printed(capsys)[1]


def test_queues_that_do_not_answer_are_listed(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.has("queues/%2F", [QUEUE, {**QUEUE, "name": "lost", "state": "minority", "node": "n2"}])
    assert run("list_unresponsive_queues") == 0
    assert printed(capsys)[0] == "Listing unresponsive queues for vhost / ...\nname\nlost\n"
    assert run("-s", "list_unresponsive_queues", "name,state", tool=DIAGNOSTICS) == 0
    assert printed(capsys)[0] == "lost\tminority\n"
    assert run("-s", "list_unresponsive_queues", "--local") == 0
    assert printed(capsys)[0] == ""


def has_a_node(api: FakeApi, **more: object) -> None:
    """What `status` and `cluster_status` ask for."""
    node = {"name": "n1", "id": 1, "running": True, "release": "r", "os_pid": 1, "proc_used": 1,
            "proc_total": 2, "run_queue": 0, "net_ticktime": 60, "mem_used": 5, "mem_limit": 9,
            "fd_used": 1, "fd_total": 2, "sockets_used": 0, "sockets_total": 2, "disk_free": 9,
            "disk_free_limit": 1, "connections": 0, "uptime": 3, **more}  # fmt: skip
    api.has("nodes", [node])
    api.has("nodes/n1", node)
    api.has("overview", {"cluster_name": "c", "rabbitmq_version": "4.3.0", "product_name": "p",
                         "product_version": "v", "object_totals": {"queues": 1},
                         "listeners": []})  # fmt: skip
    api.has("health/checks/alarms", {"status": "ok"})
    api.has("feature-flags", [])


def test_a_report_has_every_list_and_says_what_is_missing(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    has_a_node(api)
    api.has("vhosts", [{"name": "/"}])
    api.has("queues/%2F", [QUEUE])
    api.has("consumers/%2F", [])
    assert run("report") == 0
    text = printed(capsys)[0]
    assert text.startswith("Reporting server status of node n1 ...\nStatus\n\nRuntime")
    for title in ("Cluster status", "list_connections", "list_queues -p /", "list_policies -p /"):
        assert f"\n{title}\n\n" in text
    assert "\nq\tquorum" in text or "\nq\t" in text


def test_certificates_that_end_are_named(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.has("health/checks/certificate-expiration/4/weeks", {"status": "ok"})
    assert run("-q", "check_certificate_expiration", tool=DIAGNOSTICS) == 0
    assert printed(capsys)[0] == "No certificates are expiring within 4 weeks.\n"
    row = {"protocol": "amqp/ssl", "port": "5671", "certfile": "c.pem",
           "certfile_expires_on": "2027-01-01 00:00:00"}  # fmt: skip
    api.has("health/checks/certificate-expiration/1/years", {"expired": [row]}, 503)
    words = ("check_certificate_expiration", "--within", "1", "--unit", "years")
    assert run("-q", *words, tool=DIAGNOSTICS) == 69
    assert "amqp/ssl on port 5671: c.pem ends on 2027-01-01" in printed(capsys)[1]
    assert run(*words[:-1], "hours", tool=DIAGNOSTICS) == 64


@pytest.mark.parametrize("tool", [QUEUES, DIAGNOSTICS])
def test_checks_of_mirrors_succeed(
    api: FakeApi, capsys: pytest.CaptureFixture[str], tool: str
) -> None:
    api.has("nodes", [{"name": "n1", "id": 1}, {"name": "n2", "id": 2}])
    api.has("health/checks/node-is-mirror-sync-critical", {"status": "ok"})
    assert run("-q", "check_if_node_is_mirror_sync_critical", tool=tool) == 0
    assert "reported no classic mirrored queues" in printed(capsys)[0]
    api.has("policies", [{"name": "p", "definition": {"max-length": 1}}])
    api.has("operator-policies", [])
    assert run("-q", "check_if_cluster_has_classic_queue_mirroring_policy", tool=tool) == 0
    api.has("operator-policies", [{"name": "o", "definition": {"ha-mode": "all"}}])
    assert run("-q", "check_if_cluster_has_classic_queue_mirroring_policy", tool=tool) == 69


def test_after_an_upgrade_leaders_are_spread(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.takes("POST", "rebalance/queues")
    api.has("convoy/rebalance", {"running": False, "ended": "done", "failed": "",
                                 "leaders": {"n1": {"classic": 3, "quorum": 2,
                                                    "stream": 0}}})  # fmt: skip
    assert run("post_upgrade", tool=UPGRADE) == 0
    assert printed(capsys)[0].splitlines() == [
        "Executing post upgrade tasks...", "Re-balancing leaders of all replicated queues...",
        "Node name\tNumber of quorum queues\tNumber of replicated classic queues\t"
        "Number of streams", "n1\t2\t3\t0",
    ]  # fmt: skip
    assert api.asked[0][2] == {
        "type": "all", "vhost_pattern": ".*", "queue_pattern": ".*", "by": "count", "rate": 50,
        "dry_run": False,
    }  # fmt: skip


def test_mirrors_are_waited_for(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.has("nodes", [{"name": "n1"}])
    banner = (
        "Will wait for a synchronised mirror be online for all classic mirrored queues for "
        "120 seconds...\n"
    )
    assert run("await_online_synchronized_mirror", tool=UPGRADE) == 0
    alone = "Target node seems to be the only one in a single node cluster"
    assert printed(capsys)[0].startswith(banner + alone)
    api.has("nodes", [{"name": "n1"}, {"name": "n2"}])
    api.has("health/checks/node-is-mirror-sync-critical", {"status": "ok"})
    assert run("await_online_synchronized_mirror", tool=UPGRADE) == 0
    assert printed(capsys) == (banner, "")


@pytest.mark.parametrize(
    ("command", "action"), [("sync_queue", "sync"), ("cancel_sync_queue", "cancel_sync")]
)
def test_mirrors_are_synchronised_by_command(api: FakeApi, command: str, action: str) -> None:
    api.takes("POST", "queues/%2F/q/actions")
    assert run(command, "q", tool=CTL) == 0
    assert api.asked[-1][2] == {"action": action}


@pytest.mark.parametrize("tool", [CTL, DIAGNOSTICS])
def test_the_version_is_told_without_a_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: str
) -> None:
    monkeypatch.setattr(transport, "connect", None)
    assert run("version", tool=tool) == 0
    assert printed(capsys) == (COMPATIBLE_VERSION + "\n", "")
    assert run("version", "--formatter", "json", tool=tool) == 0
    assert json.loads(printed(capsys)[0]) == {"version": COMPATIBLE_VERSION}


@pytest.mark.parametrize("tool", [CTL, DIAGNOSTICS])
def test_logins_are_listed_and_counted_anew(
    api: FakeApi, capsys: pytest.CaptureFixture[str], tool: str
) -> None:
    row = {"protocol": "amqp091", "auth_attempts": 3, "auth_attempts_failed": 1,
           "auth_attempts_succeeded": 2}  # fmt: skip
    api.has("auth/attempts/n1", [])
    assert run("-q", "list_node_auth_attempt_stats", tool=tool) == 0
    assert printed(capsys)[0] == "Node n1 reported no authentication attempt stats\n"
    api.has("auth/attempts/n1", [row])
    assert run("list_node_auth_attempt_stats", "--formatter", "json", tool=tool) == 0
    found = json.loads(printed(capsys)[0])
    assert found == {"result": "ok", "node": "n1", "attempts": [row]}
    assert run("list_node_auth_attempt_stats", tool=tool) == 0
    assert printed(capsys)[0].splitlines() == [
        'Listing authentication attempts for node "n1" ...', "\t".join(row), "amqp091\t3\t1\t2",
    ]  # fmt: skip
    api.takes("DELETE", "auth/attempts/n1")
    assert run("reset_node_auth_attempt_metrics", tool=tool) == 0
    assert printed(capsys)[0] == "Reset auth attempt metrics on node n1 ...\n"
    assert api.asked == [("DELETE", "auth/attempts/n1", None)]


@pytest.mark.parametrize("tool", [QUEUES, DIAGNOSTICS])
def test_memory_of_a_queue_is_reclaimed_with_both_tools(api: FakeApi, tool: str) -> None:
    api.takes("POST", "convoy/queues/%2F/q/memory/reclaim")
    assert run("reclaim_quorum_memory", "q", tool=tool) == 0


def test_the_status_says_where_the_files_are(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    has_a_node(api, db_dir="/d", raft_data_directory="/d/log", config_files=["/c.conf"],
               log_files=["<stderr>"],
               vm_memory_high_watermark_setting={"relative": 0.6})  # fmt: skip
    api.has("vhosts", [{"name": "/"}])
    assert run("status", "--formatter", "json") == 0
    found = json.loads(printed(capsys)[0])
    assert (found["data_directory"], found["raft_data_directory"]) == ("/d", "/d/log")
    assert (found["config_files"], found["log_files"]) == (["/c.conf"], ["<stderr>"])
    assert found["tags"] == []
    assert found["vm_memory_high_watermark_setting"] == {"relative": 0.6}
    assert run("-q", "status", tool=DIAGNOSTICS) == 0
    text = printed(capsys)[0]
    assert "Data directory\n\nNode data directory: /d\nRaft data directory: /d/log\n" in text
    assert "Config files\n\n * /c.conf\n\nLog file(s)\n\n * <stderr>\n" in text
    mark = "Memory high watermark setting: 0.6 of available memory, computed to: 0.0 gb"
    assert mark in text
    has_a_node(api, vm_memory_high_watermark_setting={"absolute": 2_000_000_000})
    assert run("-q", "status") == 0
    assert "Memory high watermark setting: 2.0 gb, computed to: " in printed(capsys)[0]
    # A node of an earlier release does not say it.
    has_a_node(api)
    assert run("-q", "status") == 0
    assert "Memory high watermark setting: computed to: " in printed(capsys)[0]


def test_the_place_of_the_log_and_the_status_of_a_stream(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.has("nodes/n1", {"name": "n1", "log_files": ["/var/log/convoy.log"]})
    assert run("log_location", tool=DIAGNOSTICS) == 0
    assert printed(capsys)[0] == "Log file(s) on node n1 ...\n/var/log/convoy.log\n"
    api.has("queues/quorum/%2F/s/status", [{"Node Name": "n1", "Raft State": "leader"}])
    for tool in (QUEUES, DIAGNOSTICS):
        assert run("stream_status", "s", "--formatter", "json", tool=tool) == 0
        assert '"Raft State":"leader"' in printed(capsys)[0]
        assert run("stream_status", "t", tool=tool) == 69
        assert "not_found" in printed(capsys)[1]
