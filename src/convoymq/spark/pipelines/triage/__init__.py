"""`triage`: dead letters to a Delta table, decided by rules, carried out once (ADR 0054)."""

from convoymq.spark.pipelines.triage.pipeline import messages, triage
from convoymq.spark.pipelines.triage.report import TriageReport
from convoymq.spark.pipelines.triage.rules import RuleError, Rules

__all__ = ["RuleError", "Rules", "TriageReport", "messages", "triage"]
