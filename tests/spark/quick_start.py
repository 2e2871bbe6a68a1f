"""How Spark starts in tests: with little work, few words, and classes that Java has loaded before.

Most of the time of a short Spark program is Java's: it reads and checks 15,000 classes. Java can
archive what a program has loaded (class data sharing), for programs with the same class path. The
archive is made once, by `class_archive.py`. Where that fails, Sparks start without: later, but they
start.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pyspark

from convoymq.spark.java import JavaMissing, java_home
from tests.patience import PATIENCE_S
from tests.spark.support import SCALE

SCRUBBED = (
    *("PYSPARK_SUBMIT_ARGS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS"),
    *("SPARK_HOME", "SPARK_CONF_DIR"),
)
"""What a person's shell may have and tests must not depend on."""

JAVA_OPTIONS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    # Java says on standard output that it cannot use an archive, and goes on without.
    "-Xlog:disable",
)
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stopTimeout": "30s",
}
if SCALE == 1:
    # Batches of some hundred rows: to generate and compile Java for each plan takes longer than to
    # interpret it. `make test-spark-full` compiles.
    SETTINGS |= {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
START = Path(__file__).with_name("start")
"""What Java says, and what Python workers do first."""

PROGRAM = Path(__file__).with_name("class_archive.py")
DIRECTORY = Path(__file__).parents[2] / "build" / "spark-tests"
"""The archive, and an empty directory: with files on the class path there is no archive."""


def spark_environment(*, archive: bool = True) -> dict[str, str]:
    """Returns the environment in which every Java of a Spark starts as tests want it.

    Args:
        archive: with the archive of classes, which is for one version of Java.
    """
    options = [*JAVA_OPTIONS, f"-Dlog4j2.configurationFile={START / 'log4j2.properties'}"]
    options += [f"-D{name}={value}" for name, value in SETTINGS.items()]
    if archive:
        options += _archive(tuple(options))
    (DIRECTORY / "conf").mkdir(parents=True, exist_ok=True)
    paths = (str(START), os.environ.get("PYTHONPATH", ""))
    return {
        "SPARK_CONF_DIR": str(DIRECTORY / "conf"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JDK_JAVA_OPTIONS": " ".join(options),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


@cache
def _archive(options: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the options that use the archive, made if need be; () without one or a Java."""
    try:
        home = java_home()
    except JavaMissing:
        return ()
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    # Tests with Delta Lake's jars have another version of Spark.
    name = f"classes-{pyspark.__version__}"
    archive, key = DIRECTORY / f"{name}.jsa", DIRECTORY / f"{name}.key"
    java = str(Path(home, "bin", "java")) if home else "java"
    version = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    wanted = "\n".join(
        (version, pyspark.__file__, pyspark.__version__, *options, PROGRAM.read_text())
    )
    with (DIRECTORY / "lock").open("w") as lock:
        # Other test processes wait here: all need it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not key.exists() or key.read_text() != wanted:
            archive.unlink(missing_ok=True)
            _make(archive, options)
            # One that could not be made is not tried again by every process.
            key.write_text(wanted)
    return (f"-XX:SharedArchiveFile={archive}",) if archive.exists() else ()


def _make(archive: Path, options: tuple[str, ...]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in SCRUBBED}
    with tempfile.TemporaryDirectory(dir=DIRECTORY) as directory:
        made = Path(directory, archive.name)
        options = (*options, f"-XX:ArchiveClassesAtExit={made}")
        environment |= spark_environment(archive=False) | {"JDK_JAVA_OPTIONS": " ".join(options)}
        try:
            subprocess.run(
                [sys.executable, str(PROGRAM), directory],
                env=environment,
                cwd=directory,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=True,
            )
            made.replace(archive)
        except (subprocess.SubprocessError, OSError) as error:
            said = getattr(error, "stderr", None) or ""
            print(f"Sparks start without an archive of classes: {error}\n{said}", file=sys.stderr)
