"""Files of the management page, and the texts beside it, as answers of the API's port."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from convoymq import __version__
from convoymq.edges.http.bodies import ApiError
from convoymq.edges.http.call import object_not_found

if TYPE_CHECKING:
    from convoymq.edges.http.routes import Route

PAGE = Path(__file__).parent / "page"
TEXTS = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "json": "application/json",
    "map": "application/json",
    "md": "text/plain",
    "mjs": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
    "webmanifest": "application/manifest+json",
}
"""Suffix -> type of what is compressed."""
OTHERS = {"ico": "image/x-icon", "png": "image/png", "woff2": "font/woff2"}
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
FILE_BYTES_MAX = 4 << 20
COMPRESSED_BYTES_MIN = 512
VENDOR_MAX_AGE_S = 86_400

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Headers of every answer."""

RABBITMQADMIN = """#!/bin/sh
# ConvoyMQ does not distribute rabbitmqadmin. Both generations of it work with this node:
#   version 1 (Python): /usr/share/doc or /usr/sbin of Debian's package rabbitmq-server, or
#     https://raw.githubusercontent.com/rabbitmq/rabbitmq-server/v4.0.5/deps/rabbitmq_management/bin/rabbitmqadmin
#   version 2: https://github.com/rabbitmq/rabbitmqadmin-ng/releases
# `convoy ctl` has the same operations, without a download.
sed -n '2,6s/^# *//p' "$0" >&2
exit 69
"""


@dataclass(frozen=True, slots=True)
class _File:
    stamp: tuple[int, int]
    """Time of change and size, by which a newer file is noticed."""
    body: bytes
    compressed: bytes | None
    etag: str
    kind: str


class PageFiles:
    """Serves the files below a folder; each is read when it is first asked for.

    Args:
        folder: belongs to the package, so its files bound what is kept in memory.
        routes: of the API, for `/doc`.
    """

    def __init__(self, folder: Path = PAGE, routes: Iterable[Route] = ()) -> None:
        self._folder = folder
        self._routes = routes
        self._files: dict[Path, _File] = {}

    async def answer(self, request: Request, segments: list[str]) -> Response:
        """Returns the answer for a path outside of the API. Raises ApiError."""
        match segments:
            case [] | [""]:
                segments = ["index.html"]
            case ["doc"] | ["doc", ""]:
                return self._as_answer(request, _made("text/html", self._list_of_paths()))
            case ["cli"] | ["cli", ""]:
                return RedirectResponse("/cli/rabbitmqadmin")
            case ["cli", "rabbitmqadmin"]:
                return self._as_answer(request, _made("text/plain", RABBITMQADMIN))
        if not all(FILE_NAME.fullmatch(segment) for segment in segments):
            raise object_not_found()
        path = self._folder.joinpath(*segments)
        kind = _kind_of(path.name)
        if kind is None:
            raise object_not_found()
        found = await asyncio.get_running_loop().run_in_executor(None, self._read, path, kind)
        if found is None:
            raise object_not_found()
        return self._as_answer(request, found, VENDOR_MAX_AGE_S if segments[0] == "vendor" else 0)

    def _read(self, path: Path, kind: str) -> _File | None:
        try:
            state = path.stat()
            stamp = (state.st_mtime_ns, state.st_size)
            known = self._files.get(path)
            if known is None or known.stamp != stamp:
                if state.st_size > FILE_BYTES_MAX or not path.is_file():
                    return None
                known = _made(kind, path.read_bytes(), stamp)
                self._files[path] = known
        except OSError:
            self._files.pop(path, None)
            return None
        return known

    def _list_of_paths(self) -> str:
        rows = "".join(
            f"<tr><td>{route.method}<td><code>/api/{escape('/'.join(route.segments))}</code>"
            f"<td>{escape((route.handler.__doc__ or '').split('.')[0])}\n"
            for route in sorted(self._routes, key=lambda route: (route.segments, route.method))
        )
        title = f"HTTP API of ConvoyMQ {__version__}"
        return (
            f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>'
            f"<h1>{title}</h1>\n<p>Names, JSON and codes are RabbitMQ's; paths with "
            f"<code>convoy</code> are ConvoyMQ's own.\n<table>\n{rows}</table>\n</html>\n"
        )

    @staticmethod
    def _as_answer(request: Request, file: _File, max_age_s: int = 0) -> Response:
        if request.method not in ("GET", "HEAD"):
            raise ApiError(405, "method_not_allowed", f"{request.method} is not allowed here")
        headers = {
            "etag": file.etag,
            "cache-control": f"max-age={max_age_s}" if max_age_s else "no-cache",
            "vary": "accept-encoding",
        }
        if file.etag in re.split(r"\s*,\s*", request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=headers)
        body = file.body
        if file.compressed is not None and _takes_gzip(request.headers.get("accept-encoding", "")):
            body, headers["content-encoding"] = file.compressed, "gzip"
        return Response(body, headers={**headers, "content-type": file.kind})


def _kind_of(name: str) -> str | None:
    """Returns the content type of a file; None: such files are not served."""
    suffix = name.rpartition(".")[2].lower() if "." in name else "txt"
    if suffix in TEXTS:
        return f"{TEXTS[suffix]}; charset=utf-8"
    return OTHERS.get(suffix)


def _made(kind: str, body: str | bytes, stamp: tuple[int, int] = (0, 0)) -> _File:
    data = body.encode() if isinstance(body, str) else body
    compressed = None
    if not kind.startswith(tuple(OTHERS.values())) and len(data) >= COMPRESSED_BYTES_MIN:
        compressed = gzip.compress(data, mtime=0)
    if "charset" not in kind and kind.startswith("text/"):
        kind = f"{kind}; charset=utf-8"
    return _File(stamp, data, compressed, f'"{hashlib.sha256(data).hexdigest()[:24]}"', kind)


def _takes_gzip(accepted: str) -> bool:
    for each in accepted.split(","):
        coding, _, quality = each.partition(";")
        if coding.strip().lower() in ("gzip", "*"):
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
