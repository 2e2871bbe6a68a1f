"""The tools against what RabbitMQ's own print, command by command (`tests.rabbitmq_tools`)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.faults.conftest import BASE_PORT
from tests.faults.test_tools import node_names
from tests.rabbitmq_tools import RECORDED, SUBJECTS, commands, lines
from tests.tool_processes import ToolProcesses

TOOLS = {"rabbitmqctl": "ctl", "rabbitmq-diagnostics": "diagnostics", "rabbitmq-queues": "queues"}
KNOWN = json.loads(RECORDED.read_text())["subjects"]


def test_the_recording_is_of_these_commands() -> None:
    for subject in SUBJECTS:
        recorded = [(tool, words) for tool, words, *_ in KNOWN[subject]]
        assert recorded == [(tool, words) for _, tool, words in commands(subject)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One node for all subjects; they leave nothing that others see."""
    with LocalCluster(tmp_path_factory.mktemp("compared"), 1, BASE_PORT) as made:
        made.wait_ready()
        yield made


@pytest.fixture(scope="module")
def tools(
    cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ToolProcesses]:
    environment = {"CONVOY_DATA_DIR": str(cluster.data), "RABBITMQ_NODENAME": ""}
    with ToolProcesses(tmp_path_factory.mktemp("tools"), environment) as made:
        yield made


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_tools_print_what_rabbitmqs_print(
    cluster: LocalCluster, subject: str, tools: ToolProcesses
) -> None:
    (node,) = node_names(cluster).values()
    different = []
    for (mark, tool, words), (_, _, code, *texts) in zip(
        commands(subject), KNOWN[subject], strict=True
    ):
        got, out, err = tools.run(TOOLS[tool], "--script-name", tool, *words)
        ours = [lines(out, node), lines(err, node)]
        if (got != code) != (mark == "!") or (mark == "=" and ours != texts):
            different.append((mark, tool, words, (code, *texts), (got, *ours)))
    assert not different, "\n".join(map(str, different))
