"""What people do with the management page, in a browser, before three nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from convoymq.cli.cluster import LocalCluster
from tests.clusters import start_nodes
from tests.faults.traffic import until
from tests.page.conftest import Site, quoted
from tests.page.content import Clients
from tests.patience import PATIENCE_S

QUEUES = int(os.environ.get("CONVOY_PAGE_QUEUES", "150"))
"""Issue 32 wants 10,000; `make test-page QUEUES=10000` makes them."""
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "\u202ereversed\u202c שלום مرحبا",
    "a/b?c#d%2F&e=f;..",
    "é" * 127,
    "{{constructor.constructor('alert(1)')()}}${alert(1)}",
    "\x01\x7f tab\tend",
)

Ask = Callable[..., Any]
Visit = Callable[..., Site]


@pytest.fixture
def queue(ask: Ask, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a quorum queue that is declared for the test."""
    name = f"page.{request.node.name}"
    ask("PUT", f"queues/%2F/{name}", {"arguments": {"x-queue-type": "quorum"}})
    yield name
    ask("DELETE", f"queues/%2F/{name}")


def publish(ask: Ask, queue: str, *payloads: str) -> None:
    for payload in payloads:
        body = {"routing_key": queue, "payload": payload, "payload_encoding": "string"}
        assert ask("POST", "exchanges/%2F/amq.default/publish", {"properties": {}, **body})[
            "routed"
        ]


def ready(ask: Ask, queue: str) -> int:
    return int(ask("GET", f"queues/%2F/{queue}").get("messages_ready", -1))


def test_a_wrong_password_is_one_line_and_a_session_outlives_a_reload(visit: Visit) -> None:
    site = visit()
    site.log_in("guest", "wrong")
    site.see("This name and password do not fit together.")
    site.log_in()
    site.see("Overview")
    site.tab.reload()
    site.see("Overview")
    cookie = next(each for each in site.tab.context.cookies() if "session" in each["name"])
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    site.tab.locator("details.user summary").click()
    site.press("Log out", within="header")
    site.tab.get_by_role("button", name="Log in").wait_for()
    site.tab.reload()
    site.tab.get_by_role("button", name="Log in").wait_for()


def test_a_queue_is_declared_filled_browsed_and_emptied(site: Site, ask: Ask) -> None:
    site.open("#/queues", "Queues")
    site.press("New queue…")
    site.dialog.get_by_label("Name", exact=True).fill("page.declared")
    site.dialog.get_by_role("button", name="+ Add one").click()
    site.dialog.get_by_label("Name").nth(1).fill("x-max-length")
    site.dialog.get_by_label("Value").fill("100")
    site.sure("Declare")
    site.tab.get_by_role("heading", level=1).filter(has_text="page.declared").wait_for()
    declared = ask("GET", "queues/%2F/page.declared")["arguments"]
    assert declared == {"x-queue-type": "quorum", "x-max-length": 100}

    for number in (1, 2):
        site.press("Publish…")
        site.dialog.get_by_label("Payload", exact=True).fill(f"<b>message {number}</b>")
        site.sure("Publish")
    site.see("Published, and in a queue", within=".notices")
    until(lambda: ready(ask, "page.declared") == 2, "the messages are not there")

    site.open("#/queue/%2F/page.declared?tab=messages")
    site.see("<b>message 2</b>")
    site.tab.get_by_label("Choose message 1").check()
    site.press("Delete…", within=".toolbar")
    site.sure("Delete")
    until(lambda: ready(ask, "page.declared") == 1, "the message is still there")

    site.press("Purge…")
    site.see("will be gone", within="dialog")
    site.sure("Purge")
    until(lambda: ready(ask, "page.declared") == 0, "the queue is not empty")
    site.press("Delete…", within=".page-head")
    site.sure("Delete")
    site.tab.get_by_role("heading", level=1).filter(has_text="Queues").wait_for()


