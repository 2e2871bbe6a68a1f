"""A cluster whose nodes are of different releases, and what its replicas say of themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from convoymq.cli.cluster import LocalCluster, LocalNode
from convoymq.node.admin_socket import ask
from tests.clusters import start_nodes, stop_nodes
from tests.upgrade import releases

THIS_RELEASE = "convoymq.cli.serve"


class MixedCluster(LocalCluster):
    """A local cluster whose nodes can be of different releases.

    Args:
        old: the tree of the earlier release, which nodes have that are not in `upgraded`.
        program: the module that the others run.
    """

    def __init__(self, data: Path, base_port: int, old: Path, program: str = THIS_RELEASE) -> None:
        super().__init__(data, 3, base_port, {"raft.wal_max_size_bytes": "1MiB"})
        self.old = old
        self.program = program
        self.upgraded: set[int] = set()

    def _command(self, node: LocalNode) -> list[str]:
        program = self.program if node.number in self.upgraded else THIS_RELEASE
        return [sys.executable, "-m", program]

    def _environment(self, node: LocalNode) -> dict[str, str]:
        new = f"{releases.ROOT / 'src'}:{releases.ROOT}"
        path = new if node.number in self.upgraded else str(self.old / "src")
        return {**super()._environment(node), "PYTHONPATH": path}

    def groups(self, number: int) -> dict[int, dict[str, Any]]:
        """The replicas on a node, by group."""
        directory = self.data / f"node-{number}" / "data"
        return {row["group"]: row for row in ask(directory, {"op": "groups"}, print)}

    def restart(self, number: int) -> None:
        """Stops a node in an orderly way and starts it again."""
        stop_nodes(self, number)
        start_nodes(self, number)

    def upgrade(self, number: int) -> None:
        """Restarts a node with the new release."""
        self.upgraded.add(number)
        self.restart(number)

    def downgrade(self, number: int) -> None:
        """Restarts a node with the earlier release."""
        self.upgraded.discard(number)
        self.restart(number)

    def versions(self, kind: str) -> set[int]:
        """The versions of a kind of machine that are in force on the nodes."""
        return {
            row["version"]
            for number in (1, 2, 3)
            for row in self.groups(number).values()
            if row["kind"] == kind
        }


def equal_states(cluster: MixedCluster) -> bool:
    """Returns whether all replicas have applied the same index; asserts that those that have are
    in equal states."""
    states: dict[tuple[int, int], set[int]] = {}
    applied: dict[int, set[int]] = {}
    for number in (1, 2, 3):
        for group, row in cluster.groups(number).items():
            states.setdefault((group, row["applied"]), set()).add(row["hash"])
            applied.setdefault(group, set()).add(row["applied"])
    assert all(len(found) == 1 for found in states.values()), states
    return all(len(found) == 1 for found in applied.values())
