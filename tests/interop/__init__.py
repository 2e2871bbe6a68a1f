"""Real clients against a real three-node cluster."""
