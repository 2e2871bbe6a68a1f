"""Versions of the machine of physical partitions that this build supports.

Apart from the machine: a node without topics does not import it.
"""

from __future__ import annotations

from convoymq.replication import versions as supported

PARTITION = "partition"


class PartitionRules:
    """Kind and versions of `topics.machine.group_machine.PartitionGroupMachine`."""

    KIND = PARTITION
    VERSION = 1
    OLDEST_VERSION = 1


supported.register(PartitionRules)
