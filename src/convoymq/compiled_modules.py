"""Names of the modules that are compiled where that is possible and run interpreted too.

tools/build.py reads this file by its path, before anything is built: it imports nothing.
"""

from __future__ import annotations

PLAIN_MODULES = (
    "convoymq.replication.raft.core",
    "convoymq.replication.raft.elections",
    "convoymq.replication.raft.changes",
    "convoymq.replication.raft.lost_data",
    "convoymq.replication.raft.progress",
    "convoymq.queues.quorum.backlog",
    "convoymq.queues.quorum.consumers",
    "convoymq.queues.quorum.deliveries",
    "convoymq.queues.quorum.machine",
    "convoymq.queues.quorum.runs",
    "convoymq.queues.quorum.tracing",
    "convoymq.groups.replica",
    "convoymq.groups.host",
    "convoymq.transport.links",
    "convoymq.transport.detector",
    "convoymq.amqp.channel",
    "convoymq.amqp.consumers",
    "convoymq.amqp.declarations",
    "convoymq.amqp.deliveries",
    "convoymq.amqp.permissions",
    "convoymq.amqp.transactions",
    "convoymq.amqp.edge",
    "convoymq.amqp.sockets",
    "convoymq.node",
    "convoymq.storage.log",
    "convoymq.storage.wal",
    "convoymq.queues.quorum.client",
    "convoymq.queues.quorum.queue",
    "convoymq.queues.sessions",
    "convoymq.queues.session_client",
    "convoymq.queues.group_machine",
    "convoymq.queues.group_queue",
    "convoymq.queues.stream.machine",
    "convoymq.streamlog.chunks",
    "convoymq.queues.stream.client",
    "convoymq.queues.stream.queue",
)
"""Modules without pointers: interpreted, they do the same, only slower."""
