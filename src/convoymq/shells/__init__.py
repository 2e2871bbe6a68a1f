"""The shells of replicated machines: what carries out the effects of their cores on a node."""
