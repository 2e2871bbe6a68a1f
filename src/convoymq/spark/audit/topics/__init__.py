"""Checks A1 to A15 of ordered topics (ADR 0071)."""