def test_dead_letters_go_back_where_they_came_from(site: Site, ask: Ask, queue: str) -> None:
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}
    ask("PUT", "queues/%2F/page.origin", {"arguments": {"x-queue-type": "quorum", **dead}})
    publish(ask, "page.origin", "to be rejected")
    reject = {"count": 1, "ackmode": "reject_requeue_false", "encoding": "auto"}
    ask("POST", "queues/%2F/page.origin/get", reject)
    until(lambda: ready(ask, queue) == 1, "there is no dead letter")
    site.open(f"#/queue/%2F/{queue}?tab=messages")
    site.see("rejected")
    site.press("Retry dead letters…")
    site.sure("Retry")
    until(lambda: ready(ask, "page.origin") == 1, "the message is not back")
    ask("DELETE", "queues/%2F/page.origin")


def test_a_policy_is_set_and_a_queue_says_why_it_applies(site: Site, ask: Ask, queue: str) -> None:
    site.open("#/policies", "Policies")
    site.press("New…")
    site.dialog.get_by_label("Name", exact=True).first.fill("page-limit")
    site.dialog.get_by_label("Pattern of names").fill(f"^{re.escape(queue)}$")
    site.dialog.get_by_label("Applies to").select_option("queues")
    site.dialog.get_by_label("Name", exact=True).nth(1).fill("max-length")
    site.dialog.get_by_label("Value").fill("nonsense")
    site.dialog.get_by_role("button", name="Save").click()
    site.dialog.get_by_role("alert").wait_for()  # The refusal, and the dialog is still there.
    site.dialog.get_by_label("Value").fill("77")
    site.sure("Save")
    until(lambda: ask("GET", f"queues/%2F/{queue}").get("policy") == "page-limit", "not in force")
    site.open(f"#/queue/%2F/{queue}?tab=rules")
    site.see("name matches")
    site.see("in force")
    site.see("policy page-limit")
    ask("DELETE", "policies/%2F/page-limit")


def test_a_shovel_moves_and_shows_its_state(site: Site, ask: Ask, queue: str) -> None:
    ask("PUT", "queues/%2F/page.moved", {"arguments": {"x-queue-type": "quorum"}})
    publish(ask, queue, "to be moved")
    ends = {"src-uri": "amqp://", "src-queue": queue, "dest-uri": "amqp://"}
    site.open("#/shovels", "Shovels")
    site.press("New…")
    site.dialog.get_by_label("Name", exact=True).fill("page-shovel")
    site.dialog.get_by_label("Definition").fill("{}")
    site.dialog.get_by_role("button", name="Save").click()
    site.dialog.get_by_role("alert").wait_for()
    site.dialog.get_by_label("Definition").fill(json.dumps(ends | {"dest-queue": "page.moved"}))
    site.sure("Save")
    until(lambda: ready(ask, "page.moved") == 1, "the message is not moved")
    site.see("running")
    site.press("Delete…")
    site.sure("Delete")
    until(lambda: ask("GET", "shovels") == [], "the shovel is still there")
    ask("DELETE", "queues/%2F/page.moved")


def test_bindings_are_made_drawn_and_removed(site: Site, ask: Ask, queue: str) -> None:
    ask("PUT", "exchanges/%2F/page.x", {"type": "topic"})
    site.open("#/exchange/%2F/page.x", "page.x")
    site.tab.get_by_role("region", name="Bindings from here").get_by_role(
        "button", name="Bind…"
    ).click()
    site.dialog.get_by_label("Its name").fill(queue)
    site.dialog.get_by_label("Routing key").fill("order.#")
    site.sure("Bind")
    site.tab.locator("svg a.box.queue text").get_by_text(queue[:20]).wait_for()
    site.open("#/bindings", "Binding graph")
    site.tab.locator("svg a.box.exchange text").get_by_text("page.x").wait_for()
    site.open("#/exchange/%2F/page.x", "page.x")
    site.press("Unbind…")
    site.sure("Unbind")
    site.see("There is no binding.")
    ask("DELETE", "exchanges/%2F/page.x")


