"""Configuration of a node: one frozen object, built from defaults < file < environment < flags.

A configuration file holds `key = value` lines; `#` starts a comment. Key names are RabbitMQ's
where the meaning is the same. In the environment a key is written in capitals, with `CONVOY_` in
front and `_` for every dot: `raft.segment_max_entries` is `CONVOY_RAFT_SEGMENT_MAX_ENTRIES`. An
unknown key is an error that names the nearest known one. `reference` makes docs/configuration.md.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from convoymq.model.errors import Refused

ENVIRONMENT_PREFIX = "CONVOY_"
ENVIRONMENT_OTHERS = ("CONVOY_KERNEL_", "CONVOY_TEST_", "CONVOY_SIM_", "CONVOY_DEMO_")
"""Variables with these beginnings belong to tools and are no configuration."""
FILE_SIZE_MAX = 1 << 20


class ConfigError(Refused):
    """A key is unknown or a value is not acceptable; the text names key and place."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen or to connect. `node` is the id of who listens there, 0 when not given."""

    host: str
    port: int
    node: int = 0

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.node}@{host}:{self.port}" if self.node else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Key:
    names: tuple[str, ...]
    parse: Callable[[str], Any]
    type_name: str
    unit: str
    low: float | None
    high: float | None
    doc: str
    choices: tuple[str, ...]
    collects: str

    @property
    def name(self) -> str:
        return self.names[0]


_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "kb": 10**3,
    "m": 1 << 20,
    "mib": 1 << 20,
    "mb": 10**6,
    "g": 1 << 30,
    "gib": 1 << 30,
    "gb": 10**9,
    "t": 1 << 40,
    "tib": 1 << 40,
    "tb": 10**12,
}


