"""Physical partitions of ordered topics, as a queue type."""
