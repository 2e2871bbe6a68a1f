"""The demo on a starved machine: questions are repeated, and nothing waits for ever."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from convoymq.model.errors import Unavailable


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "examples" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    monkeypatch.setitem(sys.modules, "demo", module)
    spec.loader.exec_module(module)
    return module


def test_a_question_is_repeated_until_somebody_answers(demo: ModuleType) -> None:
    answers = iter([Unavailable("timed out"), Unavailable("timed out"), 2])

    def question() -> int:
        answer = next(answers)
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    assert demo.answered(question) == 2

    def nobody() -> int:
        raise Unavailable("timed out")

    with pytest.raises(Unavailable, match="timed out"):
        demo.answered(nobody, 0.0)


def test_a_worker_that_says_nothing_is_not_waited_for(demo: ModuleType) -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    with pytest.raises(RuntimeError, match="no word from the consumer"):
        demo.received(here, "consumer", 0.01)
    there.send(7)
    assert demo.received(here, "consumer") == 7


def test_workers_are_ended_together_in_bounded_time(demo: ModuleType) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=time.sleep, args=(600,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    demo.end(workers, 0.05)
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 3


def test_a_driver_that_has_ended_is_told_without_an_error(demo: ModuleType) -> None:
    driver = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, text=True)
    driver.wait()
    assert driver.stdin is not None
    demo.tell(driver, "begin")
    with contextlib.suppress(BrokenPipeError):
        driver.stdin.close()
    assert driver.stdin.closed
