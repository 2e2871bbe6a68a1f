"""Keys of RabbitMQ's configuration that have no place in this one: what the cluster does anyway,
and what stands in the place of the others."""

from __future__ import annotations

from collections.abc import Mapping

PREFIXES = (("rabbit.", ""), ("ra.", "raft."), ("kernel.", ""))
"""Applications of RabbitMQ's `advanced.config` -> what their keys begin with in a flat file."""

_SSL_FIXED = {
    "honor_cipher_order": ("true", "the node chooses the cipher"),
    "secure_renegotiate": ("true", "OpenSSL does nothing else"),
    "client_renegotiation": ("false", "no side of a connection renegotiates"),
}
_SSL = ("ssl_options", "management.ssl", "prometheus.ssl")

FIXED: Mapping[str, tuple[str, str]] = {
    "raft.wal_compute_checksums": ("true", "every record of the log has a checksum"),
    "raft.segment_compute_checksums": ("true", "every record of the log has a checksum"),
    **{f"{at}.{name}": fixed for at in _SSL for name, fixed in _SSL_FIXED.items()},
}
"""Key -> (the only value that it may have, since the cluster does just that; why)."""

_SUSPICION = (
    "a silent node is suspected after cluster.suspect_after_min to cluster.suspect_after_max"
)
_PEERS = "nodes find each other by cluster.peers or cluster_formation.dns.hostname"
INSTEAD: Mapping[str, str] = {
    "raft.data_dir": "logs, segments and snapshots are in data_dir with all other data",
    "raft.wal_data_dir": "logs, segments and snapshots are in data_dir with all other data",
    "raft.wal_max_entries": "a write-ahead file is full by its size: raft.wal_max_size_bytes",
    "raft.wal_max_batch_size": "a flush takes all that waits for the disk, whatever its number",
    "raft.segment_max_size_bytes": "a segment is full by its entries: raft.segment_max_entries",
    "raft.max_append_entries_rpc_batch_size": "entries on their way are bounded in bytes: "
    "raft.link_window_bytes",
    "raft.snapshot_chunk_size": "the pieces of a snapshot have a fixed size",
    "raft.compress_mem_tables": "memory tables are bounded in bytes: raft.mem_table_max_bytes",
    "net_ticktime": _SUSPICION,
    "cluster_keepalive_interval": "links carry heartbeats: cluster.heartbeat_interval",
    "cluster_formation.peer_discovery_backend": _PEERS,
    "channel_operation_timeout": "use operation_timeout",
    "queue_master_locator": "use queue_leader_locator",
    "queue_index_embed_msgs_below": "small and large messages go to the same files",
    "vm_memory_high_watermark_paging_ratio": "classic queues share classic_queue.memory_target",
    "collect_statistics_interval": "figures are computed when somebody asks for them",
    "auth_cache.cached_backend.authn": "name one backend: auth_cache.cached_backend",
    "auth_cache.cached_backend.authz": "name one backend: auth_cache.cached_backend",
    "auth_cache.cache_module": "there is one kind of cache",
    "auth_oauth2.resource_server_type": "rich authorization requests are not read",
    "auth_oauth2.default_oauth_provider": "there is one provider: auth_oauth2.issuer",
    "auth_oauth2.https.depth": "chains are as long as OpenSSL allows",
    "auth_ldap.connection_pool_size": "a connection to the directory serves one question",
    "auth_ldap.idle_timeout": "a connection to the directory serves one question",
    "auth_ldap.log": "refusals are in the log, with their reason: identity.refused",
    **{f"{at}.depth": "chains are as long as OpenSSL allows" for at in _SSL},
}
"""Key -> what to do, or what the cluster does, in its place."""


def in_flat_file(name: str) -> str:
    """Returns the name of a key as RabbitMQ's flat file has it, where it is written as in
    `advanced.config`."""
    for prefix, flat in PREFIXES:
        if name.startswith(prefix):
            return flat + name[len(prefix) :]
    return name


def refusal(name: str, text: str) -> str | None:
    """Returns why a key of RabbitMQ's is not taken with a value; "" when the cluster does just that
    anyway, None when it is no such key."""
    fixed = FIXED.get(name)
    if fixed is not None:
        value, why = fixed
        return "" if text == value else f"{why}; `{value}` says so"
    if name.startswith("cluster_partition_handling."):
        return "the nodes of pause_if_all_down cannot be chosen: a majority of all nodes counts"
    return INSTEAD.get(name)
