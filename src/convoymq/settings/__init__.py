"""Settings of queues, exchanges and ordered topics: one table of them (ADR 0164)."""
