"""A Spark program that applies changes and stops where a test wants: `python apply_job.py '{…}'`.

The fields of the argument: servers, topic, tables (name → directory), schema, checkpoint, merge,
master, conf, options; `mark`, a file to which every MERGE adds a line `POINT TABLE BATCH` before
it begins or when it is committed; `kill`, such a line, at which the program kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from convoymq.spark import session
from convoymq.spark.pipelines.apply import TableSpec, apply


def main() -> None:
    """Applies what there is."""
    job = json.loads(sys.argv[1])

    def probe(point: str, table: str, batch_id: int) -> None:
        line = f"{point} {table} {batch_id}"
        with Path(job["mark"]).open("a") as marks:
            marks.write(f"{line}\n")
        if line == job.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)

    spark = session("apply", master=job["master"], conf=job["conf"])
    report = apply(
        spark,
        servers=job["servers"],
        topic=job["topic"],
        tables=[
            TableSpec(name=name, path=path, schema=job["schema"], keys=("id",))
            for name, path in job["tables"].items()
        ],
        checkpoint=job["checkpoint"],
        options=job["options"],
        merge=job["merge"],
        probe=probe,
    )
    print("report", json.dumps(asdict(report)), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
