"""Sans-IO replication cores."""
