"""Replication of a broker group over sockets: what `replication/group` decides, carried out."""
