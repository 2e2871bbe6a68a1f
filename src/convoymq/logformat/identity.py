"""Cluster that the files of a data directory belong to."""

from __future__ import annotations

from collections.abc import Sequence

from convoymq.model.errors import StorageFault

CLUSTER_BYTES = 16
NO_CLUSTER = bytes(CLUSTER_BYTES)
"""In files that were written before the node belonged to a cluster."""


class ClusterIds:
    """The id that new files carry, and those that are accepted in files found."""

    __slots__ = ("_accepted", "current")

    def __init__(self) -> None:
        self.current = NO_CLUSTER
        self._accepted = frozenset([NO_CLUSTER])

    def set(self, cluster: str, former: Sequence[str] = ()) -> None:
        """Takes 32 hexadecimal digits each, "" = no cluster. Raises ValueError."""
        current = _bytes_of(cluster)
        self._accepted = frozenset([NO_CLUSTER, current, *map(_bytes_of, former)])
        self.current = current

    def check(self, found: bytes, name: str) -> None:
        """Raises StorageFault: the file of that name belongs to another cluster."""
        if found not in self._accepted:
            mine = self.current.hex() if self.current != NO_CLUSTER else "none"
            raise StorageFault(
                f"the file belongs to cluster {found.hex()}, this node to {mine}",
                path=name,
                offset=0,
            )

    def accepts(self, found: bytes) -> bool:
        """Returns whether `check` would pass."""
        return found in self._accepted


def _bytes_of(cluster: str) -> bytes:
    if not cluster:
        return NO_CLUSTER
    made = bytes.fromhex(cluster)
    if len(made) != CLUSTER_BYTES:
        raise ValueError(f"a cluster id has 32 hexadecimal digits, not {len(cluster)}")
    return made


def check_version(head: bytes, magic: bytes, name: str) -> None:
    """Raises StorageFault: a file of this kind, but of another version of its format."""
    if head[: len(magic) - 1] == magic[:-1] and head[len(magic) - 1] != magic[-1]:
        raise StorageFault(
            f"the file has format version {head[len(magic) - 1]}, this release reads {magic[-1]}",
            path=name,
            offset=len(magic) - 1,
        )
