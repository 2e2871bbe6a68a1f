"""One node: its assembly, its rounds, how it enters a cluster, and what its operator may ask."""
