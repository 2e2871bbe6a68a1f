"""Transports of commands to a node: its administration socket, or HTTP with a user.

On the node's machine who may open the socket is an administrator; `--url` and `--user` reach the
HTTP API of any node. See docs/adr/0045-operator-tools.md.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from convoymq.cli.api import USER_DEFAULT, NoAnswer, base_of, call, json_of
from convoymq.cli.cluster import DATA_DEFAULT, find_cluster
from convoymq.cli.ctl.failures import NO_PERMISSION, TIMED_OUT, UNAVAILABLE, USAGE, Failure
from convoymq.model.errors import BrokerError, Misuse, Unavailable
from convoymq.model.json import Json, JsonObject
from convoymq.node.admin_socket import SOCKET_NAME, ask

TIMEOUT_S = 600.0
"""A command for many queues answers when all are done."""
CONNECT_TIMEOUT_S = 10.0
_AMQP_CODE = re.compile(r"^\d{3} [A-Z_]+ - ")


@dataclass(frozen=True, slots=True)
class NodeState:
    """State of a node's start."""

    name: str
    running: bool
    """True if it serves clients."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the HTTP API."""

    status: int
    content: Json

    @property
    def reason(self) -> str:
        """Returns the reason of a refusal."""
        if isinstance(self.content, dict):
            text = str(self.content.get("reason") or self.content.get("error") or self.content)
            # What AMQP clients get in front of it says nothing here.
            return _AMQP_CODE.sub("", text)
        return f"HTTP status {self.status}"


