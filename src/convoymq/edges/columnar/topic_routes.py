"""TOPIC_ROUTE: the route of an ordered topic, and where its partitions came from.

Who follows a change asks for a version newer than the known one, and is answered when this node's
tree has it. Source: docs/formats/columnar-protocol.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from convoymq.edges.columnar.fields import TopicRoute, read
from convoymq.model.columnar import ANSWER_MAP_MAX, Frame
from convoymq.model.errors import AccessRefused, PreconditionFailed
from convoymq.topics.rules.lineage import Lineage
from convoymq.topics.shell.vocabulary import GROUP_SEPARATOR

if TYPE_CHECKING:
    from convoymq.broker.records import TopicRecord, User
    from convoymq.broker.tree import TopicView
    from convoymq.edges.columnar.connection import FetchConnection

ROWS_UNMEASURED = 10_000
"""Lines of a lineage that fit an answer, whatever their numbers are."""


class RouteWatch:
    """Wakes who waits for a topic to change. One per node."""

    def __init__(self, topics: TopicView) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        topics.watch(self._on_change)

    def _on_change(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def wait(self) -> None:
        """Returns when some topic has changed."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)


class TopicRoutes:
    """The requests about topics of one connection that any of their clients makes."""

    def __init__(self, connection: FetchConnection) -> None:
        self._connection = connection
        self._edge = connection.edge
        self._broker = connection.broker

    async def route(self, frame: Frame) -> dict[str, object]:
        """Answers TOPIC_ROUTE.

        Raises:
            ColumnarError, BrokerError: it is refused.
        """
        request = read(TopicRoute, frame.map)
        record = self.find(request.topic, request.group, request.vhost)
        if record.state.route.version <= request.newer_than and request.wait_ms:
            record = await self._newer(record, request)
        state = record.state
        route = state.route
        answer: dict[str, object] = {
            "vhost": record.vhost,
            "topic": record.name,
            "version": route.version,
            "logical": route.logical,
            "hash_id": record.hash_id,
            "hash_seed": record.hash_seed,
            "mode": record.mode,
            "created_ms": record.created_ms,
            "ranges": [[span.lo, span.hi, span.pid] for span in route.spans],
        }
        if request.lineage:
            rows = lineage_rows(state.lineage, state.lost)
            answer["partitions"] = rows
            if len(rows) > ROWS_UNMEASURED and (
                len(msgspec.msgpack.encode(answer)) > ANSWER_MAP_MAX
            ):
                raise PreconditionFailed(
                    f"the lineage of topic '{record.name}' does not fit an answer: ask without it"
                )
        return answer

    def find(self, topic: str, group: str | None = None, vhost: str | None = None) -> TopicRecord:
        """Returns a topic that the user may publish to, or read (in a group).

        Raises:
            AccessRefused: the user may do none of it.
            PreconditionFailed: another virtual host than the connection's.
            NotFound: there is no such topic.
        """
        connection = self._connection
        if vhost is not None and vhost != connection.vhost:
            raise PreconditionFailed(
                f"the connection is open on vhost '{connection.vhost}', not on '{vhost}'"
            )
        self._check_access(connection.user, connection.vhost, topic, group)
        return self.known(topic)

    def known(self, topic: str) -> TopicRecord:
        """Returns a topic of the connection's virtual host. Raises NotFound."""
        return self._broker.tree.topics.get(self._connection.vhost, topic)

    def _check_access(self, user: User, vhost: str, topic: str, group: str | None) -> None:
        """Raises AccessRefused unless the user may write the topic's exchange, or read."""
        check = self._broker.access.check_permission
        queue = topic if group is None else f"{topic}{GROUP_SEPARATOR}{group}"
        try:
            check(user, vhost, "read", "queue", queue)
        except AccessRefused as unread:
            if group is not None:
                raise
            try:
                check(user, vhost, "write", "exchange", topic)
            except AccessRefused as unwritten:
                text = f"{unread.text}, and {unwritten.text}"
                raise AccessRefused(text, subject=unread.subject) from None

    async def _newer(self, record: TopicRecord, request: TopicRoute) -> TopicRecord:
        """Waits for a version newer than the one that the client knows; returns the record as it is
        then, or when the time is over."""
        wait_ms = min(request.wait_ms, self._edge.settings.wait_ms_max)
        watch = self._edge.route_watch()
        try:
            async with asyncio.timeout(wait_ms / 1000):
                while record.state.route.version <= request.newer_than:
                    await watch.wait()
                    record = self.find(request.topic, request.group, request.vhost)
        except TimeoutError:
            pass
        return record


def lineage_rows(lineage: Lineage, lost: Collection[int]) -> list[list[object]]:
    """Returns a row for each partition that ever was, by version and range: pid, lo, hi, state,
    created and sealed version, offset of CLOSE, parents, children."""
    return [
        [
            each.pid,
            each.lo,
            each.hi,
            "lost" if each.pid in lost else each.state.value,
            each.created_version,
            each.sealed_version,
            each.close_offset,
            list(each.parents),
            list(each.children),
        ]
        for each in lineage.oldest_first()
    ]
