"""Backups in a store: chunks, which never change, and manifests, which list them.

    chunks/SHA256       ENQUEUE commands of one queue, compressed
    backups/ID          SHA-256 of the rest, a newline, the manifest as JSON

A backup exists once its manifest does, which is put last. Layout: docs/formats/backup.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

import msgspec
import zstandard

from convoymq.cli.backup.store import Store
from convoymq.model.errors import StorageFault

FORMAT = 1
CHUNKS, BACKUPS = "chunks", "backups"
CHUNK_POSITIONS = 16_384
"""A chunk ends where the position passes a multiple of it."""
CHUNK_BYTES = 8 << 20
"""A chunk ends after so many bytes."""
CHUNK_BYTES_MAX = 1 << 31


class Chunk(msgspec.Struct, frozen=True):
    """A part of a queue."""

    sha256: str
    """Of the commands, uncompressed; the name of the chunk."""
    bytes: int
    messages: int
    first: int
    """Position of the first command."""
    last: int
    """Position of the last command."""


class QueueCopy(msgspec.Struct):
    """A queue in a backup."""

    vhost: str
    name: str
    type: str
    group: int
    upto: int
    """The point: position of the newest message when its copy began."""
    began_ms: int
    messages: int
    chunks: list[Chunk]


class TopicCopy(msgspec.Struct):
    """An ordered topic in a backup, with its partitions in the order of their messages."""

    vhost: str
    name: str
    mode: str
    logical: int
    partitions: int
    settings: dict[str, bool | int | str]
    queues: list[QueueCopy]


class LeftOut(msgspec.Struct):
    """A queue that is not in a backup."""

    vhost: str
    name: str
    reason: str


class Manifest(msgspec.Struct, kw_only=True):
    """A backup."""

    format: int = FORMAT
    id: str
    cluster: str
    cluster_id: str
    release: str
    began_ms: int
    ended_ms: int = 0
    definitions: dict[str, object]
    queues: list[QueueCopy] = []
    topics: list[TopicCopy] = []
    left_out: list[LeftOut] = []

    def copies(self) -> Iterator[QueueCopy]:
        """Yields all queues, those of topics too."""
        yield from self.queues
        for topic in self.topics:
            yield from topic.queues

    @property
    def messages(self) -> int:
        """Returns the number of messages."""
        return sum(copy.messages for copy in self.copies())


class Archive:
    """The backups of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: set[str] | None = None
        """Chunks that the store has."""
        self.copied = 0
        """Chunks that were put, not those that the store had."""

    def ids(self) -> list[str]:
        """Returns the backups, the oldest first."""
        return sorted(name.partition("/")[2] for name in self._store.names(BACKUPS))

    def manifest(self, id: str) -> Manifest:
        """Returns a backup. Raises StorageFault: it is damaged, LookupError: there is none."""
        data = self._store.get(f"{BACKUPS}/{id}")
        digest, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise StorageFault(f"the manifest of backup {id} is damaged: its checksum is wrong")
        try:
            form = msgspec.json.decode(body, type=_Format).format
            if form == FORMAT:
                return msgspec.json.decode(body, type=Manifest)
        except msgspec.DecodeError as error:
            raise StorageFault(f"the manifest of backup {id} is none: {error}") from None
        raise StorageFault(f"backup {id} has format {form}; this release reads format {FORMAT}")

    def newest(self, cluster_id: str) -> Manifest | None:
        """Returns the newest backup of a cluster that can be read; None: there is none."""
        for id in reversed(self.ids()):
            try:
                found = self.manifest(id)
            except (StorageFault, LookupError):
                continue
            if found.cluster_id == cluster_id:
                return found
        return None

    def finish(self, manifest: Manifest) -> None:
        """Puts the manifest: from now on the backup exists."""
        body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        digest = hashlib.sha256(body).hexdigest().encode()
        self._store.put(f"{BACKUPS}/{manifest.id}", digest + b"\n" + body)

    def new_id(self) -> str:
        """Returns the id of a backup that begins now; ids grow."""
        taken = self.ids()
        made = f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
        return max(made, taken[-1] + "a") if taken else made

    def put(self, commands: bytes, messages: int, first: int, last: int) -> Chunk:
        """Puts a chunk, unless the store has it."""
        digest = hashlib.sha256(commands).hexdigest()
        if not self.has(digest):
            packed = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(commands)
            self._store.put(f"{CHUNKS}/{digest}", packed)
            self._chunks().add(digest)
            self.copied += 1
        return Chunk(digest, len(commands), messages, first, last)

    def has(self, sha256: str) -> bool:
        """Returns whether the store has a chunk."""
        return sha256 in self._chunks()

    def _chunks(self) -> set[str]:
        if self._known is None:
            self._known = {name.partition("/")[2] for name in self._store.names(CHUNKS)}
        return self._known

    def read(self, chunk: Chunk) -> bytes:
        """Returns the commands of a chunk. Raises StorageFault: it is damaged, or is missing."""
        try:
            packed = self._store.get(f"{CHUNKS}/{chunk.sha256}")
            size = min(chunk.bytes, CHUNK_BYTES_MAX)
            commands = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
        except LookupError:
            raise StorageFault(f"chunk {chunk.sha256} is missing") from None
        except zstandard.ZstdError as error:
            raise StorageFault(f"chunk {chunk.sha256} is damaged: {error}") from None
        if hashlib.sha256(commands).hexdigest() != chunk.sha256:
            raise StorageFault(f"chunk {chunk.sha256} is damaged: its checksum is wrong")
        return commands

    def check(self, manifest: Manifest) -> list[str]:
        """Reads every chunk of a backup, and returns what is wrong with it."""
        found: list[str] = []
        good: set[str] = set()
        for copy in manifest.copies():
            for chunk in copy.chunks:
                if chunk.sha256 in good:
                    continue
                try:
                    self.read(chunk)
                    good.add(chunk.sha256)
                except StorageFault as error:
                    found.append(f"queue '{copy.name}' in vhost '{copy.vhost}': {error.text}")
        return found

    def prune(self, keep: int) -> int:
        """Removes all backups but the newest ones, and then the chunks that no backup has. Returns
        the number of removed backups. Raises StorageFault: a manifest that stays is damaged, so its
        chunks are not known."""
        ids = self.ids()
        old = ids[:-keep] if keep else ids
        used = {
            chunk.sha256
            for id in ids[len(old) :]
            for copy in self.manifest(id).copies()
            for chunk in copy.chunks
        }
        for id in old:
            self._store.remove(f"{BACKUPS}/{id}")
        for name in self._store.names(CHUNKS):
            if name.partition("/")[2] not in used:
                self._store.remove(name)
        return len(old)


