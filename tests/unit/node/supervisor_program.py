"""A machine of two processes that are no nodes: `python -m tests.unit.node.supervisor_program`.

Arguments: what the processes do, and a file that each of them gets a line in when it starts.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

from convoymq.edges.configuration import load
from convoymq.model.config import Config
from convoymq.node.supervised import Supervised
from convoymq.node.supervisor import Supervisor


def main() -> int:
    """Runs the machine; returns its exit code."""
    what, starts = sys.argv[1], Path(sys.argv[2])

    def run_node(config: Config, supervised: Supervised) -> int:
        with starts.open("a") as file:
            print(config.node.id, os.getpid(), file=file)
        if what == "refuse" and config.node.process == 2:
            return 1
        ended: list[int] = []
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda got, _frame: ended.append(got))
        supervised.channel.send(b"READY=1\nSTATUS=Clients are served")
        while not ended and not select.select([supervised.channel], [], [], 0.05)[0]:
            pass
        with starts.open("a") as file:
            print("end", config.node.id, ended[0] if ended else "alone", file=file)
        # A process that ends by SIGHUP stands for one that fails.
        return 70 if ended == [signal.SIGHUP] else 0

    config = load(None, {}, {"listeners.tcp.default": "none"})
    return Supervisor(config, 2, run_node).run()


if __name__ == "__main__":
    sys.exit(main())
