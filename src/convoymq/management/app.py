"""The HTTP API as an ASGI application: names, JSON and codes as RabbitMQ's management plugin has
them.

Paths are matched on their raw bytes, because a virtual host `/` is written `%2F` and must stay one
segment. A handler gets a `Call` and returns a JSON value, a status, or both; refusals of the
broker become HTTP errors in one table.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from convoymq.management import metrics
from convoymq.management.bodies import (
    BODY_BYTES_MAX,
    LARGE_BODY_BYTES_MAX,
    ApiError,
    Bodies,
    bad_request,
)
from convoymq.management.resources import Rates
from convoymq.model.errors import (
    AccessRefused,
    BrokerError,
    NotFound,
    ResourceLocked,
    Unavailable,
)
from convoymq.model.patterns import Pattern, compile_pattern
from convoymq.queues.broker import Broker, User
from convoymq.queues.slices import in_slices

log = structlog.get_logger()

FAILED_LOGIN_DELAY_S = 3.0
"""As for AMQP: silence slows guessing down."""
FILTER_TIMEOUT_S = 5.0
NUMBER_DIGITS_MAX = 18
PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MAX = 500
LOGIN_TAGS = frozenset({"management", "policymaker", "monitoring", "administrator"})
WWW_AUTHENTICATE = 'Basic realm="RabbitMQ Management"'


def object_not_found() -> ApiError:
    """The path names something that does not exist."""
    return ApiError(404, "Object Not Found", "Not Found")


@dataclass(slots=True)
class Call:
    """One request, with its user."""

    broker: Broker
    rates: Rates
    bodies: Bodies
    request: Request
    user: User
    path: dict[str, str]
    message_bytes_max: int

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

    async def json(self, most: int = BODY_BYTES_MAX) -> dict[str, Any]:
        """The body as an object; empty means none of its keys. To be called after the permission
        checks: only who may do it makes the node read and parse. Raises ApiError."""
        body = await self.bodies.read(self.request, most)
        if body is None:
            return {}
        if not isinstance(body, dict):
            raise bad_request("the body must be a JSON object")
        return body


def number(text: str) -> int | None:
    """The number that `text` is in decimal digits, or None."""
    if not (text.isascii() and text.isdecimal() and len(text) <= NUMBER_DIGITS_MAX):
        return None
    return int(text)


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


def make_api(
    broker: Broker,
    *,
    bodies: Bodies | None = None,
    failed_login_delay_s: float = FAILED_LOGIN_DELAY_S,
    message_bytes_max: int = LARGE_BODY_BYTES_MAX,
) -> ASGIApp:
    """Returns the application for the HTTP API."""
    from convoymq.management import handlers

    assert handlers.ROUTES is ROUTES
    api = _Api(broker, bodies or Bodies(), failed_login_delay_s, message_bytes_max)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            response = await api.answer(request)
        except ApiError as error:
            response = _refusal(error.status, error.error, error.text)
        except BrokerError as error:
            response = _broker_refusal(error, request.method)
        except Exception:
            log.exception("management.request_failed", method=request.method, path=scope["path"])
            response = _refusal(500, "internal_error", "the log of the node says more")
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
            response = await _metrics(
                broker, Request(scope, receive), per_object=path.endswith("per-object")
            )
        else:
            response = Response("Not Found", 404)
        await response(scope, receive, send)

    return app


async def _metrics(broker: Broker, request: Request, *, per_object: bool = False) -> Response:
    open_metrics = metrics.wants_open_metrics(request.headers.get("accept", ""))
    text = await metrics.render(
        broker,
        broker.node_info(),
        per_object=per_object,
        open_metrics=open_metrics,
    )
    kind = metrics.OPEN_METRICS_TYPE if open_metrics else metrics.CONTENT_TYPE
    return Response(text, headers={"content-type": kind})


@dataclass(slots=True)
class _Api:
    broker: Broker
    bodies: Bodies
    failed_login_delay_s: float
    message_bytes_max: int
    rates: Rates = field(default_factory=Rates)

    async def answer(self, request: Request) -> Response:
        segments = _segments(request)
        if segments == ["metrics"]:
            return await _metrics(self.broker, request)
        if not segments or segments[0] != "api":
            if segments == [""]:
                return Response("ConvoyMQ: the HTTP API is under /api\n", media_type="text/plain")
            raise object_not_found()
        segments = segments[1:]
        if segments and not segments[-1]:
            segments.pop()
        handler, path, listing = _find(request.method, segments)
        user = await self._authenticate(request)
        call = Call(
            self.broker, self.rates, self.bodies, request, user, path, self.message_bytes_max
        )
        result = await handler(call)
        if isinstance(result, Status):
            headers = {"location": result.location} if result.location else None
            return Response(status_code=result.status, headers=headers)
        status = 200
        if isinstance(result, tuple):
            status, result = result
        if listing:
            result = await paged(result, request)
        body = await listed(result) if isinstance(result, list) else as_json(result)
        return Response(body, status, media_type="application/json")

    async def _authenticate(self, request: Request) -> User:
        given = request.headers.get("authorization")
        if given is None:
            # A browser asks without a name first, to hear that one is wanted.
            raise ApiError(401, "not_authorized", "Login failed")
        name = ""
        peer = request.client.host if request.client is not None else ""
        try:
            name, password = _credentials(given)
            user = await self.broker.authenticate(name, password, peer)
        except (ValueError, AccessRefused) as error:
            reason = error.text if isinstance(error, AccessRefused) else "malformed credentials"
            log.warning("management.login_refused", peer=peer, user=name, reason=reason)
            await asyncio.sleep(self.failed_login_delay_s)
            raise ApiError(401, "not_authorized", "Login failed") from None
        if not LOGIN_TAGS.intersection(user.tags):
            raise ApiError(401, "not_authorized", "Not management user")
        return user


def _segments(request: Request) -> list[str]:
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    try:
        return [unquote_to_bytes(part).decode() for part in raw.split(b"/")[1:]]
    except UnicodeDecodeError:
        # No name of anything has such bytes.
        raise object_not_found() from None


def _credentials(header: str) -> tuple[str, bytes]:
    """Name and password of basic authentication. Raises ValueError."""
    kind, _, encoded = header.partition(" ")
    if kind.lower() != "basic":
        raise ValueError(kind)
    try:
        name, separator, password = base64.b64decode(encoded).partition(b":")
    except binascii.Error as error:
        raise ValueError(str(error)) from None
    if not separator:
        raise ValueError("no password")
    return name.decode(), password


async def listed(rows: list[Any]) -> bytes:
    """Returns the bytes of a long answer, made while the event loop goes on."""
    return b"[" + b",".join([as_json(row) async for row in in_slices(rows)]) + b"]"


def as_json(value: Any) -> bytes:
    """Returns the bytes of an answer. What JSON has no form for (a number that is none, half a
    surrogate pair: tables of AMQP clients have such) becomes null or `?`."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), default=str, ensure_ascii=False)
    return text.encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value


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


