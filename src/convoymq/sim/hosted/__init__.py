"""Nodes that host queues, or members of rings, in the simulator."""
