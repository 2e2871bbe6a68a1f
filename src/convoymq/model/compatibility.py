"""The broker that this one answers like, as clients and tools are told over AMQP and HTTP."""

from __future__ import annotations

COMPATIBLE_PRODUCT = "RabbitMQ"
COMPATIBLE_VERSION = "4.3.0"
"""Clients choose by it what they ask for: kombu, which kind of QoS; tools, which paths."""

RELEASE_4_1 = "4.1"
RELEASE_4_3 = "4.3"
RELEASES = (RELEASE_4_1, RELEASE_4_3)
"""Releases whose rules a quorum queue may follow (ADR 0086)."""

COMPATIBILITY = "rabbitmq-compatibility"
"""Key of a queue's settings: the release whose rules it follows. Declarations of ConvoyMQ 0.3 and
before recorded none: these queues follow 4.3."""
TYPE_GIVEN = "type-given"
"""Key of a queue's settings: its declaration said its type."""
