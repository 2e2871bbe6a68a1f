"""Broker groups as a node of ConvoyMQ shows them (ADR 0182)."""
