"""Classes that planted bugs patch. Imported late: a bug is planted into what runs from source."""

from __future__ import annotations

from tests.sim.planted.registry import late

machine = late("convoymq.queues.quorum.machine:QuorumMachine")
changes = late("convoymq.replication.raft.changes:MembershipChanges")
