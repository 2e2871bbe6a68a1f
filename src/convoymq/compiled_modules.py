"""Names of the modules that are compiled for releases and benchmarks, and run interpreted too.

tools/build.py reads this file by its path, before anything is built: it imports nothing of the
package.
"""

from __future__ import annotations

from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

PLAIN_MODULES = (
    "convoymq.replication.raft.core",
    "convoymq.replication.raft.elections",
    "convoymq.replication.raft.progress",
    "convoymq.replication.raft.quorum",
    "convoymq.queues.quorum.backlog",
    "convoymq.queues.quorum.consumers",
    "convoymq.queues.quorum.dead_letters",
    "convoymq.queues.quorum.delayed",
    "convoymq.queues.quorum.deliveries",
    "convoymq.queues.quorum.groups",
    "convoymq.queues.quorum.levels",
    "convoymq.queues.quorum.machine",
    "convoymq.queues.quorum.order",
    "convoymq.queues.quorum.restored",
    "convoymq.queues.quorum.runs",
    "convoymq.queues.quorum.waiting",
    "convoymq.shells.groups.replica",
    "convoymq.shells.groups.applying",
    "convoymq.shells.groups.sender",
    "convoymq.shells.groups.group_time",
    "convoymq.shells.groups.serving",
    "convoymq.shells.groups.snapshots",
    "convoymq.shells.groups.version_raising",
    "convoymq.shells.groups.host",
    "convoymq.shells.groups.intake",
    "convoymq.shells.watched",
    "convoymq.shells.capacity",
    "convoymq.shells.forwarding",
    "convoymq.shells.groups.deferred",
    "convoymq.transport.links",
    "convoymq.transport.connections",
    "convoymq.transport.peer",
    "convoymq.transport.credit",
    "convoymq.transport.detector",
    "convoymq.transport.dispatch",
    "convoymq.transport.frame_kinds",
    "convoymq.edges.amqp091.channel",
    "convoymq.edges.amqp091.consumers",
    "convoymq.edges.amqp091.deliveries",
    "convoymq.edges.amqp091.sockets",
    "convoymq.edges.amqp10.connection",
    "convoymq.edges.amqp10.edge",
    "convoymq.edges.amqp10.frames",
    "convoymq.edges.amqp10.incoming",
    "convoymq.edges.amqp10.outcomes",
    "convoymq.edges.amqp10.outgoing",
    "convoymq.edges.amqp10.receiving",
    "convoymq.edges.amqp10.sending",
    "convoymq.edges.amqp10.serial",
    "convoymq.edges.amqp10.session",
    "convoymq.edges.amqp10.unsettled",
    "convoymq.node.node",
    "convoymq.model.rounds",
    "convoymq.node.rounds",
    "convoymq.node.loop_clock",
    "convoymq.node.storage_shell",
    "convoymq.storage.log",
    "convoymq.storage.wal",
    "convoymq.queues.quorum.client",
    "convoymq.queues.quorum.queue",
    "convoymq.queues.sessions",
    "convoymq.queues.session_client",
    "convoymq.queues.group_machine",
    "convoymq.queues.group_queue",
    "convoymq.queues.stream.machine",
    "convoymq.topics.machine.group_machine",
    "convoymq.streamlog.chunks",
    "convoymq.queues.stream.client",
    "convoymq.queues.stream.queue",
    "convoymq.topics.machine.client",
    "convoymq.topics.machine.queue",
    "convoymq.queues.classic.backing",
    "convoymq.queues.classic.client",
    "convoymq.queues.classic.effect_frames",
    "convoymq.queues.classic.file_index",
    "convoymq.queues.classic.gates",
    "convoymq.queues.classic.host",
    "convoymq.queues.classic.log",
    "convoymq.queues.classic.log_writer",
    "convoymq.queues.classic.machine",
    "convoymq.queues.classic.memory",
    "convoymq.queues.classic.queue",
    "convoymq.queues.classic.remote_queue",
    "convoymq.queues.classic.runs",
    "convoymq.queues.mirrored.client",
    "convoymq.queues.mirrored.confirms",
    "convoymq.queues.mirrored.copy",
    "convoymq.queues.mirrored.handle",
    "convoymq.queues.mirrored.host",
    "convoymq.queues.mirrored.instructions",
    "convoymq.queues.mirrored.log",
    "convoymq.queues.mirrored.master",
    "convoymq.queues.mirrored.partitions",
    "convoymq.replication.ring.core",
    "convoymq.shells.ring.frames",
    "convoymq.shells.ring.shell",
)
"""Modules without pointers that a node under load is busy in: interpreted, they do the same, only
slower. Others gain nothing that can be measured."""


@cache
def build_text() -> str:
    """Returns what is compiled here, as `convoy status` and benchmarks show it."""
    source = Path(__file__).parents[1]
    paths = (source / (name.replace(".", "/") + EXTENSION_SUFFIXES[0]) for name in PLAIN_MODULES)
    compiled = sum(path.exists() for path in paths)
    if not compiled:
        return "compiled kernels, other modules interpreted"
    return f"compiled kernels and {compiled} of {len(PLAIN_MODULES)} other modules"
