"""Lets the Python workers of Spark start sooner (`tests.spark.quick_start`)."""

import sys

# They take PySpark from where the driver has it. What Python finds in a zip file it compiles anew
# at every start.
sys.path[:] = [path for path in sys.path if not path.endswith("pyspark.zip")]
if "pyspark.daemon" in sys.orig_argv:
    # Imported before workers are forked; each would do it for itself.
    import pyarrow  # noqa: F401
