"""A queue of a primary and copies: replicated, and not by Raft."""
