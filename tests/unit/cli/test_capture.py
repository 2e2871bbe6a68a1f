"""`convoy pipeline capture`, as far as it goes without a database."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from convoymq.cli import capture
from convoymq.cli.output import Format
from convoymq.cli.pipeline import pipeline_app

URL = "mariadb://root@127.0.0.1:1/shop"


def run(tmp_path: Path, *more: str, url: str = URL) -> tuple[int, str]:
    words = ["capture", "--database", url, "--table", "t", "--topic", "c", "--state", str(tmp_path)]
    done = CliRunner().invoke(pipeline_app, [*words, *more])
    return done.exit_code, done.output


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "find_spec", lambda name: None)
    code, output = run(tmp_path)
    assert code == 1
    assert "pip install 'convoymq[capture]'" in output


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--table", "t"], "--table t is given twice"),
        (["--key", "t"], "--key t: TABLE=COLUMN,COLUMN is needed"),
        (["--key", "other=a"], "--key other=a: no --table other"),
        (["--servers", "a b"], "server 'a b' is not host:port"),
        (["--database-password", "env:NONE_OF_THIS"], "the environment has no NONE_OF_THIS"),
        (["--truncate", "never"], "'never' is not one of"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, more: list[str], text: str) -> None:
    code, output = run(tmp_path, *more)
    assert code == 2
    assert text in output


@pytest.mark.parametrize(
    "url", ["shop", "postgres://h/shop", "mariadb://h", "mariadb://h:x/shop", "mariadb:///shop"]
)
def test_an_address_is_a_url(tmp_path: Path, url: str) -> None:
    code, output = run(tmp_path, url=url)
    assert code == 2
    assert "mariadb://USER@HOST:PORT/DATABASE" in output


def test_events_are_text_or_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    said = {"after": "", "reason": "gone", "retry_s": 0.2}
    for name in ("follow", "lost", "stored"):
        capture.reporter(Format.TABLE)(name, said)
        capture.reporter(Format.JSON)(name, said)
    found = capsys.readouterr()
    assert found.err.splitlines() == [
        "capture: follows the binary log behind its beginning",
        "capture: lost the database: gone; tries again in 0.2 s",
    ]
    lines = [json.loads(line) for line in found.out.splitlines()]
    assert [line["event"] for line in lines] == ["follow", "lost", "stored"]
    assert all(line["time_s"] > 0 for line in lines)


def test_a_capture_has_a_number_of_its_own() -> None:
    assert capture.server_id_of("a", "t") == capture.server_id_of("a", "t")
    numbers = {capture.server_id_of(name, topic) for name in "abc" for topic in "xyz"}
    assert len(numbers) == 9
    assert all(1_000_000_000 <= number < 1 << 32 for number in numbers)
