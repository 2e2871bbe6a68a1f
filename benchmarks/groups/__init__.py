"""Broker groups beside RocketMQ's own broker: `python -m benchmarks.groups`."""
