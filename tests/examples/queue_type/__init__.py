"""A queue type that keeps the newest messages only, in memory, on one node."""
