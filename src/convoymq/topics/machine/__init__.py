"""A physical partition of an ordered topic: its rules, its replicated machine, its queue type."""
