"""The replicated tree of the cluster: users, topology, queues and nodes."""
