"""Tokens of a real OpenID provider, in this process, on a cluster of three nodes."""

from __future__ import annotations

import contextlib
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import flask
import httpx
import jwt
import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from oidc_provider_mock import User  # type: ignore[import-untyped]
from oidc_provider_mock._app import app as make_provider  # type: ignore[import-untyped]
from werkzeug.serving import BaseWSGIServer, make_server

from convoymq.cli.cluster import LocalCluster
from tests.clusters import answered, call, serving_cluster
from tests.faults.test_administration import until_closed
from tests.faults.traffic import until
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports
from tests.provocation import Observed

pytestmark = [
    pytest.mark.cluster,
    # Of the provider, about libraries of its own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BASE_PORT = cluster_ports(__name__)
CLIENT = "rabbitmq"
SCOPES = {
    "ann": ["rabbitmq.configure:*/ann-*", "rabbitmq.write:*/*", "rabbitmq.read:%2F/{sub}-*"],
    "ada": ["all"],
    "eve": ["other.read:*/*"],
}


@dataclass
class Provider:
    """The provider, which can go away and come back, and take another key."""

    port: int
    storage: Any = None
    app: flask.Flask = field(init=False)
    server: BaseWSGIServer | None = None

    def __post_init__(self) -> None:
        users = [User(sub=name, claims={"scope": scopes}) for name, scopes in SCOPES.items()]
        self.app = make_provider(user_claims=users)

        @self.app.before_request
        def keep_storage() -> None:
            self.storage = flask.g.oidc_provider_mock_storage

    @property
    def issuer(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.server = make_server("127.0.0.1", self.port, self.app, threaded=True)
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(self.server.serve_forever, 0.05)

    def stop(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.pool.shutdown()
            self.server = None

    def log_in(self, name: str) -> str:
        """The token that a user gets who logs in with a browser."""
        place = {
            "client_id": CLIENT,
            "redirect_uri": "http://127.0.0.1/back",
            "response_type": "code",
            "scope": "openid",
        }
        with httpx.Client(base_url=self.issuer) as browser:
            sent_back = browser.post("/oauth2/authorize", params=place, data={"sub": name})
            (code,) = parse_qs(urlsplit(sent_back.headers["location"]).query)["code"]
            form = {"grant_type": "authorization_code", "code": code, **place, "client_secret": "x"}
            answer = browser.post("/oauth2/token", data=form)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["id_token"])

    def rotate(self) -> None:
        """Signs with a new key from now on; the old one is no longer published."""
        self.storage.jwk = type(self.storage.jwk).generate_key(is_private=True)

    @property
    def key(self) -> RSAPrivateKey:
        key: RSAPrivateKey = self.storage.jwk.private_key
        return key

    @property
    def kid(self) -> str:
        """Name of the present key; tokens of `log_in` name none."""
        return str(self.storage.jwk.as_dict()["kid"])

    def sign(
        self, *, headers: Any = None, key: Any = None, alg: str = "RS256", **claims: Any
    ) -> str:
        """A token that the provider could have made, but for the claims that are given."""
        made = {
            "iss": self.issuer,
            "sub": "ann",
            "aud": CLIENT,
            "exp": int(time.time()) + 600,
            "scope": SCOPES["ann"],
        } | claims
        made = {name: value for name, value in made.items() if value is not None}
        return jwt.encode(made, key or self.key, alg, headers=headers or {"kid": self.kid})


@dataclass
class Setup:
    cluster: LocalCluster
    provider: Provider
    directory: Path


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    directory = tmp_path_factory.mktemp("oauth2")
    provider = Provider(BASE_PORT + 40)
    provider.start()
    provider.log_in("ann")
    settings = {
        "auth_backends.1": "oauth2",
        "auth_backends.2": "internal",
        "auth_oauth2.resource_server_id": CLIENT,
        "auth_oauth2.issuer": provider.issuer,
        "auth_oauth2.scope_aliases.all": "rabbitmq.tag:administrator rabbitmq.configure:*/* "
        "rabbitmq.write:*/*/* rabbitmq.read:*/*",
    }
    try:
        with serving_cluster(directory / "cluster", BASE_PORT, settings) as cluster:
            yield Setup(cluster, provider, directory / "cluster")
    finally:
        provider.stop()


@pytest.fixture(autouse=True)
def answering(setup: Setup) -> Iterator[None]:
    yield
    if setup.provider.server is None:
        setup.provider.start()


def dial(setup: Setup, token: str, node: int = 1, name: str = "") -> Any:
    return pika.BlockingConnection(
        pika.ConnectionParameters(
            "127.0.0.1",
            setup.cluster.nodes[node - 1].amqp_port,
            credentials=pika.PlainCredentials(name, token),
            heartbeat=0,
            socket_timeout=PATIENCE_S,
            blocked_connection_timeout=PATIENCE_S,
        )
    )


def bearer(setup: Setup, token: str, path: str = "whoami", node: int = 1) -> tuple[int, Any]:
    port = setup.cluster.nodes[node - 1].http_port
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/{path}", headers={"authorization": f"Bearer {token}"}
    )
    try:
        with answered(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.provokes("identity.keys_fetched")
def test_a_token_is_a_password_whose_scopes_are_permissions(
    setup: Setup, observed: Observed
) -> None:
    token = setup.provider.log_in("ann")
    connection = dial(setup, token)
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("ann-orders", durable=True)
    channel.basic_publish("", "ann-orders", b"1")
    assert channel.basic_get("ann-orders", auto_ack=True)[2] == b"1"
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="configure access to queue"):
        channel.queue_declare("bob-orders", durable=True)
    connection.close()
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError, match="access to vhost '/'"):
        dial(setup, setup.provider.log_in("eve"))
    guest = dial(setup, "guest", name="guest")
    guest.close()
    observed.log_files(setup.directory)