class Api(Protocol):
    """The HTTP API of one node."""

    def state(self) -> NodeState:
        """Returns how far the node has started. Raises Failure."""

    def request(
        self, method: str, path: str, body: Json = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Carries out a request; `path` is what follows `/api/`. Raises Failure."""


def parsed(text: str) -> Json:
    """Returns the value of a body; None without one."""
    try:
        value: Json = json.loads(text) if text else None
    except ValueError:
        value = text
    return value


LOCAL_REASONS = (
    "Target node is unreachable from the node on this machine",
    "Its data directory is another one: give --data DIR, or set CONVOY_DATA_DIR",
)
REMOTE_REASONS = (
    "Target node is unreachable from this machine",
    "The URL is not the one of its HTTP API",
)


def unreachable(node: str, reason: str, causes: Sequence[str] = LOCAL_REASONS) -> Failure:
    """The node can't be asked."""
    listed = "\n".join(f" * {cause}" for cause in ("Target node is not running", *causes))
    text = (
        f"Error: unable to perform an operation on node '{node}'. "
        "Please see diagnostics information and suggestions below.\n\n"
        f"Most common reasons for this are:\n\n{listed}\n\n"
        f"DIAGNOSTICS\n===========\n\n{reason}\n"
    )
    return Failure(UNAVAILABLE, text, heading="")


@dataclass(slots=True)
class SocketApi:
    """Through the administration socket of a node on this machine, which passes a request for
    another node on."""

    directory: Path
    node: str = ""
    timeout_s: float = TIMEOUT_S

    def state(self) -> NodeState:
        """See `Api`."""
        found = self._ask({"op": "operator.state"}, min(self.timeout_s, CONNECT_TIMEOUT_S))
        return NodeState(str(found["name"]), bool(found["running"]))

    def request(
        self, method: str, path: str, body: Json = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """See `Api`."""
        request: JsonObject = {
            "op": "operator.http",
            "method": method,
            "path": f"/api/{path}",
            "headers": dict(headers or {}),
            "body": None if body is None else json.dumps(body),
        }
        found = self._ask(request, self.timeout_s)
        return Answer(int(str(found["status"])), parsed(str(found["body"])))

    def _ask(self, request: JsonObject, timeout_s: float) -> JsonObject:
        request |= {"node": self.node, "timeout": timeout_s}
        try:
            found: JsonObject = ask(self.directory, request, lambda _text: None, timeout_s)
        except Unavailable as error:
            if isinstance(error.__context__, TimeoutError):
                raise timed_out(self.node or str(self.directory), timeout_s) from None
            raise unreachable(self.node or str(self.directory), error.text) from None
        except BrokerError as error:
            raise unreachable(self.node or str(self.directory), error.text) from None
        return found


def timed_out(node: str, timeout_s: float) -> Failure:
    """The node did not answer within `--timeout`."""
    return Failure(
        TIMED_OUT,
        f"Error: operation on node {node} timed out. Timeout value used: {timeout_s:g} s",
        heading="",
    )


@dataclass(slots=True)
class HttpApi:
    """Over the network, as a user with the tag administrator."""

    url: str
    user: str = USER_DEFAULT
    timeout_s: float = TIMEOUT_S

    def state(self) -> NodeState:
        """See `Api`."""
        found = self.request("GET", "overview")
        if found.status != 200 or not isinstance(found.content, dict):
            raise unreachable(self.url, found.reason, REMOTE_REASONS)
        if "node" not in found.content:
            reason = f"{self.url} is not the HTTP API of a node"
            raise unreachable(self.url, reason, REMOTE_REASONS)
        return NodeState(str(found.content["node"]), running=True)

    def request(
        self, method: str, path: str, body: Json = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """See `Api`."""
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.url}/api/{path}"
        # HTTP headers are bytes; urllib takes them as Latin-1.
        headers = {k: v.encode().decode("latin-1") for k, v in (headers or {}).items()}
        try:
            content = call(method, url, self.timeout_s, self.user, data, headers)
            return Answer(200, json_of(url, content))
        except urllib.error.HTTPError as error:
            with error:
                answer = Answer(error.code, parsed(error.read().decode("utf-8", "replace")))
            if error.code in (401, 403):
                name = self.user.partition(":")[0]
                raise Failure(
                    NO_PERMISSION, f"{self.url}, user '{name}': {answer.reason}"
                ) from None
            return answer
        except NoAnswer as error:
            if error.timed_out:
                raise timed_out(self.url, self.timeout_s) from None
            raise unreachable(self.url, error.text, REMOTE_REASONS) from None


def connect(
    *, node: str = "", data: str = "", url: str = "", user: str = "", timeout_s: float = 0.0
) -> Api:
    """Finds the node that the switches name, or one of this machine. Raises Failure."""
    timeout_s = timeout_s or TIMEOUT_S
    if url:
        try:
            url, user = base_of(url, user)
        except Misuse as error:
            raise Failure(USAGE, f"--url: {error.text}") from None
        remote = HttpApi(url, user, timeout_s)
        if node and remote.state().name != node:
            raise Failure(USAGE, f"{url} is not the HTTP API of node {node}")
        return remote
    if user:
        raise Failure(USAGE, "--user goes with --url: the local node asks for no user")
    found: list[tuple[Path, str]] = []
    failed: list[Failure] = []
    for directory in _directories(Path(data or _default_directory())):
        try:
            name = SocketApi(directory, timeout_s=timeout_s).state().name
        except Failure as error:
            if error.code == NO_PERMISSION:
                raise
            failed.append(error)
            continue
        if node in ("", name):
            return SocketApi(directory, timeout_s=timeout_s)
        found.append((directory, name))
    if not found:
        for failure in failed:
            if failure.code == TIMED_OUT:
                raise failure
        reasons = [failure.text.rstrip().rpartition("\n")[2] for failure in failed]
        raise unreachable(node or "(local)", "\n".join(reasons))
    # The node is on another machine, or named by its number: a node of this machine passes it on.
    api = SocketApi(found[0][0], node, timeout_s)
    api.node = api.state().name
    return api


@dataclass(slots=True)
class LazyApi:
    """Connects when it is asked first: a command line is checked before, and its banner printed."""

    node: str = ""
    data: str = ""
    url: str = ""
    user: str = ""
    timeout_s: float = 0.0
    _api: Api | None = None

    def state(self) -> NodeState:
        """See `Api`."""
        return self._connected().state()

    def request(
        self, method: str, path: str, body: Json = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """See `Api`."""
        return self._connected().request(method, path, body, headers)

    def _connected(self) -> Api:
        if self._api is None:
            self._api = connect(
                node=self.node,
                data=self.data,
                url=self.url,
                user=self.user,
                timeout_s=self.timeout_s,
            )
        return self._api


def _default_directory() -> str:
    given = os.environ.get("CONVOY_DATA_DIR")
    if given:
        return given
    config = os.environ.get("CONVOY_CONFIG_FILE")
    if not config:
        if (DATA_DEFAULT / SOCKET_NAME).exists():
            return str(DATA_DEFAULT)
        try:
            return str(find_cluster(DATA_DEFAULT))
        except Misuse:
            return str(DATA_DEFAULT)
    from convoymq.edges.configuration import load

    try:
        return load(Path(config), os.environ).node.data_dir
    except BrokerError as error:
        raise Failure(USAGE, f"{config}: {error.text}") from None


def _directories(data: Path) -> list[Path]:
    """Data directories of nodes: this one, or those of a cluster that `convoy up` runs."""
    try:
        if (data / SOCKET_NAME).exists():
            _check_access(data)
            return [data]
        several = sorted(
            path.parent for path in data.glob(f"node-*/data/{SOCKET_NAME}") if path.exists()
        )
        for path in several:
            _check_access(path)
        return several or [data]
    except PermissionError as error:
        raise no_permission(error.filename or str(data)) from None


def _check_access(directory: Path) -> None:
    if not os.access(directory / SOCKET_NAME, os.R_OK | os.W_OK):
        raise no_permission(str(directory / SOCKET_NAME))


def no_permission(path: str) -> Failure:
    """The socket belongs to somebody else."""
    return Failure(
        NO_PERMISSION,
        f"Only root or the user that runs the node may administer it here: {path} is not yours",
        heading="",
    )


def segment(text: str) -> str:
    """A name as a part of a path."""
    return quote(text, safe="")
