"""What `deploy/` says is what this release understands. `make check-deploy` carries it out."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from convoymq import __version__
from convoymq.edges.configuration import load

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SECRET = {"cluster.secret": "x" * 32}


@pytest.mark.parametrize("name", ["docker/convoy.conf", "debian/convoy.conf"])
def test_configurations_are_accepted(name: str) -> None:
    load(DEPLOY / name, {}, {})


def test_the_environment_of_compose_is_accepted() -> None:
    text = (DEPLOY / "docker/compose.yaml").read_text()
    found = dict(re.findall(r"(CONVOY_\w+): \"?([^\"\s}]+)", text))
    assert {"CONVOY_CLUSTER_PEERS", "CONVOY_CLUSTER_SECRET", "CONVOY_NODE_ID"} <= found.keys()
    found["CONVOY_CLUSTER_SECRET"] = "x" * 32
    config = load(DEPLOY / "docker/convoy.conf", found, {})
    assert [str(peer) for peer in config.cluster.peers] == [
        f"{number}@node{number}:25672" for number in (1, 2, 3)
    ]


def test_the_chart_has_keys_of_this_release(tmp_path: Path) -> None:
    template = (DEPLOY / "helm/convoymq/templates/config.yaml").read_text()
    values = (DEPLOY / "helm/convoymq/values.yaml").read_text()
    (lines,) = re.findall(r"convoy\.conf: \|\n(.*)", template, re.DOTALL)
    lines = re.sub(r"\{\{ \.Values\.formationNodes \}\}", "3", lines)
    lines = re.sub(r"\{\{[^}]*\}\}", "mq", lines.replace("{{- .Values.config | nindent 4 }}", ""))
    (extra,) = re.findall(r"^config: \|\n((?:  .*\n)+)", values, re.MULTILINE)
    path = tmp_path / "convoy.conf"
    path.write_text(re.sub(r"(?m)^ +", "", lines + extra))
    config = load(path, {}, SECRET)
    assert config.node.revive_at_start
    assert config.cluster.dns_name


def test_versions_agree() -> None:
    chart = (DEPLOY / "helm/convoymq/Chart.yaml").read_text()
    release = __version__.partition(".dev")[0]
    assert f"\nversion: {release}\n" in chart
    assert f'\nappVersion: "{release}"\n' in chart


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_the_unit_is_one_of_systemd(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd/convoy.service").read_text()
    unit = tmp_path / "convoy.service"
    unit.write_text(text.replace("/opt/convoymq/bin/convoy", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert "convoy.service" not in done.stderr
    grade = ["systemd-analyze", "security", "--offline=true", "--threshold=20", unit]
    done = subprocess.run(grade, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
