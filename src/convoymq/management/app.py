"""The HTTP API as an ASGI application: names, JSON and codes as RabbitMQ's management plugin has
them.

Paths are matched on their raw bytes, because a virtual host `/` is written `%2F` and must stay one
segment. A handler gets a `Call` and returns a JSON value, a status, or both; refusals of the
broker become HTTP errors in one table.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from convoymq.management import metrics
from convoymq.management.resources import Rates
from convoymq.model.errors import (
    AccessRefused,
    BrokerError,
    NotFound,
    ResourceLocked,
    Unavailable,
)
from convoymq.queues.broker import Broker, User

BODY_BYTES_MAX = 64 << 20
PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MAX = 500
LOGIN_TAGS = frozenset({"management", "policymaker", "monitoring", "administrator"})
WWW_AUTHENTICATE = 'Basic realm="RabbitMQ Management"'


class ApiError(BrokerError):
    """An answer other than success: HTTP status, short name, reason."""

    def __init__(self, status: int, error: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.error = error


def object_not_found() -> ApiError:
    """The path names something that does not exist."""
    return ApiError(404, "Object Not Found", "Not Found")


@dataclass(slots=True)
class Call:
    """One request, with its user."""

    broker: Broker
    rates: Rates
    request: Request
    user: User
    path: dict[str, str]
    body: Any

    @property
    def is_administrator(self) -> bool:
        """May change users, virtual hosts, everything."""
        return "administrator" in self.user.tags

    @property
    def is_monitor(self) -> bool:
        """May see all nodes, connections and virtual hosts."""
        return self.is_administrator or "monitoring" in self.user.tags

    @property
    def visible(self) -> set[str]:
        """Virtual hosts that the user may see."""
        tree = self.broker.metadata.tree
        if self.is_monitor:
            return set(tree.vhosts)
        return {vhost for user, vhost in tree.permissions if user == self.user.name}

    def need(self, allowed: bool) -> None:
        """Raises 401 unless allowed."""
        if not allowed:
            raise ApiError(401, "not_authorized", "Not permitted")

    def vhost(self) -> str:
        """The path's virtual host. Raises 404 or 401."""
        name = self.path["vhost"]
        if name not in self.broker.metadata.tree.vhosts:
            raise object_not_found()
        self.need(name in self.visible)
        return name

    def may(self, permission: str, kind: str, name: str) -> None:
        """Checks the user's permission in the path's virtual host."""
        self.broker.check_permission(self.user, self.path["vhost"], permission, kind, name)

    def flag(self, name: str) -> bool:
        """A query parameter that is true."""
        return self.request.query_params.get(name, "") == "true"

    def json(self) -> dict[str, Any]:
        """The body as an object; empty means none of its keys. Raises 400."""
        if self.body is None:
            return {}
        if not isinstance(self.body, dict):
            raise ApiError(400, "bad_request", "the body must be a JSON object")
        return self.body


Handler = Callable[[Call], Awaitable[Any]]
ROUTES: list[tuple[str, tuple[str, ...], Handler, bool]] = []


def route(method: str, path: str, *, listing: bool = False) -> Callable[[Handler], Handler]:
    """Registers a handler; `{name}` in `path` matches one segment. `listing`: rows that can be
    filtered, sorted and paged."""

    def register(handler: Handler) -> Handler:
        ROUTES.append((method, tuple(path.split("/")), handler, listing))
        return handler

    return register


class Status:
    """A result that is only a status, with headers."""

    def __init__(self, status: int, location: str = "") -> None:
        self.status = status
        self.location = location


def make_api(broker: Broker) -> ASGIApp:
    """Returns the application for the HTTP API."""
    from convoymq.management import handlers

    assert handlers.ROUTES is ROUTES
    rates = Rates()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            response = await _answer(broker, rates, request)
        except ApiError as error:
            response = _refusal(error.status, error.error, error.text)
        except BrokerError as error:
            response = _broker_refusal(error)
        response.headers["cache-control"] = "no-cache"
        await response(scope, receive, send)

    return app


