"""The trace: runs that a node records of a queue, and the files they go to (ADR 0009)."""
