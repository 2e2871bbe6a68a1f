"""The application that Prometheus reads metrics from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from convoymq.edges.http.bodies import ApiError
from convoymq.edges.http.exposition import CONTENT_TYPE, OPEN_METRICS_TYPE, wants_open_metrics


class Render(Protocol):
    """Writes the metrics."""

    def __call__(self, *, per_object: bool, open_metrics: bool) -> Awaitable[str]:
        """Returns the text. `per_object`: a line per queue or topic instead of sums."""


class RenderDetailed(Protocol):
    """Writes families of metrics that are asked for. Raises ApiError."""

    def __call__(self, query: QueryParams, *, open_metrics: bool) -> Awaitable[str]:
        """Returns the text."""


async def answer(request: Request, render: Render, *, per_object: bool = False) -> Response:
    """Returns the metrics in the form that the client accepts."""
    open_metrics = wants_open_metrics(request.headers.get("accept", ""))
    return _text(await render(per_object=per_object, open_metrics=open_metrics), open_metrics)


async def answer_detailed(request: Request, render: RenderDetailed) -> Response:
    """Returns the families that a request names, or why not."""
    open_metrics = wants_open_metrics(request.headers.get("accept", ""))
    try:
        text = await render(request.query_params, open_metrics=open_metrics)
    except ApiError as error:
        return Response(f"{error.text}\n", error.status, media_type="text/plain")
    return _text(text, open_metrics)


def _text(text: str, open_metrics: bool) -> Response:
    kind = OPEN_METRICS_TYPE if open_metrics else CONTENT_TYPE
    return Response(text, headers={"content-type": kind})


def make_scrapes(
    render: Render,
    faults: Callable[[], list[str]] | None = None,
    detailed: RenderDetailed | None = None,
) -> ASGIApp:
    """Returns the application for `/metrics` and `/metrics/per-object`.

    Args:
        detailed: for `/metrics/detailed`; None: there is no such path.
        faults: returns why the process does not serve, for `/health`; None: there is no such path.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"].rstrip("/")
        response: Response
        if path in ("/metrics", "/metrics/per-object"):
            per_object = path.endswith("per-object")
            response = await answer(Request(scope, receive), render, per_object=per_object)
        elif path == "/metrics/detailed" and detailed is not None:
            response = await answer_detailed(Request(scope, receive), detailed)
        elif path == "/health" and faults is not None:
            found = faults()
            body = {"status": "failed" if found else "ok", "reasons": found}
            response = JSONResponse(body, 503 if found else 200)
        else:
            response = Response("Not Found", 404)
        await response(scope, receive, send)

    return app
