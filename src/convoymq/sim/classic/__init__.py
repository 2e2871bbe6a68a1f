"""Classic queues in the simulator."""
