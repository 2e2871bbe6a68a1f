"""The HTTP API as an ASGI application: names, JSON and codes as RabbitMQ's management plugin has
them.

Paths are matched on their raw bytes, because a virtual host `/` is written `%2F` and must stay one
segment. A handler gets a `Call` and returns a JSON value, a status, or both; refusals of the
broker become HTTP errors in one table.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import structlog
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from convoymq.broker.access import HTTP
from convoymq.broker.audit import Act
from convoymq.broker.facade import Broker
from convoymq.broker.records import User
from convoymq.edges.http import metrics, scrapes
from convoymq.edges.http.authentication import SAFE_METHODS, Authentication, challenge
from convoymq.edges.http.bodies import ApiError, Bodies
from convoymq.edges.http.call import Call, Status, object_not_found
from convoymq.edges.http.handlers import ROUTES
from convoymq.edges.http.json_values import as_json, listed
from convoymq.edges.http.lists import Page, only_columns
from convoymq.edges.http.metric_families import detailed_in
from convoymq.edges.http.page_files import SECURITY_HEADERS, PageFiles
from convoymq.edges.http.rates import Rates
from convoymq.edges.http.routes import find
from convoymq.edges.http.served import Served
from convoymq.edges.http.topics import refusal_of
from convoymq.model.errors import (
    AccessRefused,
    BrokerError,
    NotFound,
    Protected,
    ResourceLocked,
    Unavailable,
    ValidationFailed,
)
from convoymq.model.json import JsonObject
from convoymq.topics.rules.refusals import TopicRefused

log = structlog.get_logger()

NOBODY = User(name="")
WITHOUT_USER = frozenset({("POST", "login")})
"""Method and path of requests that need no log-in."""
TRAFFIC = frozenset({"publish", "get", "browse"})
"""Last parts of paths by which clients send and read messages."""
OPERATOR_SOCKET = "operator"
AMQP_SUBJECTS = frozenset({"queues", "exchanges", "bindings"})


def make_api(
    broker: Broker,
    *,
    bodies: Bodies | None = None,
    served: Served | None = None,
    user: User | None = None,
    authentication: Authentication | None = None,
) -> ASGIApp:
    """Returns the application for the HTTP API and the management page.

    Args:
        authentication: has the sessions; None: its own.
        user: who asks, in all requests; None = whose name and password a request has.
    """
    served = served or Served()
    authentication = authentication or Authentication(broker, served)
    rates = Rates(broker.cluster.model, broker.cluster.now_ms)
    api = _Api(broker, bodies or Bodies(), served, authentication, user, rates)
    files = PageFiles(routes=ROUTES)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            segments = _segments(request)
            if segments[0] in ("api", "metrics"):
                response = await api.answer(request, segments)
            else:
                response = await files.answer(request, segments)
        except ApiError as error:
            response = _refusal(error.status, error.error, error.text, error.more)
            if error.status == 401:
                response.headers.update(challenge(request))
        except BrokerError as error:
            response = _broker_refusal(error, request)
        except Exception:
            log.exception("management.request_failed", method=request.method, path=scope["path"])
            response = _refusal(500, "internal_error", "the log of the node says more")
        if request.method not in SAFE_METHODS:
            _audit(broker, request, response.status_code, is_operator=user is not None)
        response.headers.setdefault("cache-control", "no-cache")
        response.headers.update(SECURITY_HEADERS)
        await response(scope, receive, send)

    return app


def _audit(broker: Broker, request: Request, status: int, *, is_operator: bool) -> None:
    """Records a request that changes something, and is more than the traffic of a client."""
    path = _raw_path(request).decode("ascii", "replace")
    if path.rpartition("/")[2] in TRAFFIC:
        return
    act = Act(
        via=OPERATOR_SOCKET if is_operator else HTTP,
        user=getattr(request.state, "user", ""),
        peer=request.client.host if request.client is not None else "",
        method=request.method,
        path=path,
        status=status,
    )
    broker.audit.record(act)


def make_metrics(broker: Broker, served: Served | None = None) -> ASGIApp:
    """Returns the application for Prometheus."""

    async def detailed(query: QueryParams, *, open_metrics: bool) -> str:
        names, wanted = detailed_in(query)
        return await metrics.render_detailed(broker, names, wanted, open_metrics=open_metrics)

    return scrapes.make_scrapes(_render(broker, served or Served()), detailed=detailed)


def _render(broker: Broker, served: Served) -> scrapes.Render:
    return lambda *, per_object, open_metrics: metrics.render(
        broker, served.edges(), per_object=per_object, open_metrics=open_metrics
    )


@dataclass(slots=True)
class _Api:
    broker: Broker
    bodies: Bodies
    served: Served
    authentication: Authentication
    user: User | None
    rates: Rates

    async def answer(self, request: Request, segments: list[str]) -> Response:
        if segments == ["metrics"]:
            return await scrapes.answer(request, _render(self.broker, self.served))
        segments = segments[1:]
        if segments and not segments[-1]:
            segments.pop()
        if segments in ([], ["index.html"]):
            return RedirectResponse("/doc")
        handler, path = find(ROUTES, request.method, segments)
        user = self.user
        if user is None:
            is_open = (request.method, *segments) in WITHOUT_USER
            user = NOBODY if is_open else await self.authentication.user_of(request)
        request.state.user = user.name
        call = Call(
            self.broker, self.rates, self.bodies, request, user, path, self.served,
            self.authentication,
        )  # fmt: skip
        result = await handler(call)
        if isinstance(result, Response):
            return result
        if isinstance(result, Status):
            headers = {"location": result.location} if result.location else None
            return Response(status_code=result.status, headers=headers)
        status = 200
        if isinstance(result, tuple):
            status, result = result
        if isinstance(result, dict) and not isinstance(result, Page):
            result = only_columns(result, request)
        body = await listed(result) if isinstance(result, list) else as_json(result)
        return Response(body, status, media_type="application/json")


def _raw_path(request: Request) -> bytes:
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    return raw


def _segments(request: Request) -> list[str]:
    try:
        return [unquote_to_bytes(part).decode() for part in _raw_path(request).split(b"/")[1:]]
    except UnicodeDecodeError:
        # No name of anything has such bytes.
        raise object_not_found() from None


def _refusal(status: int, error: str, reason: str, more: JsonObject | None = None) -> Response:
    return JSONResponse({"error": error, "reason": reason, **(more or {})}, status)


def _broker_refusal(error: BrokerError, request: Request) -> Response:
    match error:
        case NotFound():
            if request.method in ("GET", "HEAD", "DELETE"):
                return _refusal(404, "Object Not Found", "Not Found")
            return _refusal(404, "not_found", error.text)
        case AccessRefused():
            return _refusal(401, "not_authorized", _as_amqp("403 ACCESS_REFUSED", error, request))
        case ResourceLocked():
            return _refusal(400, "bad_request", _as_amqp("405 RESOURCE_LOCKED", error, request))
        case ValidationFailed():
            return _refusal(400, "bad_request", error.text)
        case Protected():
            return _refusal(412, "precondition_failed", error.text)
        case TopicRefused(code=code):
            return _refusal(*refusal_of(code), error.text, {"code": code.value})
        case Unavailable():
            return _refusal(503, "service_unavailable", error.text)
        case _:
            return _refusal(400, "bad_request", _as_amqp("406 PRECONDITION_FAILED", error, request))


def _as_amqp(code: str, error: BrokerError, request: Request) -> str:
    """Returns the text of a refusal: with AMQP's code for what RabbitMQ's plugin does as an AMQP
    client."""
    subject = _segments(request)[1:2]
    return f"{code} - {error.text}" if AMQP_SUBJECTS.issuperset(subject) else error.text
