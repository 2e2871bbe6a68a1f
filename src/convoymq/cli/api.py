"""Requests to the HTTP API of a node: addresses that users give, and texts for what goes wrong.

Every text names the address without user and password, the reason, and what to try.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from convoymq.model.errors import Misuse, Unavailable

USER_DEFAULT = "guest:guest"
_LISTENS = "`management.tcp.port` of a node names the port, 15672 without it"


class NoAnswer(Unavailable):
    """No answer of an HTTP API came; the text says from where, why, and what to try."""

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


def base_of(url: str, user: str = "") -> tuple[str, str]:
    """Returns the base of a URL that a user gave, and `user:password`: of the URL, unless `user` is
    given, else the default. `HOST:PORT` is a URL. Raises Misuse."""
    scheme, separator, rest = url.rpartition("://") if "://" in url else ("http", "://", url)
    given, _, place = rest.rpartition("@")
    try:
        parts = urlsplit(f"{scheme}{separator}{place}")
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        # Without what stands before `@`: it may be a password.
        raise Misuse(f"{place!r} is no address of an HTTP API; it has the form http://HOST:PORT")
    if given and not user:
        name, _, password = given.partition(":")
        user = f"{unquote(name)}:{unquote(password)}"
    return parts.geturl().rstrip("/"), user or USER_DEFAULT


def call(
    method: str,
    url: str,
    timeout: float,
    user: str,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """Returns the body of the answer to a request with basic authentication.

    Args:
        user: user:password.

    Raises:
        NoAnswer: none came. urllib.error.HTTPError: not a good one, to be closed by the caller.
    """
    request = urllib.request.Request(url, data=data, method=method, headers=dict(headers or {}))
    request.add_header("Authorization", "Basic " + base64.b64encode(user.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _no_answer(url, timeout, error) from None


def _no_answer(url: str, timeout: float, error: Exception) -> NoAnswer:
    parts = urlsplit(url)
    place = f"{parts.scheme}://{parts.netloc}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    match reason:
        case TimeoutError():
            return NoAnswer(f"{place}: no answer within {timeout:g} s", timed_out=True)
        case ssl.SSLCertVerificationError(verify_message=text):
            why = f"its certificate is not trusted: {text}"
        case ssl.SSLError():
            why = "no TLS is spoken there; try http://"
        case socket.gaierror():
            why = "there is no host of that name"
        case ConnectionRefusedError():
            why = f"nothing listens there; {_LISTENS}"
        case ConnectionResetError() | http.client.IncompleteRead():
            why = "the connection was closed without a whole answer; a port with TLS wants https://"
        case http.client.BadStatusLine() if str(reason).startswith("AMQP"):
            why = f"that is a port for AMQP clients; {_LISTENS}"
        case OSError(strerror=str(text)):
            why = text
        case _:
            why = f"no HTTP is spoken there ({reason!r}); {_LISTENS}"
    return NoAnswer(f"{place}: {why}")


def json_of(url: str, body: bytes) -> Any:
    """Returns the JSON value of a good answer; None without a body. Raises NoAnswer."""
    try:
        return json.loads(body) if body else None
    except ValueError:
        place = urlsplit(url)
        raise NoAnswer(
            f"{place.scheme}://{place.netloc}: the answer is not JSON; {_LISTENS}"
        ) from None


def get_json(url: str, timeout: float = 5.0, user: str = "guest", password: str = "guest") -> Any:
    """GET of a JSON document with basic authentication.

    Raises:
        Unavailable: no answer, or not a good one. LookupError: 404.
    """
    try:
        return json_of(url, call("GET", url, timeout, f"{user}:{password}"))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            raise LookupError(url) from None
        raise Unavailable(_refusal(url, error.code, user)) from None


def put_json(url: str, value: object, timeout: float = 5.0, user: str = USER_DEFAULT) -> None:
    """PUT of a JSON document with basic authentication; `user` is user:password.

    Raises:
        Misuse: refused; the text says why. Unavailable: no answer, or another one.
    """
    headers = {"Content-Type": "application/json"}
    try:
        call("PUT", url, timeout, user, json.dumps(value).encode(), headers)
    except urllib.error.HTTPError as error:
        _raise_refusal(url, error, user.partition(":")[0])


def delete(url: str, timeout: float = 5.0, user: str = "guest", password: str = "guest") -> None:
    """DELETE with basic authentication.

    Raises:
        Misuse: refused; the text says why. Unavailable: no answer. LookupError: 404.
    """
    try:
        call("DELETE", url, timeout, f"{user}:{password}")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            error.close()
            raise LookupError(url) from None
        _raise_refusal(url, error, user)


def _raise_refusal(url: str, error: urllib.error.HTTPError, user: str) -> NoReturn:
    with error, contextlib.suppress(ValueError, AttributeError):
        if error.code == 401:
            raise Unavailable(_refusal(url, error.code, user)) from None
        raise Misuse(str(json.load(error).get("reason", error))) from None
    raise Unavailable(_refusal(url, error.code, user)) from None


def _refusal(url: str, code: int, user: str) -> str:
    """Returns the meaning of an answer other than 2xx, and what to do."""
    if code == 401:
        return (
            f"{url} does not accept user {user!r} with this password (401): give --user "
            "NAME:PASSWORD; `guest` may only come from the node's own machine"
        )
    if code == 403:
        return f"user {user!r} may not do this (403): give --user with an administrator"
    if code == 503:
        return f"{url} is not ready (503): ask again, or another node"
    return f"{url} answers with HTTP status {code}: its log says more"
