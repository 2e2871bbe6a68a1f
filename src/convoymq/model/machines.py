"""Numbers of the nodes of a machine: process k of machine m is node m + step (k - 1)."""

from __future__ import annotations

STEP = 32
"""Default of `node.id_step`."""
NODE_MAX = 255
"""Numbers of nodes end here: sessions have eight bits for them."""


def node_number(machine: int, process: int, step: int = STEP) -> int:
    """Returns the number of a process as a node of the cluster; process 1 has the machine's."""
    return machine + step * (process - 1)


def processes_max(machine: int, step: int = STEP) -> int:
    """Returns how many processes the machine of that number may have."""
    return (NODE_MAX - machine) // step + 1 if machine <= step else 1
