"""Sections about clients and operators: protocols, defaults, traces, alarms, HTTP, log."""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.model.compatibility import RELEASE_4_1, RELEASES
from convoymq.model.config.keys import key
from convoymq.model.config.values import (
    Address,
    parse_bool,
    parse_bytes,
    parse_float,
    parse_int,
    parse_listener,
    parse_optional_int,
    parse_words,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpConfig:
    """AMQP: offers to clients, and their limits."""

    heartbeat_s: int = key(
        "heartbeat",
        60,
        "Heartbeat interval offered to clients; 0 = none: dead clients stay until TCP notices.",
        parse=parse_int,
        unit="s",
        low=0,
        high=65535,
    )
    frame_max: int = key(
        "frame_max",
        131_072,
        "Largest frame offered to clients, 8 bytes of framing included.",
        parse=parse_bytes,
        unit="bytes",
        low=8192,
        high=131_072,
    )
    channel_max: int = key(
        "channel_max",
        2047,
        "Channels of a connection offered to clients.",
        parse=parse_int,
        low=1,
        high=65535,
    )
    max_message_size: int = key(
        "max_message_size",
        16 << 20,
        "A larger message closes its channel. Large messages hold up everything behind them.",
        parse=parse_bytes,
        unit="bytes",
        low=1024,
        high=512 << 20,
    )
    consumer_timeout_ms: int | None = key(
        "consumer_timeout",
        1_800_000,
        """A delivery that a consumer has not acknowledged for this long is late. It returns to a
        quorum queue, and the consumer is cancelled; arguments and policies may say otherwise
        (docs/concepts.md). Any other late delivery closes its channel. `none` = never, then a
        hanging consumer keeps its messages for ever.""",
        parse=parse_optional_int,
        unit="ms",
        low=10_000,
        high=10**10,
    )
    consumer_max_per_channel: int = key(
        "consumer_max_per_channel",
        65_535,
        "Consumers of one channel.",
        parse=parse_int,
        low=1,
        high=1_000_000,
    )
    auth_mechanisms: tuple[str, ...] = key(
        "auth_mechanisms",
        ("PLAIN", "AMQPLAIN", "ANONYMOUS"),
        """SASL mechanisms offered to clients: `PLAIN`, `AMQPLAIN`, `ANONYMOUS` (as guest, from
        where guest may come), `EXTERNAL` (by TLS certificate, on connections that have one).
        `auth_mechanisms.N` for single ones.""",
        parse=parse_words,
        collects="auth_mechanisms.",
    )
    cert_login_from: str = key(
        "ssl_cert_login_from",
        "distinguished_name",
        "Which part of a client's certificate is its user name for `EXTERNAL`.",
        choices=("distinguished_name", "common_name", "subject_alternative_name"),
    )
    cert_login_san_type: str = key(
        "ssl_cert_login_san_type",
        "dns",
        "With `subject_alternative_name`: which kind of names counts.",
        choices=("dns", "ip", "email", "uri"),
    )
    cert_login_san_index: int = key(
        "ssl_cert_login_san_index",
        0,
        "Which of the names of that kind is the user's, counted from 0.",
        parse=parse_int,
        low=0,
        high=100,
    )
    loopback_users: tuple[str, ...] = key(
        "loopback_users",
        ("guest",),
        """Users that may only connect from this machine; `none` = nobody is restricted.
        `loopback_users.NAME = false` takes one out. Opening up `guest` opens the broker to
        everybody.""",
        parse=parse_words,
        collects="loopback_users.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """The columnar protocol on the AMQP port (`fetch.*`)."""

    enabled: bool = key(
        "fetch.enabled",
        True,
        """Whether connections that begin with the columnar protocol's preface are served. `false`:
        they are closed like those of an unknown protocol.""",
        parse=parse_bool,
    )
    local_reads: bool = key(
        "fetch.local_reads",
        True,
        """Whether clients on this machine may be told in which files of this node a stream's
        messages lie, to read them there. Only who may open the files can; `false`: all rows go
        through the node.""",
        parse=parse_bool,
    )
    frame_max: int = key(
        "fetch.frame_max",
        64 << 20,
        """Largest request or answer. A message that does not fit cannot be fetched; a connection
        may cost twice as much memory.""",
        parse=parse_bytes,
        unit="bytes",
        low=1 << 20,
        high=1 << 30,
    )
    answer_max: int = key(
        "fetch.answer_max",
        4 << 20,
        """Rows are added to an answer up to this size, whatever a client asks for. Larger: fewer
        round trips, but longer pauses for the AMQP clients of this node while one is finished.""",
        parse=parse_bytes,
        unit="bytes",
        low=64 << 10,
        high=1 << 30,
    )
    buffer_max: int = key(
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
    connections_max: int = key(
        "fetch.connections_max",
        1_000,
        "Connections of this protocol; more are refused with an error.",
        parse=parse_int,
        low=1,
        high=1_000_000,
    )
    write_timeout_ms: int = key(
        "fetch.write_timeout",
        30_000,
        """A client that reads nothing of its answer for this long is dropped. Shorter: drivers in a
        long pause have to connect again.""",
        parse=parse_int,
        unit="ms",
        low=100,
        high=3_600_000,
    )
    request_timeout_ms: int = key(
        "fetch.request_timeout",
        60_000,
        """A request that has no answer by then gets an error: a queue without a majority must not
        hold its clients for ever.""",
        parse=parse_int,
        unit="ms",
        low=1_000,
        high=3_600_000,
    )
    slice_us: int = key(
        "fetch.slice",
        500,
        """How long work for this protocol may keep the event loop before AMQP has its turn; four
        times that while nobody else is active. Longer: more rows per second, higher latency of
        everything else.""",
        parse=parse_int,
        unit="µs",
        low=50,
        high=100_000,
    )
    rest_us: int = key(
        "fetch.rest",
        1_000,
        """How long this protocol's work rests after each slice while AMQP clients are active, of
        this node or of others that it logs for. 0: one drain takes a whole core, and the system
        lets AMQP's bytes wait for it.""",
        parse=parse_int,
        unit="µs",
        low=0,
        high=100_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Trace (`trace.*`): runs that were published, delivered, settled (ADR 0009)."""

    vhosts: tuple[str, ...] = key(
        "trace.vhosts",
        (),
        """Virtual hosts whose replicated queues are all traced, as if each had been declared with
        `x-trace`. Takes effect when the node starts; needs the extra `trace` (pyarrow).""",
        parse=parse_words,
    )
    directory: str = key(
        "trace.directory",
        "",
        """Where the segments go; empty = `trace` in `data_dir`. Emptied by hand, it leaves a gap
        that the audit reports as not proved.""",
        type_name="path",
    )
    segment_max_bytes: int = key(
        "trace.segment_max_bytes",
        64 << 20,
        "A queue's open segment is completed when its journal is this large.",
        parse=parse_bytes,
        unit="bytes",
        low=64 << 10,
        high=4 << 30,
    )
    segment_max_age_ms: int = key(
        "trace.segment_max_age",
        60_000,
        """An open segment is completed after this time, and then readable for the audit. Shorter:
        more and smaller files, each with a state snapshot of what is in the queue.""",
        parse=parse_int,
        unit="ms",
        low=100,
        high=86_400_000,
    )
    retention_bytes: int = key(
        "trace.retention_bytes",
        10 << 30,
        "Segments of this node that are kept, of all queues; the oldest go first.",
        parse=parse_bytes,
        unit="bytes",
        low=1 << 20,
        high=1 << 50,
    )
    backlog_max_bytes: int = key(
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
    """Defaults: content of a new cluster, and values where a client gives none."""

    user: str = key("default_user", "guest", "Administrator made when a cluster forms.")
    password: str = key(
        "default_pass",
        "guest",
        "Its password. Well known: keep `loopback_users` or change it.",
        secret=True,
    )
    vhost: str = key("default_vhost", "/", "Virtual host made when a cluster forms.")
    compatibility: str = key(
        "rabbitmq_compatibility",
        RELEASE_4_1,
        """Release of RabbitMQ whose rules new quorum queues follow (docs/compatibility.md). `4.1`:
        `basic.nack` counts towards the delivery limit as `basic.reject` does, without a limit both
        go to the tail, priorities make two classes, and queues declared with their type refuse
        global prefetch. A virtual host may say otherwise. A queue keeps what the node that declared
        it had. Set it alike on all nodes.""",
        choices=RELEASES,
    )
    queue_type: str = key(
        "default_queue_type",
        "auto",
        """Type of a queue declared without `x-queue-type`. `auto`: quorum where its properties fit
        (durable, not exclusive, not auto-delete, named by the client), classic otherwise.""",
        choices=("auto", "quorum", "classic"),
    )
    quorum_group_size: int = key(
        "quorum_queue.initial_cluster_size quorum_cluster_size",
        3,
        """Replicas of a new quorum queue, at most one per node. 1 or 2 lose a node's messages
        with it.""",
        parse=parse_int,
        low=1,
        high=64,
    )
    leader_locator: str = key(
        "queue_leader_locator",
        "client-local",
        "Which node leads a new queue: the one the client is on, or one that leads few.",
        choices=("client-local", "balanced"),
    )
    relaxed_redeclaration: bool = key(
        "quorum_queue.property_equivalence.relaxed_checks_on_redeclaration",
        False,
        """A client that declares an existing quorum queue as `x-queue-type: classic` is not refused
        for the type and the flags: compared are its dead-letter exchange and key, expiry, lengths,
        time to live and single active consumer. For moving clients of classic queues.""",
        parse=parse_bool,
    )
    permit_transient_queues: bool = key(
        "deprecated_features.permit.transient_nonexcl_queues",
        True,
        """Whether queues may be declared that are neither durable nor exclusive. RabbitMQ 4.3
        denies them by default: error 541, which closes the connection.""",
        parse=parse_bool,
    )
    permit_global_qos: bool = key(
        "deprecated_features.permit.global_qos",
        True,
        """Whether basic.qos with global=true sets a limit that all consumers of a channel share.
        Otherwise it does what global=false does, as RabbitMQ 4.3 by default.""",
        parse=parse_bool,
    )
    operation_timeout_ms: int = key(
        "operation_timeout",
        30_000,
        """How long declare, delete, consume, get and purge wait for a majority before they are
        refused. Shorter: an election may already refuse them.""",
        parse=parse_int,
        unit="ms",
        low=100,
        high=600_000,
    )
    publish_register_timeout_ms: int = key(
        "quorum_queue.publish_register_timeout",
        65_000,
        """How long the first publishes of a channel wait for the answer of a quorum queue that has
        a leader before they are nacked. Publishes of a channel that the queue has answered once
        wait for as long as it takes.""",
        parse=parse_int,
        unit="ms",
        low=100,
        high=600_000,
    )
    cluster_queues_max: int = key(
        "cluster_queue_limit",
        0,
        """Queues and streams of the whole cluster, beyond which new ones are refused with 406;
        0 = any number. Set it alike on all nodes: the node that is asked looks at its own.""",
        parse=parse_int,
        low=0,
        high=1_000_000_000,
    )
    topic_group_ttl_ms: int = key(
        "topics.group_ttl",
        604_800_000,
        """How long a consumer group of an ordered topic may be without members before it expires:
        nothing is kept for it any more. Topics may say otherwise (`group-ttl`). Shorter: the next
        member may come too late. Set it alike on all nodes: the metadata leader decides.""",
        parse=parse_int,
        unit="ms",
        low=1_000,
        high=31_536_000_000,
    )
    topic_producer_ttl_ms: int = key(
        "topics.producer_ttl",
        604_800_000,
        """How long a partition of an ordered topic remembers an idempotent producer that sends
        nothing. Repeats of one that is forgotten are refused, not stored again. Longer costs
        memory.""",
        parse=parse_int,
        unit="ms",
        low=60_000,
        high=31_536_000_000,
    )
    cluster_exchanges_max: int = key(
        "cluster_exchange_limit",
        0,
        """Exchanges of the whole cluster, those that every virtual host begins with included,
        beyond which new ones are refused with 406; 0 = any number. Set it alike on all nodes.""",
        parse=parse_int,
        low=0,
        high=1_000_000_000,
    )
    dead_letter_prefetch: int = key(
        "dead_letter_worker_consumer_prefetch",
        0,
        """Dead letters of one queue that are moved at a time, with the strategy at-least-once. 0:
        at first 32, RabbitMQ's default; more, up to 4096 and 4 MiB, while the target queues confirm
        them within 250 ms, and 32 again when one refuses. Another number is kept to exactly. More
        are faster where confirms take long, and more are moved twice when a leader fails.""",
        parse=parse_int,
        low=0,
        high=65_536,
    )
    dead_letter_confirm_timeout_ms: int = key(
        "dead_letter_worker_publisher_confirm_timeout",
        180_000,
        """After this time without all its confirms the route of a dead letter is looked at again
        (strategy at-least-once). One that was refused, or has no route, is tried again after 1 s,
        2 s, 4 s … at most after this time.""",
        parse=parse_int,
        unit="ms",
        low=1_000,
        high=86_400_000,
    )
    leaderless_publish_timeout_ms: int = key(
        "quorum_queue.publish_timeout_without_leader",
        5000,
        """How long publishes wait for a quorum queue or stream that has no leader before they are
        nacked; 0 = for as long as it takes. A nack says that nobody knows: the message may be in
        the queue later. Shorter than an election (a second or two) nacks what would have been
        confirmed soon.""",
        parse=parse_int,
        unit="ms",
        low=0,
        high=600_000,
    )
    leaderless_consumer_timeout_ms: int = key(
        "quorum_queue.consumer_timeout_without_leader",
        5000,
        """How long a quorum queue is without a leader before its consumers get basic.cancel, if
        their clients have the capability `consumer_cancel_notify`; 0 = they stay. Other consumers
        always stay, and go on when there is a leader again.""",
        parse=parse_int,
        unit="ms",
        low=0,
        high=600_000,
    )
    publish_pending_max_bytes: int = key(
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
    publish_pending_messages: int = key(
        "publish_pending_messages",
        1024,
        """Messages of one channel for one quorum queue or stream that are not applied yet: above it
        the channel is not read, until it is half. Larger lets a fast publisher fill the queue's log
        ahead of acknowledgements, so that consumers fall behind. Smaller than what is published in
        a round trip to the followers costs throughput of a single channel: raise it for links
        between sites.""",
        parse=parse_int,
        low=64,
        high=1 << 20,
    )
    publish_pending_commands: int = key(
        "quorum_queue.commands_soft_limit quorum_commands_soft_limit",
        4096,
        """Commands of one channel for one quorum queue or stream that are not applied yet: above it
        the channel is not read, until it is half. A command here is what a channel publishes to one
        queue in a turn, up to thousands of messages, or acknowledges at once; RabbitMQ counts each
        message, with 32 as its default. A higher limit than 32 helps nobody where a channel waits
        for each confirm, or publishes few messages at a time. Smaller bounds what a slow majority
        makes a publisher's node keep; `publish_pending_messages` bounds it by messages.""",
        parse=parse_int,
        low=1,
        high=1 << 20,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconciliationConfig:
    """Reconciliation of the members of quorum queues
    (`quorum_queue.continuous_membership_reconciliation.*`)."""

    enabled: bool = key(
        "quorum_queue.continuous_membership_reconciliation.enabled",
        False,
        """Leaders on this node add members to quorum queues that have fewer than they should: the
        highest of `target_group_size`, the policy key `target-group-size` and the argument
        `x-quorum-target-group-size`. Set it alike on all nodes.""",
        parse=parse_bool,
    )
    target_group_size: int | None = key(
        "quorum_queue.continuous_membership_reconciliation.target_group_size",
        None,
        """Members that every quorum queue should have; `none` = what its policies and its argument
        say.""",
        parse=parse_optional_int,
        low=1,
        high=255,
    )
    auto_remove: bool = key(
        "quorum_queue.continuous_membership_reconciliation.auto_remove",
        False,
        """A check also takes out members whose nodes are no longer in the cluster. A node that is
        only down stays a member. `convoy cluster forget` takes its node out of all queues whatever
        is set here.""",
        parse=parse_bool,
    )
    interval_ms: int = key(
        "quorum_queue.continuous_membership_reconciliation.interval",
        3_600_000,
        "How often it is looked at all queues when nothing has happened.",
        parse=parse_int,
        unit="ms",
        low=100,
        high=10**10,
    )
    trigger_interval_ms: int = key(
        "quorum_queue.continuous_membership_reconciliation.trigger_interval",
        10_000,
        """How soon it is looked at all queues after something has happened that may matter: a node
        came, left or was drained, a queue was declared or got another member, a policy changed.
        Longer: several changes are acted on together, later.""",
        parse=parse_int,
        unit="ms",
        low=100,
        high=10**10,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmsConfig:
    """Alarms: thresholds at which publishers are held back."""

    memory_relative: float = key(
        "vm_memory_high_watermark.relative vm_memory_high_watermark",
        0.6,
        """Publishers are blocked on the whole cluster while a node uses more than this share of its
        memory (of the cgroup's limit where there is one). Too high: the system kills the node.""",
        parse=parse_float,
        low=0.01,
        high=1.0,
    )
    memory_absolute: int = key(
        "vm_memory_high_watermark.absolute",
        0,
        "The same as a size; 0 = use the share.",
        parse=parse_bytes,
        unit="bytes",
        low=0,
        high=1 << 50,
    )
    disk_absolute: int = key(
        "disk_free_limit.absolute",
        50_000_000,
        """Publishers are blocked while less than this is free where the data lies. Too low: the
        disk fills and nothing is confirmed until there is room.""",
        parse=parse_bytes,
        unit="bytes",
        low=0,
        high=1 << 50,
    )
    interval_ms: int = key(
        "alarms.interval",
        1_000,
        "How often memory and disk are looked at.",
        parse=parse_int,
        unit="ms",
        low=50,
        high=60_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementConfig:
    """The HTTP API and the metrics."""

    tcp: tuple[Address, ...] = key(
        "management.tcp.port",
        (Address("localhost", 15672),),
        "HTTP API: a port, an address and port, or `none`, as `listeners.tcp.default`.",
        parse=parse_listener,
    )
    prometheus: tuple[Address, ...] = key(
        "prometheus.tcp.port",
        (Address("localhost", 15692),),
        "Metrics for Prometheus: a port, an address and port, or `none`, as the others.",
        parse=parse_listener,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Log: level, format and place."""

    level: str = key(
        "log.level log.console.level log.default.level",
        "info",
        "Least important level that is written.",
        choices=("debug", "info", "warning", "error", "none"),
    )
    format: str = key(
        "log.format log.console.formatter",
        "auto",
        "`auto`: plain text in a terminal, JSON lines otherwise.",
        choices=("auto", "json", "plain", "plaintext"),
    )
    file: str = key("log.file", "", "File the log is appended to; empty = standard error.")
