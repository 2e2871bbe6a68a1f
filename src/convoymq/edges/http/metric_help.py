"""Meaning of each metric, for Prometheus' HELP lines; docs/metrics.md says more."""

from __future__ import annotations

HELP: dict[str, str] = {
    "rabbitmq_build_info": "Versions of the broker and of the API that it serves",
    "rabbitmq_identity_info": "Names of node and cluster",
    "rabbitmq_erlang_uptime_seconds": "Time since the node started",
    "rabbitmq_connections": "Open connections",
    "rabbitmq_channels": "Open channels",
    "rabbitmq_consumers": "Consumers of this node's clients",
    "rabbitmq_global_consumers": "Consumers of this node's clients",
    "rabbitmq_global_publishers": "Channels that have published, and links of publishers",
    "rabbitmq_connections_opened_total": "Connections opened",
    "rabbitmq_connections_closed_total": "Connections closed",
    "rabbitmq_channels_opened_total": "Channels opened",
    "rabbitmq_channels_closed_total": "Channels closed",
    "rabbitmq_auth_attempts_total": "Logins",
    "rabbitmq_auth_attempts_succeeded_total": "Logins that were let in",
    "rabbitmq_auth_attempts_failed_total": "Logins that were refused",
    "rabbitmq_global_messages_received_total": "Messages published",
    "rabbitmq_global_messages_confirmed_total": "Messages confirmed to publishers",
    "rabbitmq_global_messages_unroutable_dropped_total": "Messages without a queue, dropped",
    "rabbitmq_global_messages_unroutable_returned_total": "Messages without a queue, returned",
    "rabbitmq_global_messages_delivered_total": "Messages delivered, by consume and by get",
    "rabbitmq_global_messages_delivered_consume_manual_ack_total":
        "Messages delivered to consumers that acknowledge",
    "rabbitmq_global_messages_delivered_consume_auto_ack_total":
        "Messages delivered to consumers that do not acknowledge",
    "rabbitmq_global_messages_delivered_get_manual_ack_total":
        "Messages fetched by basic.get, to be acknowledged",
    "rabbitmq_global_messages_delivered_get_auto_ack_total":
        "Messages fetched by basic.get without acknowledgement",
    "rabbitmq_global_messages_get_empty_total": "Calls of basic.get that found nothing",
    "rabbitmq_global_messages_redelivered_total":
        "Deliveries that were not the first of their message",
    "rabbitmq_global_messages_dead_lettered_delivery_limit_total":
        "Messages that left quorum queues after too many failed deliveries",
    "rabbitmq_global_messages_dead_lettered_rejected_total":
        "Messages that left quorum queues because a consumer rejected them",
    "rabbitmq_global_messages_dead_lettered_confirmed_total":
        "Dead letters that every queue of their route has confirmed",
    "rabbitmq_global_messages_dead_lettered_expired_total":
        "Messages that nobody took in their time",
    "rabbitmq_global_messages_dead_lettered_maxlen_total":
        "Messages that left because their queue was too long",
    "convoy_messages_deduplicated_total":
        "Messages that quorum queues dropped as repeats by message-id",
    "rabbitmq_global_messages_acknowledged_total": "Messages acknowledged",
    "convoy_direct_replies_dropped_total":
        "Direct replies whose requester was gone or did not read in time",
    "convoy_fetch_connections": "Open connections of the columnar protocol",
    "convoy_fetch_requests_total": "Requests of the columnar protocol",
    "convoy_fetch_errors_total": "Requests and connections answered with an error",
    "convoy_fetch_malformed_total": "Connections that broke the columnar protocol",
    "convoy_fetch_connections_refused_total": "Connections beyond fetch.connections_max",
    "convoy_fetch_slow_readers_dropped_total": "Connections that did not read in time",
    "convoy_fetch_received_bytes_total": "Bytes received in the columnar protocol",
    "convoy_fetch_sent_bytes_total": "Bytes sent in the columnar protocol",
    "convoy_fetch_rows_received_total": "Messages published through the columnar protocol",
    "convoy_fetch_rows_sent_total": "Messages read through the columnar protocol",
    "convoy_fetch_read_descriptors_total": "Fetches answered with a place in a file",
    "convoy_fetch_buffered_bytes": "Bytes reserved for answers under way",
    "convoy_fetch_input_bytes": "Bytes reserved for large requests",
    "convoy_trace_queues": "Queues that this node traces",
    "convoy_trace_rows_lost_total": "Rows of traces that were dropped",
    "convoy_trace_write_errors_total": "Segments of traces that could not be written",
    "rabbitmq_queues": "Queues led by this node, or at home here",
    "convoy_queues_leaderless": "Queues with a replica here and no leader that this node knows",
    "rabbitmq_queues_declared_total": "Declarations of queues",
    "rabbitmq_queues_created_total": "Queues created",
    "rabbitmq_queues_deleted_total": "Queues deleted",
    "convoy_queues_migrated_total": "Queues migrated to another type by this node",
    "rabbitmq_queue_messages": "Messages, ready and unacknowledged",
    "rabbitmq_queue_messages_ready": "Messages that wait",
    "rabbitmq_queue_messages_unacked": "Messages with consumers",
    "rabbitmq_queue_messages_bytes": "Size of messages' bodies",
    "rabbitmq_queue_messages_ready_bytes": "Size of the bodies of messages that wait",
    "rabbitmq_queue_consumers": "Consumers of these queues, of all nodes",
    "rabbitmq_queue_process_memory_bytes": "Memory of the queues' indexes",
    "convoy_queue_messages_delayed": "Messages of quorum queues that wait for a time",
    "convoy_queue_messages_delayed_bytes": "Size of the bodies of messages that wait for a time",
    "convoy_queue_messages_blocked": "Messages that wait for another one of their group",
    "convoy_queue_messages_blocked_bytes":
        "Size of the bodies of messages that wait for another one of their group",
    "convoy_queue_deduplication_ids": "Message-ids that quorum queues remember",
    "convoy_queue_deduplication_bytes": "Memory of the message-ids that quorum queues remember",
    "rabbitmq_process_open_fds": "Open file descriptors",
    "rabbitmq_process_max_fds": "Limit of open file descriptors",
    "convoy_process_threads": "Threads of the node's process",
    "rabbitmq_process_resident_memory_bytes": "Memory of the process that is in RAM",
    "rabbitmq_resident_memory_limit_bytes": "Memory at which the alarm begins",
    "rabbitmq_disk_space_available_bytes": "Free disk where the data lies",
    "rabbitmq_disk_space_available_limit_bytes": "Free disk below which the alarm begins",
    "rabbitmq_alarms_memory_used_watermark": "1 while this node's memory alarm blocks publishers",
    "rabbitmq_alarms_free_disk_space_watermark":
        "1 while this node's disk alarm blocks publishers",
    "rabbitmq_alarms_file_descriptor_limit": "1 while no file descriptor is left",
    "convoy_topic_partitions_sealed_from_outside_total":
        "Partitions of ordered topics without a majority that were sealed, led by this node",
    "convoy_topic_partitions_end_unknown":
        "Partitions of ordered topics that were sealed so and have not said where they end",
    "convoy_topic_partitions_deleted_total":
        "Sealed partitions of ordered topics that retention deleted, led by this node",
    "convoy_topic_change_seconds_total":
        "Time that changes of ordered topics stayed in a phase, driven by this node",
    "convoy_topic_changes_total":
        "Changes of ordered topics that ended, driven by this node",
    "convoy_topic_publishes_retried_total":
        "Publishes of this node's clients that a partition refused at a change, sent to the next",
    "convoy_topic_producer_pauses_total":
        "Ranges of keys of this node's publishers that stood still at a change",
    "convoy_topic_producer_pause_seconds_total":
        "Time for which they did, from confirm to confirm",
    "convoy_topic_consumer_stalls_total":
        "Changes that groups have passed, coordinated by this node",
    "convoy_topic_consumer_stall_seconds_total":
        "Time from the last partition drained to the first lease of the next ones",
    "convoy_topic_group_stalls_total": "As convoy_topic_consumer_stalls_total, of one group",
    "convoy_topic_group_stall_seconds_total":
        "As convoy_topic_consumer_stall_seconds_total, of one group",
    "convoy_topic_group_versions_behind": "Route versions that a group is behind the newest",
    "convoy_topic_group_versions_behind_max": "The most route versions that a group is behind",
    "convoy_topic_group_wait_seconds":
        "Time for which partitions wait until a group has finished those before them",
    "convoy_topic_group_wait_seconds_max": "The longest of these times",
    "convoy_topic_parked_keys": "Parked keys in partitions that this node leads",
    "convoy_topic_acks_fenced_total":
        "Acknowledgements under a lease that was over, refused by partitions of this node",
    "convoy_topic_duplicates_refused_total":
        "Repeated messages of producers with sequences that partitions of this node refused",
    "convoy_topic_autoscaler_decisions_total":
        "Changes that this node's autoscaler began, and reports",
    "convoy_topic_hot_logical_partitions":
        "Logical partitions that are most of a partition which is too busy",
    "convoy_topic_groups_expired_total":
        "Groups of ordered topics that expired without members, led by this node",
    "convoy_deliveries_local_total": "Messages that this node handed to its own clients",
    "convoy_deliveries_proxied_total":
        "Messages sent, as leader, for nodes without a live replica",
    "convoy_groups_led": "Raft groups led by this node",
    "convoy_groups_followed": "Raft groups with a following replica here",
    "convoy_read_model_entries": "Objects in the read model of lists",
    "convoy_read_model_histories": "Objects of the read model that have a history",
    "convoy_replicas_behind":
        "Replicas here that lag, so that the leader serves this node's clients",
    "convoy_raft_entries_appended_total": "Log entries written",
    "convoy_raft_bytes_appended_total": "Bytes of log entries written",
    "convoy_raft_replicas_stopped_total": "Replicas stopped because of something in their log",
    "convoy_raft_elections_total": "Elections that this node stood in",
    "convoy_raft_leader_changes_total": "Changes of leaders that this node saw",
    "convoy_raft_forwards_stale_total": "Batches of commands dropped because of another term",
    "convoy_raft_snapshots_sent_total": "Snapshots sent to replicas too far behind for the log",
    "convoy_raft_snapshots_installed_total": "Snapshots installed",
    "rabbitmq_raft_term": "Terms of the replicas here, added up",
    "rabbitmq_raft_commit_index": "Committed entries of the replicas here, added up",
    "rabbitmq_raft_last_applied": "Applied entries of the replicas here, added up",
    "rabbitmq_raft_last_written_index": "Entries on this node's disk, added up",
    "rabbitmq_raft_snapshot_index": "Entries covered by snapshots of the replicas here, added up",
    "rabbitmq_raft_num_segments": "Segment files of the replicas here",
    "rabbitmq_raft_commit_latency_seconds": "Longest time that the last entry of a led group took",
    "rabbitmq_raft_log_commit_index": "As rabbitmq_raft_commit_index",
    "rabbitmq_raft_log_last_applied_index": "As rabbitmq_raft_last_applied",
    "rabbitmq_raft_log_last_written_index": "As rabbitmq_raft_last_written_index",
    "rabbitmq_raft_log_snapshot_index": "As rabbitmq_raft_snapshot_index",
    "rabbitmq_raft_entry_commit_latency_seconds": "As rabbitmq_raft_commit_latency_seconds",
    "rabbitmq_raft_wal_files": "Files of the write-ahead log that were ever begun",
    "rabbitmq_raft_entries": "Log entries written",
    "rabbitmq_raft_bytes_written": "Bytes of log entries written",
    "convoy_clock_skew_ms": "How far this node's clock is ahead of the median of all",
    "convoy_link_full": "1 while another node is sent no more bulk until it has taken some",
    "convoy_link_sent_bytes_total": "Bytes sent to another node",
    "convoy_link_received_bytes_total": "Bytes received from another node",
}  # fmt: skip
