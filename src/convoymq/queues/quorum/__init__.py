"""Quorum queues: the replicated queue machine and its shell."""
