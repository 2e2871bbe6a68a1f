"""A MariaDB server of the demo's own, with a row-based binary log, and load from sysbench."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pymysql
import pymysql.cursors

DATABASE = "shop"
START_DEADLINE_S = 600.0
STOP_DEADLINE_S = 30.0
VERSION_MIN = (10, 11)
"""Of MariaDB: the oldest release that the demo is for."""
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/usr/libexec")
VERSION = re.compile(r"\bVer (\d+)\.(\d+)\.\d+-MariaDB\b")


class Missing(RuntimeError):
    """A program is not installed, or is too old."""


def find(program: str) -> str:
    """Returns the path of a program. Raises Missing."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM_FOLDERS])
    found = shutil.which(program, path=path)
    if found is None:
        raise Missing(f"{program} is not installed: tools/install_mariadb.sh does it on Debian")
    return found


def check_version(server: str) -> None:
    """Raises Missing: the program is no MariaDB, or an older one than the demo needs."""
    told = subprocess.run(
        [server, "--no-defaults", "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    found = VERSION.search(told)
    if found is None or tuple(map(int, found.groups())) < VERSION_MIN:
        wanted = ".".join(map(str, VERSION_MIN))
        raise Missing(f"the demo needs MariaDB {wanted} or newer; {server} is: {told}")


class MariaDb:
    """One server on loopback; ends with the context.

    Args:
        directory: where it keeps its data; made anew.
        options: more options of the server, such as `--log-bin-compress=ON`.
    """

    def __init__(self, directory: Path, port: int, *options: str) -> None:
        self.port = port
        self._directory = directory
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Returns the address of its database for a capture."""
        return f"mariadb://root@127.0.0.1:{self.port}/{DATABASE}"

    def __enter__(self) -> MariaDb:
        check_version(find("mariadbd"))
        shutil.rmtree(self._directory, ignore_errors=True)
        data = self._directory / "data"
        data.mkdir(parents=True)
        (self._directory / "tmp").mkdir()
        with open(self._directory / "server.log", "wb") as log:
            subprocess.run(
                [
                    find("mariadb-install-db"), "--no-defaults", f"--datadir={data}",
                    "--auth-root-authentication-method=normal", "--skip-test-db", *self._own(),
                ],
                stdout=log, stderr=log, check=True,
            )  # fmt: skip
        self.start()
        with self.connect(database=None) as connection:
            execute(connection, f"CREATE DATABASE {DATABASE}")
        return self

    def _own(self) -> list[str]:
        """Returns options of the server and of what installs its tables. A server that starts
        removes temporary tables of others in a directory that they share."""
        user = ["--user=root"] if os.geteuid() == 0 else []
        return [*user, f"--tmpdir={self._directory / 'tmp'}"]

    def start(self) -> None:
        """Starts the server on the data that it has. Raises RuntimeError: it does not start."""
        with open(self._directory / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    find("mariadbd"), "--no-defaults", *self._own(),
                    f"--datadir={self._directory / 'data'}",
                    f"--socket={self._directory / 'socket'}", f"--port={self.port}",
                    "--bind-address=127.0.0.1", "--server-id=1", "--log-bin=binlog",
                    "--binlog-format=ROW", "--binlog-row-image=FULL", "--binlog-row-metadata=FULL",
                    "--gtid-strict-mode=ON", "--innodb-buffer-pool-size=64M",
                    "--innodb-log-file-size=64M", "--performance-schema=OFF",
                    # The demo is about the broker's disk; the database's may be lazy.
                    "--innodb-flush-log-at-trx-commit=2", "--sync-binlog=0", *self._options,
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                self.connect(database=None).close()
                return
            except pymysql.err.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    text = (self._directory / "server.log").read_text(errors="replace")
                    raise RuntimeError(f"MariaDB did not start:\n{text[-2000:]}") from None
                time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def connect(
        self, *, database: str | None = DATABASE, streaming: bool = False
    ) -> pymysql.connections.Connection[Any]:
        """Returns a connection. `streaming`: rows come as they are read, not all at once."""
        return connect(self.port, database=database, streaming=streaming)


def connect(
    port: int, *, database: str | None = DATABASE, streaming: bool = False
) -> pymysql.connections.Connection[Any]:
    """Returns a connection to the demo's server."""
    kind = pymysql.cursors.SSCursor if streaming else pymysql.cursors.Cursor
    return pymysql.connect(
        host="127.0.0.1", port=port, user="root", database=database, autocommit=True,
        charset="utf8mb4", cursorclass=kind,
    )  # fmt: skip


def execute(connection: pymysql.connections.Connection[Any], statement: str) -> list[Any]:
    """Returns the rows that a statement gives."""
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


class Sysbench:
    """Load on the database: tables `sbtest1` … with the columns id, k, c and pad."""

    def __init__(self, port: int, tables: int, rows: int, log: Path) -> None:
        self._options = [
            "oltp_write_only", "--db-driver=mysql", "--mysql-host=127.0.0.1",
            f"--mysql-port={port}", "--mysql-user=root", f"--mysql-db={DATABASE}",
            f"--tables={tables}", f"--table-size={rows}",
        ]  # fmt: skip
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Creates and fills the tables."""
        with open(self._log, "ab") as log:
            command = [find("sysbench"), *self._options, "prepare"]
            subprocess.run(command, stdout=log, stderr=log, check=True)

    def start(self, seconds: int, per_second: int, threads: int = 2) -> None:
        """Writes for some time: updates, and deletes followed by inserts of the same row."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [
                    find("sysbench"), *self._options, f"--time={seconds}", f"--rate={per_second}",
                    f"--threads={threads}", "--rand-type=pareto", "run",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def wait(self) -> None:
        """Returns when it is over. Raises RuntimeError: it failed."""
        assert self._process is not None
        if self._process.wait() != 0:
            raise RuntimeError(f"sysbench failed: see {self._log}")

    def end(self) -> None:
        """Ends it. Raises RuntimeError: it has ended before."""
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"sysbench failed: see {self._log}")
        self.stop()

    def stop(self) -> None:
        """Ends it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
