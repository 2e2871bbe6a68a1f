"""Every block of code in docs/ runs, or says why not.

Pages that are checked stand in PAGES; those that need brokers or Spark have a test of their own
here, CONTRIBUTING.md has it in `test_references`. A page of a new kind gets one line in PAGES and
one test.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from convoymq.cli.cluster import LocalCluster
from convoymq.edges.configuration import load
from tests.clusters import serving_cluster
from tests.docs.blocks import ROOT, RUN, blocks_of, run_page
from tests.faults.topic_traffic import create
from tests.forked_nodes import ForkedCluster
from tests.mariadb import MariaDb, needs_mariadb
from tests.ports import cluster_ports, single_port
from tests.spark.quick_start import spark_environment

pytestmark = pytest.mark.cluster

DOCS = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md"))

ROOT_PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
PAGES = [page for page in (*ROOT_PAGES, *map(str, DOCS)) if blocks_of(page)]
SHELL_PAGES = ("README.md", "docs/client.md", "docs/getting-started.md")
"""Pages that need three nodes and nothing else."""
BASE_PORT = cluster_ports(__name__)
PORTS = {str(port): str(BASE_PORT + port - 5672) for port in (5672, 5673, 5674)}
METRICS_PORT = {"9108": str(single_port())}
TRACED = {"trace.vhosts": "/", "trace.segment_max_age": "1000"}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language_and_runs_or_says_why_not(page: str) -> None:
    for block in blocks_of(page):
        known = (*RUN, "ini", "json", "text")
        assert block.language in known, f"{block.place}: one of {', '.join(known)} after the ```"


@pytest.mark.parametrize("page", PAGES)
def test_configurations_are_accepted_by_a_node(page: str, tmp_path: Path) -> None:
    for block in blocks_of(page):
        if block.language == "ini":
            path = tmp_path / f"{block.line}.conf"
            path.write_text(block.text)
            load(path, flags={"cluster.secret_file": "/etc/convoy/secret"})


def test_pages_that_follow_each_other_give_one_name_to_one_exchange() -> None:
    """A reader has one cluster for all pages. A topic's exchange has the topic's name."""
    kinds: dict[str, dict[str, str]] = {}
    for page in PAGES:
        text = "\n".join(block.text for block in blocks_of(page))
        found = re.findall(r'exchange_declare\("([^"]+)", "([^"]+)"', text)
        found += [(name, "x-ordered") for name in re.findall(r"topics create (\S+)", text)]
        for name, kind in found:
            kinds.setdefault(name, {}).setdefault(kind, page)
    assert kinds["orders"] == {"x-ordered": "docs/topics.md"}
    assert {name: pages for name, pages in kinds.items() if len(pages) > 1} == {}


@pytest.mark.parametrize("page", SHELL_PAGES)
def test_a_page_for_newcomers_runs(page: str, tmp_path: Path) -> None:
    data = tmp_path / "convoy-data"
    with LocalCluster(data, 3, BASE_PORT) as cluster:
        cluster.wait_ready()
        # The cluster of the page is that of the current directory.
        replaced = {**PORTS, ".venv/bin/convoy status": f"convoy status --data {data}"}
        replaced[".venv/bin/convoy queues list"] = f"convoy queues list --data {data}"
        run_page(page, tmp_path, replaced={**replaced, ".venv/bin/": ""})


def test_the_page_on_deployment_runs(tmp_path: Path) -> None:
    assert "made the authority" in run_page("docs/deployment.md", tmp_path, replaced={})


def test_the_page_on_messages_of_amqp_10_runs(tmp_path: Path) -> None:
    run_page("docs/formats/amqp10.md", tmp_path, replaced={})


def test_the_page_on_topics_runs(tmp_path: Path) -> None:
    with serving_cluster(tmp_path / "convoy-data", BASE_PORT) as cluster:
        create(cluster, "first", 1)
        run_page("docs/topics.md", tmp_path, replaced={**PORTS, ".venv/bin/": ""})


@pytest.mark.optional
@needs_mariadb
def test_the_page_on_capture_runs(tmp_path: Path) -> None:
    with (
        MariaDb(tmp_path / "mariadb", single_port()) as database,
        serving_cluster(tmp_path / "convoy-data", BASE_PORT) as cluster,
    ):
        create(cluster, "first", 1)
        output = run_page(
            "docs/capture.md", tmp_path, replaced={**PORTS, "3306": str(database.port)}
        )
    assert "capture: 2 messages; all is stored up to" in output


@pytest.mark.long
@pytest.mark.skipif("JAVA_HOME" in os.environ and not os.environ["JAVA_HOME"], reason="no Java")
def test_the_tutorial_of_spark_runs(tmp_path: Path) -> None:
    with ForkedCluster(tmp_path / "data", 3, BASE_PORT, TRACED) as cluster:
        cluster.wait_ready()
        output = run_page(
            "docs/spark.md",
            tmp_path,
            replaced={**PORTS, **METRICS_PORT},
            environment=spark_environment(),
        )
    assert "Exception" not in output, output[-6000:]
    assert "Traceback" not in output, output[-6000:]


@pytest.mark.long
def test_the_page_on_audits_runs(tmp_path: Path) -> None:
    with ForkedCluster(tmp_path / "data", 3, BASE_PORT, TRACED) as cluster:
        cluster.wait_ready()
        output = run_page(
            "docs/audit.md",
            tmp_path,
            replaced=PORTS,
            environment=spark_environment(),
        )
    assert "Exception" not in output, output[-6000:]
    assert (tmp_path / "audit.html").exists()


@pytest.mark.long
def test_the_page_on_triage_runs(tmp_path: Path) -> None:
    with ForkedCluster(tmp_path / "data", 3, BASE_PORT) as cluster:
        cluster.wait_ready()
        output = run_page(
            "docs/triage.md",
            tmp_path,
            replaced=PORTS,
            environment=spark_environment(),
        )
    assert "Exception" not in output, output[-6000:]
    for page in ("dry-run.html", "triage.html"):
        assert "class='bars'" in (tmp_path / page).read_text()
