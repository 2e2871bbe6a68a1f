"""Files of the management page: which are served, and with which headers."""

from __future__ import annotations

import gzip
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from convoymq.edges.http.bodies import ApiError
from convoymq.edges.http.page_files import PAGE, PageFiles
from tests.unit.edges.http.test_api import client, cluster
from tests.unit.queues.fake_cluster import FakeCluster

__all__ = ["cluster"]

SCRIPT = "export const a = 1; // " + "x" * 2000


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[tuple[Path, httpx.AsyncClient]]:
    folder = tmp_path / "page"
    (folder / "vendor").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html>")
    (folder / "app.js").write_text(SCRIPT)
    (folder / "vendor" / "LICENSE").write_text("MIT")
    for hidden in (".secret", "code.py", "odd.exe"):
        (folder / hidden).write_text("no")
    (tmp_path / "outside.js").write_text("no")
    files = PageFiles(folder)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answer = await files.answer(request, request.url.path.split("/")[1:])
        except ApiError as error:
            answer = Response(status_code=error.status)
        await answer(scope, receive, send)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://page"
    ) as made:
        yield folder, made


async def test_files_have_their_type_and_an_etag(
    site: tuple[Path, httpx.AsyncClient],
) -> None:
    _, page = site
    for path, kind in (
        ("/", "text/html; charset=utf-8"),
        ("/index.html", "text/html; charset=utf-8"),
        ("/app.js", "text/javascript; charset=utf-8"),
        ("/vendor/LICENSE", "text/plain; charset=utf-8"),
    ):
        answer = await page.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
        again = await page.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert (await page.get("/app.js")).headers["cache-control"] == "no-cache"
    assert (await page.get("/vendor/LICENSE")).headers["cache-control"] == "max-age=86400"
    assert (await page.post("/app.js")).status_code == 405


async def test_text_is_compressed_for_clients_that_take_it(
    site: tuple[Path, httpx.AsyncClient],
) -> None:
    _, page = site
    for accepted, compressed in (("gzip, br", True), ("", False), ("gzip;q=0", False)):
        async with page.stream("GET", "/app.js", headers={"accept-encoding": accepted}) as answer:
            raw = b"".join([part async for part in answer.aiter_raw()])
        assert (gzip.decompress(raw) if compressed else raw).decode() == SCRIPT
        assert (answer.headers.get("content-encoding") == "gzip") is compressed


async def test_nothing_else_is_served(site: tuple[Path, httpx.AsyncClient]) -> None:
    _, page = site
    for path in (
        "/.secret", "/code.py", "/odd.exe", "/vendor", "/missing.js", "/..%2Foutside.js",
        "/vendor//LICENSE", "/a%00.js",
    ):  # fmt: skip
        assert (await page.get(path)).status_code == 404, path


async def test_a_changed_file_is_seen(site: tuple[Path, httpx.AsyncClient]) -> None:
    folder, page = site
    before = await page.get("/app.js")
    (folder / "app.js").write_text("export const a = 2;")
    os.utime(folder / "app.js", ns=(1, 1))
    after = await page.get("/app.js", headers={"if-none-match": before.headers["etag"]})
    assert (after.status_code, after.text) == (200, "export const a = 2;")
    (folder / "app.js").unlink()
    assert (await page.get("/app.js")).status_code == 404


async def test_the_node_serves_its_page_and_the_texts_beside_it(cluster: FakeCluster) -> None:
    async with client(cluster) as made:
        for path, kind, part in (
            ("/", "text/html", "ConvoyMQ"),
            ("/doc", "text/html", "/api/queues/{vhost}/{name}"),
            ("/cli/rabbitmqadmin", "text/plain", "exit 69"),
        ):
            answer = await made.get(f"http://api{path}", auth=None)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert part in answer.text
        for path in ("http://api/", "http://api/nothing", "http://api/api/overview"):
            headers = (await made.get(path)).headers
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'self';")
            assert "unsafe" not in policy
            assert headers["x-frame-options"] == "DENY"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"


def test_the_page_is_in_the_package() -> None:
    assert (PAGE / "index.html").is_file()
    project = Path(__file__).resolve().parents[4] / "pyproject.toml"
    assert '"edges/http/page/**/*"' in project.read_text()
