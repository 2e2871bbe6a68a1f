"""Ordered topics of a node: administration, changes of their routes, and their clients."""
