"""Makes a Spark that has Delta Lake's extension, beside the one that the tests use.

    .venv/bin/python tools/install_delta.py .venv/spark-delta

The directory gets PySpark of the newest version that Delta Lake has jars for, and these jars: the
Spark of the lock file is newer than they are. It goes in front of the environment's own by
PYTHONPATH. Needs Java, pip and Spark's own client of Maven repositories. A repeat changes nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SPARK = "4.2.0"
DELTA = "4.4.0"
PACKAGE = f"io.delta:delta-spark_4.2_2.13:{DELTA}"
LEFT_OUT = ("org.*:*", "com.*:*", "javax.*:*", "io.airlift:*", "commons-pool:*")
"""What Spark has itself, in versions of its own."""

FETCH = """
import sys
from pyspark.sql import SparkSession
package, left_out, place = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.jars.packages", package)
builder = builder.config("spark.jars.excludes", left_out).config("spark.jars.ivy", place)
builder.config("spark.ui.enabled", "false").getOrCreate().stop()
"""


def main() -> int:
    """Installs what is missing."""
    target = Path(sys.argv[1]).resolve()
    done = target / f".delta-{DELTA}-spark-{SPARK}"
    if done.exists():
        return 0
    if not (target / f"pyspark-{SPARK}.dist-info").exists():
        shutil.rmtree(target, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-compile")
        subprocess.run([*pip, "--target", str(target), f"pyspark=={SPARK}"], check=True)
    from convoymq.spark.java import java_home

    environment = {**os.environ, "PYTHONPATH": str(target), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment.pop("SPARK_HOME", None)
    if (home := java_home()) is not None:
        environment["JAVA_HOME"] = home
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-c", FETCH, PACKAGE, ",".join(LEFT_OUT), place]
        subprocess.run(command, check=True, env=environment, cwd=place)
        jars = list(Path(place, "jars").iterdir())
        for jar in jars:
            shutil.copy(jar, target / "pyspark" / "jars")
    print(f"{len(jars)} jars of Delta Lake {DELTA} and Spark {SPARK} are in {target}")
    done.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
