"""Nodes, links, failure detection, replicas and the metadata store."""