class _Format(msgspec.Struct):
    format: int


def chunks_of(
    commands: Iterable[tuple[int, bytes]],
    put: Callable[[bytes, int, int, int], Chunk],
) -> Iterator[Chunk]:
    """Yields (position, ENQUEUE command) as chunks, whose ends depend on positions and sizes alone:
    messages that did not change make the same chunks again."""
    held: list[bytes] = []
    size = messages = first = last = 0
    for position, command in commands:
        is_full = size >= CHUNK_BYTES and position > last
        if held and (is_full or position // CHUNK_POSITIONS != first // CHUNK_POSITIONS):
            yield put(b"".join(held), messages, first, last)
            held, size, messages = [], 0, 0
        if not held:
            first = position
        held.append(command)
        size += len(command)
        messages += count_of(command)
        last = position
    if held:
        yield put(b"".join(held), messages, first, last)


def count_of(command: bytes) -> int:
    """Returns the number of messages of an ENQUEUE command (docs/formats/entries-and-frames.md)."""
    return int.from_bytes(command[24:28], "little")


def commands_of(commands: bytes) -> Iterator[bytes]:
    """Yields the commands of a chunk."""
    at = 0
    while at < len(commands):
        length = int.from_bytes(commands[at : at + 4], "little")
        if length < 32 or at + length > len(commands):
            raise StorageFault("a chunk has a malformed command")
        yield commands[at : at + length]
        at += length
