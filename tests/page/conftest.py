"""The management page in headless Chromium, before three real nodes (`make test-page`)."""

from __future__ import annotations

import os
import shutil
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, serving_cluster
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports

HERE = Path(__file__).parent
CHROMIUM = os.environ.get("CONVOY_CHROMIUM") or shutil.which("chromium")
SIZES = {"desk": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}
PATIENCE_MS = PATIENCE_S * 1000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.optional)


def quoted(name: str) -> str:
    """Returns a name as a segment of a path."""
    return urllib.parse.quote(name, safe="")


class Site:
    """A browser's tab at the page of a node, and what went wrong in it."""

    def __init__(self, tab: Any, url: str) -> None:
        self.tab = tab
        self.url = url
        self.faults: list[str] = []
        tab.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        tab.on("console", self._heard)
        tab.on("dialog", self._alerted)

    def _heard(self, message: Any) -> None:
        # A refused request is a line of the console as well; all others are faults.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.faults.append(f"console: {message.text}")

    def _alerted(self, dialog: Any) -> None:
        self.faults.append(f"a name was run as script: {dialog.message}")
        dialog.dismiss()

    def log_in(self, name: str = "guest", password: str = "guest") -> None:
        self.tab.goto(self.url)
        self.tab.get_by_label("User").fill(name)
        self.tab.get_by_label("Password").fill(password)
        self.tab.get_by_role("button", name="Log in").click()

    def open(self, place: str, title: str | None = None) -> None:
        """Goes to a page, and waits for its title and its first values."""
        self.tab.evaluate("place => { location.hash = place }", place)
        heading = self.tab.get_by_role("heading", level=1)
        heading.filter(has_text=title).wait_for() if title else heading.first.wait_for()
        self.tab.locator("main .waiting").first.wait_for(state="detached")

    def press(self, name: str, *, within: str = "main") -> None:
        """Presses a button."""
        self.tab.locator(within).get_by_role("button", name=name, exact=True).first.click()

    @property
    def dialog(self) -> Any:
        return self.tab.locator("dialog[open]").last

    def sure(self, action: str) -> None:
        """Confirms in the dialog, and waits until it closes."""
        button = self.dialog.get_by_role("button", name=action, exact=True)
        button.click()
        button.wait_for(state="detached")

    def see(self, text: str, *, within: str = "main") -> None:
        """Waits for a text."""
        self.tab.locator(within).get_by_text(text).first.wait_for()


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="`make test-page` installs Playwright")
    if CHROMIUM is None:
        pytest.skip("`make test-page` installs Chromium")
    with api.sync_playwright() as playwright:
        # Containers have no user namespaces for its sandbox; it sees pages of these nodes only.
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="package")
def cluster(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("page")
    with serving_cluster(directory, cluster_ports(__name__), policies=True) as made:
        yield made


@pytest.fixture
def ask(cluster: LocalCluster) -> Callable[..., Any]:
    """Sends a request to the HTTP API, which must succeed."""

    def send(method: str, path: str, body: object = None) -> Any:
        status, answer = call(cluster, method, path, body)
        assert status < 300, f"{method} {path}: {status} {answer}"
        return answer

    return send


@pytest.fixture
def visit(browser: Any, cluster: LocalCluster) -> Iterator[Callable[..., Site]]:
    """Opens tabs; none of them may have had a fault at the end."""
    opened: list[tuple[Any, Site]] = []

    def visit_(size: str = "desk", *, dark: bool = False, node: int = 1) -> Site:
        context = browser.new_context(
            viewport=SIZES[size],
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        context.set_default_timeout(PATIENCE_MS)
        port = next(each.http_port for each in cluster.nodes if each.number == node)
        site = Site(context.new_page(), f"http://127.0.0.1:{port}/")
        opened.append((context, site))
        return site

    yield visit_
    for context, site in opened:
        context.close()
        assert not site.faults, site.faults


@pytest.fixture
def site(visit: Callable[..., Site]) -> Site:
    """A tab of an administrator."""
    made = visit()
    made.log_in()
    made.see("Overview")
    return made