def test_the_api_takes_tokens(setup: Setup) -> None:
    token = setup.provider.log_in("ada")
    assert bearer(setup, token) == (200, {"name": "ada", "tags": ["administrator"]})
    assert bearer(setup, token, "users")[0] == 200
    status, body = bearer(setup, setup.provider.log_in("ann"))
    assert (status, body["reason"]) == (401, "Not management user")
    # The page logs in with the token as password.
    port = setup.cluster.nodes[0].http_port
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/api") as browser:
        row = browser.post("/login", json={"username": "", "password": token}).json()
        assert (row["name"], row["is_administrator"]) == ("ada", True)
        csrf = {"x-convoy-csrf": row["csrf"]}
        assert browser.put("/vhosts/made-by-ada", json={}, headers=csrf).status_code == 201
        assert browser.delete("/vhosts/made-by-ada", headers=csrf).status_code == 204


@pytest.mark.provokes("identity.refused")
def test_bad_tokens_are_refused(setup: Setup, observed: Observed) -> None:
    sign, key = setup.provider.sign, setup.provider.key
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    now = int(time.time())
    good = sign()
    head, body, signature = good.split(".")
    kid = {"kid": setup.provider.kid}
    other = generate_private_key(65537, 2048)
    # PyJWT refuses to sign with a public key as if it were a secret: so by hand.
    confused = _hmac_signed(json.dumps({"alg": "HS256", **kid}), body, public)
    bad = {
        "audience": sign(aud="another"),
        "no audience": sign(aud=None),
        "issuer": sign(iss="http://127.0.0.1:1"),
        "no issuer": sign(iss=None),
        "expired": sign(exp=now - 1),
        "no end": sign(exp=None),
        "end is a text": sign(exp="soon"),
        "not yet": sign(nbf=now + 300),
        "none": jwt.encode(jwt.decode(good, options={"verify_signature": False}), "", "none", kid),
        "confused": confused,
        "another key": sign(key=other),
        "unknown key": sign(key=other, headers={"kid": "stranger"}),
        "changed": f"{head}.{body[:-4]}AAAA.{signature}",
        "cut": f"{head}.{body}.",
        "long": sign(scope=["x" * 70_000]),
        "no token": "ey.x.y",
    }
    assert bearer(setup, sign(nbf=now + 30, sub="skewed", scope=["all"]))[0] == 200
    with ThreadPoolExecutor(len(bad)) as pool:
        found = dict(
            zip(bad, pool.map(lambda token: bearer(setup, token), bad.values()), strict=True)
        )
    expected = (401, {"error": "not_authorized", "reason": "Login failed"})
    assert found == dict.fromkeys(bad, expected)
    with pytest.raises(pika.exceptions.ProbableAuthenticationError):
        dial(setup, bad["expired"])
    observed.log_files(setup.directory)
    # Nothing of a token is in the log.
    for path in setup.directory.rglob("*.log*"):
        assert good.split(".")[2] not in path.read_text()


