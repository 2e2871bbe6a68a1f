"""How the management page looks: accessible by axe-core's rules, within a phone's width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import call
from tests.page.conftest import Site

ROOT = Path(__file__).parents[2]
AXE = next(iter(sorted((ROOT / "build/page").glob("axe-*.js"))), None)
GRAVE = ("serious", "critical")
PLACES = {
    "overview": "#/overview",
    "nodes": "#/nodes",
    "queues": "#/queues",
    "queue": "#/queue/%2F/looks.orders",
    "messages": "#/queue/%2F/looks.orders?tab=messages",
    "rules": "#/queue/%2F/looks.orders?tab=rules",
    "scheduled": "#/queue/%2F/looks.orders?tab=scheduled",
    "classic": "#/queue/%2F/looks.mail",
    "streams": "#/streams",
    "stream": "#/queue/%2F/looks.events",
    "topics": "#/topics",
    "topic": "#/topic/%2F/looks.ledger",
    "group": "#/topic/%2F/looks.ledger?group=billing",
    "exchanges": "#/exchanges",
    "exchange": "#/exchange/%2F/looks.shop",
    "bindings": "#/bindings",
    "connections": "#/connections",
    "channels": "#/channels",
    "groups": "#/groups",
    "users": "#/users",
    "user": "#/user/guest",
    "vhosts": "#/vhosts",
    "vhost": "#/vhost/%2F",
    "policies": "#/policies",
    "shovels": "#/shovels",
    "definitions": "#/definitions",
    "upgrades": "#/upgrades",
    "audit": "#/audit",
    "node": "",
}

Ask = Callable[..., Any]
Visit = Callable[..., Site]


@pytest.fixture(scope="module")
def filled(cluster: Any) -> Iterator[None]:
    """Something of each kind to look at."""

    def ask(method: str, path: str, body: object = None) -> None:
        status, answer = call(cluster, method, path, body)
        assert status < 300, f"{method} {path}: {status} {answer}"

    types = {"orders": "quorum", "mail": "classic", "events": "stream", "invoices": "quorum"}
    for name, kind in types.items():
        ask("PUT", f"queues/%2F/looks.{name}", {"arguments": {"x-queue-type": kind}})
    ask("PUT", "exchanges/%2F/looks.shop", {"type": "topic"})
    ask("PUT", "exchanges/%2F/looks.audit", {"type": "fanout"})
    keys = {"q/looks.orders": "order.*", "q/looks.events": "#", "e/looks.audit": "audit.#"}
    for end, key in (*keys.items(), ("q/looks.mail", "mail")):
        ask("POST", f"bindings/%2F/e/looks.shop/{end}", {"routing_key": key})
    ask("POST", "bindings/%2F/e/looks.audit/q/looks.invoices", {})
    ask("PUT", "topics/%2F/looks.ledger", {"partitions": 3, "logical": 256})
    ask("PUT", "topics/%2F/looks.ledger/groups/billing", {})
    policy = {"pattern": "^looks", "definition": {"delivery-limit": 5}, "apply-to": "queues"}
    ask("PUT", "policies/%2F/looks", policy)
    ends = {"src-uri": "amqp://", "src-queue": "looks.orders", "dest-uri": "amqp://127.0.0.1:1"}
    ask("PUT", "parameters/shovel/%2F/looks", {"value": ends})
    for number in range(8):
        payload = {"payload": f'{{"number": {number}}}', "payload_encoding": "string"}
        properties = {"content_type": "application/json", "headers": {"country": "de"}}
        body = {"routing_key": "order.new", "properties": properties, **payload}
        ask("POST", "exchanges/%2F/looks.shop/publish", body)
    yield
    ask("DELETE", "policies/%2F/looks")
    ask("DELETE", "parameters/shovel/%2F/looks")
    ask("DELETE", "topics/%2F/looks.ledger")
    for name in ("shop", "audit"):
        ask("DELETE", f"exchanges/%2F/looks.{name}")
    for name in types:
        ask("DELETE", f"queues/%2F/looks.{name}")


def go(site: Site, name: str, ask: Ask) -> None:
    """Goes to a place; a node's has its name."""
    first = ask("GET", "nodes")[0]["name"].replace("@", "%40")
    site.open(PLACES[name] or f"#/node/{first}")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(visit: Visit, filled: None, ask: Ask, dark: bool) -> None:
    if AXE is None:
        pytest.skip("`make test-page` installs axe-core")
    site = visit(dark=dark)
    site.log_in()
    site.see("Overview")
    found: list[str] = []
    for name in PLACES:
        go(site, name, ask)
        # By the debugger: the page's policy lets no other script in.
        site.tab.evaluate(AXE.read_text())
        result = site.tab.evaluate("axe.run()")
        found += [
            f"{name}: {each['id']} {each['nodes'][0]['html'][:160]}"
            for each in result["violations"]
            if each["impact"] in GRAVE
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_fits_a_phone(visit: Visit, filled: None, ask: Ask, dark: bool) -> None:
    site = visit("phone", dark=dark)
    site.log_in()
    site.see("Overview")
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for name in PLACES:
        go(site, name, ask)
        assert site.tab.evaluate(wide) <= 0, f"{name} is wider than a phone"
    site.tab.get_by_role("button", name="Menu").click()
    site.tab.get_by_role("navigation", name="Main").get_by_text("Streams").click()
    site.tab.get_by_role("heading", level=1).filter(has_text="Streams").wait_for()


def test_the_first_view_needs_few_files(visit: Visit, record_property: Any) -> None:
    site = visit()
    requests: list[str] = []
    site.tab.on("request", lambda request: requests.append(request.url))
    site.tab.goto(site.url)
    site.tab.get_by_role("button", name="Log in").wait_for()
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? -1"
    record_property("first_paint_ms", site.tab.evaluate(paint))
    assert len(requests) <= 20, requests
    assert all(url.startswith(site.url) for url in requests), "something comes from elsewhere"
