"""Requests of an operator on a node's machine: the node's state, and the HTTP API without a user.

Whoever may open the administration socket administers the node already (`admin_socket`), as who
has the cookie administers a RabbitMQ node. Requests for another node go over the link to it:
nodes trust each other by the cluster's secret. See docs/adr/0045-operator-tools.md.

Operations of the socket, each with an optional `node` (name or number):
    operator.state   which node this is, and how far it has started
    operator.http    a request to the HTTP API: `method`, `path`, `headers`, `body` (text)
    groups           a row for each replica on this node, with the hash of its state

Requests that do more than read are logged as `operator.requested`, with the user and the process
that the system names, at the node on whose machine they come and at the node that carries them out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import urlsplit

import structlog

from convoymq.model.errors import BrokerError, Misuse, NotFound, PeerError, Unavailable
from convoymq.model.json import JsonObject
from convoymq.node.admin_socket import Handler, Progress
from convoymq.transport.control import ControlPlane
from convoymq.transport.frame_kinds import KIND_OPERATOR

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from convoymq.broker.facade import Broker
    from convoymq.edges.edge import Edge
    from convoymq.model.config import Config
    from convoymq.shells.groups.host import ReplicaHost

log = structlog.get_logger()

T = TypeVar("T")

READING = frozenset(("GET", "HEAD", "OPTIONS"))
TIMEOUT_S = 60.0
FORWARDED_BYTES_MAX = 16 << 20
"""Of a body that goes to or comes from another node: links carry messages meanwhile."""


class AskedNode(Protocol):
    """Interface of the node (`node.Node`) that serves these requests."""

    id: int
    host: ReplicaHost
    broker: Broker | None
    usable: bool
    config: Config
    edges: tuple[Edge, ...]

    @property
    def shown_name(self) -> str:
        """Returns its name for people."""


class OperatorAccess:
    """See the module text. One per node."""

    def __init__(self, node: AskedNode, control: ControlPlane) -> None:
        self._node = node
        self._control = control
        self._api: ASGIApp | None = None
        control.handle(KIND_OPERATOR, self._on_request)

    @property
    def handlers(self) -> dict[str, Handler]:
        """Returns the operations of the socket."""
        return {
            "operator.state": self._ask,
            "operator.http": self._ask,
            "groups": self._describe_groups,
        }

    async def _describe_groups(
        self, _request: dict[str, object], _progress: Progress
    ) -> list[dict[str, object]]:
        host = self._node.host
        found = []
        for group, replica in sorted({**host.groups, **host.stopped}.items()):
            status = host.status(group)
            found.append(
                {
                    "group": group,
                    "role": status.role,
                    "leader": status.leader,
                    "term": status.term,
                    "applied": status.last_applied,
                    "last": status.last_index,
                    "voters": status.voters,
                    "learners": status.learners,
                    "kind": replica.machine.KIND,
                    "version": replica.machine.version,
                    "hash": replica.machine.state_hash(),
                    "stopped": status.stopped,
                }
            )
        return found

    async def _ask(self, request: dict[str, object], _progress: Progress) -> object:
        node = self._named(str(request.get("node") or ""))
        if node == self._node.id:
            return await self._audited(request, self._node.id, self._answer(request))
        body = request.get("body")
        if isinstance(body, str) and len(body) > FORWARDED_BYTES_MAX:
            raise Misuse("too much for a request to another node: ask on that node's machine")
        given = request.get("timeout")
        timeout_s = float(given) if isinstance(given, int | float) else TIMEOUT_S
        asked = self._control.request(node, KIND_OPERATOR, request, timeout_s)
        return await self._audited(request, node, asked)

    async def _audited(
        self, request: Mapping[str, object], node: int, work: Awaitable[T], came_to: int = 0
    ) -> T:
        """Waits for what a request asks for, and logs who asked for what at which node, with what
        result. Bodies and queries are not logged: there may be secrets in them."""
        method = str(request.get("method", "GET")).upper()
        if request.get("op") != "operator.http" or method in READING:
            return await work
        status: object = "failed"
        try:
            found = await work
            if isinstance(found, Mapping):
                status = found.get("status")
            return found
        except BrokerError as error:
            status = error.text
            raise
        finally:
            log.info("operator.requested", uid=request.get("uid"), pid=request.get("pid"),
                     method=method, path=urlsplit(str(request.get("path", ""))).path, at=node,
                     came_to=came_to or self._node.id, result=status)  # fmt: skip

    def _named(self, text: str) -> int:
        """Returns the node of that name or number; this one without. Raises NotFound."""
        own = self._node
        if text in ("", own.shown_name, str(own.id)):
            return own.id
        if own.broker is not None:
            for known in own.broker.metadata.tree.nodes.values():
                if text in (known.name, str(known.id)):
                    return known.id
        raise NotFound(f"node {text} is not known to node {own.shown_name}")

    async def _on_request(self, node: int, request: object) -> object:
        if not isinstance(request, dict):
            raise PeerError(f"malformed request of an operator from node {node}")
        found = await self._audited(request, self._node.id, self._answer(request), node)
        if len(str(found.get("body", ""))) > FORWARDED_BYTES_MAX:
            raise Misuse("too much for an answer to another node: ask on this node's machine")
        return found

    async def _answer(self, request: Mapping[str, object]) -> JsonObject:
        broker = self._node.broker
        if request.get("op") == "operator.state":
            return {
                "id": self._node.id,
                "name": self._node.shown_name,
                "running": self._node.usable,
                "majority": broker is not None and broker.metadata.leader is not None,
            }
        if broker is None:
            raise Unavailable(f"node {self._node.shown_name} is starting: no majority yet")
        if self._api is None:
            # Importing takes a tenth of a second: in a thread that does not stop the loop.
            make = await asyncio.get_running_loop().run_in_executor(None, _import_api)
            self._api = make(broker, self._node.config, lambda: self._node.edges)
        return await _call(self._api, request)


def _import_api() -> Callable[[Broker, Config, Callable[[], Sequence[Edge]]], ASGIApp]:
    from convoymq.broker.access import OPERATOR
    from convoymq.edges.http.app import make_api
    from convoymq.edges.http.served import served_by

    def make(broker: Broker, config: Config, edges: Callable[[], Sequence[Edge]]) -> ASGIApp:
        return make_api(broker, served=served_by(config, edges), user=OPERATOR)

    return make


async def _call(api: ASGIApp, request: Mapping[str, object]) -> JsonObject:
    """One request of the HTTP API without HTTP."""
    url = urlsplit(str(request.get("path", "")))
    headers, body = request.get("headers") or {}, request.get("body")
    if not isinstance(headers, dict) or not isinstance(body, str | None):
        raise Misuse("not a request: headers are an object, the body is text")
    given = (body or "").encode()
    fields = {"content-length": str(len(given)), **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": str(request.get("method", "GET")),
        "path": url.path,
        "raw_path": url.path.encode(),
        "query_string": url.query.encode(),
        "headers": [(str(k).lower().encode(), str(v).encode()) for k, v in fields.items()],
        "client": (f"uid {request.get('uid')} pid {request.get('pid')}", 0),
        "server": None,
    }
    status, parts = 500, list[bytes]()

    async def receive() -> Message:
        return {"type": "http.request", "body": given, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = int(message["status"])
        else:
            parts.append(message.get("body", b""))

    await api(scope, receive, send)
    return {"status": status, "body": b"".join(parts).decode()}