def _hmac_signed(header: str, body: str, secret: bytes) -> str:
    import base64
    import hashlib
    import hmac

    def encoded(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    text = f"{encoded(header.encode())}.{body}"
    return f"{text}.{encoded(hmac.digest(secret, text.encode(), hashlib.sha256))}"


@pytest.mark.provokes("identity.expired")
def test_a_connection_ends_with_its_token_unless_it_is_renewed(
    setup: Setup, observed: Observed
) -> None:
    soon = int(time.time()) + 8
    connection = dial(setup, setup.provider.sign(exp=soon), node=2)
    doomed = dial(setup, setup.provider.sign(exp=soon), node=3)
    channel = connection.channel()
    connection.update_secret(setup.provider.sign(exp=soon + 600), "rotation")
    assert until_closed(doomed) == (320, "CONNECTION_FORCED - credential expired")
    channel.queue_declare("ann-renewed", durable=True)
    # Fewer scopes count at once.
    connection.update_secret(setup.provider.sign(scope=["rabbitmq.read:*/x"]), "rotation")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="configure access"):
        channel.queue_declare("ann-other", durable=True)
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as refused:
        connection.update_secret(setup.provider.sign(sub="ada"), "rotation")
    assert refused.value.args == (
        530, "NOT_ALLOWED - New secret was refused by one of the backends"
    )  # fmt: skip
    observed.log_files(setup.directory)


@pytest.mark.provokes("identity.keys_not_fetched")
def test_keys_rotate_and_outlive_their_provider(setup: Setup, observed: Observed) -> None:
    provider = setup.provider
    old = provider.log_in("ada")
    nodes = (1, 2, 3)
    assert [bearer(setup, old, node=node)[0] for node in nodes] == [200] * 3
    former = provider.kid
    provider.rotate()
    assert provider.kid != former
    new = provider.sign(sub="ada", scope=["all"])
    # An unknown key is asked for; the one that is no longer published ends with that.
    for node in nodes:
        until(lambda: bearer(setup, new, node=node)[0] == 200, "the new key is not known")  # noqa: B023
        assert bearer(setup, old, node=node)[0] == 401
    provider.stop()
    assert [bearer(setup, new, node=node)[0] for node in nodes] == [200] * 3
    stranger = provider.sign(headers={"kid": "stranger"})

    def has_tried() -> bool:
        assert bearer(setup, stranger)[0] == 401
        observed.log_files(setup.directory)
        return "identity.keys_not_fetched" in observed.events

    until(has_tried, "the provider that is gone was not asked")
    assert bearer(setup, new)[0] == 200
    nameless = provider.sign(headers={"x": "no name of a key"}, sub="ada", scope=["all"])
    assert bearer(setup, nameless)[0] == 200
    assert call(setup.cluster, "GET", "whoami")[0] == 200


def test_a_node_that_comes_back_reads_the_keys_again(setup: Setup) -> None:
    token = setup.provider.log_in("ada")
    setup.cluster.kill(3, signal.SIGKILL)
    setup.cluster.start_node(3)

    def serves() -> bool:
        with contextlib.suppress(OSError):
            return bearer(setup, token, node=3)[0] == 200
        return False

    until(serves, "the node does not admit the token")
