"""Authentication of requests: a name and password (basic), a token (bearer), or the cookie of a
session."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections import Counter
from dataclasses import dataclass, field
from secrets import compare_digest
from typing import NoReturn
from urllib.parse import urlsplit

import structlog
from starlette.requests import Request

from convoymq.broker.access import HTTP
from convoymq.broker.facade import Broker
from convoymq.broker.records import User
from convoymq.edges.http.bodies import ApiError
from convoymq.edges.http.served import Served
from convoymq.edges.http.sessions import Session, Sessions
from convoymq.edges.http.times import HOLD_BACK
from convoymq.edges.sasl import Credentials, Login
from convoymq.model.errors import AccessRefused

log = structlog.get_logger()

LOGIN_TAGS = frozenset({"management", "policymaker", "monitoring", "administrator"})
WWW_AUTHENTICATE = 'Basic realm="RabbitMQ Management"'
CSRF_HEADER = "x-convoy-csrf"
SAFE_METHODS = frozenset({"GET", "HEAD"})


@dataclass(slots=True)
class Authentication:
    """Log-ins of the HTTP API of one node."""

    broker: Broker
    served: Served
    login: Login = field(init=False)
    sessions: Sessions = field(init=False)
    streams: Counter[str] = field(default_factory=Counter)
    """Open streams of events, by user."""

    def __post_init__(self) -> None:
        self.login = Login(self.broker.access, self.served.login, HTTP)
        self.sessions = Sessions(
            self.broker.access.present, self.served.session_timeout_s, time.monotonic
        )

    async def user_of(self, request: Request) -> User:
        """Returns the user of a request. Raises ApiError."""
        given = request.headers.get("authorization")
        if given is None:
            return self._user_of_session(request)
        try:
            credentials = _credentials(given)
        except ValueError:
            await self._refuse(request, "", "malformed credentials")
        return await self.log_in(request, credentials)

    async def log_in(self, request: Request, credentials: Credentials) -> User:
        """Returns the user with these credentials. Raises ApiError."""
        try:
            user = await self.login.user(credentials, _peer(request))
        except AccessRefused as error:
            await self._refuse(request, credentials.user, error.text)
        return _checked(user)

    def is_still(self, request: Request, user: User) -> bool:
        """Returns whether a request that was let in would still be."""
        present = self.broker.access.present(user)
        return (
            present is not None
            and present.password_hash == user.password_hash
            and bool(LOGIN_TAGS.intersection(present.tags))
            and ("authorization" in request.headers or self.session_of(request) is not None)
        )

    def session_of(self, request: Request) -> Session | None:
        """Returns the session that the cookie of a request names."""
        token = _token(request)
        return self.sessions.find(token) if token else None

    def begin(self, request: Request, user: User) -> tuple[Session, dict[str, str]]:
        """Opens a session. Returns it with the header that gives the browser its cookie."""
        former = self.session_of(request)
        if former is not None:
            self.sessions.close(former.token)
        session = self.sessions.open(user)
        return session, _cookie(request, session.token, self.sessions.left_s(session))

    def end(self, request: Request) -> dict[str, str]:
        """Ends the session of a request. Returns the header that removes the cookie. Raises
        ApiError."""
        self._user_of_session(request)
        self.sessions.close(_token(request))
        return _cookie(request, "", 0)

    def _user_of_session(self, request: Request) -> User:
        session = self.session_of(request)
        user = None if session is None else self.sessions.user_of(session.token)
        if session is None or user is None:
            # A browser asks without a name first, to hear that one is wanted.
            raise ApiError(401, "not_authorized", "Login failed")
        if request.method not in SAFE_METHODS:
            given = request.headers.get(CSRF_HEADER, "")
            if not compare_digest(given.encode(), session.csrf.encode()):
                reason = f"the header {CSRF_HEADER} is missing, or of another session"
                raise ApiError(403, "forbidden", reason)
        return _checked(user)

    async def _refuse(self, request: Request, name: str, reason: str) -> NoReturn:
        log.warning("management.login_refused", peer=_peer(request), user=name, reason=reason)
        hold_back = request.scope.get(HOLD_BACK, asyncio.sleep)
        await hold_back(self.login.config.failed_login_delay_s)
        raise ApiError(401, "not_authorized", "Login failed")


def challenge(request: Request) -> dict[str, str]:
    """Returns the headers of a refused log-in. A script gets no `WWW-Authenticate`, because the
    browser would ask for a name and password in a window of its own."""
    is_script = (
        request.headers.get("x-requested-with", "").lower() == "xmlhttprequest"
        or request.headers.get("accept", "").startswith("text/event-stream")
        or request.headers.get("sec-fetch-dest", "document") != "document"
        or bool(_token(request))
    )
    return {} if is_script else {"www-authenticate": WWW_AUTHENTICATE}


def check_origin(request: Request) -> None:
    """Refuses a request that a page of another site makes a browser send. Raises ApiError."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise ApiError(403, "forbidden", "the request comes from a page of another site")


def _checked(user: User) -> User:
    if not LOGIN_TAGS.intersection(user.tags):
        raise ApiError(401, "not_authorized", "Not management user")
    return user


def _peer(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _credentials(header: str) -> Credentials:
    """Returns the name and password of basic authentication, or a token. Raises ValueError."""
    kind, _, encoded = header.partition(" ")
    if kind.lower() == "bearer":
        return Credentials("", encoded.strip().encode())
    if kind.lower() != "basic":
        raise ValueError(kind)
    try:
        name, separator, password = base64.b64decode(encoded).partition(b":")
    except binascii.Error as error:
        raise ValueError(str(error)) from None
    if not separator:
        raise ValueError("no password")
    return Credentials(name.decode(), password)


# --- cookies -----------------------------------------------------------------------------------


def _cookie_name(request: Request) -> str:
    # Browsers send a cookie to all ports of a host, where other nodes may listen.
    _, port = request.scope.get("server") or ("", None)
    return f"convoy-session-{port or 0}"


def _token(request: Request) -> str:
    return request.cookies.get(_cookie_name(request), "")


def _cookie(request: Request, token: str, max_age_s: int) -> dict[str, str]:
    secure = "; Secure" if request.scope.get("scheme") == "https" else ""
    return {
        "set-cookie": f"{_cookie_name(request)}={token}; Path=/; Max-Age={max_age_s}; HttpOnly; "
        f"SameSite=Strict{secure}"
    }
