"""Defaults of the broker, where neither a declaration nor a virtual host says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

from convoymq.metadata.placement import CLIENT_LOCAL
from convoymq.model.compatibility import RELEASE_4_1
from convoymq.queues.quorum.settings import DISCONNECT_TIMEOUT_MS_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconciliationSettings:
    """[quorum_queue.continuous_membership_reconciliation.…] When quorum queues get the members
    they should have by themselves."""

    enabled: bool = False
    target_group_size: int = 0
    """Of every quorum queue; 0 = only policies and arguments say."""
    auto_remove: bool = False
    """Members that are no nodes of the cluster are taken out."""
    interval_ms: int = 3_600_000
    trigger_interval_ms: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Defaults and bounds. Names in brackets are configuration keys."""

    compatibility: str = RELEASE_4_1
    """[rabbitmq_compatibility] The release of RabbitMQ whose rules new quorum queues follow."""
    default_queue_type: str = "auto"
    """[default_queue_type] `auto` and `quorum`: quorum where properties fit; `classic`."""
    quorum_group_size: int = 3
    """[quorum_queue.initial_cluster_size] Members of a new quorum queue."""
    leader_locator: str = CLIENT_LOCAL
    """[queue_leader_locator] Who leads a new queue."""
    operation_timeout_ms: int = 30_000
    """[operation_timeout] How long a change, or a question to a queue, may take before it is
    refused."""
    publish_register_timeout_ms: int = 65_000
    """[quorum_queue.publish_register_timeout] How long the first publishes of a channel wait for a
    quorum queue that does not answer."""
    leaderless_publish_timeout_ms: int = 5_000
    """[quorum_queue.publish_timeout_without_leader] How long publishes wait for a quorum queue or
    stream that has no leader; 0 = for as long as it takes."""
    leaderless_consumer_timeout_ms: int = 5_000
    """[quorum_queue.consumer_timeout_without_leader] How long consumers of a quorum queue stay
    while it has no leader; 0 = for as long as it takes."""
    relaxed_redeclaration: bool = False
    """[quorum_queue.property_equivalence.relaxed_checks_on_redeclaration] A quorum queue that is
    declared again as a classic one is taken, if the arguments agree that both types have."""
    permit_transient_queues: bool = True
    """[deprecated_features.permit.transient_nonexcl_queues] Queues that are neither durable nor
    exclusive may be declared."""
    cluster_queues_max: int = 0
    """[cluster_queue_limit] Queues of the cluster; 0 = any number."""
    topic_group_ttl_ms: int = 604_800_000
    """[topics.group_ttl] Groups of topics without members expire after it, unless the topic says
    otherwise."""
    topic_producer_ttl_ms: int = 604_800_000
    """[topics.producer_ttl] Partitions forget producers that sent nothing for so long."""
    cluster_exchanges_max: int = 0
    """[cluster_exchange_limit] Exchanges of the cluster; 0 = any number."""
    connections_max: int = 65_536
    """[connection_max] Client connections of this node; the ports refuse more."""
    certificate_file: str = ""
    """[ssl_options.certfile] What the ports show to clients; empty: they have no TLS."""
    permit_global_qos: bool = True
    """[deprecated_features.permit.global_qos] basic.qos may set a limit for a whole channel."""
    publish_pending_max_bytes: int = 128 << 20
    """[publish_pending_max] What this node's publishers may have under way together."""
    dead_letter_prefetch: int = 0
    """[dead_letter_worker_consumer_prefetch] Dead letters of one queue that are moved at a time;
    0 = as many as the targets take quickly."""
    dead_letter_confirm_timeout_ms: int = 180_000
    """[dead_letter_worker_publisher_confirm_timeout] How long a dead letter waits for its confirms,
    and at most for another try."""
    reply_backlog_max_bytes: int = 128 << 20
    """Direct replies to a node are dropped while more waits to be written to it: half of
    [cluster.link_backlog_max]."""
    publish_pending_messages: int = 1024
    """[publish_pending_messages] What one channel may have under way into one queue."""
    publish_pending_commands: int = 4096
    """[quorum_queue.commands_soft_limit] The same, in commands."""
    loopback_users: tuple[str, ...] = ("guest",)
    """[loopback_users] Who may only come from this machine."""
    cluster_size_target: int = 0
    """[cluster_formation.target_cluster_size_hint] How many nodes should run; 0 = all known."""
    disconnect_timeout_ms: int = DISCONNECT_TIMEOUT_MS_DEFAULT
    """Longest absence of a node before its exclusive queues end. Sooner when its process is known
    to be gone."""
    reconciliation: ReconciliationSettings = field(default_factory=ReconciliationSettings)

    @property
    def operation_timeout_s(self) -> float:
        """`operation_timeout_ms` in seconds."""
        return self.operation_timeout_ms / 1000