def parse_bytes(text: str) -> int:
    """Returns a size in bytes: a number, perhaps with k, M, G (powers of 1024) or kB, MB (1000)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].lower() not in _BYTE_UNITS:
        raise ValueError("not a size such as 512MiB")
    return int(float(match[1]) * _BYTE_UNITS[match[2].lower()])


def _parse_bool(text: str) -> bool:
    if text.lower() in ("true", "on", "yes"):
        return True
    if text.lower() in ("false", "off", "no"):
        return False
    raise ValueError("not true or false")


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("not a whole number") from None


def _parse_optional_int(text: str) -> int | None:
    return None if text.lower() in ("none", "undefined", "infinity") else _parse_int(text)


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("not a number") from None


def parse_address(text: str, default_host: str = "127.0.0.1") -> Address:
    """Returns `port`, `host:port`, `[v6]:port` or `id@host:port` as an `Address`.

    Raises:
        ValueError: it is none of these, or the port is not in 0..65535.
    """
    node = 0
    if "@" in text:
        number, text = text.split("@", 1)
        node = _parse_int(number)
        if not 1 <= node <= 255:
            raise ValueError("a node id is between 1 and 255")
    match = re.fullmatch(r"(?:(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:\s]+)):)?(\d{1,5})", text.strip())
    if match is None or int(match[3]) > 65535:
        raise ValueError("not an address such as 127.0.0.1:5672")
    return Address(match[1] or match[2] or default_host, int(match[3]), node)


def _parse_listener(text: str) -> tuple[Address, ...]:
    return () if text.lower() == "none" else (parse_address(text, "localhost"),)


def _parse_addresses(text: str) -> tuple[Address, ...]:
    return tuple(parse_address(part) for part in re.split(r"[,\s]+", text.strip()) if part)


def _parse_words(text: str) -> tuple[str, ...]:
    if text.strip().lower() == "none":
        return ()
    return tuple(part for part in re.split(r"[,\s]+", text.strip()) if part)


def _key(
    names: str,
    default: Any,
    doc: str,
    *,
    parse: Callable[[str], Any] = str,
    type_name: str = "",
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    collects: str = "",
    secret: bool = False,
) -> Any:
    labels: dict[Any, str] = {
        str: "text",
        _parse_int: "number",
        _parse_float: "number",
        _parse_bool: "true or false",
        parse_bytes: "size",
        _parse_optional_int: "number or none",
        _parse_listener: "port, address or none",
        _parse_addresses: "addresses",
        parse_address: "address",
        _parse_words: "words",
    }
    key = _Key(
        tuple(names.split()),
        parse,
        type_name or labels[parse],
        unit,
        low,
        high,
        " ".join(doc.split()),
        choices,
        collects,
    )
    return field(default=default, repr=not secret, metadata={"key": key})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Who this node is and where its data lies."""

    id: int = _key(
        "node.id",
        1,
        """Number of this node, unique in its cluster. Two nodes with one number refuse each other;
        changing it on a node that has data makes it a different node.""",
        parse=_parse_int,
        low=1,
        high=255,
    )
    name: str = _key(
        "node.name nodename",
        "",
        """Name shown to people and in the HTTP API; empty = `convoy-ID@host`. Changing it does no
        harm.""",
    )
    data_dir: str = _key(
        "data_dir",
        "./convoy-data",
        """Directory of everything this node must not lose. One node per directory (it is locked).
        Pointing an existing node to an empty one makes it forget all its messages.""",
        type_name="path",
    )
    loop: str = _key(
        "node.event_loop",
        "uvloop",
        "Event loop implementation. `asyncio` is slower and only meant for looking for faults.",
        choices=("uvloop", "asyncio"),
    )
    stop_timeout_ms: int = _key(
        "node.stop_timeout",
        5_000,
        """How long an orderly stop may take. Shorter: clients may have to wait for an election
        instead of a transfer of leadership.""",
        parse=_parse_int,
        unit="ms",
        low=0,
        high=600_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenersConfig:
    """Where clients connect."""

    tcp: tuple[Address, ...] = _key(
        "listeners.tcp.default listeners.tcp",
        (Address("localhost", 5672),),
        """AMQP without TLS: a port, an address and port, or `none`; `listeners.tcp.NAME` for
        several. A port alone (or `localhost`) listens on the loopback addresses, 127.0.0.1 and,
        where the system has IPv6, ::1; other machines reach only what is listed with an address.
        `[::]:5672` listens on all addresses of both families, `0.0.0.0:5672` on those of IPv4.""",
        parse=_parse_listener,
        collects="listeners.tcp.",
    )
    ssl: tuple[Address, ...] = _key(
        "listeners.ssl.default listeners.ssl",
        (),
        "AMQP with TLS, as `listeners.tcp.default`. Needs `ssl_options.certfile` and `.keyfile`.",
        parse=_parse_listener,
        collects="listeners.ssl.",
    )
    backlog: int = _key(
        "tcp_listen_options.backlog",
        1024,
        """Connections that the system accepts ahead of the node, on each listening socket (AMQP,
        HTTP, metrics, links); too few are refused in a storm. The system has its own bound.""",
        parse=_parse_int,
        low=1,
        high=65535,
    )
    handshake_timeout_ms: int = _key(
        "handshake_timeout",
        10_000,
        """A connection that has not authenticated by then is closed. Longer lets silent strangers
        hold more connections.""",
        parse=_parse_int,
        unit="ms",
        low=100,
        high=600_000,
    )
    connections_max: int = _key(
        "connection_max",
        65_536,
        """Client connections of this node; more are refused. Bounded by the open-files limit as
        well.""",
        parse=_parse_int,
        low=1,
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SslConfig:
    """TLS for clients (`ssl_options.*`)."""

    certfile: str = _key("ssl_options.certfile", "", "The node's certificate chain, PEM.")
    keyfile: str = _key("ssl_options.keyfile", "", "Private key of the certificate, PEM.")
    cacertfile: str = _key(
        "ssl_options.cacertfile",
        "",
        "Authorities that client certificates are checked against, PEM.",
    )
    verify: str = _key(
        "ssl_options.verify",
        "verify_none",
        "Whether clients' certificates are checked.",
        choices=("verify_none", "verify_peer"),
    )
    fail_if_no_peer_cert: bool = _key(
        "ssl_options.fail_if_no_peer_cert",
        False,
        "Refuse clients that show no certificate (with `verify_peer`).",
        parse=_parse_bool,
    )
    password: str = _key("ssl_options.password", "", "Password of the private key.", secret=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How nodes find and trust each other."""

    name: str = _key(
        "cluster_name cluster.name",
        "convoy",
        """Name of the cluster; nodes of differently named clusters refuse each other. Change it
        on all nodes at once or not at all.""",
    )
    address: Address = _key(  # noqa: RUF009
        "cluster.listen",
        Address("127.0.0.1", 25672),
        "Where this node accepts the links of other nodes.",
        parse=parse_address,
    )
    port: int = _key(
        "cluster.port",
        0,
        "Port of `cluster.listen` alone; 0 = the one given there.",
        parse=_parse_int,
        low=0,
        high=65535,
    )
    advertise: str = _key(
        "cluster.advertise",
        "",
        "`host:port` by which other nodes reach this one; empty = `cluster.listen`.",
    )
    peers: tuple[Address, ...] = _key(
        "cluster.peers",
        (),
        """The nodes of the cluster, this one included: `id@host:port` separated by commas.
        Without ids the nodes tell theirs when they link, and
        `cluster_formation.target_cluster_size_hint` says how many there are. Without ids, without
        that number and without its own address a node only joins a cluster that exists. Only read
        when a cluster forms; later the members are in the metadata.""",
        parse=_parse_addresses,
        collects="cluster_formation.classic_config.nodes.",
    )
    dns_name: str = _key(
        "cluster_formation.dns.hostname",
        "",
        "A DNS name with one address per node, on the port of `cluster.listen`.",
    )
    size_hint: int = _key(
        "cluster_formation.target_cluster_size_hint",
        0,
        """How many nodes make the first cluster when `cluster.peers` has no ids; 0 = as many as
        there are peers. Too small a number may let two clusters form. Later the health check
        `reached-target-cluster-size` asks for so many running nodes; 0 = all that are known.""",
        parse=_parse_int,
        low=0,
        high=255,
    )
    secret: str = _key(
        "cluster.secret",
        "",
        """Shared secret that nodes prove to know when they link. Who has it is a node; empty only
        works on loopback addresses.""",
        secret=True,
    )
    secret_file: str = _key(
        "cluster.secret_file", "", "File that holds the secret, readable by its owner alone."
    )
    tls_certfile: str = _key(
        "cluster.tls.certfile", "", "Certificate chain of this node for links, PEM; empty = no TLS."
    )
    tls_keyfile: str = _key("cluster.tls.keyfile", "", "Private key for links, PEM.")
    tls_cacertfile: str = _key(
        "cluster.tls.cacertfile",
        "",
        "Authorities that other nodes' certificates must come from, PEM.",
    )
    heartbeat_ms: int = _key(
        "cluster.heartbeat_interval",
        100,
        """A link that is silent this long carries a heartbeat. Longer: less idle CPU, later
        suspicion.""",
        parse=_parse_int,
        unit="ms",
        low=10,
        high=10_000,
    )
    suspect_min_ms: int = _key(
        "cluster.suspect_after_min",
        400,
        """A node is never suspected for a shorter silence. Too short: pauses of a busy machine look
        like failures and leaders change for nothing.""",
        parse=_parse_int,
        unit="ms",
        low=50,
        high=60_000,
    )
    suspect_max_ms: int = _key(
        "cluster.suspect_after_max",
        2_000,
        "A node is always suspected after this silence, however irregular it was before.",
        parse=_parse_int,
        unit="ms",
        low=100,
        high=600_000,
    )
    link_frame_max_bytes: int = _key(
        "cluster.link_frame_max",
        (512 << 20) + (128 << 10),
        "A longer frame on a link is refused before memory is set aside for it.",
        parse=parse_bytes,
        unit="bytes",
        low=1 << 20,
        high=1 << 31,
    )
    link_backlog_max_bytes: int = _key(
        "cluster.link_backlog_max",
        256 << 20,
        """Bytes queued for a node that does not read; above it the link is broken and made anew.
        Entries, deliveries and snapshots wait while an eighth of it is under way, those through
        another node from a 32nd: smaller costs throughput over distances, larger costs memory.""",
        parse=parse_bytes,
        unit="bytes",
        low=1 << 20,
        high=1 << 36,
    )
    peers_max: int = _key(
        "cluster.nodes_max", 64, "Nodes of a cluster.", parse=_parse_int, low=1, high=255
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftConfig:
    """The replicated log and its files."""

    wal_max_size_bytes: int = _key(
        "raft.wal_max_size_bytes",
        128 << 20,
        """A write-ahead file is full at this size. Smaller: more, smaller segment files; larger:
        more to read at a restart.""",
        parse=parse_bytes,
        unit="bytes",
        low=1 << 16,
        high=1 << 38,
    )
    segment_max_entries: int = _key(
        "raft.segment_max_entries",
        4096,
        "Entries in a segment file. Large messages want fewer.",
        parse=_parse_int,
        low=1,
        high=65535,
    )
    wal_sync_method: str = _key(
        "raft.wal_sync_method",
        "datasync",
        "How a write is made durable before it counts. `none` loses messages at a power failure.",
        choices=("datasync", "sync", "o_sync", "none"),
    )
    wal_preallocate: bool = _key(
        "raft.wal_preallocate",
        True,
        "Prepare write-ahead files in the background; without it every flush costs about double.",
        parse=_parse_bool,
    )
    wal_inline_flush: bool = _key(
        "raft.wal_inline_flush",
        True,
        """Flush small batches on the event loop while the disk is quick and mostly idle; a slow
        flush
        turns this off for five seconds. `false`: always on the thread, at a quarter more CPU.""",
        parse=_parse_bool,
    )
    mem_table_max_bytes: int = _key(
        "raft.mem_table_max_bytes",
        16 << 20,
        """Message bodies kept in memory that are already on disk. Smaller: a consumer that lags
        reads from disk earlier.""",
        parse=parse_bytes,
        unit="bytes",
        low=0,
        high=1 << 40,
    )
    election_timeout_ms: int = _key(
        "raft.election_timeout",
        150,
        """Base of the random wait before a follower of a failed leader stands for election; the
        wait lies between half and double. Too short: several stand at once.""",
        parse=_parse_int,
        unit="ms",
        low=10,
        high=60_000,
    )
    quorum_timeout_ms: int = _key(
        "raft.quorum_timeout",
        5000,
        """A leader that waits so long for an answer of a majority, although it is linked to one,
        steps down: disks are stuck, or replicas have stopped. Too short: slow disks cost
        elections.""",
        parse=_parse_int,
        unit="ms",
        low=1000,
        high=600_000,
    )
    hold_versions: bool = _key(
        "raft.hold_versions",
        False,
        """Leaders on this node raise no machine version. Set it on every node before an upgrade
        that may have to be taken back: a node does not go back to a release that does not support
        the versions in force (docs/upgrade.md).""",
        parse=_parse_bool,
    )
    link_window_bytes: int = _key(
        "raft.link_window_bytes",
        8 << 20,
        "Log entries are held back while more than this waits on the link to a follower.",
        parse=parse_bytes,
        unit="bytes",
        low=1 << 16,
        high=1 << 32,
    )
    deferral_ms: int = _key(
        "raft.deferral",
        10,
        """At low rates a follower that no majority and no client waits for gets its log entries
        together, and acknowledgements that free nothing anybody waits for are logged with what
        comes next; late by this at most (double when nothing else happens). 0: everything at once,
        at a third more CPU.""",
        parse=_parse_int,
        unit="ms",
        low=0,
        high=1000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpConfig:
    """What AMQP clients negotiate and may do."""

    heartbeat_s: int = _key(
        "heartbeat",
        60,
        "Heartbeat interval offered to clients; 0 = none: dead clients stay until TCP notices.",
        parse=_parse_int,
        unit="s",
        low=0,
        high=65535,
    )
    frame_max: int = _key(
        "frame_max",
        131_072,
        "Largest frame offered to clients, 8 bytes of framing included.",
        parse=parse_bytes,
        unit="bytes",
        low=8192,
        high=131_072,
    )
    channel_max: int = _key(
        "channel_max",
        2047,
        "Channels of a connection offered to clients.",
        parse=_parse_int,
        low=1,
        high=65535,
    )
    max_message_size: int = _key(
        "max_message_size",
        16 << 20,
        "A larger message closes its channel. Large messages hold up everything behind them.",
        parse=parse_bytes,
        unit="bytes",
        low=1024,
        high=512 << 20,
    )
    consumer_timeout_ms: int | None = _key(
        "consumer_timeout",
        1_800_000,
        """A delivery not acknowledged for this long closes its channel; `none` = never, then a
        hanging consumer keeps its messages for ever.""",
        parse=_parse_optional_int,
        unit="ms",
        low=10_000,
        high=10**10,
    )
    consumer_max_per_channel: int = _key(
        "consumer_max_per_channel",
        65_535,
        "Consumers of one channel.",
        parse=_parse_int,
        low=1,
        high=1_000_000,
    )
    auth_mechanisms: tuple[str, ...] = _key(
        "auth_mechanisms",
        ("PLAIN", "AMQPLAIN", "ANONYMOUS"),
        """SASL mechanisms offered to clients: `PLAIN`, `AMQPLAIN`, `ANONYMOUS` (as guest, from
        where guest may come), `EXTERNAL` (by TLS certificate, on connections that have one).
        `auth_mechanisms.N` for single ones.""",
        parse=_parse_words,
        collects="auth_mechanisms.",
    )
    cert_login_from: str = _key(
        "ssl_cert_login_from",
        "distinguished_name",
        "Which part of a client's certificate is its user name for `EXTERNAL`.",
        choices=("distinguished_name", "common_name"),
    )
    loopback_users: tuple[str, ...] = _key(
        "loopback_users",
        ("guest",),
        """Users that may only connect from this machine; `none` = nobody is restricted.
        `loopback_users.NAME = false` takes one out. Opening up `guest` opens the broker to
        everybody.""",
        parse=_parse_words,
        collects="loopback_users.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """The columnar protocol on the AMQP port (`fetch.*`)."""

    enabled: bool = _key(
        "fetch.enabled",
        True,
        """Whether connections that begin with the columnar protocol's preface are served. `false`:
        they are closed like any stranger's.""",
        parse=_parse_bool,
    )
    local_reads: bool = _key(
        "fetch.local_reads",
        True,
        """Whether clients on this machine may be told in which files of this node a stream's
        messages lie, to read them there. Only who may open the files can; `false`: all rows go
        through the node.""",
        parse=_parse_bool,
    )
    frame_max: int = _key(
        "fetch.frame_max",
        64 << 20,
        """Largest request or answer. A message that does not fit cannot be fetched; a connection
        may cost twice as much memory.""",
        parse=parse_bytes,
        unit="bytes",
        low=1 << 20,
        high=1 << 30,
    )
    answer_max: int = _key(
        "fetch.answer_max",
        4 << 20,
        """Rows are added to an answer up to this size, whatever a client asks for. Larger: fewer
        round trips, but longer pauses for the AMQP clients of this node while one is finished.""",
        parse=parse_bytes,
        unit="bytes",
        low=64 << 10,
        high=1 << 30,
    )
    buffer_max: int = _key(
        "fetch.buffer_max",
        256 << 20,
        """Bytes of answers that are being built or not yet read by their clients, of all
        connections, and as many of large requests that are read or worked on; further ones wait for
        their turn.""",
        parse=parse_bytes,
        unit="bytes",
        low=1 << 20,
        high=1 << 40,
    )
    connections_max: int = _key(
        "fetch.connections_max",
        1_000,
        "Connections of this protocol; more are refused with an error.",
        parse=_parse_int,
        low=1,
        high=1_000_000,
    )
    write_timeout_ms: int = _key(
        "fetch.write_timeout",
        30_000,
        """A client that reads nothing of its answer for this long is dropped. Shorter: drivers in a
        long pause have to connect again.""",
        parse=_parse_int,
        unit="ms",
        low=100,
        high=3_600_000,
    )
    request_timeout_ms: int = _key(
        "fetch.request_timeout",
        60_000,
        """A request that has no answer by then gets an error: a queue without a majority must not
        hold its clients for ever.""",
        parse=_parse_int,
        unit="ms",
        low=1_000,
        high=3_600_000,
    )
    slice_us: int = _key(
        "fetch.slice",
        500,
        """How long work for this protocol may keep the event loop before AMQP has its turn; four
        times that while nobody else is active. Longer: more rows per second, higher latency of
        everything else.""",
        parse=_parse_int,
        unit="µs",
        low=50,
        high=100_000,
    )
    rest_us: int = _key(
        "fetch.rest",
        1_000,
        """How long this protocol's work rests after each slice while AMQP clients are active, of
        this node or of others that it logs for. 0: one drain takes a whole core, and the system
        lets AMQP's bytes wait for it.""",
        parse=_parse_int,
        unit="µs",
        low=0,
        high=100_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """What the trace keeps (`trace.*`): runs that were published, delivered, settled (ADR 0009)."""

    vhosts: tuple[str, ...] = _key(
        "trace.vhosts",
        (),
        """Virtual hosts whose replicated queues are all traced, as if each had been declared with
        `x-trace`. Takes effect when the node starts; needs the extra `trace` (pyarrow).""",
        parse=_parse_words,
    )
    directory: str = _key(
        "trace.directory",
        "",
        """Where the segments go; empty = `trace` in `data_dir`. Emptied by hand, it leaves a gap
        that the audit reports as not proved.""",
        type_name="path",
    )
    segment_max_bytes: int = _key(
        "trace.segment_max_bytes",
        64 << 20,
        "A queue's open segment is completed when its journal is this large.",
        parse=parse_bytes,
        unit="bytes",
        low=64 << 10,
        high=4 << 30,
    )
    segment_max_age_ms: int = _key(
        "trace.segment_max_age",
        60_000,
        """An open segment is completed after this time, and then readable for the audit. Shorter:
        more and smaller files, each with a state snapshot of what is in the queue.""",
        parse=_parse_int,
        unit="ms",
        low=100,
        high=86_400_000,
    )
    retention_bytes: int = _key(
        "trace.retention_bytes",
        10 << 30,
        "Segments of this node that are kept, of all queues; the oldest go first.",
        parse=parse_bytes,
        unit="bytes",
        low=1 << 20,
        high=1 << 50,
    )
    backlog_max_bytes: int = _key(
        "trace.backlog_max_bytes",
        64 << 20,
        """Rows that may wait in memory for the disk. Beyond it rows are dropped and counted, and
        the audit reports the gap: the trace never holds a queue up.""",
        parse=parse_bytes,
        unit="bytes",
        low=1 << 20,
        high=16 << 30,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultsConfig:
    """What a new cluster contains, and what is used where a client says nothing."""

    user: str = _key("default_user", "guest", "Administrator made when a cluster forms.")
    password: str = _key(
        "default_pass",
        "guest",
        "Its password. Well known: keep `loopback_users` or change it.",
        secret=True,
    )
    vhost: str = _key("default_vhost", "/", "Virtual host made when a cluster forms.")
    queue_type: str = _key(
        "default_queue_type",
        "auto",
        """Type of a queue declared without `x-queue-type`. `auto`: quorum where its properties fit
        (durable, not exclusive, not auto-delete, named by the client), classic otherwise.""",
        choices=("auto", "quorum", "classic"),
    )
    quorum_group_size: int = _key(
        "quorum_queue.initial_cluster_size",
        3,
        """Replicas of a new quorum queue, at most one per node. 1 or 2 lose a node's messages
        with it.""",
        parse=_parse_int,
        low=1,
        high=64,
    )
    leader_locator: str = _key(
        "queue_leader_locator",
        "client-local",
        "Which node leads a new queue: the one the client is on, or one that leads few.",
        choices=("client-local", "balanced"),
    )
    operation_timeout_ms: int = _key(
        "operation_timeout",
        30_000,
        """How long declare, delete, consume, get and purge wait for a majority before they are
        refused. Shorter: an election may already refuse them.""",
        parse=_parse_int,
        unit="ms",
        low=100,
        high=600_000,
    )
    publish_register_timeout_ms: int = _key(
        "quorum_queue.publish_register_timeout",
        65_000,
        """How long the first publishes of a channel wait for a quorum queue without a majority
        before they are nacked. Publishes of a channel that the queue has answered once wait for
        as long as it takes.""",
        parse=_parse_int,
        unit="ms",
        low=100,
        high=600_000,
    )
    publish_pending_max_bytes: int = _key(
        "publish_pending_max",
        128 << 20,
        """What this node has taken from publishers for quorum queues and streams and what is not
        applied yet, all channels and queues together: above it who publishes waits, until it is
        half. One message of each connection comes on top. Larger costs memory, when a majority is
        slow or one message goes to many queues.""",
        parse=parse_bytes,
        unit="bytes",
        low=1 << 20,
        high=1 << 36,
    )
    publish_pending_messages: int = _key(
        "publish_pending_messages",
        1024,
        """Messages of one channel for one quorum queue or stream that are not applied yet: above it
        the channel is not read, until it is half. Larger lets a fast publisher fill the queue's log
        ahead of acknowledgements, so that consumers fall behind. Smaller than what is published in
        a round trip to the followers costs throughput of a single channel: raise it for links
        between sites.""",
        parse=_parse_int,
        low=64,
        high=1 << 20,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmsConfig:
    """When publishers are held back."""

    memory_relative: float = _key(
        "vm_memory_high_watermark.relative vm_memory_high_watermark",
        0.6,
        """Publishers are blocked on the whole cluster while a node uses more than this share of its
        memory (of the cgroup's limit where there is one). Too high: the system kills the node.""",
        parse=_parse_float,
        low=0.01,
        high=1.0,
    )
    memory_absolute: int = _key(
        "vm_memory_high_watermark.absolute",
        0,
        "The same as a size; 0 = use the share.",
        parse=parse_bytes,
        unit="bytes",
        low=0,
        high=1 << 50,
    )
    disk_absolute: int = _key(
        "disk_free_limit.absolute",
        50_000_000,
        """Publishers are blocked while less than this is free where the data lies. Too low: the
        disk fills and nothing is confirmed until there is room.""",
        parse=parse_bytes,
        unit="bytes",
        low=0,
        high=1 << 50,
    )
    interval_ms: int = _key(
        "alarms.interval",
        1_000,
        "How often memory and disk are looked at.",
        parse=_parse_int,
        unit="ms",
        low=50,
        high=60_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementConfig:
    """The HTTP API and the metrics."""

    tcp: tuple[Address, ...] = _key(
        "management.tcp.port",
        (Address("localhost", 15672),),
        "HTTP API: a port, an address and port, or `none`, as `listeners.tcp.default`.",
        parse=_parse_listener,
    )
    prometheus: tuple[Address, ...] = _key(
        "prometheus.tcp.port",
        (Address("localhost", 15692),),
        "Metrics for Prometheus: a port, an address and port, or `none`, as the others.",
        parse=_parse_listener,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is written to the log."""

    level: str = _key(
        "log.level log.console.level log.default.level",
        "info",
        "Least important level that is written.",
        choices=("debug", "info", "warning", "error", "none"),
    )
    format: str = _key(
        "log.format log.console.formatter",
        "auto",
        "`auto`: plain text in a terminal, JSON lines otherwise.",
        choices=("auto", "json", "plain", "plaintext"),
    )
    file: str = _key("log.file", "", "File the log is appended to; empty = standard error.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a node is told. Build it with `load`; pass parts of it down."""

    node: NodeConfig = field(default_factory=NodeConfig)
    listeners: ListenersConfig = field(default_factory=ListenersConfig)
    ssl: SslConfig = field(default_factory=SslConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    raft: RaftConfig = field(default_factory=RaftConfig)
    amqp: AmqpConfig = field(default_factory=AmqpConfig)
    fetch: FetchConfig = field(default_factory=FetchConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    defaults: DefaultsConfig = field(default_factory=DefaultsConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    management: ManagementConfig = field(default_factory=ManagementConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def link_address(self) -> Address:
        """Where links are accepted."""
        listen = self.cluster.address
        return Address(listen.host, self.cluster.port or listen.port)

    @property
    def node_name(self) -> str:
        """The name shown to people."""
        if self.node.name:
            return self.node.name
        import socket

        return f"convoy-{self.node.id}@{socket.gethostname().split('.')[0]}"


@cache
def _fields() -> dict[tuple[str, str], _Key]:
    """(section, field) → key, in the order of the document."""
    sections = typing.get_type_hints(Config)
    return {
        (section.name, entry.name): entry.metadata["key"]
        for section in dataclasses.fields(Config)
        for entry in dataclasses.fields(sections[section.name])
    }


@cache
def _by_name() -> dict[str, tuple[str, str]]:
    return {name: place for place, key in _fields().items() for name in key.names}


@cache
def _by_prefix() -> dict[str, tuple[str, str]]:
    return {key.collects: place for place, key in _fields().items() if key.collects}


def known_keys() -> list[str]:
    """All key names, without those that end in a name of the user's choice."""
    return list(_by_name())


class _Builder:
    """Collects values by place; later sources replace what earlier ones said."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], Any] = {}
        self.collected: dict[tuple[str, str], dict[str, Any]] = {}

    def source(self, pairs: Iterable[tuple[str, str, str]]) -> None:
        """Takes (key, value, where it stands) of one source."""
        seen: dict[str, str] = {}
        collected: dict[tuple[str, str], dict[str, Any]] = {}
        for name, text, where in pairs:
            if name in seen:
                raise ConfigError(f"{where}: {name} was already given at {seen[name]}")
            seen[name] = where
            place = _by_name().get(name)
            if place is not None:
                self.values[place] = _value(_fields()[place], name, text, where)
                continue
            prefix = name[: name.rfind(".") + 1]
            place = _by_prefix().get(prefix)
            if place is None or len(name) == len(prefix) or _is_misspelt(name, prefix):
                raise ConfigError(f"{where}: unknown key {name}{_hint(name, known_keys())}")
            collected.setdefault(place, {})[name[len(prefix) :]] = self._member(
                place, name, text, where
            )
        for place, members in collected.items():
            self._merge(place, members)

    def _member(self, place: tuple[str, str], name: str, text: str, where: str) -> Any:
        key = _fields()[place]
        try:
            if key.collects == "loopback_users.":
                return _parse_bool(text)
            return key.parse(text)
        except ValueError as error:
            raise ConfigError(f"{where}: {name} = {text}: {error}") from None

    def _merge(self, place: tuple[str, str], members: dict[str, Any]) -> None:
        key = _fields()[place]
        if key.collects == "loopback_users.":
            users = list(self.values.get(place, ("guest",)))
            for user, restricted in members.items():
                if user in users:
                    users.remove(user)
                if restricted:
                    users.append(user)
            self.values[place] = tuple(users)
            return
        before = self.values.get(place, ())
        self.values[place] = before + tuple(a for one in members.values() for a in one)

    def build(self) -> Config:
        sections = typing.get_type_hints(Config)
        chosen: dict[str, dict[str, Any]] = {}
        for (section, name), value in self.values.items():
            chosen.setdefault(section, {})[name] = value
        config = Config(**{name: sections[name](**values) for name, values in chosen.items()})
        _validate(config)
        return config


def _value(key: _Key, name: str, text: str, where: str) -> Any:
    try:
        value = key.parse(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {name} = {text}: {error}") from None
    if key.choices and value not in key.choices:
        raise ConfigError(f"{where}: {name} = {text}: must be one of {', '.join(key.choices)}")
    if value is None or not isinstance(value, (int, float)):
        return value
    if (key.low is not None and value < key.low) or (key.high is not None and value > key.high):
        raise ConfigError(
            f"{where}: {name} = {text}: must lie between {_number(key.low)} and {_number(key.high)}"
        )
    return value


def _is_misspelt(name: str, prefix: str) -> bool:
    """Whether a name of the user's choice after the prefix is nearly that of a known key."""
    own = [key[len(prefix) :] for key in known_keys() if key.startswith(prefix)]
    return _nearest(name[len(prefix) :].lower(), own, 0.7) != ""


def _nearest(name: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """The one of the names that was probably meant, or ""."""
    import difflib  # a node with a good configuration never needs it

    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)), "")


def _hint(name: str, names: Iterable[str]) -> str:
    near = _nearest(name, names)
    return f"; did you mean {near}?" if near else ""


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _validate(config: Config) -> None:
    """Refuses combinations that no single key can judge."""
    cluster = config.cluster
    if cluster.suspect_max_ms < cluster.suspect_min_ms:
        raise ConfigError(
            "cluster.suspect_after_max must not be smaller than cluster.suspect_after_min"
        )
    if cluster.suspect_min_ms < 2 * cluster.heartbeat_ms:
        raise ConfigError(
            "cluster.suspect_after_min must be at least twice cluster.heartbeat_interval"
        )
    hosts = [config.link_address.host, *(peer.host for peer in cluster.peers)]
    if not (cluster.secret or cluster.secret_file) and not all(map(_is_loopback, hosts)):
        raise ConfigError("cluster.secret must be set when nodes link beyond loopback addresses")
    if bool(cluster.tls_certfile) != bool(cluster.tls_keyfile):
        raise ConfigError("cluster.tls.certfile and cluster.tls.keyfile go together")
    if cluster.tls_certfile and not cluster.tls_cacertfile:
        raise ConfigError("cluster.tls.cacertfile must be set with cluster.tls.certfile")
    if config.listeners.ssl and not (config.ssl.certfile and config.ssl.keyfile):
        raise ConfigError(
            "listeners.ssl.default needs ssl_options.certfile and ssl_options.keyfile"
        )
    if config.fetch.answer_max > config.fetch.frame_max:
        raise ConfigError("fetch.answer_max must not be larger than fetch.frame_max")
    ids = [peer.node for peer in cluster.peers]
    if any(ids) and not all(ids):
        raise ConfigError("cluster.peers must have an id in front of every address, or of none")
    if any(ids) and len(set(ids)) != len(ids):
        raise ConfigError("cluster.peers names an id twice")
    if any(ids) and config.node.id not in ids:
        raise ConfigError(f"cluster.peers lacks this node, node.id = {config.node.id}")
    if len(cluster.peers) > cluster.peers_max:
        raise ConfigError("cluster.peers has more nodes than cluster.nodes_max")


def parse_text(text: str, where: str = "convoy.conf") -> list[tuple[str, str, str]]:
    """Returns (key, value, place) of each line of a configuration file.

    Raises:
        ConfigError: a line is neither empty, a comment nor `key = value`.
    """
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        name, equals, value = bare.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not re.fullmatch(r"[A-Za-z0-9_.\-]+", name):
            raise ConfigError(f"{where}:{number}: not a line of the form key = value")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        else:
            value = re.split(r"\s+#", value, maxsplit=1)[0]
        pairs.append((name, value, f"{where}:{number}"))
    return pairs


def _environment_pairs(environment: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = {_variable(name): name for name in known_keys()}
    pairs = []
    for variable in sorted(environment):
        ignored = variable.startswith(ENVIRONMENT_OTHERS) or variable == "CONVOY_CONFIG_FILE"
        if not variable.startswith(ENVIRONMENT_PREFIX) or ignored:
            continue
        if variable not in names:
            hint = _hint(variable, names)
            raise ConfigError(f"environment: unknown variable {variable}{hint}")
        pairs.append((names[variable], environment[variable], f"environment, {variable}"))
    return pairs


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + re.sub(r"[.\-]", "_", name).upper()


def load(
    path: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Config:
    """Returns the configuration: defaults < file < environment < flags.

    Args:
        path: the file; None = none.
        environment: usually `os.environ`; variables without the prefix are ignored.
        flags: key → value as text, as given on the command line.

    Raises:
        ConfigError: unknown key, bad value or a bad combination; the text names key and place.
    """
    builder = _Builder()
    if path is not None:
        file = Path(path)
        try:
            if file.stat().st_size > FILE_SIZE_MAX:
                raise ConfigError(f"{file}: larger than {FILE_SIZE_MAX} bytes")
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from None
        builder.source(parse_text(text, str(file)))
    builder.source(_environment_pairs(environment or {}))
    builder.source((name, value, "flag") for name, value in (flags or {}).items())
    return builder.build()


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _text(value: Any) -> str:
    if value is None or value == () or value == "":
        return "none" if value is None or value == () else "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(str(one) for one in value)
    return str(value)


def reference() -> str:
    """Returns docs/configuration.md: every key with its type, default, bounds and meaning."""
    sections = typing.get_type_hints(Config)
    lines = [
        "# Configuration",
        "",
        "A node reads `convoy.conf`, then the environment, then flags; what comes later wins.",
        "A line is `key = value`, `#` starts a comment, sizes may end in `KiB`, `MiB`, `GiB`",
        "(or `kB`, `MB`, `GB`). In the environment `raft.segment_max_entries` is",
        "`CONVOY_RAFT_SEGMENT_MAX_ENTRIES`; as a flag of `convoy node` it is",
        "`--set raft.segment_max_entries=1000`. Key names are RabbitMQ's where the meaning is the",
        "same. An unknown key is an error. This page is made by",
        "`convoy config --reference`.",
    ]
    for section in dataclasses.fields(Config):
        kind = sections[section.name]
        lines += ["", f"## {(kind.__doc__ or '').splitlines()[0].rstrip('.')}", ""]
        defaults = kind()
        for entry in dataclasses.fields(kind):
            key: _Key = entry.metadata["key"]
            facts = [key.type_name + (f" ({key.unit})" if key.unit else "")]
            if key.choices:
                facts[0] = "one of " + ", ".join(f"`{choice}`" for choice in key.choices)
            if key.low is not None:
                facts.append(f"{_number(key.low)} to {_number(key.high)}")
            facts.append(f"default `{_text(getattr(defaults, entry.name))}`")
            also = [f"`{name}`" for name in key.names[1:]]
            if key.collects:
                also.append(f"`{key.collects}NAME`")
            lines += [f"### `{key.name}`", "", f"{'; '.join(facts)}. {key.doc}"]
            if also:
                lines[-1] += f" Also: {', '.join(also)}."
            lines.append("")
        lines.pop()
    return "\n".join(lines) + "\n"