def make_metrics(broker: Broker) -> ASGIApp:
    """Returns the application for Prometheus."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"].rstrip("/")
        if path in ("/metrics", "/metrics/per-object"):
            text = metrics.render(
                broker, broker.node_info(), per_object=path.endswith("per-object")
            )
            response = Response(text, media_type=metrics.CONTENT_TYPE)
        else:
            response = Response("Not Found", 404)
        await response(scope, receive, send)

    return app


async def _answer(broker: Broker, rates: Rates, request: Request) -> Response:
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    segments = [unquote(part.decode("ascii", "replace")) for part in raw.split(b"/")[1:]]
    if segments == ["metrics"]:
        return Response(metrics.render(broker, broker.node_info()), media_type=metrics.CONTENT_TYPE)
    if not segments or segments[0] != "api":
        if segments == [""]:
            return Response("ConvoyMQ: the HTTP API is under /api\n", media_type="text/plain")
        raise object_not_found()
    segments = segments[1:]
    if segments and not segments[-1]:
        segments.pop()
    handler, path, listing = _find(request.method, segments)
    user = await _authenticate(broker, request)
    call = Call(broker, rates, request, user, path, await _read_body(request))
    result = await handler(call)
    if isinstance(result, Status):
        headers = {"location": result.location} if result.location else None
        return Response(status_code=result.status, headers=headers)
    status = 200
    if isinstance(result, tuple):
        status, result = result
    if listing:
        result = paged(result, request)
    return Response(
        json.dumps(result, default=str, ensure_ascii=False),
        status,
        media_type="application/json",
    )


def _find(method: str, segments: list[str]) -> tuple[Handler, dict[str, str], bool]:
    wanted = "GET" if method == "HEAD" else method
    exists = False
    best: tuple[Handler, dict[str, str], bool] | None = None
    for verb, pattern, handler, listing in ROUTES:
        if len(pattern) != len(segments):
            continue
        path: dict[str, str] = {}
        for expected, actual in zip(pattern, segments, strict=True):
            if expected.startswith("{"):
                path[expected[1:-1]] = actual
            elif expected != actual:
                break
        else:
            exists = True
            # A literal segment says more than a name that matches anything.
            if verb == wanted and (best is None or len(path) < len(best[1])):
                best = (handler, path, listing)
    if best is not None:
        return best
    if exists:
        raise ApiError(405, "method_not_allowed", f"{method} is not allowed here")
    raise object_not_found()


async def _authenticate(broker: Broker, request: Request) -> User:
    kind, _, encoded = request.headers.get("authorization", "").partition(" ")
    try:
        if kind.lower() != "basic":
            raise ValueError(kind)
        name, separator, password = base64.b64decode(encoded).partition(b":")
        if not separator:
            raise ValueError("no password")
        peer = request.client.host if request.client is not None else ""
        user = await broker.authenticate(name.decode(), password, peer)
    except (ValueError, binascii.Error, AccessRefused):
        raise ApiError(401, "not_authorized", "Login failed") from None
    if not LOGIN_TAGS.intersection(user.tags):
        raise ApiError(401, "not_authorized", "Not management user")
    return user


async def _read_body(request: Request) -> Any:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > BODY_BYTES_MAX:
            raise ApiError(400, "bad_request", f"a body has at most {BODY_BYTES_MAX} bytes")
        parts.append(part)
    data = b"".join(parts)
    if not data:
        return None
    try:
        return json.loads(data)
    except ValueError:
        raise ApiError(400, "bad_request", "the body is not JSON") from None


def _refusal(status: int, error: str, reason: str) -> Response:
    headers = {"www-authenticate": WWW_AUTHENTICATE} if status == 401 else None
    return JSONResponse({"error": error, "reason": reason}, status, headers=headers)


def _broker_refusal(error: BrokerError) -> Response:
    match error:
        case NotFound():
            return _refusal(404, "Object Not Found", error.text)
        case AccessRefused():
            return _refusal(401, "not_authorized", f"403 ACCESS_REFUSED - {error.text}")
        case ResourceLocked():
            return _refusal(400, "bad_request", f"405 RESOURCE_LOCKED - {error.text}")
        case Unavailable():
            return _refusal(503, "service_unavailable", error.text)
        case _:
            return _refusal(400, "bad_request", f"406 PRECONDITION_FAILED - {error.text}")


# --- filters, order, pages and columns of lists ------------------------------------------------


def paged(rows: Any, request: Request) -> Any:
    """Applies `name`, `use_regex`, `sort`, `columns` and the page parameters to a list."""
    query = request.query_params
    total = len(rows)
    rows = _filtered(rows, query.get("name", ""), query.get("use_regex", "") == "true")
    sort = query.get("sort")
    if sort:
        rows = sorted(rows, key=lambda row: _sort_key(_dig(row, sort)))
    if query.get("sort_reverse", "") == "true":
        rows = list(reversed(rows))
    columns = [name for name in query.get("columns", "").split(",") if name]
    if "page" not in query and query.get("pagination", "") != "true":
        return _columns(rows, columns)
    page = _positive(query.get("page", "1"), "page")
    size = _positive(query.get("page_size", str(PAGE_SIZE_DEFAULT)), "page_size")
    if size > PAGE_SIZE_MAX:
        raise ApiError(400, "bad_request", f"page_size is at most {PAGE_SIZE_MAX}")
    pages = max(1, -(-len(rows) // size))
    if page > pages:
        raise ApiError(400, "page_out_of_range", f"page {page} of {pages}")
    items = rows[(page - 1) * size : page * size]
    return {
        "items": _columns(items, columns),
        "page": page,
        "page_count": pages,
        "page_size": size,
        "item_count": len(items),
        "filtered_count": len(rows),
        "total_count": total,
    }


def _filtered(rows: Any, name: str, use_regex: bool) -> Any:
    if not name:
        return rows
    if not use_regex:
        return [row for row in rows if name.lower() in str(row.get("name", "")).lower()]
    import re

    try:
        pattern = re.compile(name, re.IGNORECASE)
    except re.error as error:
        raise ApiError(400, "bad_request", f"name is not a regular expression: {error}") from None
    return [row for row in rows if pattern.search(str(row.get("name", "")))]


def _positive(text: str, name: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ApiError(400, "bad_request", f"{name} is not a positive number")
    return int(text)


def _dig(row: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(row, dict):
            return None
        row = row.get(part)
    return row


def _sort_key(value: Any) -> tuple[int, Any]:
    if isinstance(value, int | float):
        return 1, value
    return (0, "") if value is None else (2, str(value))


def _columns(rows: list[dict[str, Any]], columns: list[str]) -> list[dict[str, Any]]:
    if not columns:
        return rows
    made: list[dict[str, Any]] = []
    for row in rows:
        kept: dict[str, Any] = {}
        for column in columns:
            value = _dig(row, column)
            if value is None:
                continue
            *parents, last = column.split(".")
            place = kept
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        made.append(kept)
    return made
