"""Replication of a broker group over sockets, around the core `replication/group`."""
