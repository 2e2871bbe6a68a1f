"""Server-sent events: what changes, once a second, to pages that stay open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import quote, unquote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from convoymq.edges.http import resources
from convoymq.edges.http.bodies import ApiError, bad_request
from convoymq.edges.http.call import Call
from convoymq.edges.http.handlers.connections import channels, connections
from convoymq.edges.http.handlers.queues import queues, queues_in
from convoymq.edges.http.json_values import as_json
from convoymq.edges.http.lists import Lazy, Page, paged
from convoymq.edges.http.routes import Routes
from convoymq.model.errors import BrokerError
from convoymq.model.json import JsonObject

routes = Routes()

STREAMS_MAX = 32
USER_STREAMS_MAX = 8
QUEUES_MAX = 100
"""Single queues that a stream follows."""
PAUSE_S = 1.0
BEAT_S = 10.0
"""Longest silence: then an event without content says that the stream is alive."""
PAUSES_OF_COST = 50
"""A stream whose events take long to make pauses for longer: it costs 2 % of a core at most."""

Made = Callable[[], Awaitable[object]]


@routes.add("GET", "events")
async def events(call: Call) -> Response:
    """Streams events of the kinds in `topics`; an event is sent when its content has changed."""
    made = _sources(call)
    streams = call.authentication.streams
    if streams.total() >= STREAMS_MAX or streams[call.user.name] >= USER_STREAMS_MAX:
        raise ApiError(429, "too_many_requests", "too many streams of events are open")
    return StreamingResponse(
        _stream(call, made), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
    )


async def _stream(call: Call, made: dict[str, Made]) -> AsyncIterator[bytes]:
    name, streams = call.user.name, call.authentication.streams
    last: dict[str, bytes] = {}
    streams[name] += 1
    heard = time.perf_counter()
    try:
        yield b"retry: 2000\n\n"
        while call.authentication.is_still(call.request, call.user):
            began = time.perf_counter()
            for event, make in made.items():
                body = as_json(await make())
                if body not in (b"null", last.get(event)):
                    last[event] = body
                    heard = began
                    yield b"event: %s\ndata: %s\n\n" % (event.partition(" ")[0].encode(), body)
            if began - heard >= BEAT_S:
                heard = began
                yield b"event: beat\ndata: {}\n\n"
            await asyncio.sleep(max(PAUSE_S, PAUSES_OF_COST * (time.perf_counter() - began)))
        yield _end("session ended")
    except BrokerError as error:
        # As the list would be refused now: its page or its virtual host is gone.
        yield _end(error.text)
    finally:
        streams[name] -= 1


def _end(reason: str) -> bytes:
    return b"event: end\ndata: %s\n\n" % as_json({"reason": reason})


def _sources(call: Call) -> dict[str, Made]:
    """Returns what makes the content of each event that a request wants. Raises ApiError."""
    broker, rates, query = call.broker, call.rates, call.request.query_params

    async def overview() -> JsonObject:
        return await resources.overview_numbers(broker, rates, call.visible)

    async def nodes() -> object:
        return await resources.nodes(broker, rates) if call.is_monitor else None

    async def alarms() -> JsonObject:
        return {
            node.name: sorted(broker.alarms.of(node.id))
            for node in broker.tree.nodes.all()
            if broker.alarms.of(node.id)
        }

    known: dict[str, Made] = {
        "overview": overview,
        "nodes": nodes,
        "alarms": alarms,
        "queues": _Page(call, _queues, ("vhost", "name")).changes,
        "connections": _Page(call, connections, ("name",)).changes,
        "channels": _Page(call, channels, ("name",)).changes,
    }
    topics = query.get("topics", "overview,nodes,alarms").split(",")
    for topic in topics:
        if topic not in known:
            raise bad_request(f"there is no topic of events {topic!r}; there are: {list(known)}")
    single = query.getlist("queue")
    if len(single) > QUEUES_MAX:
        raise bad_request(f"a stream follows {QUEUES_MAX} queues at most")
    made = {topic: known[topic] for topic in topics}
    for each in single:
        vhost, separator, queue = each.partition("/")
        if not separator:
            raise bad_request("queue is VHOST/NAME, both percent-encoded")
        made[f"queue {each}"] = _one_queue(call, unquote(vhost), unquote(queue))
    return made


async def _queues(call: Call) -> Lazy[object]:
    vhost = call.request.query_params.get("vhost")
    if vhost is None:
        return await queues(call)  # type: ignore[return-value]
    call.path["vhost"] = vhost
    return await queues_in(call)  # type: ignore[return-value]


def _one_queue(call: Call, vhost: str, name: str) -> Made:
    async def look() -> JsonObject:
        record = call.broker.tree.queues.find(vhost, name) if vhost in call.visible else None
        if record is not None:
            known = call.broker.cluster.queue(record)
            row = resources.queue_row(call.broker, record, known, call.rates, call.ranges)
            if row is not None:
                return row
        return {"vhost": vhost, "name": name, "gone": True}

    return look


class _Page:
    """One page of a list that a stream follows."""

    def __init__(
        self,
        call: Call,
        rows: Callable[[Call], Awaitable[list[JsonObject] | Lazy[object]]],
        key: tuple[str, ...],
    ) -> None:
        self._call = call
        self._rows = rows
        self._key = key
        self._shown: dict[str, bytes] | None = None
        scope = dict(call.request.scope)
        if "page" not in call.request.query_params:
            scope["query_string"] = scope["query_string"] + b"&page=1"
        self._request = Request(scope)

    async def changes(self) -> object:
        """Returns the order of the page and the rows that have changed; None when nothing has."""
        page = await paged(await self._rows(self._call), self._request)
        assert isinstance(page, Page)
        items = page.pop("items")
        assert isinstance(items, list)
        rows = {"/".join(quote(str(row.get(name)), "") for name in self._key): row for row in items}
        encoded = {key: as_json(row) for key, row in rows.items()}
        shown, self._shown = self._shown, encoded
        changed = {key: rows[key] for key in rows if (shown or {}).get(key) != encoded[key]}
        is_same = shown is not None and not changed and list(shown) == list(encoded)
        return None if is_same else {**page, "keys": list(rows), "rows": changed}