def _refusal(status: int, error: str, reason: str) -> Response:
    headers = {"www-authenticate": WWW_AUTHENTICATE} if status == 401 else None
    return JSONResponse({"error": error, "reason": reason}, status, headers=headers)


def _broker_refusal(error: BrokerError, method: str) -> Response:
    match error:
        case NotFound():
            if method in ("GET", "HEAD", "DELETE"):
                return _refusal(404, "Object Not Found", "Not Found")
            return _refusal(404, "not_found", error.text)
        case AccessRefused():
            return _refusal(401, "not_authorized", f"403 ACCESS_REFUSED - {error.text}")
        case ResourceLocked():
            return _refusal(400, "bad_request", f"405 RESOURCE_LOCKED - {error.text}")
        case Unavailable():
            return _refusal(503, "service_unavailable", error.text)
        case _:
            return _refusal(400, "bad_request", f"406 PRECONDITION_FAILED - {error.text}")


# --- filters, order, pages and columns of lists ------------------------------------------------


async def paged(rows: Any, request: Request) -> Any:
    """Applies `name`, `use_regex`, `sort`, `columns` and the page parameters to a list."""
    query = request.query_params
    total = len(rows)
    name = query.get("name", "")
    if name and query.get("use_regex", "") == "true":
        rows = await matching(rows, name)
    elif name:
        rows = [row for row in rows if name.lower() in _name(row).lower()]
    sort = query.get("sort")
    if sort:
        rows = sorted(rows, key=lambda row: _sort_key(_dig(row, sort)))
    if query.get("sort_reverse", "") == "true":
        rows = list(reversed(rows))
    columns = [name for name in query.get("columns", "").split(",") if name]
    if "page" not in query and query.get("pagination", "") != "true":
        return _columns(rows, columns)
    page = number(query.get("page", "1"))
    size = number(query.get("page_size", str(PAGE_SIZE_DEFAULT)))
    if page is None or size is None:
        raise bad_request("Pagination parameters are invalid")
    if page < 1 or not 1 <= size <= PAGE_SIZE_MAX:
        raise ApiError(
            400,
            "invalid_pagination_parameters",
            f"Invalid pagination parameters: page number {page}, page size {size}",
        )
    pages = max(1, -(-len(rows) // size))
    if page > pages:
        raise ApiError(
            400,
            "page_out_of_range",
            f"Page out of range, page: {page} page size: {size}, len: {len(rows)}",
        )
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


async def matching(
    rows: list[dict[str, Any]], expression: str, *, ignore_case: bool = True
) -> list[dict[str, Any]]:
    """Returns the rows whose name an expression of the user's matches. Off the loop: each match is
    short, but there may be many. Raises ApiError."""
    try:
        pattern = compile_pattern(expression, ignore_case=ignore_case)
    except BrokerError as error:
        raise bad_request(f"not a regular expression that is served: {error.text}") from None
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, _matching, rows, pattern)


def _matching(rows: list[dict[str, Any]], pattern: Pattern) -> list[dict[str, Any]]:
    end = time.monotonic() + FILTER_TIMEOUT_S
    found = []
    for row in rows:
        if time.monotonic() > end:
            raise bad_request("the regular expression takes too long for so many rows")
        if pattern.search(_name(row)):
            found.append(row)
    return found


def _name(row: dict[str, Any]) -> str:
    return str(row.get("name", ""))


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
                if not isinstance(place, dict) or place is row.get(parent):
                    # All of the parent is shown already.
                    break
            else:
                place[last] = value
        made.append(kept)
    return made
