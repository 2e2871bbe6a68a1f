"""Moves messages between queues or ordered topics of ConvoyMQ and topics of RocketMQ."""
