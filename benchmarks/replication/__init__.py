"""The ways to replicate a queue, through the same faults: what each of them loses."""
