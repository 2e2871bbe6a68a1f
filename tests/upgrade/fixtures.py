"""Data directories of released formats, kept as archives that every later release must open.

`python -m tests.upgrade.fixtures NAME` makes `data/NAME.tar.xz` and `data/NAME.json` with the code
that is checked out: a cluster of three nodes is filled, killed, and one node's log gets a torn
tail. Archives are never made anew for a release that is out.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from convoymq.cli.cluster import LocalCluster
from convoymq.logformat.wal_file import BATCH_HEADER, BATCH_MAGIC, FILE_HEADER
from tests.clusters import cut_power
from tests.faults.traffic import in_step, until
from tests.ports import lasting_ports
from tests.upgrade import dataset

DATA = Path(__file__).parent / "data"
BASE_PORT = lasting_ports()
SETTINGS = {"raft.wal_max_size_bytes": "65536", "raft.segment_max_entries": "64"}
TORN_NODE = 3
TORN_BYTES = 40
"""Of the last flush, which nobody confirmed: a crash in the middle of a write."""


def names() -> list[str]:
    """Names of the archives that there are."""
    return sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("*.tar.xz"))


def unpack(name: str, where: Path) -> dict[str, Any]:
    """Lays a fixture's data directories out in `where`; returns what they hold."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(where, filter="data")
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def make(name: str) -> None:
    """Makes a fixture. Raises FileExistsError when there is one of that name."""
    target = DATA / f"{name}.tar.xz"
    if target.exists():
        raise FileExistsError(target)
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        where = Path(work) / "cluster"
        with LocalCluster(where, 3, BASE_PORT, SETTINGS) as cluster:
            cluster.wait_ready()
            expected = dataset.fill(cluster)
            in_step(cluster)
            until(lambda: _has_segments(where), "no segment or no pack was written")
            cut_power(cluster)
        tear(where / f"node-{TORN_NODE}")
        with tarfile.open(target, "w:xz", preset=9) as archive:
            for node in sorted(where.glob("node-*")):
                archive.add(node / "data", f"{node.name}/data", filter=_plain)
        shutil.rmtree(where)
    (DATA / f"{name}.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


def tear(node: Path) -> None:
    """Puts the beginning of a batch behind the last one of a node's log, as a crash leaves it."""
    # The youngest file may be prepared and not yet in use: it has no first batch.
    used = []
    for path in (node / "data" / "log" / "wal").glob("*.wal"):
        _, generation, first, *_ = FILE_HEADER.unpack(path.read_bytes()[: FILE_HEADER.size])
        if generation == int(path.stem, 16) and first:
            used.append(path)
    last = max(used)
    content = bytearray(last.read_bytes())
    generation = int(last.stem, 16)
    newest = (0, 0, 0)
    at = content.find(BATCH_MAGIC[:7])
    while at >= 0:
        head = content[at : at + BATCH_HEADER.size]
        if len(head) == BATCH_HEADER.size:
            _, owner, sequence, length, _, _, count, *_ = BATCH_HEADER.unpack(head)
            if owner == generation:
                # Older bytes of a recycled file lie behind the last batch.
                newest = max(newest, (sequence, at, at + len(head) + length + 8 * count))
        at = content.find(BATCH_MAGIC[:7], at + 8)
    _, begin, end = newest
    content[end : end + TORN_BYTES] = content[begin : begin + TORN_BYTES]
    last.write_bytes(content)


def _has_segments(where: Path) -> bool:
    return all(
        all(
            any(node.glob(f"data/log/{pattern}"))
            for pattern in ("groups/*/*.seg", "groups/*/snapshot", "packs/*.pack")
        )
        for node in where.glob("node-*")
    )


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leaves out what belongs to a running process, and who made the archive."""
    if member.name.endswith((".sock", ".free", "/lock")):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mtime = 0
    return member


if __name__ == "__main__":
    make(sys.argv[1])
