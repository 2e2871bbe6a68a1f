"""Identity of a node: what it tells others when it links, and what its directory keeps.

Source: ADR 0020.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """One incarnation of one node."""

    node: int
    directory: str
    """32 hex digits, made with the data directory; an emptied directory has another one."""
    incarnation: int
    """Counts the starts of this directory; raised at JOIN above every earlier one of `node`."""
    cluster: str = ""
    """Id of the cluster that the directory belongs to, 32 hex digits; "" = none yet."""
    candidate: str = ""
    """The id that this node would give to a cluster that it founds."""
    former: tuple[str, ...] = ()
    """Earlier ids of this cluster, from before it was recovered from a lost majority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Founding:
    """A cluster that is being founded: its id and exactly the directories that found it."""

    cluster: str
    directories: tuple[tuple[int, str], ...]
    """(node, directory) of every founder, ascending."""

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the founders, ascending."""
        return tuple(node for node, _ in self.directories)


def is_id(text: object) -> bool:
    """Returns whether something has the form of a cluster or directory id."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None
