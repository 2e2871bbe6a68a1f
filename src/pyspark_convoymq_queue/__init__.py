"""By the name of this module Spark finds its format `convoymq_queue`; see `convoymq.spark`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyspark_convoymq

if TYPE_CHECKING:
    from convoymq.spark.sources import QueueSource


class DefaultSource(pyspark_convoymq.DefaultSource):
    """Format `convoymq_queue`: see docs/spark.md."""

    FORMAT = "convoymq_queue"

    @staticmethod
    def _source_class() -> type[QueueSource]:
        from convoymq.spark.sources import QueueSource

        return QueueSource
