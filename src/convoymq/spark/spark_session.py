"""A Spark session that can use the data sources, on this machine or on a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULTS = {
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.pyspark.udf.hideTraceback.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
}
"""Without the first, the option `pushdown` is refused by Spark. With the second, the first line of
an error has its cause, instead of `Traceback (most recent call last)`."""

LOCAL_DEFAULTS = {
    "spark.sql.catalogImplementation": "in-memory",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
"""On this machine alone: no metastore in the working directory, no port open to others."""


def session(
    app: str = "convoymq",
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Returns the Spark session, made if there is none.

    Works unchanged under `spark-submit` and with any master: what the environment or spark-submit
    has chosen stays. What has to be set before Java starts is set here:

    - JAVA_HOME, when there is no Java of version 17 or later but `convoymq[spark-jre]` (see
      `convoymq.spark.java`);
    - PYSPARK_PYTHON: tasks run in the interpreter of the driver, not in the `python3` of PATH,
      which has other packages. On a cluster whose machines have it elsewhere, and before
      spark-submit, whose Java has started when this is called, set it yourself.

    Args:
        app: the application's name.
        master: as Spark writes it: `local[4]`, `spark://host:7077`, `yarn`, `k8s://…`. Default:
            what spark-submit or PYSPARK_SUBMIT_ARGS says, else `local[*]`.
        conf: further settings; they have priority.

    Raises:
        JavaMissing: no Java.
    """
    from pyspark.sql import SparkSession

    # Either means that Java runs already, or runs elsewhere.
    started = "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_REMOTE" in os.environ
    chosen = started or "--master" in os.environ.get("PYSPARK_SUBMIT_ARGS", "")
    wanted = dict(conf or {})
    master = master or wanted.get("spark.master") or (None if chosen else "local[*]")
    settings = dict(DEFAULTS)
    if master is not None:
        settings["spark.master"] = master
        if master.startswith("local") and not started:
            settings |= LOCAL_DEFAULTS
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings |= wanted
    if not started and SparkSession.getActiveSession() is None:
        _provide_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app)
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _provide_java() -> None:
    from convoymq.spark.java import java_home

    home = java_home()
    if home is not None:
        os.environ["JAVA_HOME"] = home
