"""Sections about the node and its cluster: identity, listeners, TLS, cluster, Raft."""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.model.config.keys import Section, key
from convoymq.model.config.values import (
    Address,
    Listener,
    parse_address,
    parse_addresses,
    parse_bytes,
    parse_listener,
    parse_processes,
    parse_voters,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Node: its identity, and the place of its data."""

    id: int = key(
        "node.id", 1,
        """Number of this node, unique in its cluster. Two nodes with one number refuse each other;
        changing it on a node that has data makes it a different node.""",
        low=1, high=255,
    )  # fmt: skip
    name: str = key(
        "node.name nodename",
        "",
        """Name shown to people and in the HTTP API; empty = `convoy-ID@host`. Changing it does no
        harm.""",
    )
    data_dir: str = key(
        "data_dir",
        "./convoy-data",
        """Directory of everything this node must not lose. One node per directory (it is locked).
        Pointing an existing node to an empty one makes it forget all its messages.""",
        type_name="path",
    )
    loop: str = key(
        "node.event_loop",
        "uvloop",
        "Event loop implementation. `asyncio` is slower and only meant for looking for faults.",
        choices=("uvloop", "asyncio"),
    )
    stop_timeout_ms: int = key(
        "node.stop_timeout", 5_000,
        """How long an orderly stop may take. Shorter: clients may have to wait for an election
        instead of a transfer of leadership.""",
        unit="ms", low=0, high=600_000,
    )  # fmt: skip
    processes: int = key(
        "node.processes", 1,
        """Processes of this machine, each of which uses a core: nodes of the cluster with one port
        for clients (docs/scale.md). `auto`: as many as the machine has cores, less one. With fewer
        than before, forget the nodes that are gone.""",
        parse=parse_processes,
    )  # fmt: skip
    id_step: int = key(
        "node.id_step", 32,
        """Process k of this machine is node `node.id` + step × (k - 1). 32 leaves numbers for 31
        machines of 8 processes, 16 for 15 machines of 16. Set it alike on all machines; changing it
        makes the processes different nodes.""",
        low=1, high=128,
    )  # fmt: skip
    machine: int = 0
    """Number of its machine, where it is one of several processes; 0: it is the machine."""
    process: int = 1
    """Number of this process among those of its machine."""
    revive_at_start: bool = key(
        "node.revive_at_start", False,
        """Ends the maintenance of this node when it starts. For service managers and Kubernetes,
        which drain a node before they stop it.""",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenersConfig(Section):
    """Listeners for clients."""

    tcp: tuple[Address, ...] = key(
        "listeners.tcp.default listeners.tcp", (Address("localhost", 5672),),
        """AMQP without TLS: a port, an address and port, or `none`; `listeners.tcp.NAME` for
        several. A port alone (or `localhost`) listens on the loopback addresses, 127.0.0.1 and,
        where the system has IPv6, ::1; other machines reach only what is listed with an address.
        `[::]:5672` listens on all addresses of both families, `0.0.0.0:5672` on those of IPv4.""",
        parse=parse_listener, collects="listeners.tcp.",
    )  # fmt: skip
    ssl: tuple[Address, ...] = key(
        "listeners.ssl.default listeners.ssl", (),
        "AMQP with TLS, as `listeners.tcp.default`. Needs `ssl_options.certfile` and `.keyfile`.",
        parse=parse_listener, collects="listeners.ssl.",
    )  # fmt: skip
    backlog: int = key(
        "tcp_listen_options.backlog", 1024,
        """Connections that the system accepts ahead of the node, on each listening socket (AMQP,
        HTTP, metrics, links); too few are refused in a storm. The system has its own bound.""",
        low=1, high=65535,
    )  # fmt: skip
    handshake_timeout_ms: int = key(
        "handshake_timeout", 10_000,
        """A connection that has not authenticated by then is closed. Longer lets unknown clients
        hold more connections.""",
        unit="ms", low=100, high=600_000,
    )  # fmt: skip
    connections_max: int = key(
        "connection_max", 65_536,
        """Client connections of this node; more are refused. Bounded by the open-files limit as
        well.""",
        low=1, high=1_000_000,
    )  # fmt: skip
    max_message_size: int = key(
        "max_message_size", 16 << 20,
        "A larger message closes its channel. Large messages hold up everything behind them.",
        parse=parse_bytes, low=1024, high=512 << 20,
    )  # fmt: skip

    def listeners(self) -> tuple[Listener, ...]:
        return (
            Listener("amqp", "amqp", "AMQP", "listeners.tcp.default", self.tcp),
            Listener(
                "amqps", "amqp/ssl", "AMQP with TLS", "listeners.ssl.default", self.ssl, "ssl"
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Cluster: addresses and credentials by which nodes find and trust each other."""

    name: str = key(
        "cluster_name cluster.name",
        "convoy",
        """Name of the cluster; nodes of differently named clusters refuse each other. Change it
        on all nodes at once or not at all.""",
    )
    address: Address = key(  # noqa: RUF009
        "cluster.listen",
        Address("127.0.0.1", 25672),
        "Where this node accepts the links of other nodes.",
        parse=parse_address,
    )
    port: int = key(
        "cluster.port", 0,
        "Port of `cluster.listen` alone; 0 = the one given there.",
        low=0, high=65535,
    )  # fmt: skip
    advertise: str = key(
        "cluster.advertise",
        "",
        "`host:port` by which other nodes reach this one; empty = `cluster.listen`.",
    )
    peers: tuple[Address, ...] = key(
        "cluster.peers", (),
        """The nodes of the cluster, this one included: `id@host:port` separated by commas.
        Without ids the nodes tell theirs when they link, and
        `cluster_formation.target_cluster_size_hint` says how many there are. Without ids, without
        that number and without its own address a node only joins a cluster that exists. Only read
        when a cluster forms; later the members are in the metadata.""",
        parse=parse_addresses, collects="cluster_formation.classic_config.nodes.",
    )  # fmt: skip
    dns_name: str = key(
        "cluster_formation.dns.hostname",
        "",
        "A DNS name with one address per node, on the port of `cluster.listen`.",
    )
    size_hint: int = key(
        "cluster_formation.target_cluster_size_hint", 0,
        """How many nodes make the first cluster when `cluster.peers` has no ids; 0 = as many as
        there are peers. Too small a number may let two clusters form. Later the health check
        `reached-target-cluster-size` asks for so many running nodes; 0 = all that are known.""",
        low=0, high=255,
    )  # fmt: skip
    secret: str = key(
        "cluster.secret",
        "",
        """Shared secret that nodes prove to know when they link. Who has it is a node; empty only
        works on loopback addresses.""",
        secret=True,
    )
    secret_file: str = key(
        "cluster.secret_file", "", "File that holds the secret, readable by its owner alone."
    )
    accepted_secret_file: str = key(
        "cluster.accepted_secret_file",
        "",
        """File with another secret that nodes which link may have, while the secret is replaced;
        an empty file holds none.""",
    )
    tls_certfile: str = key(
        "cluster.tls.certfile", "", "Certificate chain of this node for links, PEM; empty = no TLS."
    )
    tls_keyfile: str = key("cluster.tls.keyfile", "", "Private key for links, PEM.")
    tls_cacertfile: str = key(
        "cluster.tls.cacertfile",
        "",
        "Authorities that other nodes' certificates must come from, PEM.",
    )
    heartbeat_ms: int = key(
        "cluster.heartbeat_interval", 100,
        """A link that is silent this long carries a heartbeat. Longer: less idle CPU, later
        suspicion.""",
        unit="ms", low=10, high=10_000,
    )  # fmt: skip
    suspect_min_ms: int = key(
        "cluster.suspect_after_min", 400,
        """A node is never suspected for a shorter silence. Too short: pauses of a busy machine look
        like failures and leaders change for nothing.""",
        unit="ms", low=50, high=60_000,
    )  # fmt: skip
    suspect_max_ms: int = key(
        "cluster.suspect_after_max", 2_000,
        "A node is always suspected after this silence, however irregular it was before.",
        unit="ms", low=100, high=600_000,
    )  # fmt: skip
    link_frame_max_bytes: int = key(
        "cluster.link_frame_max", (512 << 20) + (128 << 10),
        "A longer frame on a link is refused before memory is set aside for it.",
        parse=parse_bytes, low=1 << 20, high=1 << 31,
    )  # fmt: skip
    link_backlog_max_bytes: int = key(
        "cluster.link_backlog_max", 256 << 20,
        """Bytes queued for a node that does not read; above it the link is broken and made anew.
        Entries, deliveries and snapshots wait while an eighth of it is under way, those through
        another node from a 32nd: smaller costs throughput over distances, larger costs memory.""",
        parse=parse_bytes, low=1 << 20, high=1 << 36,
    )  # fmt: skip
    zone: str = key(
        "cluster.zone", "",
        """What fails together with this node: a rack, a hall, a zone of a cloud. Replicas of a
        queue go to different zones while there are others. Empty: the machine is the zone.
        Changing it counts from the next start on; replicas stay where they are.""",
    )  # fmt: skip
    metadata_voters: int = key(
        "cluster.metadata_voters", 5,
        """Nodes that decide changes of the metadata, at most; an odd number, one in a zone (one on
        a machine with fewer than three zones). The others have a copy and no vote: the more
        voters, the dearer a declaration. Set it alike on all nodes.""",
        parse=parse_voters, type_name="3, 5 or 7",
    )  # fmt: skip
    voter_away_max_ms: int = key(
        "cluster.metadata_voter_away_max", 600_000,
        """A node that votes on the metadata and is away for so long loses its vote to another one
        of its zone (or machine), or of one without a vote. Shorter: votes move while nodes are
        restarted.""",
        unit="ms", low=1_000, high=86_400_000,
    )  # fmt: skip
    peers_max: int = key("cluster.nodes_max", 64, "Nodes of a cluster.", low=1, high=255)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftConfig:
    """The replicated log and its files."""

    wal_max_size_bytes: int = key(
        "raft.wal_max_size_bytes quorum_queue.wal_max_size_bytes", 128 << 20,
        """A write-ahead file is full at this size. Smaller: more, smaller segment files; larger:
        more to read at a restart.""",
        parse=parse_bytes, low=1 << 16, high=1 << 38,
    )  # fmt: skip
    segment_max_entries: int = key(
        "raft.segment_max_entries quorum_queue.segment_max_entries", 4096,
        "Entries in a segment file. Large messages want fewer.",
        low=1, high=65535,
    )  # fmt: skip
    wal_sync_method: str = key(
        "raft.wal_sync_method",
        "datasync",
        "How a write is made durable before it counts. `none` loses messages at a power failure.",
        choices=("datasync", "sync", "o_sync", "none"),
    )
    wal_preallocate: bool = key(
        "raft.wal_preallocate",
        True,
        "Prepare write-ahead files in the background; without it every flush costs about double.",
    )
    wal_inline_flush: bool = key(
        "raft.wal_inline_flush",
        True,
        """Flush small batches on the event loop while the disk is quick and mostly idle; a slow
        flush
        turns this off for five seconds. `false`: always on the thread, at a quarter more CPU.""",
    )
    mem_table_max_bytes: int = key(
        "raft.mem_table_max_bytes", 16 << 20,
        """Message bodies kept in memory that are already on disk. Smaller: a consumer that lags
        reads from disk earlier.""",
        parse=parse_bytes, low=0, high=1 << 40,
    )  # fmt: skip
    election_timeout_ms: int = key(
        "raft.election_timeout", 150,
        """Base of the random wait before a follower of a failed leader stands for election; the
        wait lies between half and double. Too short: several stand at once.""",
        unit="ms", low=10, high=60_000,
    )  # fmt: skip
    quorum_timeout_ms: int = key(
        "raft.quorum_timeout", 5000,
        """A leader that waits so long for an answer of a majority, although it is linked to one,
        steps down: disks are stuck, or replicas have stopped. Too short: slow disks cost
        elections.""",
        unit="ms", low=1000, high=600_000,
    )  # fmt: skip
    hold_versions: bool = key(
        "raft.hold_versions",
        False,
        """Leaders on this node raise no machine version. Set it on every node before an upgrade
        that may have to be taken back: a node does not go back to a release that does not support
        the versions in force (docs/upgrade.md).""",
    )
    link_window_bytes: int = key(
        "raft.link_window_bytes", 8 << 20,
        "Log entries are held back while more than this waits on the link to a follower.",
        parse=parse_bytes, low=1 << 16, high=1 << 32,
    )  # fmt: skip
    deferral_ms: int = key(
        "raft.deferral", 10,
        """At low rates a follower that no majority and no client waits for gets its log entries
        together, and acknowledgements that free nothing anybody waits for are logged with what
        comes next; late by this at most (double when nothing else happens). 0: everything at once,
        at a third more CPU.""",
        unit="ms", low=0, high=1000,
    )  # fmt: skip
    segment_max_size_bytes: int = 64_000_000
    """A segment file takes no further entry above this size."""
    read_ahead_bytes: int = 1 << 20
    """A read from disk fetches this much of what follows for the same group."""
    snapshot_min_dead_bytes: int = 256 << 10
    """WAL compaction snapshots a group of which this much in the file is dead; else it copies."""
    pack_below_bytes: int = 4096
    """A group of which less than this is alive in a WAL file shares a pack with others."""
    retransmit_ms: int = 1000
    """A follower that owes an answer and makes no progress for so long is asked where it is."""
    append_bytes_max: int = 2 << 20
    """Entries in one append to a follower that lags; a single entry may be larger."""
    apply_bytes_max: int = 16 << 20
    """Applied in one round of one group; more waits for the next, so that others get their turn."""
    deferral_bytes_max: int = 64 << 10
    """As soon as so much waits for a follower, it is sent."""
    deferral_commit_ms: int = 2
    """Nobody is deferred while an entry has waited so long for its commit."""
    gather_ms: int = 2
    """A leader's commands gather for so long at most while its last entry is under way; 0 = every
    round makes an entry."""
    gather_bytes_max: int = 256 << 10
    """As soon as so much has gathered it becomes an entry."""
    snapshot_chunk_bytes: int = 1_000_000
    """One chunk of a snapshot."""
    snapshot_chunks_in_flight: int = 4
    """Chunks sent and not acknowledged."""
    lag_ms: int = 1000
    """A replica that is behind for so long does not serve the clients of its node: the leader does,
    until it has caught up."""
    lag_entries_max: int = 10_000
    """A follower this far behind does not serve its node's sessions: the leader does."""
