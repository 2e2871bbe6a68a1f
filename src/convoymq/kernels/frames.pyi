"""Scans AMQP 0-9-1 frames for `connection_buffer`; nothing here is called from Python."""
