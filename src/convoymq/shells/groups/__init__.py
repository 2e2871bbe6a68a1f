"""The shell of every replicated machine: the replicas of a node's Raft groups."""
