"""Queues that are migrated to another type, in the simulator."""