def test_a_topic_is_split_and_merged_by_clicks(site: Site, ask: Ask) -> None:
    ask("PUT", "topics/%2F/page.topic", {"partitions": 2, "logical": 64})
    site.open("#/topic/%2F/page.topic", "page.topic")
    open_ones = site.tab.locator(".route .span.open")
    open_ones.nth(1).wait_for()
    open_ones.first.click()
    site.press("Split…")
    site.sure("Split")
    open_ones.nth(2).wait_for()
    open_ones.nth(0).focus()
    first = int(open_ones.nth(0).get_attribute("data-pid"))
    rows = ask("GET", "topics/%2F/page.topic/route")
    low = next(row for row in rows if row["pid"] == first)
    neighbour = next(row for row in rows if low["hi"] == row["lo"] or row["hi"] == low["lo"])
    site.tab.keyboard.press("Enter")
    site.tab.locator(f'.span.open[data-pid="{neighbour["pid"]}"]').press("Enter")
    until(lambda: ask("GET", "topics/%2F/page.topic")["latest_change"]["is_finished"], "no end")
    site.press("Merge…")
    site.sure("Merge")
    until(lambda: len(ask("GET", "topics/%2F/page.topic/route")) == 2, "the merge has no end")
    ask("DELETE", "topics/%2F/page.topic")


def test_what_a_user_may_not_do_is_not_offered_or_refused_in_one_line(
    visit: Visit, ask: Ask, queue: str
) -> None:
    ask("PUT", "users/anna", {"password": "anna", "tags": "management"})
    ask("PUT", "permissions/%2F/anna", {"configure": "^anna", "write": ".*", "read": ".*"})
    site = visit()
    site.log_in("anna", "anna")
    site.see("Overview")
    menu = site.tab.get_by_role("navigation", name="Main")
    assert menu.get_by_text("Queues", exact=True).count() == 1
    for hidden in ("Nodes", "Users", "Broker groups", "Audit"):
        assert menu.get_by_text(hidden, exact=True).count() == 0, hidden
    site.open("#/users", "Not permitted")
    site.open("#/policies", "Policies")
    assert site.tab.get_by_role("button", name="New…").count() == 0
    site.open(f"#/queue/%2F/{queue}", queue[:40])
    site.press("Delete…", within=".page-head")
    site.dialog.get_by_role("button", name="Delete", exact=True).click()
    refusal = site.dialog.get_by_role("alert")
    refusal.wait_for()
    assert "\n" not in refusal.inner_text()
    assert "anna" in refusal.inner_text()
    ask("DELETE", "users/anna")


def test_names_of_any_kind_are_only_text(site: Site, ask: Ask) -> None:
    ask("PUT", "exchanges/%2F/page.hostile", {"type": "headers"})
    for name in HOSTILE:
        ask("PUT", f"queues/%2F/{quoted(name)}", {"arguments": {"x-queue-type": "classic"}})
        binding = {"routing_key": name, "arguments": {name[:100]: name}}
        ask("POST", f"bindings/%2F/e/page.hostile/q/{quoted(name)}", binding)
        publish(ask, name, name)
    site.open("#/queues", "Queues")
    for name in HOSTILE:
        site.tab.get_by_role("row").filter(has_text=name.strip()[:20]).first.wait_for()
        site.open(f"#/queue/%2F/{quoted(name)}")
        site.see("running")
        site.open(f"#/queue/%2F/{quoted(name)}?tab=rules")
        site.see("Routing key")
        site.open("#/queues", "Queues")
    site.open("#/exchange/%2F/page.hostile", "page.hostile")
    site.tab.locator("svg a.box.queue").nth(len(HOSTILE) - 1).wait_for()
    site.tab.keyboard.press("/")
    site.dialog.get_by_role("combobox").fill("<script>")
    site.dialog.get_by_role("option").first.wait_for()
    site.tab.keyboard.press("Enter")
    site.tab.get_by_role("heading", level=1).filter(has_text="<script>").wait_for()
    injected = "document.querySelectorAll('#app script, #app img:not([src=\"icon.svg\"]), #app b')"
    assert site.tab.evaluate(f"{injected}.length") == 0
    ask("DELETE", "exchanges/%2F/page.hostile")
    for name in HOSTILE:
        ask("DELETE", f"queues/%2F/{quoted(name)}")


