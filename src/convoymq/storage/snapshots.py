"""Snapshot files: one per group, replaced atomically (format: docs/formats/storage.md)."""

from __future__ import annotations

import struct

from crc32c import crc32c

from convoymq.logformat.identity import NO_CLUSTER, ClusterIds, check_version
from convoymq.logformat.segment import ERA_SHIFT, group_path
from convoymq.storage.types import Directory, Snapshot, StorageFault

SNAPSHOT_MAGIC = b"CVYSNAP\x02"
SNAPSHOT_HEADER = struct.Struct("<8sIIQQQQ16sII")
"""magic+version, group, bytes of membership, index, term, era, bytes of state, cluster id, crc32c
of membership and state, crc32c of the header bytes before."""


def snapshot_name(group: int) -> str:
    """Path of a group's snapshot."""
    return f"{group_path(group)}/snapshot"


def write_snapshot(
    directory: Directory, group: int, snapshot: Snapshot, era: int, cluster: bytes = NO_CLUSTER
) -> None:
    """Replaces the group's snapshot; durable on return. Only segments of `era` are valid."""
    directory.make(group_path(group))
    head = SNAPSHOT_HEADER.pack(
        SNAPSHOT_MAGIC,
        group,
        len(snapshot.membership),
        snapshot.index,
        snapshot.term,
        era,
        len(snapshot.state),
        cluster,
        crc32c(snapshot.state, crc32c(snapshot.membership)),
        0,
    )
    head = head[:-4] + struct.pack("<I", crc32c(head[:-4]))
    name = snapshot_name(group)
    file = directory.open(name + ".part", create=True)
    file.truncate(0)
    file.pwrite([head, snapshot.membership, snapshot.state], 0)
    file.sync()
    file.close()
    directory.rename(name + ".part", name)
    directory.sync(group_path(group))


def read_snapshot(
    directory: Directory, group: int, clusters: ClusterIds
) -> tuple[Snapshot, int] | None:
    """Returns the group's snapshot and the era of its segments, or None. Raises StorageFault."""
    name = snapshot_name(group)
    try:
        file = directory.open(name)
    except FileNotFoundError:
        return None
    size = file.size()
    head = file.pread(SNAPSHOT_HEADER.size, 0)
    check_version(head, SNAPSHOT_MAGIC, name)
    if len(head) != SNAPSHOT_HEADER.size or head[:8] != SNAPSHOT_MAGIC:
        raise StorageFault("not a snapshot file", path=name, offset=0)
    (_, owner, membership_size, index, term, era, state_size, cluster, checksum, head_checksum) = (
        SNAPSHOT_HEADER.unpack(head)
    )
    if crc32c(head[:-4]) != head_checksum or owner != group:
        raise StorageFault("the snapshot's header is damaged", path=name, offset=0)
    clusters.check(cluster, name)
    if size != SNAPSHOT_HEADER.size + membership_size + state_size:
        raise StorageFault("the snapshot has a wrong length", path=name, offset=size)
    body = file.pread(membership_size + state_size, SNAPSHOT_HEADER.size)
    file.close()
    if crc32c(body) != checksum:
        raise StorageFault("the snapshot is damaged", path=name, offset=SNAPSHOT_HEADER.size)
    snapshot = Snapshot(
        index=index, term=term, membership=body[:membership_size], state=body[membership_size:]
    )
    return snapshot, era


def remove_former(directory: Directory, group: int, era: int, clusters: ClusterIds) -> None:
    """Removes the files of all eras before `era`; durable on return. Raises OSError.

    What the group has written since stays: it may be a member again before its removal is carried
    out. A snapshot whose era cannot be read goes too, and that of another cluster: neither is of
    any use.
    """
    path = group_path(group)
    if not directory.exists(path):
        return
    left = 0
    for name in directory.list(path):
        if name == "snapshot":
            found = _snapshot_era(directory, group, clusters)
        elif name == "snapshot.part":
            found = -1  # whoever wrote it on this worker has failed
        else:
            # "<order>.seg" or "<tag>-<number>.part"
            found = int(name.partition(".")[0].partition("-")[0], 16) >> ERA_SHIFT
        if found < era:
            directory.remove(f"{path}/{name}")
        else:
            left += 1
    if left:
        directory.sync(path)
    else:
        directory.remove(path)
        directory.sync("groups")


def _snapshot_era(directory: Directory, group: int, clusters: ClusterIds) -> int:
    """Returns the era that the header of the group's snapshot names, -1 when it is of no use."""
    file = directory.open(snapshot_name(group))
    head = file.pread(SNAPSHOT_HEADER.size, 0)
    file.close()
    if len(head) != SNAPSHOT_HEADER.size or crc32c(head[:-4]) != SNAPSHOT_HEADER.unpack(head)[-1]:
        return -1
    if head[:8] != SNAPSHOT_MAGIC or not clusters.accepts(SNAPSHOT_HEADER.unpack(head)[7]):
        return -1
    return int(SNAPSHOT_HEADER.unpack(head)[5])
