"""What classic queues reach: a backlog under a memory target, priorities, short-lived queues.

`python benchmarks/classic.py --count 10000000` runs one node on loopback and prints a figure
a line. Priorities: a queue with ten levels against a plain one in the same run, with messages of
one of them; `--cases` chooses.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.convoy import ConvoyCluster
from benchmarks.load import Load, broken_promises
from benchmarks.systems import connect

MIB = 1 << 20
TARGET = 256 * MIB
POLL_S = 0.1
CASES = ("backlog", "priorities", "churn")


class Resident:
    """Looks at the resident memory of a process; `peak` in bytes."""

    def __init__(self, pid: int) -> None:
        self._file = Path(f"/proc/{pid}/statm")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.peak = 0

    def _look(self) -> None:
        while not self._done.wait(POLL_S):
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        """Returns the resident bytes of this moment."""
        return int(self._file.read_text().split()[1]) * 4096

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        self._thread.join()


def load(cluster: ConvoyCluster, flags: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    """Runs the load tool once on classic queues. Raises SystemExit when a promise broke."""
    uri = cluster.uris[0]
    spelt = {name.replace("_", "-"): value for name, value in options.items()}
    run = Load(
        declare=uri,
        publish=[uri],
        consume=[uri],
        pids=cluster.pids,
        size=int(spelt.pop("size", 1024)),
        seconds=float(spelt.pop("seconds", 8.0)),
        options={"queue-type": "classic", **spelt},
        flags=("persistent", "verify", *flags),
    ).run()
    if found := broken_promises(run):
        raise SystemExit(f"broken: {', '.join(found)}")
    return run


def say(name: str, value: float, unit: str) -> None:
    """Prints a figure."""
    print(f"{name:32} {value:14,.1f} {unit}", flush=True)


def backlog(cluster: ConvoyCluster, count: int) -> None:
    """Publishes `count` messages of 100 bytes to one queue, and consumes them afterwards."""
    before = Resident(cluster.pids[0]).now()
    say("resident before", before / MIB, "MiB")
    common = {"size": 100, "count": count, "seconds": 3600, "warmup": 0, "queue_prefix": "backlog"}
    for name, mode in (("in", "pub"), ("out", "cons")):
        with Resident(cluster.pids[0]) as memory:
            start = time.monotonic()
            # The second run finds what the first one left.
            flags = ("keep",) if mode == "pub" else ("no-delete-first",)
            load(cluster, flags, mode=mode, **common)
            say(f"backlog {name}", count / (time.monotonic() - start), "msg/s")
        say(f"resident peak, {name}", memory.peak / MIB, "MiB")


def priorities(cluster: ConvoyCluster, seconds: float) -> None:
    """A queue with ten levels against a plain one."""
    rates = {}
    cases: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("plain", ()),
        ("ten levels", ("declare-args=x-max-priority=9",)),
    )
    for name, flags in cases:
        prefix = name.replace(" ", "-")
        run = load(cluster, flags, seconds=seconds, queue_prefix=prefix, property="priority=7")
        rates[name] = float(run["consumed_per_s"])
        say(name, rates[name], "msg/s")
    say("share of the plain queue", 100 * rates["ten levels"] / rates["plain"], "%")


def churn(cluster: ConvoyCluster, count: int) -> None:
    """Declares, binds, publishes to, reads and deletes one queue after the other."""
    channel = connect(cluster.uris[0]).channel()
    start = time.monotonic()
    for _ in range(count):
        queue = channel.queue_declare("", exclusive=True).method.queue
        channel.queue_bind(queue, "amq.direct", queue)
        channel.basic_publish("amq.direct", queue, b"reply")
        while channel.basic_get(queue, auto_ack=True)[0] is None:
            pass
        channel.queue_delete(queue)
    say("queues used and deleted", count / (time.monotonic() - start), "queues/s")


def main() -> None:
    """Runs the chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000_000, help="messages of the backlog")
    parser.add_argument("--queues", type=int, default=2_000, help="short-lived queues")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--base-port", type=int, default=26_500)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    chosen = parser.parse_args()
    settings = {"classic_queue.memory_target": str(TARGET)}
    with ConvoyCluster(base_port=chosen.base_port, count=1, settings=settings) as cluster:
        cluster.start()
        if "backlog" in chosen.cases:
            backlog(cluster, chosen.count)
        if "priorities" in chosen.cases:
            priorities(cluster, chosen.seconds)
        if "churn" in chosen.cases:
            churn(cluster, chosen.queues)


if __name__ == "__main__":
    main()
