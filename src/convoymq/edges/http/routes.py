"""The table of paths: which handler serves which method and path.

Each module of `handlers` has a `Routes` of its own; `handlers.ROUTES` joins them. By hand, because
Starlette's router matches decoded paths, in the order of routes (ADR 0194).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from convoymq.broker.records import QueueRecord
from convoymq.edges.http.bodies import ApiError
from convoymq.edges.http.call import Call, object_not_found
from convoymq.edges.http.lists import Lazy, paged
from convoymq.model.json import JsonObject

Handler: TypeAlias = Callable[[Call], Awaitable[object]]
"""Answers a JSON value, a `Status`, or a status and a value."""
ListHandler: TypeAlias = Callable[[Call], Awaitable[list[JsonObject] | Lazy[QueueRecord]]]

_AnyHandler = TypeVar("_AnyHandler", bound=Handler)
_AnyListHandler = TypeVar("_AnyListHandler", bound=ListHandler)


class Route(NamedTuple):
    """One method of one path."""

    method: str
    segments: tuple[str, ...]
    """`{name}` matches anything."""
    handler: Handler


class Routes:
    """The paths of one subject, in the order in which they were added."""

    def __init__(self) -> None:
        self._routes: list[Route] = []

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes)

    def add(self, method: str, path: str) -> Callable[[_AnyHandler], _AnyHandler]:
        """Registers a handler; `{name}` in `path` matches one segment."""

        def register(handler: _AnyHandler) -> _AnyHandler:
            self._routes.append(Route(method, tuple(path.split("/")), handler))
            return handler

        return register

    def listing(self, path: str) -> Callable[[_AnyListHandler], _AnyListHandler]:
        """Registers a handler of GET whose rows can be filtered, sorted and paged."""

        def register(handler: _AnyListHandler) -> _AnyListHandler:
            async def serve(call: Call) -> list[JsonObject] | JsonObject:
                return await paged(await handler(call), call.request)

            self.add("GET", path)(serve)
            return handler

        return register


def find(
    routes: Sequence[Route], method: str, segments: list[str]
) -> tuple[Handler, dict[str, str]]:
    """Returns the handler of a path, and the names in it.

    Raises:
        ApiError: 404 when no path is like that, 405 when it has other methods only.
    """
    wanted = "GET" if method == "HEAD" else method
    exists = False
    best: tuple[Handler, dict[str, str]] | None = None
    for verb, pattern, handler in routes:
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
                best = (handler, path)
    if best is not None:
        return best
    if exists:
        raise ApiError(405, "method_not_allowed", f"{method} is not allowed here")
    raise object_not_found()
