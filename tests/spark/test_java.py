"""Finding Java: the order of the places, the shim, and the error. No Java is started here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from convoymq.spark import java


def fake_java(home: Path, version: str, *, vector: bool = True) -> Path:
    """A program that behaves as `java -version` does."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    refuse = "" if vector else 'case "$*" in *vector*) echo "FindException" >&2; exit 1;; esac\n'
    program.write_text(
        f'#!/bin/sh\n{refuse}echo \'openjdk version "{version}" 2025\' >&2\necho "$@"\n'
    )
    program.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin" if not Path("/usr/bin/java").exists() else "/none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(java.util, "find_spec", lambda _name: None)


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = fake_java(tmp_path / "jdk", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java.java_home() == str(home)


def test_java_on_the_path_needs_no_java_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = fake_java(tmp_path / "jdk", "17.0.15")
    monkeypatch.setenv("PATH", f"{home / 'bin'}:/bin:/usr/bin")
    assert java.java_home() is None
    assert java.main() == 0


def test_a_runtime_without_the_module_gets_a_shim(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = fake_java(tmp_path / "a jdk", "21.0.8", vector=False)
    monkeypatch.setenv("JAVA_HOME", str(home))
    made = java.java_home()
    assert made is not None
    assert made != str(home)
    assert java.java_home() == made
    flags = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "Main"]
    done = subprocess.run(
        [f"{made}/bin/java", *flags],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": "/bin:/usr/bin"},
    )
    assert done.stdout == "-Xmx1g a b Main\n"


def test_what_is_too_old_or_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = fake_java(tmp_path / "jdk", "1.8.0_412")
    monkeypatch.setenv("JAVA_HOME", str(home))
    with pytest.raises(java.JavaMissing, match=r"version 8 is too old.*spark-jre"):
        java.java_home()
    monkeypatch.setenv("JAVA_HOME", "/none")
    with pytest.raises(java.JavaMissing, match="none"):
        java.java_home()
    assert java.main() == 1
    assert "pip install" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(java.tempfile, "tempdir", None)
    assert java.shim(Path("/x/java"), java._cache()).is_dir()