def test_many_queues_come_in_pages_of_the_server(site: Site, ask: Ask) -> None:
    ask("PUT", "vhosts/many")
    ask("PUT", "permissions/many/guest", dict.fromkeys(("configure", "write", "read"), ".*"))
    classic = {"vhost": "many", "durable": True, "auto_delete": False}
    rows = [
        {"name": f"q{n:05}", "arguments": {"x-queue-type": "classic"}, **classic}
        for n in range(QUEUES)
    ]
    for start in range(0, QUEUES, 1000):
        ask("POST", "definitions", {"queues": rows[start : start + 1000]})
    site.tab.reload()
    site.tab.get_by_label("Virtual host").select_option("many")
    site.open("#/queues?sort=name", "Queues")
    site.tab.get_by_label("Rows per page").select_option("25")
    site.see("q00024")
    assert site.tab.get_by_text("q00025").count() == 0
    site.press("Next page")
    site.see("q00025")
    site.tab.get_by_placeholder("Filter by name").fill(f"{QUEUES - 1:05}")
    site.tab.get_by_role("row").filter(has_text=f"q{QUEUES - 1:05}").wait_for()
    site.see(f"1 of {QUEUES:,}")
    site.tab.get_by_label("Virtual host").select_option("")
    ask("DELETE", "vhosts/many")


def test_a_killed_leader_is_seen_and_the_page_goes_on(
    visit: Visit, ask: Ask, cluster: LocalCluster, queue: str
) -> None:
    publish(ask, queue, "kept")
    leader = cluster.leader_of(queue)
    site = visit(node=next(n.number for n in cluster.nodes if n.number != leader))
    site.log_in()
    site.see("Overview")
    site.open(f"#/queue/%2F/{queue}", queue[:40])
    site.see("3/3")
    cluster.kill(leader)
    try:
        site.see("2/3")
        until(lambda: cluster.leader_of(queue) not in (0, leader), "no new leader")
        site.see("leader")
        site.open(f"#/queue/%2F/{queue}?tab=messages")
        site.see("kept")
        site.open("#/overview", "Overview")
        site.see("is not running")
        site.tab.locator(".map-node.down").wait_for()
    finally:
        start_nodes(cluster, leader)
    site.tab.locator(".map-node.down").wait_for(state="detached")
    assert ready(ask, queue) == 1


def test_events_bring_what_changes_and_without_a_stream_the_page_asks(
    site: Site, ask: Ask, queue: str
) -> None:
    asked: list[str] = []
    site.tab.on("request", lambda request: asked.append(request.url))
    site.open(f"#/queues?name={queue}", "Queues")
    site.see("live", within="header.top")
    row = site.tab.get_by_role("row").filter(has_text=queue[:20])
    lists = sum("/api/queues?" in url for url in asked)
    publish(ask, queue, "one", "two")
    row.get_by_role("cell", name="2", exact=True).first.wait_for()
    assert sum("/api/queues?" in url for url in asked) == lists
    assert sum("/api/events?" in url for url in asked) <= 2
    site.open("#/definitions", "Definitions")
    with contextlib.ExitStack() as streams:

        def take() -> bool:
            stream = httpx.stream(
                "GET", f"{site.url}api/events", auth=("guest", "guest"), timeout=PATIENCE_S
            )
            return streams.enter_context(stream).status_code == 200

        for _ in range(8):
            until(take, "the page still has its stream")
        site.open(f"#/queues?name={queue}", "Queues")
        site.see("polling", within="header.top")
        publish(ask, queue, "three")
        row.get_by_role("cell", name="3", exact=True).first.wait_for()
    site.see("live", within="header.top")


def test_the_page_says_that_its_node_is_away(visit: Visit, cluster: LocalCluster) -> None:
    site = visit(node=3)
    site.log_in()
    site.open("#/overview", "Overview")
    cluster.kill(3)
    try:
        site.see("no answer", within="header.top")
    finally:
        start_nodes(cluster, 3)
    # Sessions end with their node: the page asks who is there.
    site.tab.get_by_role("button", name="Log in").wait_for()


