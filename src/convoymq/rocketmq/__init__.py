"""Broker groups: RocketMQ's protocol, its name server and its broker."""
