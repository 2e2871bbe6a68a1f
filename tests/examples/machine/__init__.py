"""A counter as a replicated machine."""
