"""Links between nodes, failure detection, and requests over links."""
