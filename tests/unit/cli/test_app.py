"""The command line: formats, exit codes, lazy imports."""

from __future__ import annotations

import importlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports
from typer.testing import CliRunner

import convoymq
from convoymq.cli import doctor
from convoymq.cli.app import _versions_text, app, builds_text
from convoymq.cli.doctor import run as run_checks
from convoymq.cli.output import show, table
from convoymq.cli.pipeline import pipeline_app
from convoymq.cli.serve import introduction
from convoymq.cli.serve import main as serve
from convoymq.compiled_modules import PLAIN_MODULES, build_text
from convoymq.edges import configuration
from convoymq.transport.listening import addresses_of

ROOT = Path(__file__).parents[3]
BASE_PORT = cluster_ports(__name__)
RUNNER = CliRunner()


def test_status_without_a_cluster_says_how_to_start_one(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["status", "--data", str(tmp_path), "--format", "json"])
    assert result.exit_code == 1
    assert "convoy up" in result.stderr


def test_config_reference_is_the_page_and_config_is_json() -> None:
    assert RUNNER.invoke(app, ["config", "--reference"]).stdout == configuration.reference()
    found = json.loads(RUNNER.invoke(app, ["config", "--format", "json"]).stdout)
    assert found["raft"]["segment_max_entries"] == "4096"
    assert found["defaults"]["password"] == "(hidden)"


def test_doctor_reports_every_check_as_json(tmp_path: Path) -> None:
    arguments = ["doctor", "--data", str(tmp_path), "--base-port", "53500", "--format", "json"]
    result = RUNNER.invoke(app, arguments)
    found = {row["check"]: row for row in json.loads(result.stdout)}
    assert {"python", "kernels", "compiler", "java", "ports", "open files", "clock"} <= set(found)
    assert {"disk space", "disk flush", "memory"} <= set(found)
    assert all(row["level"] in ("ok", "warning", "error") for row in found.values())


def test_doctor_finds_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    levels = {f.check: f.level for f in run_checks(tmp_path / "a" / "b", 65_534, 3)}
    assert levels["ports"] == "error"
    assert levels["disk space"] in ("ok", "warning")


def test_node_checks_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "convoy.conf"
    file.write_text("node.id = 2\n")
    assert serve(["--config", str(file), "--check"]) == 0
    assert serve(["--config", str(file), "--set", "node.idd=3", "--check"]) == 2
    assert "did you mean node.id" in capsys.readouterr().err
    assert serve(["--set", "broken", "--check"]) == 2


def test_node_checks_the_files_of_its_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    secret.chmod(0o644)
    asked = ["--check", "--set", f"cluster.secret_file={secret}"]
    assert serve(asked) == 2
    assert f"cluster.secret_file: others may read {secret} (mode 0644)" in capsys.readouterr().err
    secret.chmod(0o600)
    assert serve(asked) == 0
    none, bad = tmp_path / "none.pem", tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for file, text in ((none, f"ssl_options.certfile: {none}: No such file"),
                       (bad, "ssl_options.certfile, ssl_options.keyfile, ssl_opt")):  # fmt: skip
        asked = ["--check", "--set", "listeners.ssl.default=5671"]
        for key in ("certfile", "keyfile"):
            asked += ["--set", f"ssl_options.{key}={file}"]
        capsys.readouterr()
        assert serve(asked) == 2
        assert text in capsys.readouterr().err


def test_a_node_founds_no_cluster_while_an_address_is_taken(tmp_path: Path) -> None:
    keys = ("listeners.tcp.default", "management.tcp.port", "prometheus.tcp.port", "cluster.listen")
    ports = {key: f"127.0.0.1:{BASE_PORT + number}" for number, key in enumerate(keys)}
    settings = [f"{key}={address}" for key, address in ports.items()]
    for number, key in enumerate(keys):
        with socket.create_server(("127.0.0.1", BASE_PORT + number)):
            words = [word for text in settings for word in ("--set", text)]
            done = convoy("node", *words, "--set", f"data_dir={tmp_path / 'data'}")
        assert done.returncode == 1
        assert f"{key}: Address already in use ({ports[key]})" in done.stdout + done.stderr
        assert "cluster.forming" not in done.stdout + done.stderr


def test_a_node_without_a_file_says_what_it_uses(tmp_path: Path) -> None:
    text = introduction(
        configuration.load(flags={"data_dir": str(tmp_path), "prometheus.tcp.port": "7"})
    )
    assert "node 1 without a configuration file (--config FILE)" in text
    assert f"data: {tmp_path}" in text
    for line in ("AMQP: localhost:5672", "HTTP API: localhost:15672", "metrics: localhost:7"):
        assert line in text
    assert "other nodes: 127.0.0.1:25672" in text
    assert "TLS" not in text


