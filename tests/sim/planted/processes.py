"""Plants bugs, each in a process of its own: what is patched stays patched."""

from __future__ import annotations

import multiprocessing

from tests.sim.planted import report

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.sim.interpreted_world"])


def find_seed(
    name: str, first: int, limit: int, *, focused: bool = True, patience_s: float | None = None
) -> tuple[int, str] | None:
    """Returns the first of some seeds that notices a bug, and what was noticed; None = none does.

    Raises TimeoutError when there is no answer in time.
    """
    answer, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=report, args=(name, first, limit, focused, sender))
    process.start()
    sender.close()
    try:
        if not answer.poll(patience_s):
            raise TimeoutError(f"no answer in {patience_s} s")
        found: tuple[int, str] | None = answer.recv()
        return found
    finally:
        process.kill()
        process.join()
