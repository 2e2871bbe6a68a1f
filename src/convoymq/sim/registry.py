"""The loads of the simulator. Imports nothing: what is imported decides which code runs."""

from __future__ import annotations

LOADS = {
    "quorum": "convoymq.sim.quorum:QuorumLoad",
    "reservations": "convoymq.sim.reservations:ReservationLoad",
    "transactions": "convoymq.sim.transactions:TransactionLoad",
    "links": "convoymq.sim.links:LinkLoad",
    "filters": "convoymq.sim.filters:FilterLoad",
    "streams": "convoymq.sim.streams:StreamLoad",
    "partitions": "convoymq.sim.partitions:PartitionLoad",
    "cluster": "convoymq.sim.cluster_world:ClusterLoad",
    "machines": "convoymq.sim.machine_world:MachineLoad",
    "mixed": "convoymq.sim.mixed_world:MixedLoad",
    "classic": "convoymq.sim.classic.world:ClassicLoad",
    "ring": "convoymq.sim.ring.world:RingLoad",
    "mirrored": "convoymq.sim.mirrored.world:MirroredLoad",
    "recovery": "convoymq.sim.mirrored.recovery:RecoveryLoad",
    "migrations": "convoymq.sim.migrations.world:MigrationLoad",
    "group": "convoymq.sim.broker_group.world:BrokerGroupLoad",
    "acting": "convoymq.sim.broker_group.acting_world:ActingLoad",
    "topics": "convoymq.sim.topics.world:TopicLoad",
}
"""Name of a load (`--load NAME`) -> its class. Only the chosen one is imported."""
DEFAULT = "quorum"