def test_keys_lead_everywhere(site: Site, ask: Ask, queue: str) -> None:
    for key, title in (("q", "Queues"), ("e", "Exchanges"), ("n", "Nodes"), ("o", "Overview")):
        site.tab.keyboard.press("g")
        site.tab.keyboard.press(key)
        site.tab.get_by_role("heading", level=1).filter(has_text=title).wait_for()
    site.tab.keyboard.press("/")
    site.dialog.get_by_role("combobox").fill(queue)
    site.dialog.get_by_role("option").filter(has_text=queue[:30]).first.wait_for()
    site.tab.keyboard.press("Enter")
    site.tab.get_by_role("heading", level=1).filter(has_text=queue).wait_for()
    site.press("Publish…")
    site.tab.keyboard.press("Escape")
    site.dialog.wait_for(state="detached")


def test_the_colours_can_be_chosen_and_are_remembered(site: Site) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = site.tab.evaluate(paper)
    site.tab.get_by_role("button", name="Colours: auto. Change").click()
    assert site.tab.evaluate(paper) != light
    site.tab.reload()
    site.see("Overview")
    assert site.tab.evaluate(paper) != light


def test_flow_has_rates_and_the_names_that_clients_gave(
    site: Site, ask: Ask, queue: str, cluster: LocalCluster
) -> None:
    ask("PUT", "exchanges/%2F/page.flow", {"type": "fanout"})
    ask("POST", f"bindings/%2F/e/page.flow/q/{queue}", {})
    clients = Clients([node.amqp_port for node in cluster.nodes])
    clients.publish("cash desk", "page.flow", [""], 50, {})
    clients.consume("book keeper", queue)
    try:
        site.open(f"#/queue/%2F/{queue}", queue[:40])
        site.tab.locator(".edge.strong text").filter(has_text="/s").nth(1).wait_for()
        site.tab.get_by_role("link", name="book keeper (1)").first.wait_for()
        far = """() => Math.max(...[...document.querySelectorAll('.edge')].map(edge => {
            const label = edge.querySelector('g').transform.baseVal[0].matrix;
            const path = edge.querySelector('path');
            const all = Array.from({length: 401}, (_, i) =>
                path.getPointAtLength(path.getTotalLength() * i / 400));
            return Math.min(...all.map(at => Math.hypot(at.x - label.e, at.y - label.f)));
        }))"""
        assert site.tab.evaluate(far) < 2, "a label lies beside its line"
        site.open("#/exchange/%2F/page.flow", "page.flow")
        site.tab.get_by_role("link", name="cash desk (1)").wait_for()
    finally:
        clients.stop()
    ask("DELETE", "exchanges/%2F/page.flow")


def test_a_list_of_queues_has_its_columns_on_a_screen_of_1440(site: Site, queue: str) -> None:
    site.open("#/queues", "Queues")
    for name in ("Leader", "Members", "Sched.", "Dead", "Bytes", "Memory"):
        site.tab.get_by_role("columnheader", name=name).wait_for()
    over = "document.querySelector('main .scroll').scrollWidth - " \
        "document.querySelector('main .scroll').clientWidth"  # fmt: skip
    assert site.tab.evaluate(over) <= 0


def test_a_node_says_what_uses_memory_in_words(site: Site, ask: Ask) -> None:
    name = ask("GET", "nodes")[0]["name"].replace("@", "%40")
    site.open(f"#/node/{name}")
    site.see("The rest")
    texts = site.tab.locator("main .facts > div").all_inner_texts()
    assert not [text for text in texts if "_procs" in text or text.endswith("\n0 B")]


