"""Reading a stream's log: in its nodes, and in clients on their machine (ADR 0014)."""
