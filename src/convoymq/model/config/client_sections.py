"""Sections about clients and operators: defaults, traces, alarms, log."""

from __future__ import annotations

from dataclasses import dataclass

from convoymq.model.compatibility import RELEASE_4_1, RELEASES
from convoymq.model.config.keys import key
from convoymq.model.config.values import (
    parse_bytes,
    parse_headers,
    parse_optional_int,
    parse_words,
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
        "trace.segment_max_bytes", 64 << 20,
        "A queue's open segment is completed when its journal is this large.",
        parse=parse_bytes, low=64 << 10, high=4 << 30,
    )  # fmt: skip
    segment_max_age_ms: int = key(
        "trace.segment_max_age", 60_000,
        """An open segment is completed after this time, and then readable for the audit. Shorter:
        more and smaller files, each with a state snapshot of what is in the queue.""",
        unit="ms", low=100, high=86_400_000,
    )  # fmt: skip
    retention_bytes: int = key(
        "trace.retention_bytes", 10 << 30,
        "Segments of this node that are kept, of all queues; the oldest go first.",
        parse=parse_bytes, low=1 << 20, high=1 << 50,
    )  # fmt: skip
    backlog_max_bytes: int = key(
        "trace.backlog_max_bytes", 64 << 20,
        """Rows that may wait in memory for the disk. Beyond it rows are dropped and counted, and
        the audit reports the gap: the trace never holds a queue up.""",
        parse=parse_bytes, low=1 << 20, high=16 << 30,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpConfig:
    """Spans for OpenTelemetry (`otlp.*`): what became of sampled messages (ADR 0228)."""

    endpoint: str = key(
        "otlp.endpoint",
        "",
        """URL that spans are sent to by OTLP over HTTP, such as `http://localhost:4318/v1/traces`;
        empty = no spans. Needs the extra `otlp`.""",
        type_name="URL",
    )
    sampling: float = key(
        "otlp.sampling", 1.0,
        """Part of the traces that clients have sampled which get spans, by their ids: all nodes
        choose the same ones. Above 0.01 a busy node pays for it.""",
        low=0.0, high=1.0,
    )  # fmt: skip
    headers: tuple[str, ...] = key(
        "otlp.headers",
        (),
        "Headers of these requests, as `NAME=VALUE`: collectors want tokens in them.",
        parse=parse_headers,
        type_name="words",
        secret=True,
    )
    interval_ms: int = key(
        "otlp.interval", 1000,
        "Spans are sent this often. Longer: fewer requests, and more is lost by a crash.",
        unit="ms", low=10, high=60_000,
    )  # fmt: skip
    queue_max: int = key(
        "otlp.queue_max", 8192,
        """Spans that may wait in memory. Beyond it they are dropped and counted: the collector
        never holds a queue up.""",
        low=16, high=1_000_000,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultsConfig:
    """Defaults: content of a new cluster, and values where a client gives none."""

    pending_bytes_max: int = 16 << 20
    """Bytes of one channel under way into one queue."""
    disconnect_timeout_ms: int = 60_000
    """Longest absence of a node before its exclusive queues end. Sooner when its process is known
    to be gone."""

    user: str = key("default_user", "guest", "Administrator made when a cluster forms.")
    password: str = key(
        "default_pass",
        "guest",
        "Its password. Well known: keep `loopback_users` or change it.",
        secret=True,
    )
    vhost: str = key("default_vhost", "/", "Virtual host made when a cluster forms.")
    loopback_users: tuple[str, ...] = key(
        "loopback_users", ("guest",),
        """Users that may only connect from this machine; `none` = nobody is restricted.
        `loopback_users.NAME = false` takes one out. Opening up `guest` opens the broker to
        everybody.""",
        parse=parse_words, collects="loopback_users.",
    )  # fmt: skip
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
        "quorum_queue.initial_cluster_size quorum_cluster_size", 3,
        """Replicas of a new quorum queue, at most one per node. 1 or 2 lose a node's messages
        with it.""",
        low=1, high=64,
    )  # fmt: skip
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
    )
    permit_transient_queues: bool = key(
        "deprecated_features.permit.transient_nonexcl_queues",
        True,
        """Whether queues may be declared that are neither durable nor exclusive. RabbitMQ 4.3
        denies them by default: error 541, which closes the connection.""",
    )
    permit_global_qos: bool = key(
        "deprecated_features.permit.global_qos",
        True,
        """Whether basic.qos with global=true sets a limit that all consumers of a channel share.
        Otherwise it does what global=false does, as RabbitMQ 4.3 by default.""",
    )
    operation_timeout_ms: int = key(
        "operation_timeout", 30_000,
        """How long declare, delete, consume, get and purge wait for a majority before they are
        refused. Shorter: an election may already refuse them.""",
        unit="ms", low=100, high=600_000,
    )  # fmt: skip
    publish_register_timeout_ms: int = key(
        "quorum_queue.publish_register_timeout", 65_000,
        """How long the first publishes of a channel wait for the answer of a quorum queue that has
        a leader before they are nacked. Publishes of a channel that the queue has answered once
        wait for as long as it takes.""",
        unit="ms", low=100, high=600_000,
    )  # fmt: skip
    cluster_queues_max: int = key(
        "cluster_queue_limit", 0,
        """Queues and streams of the whole cluster, beyond which new ones are refused with 406;
        0 = any number. Set it alike on all nodes: the node that is asked looks at its own.""",
        low=0, high=1_000_000_000,
    )  # fmt: skip
    topic_group_ttl_ms: int = key(
        "topics.group_ttl", 604_800_000,
        """How long a consumer group of an ordered topic may be without members before it expires:
        nothing is kept for it any more. Topics may say otherwise (`group-ttl`). Shorter: the next
        member may come too late. Set it alike on all nodes: the metadata leader decides.""",
        unit="ms", low=1_000, high=31_536_000_000,
    )  # fmt: skip
    topic_producer_ttl_ms: int = key(
        "topics.producer_ttl", 604_800_000,
        """How long a partition of an ordered topic remembers an idempotent producer that sends
        nothing. Repeats of one that is forgotten are refused, not stored again. Longer costs
        memory.""",
        unit="ms", low=60_000, high=31_536_000_000,
    )  # fmt: skip
    cluster_exchanges_max: int = key(
        "cluster_exchange_limit", 0,
        """Exchanges of the whole cluster, those that every virtual host begins with included,
        beyond which new ones are refused with 406; 0 = any number. Set it alike on all nodes.""",
        low=0, high=1_000_000_000,
    )  # fmt: skip
    classic_memory_target_bytes: int = key(
        "classic_queue.memory_target", 0,
        """Memory for the messages of all classic queues of this node together. Above it they are
        paged out, the newest first, and read back from disk when their turn comes. 0: a quarter of
        the memory alarm's limit. Larger: less is left for quorum queues and connections; smaller:
        a backlog is read from disk sooner.""",
        parse=parse_bytes, low=0, high=1 << 50,
    )  # fmt: skip
    mirror_sync_batch_size: int = key(
        "mirroring_sync_batch_size", 4096,
        """Messages that are sent to a new mirror at a time; the policy key `ha-sync-batch-size`
        comes first. Larger batches hold the node's other work up for longer.""",
        low=1, high=1_000_000,
    )  # fmt: skip
    mirror_sync_bytes_per_s: int = key(
        "mirroring_sync_max_throughput", 0,
        """Bytes per second at most at which a queue synchronises its mirrors; 0 = no limit. The
        global parameter of this name comes first, and acts at once. Lower: queues stay longer
        without a synchronised mirror.""",
        parse=parse_bytes, low=0, high=1 << 40,
    )  # fmt: skip
    partition_handling: str = key(
        "cluster_partition_handling", "pause_minority",
        """What a node does with classic queues, mirrored ones too, while it cannot reach more than
        half of the cluster's nodes (docs/mirrored.md): `pause_minority`: they stand still;
        `ignore`: they go on; `autoheal`: they go on, and copies on that node begin anew when the
        partition is over. Metadata, quorum queues and streams need a majority in any case. In a
        cluster of two nodes each of them alone is a minority.""",
        choices=("pause_minority", "ignore", "autoheal"),
    )  # fmt: skip
    mirror_restart_wait_ms: int = key(
        "mirrored_queue.restart_wait", 300_000,
        """How long after its start a node with a synchronised mirror waits for the node of the last
        master before the mirror opens the queue. Shorter: when all nodes were stopped, what the
        last master alone had is lost if its node starts later.""",
        unit="ms", low=0, high=86_400_000,
    )  # fmt: skip
    dead_letter_prefetch: int = key(
        "dead_letter_worker_consumer_prefetch", 0,
        """Dead letters of one queue that are moved at a time, with the strategy at-least-once. 0:
        at first 32, RabbitMQ's default; more, up to 4096 and 4 MiB, while the target queues confirm
        them within 250 ms, and 32 again when one refuses. Another number is kept to exactly. More
        are faster where confirms take long, and more are moved twice when a leader fails.""",
        low=0, high=65_536,
    )  # fmt: skip
    dead_letter_confirm_timeout_ms: int = key(
        "dead_letter_worker_publisher_confirm_timeout", 180_000,
        """After this time without all its confirms the route of a dead letter is looked at again
        (strategy at-least-once). One that was refused, or has no route, is tried again after 1 s,
        2 s, 4 s … at most after this time.""",
        unit="ms", low=1_000, high=86_400_000,
    )  # fmt: skip
    leaderless_publish_timeout_ms: int = key(
        "quorum_queue.publish_timeout_without_leader", 5000,
        """How long publishes wait for a quorum queue or stream that has no leader before they are
        nacked; 0 = for as long as it takes. A nack says that nobody knows: the message may be in
        the queue later. Shorter than an election (a second or two) nacks what would have been
        confirmed soon.""",
        unit="ms", low=0, high=600_000,
    )  # fmt: skip
    leaderless_consumer_timeout_ms: int = key(
        "quorum_queue.consumer_timeout_without_leader", 5000,
        """How long a quorum queue is without a leader before its consumers get basic.cancel, if
        their clients have the capability `consumer_cancel_notify`; 0 = they stay. Other consumers
        always stay, and go on when there is a leader again.""",
        unit="ms", low=0, high=600_000,
    )  # fmt: skip
    publish_pending_max_bytes: int = key(
        "publish_pending_max", 128 << 20,
        """What this node has taken from publishers for quorum queues and streams and what is not
        applied yet, all channels and queues together: above it who publishes waits, until it is
        half. One message of each connection comes on top. Larger costs memory, when a majority is
        slow or one message goes to many queues.""",
        parse=parse_bytes, low=1 << 20, high=1 << 36,
    )  # fmt: skip
    publish_pending_messages: int = key(
        "publish_pending_messages", 1024,
        """Messages of one channel for one quorum queue or stream that are not applied yet: above it
        the channel is not read, until it is half. Larger lets a fast publisher fill the queue's log
        ahead of acknowledgements, so that consumers fall behind. Smaller than what is published in
        a round trip to the followers costs throughput of a single channel: raise it for links
        between sites.""",
        low=64, high=1 << 20,
    )  # fmt: skip
    publish_pending_commands: int = key(
        "quorum_queue.commands_soft_limit quorum_commands_soft_limit", 4096,
        """Commands of one channel for one quorum queue or stream that are not applied yet: above it
        the channel is not read, until it is half. A command here is what a channel publishes to one
        queue in a turn, up to thousands of messages, or acknowledges at once; RabbitMQ counts each
        message, with 32 as its default. A higher limit than 32 helps nobody where a channel waits
        for each confirm, or publishes few messages at a time. Smaller bounds what a slow majority
        makes a publisher's node keep; `publish_pending_messages` bounds it by messages.""",
        low=1, high=1 << 20,
    )  # fmt: skip

    @property
    def operation_timeout_s(self) -> float:
        """`operation_timeout_ms` in seconds."""
        return self.operation_timeout_ms / 1000


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
    )
    target_group_size: int | None = key(
        "quorum_queue.continuous_membership_reconciliation.target_group_size", None,
        """Members that every quorum queue should have; `none` = what its policies and its argument
        say.""",
        parse=parse_optional_int, low=1, high=255,
    )  # fmt: skip
    auto_remove: bool = key(
        "quorum_queue.continuous_membership_reconciliation.auto_remove",
        False,
        """A check also takes out members whose nodes are no longer in the cluster. A node that is
        only down stays a member. `convoy cluster forget` takes its node out of all queues whatever
        is set here.""",
    )
    interval_ms: int = key(
        "quorum_queue.continuous_membership_reconciliation.interval", 3_600_000,
        "How often it is looked at all queues when nothing has happened.",
        unit="ms", low=100, high=10**10,
    )  # fmt: skip
    trigger_interval_ms: int = key(
        "quorum_queue.continuous_membership_reconciliation.trigger_interval", 10_000,
        """How soon it is looked at all queues after something has happened that may matter: a node
        came, left or was drained, a queue was declared or got another member, a policy changed.
        Longer: several changes are acted on together, later.""",
        unit="ms", low=100, high=10**10,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmsConfig:
    """Alarms: thresholds at which publishers are held back."""

    memory_relative: float = key(
        "vm_memory_high_watermark.relative vm_memory_high_watermark", 0.6,
        """Publishers are blocked on the whole cluster while a node uses more than this share of its
        memory (of the cgroup's limit where there is one). Too high: the system kills the node.""",
        low=0.01, high=1.0,
    )  # fmt: skip
    memory_absolute: int = key(
        "vm_memory_high_watermark.absolute", 0,
        "The same as a size; 0 = use the share.",
        parse=parse_bytes, low=0, high=1 << 50,
    )  # fmt: skip
    disk_absolute: int = key(
        "disk_free_limit.absolute", 50_000_000,
        """Publishers are blocked while less than this is free where the data lies. Too low: the
        disk fills and nothing is confirmed until there is room.""",
        parse=parse_bytes, low=0, high=1 << 50,
    )  # fmt: skip
    interval_ms: int = key(
        "alarms.interval", 1_000,
        "How often memory and disk are looked at.",
        unit="ms", low=50, high=60_000,
    )  # fmt: skip


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
    audit_file: str = key(
        "log.audit.file",
        "",
        """File to which administrative acts are appended, a JSON line for each (docs/access.md);
        empty = they are not recorded. Opened again on SIGHUP, as the log.""",
    )
