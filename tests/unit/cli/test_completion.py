"""Completion in shells: candidates, and the scripts in the shells that are there."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from convoymq.cli.completion import SCRIPTS, candidates
from convoymq.cli.ctl.tools import COMMANDS


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("sta", ["status"]),
        ("cluster f", ["forget"]),
        ("queues in", ["info"]),
        ("queues reb", ["rebalance"]),
        ("ctl add_v", ["add_vhost"]),
        ("ctl list_queues --off", ["--offline"]),
        ("ctl list_queues --formatter js", ["json"]),
        ("ctl --vhost ctl list_ve", []),
        ("status --for", ["--format"]),
        ("status --format js", ["json"]),
        ("status --data x --u", ["--url", "--user"]),
        ("perf --queue-p", ["--queue-prefix"]),
        ("pipeline tri", ["triage"]),
        ("tls i", ["init"]),
        ("broker-c", ["broker-container"]),
        ("up --data ", []),
        ("nosuch x", []),
    ],
)
def test_what_may_follow(line: str, found: list[str]) -> None:
    assert candidates(line.split(" ")) == found


def test_every_command_is_found_from_nothing() -> None:
    top = candidates([])
    assert {"up", "node", "ctl", "top", "perf", "pipeline", "completion"} <= set(top)
    for command in COMMANDS:
        for tool in command.tools:
            assert command.name in candidates([tool, ""])


PROBES = {
    "bash": "{script}\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _convoy\n"
    'printf "%s\\n" "${{COMPREPLY[@]}}"',
    "fish": '{script}\ncomplete -C "{line}"',
    "zsh": "compdef() {{ : }}\ncompadd() {{ print -l $found }}\n{script}\n"
    "words=({words}); CURRENT=$#words; _convoy",
}


@pytest.mark.parametrize("shell", sorted(PROBES))
def test_shells_complete_with_the_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    launcher = tmp_path / "convoy"
    python = shlex.quote(sys.executable)
    launcher.write_text(f'#!/bin/sh\nexec {python} -m convoymq.cli "$@"\n')
    launcher.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    for line, expected in (
        ("convoy ctl list_vh", ["list_vhost_limits", "list_vhosts"]),
        ("convoy status --format j", ["json"]),
    ):
        probe = PROBES[shell].format(script=SCRIPTS[shell], words=line, line=line)
        ended = subprocess.run(
            [shell, "-c", probe], env=environment, capture_output=True, text=True, check=True
        )
        assert sorted(ended.stdout.split()) == expected, ended
