"""Feature flags of RabbitMQ up to 4.1, for runbooks that enable them."""

from __future__ import annotations

from convoymq.model.json import JsonObject

STABLE_FLAGS = (
    "classic_mirrored_queue_version", "classic_queue_type_delivery_support",
    "detailed_queues_endpoint", "direct_exchange_routing_v2", "drop_unroutable_metric",
    "empty_basic_get_metric", "feature_flags_v2", "implicit_default_bindings", "khepri_db",
    "listener_records_in_ets", "maintenance_mode_status", "message_containers",
    "message_containers_deaths_v2", "quorum_queue", "quorum_queue_non_voters", "quorum_queues_v4",
    "rabbit_exchange_type_local_random", "rabbitmq_4.0.0", "rabbitmq_4.1.0", "restart_streams",
    "stream_filtering", "stream_queue", "stream_sac_coordinator_unblock_group",
    "stream_single_active_consumer", "stream_update_config_command", "tracking_records_in_ets",
    "user_limits", "virtual_host_metadata",
)  # fmt: skip
"""Features of these names are never switched: they are here from the start, or missing for good
(docs/compatibility.md)."""


def flag_rows() -> list[JsonObject]:
    """Returns these flags as the HTTP API lists them: enabled."""
    return [
        {
            "name": name,
            "desc": "A flag of RabbitMQ: there is nothing to enable",
            "doc_url": "",
            "state": "enabled",
            "stability": "stable",
            "provided_by": "rabbit",
        }
        for name in STABLE_FLAGS
    ]
