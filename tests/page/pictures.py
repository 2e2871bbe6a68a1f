"""Makes the pictures of docs/page.md, of a shop at work (`make page-pictures`).

    python -m tests.page.pictures [--url URL] DIRECTORY [PLACE…]

`--url`: the page of a node that runs; without it three nodes with clients are started. With places
(`all`: every one) it makes a picture of each, whole, in both colours and both sizes instead.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Any

from playwright import sync_api

from tests.page.conftest import CHROMIUM, SIZES, Site
from tests.page.content import shop
from tests.page.test_looks import PLACES

SETTLE_S = 62.0
"""Until a minute of the course is there."""
HISTORY_S = 6.0
"""On a page, until it has rates of its own."""
DESK = {"width": 1280, "height": 860}
TALL = {"width": 1280, "height": 1250}
PICTURES: dict[str, tuple[str, dict[str, int], bool]] = {
    "overview": ("#/overview", DESK, False),
    "queues": ("#/queues", DESK, False),
    "queue": ("#/queue/%2F/orders", TALL, False),
    "messages": ("#/queue/%2F/failed-orders?tab=messages", DESK, False),
    "topic": ("#/topic/%2F/ledger", DESK, False),
    "bindings": ("#/bindings", DESK, False),
    "dark": ("#/nodes", DESK, True),
    "phone": ("#/queues", SIZES["phone"], False),
    "phone-queue": ("#/queue/%2F/orders", SIZES["phone"], False),
}
"""name -> place, size, whether it is dark."""
BASE_PORT = 12000


def visit(browser: Any, url: str, size: dict[str, int], dark: bool) -> Site:
    colours = "dark" if dark else "light"
    context = browser.new_context(viewport=size, color_scheme=colours, reduced_motion="reduce")
    site = Site(context.new_page(), url)
    site.log_in()
    site.see("Overview")
    return site


def look(site: Site, place: str, path: Path, *, whole: bool = False) -> None:
    site.open(place)
    # The pointer is nowhere, or a row would be lit.
    site.tab.mouse.move(0, 0)
    time.sleep(HISTORY_S)
    site.tab.screenshot(path=str(path), full_page=whole)
    assert not site.faults, site.faults
    assert not site.tab.locator("main .banner.bad").count(), f"{place} is not shown"


def places_of(site: Site) -> dict[str, str]:
    """Returns all places of the shop, by the names of `test_looks.PLACES`."""
    ask = "path => fetch('/api/' + path).then(answer => answer.json())"

    def first(path: str) -> str:
        return urllib.parse.quote(site.tab.evaluate(ask, path)[0]["name"], safe="")

    renamed = {"looks.mail": "thumbnails", "looks.": ""}
    places = dict(PLACES)
    for old, new in renamed.items():
        places = {name: place.replace(old, new) for name, place in places.items()}
    return places | {
        "messages": "#/queue/%2F/failed-orders?tab=messages", "mirrored": "#/queue/%2F/sessions",
        "node": f"#/node/{first('nodes')}", "broker-group": "#/group/n",
        "connection": f"#/connection/{first('connections')}",
        "channel": f"#/channel/{first('channels')}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url")
    parser.add_argument("directory", type=Path)
    parser.add_argument("places", nargs="*")
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        url = given.url
        if url is None:
            home = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            cluster = opened.enter_context(shop(home, BASE_PORT))
            url = f"http://127.0.0.1:{cluster.nodes[0].http_port}/"
            time.sleep(SETTLE_S)
        playwright = opened.enter_context(sync_api.sync_playwright())
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened.callback(browser.close)
        if not given.places:
            for name, (place, size, dark) in PICTURES.items():
                site = visit(browser, url, size, dark)
                look(site, place, given.directory / f"page-{name}.png")
                site.tab.context.close()
            return
        for size_name, size in SIZES.items():
            for dark in (False, True):
                site = visit(browser, url, size, dark)
                end = f"{size_name}-{'dark' if dark else 'light'}.png"
                for name, place in places_of(site).items():
                    if name in given.places or "all" in given.places:
                        look(site, place, given.directory / f"{name}-{end}", whole=True)
                site.tab.context.close()


if __name__ == "__main__":
    main()
