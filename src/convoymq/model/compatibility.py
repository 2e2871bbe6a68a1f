"""The broker that this one answers like, as clients and tools are told over AMQP and HTTP."""

from __future__ import annotations

COMPATIBLE_PRODUCT = "RabbitMQ"
COMPATIBLE_VERSION = "4.3.0"
"""Clients choose by it what they ask for: kombu, which kind of QoS; tools, which paths."""
