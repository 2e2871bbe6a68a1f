"""Every route of the HTTP API with every kind of user: who gets in, and who is turned away.

The tables say by hand what each route asks for, so that a route that forgets its check, or one that
is new, fails here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from convoymq.edges.http.handlers import ROUTES
from tests.unit.edges.http.test_api import client, ok
from tests.unit.queues.fake_cluster import FakeCluster

ADMINISTRATOR = """
POST convoy/copies/topics/{vhost}/{name}
POST convoy/copies/queues/{vhost}/{name}
GET convoy/copies/queues/{vhost}/{name}
GET convoy/copies
POST convoy/node/config/reload
POST convoy/node/log/rotate
PUT convoy/node/log_level
DELETE shovels/vhost/{vhost}/{name}
DELETE shovels/vhost/{vhost}/{name}/restart
PUT cluster-name
GET auth/hash_password/{password}
GET DELETE auth/attempts/{node}
DELETE reset
DELETE reset/{node}
PUT feature-flags/{name}/enable
DELETE convoy/nodes/{node}
PUT convoy/node/watermarks
PUT DELETE operator-policies/{vhost}/{name}
PUT DELETE vhost-limits/{vhost}/{name}
GET user-limits
GET user-limits/{user}
PUT DELETE user-limits/{user}/{name}
PUT DELETE parameters/{component}/{vhost}/{name}
PUT DELETE global-parameters/{name}
GET POST all-configuration
GET POST definitions
GET POST definitions/{vhost}
DELETE connections/username/{user}
POST queues/quorum/{vhost}/{name}/replicas/add
DELETE queues/quorum/{vhost}/{name}/replicas/delete
POST queues/quorum/replicas/on/{node}/grow
POST queues/quorum/replicas/grow_to_count
DELETE queues/quorum/replicas/on/{node}/shrink
POST queues/quorum/{vhost}/{name}/leader/transfer
POST convoy/queues/{vhost}/{name}/memory/reclaim
POST convoy/queues/checkpoint
POST convoy/queues/force_boot
POST rebalance/queues
POST convoy/nodes/{node}/drain
POST convoy/nodes/{node}/revive
POST topics/{vhost}/{name}/seal
POST topics/{vhost}/{name}/declare-lost
POST topics/drain
GET convoy/topics/drains
DELETE convoy/topics/drains/{node}
PUT DELETE vhosts/{vhost}
POST DELETE vhosts/{vhost}/deletion/protection
GET vhosts/{vhost}/permissions
GET vhosts/{vhost}/topic-permissions
GET users
GET users/without-permissions
GET PUT DELETE users/{user}
POST users/bulk-delete
POST convoy/users/{user}/authenticate
GET users/{user}/permissions
GET users/{user}/topic-permissions
GET permissions
GET PUT DELETE permissions/{vhost}/{user}
GET topic-permissions
GET PUT DELETE topic-permissions/{vhost}/{user}
GET DELETE topic-permissions/{vhost}/{user}/{exchange}
"""
POLICYMAKER = """
PUT DELETE policies/{vhost}/{name}
GET parameters
GET parameters/{component}
GET parameters/{component}/{vhost}
GET parameters/{component}/{vhost}/{name}
GET global-parameters
GET global-parameters/{name}
"""
MONITORING = """
GET shovels
GET shovels/{vhost}
GET shovels/vhost/{vhost}/{name}
GET nodes
GET nodes/{node}
GET nodes/{node}/memory
GET nodes/{node}/memory/relative
GET convoy/nodes/{node}/groups
GET convoy/machines
GET convoy/node
GET convoy/metadata-store/status
GET convoy/rebalance
GET broker-groups
GET broker-groups/{name}
GET broker-groups/{name}/topics
GET broker-groups/{name}/topics/{topic}
"""
WITHOUT_LOGIN = {("POST", "login")}
STREAMS = {("GET", "events")}
"""Answers without an end; test_events.py has them."""
SESSIONS = {("DELETE", "login")}
"""Ends the session of a cookie, which these requests do not have."""
VHOST = "v"
OUTSIDER = "outsider"
"""A user with the tag `management`, and no permissions in any virtual host."""
TAGS = {
    "untagged": "",
    OUTSIDER: "management",
    "management": "management",
    "policymaker": "policymaker",
    "monitoring": "monitoring",
    "administrator": "administrator",
}


def table(text: str) -> set[tuple[str, str]]:
    """Routes of lines that are methods and a path."""
    return {
        (method, words[-1])
        for words in map(str.split, text.strip().splitlines())
        for method in words[:-1]
    }


NEEDED = {
    "administrator": table(ADMINISTRATOR),
    "policymaker": table(POLICYMAKER),
    "monitoring": table(MONITORING),
}
ENOUGH = {
    "administrator": {"administrator"},
    "policymaker": {"policymaker", "administrator"},
    "monitoring": {"monitoring", "administrator"},
}
KNOWN = {(method, "/".join(segments)) for method, segments, _ in ROUTES}


def may(user: str, route: tuple[str, str]) -> bool:
    """Whether the tags of a user are enough for a route."""
    for tag, routes in NEEDED.items():
        if route in routes:
            return user in ENOUGH[tag]
    return True


def path_of(template: str) -> str:
    """A path of a route: in a virtual host that exists, about things that do not."""
    parts = [
        VHOST if part == "{vhost}" else "none" if part.startswith("{") else part
        for part in template.split("/")
    ]
    return "/" + "/".join(parts)


async def make_users(api: httpx.AsyncClient) -> None:
    await ok(api.put(f"/vhosts/{VHOST}", json={}), 201)
    rules = dict.fromkeys(("configure", "write", "read"), ".*")
    for user, tags in TAGS.items():
        answer = await api.put(f"/users/{user}", json={"password": "p", "tags": tags})
        assert answer.status_code in (201, 204)
        if user != OUTSIDER:
            await ok(api.put(f"/permissions/{VHOST}/{user}", json=rules), 201)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, nodes=3) as made:
        yield made


def test_the_tables_name_routes_that_exist() -> None:
    for routes in NEEDED.values():
        assert routes <= KNOWN


@pytest.mark.parametrize(("user", "password"), [("", ""), ("administrator", "wrong"), ("no", "p")])
async def test_nobody_gets_in_without_the_right_password(
    cluster: FakeCluster, user: str, password: str
) -> None:
    async with client(cluster) as api:
        await make_users(api)
    async with client(cluster, user, password) as nobody:
        if not user:
            nobody.auth = httpx.Auth()
        for method, template in sorted(KNOWN - WITHOUT_LOGIN):
            answer = await nobody.request(method, path_of(template))
            assert (answer.status_code, answer.json()["reason"]) == (401, "Login failed"), template


@pytest.mark.parametrize("user", TAGS)
async def test_every_route_asks_for_its_tag(cluster: FakeCluster, user: str) -> None:
    async with client(cluster) as api, client(cluster, user, "p") as asking:
        await make_users(api)
        for method, template in sorted(KNOWN - WITHOUT_LOGIN - STREAMS - SESSIONS):
            body: object = {} if method in ("PUT", "POST") else None
            answer = await asking.request(method, path_of(template), json=body)
            status, said = answer.status_code, f"{method} {template}: {answer.text[:200]}"
            if user == "untagged":
                assert (status, answer.json()["reason"]) == (401, "Not management user"), said
            elif not may(user, (method, template)):
                assert status == 401, said
            elif user == OUTSIDER and "{vhost}" in template:
                assert status in (400, 401, 404), said
            else:
                assert status not in (401, 403, 500), said
            if (await api.get(f"/vhosts/{VHOST}")).status_code == 404:
                # The administrator has just deleted it.
                await make_users(api)