def test_machines_of_several_processes_are_a_table(visit: Visit) -> None:
    """The answers of three nodes, as if two of them were processes of one machine."""
    site = visit()

    def answer(change: Callable[[list[Any]], object]) -> Callable[[Any], None]:
        def act(route: Any) -> None:
            rows = route.fetch().json()
            route.fulfill(json=change(rows))

        return act

    def split(rows: list[Any]) -> object:
        rows[1] |= {"machine": 1, "process": 2}
        return rows

    def join(rows: list[Any]) -> object:
        rows[0] |= {"nodes": [1, 2], "processes_running": 1}
        return [rows[0], rows[2]]

    site.tab.route("**/api/events*", lambda route: route.abort())
    site.tab.route("**/api/nodes", answer(split))
    site.tab.route("**/api/convoy/machines", answer(join))
    site.log_in()
    site.see("Overview")
    site.open("#/nodes", "Nodes")
    table = site.tab.get_by_role("region", name="Machines").first
    table.get_by_text("1 of 2 run").wait_for()
    table.get_by_text("1 of 1 run").wait_for()


def test_a_broker_group_says_what_clients_may_and_leads_to_offsets(visit: Visit) -> None:
    site = visit()
    replica = {"id": "0", "address": "127.0.0.1:1", "running": True, "lag": 0, "log_end": 9}
    group = {"name": "n", "cluster": "c", "master": "127.0.0.1:1", "acting": None, "members": ["0"]}
    topic = {"name": "t", "read_queues": 1, "write_queues": 1, "permission": 6, "system": False}
    queue = {"queue": 0, "min_offset": 3, "max_offset": 17, "last_stored_ms": 0}
    for path, value in (
        ("n", group | {"replicas": [replica]}),
        ("n/topics", [topic, topic | {"name": "closed", "permission": 1}]),
        ("n/topics/t", {"name": "t", "queues": [queue], "consumer_groups": ["g"]}),
    ):
        site.tab.route(
            f"**/api/broker-groups/{path}", lambda route, *, value=value: route.fulfill(json=value)
        )
    site.log_in()
    site.see("Overview")
    site.open("#/group/n", "n")
    site.see("read, write")
    site.see("nothing")
    site.tab.get_by_role("link", name="t", exact=True).click()
    site.see("Offsets of t")
    site.see("17")


def test_members_of_a_group_have_the_names_that_clients_gave(
    site: Site, ask: Ask, cluster: LocalCluster
) -> None:
    ask("PUT", "topics/%2F/page.named", {"partitions": 1, "logical": 16})
    ask("PUT", "topics/%2F/page.named/groups/desk", {})
    clients = Clients([node.amqp_port for node in cluster.nodes])
    clients.consume("desk clerk", "page.named/desk")
    try:
        site.open("#/topic/%2F/page.named?group=desk", "desk")
        site.tab.get_by_role("link", name="desk clerk (1)").wait_for()
    finally:
        clients.stop()
    ask("DELETE", "topics/%2F/page.named")


def test_the_map_of_the_cluster_fits_a_phone(visit: Visit) -> None:
    site = visit("phone")
    site.log_in()
    site.open("#/nodes", "Nodes")
    site.tab.locator("svg.map .map-node").nth(2).wait_for()
    over = "document.querySelector('svg.map').getBoundingClientRect().right - innerWidth"
    assert site.tab.evaluate(over) <= 0


def test_the_last_audit_is_shown_with_what_it_could_not_prove(site: Site, ask: Ask) -> None:
    site.open("#/audit", "Audit")
    site.see("No proof was reported yet")
    found = {
        "at_ms": 1_700_000_000_000, "text": "2 violations", "violations": 2, "proved": False,
        "rows": 12_345, "queues": ["<b>orders</b> (/)"], "queue_count": 21,
        "invariants": [
            {"number": 1, "title": "replicas decide the same", "violations": 0, "unproved": 0},
            {"number": 4, "title": "publishes keep their order", "violations": 2, "unproved": 7},
        ],
    }  # fmt: skip
    ask("PUT", "global-parameters/convoymq-last-audit", {"value": found})
    try:
        site.open("#/queues", "Queues")
        site.open("#/audit", "Audit")
        for text in ("2 violations", "12,345 rows of the traces of 21 queues: <b>orders</b> (/) …"):
            site.see(text)
        site.see("publishes keep their order")
        assert "replicas decide the same" not in site.tab.locator("main").inner_text()
    finally:
        ask("DELETE", "global-parameters/convoymq-last-audit")
