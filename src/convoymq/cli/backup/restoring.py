"""Restores a backup into a running cluster, and counts what came."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, cast
from urllib.parse import quote

from convoymq.cli.backup.archive import (
    Archive,
    Manifest,
    QueueCopy,
    TopicCopy,
    commands_of,
    count_of,
)
from convoymq.cli.backup.cluster import Listing, Page
from convoymq.model.errors import PreconditionFailed, StorageFault, Unavailable

REQUEST_BYTES = 1 << 20
ATTEMPTS = 3
"""Each from an empty queue."""
QUEUES, TOPICS = "queues", "topics"
ACCESS = ("users", "permissions", "topic_permissions")
"""Definitions that come last."""


class Target(Protocol):
    """The cluster, as a restore writes it; see `Cluster`."""

    def page(self, vhost: str, name: str, after: int, upto: int) -> Page:
        """See `Cluster`."""

    def publish(self, kind: str, vhost: str, name: str, commands: bytes) -> int:
        """See `Cluster`."""

    def put(self, path: str, body: object) -> None:
        """See `Cluster`."""

    def import_definitions(self, definitions: object) -> None:
        """See `Cluster`."""

    def delete(self, kind: str, vhost: str, name: str) -> None:
        """See `Cluster`."""

    def listing(self) -> Listing:
        """See `Cluster`."""


class Restoring:
    """One restore."""

    def __init__(
        self,
        target: Target,
        archive: Archive,
        manifest: Manifest,
        say: Callable[[str], None],
    ) -> None:
        self._target = target
        self._archive = archive
        self._manifest = manifest
        self._definitions = {
            key: rows for key, rows in manifest.definitions.items() if key not in ACCESS
        }
        self._say = say
        self.differences: list[str] = []
        """Queues and topics that have another number of messages than in the backup by now."""

    def run(self, *, replace: bool = False) -> int:
        """Restores everything, and returns the number of messages.

        Args:
            replace: queues and topics of the backup that have messages are deleted first.
        Raises:
            StorageFault: the backup is damaged; nothing was changed.
            PreconditionFailed: queues have messages already; nothing was changed.
            BrokerError: the restore did not succeed; the text says where.
        """
        manifest = self._manifest
        damages = self._archive.check(manifest)
        if damages:
            raise StorageFault("the backup is damaged, nothing was restored: " + "; ".join(damages))
        self._make_room(replace)
        self._target.import_definitions(self._without_topics())
        for topic in manifest.topics:
            self._create(topic)
        self._target.import_definitions(self._definitions)
        for copy in manifest.queues:
            self._restore(QUEUES, copy.vhost, copy.name, [copy], partial(self._declare_again, copy))
        for topic in manifest.topics:
            again = partial(self._create_again, topic)
            self._restore(TOPICS, topic.vhost, topic.name, topic.queues, again)
        # With users and their passwords, one of which may be that of this restore.
        self._target.import_definitions(manifest.definitions)
        return manifest.messages

    def _without_topics(self) -> dict[str, object]:
        """Returns the definitions without bindings to topics, which are not there yet."""
        topics = {(topic.vhost, topic.name) for topic in self._manifest.topics}
        bindings = [
            row
            for row in cast("list[dict[str, str]]", self._definitions.get("bindings", []))
            if topics.isdisjoint(
                {(row["vhost"], row["source"]), (row["vhost"], row["destination"])}
            )
        ]
        return {**self._definitions, "bindings": bindings}

    def _make_room(self, replace: bool) -> None:
        """Raises PreconditionFailed: there are messages where some are to go."""
        taken: list[tuple[str, str, str]] = [
            (QUEUES, copy.vhost, copy.name)
            for copy in self._manifest.queues
            if self._has_messages(copy.vhost, copy.name)
        ]
        wanted = {(topic.vhost, topic.name) for topic in self._manifest.topics}
        for row in self._target.listing().topics:
            if (row.vhost, row.name) in wanted:
                taken.append((TOPICS, row.vhost, row.name))
        if taken and not replace:
            names = ", ".join(f"'{name}' in vhost '{vhost}'" for _, vhost, name in taken[:20])
            raise PreconditionFailed(
                f"{len(taken)} queues or topics of the backup are there and not empty: {names}; "
                "restore into an empty cluster, or have them replaced by --replace"
            )
        for kind, vhost, name in taken:
            self._target.delete(kind, vhost, name)

    def _has_messages(self, vhost: str, name: str) -> bool:
        try:
            page = self._target.page(vhost, name, -1, -1)
        except LookupError:
            return False
        return bool(page.messages) or not page.is_last

    def _declare_again(self, copy: QueueCopy) -> None:
        self._target.delete(QUEUES, copy.vhost, copy.name)
        self._target.import_definitions(self._definitions)

    def _create(self, topic: TopicCopy) -> None:
        self._target.delete(TOPICS, topic.vhost, topic.name)
        body = {
            **topic.settings,
            "partitions": topic.partitions,
            "logical": topic.logical,
            "mode": topic.mode,
        }
        path = f"topics/{quote(topic.vhost, safe='')}/{quote(topic.name, safe='')}"
        self._target.put(path, body)

    def _create_again(self, topic: TopicCopy) -> None:
        self._create(topic)
        self._target.import_definitions(self._definitions)

    def _restore(
        self,
        kind: str,
        vhost: str,
        name: str,
        copies: Sequence[QueueCopy],
        begin_again: Callable[[], None],
    ) -> None:
        """Fills an empty queue or topic, and compares its number of messages."""
        wanted = sum(copy.messages for copy in copies)
        sent = self._fill(kind, vhost, name, copies, begin_again)
        subject = f"{kind[:-1]} '{name}' in vhost '{vhost}'"
        if sent != wanted:
            raise StorageFault(f"{subject}: {sent} messages were confirmed, not {wanted}")
        found = self._count(kind, vhost, name)
        if found != wanted:
            self.differences.append(f"{subject} had {wanted} messages, and has {found} now")
        self._say(f"{vhost} {name}: {found} messages")

    def _fill(
        self,
        kind: str,
        vhost: str,
        name: str,
        copies: Sequence[QueueCopy],
        begin_again: Callable[[], None],
    ) -> int:
        """Publishes the messages of copies, and returns how many were confirmed. Raises
        Unavailable."""
        failures: list[str] = []
        while True:
            try:
                if failures:
                    begin_again()
                requests = self._requests(copies)
                return sum(self._target.publish(kind, vhost, name, each) for each in requests)
            except Unavailable as error:
                # Nobody knows which of the messages came.
                failures.append(error.text)
                text = f"{kind[:-1]} '{name}' in vhost '{vhost}': {error.text}"
                if len(failures) == ATTEMPTS:
                    raise Unavailable(text) from None
                self._say(f"{text}; again from its beginning")

    def _requests(self, copies: Iterable[QueueCopy]) -> Iterator[bytes]:
        """Yields the commands of copies in portions for one request each."""
        held: list[bytes] = []
        size = 0
        for copy in copies:
            for chunk in copy.chunks:
                for command in commands_of(self._archive.read(chunk)):
                    if held and size + len(command) > REQUEST_BYTES:
                        yield b"".join(held)
                        held, size = [], 0
                    held.append(command)
                    size += len(command)
        if held:
            yield b"".join(held)

    def _count(self, kind: str, vhost: str, name: str) -> int:
        """Returns the number of messages in a queue or topic, by reading them."""
        if kind == QUEUES:
            return self._count_of(vhost, name)
        topics = self._target.listing().topics
        queues: list[str] = next(
            (row.queues for row in topics if (row.vhost, row.name) == (vhost, name)), []
        )
        return sum(self._count_of(vhost, queue) for queue in queues)

    def _count_of(self, vhost: str, name: str) -> int:
        count, after, upto = 0, -1, -1
        while True:
            page = self._target.page(vhost, name, after, upto)
            count += sum(count_of(command) for _, command in page.commands)
            if page.is_last:
                return count
            after, upto = page.after, page.upto


def summary_of(manifest: Manifest) -> Mapping[str, object]:
    """Returns what a list of backups shows of one."""
    return {
        "id": manifest.id,
        "cluster": manifest.cluster,
        "release": manifest.release,
        "queues": len(manifest.queues),
        "topics": len(manifest.topics),
        "messages": manifest.messages,
        "left_out": len(manifest.left_out),
    }
