"""The pipeline on Spark: data sources, the session that runs them, and what watches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoymq.spark.listener import LagListener
    from convoymq.spark.spark_session import session

__all__ = ["LagListener", "session"]


def __getattr__(name: str) -> object:
    # Late: Spark's workers import this package to unpickle readers and need neither of the two.
    if name == "session":
        from convoymq.spark.spark_session import session

        return session
    if name == "LagListener":
        from convoymq.spark.listener import LagListener

        return LagListener
    raise AttributeError(name)