def convoy(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "convoymq.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_a_node_names_its_options(flag: str) -> None:
    done = convoy("node", flag)
    assert done.returncode == 0
    assert {"--config", "--set", "--check", "CONVOY_CONFIG_FILE"} <= set(
        done.stdout.replace(",", " ").split()
    )


@pytest.mark.parametrize("command", [["status"], ["queues", "info"], ["doctor"], []])
def test_h_is_help(command: list[str]) -> None:
    result = RUNNER.invoke(app, [*command, "-h"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize("command", ["perf", "pipeline"])
def test_h_is_help_of_commands_with_their_own_parsers(command: str) -> None:
    done = convoy(command, "-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage" in done.stdout


def test_version_is_a_command_and_a_flag() -> None:
    assert RUNNER.invoke(app, ["--version"]).stdout == f"convoy {convoymq.__version__}\n"
    assert RUNNER.invoke(app, ["version"]).stdout == f"{convoymq.__version__}\n"


def test_what_looks_like_markup_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show(table(["name"], [["orders[eu]"], ["[red]"]], "[all]"))
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("orders[eu]", "[red]", "[all]"))
    assert "convoymq[spark]" in RUNNER.invoke(pipeline_app, ["--help"]).stdout


@pytest.mark.parametrize("line", ["show(table(['a'], [['b']]))", "print_json('b')"])
def test_nothing_stays_in_a_buffer_when_output_goes_to_a_file(line: str) -> None:
    code = f"import os; from convoymq.cli.output import *; {line}; os._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "b" in done.stdout


class Refusing(BaseHTTPRequestHandler):
    """An HTTP API that answers every request with the status in its path."""

    def do_GET(self) -> None:
        self.send_error(int(self.path.split("/")[1]))

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "command", "said", "code"),
    [
        (401, ["status"], "--user NAME:PASSWORD", 1),
        (403, ["status"], "administrator", 1),
        (503, ["status"], "another node", 1),
        (500, ["status"], "its log", 1),
        (404, ["status"], "is it the HTTP API of a node", 4),
        (404, ["queues", "list", "--vhost", "v"], "no virtual host 'v'", 4),
        (404, ["queues", "info", "x"], "no queue 'x' in virtual host '/'", 4),
    ],
)
def test_refusals_say_what_to_do(
    refusing: str, status: int, command: list[str], said: str, code: int
) -> None:
    result = RUNNER.invoke(app, [*command, "--url", f"{refusing}/{status}"])
    assert result.exit_code == code
    assert said in result.stderr


def test_doctor_knows_every_module_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    names = importlib.import_module("build").kernel_modules()
    assert set(names) == {*doctor.kernel_modules(), *PLAIN_MODULES}
    assert doctor._kernels().level == "ok"
    assert build_text() in doctor._kernels().text
    missing = "convoymq.kernels.batch"
    monkeypatch.setattr(doctor, "_is_compiled", lambda name: name != missing)
    finding = doctor._kernels()
    assert (finding.level, missing in finding.text) == ("error", True)
    kernel = "convoymq.kernels.batch"
    monkeypatch.setattr(doctor, "_is_compiled", lambda name: name != kernel)
    assert doctor._kernels().level == "error"


@pytest.mark.parametrize("host", addresses_of("localhost"))
def test_doctor_finds_ports_that_are_taken_on_one_family(host: str, tmp_path: Path) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, BASE_PORT))
        taken.listen()
        (finding,) = doctor._ports(tmp_path, BASE_PORT, 1)
    assert finding.level == "error"
    assert str(BASE_PORT) in finding.text


def test_a_node_does_not_import_the_command_line_libraries() -> None:
    code = (
        "import sys, convoymq.cli.serve, convoymq.edges.configuration as c; c.load();"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"typer", "rich", "click", "asyncio"} & set(done.stdout.split())


def test_a_node_imports_no_more_of_its_libraries_than_it_uses() -> None:
    code = (
        "from convoymq.cli import serve; serve._import_lean_python(); serve._import_lean_codecs();"
        "from convoymq.edges.configuration import load; load(); serve._import_lean(tls=False);"
        "import sys, convoymq.node.process, convoymq.broker.traces;"
        "from convoymq.edges.registry import import_edges; import_edges(); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    unused = {"rich", "typing_extensions", "importlib.metadata", "email", "zipfile", "difflib"}
    unused |= {"msgspec.inspect", "csv", "tempfile", "sysconfig", "ssl", "_ssl", "_hashlib"}
    # Rules that nodes without topics need not know.
    unused |= {"convoymq.topics.rules.group", "convoymq.topics.rules.topic"}
    assert not unused & set(done.stdout.split())


def test_status_shows_each_build_once() -> None:
    assert builds_text([]) is builds_text([("node 1", None)]) is None
    assert builds_text([("node 1", "0.4.0, a"), ("node 2", "0.4.0, a")]) == "build: 0.4.0, a"
    found = builds_text([("node 1", "a"), ("node 2", None), ("node 3", "b"), ("node 4", "a")])
    assert found == "build of node 1, node 4: a\nbuild of node 3: b"


def test_versions_in_force_and_supported_fit_into_a_cell() -> None:
    assert _versions_text(None) is None
    assert (
        _versions_text(
            {
                "metadata": {"oldest": 1, "newest": 1, "in_force_min": 1, "in_force_max": 1},
                "quorum": {"oldest": 1, "newest": 3, "in_force_min": 1, "in_force_max": 2},
                "stream": {"oldest": 1, "newest": 1},
            }
        )
        == "metadata 1, quorum 1-2 (to 3)"
    )
