"""A node's data directory: locked by one process, bound to one node and to one cluster.

`node.json` says whose it is. It is replaced whole, written through to the disk before anything
relies on it, and never written when the directory is refused. Its format: ADR 0020.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convoymq import __version__
from convoymq.model.errors import Misuse, StorageFault
from convoymq.model.replaced_files import replace_file
from convoymq.transport.identity import Founding, NodeIdentity, is_id

FORMAT = 5
"""Of `node.json` and of the whole directory: rises when older releases must not open it.

Formats 1 (`node.json` does not name it) to 4 were those of development versions before 0.2.0.
"""
PACKS_SINCE = ("metadata", 4)
"""While this version of a machine is in force, releases before 0.4.0 do not open the directory."""
FILE = "node.json"
INCARNATION_MAX = (1 << 32) - 1

Supports = Mapping[str, tuple[int, int]]
"""Per kind of machine the oldest and the newest version that a build understands."""


class DataDirectory:
    """A node's directory, opened: a new incarnation of its node.

    Args:
        supports: what this build understands; None = versions are not looked at.

    Raises:
        Misuse: another process has it, it is another node's, or another release must open it.
        StorageFault: it cannot be made, read or written.
    """

    def __init__(
        self,
        path: str,
        node_id: int,
        supports: Supports | None = None,
        release: str = __version__,
    ) -> None:
        self.path = Path(path).expanduser().absolute()
        self._file = self.path / FILE
        self._release = release
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageFault(str(error), path=str(path)) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise Misuse(f"{self.path} is in use by another process") from None
        try:
            self._open(node_id, supports)
        except BaseException:
            self.close()
            raise

    def _open(self, node_id: int, supports: Supports | None) -> None:
        self._content = known = self._read()
        self._check_release(supports)
        try:
            owner = int(known.get("node", node_id))
            self.identity = NodeIdentity(
                node=owner,
                directory=known["directory"],
                incarnation=int(known.get("incarnation", 0)) + 1,
                cluster=known.get("cluster", ""),
                candidate=known["candidate"],
                former=tuple(known.get("former", ())),
            )
            self.lost_groups = int(known.get("lost_groups", 0))
            self.versions: dict[str, int] = dict(known.get("versions", {}))
            self.founding = _founding(known.get("founding"))
            self.logged = bool(known.get("logged", False))
            ids = (self.identity.directory, self.identity.candidate, *self.identity.former)
            if not all(map(is_id, ids)) or not (not self.cluster or is_id(self.cluster)):
                raise ValueError("an id is not 32 hex digits")
        except (ValueError, KeyError, TypeError) as error:
            raise StorageFault(f"unreadable: {error!r}", path=str(self._file)) from None
        if owner != node_id:
            raise Misuse(f"{self.path} belongs to node {owner}, this is node {node_id}")
        self._save()

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._file.read_text())
        except FileNotFoundError:
            for name in ("log", "classic"):
                if (self.path / name).is_dir() and any((self.path / name).iterdir()):
                    raise Misuse(
                        f"{self.path} holds data, but its {FILE} is missing: put the file back, or "
                        "empty the whole directory; the node then fetches its data from the others"
                    ) from None
            return {
                "format": FORMAT,
                "directory": secrets.token_hex(16),
                "candidate": secrets.token_hex(16),
            }
        except (OSError, ValueError) as error:
            raise StorageFault(f"unreadable: {error}", path=str(self._file)) from None
        if not isinstance(content, dict):
            raise StorageFault("unreadable: not a JSON object", path=str(self._file))
        return content

    def _check_release(self, supports: Supports | None) -> None:
        known = self._content
        writer = known.get("release", "")
        found = known.get("format", 1)
        if isinstance(found, int) and found < FORMAT:
            raise Misuse(
                f"{self.path} was written by a development version of ConvoyMQ before 0.2.0 in "
                f"format {found}; this is release {self._release}, which reads format {FORMAT}: "
                "start with an empty directory"
            )
        if found != FORMAT:
            raise Misuse(
                f"{self.path} was written by release {writer} in format {found}; this is release "
                f"{self._release}, which reads format {FORMAT}: a downgrade is not possible, start "
                f"release {writer} or a later one on this directory"
            )
        versions = known.get("versions", {})
        if supports is None or not isinstance(versions, dict):
            return
        for kind, version in versions.items():
            newest = supports.get(kind, (0, 0))[1]
            if version > newest:
                raise Misuse(
                    f"{self.path} was written by release {writer} and holds state of {kind} "
                    f"machines of version {version}; this is release {self._release}, which knows "
                    f"versions up to {newest}: a downgrade is not possible any more, start release "
                    f"{writer} or a later one on this directory"
                )

    # What it says.

    @property
    def incarnation(self) -> int:
        """Returns the current incarnation of the node."""
        return self.identity.incarnation

    @property
    def cluster(self) -> str:
        """Returns the id of the cluster that this directory belongs to; "" = none yet."""
        return self.identity.cluster

    # Changes: each is on the disk when the call returns.

    def found(self, founding: Founding) -> None:
        """Notes that this node founds a cluster together with the given directories."""
        self.identity = replace(self.identity, cluster=founding.cluster)
        self.founding = founding
        self._save()

    def renew(self) -> None:
        """Gives up a founding: from now on this is another directory, which belongs to nobody."""
        self.identity = replace(
            self.identity,
            directory=secrets.token_hex(16),
            candidate=secrets.token_hex(16),
            cluster="",
        )
        self.founding = None
        self.logged = False
        self._save()

    def note_log(self) -> None:
        """Notes that the log of a node that founds a cluster held something at a start: when it is
        empty at a later one, it was lost."""
        if self.founding is not None and not self.logged:
            self.logged = True
            self._save()

    def founded(self) -> None:
        """Notes that the cluster is founded: from now on an empty log is one that was lost."""
        if self.founding is not None:
            self.founding = None
            self._save()

    def join(self, cluster: str, incarnation: int, groups: int) -> None:
        """Notes that a cluster has taken this node in.

        Args:
            incarnation: that of this process, above all that the cluster knows.
            groups: groups up to this number may count on data that this directory never had.
        """
        if not self.incarnation <= incarnation <= INCARNATION_MAX:
            raise Misuse(f"incarnation {incarnation} cannot follow {self.incarnation}")
        self.identity = replace(self.identity, cluster=cluster, incarnation=incarnation)
        self.lost_groups = max(self.lost_groups, groups)
        self.founding = None
        self._save()

    def recover(self, cluster: str, former: tuple[str, ...]) -> None:
        """Notes the cluster's new id after a recovery from a lost majority."""
        self.identity = replace(self.identity, cluster=cluster, former=former)
        self._save()

    def raise_version(self, kind: str, version: int) -> None:
        """Notes that a machine version is in force: older builds must not open this directory."""
        if version > self.versions.get(kind, 0):
            self.versions[kind] = version
            self._save()

    def takes_packs(self) -> bool:
        """Returns whether no release opens this directory any more that does not know packs."""
        kind, version = PACKS_SINCE
        return self.versions.get(kind, 0) >= version

    def _save(self) -> None:
        identity, founding = self.identity, self.founding
        self._content |= {
            "format": FORMAT,
            "release": self._release,
            "node": identity.node,
            "directory": identity.directory,
            "incarnation": identity.incarnation,
            "cluster": identity.cluster,
            "candidate": identity.candidate,
            "former": list(identity.former),
            "founding": None
            if founding is None
            else {"cluster": founding.cluster, "directories": founding.directories},
            "logged": self.logged,
            "versions": self.versions,
            "lost_groups": self.lost_groups,
        }
        text = json.dumps(self._content, indent=1)
        try:
            replace_file(self._file, text.encode(), mode=0o600)
        except OSError as error:
            raise StorageFault(str(error), path=str(self._file)) from None

    def close(self) -> None:
        """Gives the lock back."""
        os.close(self._lock)


def _founding(content: Any) -> Founding | None:
    if content is None:
        return None
    directories = tuple((int(node), str(found)) for node, found in content["directories"])
    return Founding(cluster=content["cluster"], directories=directories)
