"""Replication of a broker group: a master's log and its slaves' copies, without I/O."""
