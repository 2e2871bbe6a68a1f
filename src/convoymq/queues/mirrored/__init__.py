"""Mirrored classic queues: a master and its mirrors on a ring (ADR 0123)."""
