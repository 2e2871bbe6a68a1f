"""Classic queues: single-node, in memory or on disk."""
