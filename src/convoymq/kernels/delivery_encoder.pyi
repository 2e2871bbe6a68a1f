"""Deliveries of a channel, for `channel_codec`; nothing here is called from Python."""
