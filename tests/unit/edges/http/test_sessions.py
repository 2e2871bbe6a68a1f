"""Sessions of browsers: how they begin and end, and what a request with a cookie may do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import httpx
import pytest

from convoymq.edges.http import sessions as sessions_module
from convoymq.edges.http.sessions import Sessions
from convoymq.metadata.machine import User
from tests.unit.edges.http.test_api import api, client, cluster, ok
from tests.unit.queues.fake_cluster import FakeCluster

__all__ = ["api", "cluster"]

GUEST = {"username": "guest", "password": "guest"}
NOT_LOGGED_IN = {"error": "not_authorized", "reason": "Login failed"}


@pytest.fixture
async def browser(cluster: FakeCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with client(cluster) as made:
        made.auth = None
        yield made


async def log_in(browser: httpx.AsyncClient, **given: str) -> dict[str, str]:
    """Returns the headers of later requests."""
    row = await ok(browser.post("/login", json=GUEST | given))
    return {"x-convoy-csrf": row["csrf"]}


# --- the table of sessions --------------------------------------------------------------------


class Table:
    def __init__(self) -> None:
        self.users = {name: User(name=name, password_hash="h") for name in "ab"}
        self.now_s = 0.0
        self.sessions = Sessions(lambda user: self.users.get(user.name), 60.0, lambda: self.now_s)


def test_a_session_ends_by_time_log_out_deletion_and_a_new_password() -> None:
    table = Table()
    tokens = [table.sessions.open(table.users["a"]).token for _ in range(2)]
    assert len(set(tokens)) == 2
    table.sessions.close(tokens[0])
    assert table.sessions.find(tokens[0]) is None
    assert table.sessions.find(tokens[1]) is not None
    table.now_s = 59.9
    assert table.sessions.find(tokens[1]) is not None
    table.now_s = 60.0
    assert table.sessions.find(tokens[1]) is None
    token = table.sessions.open(table.users["a"]).token
    table.users["a"] = User(name="a", password_hash="h", tags=("monitoring",))
    found = table.sessions.user_of(token)
    assert found is not None
    assert found.tags == ("monitoring",)
    table.users["a"] = User(name="a", password_hash="other")
    assert table.sessions.user_of(token) is None
    token = table.sessions.open(table.users["b"]).token
    del table.users["b"]
    assert table.sessions.user_of(token) is None
    assert len(table.sessions) == 0


def test_a_log_in_removes_sessions_that_have_ended() -> None:
    """It once ended with an error, because the table shrank while it was read."""
    table = Table()
    for _ in range(3):
        table.sessions.open(table.users["a"])
    del table.users["a"]
    table.sessions.open(table.users["b"])
    assert len(table.sessions) == 1


def test_the_oldest_session_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "USER_SESSIONS_MAX", 2)
    monkeypatch.setattr(sessions_module, "SESSIONS_MAX", 3)
    table = Table()
    of_b = table.sessions.open(table.users["b"]).token
    of_a = [table.sessions.open(table.users["a"]).token for _ in range(3)]
    assert [table.sessions.find(token) is None for token in (of_b, *of_a)] == [
        False, True, False, False,
    ]  # fmt: skip
    table.users["c"] = User(name="c")
    table.sessions.open(table.users["c"])
    assert table.sessions.find(of_b) is None
    assert len(table.sessions) == 3


# --- requests ---------------------------------------------------------------------------------


async def test_a_browser_logs_in_and_out(browser: httpx.AsyncClient) -> None:
    assert (await browser.get("/whoami")).json() == NOT_LOGGED_IN
    answer = await browser.post("/login", json=GUEST)
    row = answer.json()
    assert (row["name"], row["is_administrator"], row["vhosts"]) == ("guest", True, ["/"])
    cookie = answer.headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={row['expires_in_s']}"):
        assert part in cookie
    assert "Secure" not in cookie
    assert row["csrf"] not in cookie
    assert (await ok(browser.get("/whoami")))["name"] == "guest"
    assert (await ok(browser.get("/login")))["csrf"] == row["csrf"]
    await ok(browser.delete("/login"), 403)
    answer = await browser.delete("/login", headers={"x-convoy-csrf": row["csrf"]})
    assert (answer.status_code, "Max-Age=0" in answer.headers["set-cookie"]) == (204, True)
    assert (await browser.get("/whoami")).status_code == 401


async def test_a_form_logs_in_as_well(browser: httpx.AsyncClient) -> None:
    assert (await ok(browser.post("/login", data=GUEST)))["name"] == "guest"
    for body in (b"[]", b"", b'{"username": 5, "password": ""}', b'{"username": "guest"}'):
        await ok(browser.post("/login", content=body), 400)
    form = {"content-type": "application/x-www-form-urlencoded"}
    too_many = "&".join(f"a{n}=1" for n in range(99))
    await ok(browser.post("/login", content=too_many, headers=form), 400)
    await ok(browser.post("/login", content="a" * 99_999, headers=form), 400)


async def test_wrong_log_ins_are_refused(
    cluster: FakeCluster, api: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    await ok(api.put("/users/plain", json={"password": "p", "tags": ""}), 201)
    wrong = GUEST | {"password": "wrong"}
    assert await ok(browser.post("/login", json=wrong), 401) == NOT_LOGGED_IN
    plain = {"username": "plain", "password": "p"}
    assert (await ok(browser.post("/login", json=plain), 401))["reason"] == "Not management user"
    assert not browser.cookies
    async with client(cluster, peer="10.1.1.1") as far:
        await ok(far.post("/login", json=GUEST), 401)
    elsewhere = {"origin": "http://evil.example"}
    await ok(browser.post("/login", json=GUEST, headers=elsewhere), 403)
    await ok(browser.post("/login", json=GUEST, headers={"origin": "http://api"}))


async def test_a_change_needs_the_token_of_the_session(browser: httpx.AsyncClient) -> None:
    headers = await log_in(browser)

    def puts(**headers: str) -> Awaitable[Any]:
        return browser.put("/vhosts/v", json={}, headers=headers)

    assert (await ok(puts(), 403))["error"] == "forbidden"
    await ok(puts(**{"x-convoy-csrf": "other"}), 403)
    await ok(browser.put("/vhosts/v", headers={b"x-convoy-csrf": b"\xe4"}), 403)
    await ok(browser.put("/vhosts/v", json={}, headers=headers), 201)
    # Basic authentication needs none: no other site knows the password.
    await ok(browser.delete("/vhosts/v", auth=("guest", "guest")), 204)


async def test_a_session_ends_with_what_it_stands_for(
    api: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    for body, status, reason in (
        ({"password": "p", "tags": ""}, 204, "Not management user"),
        ({"password": "q", "tags": "management"}, 204, "Login failed"),
        (None, 204, "Login failed"),
    ):
        await ok(api.put("/users/u", json={"password": "p", "tags": "management"}), 201)
        rules = {"configure": "", "write": "", "read": ""}
        await ok(api.put("/permissions/%2F/u", json=rules), 201)
        row = await ok(browser.post("/login", json={"username": "u", "password": "p"}))
        assert (row["is_monitor"], row["vhosts"]) == (False, ["/"])
        if body is None:
            await ok(browser.delete("/users/u", auth=("guest", "guest")), status)
        else:
            hashed = await ok(api.get("/users/u"))
            if body["password"] == "p":
                body = {
                    "password_hash": hashed["password_hash"],
                    "hashing_algorithm": hashed["hashing_algorithm"],
                    "tags": "",
                }
            await ok(browser.put("/users/u", json=body, auth=("guest", "guest")), status)
        assert (await ok(browser.get("/whoami"), 401))["reason"] == reason
        if body is not None:
            await ok(api.delete("/users/u"), 204)


async def test_scripts_get_no_challenge(browser: httpx.AsyncClient) -> None:
    """A browser that gets one asks for a password in a window of its own."""
    for headers, challenged in (
        ({}, True),
        ({"sec-fetch-dest": "document"}, True),
        ({"sec-fetch-dest": "empty"}, False),
        ({"x-requested-with": "XMLHttpRequest"}, False),
        ({"accept": "text/event-stream"}, False),
        ({"cookie": "convoy-session-0=old"}, False),
    ):
        answer = await browser.get("/overview", headers=headers)
        assert answer.status_code == 401
        assert ("www-authenticate" in answer.headers) is challenged, headers


async def test_nodes_of_one_host_have_cookies_of_their_own(cluster: FakeCluster) -> None:
    async with client(cluster) as made:
        names = [
            (await made.post(f"{scheme}://api:{port}/api/login", json=GUEST)).headers["set-cookie"]
            for scheme, port in (("http", 15672), ("https", 15673))
        ]
    assert names[0].startswith("convoy-session-15672=")
    assert names[1].startswith("convoy-session-15673=")
    assert names[1].endswith("; Secure")
