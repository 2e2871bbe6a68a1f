"""The Spark that has Delta Lake's extension: where it is, and how its sessions are set up.

`make spark-jars` puts it beside the environment's own PySpark, which is newer than Delta Lake's
jars. It is used by programs that have `DIRECTORY` in front of their module path.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyspark

from convoymq.spark.pipelines.merging import (
    CATALOG,
    CATALOG_SETTING,
    EXTENSION,
    EXTENSIONS_SETTING,
)

DIRECTORY = Path(sys.prefix) / "spark-delta"
MISSING = "Delta Lake's jars are not there: make spark-jars"
DELTA_SETTINGS = {
    EXTENSIONS_SETTING: EXTENSION,
    CATALOG_SETTING: CATALOG,
    # Tables of tests are small.
    "spark.databricks.delta.snapshotPartitions": "1",
}


def has_jars(home: Path) -> bool:
    """Returns whether a PySpark has Delta Lake's jars."""
    return any((home / "jars").glob("io.delta_delta-spark_*.jar"))


def is_installed() -> bool:
    """Returns whether there is a Spark with the jars."""
    return has_jars(DIRECTORY / "pyspark")


def is_used() -> bool:
    """Returns whether this process has the Spark with the jars."""
    return has_jars(Path(pyspark.__file__).parent)


def environment(before: str = "") -> dict[str, str]:
    """Returns what makes a program use the Spark with the jars."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(DIRECTORY), before)))}
