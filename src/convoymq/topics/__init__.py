"""Ordered topics, one room: rules, the machine of a partition, and their shell (ADR 0193)."""
