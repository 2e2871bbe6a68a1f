"""The broker of a node: what protocol edges ask for, by subject, above the queues."""
