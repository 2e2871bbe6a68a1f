"""A simulated ordered topic: the package under test on a simulated network, under faults."""
