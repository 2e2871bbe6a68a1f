"""The audit: proves from traces that the broker kept its promises, or shows where it did not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convoymq.spark.audit.plan import audit
    from convoymq.spark.audit.result import AuditReport

__all__ = ["AuditReport", "audit"]


def __getattr__(name: str) -> object:
    # Late: Spark's workers import this package for the sweeps and need no session.
    if name == "audit":
        from convoymq.spark.audit.plan import audit

        return audit
    if name == "AuditReport":
        from convoymq.spark.audit.result import AuditReport

        return AuditReport
    raise AttributeError(name)
