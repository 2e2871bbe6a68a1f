"""RocketMQ's Java client with `convoy broker`: delayed and timed messages, transactions, pop."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.rocketmq.processes import BrokerProcess, Server
from tests.rocketmq.test_peers import CLIENTS, java
from tests.rocketmq.upstream import environment, needs_rocketmq

STEPS = ("delay", "timed", "transaction", "retry", "pop", "popOrderly")
STEPS_S = 60 * PATIENCE_S

pytestmark = [pytest.mark.optional, needs_rocketmq]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the client printed: it runs once for all tests."""
    directory: Path = tmp_path_factory.mktemp("special")
    names = Server(directory)
    broker = BrokerProcess(
        directory, names.address, messageDelayLevel="1s 2s 3s 10s", transactionTimeOut=1000,
        transactionCheckInterval=1000,
    )  # fmt: skip
    line = java(directory, CLIENTS / "Special.java")
    done = subprocess.run(
        [*line, names.address, broker.address], capture_output=True, text=True, timeout=STEPS_S,
        env=environment(directory), check=False,
    )  # fmt: skip
    broker.stop()
    names.stop()
    return done.stdout + done.stderr


@pytest.mark.parametrize("step", STEPS)
def test_the_java_client(said: str, step: str) -> None:
    lines = said.splitlines()
    assert f"ok {step}" in lines, said
    assert "end" in lines
