"""Ordered topics: routes, changes and their rules, without I/O (ADR 0060)."""
