"""Every block of code in docs/ runs, or says why not.

Pages that are checked stand in PAGES; those that need brokers or Spark have a test of their own
here. A page of a new kind gets one line in PAGES and one test.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.docs.blocks import RUN, blocks_of, run_page
from tests.spark.conftest import SETTINGS, quiet

pytestmark = pytest.mark.cluster

PAGES = ("docs/spark.md", "docs/audit.md")
BASE_PORT = 12_860
PORTS = {str(port): str(BASE_PORT + port - 5672) for port in (5672, 5673, 5674)}
METRICS_PORT = {"9108": str(BASE_PORT + 60)}
TRACED = {"trace.vhosts": "/", "trace.segment_max_age": "1000"}


@pytest.fixture
def quick_spark(tmp_path: Path) -> dict[str, str]:
    """Spark starts quickly and writes errors only: what it says at the end is looked at."""
    directory = quiet(tmp_path / "conf")
    text = "".join(f"{name} {value}\n" for name, value in SETTINGS.items())
    (directory / "spark-defaults.conf").write_text(text)
    return {"SPARK_CONF_DIR": str(directory), "SPARK_LOCAL_IP": "127.0.0.1"}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language_and_runs_or_says_why_not(page: str) -> None:
    for block in blocks_of(page):
        assert block.language in (*RUN, "text"), f"{block.place}: ```python, ```sh or ```text"


@pytest.mark.skipif("JAVA_HOME" in os.environ and not os.environ["JAVA_HOME"], reason="no Java")
def test_the_tutorial_of_spark_runs(tmp_path: Path, quick_spark: dict[str, str]) -> None:
    with LocalCluster(tmp_path / "data", 3, BASE_PORT, TRACED) as cluster:
        cluster.wait_ready()
        output = run_page(
            "docs/spark.md",
            tmp_path,
            replaced={**PORTS, **METRICS_PORT},
            environment=quick_spark,
            timeout_s=540,
        )
    assert "Exception" not in output, output[-6000:]
    assert "Traceback" not in output, output[-6000:]


def test_the_page_on_audits_runs(tmp_path: Path, quick_spark: dict[str, str]) -> None:
    with LocalCluster(tmp_path / "data", 3, BASE_PORT, TRACED) as cluster:
        cluster.wait_ready()
        output = run_page(
            "docs/audit.md", tmp_path, replaced=PORTS, environment=quick_spark, timeout_s=300
        )
    assert "Exception" not in output, output[-6000:]
    assert (tmp_path / "audit.html").exists()
