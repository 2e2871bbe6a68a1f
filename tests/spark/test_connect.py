"""Spark Connect: sources and sinks by name, from a client that has no Java of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.spark.cluster import Broker
from tests.spark.quick_start import SCRUBBED, spark_environment

PROGRAM = Path(__file__).with_name("connect_program.py")


def test_a_client_of_spark_connect_reads_and_writes(nodes: Broker, tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="pyspark[connect] is not installed")
    source, target = nodes.declare("stream"), nodes.declare("stream")
    nodes.publish(source, [b"a", b"b", b"c"])
    kept = {name: value for name, value in os.environ.items() if name not in SCRUBBED}
    made = subprocess.run(
        [sys.executable, str(PROGRAM), nodes.servers, source, target, str(tmp_path / "c")],
        # The server's Python, which starts with the first session, is to have the package.
        env=kept | spark_environment(archive=False) | {"PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert made.returncode == 0, made.stderr
    told = json.loads(made.stdout.splitlines()[-1])
    assert told["kind"] == "pyspark.sql.connect.session"
    assert told["seen"] == ["a", "b", "c"]
    assert nodes.values(target) == [b"a", b"b", b"c"] * 2
    assert "none" in told["refused"]
