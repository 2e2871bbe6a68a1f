"""Requests to the node /management: queues, exchanges, bindings, tokens.

| request                                    | answers                                        |
|--------------------------------------------|------------------------------------------------|
| GET /queues/Q                              | 200 queue, 404                                 |
| PUT /queues/Q                              | 201 queue (new), 200 (equal), 409 (differs)    |
| DELETE /queues/Q                           | 200 message_count, also when there is none     |
| DELETE /queues/Q/messages                  | 200 message_count, 404                         |
| PUT /exchanges/X                           | 204, 409 (differs)                             |
| DELETE /exchanges/X                        | 204, also when there is none                   |
| POST /bindings                             | 204                                            |
| GET /bindings?src=X&dstq=Q&key=K           | 200 list                                       |
| DELETE /bindings/src=X;dstq=Q;key=K;args=H | 204, also when there is none                   |
| PUT /auth/tokens                           | 204                                            |

`dste=` stands for a destination that is an exchange. What is refused: 400 bad input, 403 not
allowed, 404 no such path, 405 not with that method, 503 not now. An error's body is its text.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import quote

import structlog

from convoymq.broker.access import AMQP_10
from convoymq.broker.audit import Act
from convoymq.edges import one_shot
from convoymq.edges.amqp10.addresses import unquoted
from convoymq.edges.declaring import Declaring
from convoymq.messages.amqp10.fields import field_of, text_or_none, value_of
from convoymq.messages.amqp10.values import Array, UInt, ULong, Value
from convoymq.model.errors import (
    AccessRefused,
    BrokerError,
    LimitReached,
    Misuse,
    NotAllowed,
    NotFound,
    PeerError,
    PreconditionFailed,
    Refused,
    Unavailable,
)
from convoymq.model.refusals import missing, queue_subject
from convoymq.model.tables import SHORT_STRING_BYTES_MAX, Field, Table
from convoymq.queues.message_checks import REPLY_PREFIX
from convoymq.routing.types import Binding, Destination, DestinationKind

if TYPE_CHECKING:
    from convoymq.edges.amqp10.session import Session

log = structlog.get_logger()

T = TypeVar("T")

OK, CREATED, DONE = 200, 201, 204
BAD_REQUEST, FORBIDDEN, NOT_THERE, NO_METHOD, CONFLICT = 400, 403, 404, 405, 409
FAILED, NOT_NOW = 500, 503

# The nearest base class decides.
_STATUSES: dict[type[BrokerError], int] = {
    AccessRefused: FORBIDDEN,
    LimitReached: FORBIDDEN,
    NotAllowed: FORBIDDEN,
    NotFound: NOT_THERE,
    Refused: BAD_REQUEST,
    PeerError: BAD_REQUEST,
    Misuse: BAD_REQUEST,
    Unavailable: NOT_NOW,
    BrokerError: FAILED,
}
_QUEUE: dict[str, Value] = {
    "durable": True,
    "exclusive": False,
    "auto_delete": False,
    "arguments": {},
}
_EXCHANGE: dict[str, Value] = {
    "type": "direct",
    "durable": True,
    "auto_delete": False,
    "internal": False,
    "arguments": {},
}
_BINDING: dict[str, Value] = {
    "source": "",
    "destination_queue": "",
    "destination_exchange": "",
    "binding_key": "",
    "arguments": {},
}
"""Fields of bodies, with their defaults."""
_KINDS = {"dstq": DestinationKind.QUEUE, "dste": DestinationKind.EXCHANGE}


class Request(NamedTuple):
    """A request."""

    method: str
    path: str
    body: Value
    id: Value


class Response(NamedTuple):
    """A response."""

    status: int
    body: Value = None


class _Answer(BrokerError):
    """A response that is an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


_Handler = Callable[[], Awaitable[Response]]


class Requests:
    """The requests of a session's client."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connection = session.connection
        self._broker = session.broker
        self._vhost = session.connection.vhost
        self._declaring = Declaring(session.connection, session.permissions)

    async def answer(self, request: Request) -> Response:
        """Returns the response to a request, whatever it asks for."""
        response = await self._answered(request)
        if request.method != "GET":
            connection = self._connection
            act = Act(
                via=AMQP_10,
                user=connection.user.name,
                peer=connection.peer[0],
                method=request.method,
                path=f"{self._vhost} {request.path.partition('?')[0]}",
                status=response.status,
            )
            self._broker.audit.record(act)
        return response

    async def _answered(self, request: Request) -> Response:
        try:
            handlers = self._handlers(request)
            handler = handlers.get(request.method)
            if handler is None:
                allowed = ", ".join(handlers)
                raise _Answer(NO_METHOD, f"{request.path} takes {allowed}, not {request.method}")
            return await handler()
        except BrokerError as error:
            return Response(_status_of(error), error.text)
        except Exception:
            log.exception(
                "amqp.method_failed", connection=self._connection.name, method=request.method
            )
            return Response(FAILED, "internal error")

    def _handlers(self, request: Request) -> dict[str, _Handler]:
        """Returns what a path takes, by method. Raises BrokerError."""
        path, _, query = request.path.partition("?")
        body = request.body
        match path.split("/"):
            case ["", "queues", part]:
                queue = _name(path, part)
                return {
                    "GET": lambda: self._get_queue(queue),
                    "PUT": lambda: self._put_queue(queue, body),
                    "DELETE": lambda: self._delete_queue(queue),
                }
            case ["", "queues", part, "messages"]:
                queue = _name(path, part)
                return {"DELETE": lambda: self._purge(queue)}
            case ["", "exchanges", part]:
                exchange = _text(unquoted(path, part))
                return {
                    "PUT": lambda: self._put_exchange(exchange, body),
                    "DELETE": lambda: self._delete_exchange(exchange),
                }
            case ["", "bindings"]:
                return {
                    "GET": lambda: self._get_bindings(path, query),
                    "POST": lambda: self._post_binding(body),
                }
            case ["", "bindings", part]:
                return {"DELETE": lambda: self._delete_binding(path, part)}
            case ["", "auth", "tokens"]:
                return {"PUT": lambda: self._put_token(body)}
        raise _Answer(NOT_THERE, f"no resource {path[:255]!r}")

    # --- queues ------------------------------------------------------------------------------

    async def _get_queue(self, name: str) -> Response:
        if name.startswith(REPLY_PREFIX):
            return await self._get_replies(name)
        self._check_any("queue", name)
        queue = self._session.find_queue(name)
        return Response(OK, self._queue(name, *await queue.counts()))

    async def _get_replies(self, name: str) -> Response:
        """Tells whether a consumer of direct replies is there."""
        if not await self._broker.replies.exists(name.removeprefix(REPLY_PREFIX)):
            raise missing(queue_subject(self._vhost, name))
        row: dict[Value, Value] = {
            "name": name,
            "vhost": self._vhost,
            "durable": False,
            "auto_delete": True,
            "exclusive": True,
            "type": "volatile",
            "arguments": {},
            "leader": None,
            "replicas": Array(str, ()),
            "message_count": ULong(0),
            "consumer_count": UInt(1),
        }
        return Response(OK, row)

    async def _put_queue(self, name: str, body: Value) -> Response:
        asked = _fields("queue", _QUEUE, body)
        arguments = _arguments(asked["arguments"])
        before = self._exists(name)
        try:
            _, messages, consumers = await self._declaring.queue(
                name,
                durable=bool(asked["durable"]),
                exclusive=bool(asked["exclusive"]),
                auto_delete=bool(asked["auto_delete"]),
                arguments=arguments,
            )
        except PreconditionFailed as error:
            if self._exists(name):
                raise _Answer(CONFLICT, error.text) from error
            raise
        return Response(OK if before else CREATED, self._queue(name, messages, consumers))

    async def _delete_queue(self, name: str) -> Response:
        count = await self._declaring.delete_queue(name)
        return Response(OK, {"message_count": ULong(count)})

    async def _purge(self, name: str) -> Response:
        self._session.permissions.check("read", "queue", name)
        count = await one_shot.purge(self._broker, self._vhost, name, self._connection.id)
        return Response(OK, {"message_count": ULong(count)})

    def _exists(self, name: str) -> bool:
        return self._broker.tree.queues.find(self._vhost, name) is not None

    def _queue(self, name: str, messages: int, consumers: int) -> dict[Value, Value]:
        broker = self._broker
        record = broker.tree.queues.get(self._vhost, name)
        declared = broker.tree.vhosts.get(self._vhost).topology.queue(name, record.owner)
        leader = broker.locations.leader_of(record)
        return {
            "name": name,
            "vhost": self._vhost,
            "durable": declared.durable,
            "auto_delete": declared.auto_delete,
            "exclusive": declared.exclusive_owner is not None,
            "type": record.type.value,
            "arguments": _plain(declared.arguments),
            "leader": None if leader is None else broker.node_name_of(leader),
            "replicas": Array(str, tuple(map(broker.node_name_of, record.members))),
            "message_count": ULong(messages),
            "consumer_count": UInt(consumers),
        }

    # --- exchanges ---------------------------------------------------------------------------

    async def _put_exchange(self, name: str, body: Value) -> Response:
        asked = _fields("exchange", _EXCHANGE, body)
        try:
            await self._declaring.exchange(
                name,
                str(asked["type"]),
                durable=bool(asked["durable"]),
                auto_delete=bool(asked["auto_delete"]),
                internal=bool(asked["internal"]),
                arguments=_arguments(asked["arguments"]),
            )
        except PreconditionFailed as error:
            topology = self._broker.tree.vhosts.get(self._vhost).topology
            if topology.find_exchange(name) is not None:
                raise _Answer(CONFLICT, error.text) from error
            raise
        return Response(DONE)

    async def _delete_exchange(self, name: str) -> Response:
        await self._declaring.delete_exchange(name)
        return Response(DONE)

    # --- bindings ----------------------------------------------------------------------------

    async def _post_binding(self, body: Value) -> Response:
        asked = _fields("binding", _BINDING, body)
        assert isinstance(body, dict)
        ends = [word for word in ("destination_queue", "destination_exchange") if word in body]
        missing = [word for word in ("source", "binding_key") if word not in body]
        if missing or len(ends) != 1:
            word = missing[0] if missing else "destination_queue or destination_exchange"
            raise _Answer(BAD_REQUEST, f"a binding needs one {word}")
        kind = DestinationKind(ends[0].removeprefix("destination_"))
        destination = Destination(kind, str(asked[ends[0]]))
        source, key = str(asked["source"]), str(asked["binding_key"])
        try:
            await self._declaring.bind(source, destination, key, _arguments(asked["arguments"]))
        except NotFound as error:
            raise _Answer(BAD_REQUEST, error.text) from error
        return Response(DONE)

    async def _get_bindings(self, path: str, query: str) -> Response:
        source, destination, key, _ = _binding_of(path, query.split("&"))
        self._check_any("exchange", source)
        found = self._bindings(source, destination, key)
        return Response(OK, [_binding_row(each) for each in found])

    async def _delete_binding(self, path: str, part: str) -> Response:
        source, destination, key, tag = _binding_of(path, part.split(";"))
        if tag is None:
            raise _Answer(BAD_REQUEST, f"bad binding path segment {part[:255]!r}")
        # Who may not is refused, whether it is there or not.
        self._declaring.check_bind(source, destination, key)
        for each in self._bindings(source, destination, key):
            if _tag_of(each.arguments) == tag:
                await self._declaring.unbind(source, destination, key, each.arguments)
        return Response(DONE)

    def _bindings(self, source: str, destination: Destination, key: str) -> list[Binding]:
        topology = self._broker.tree.vhosts.get(self._vhost).topology
        found = topology.bindings(source=source, destination=destination)
        return [each for each in found if each.routing_key == key]

    # --- tokens ------------------------------------------------------------------------------

    async def _put_token(self, body: Value) -> Response:
        """Takes a new token, or any secret of a user whose password does not expire: what the user
        may now is asked again."""
        if not isinstance(body, bytes):
            raise _Answer(BAD_REQUEST, "a token is binary")
        await self._connection.renew(body)
        return Response(DONE)

    def _check_any(self, kind: str, name: str) -> None:
        """Raises AccessRefused: the user has no permission at all."""
        check = self._session.permissions.check
        for permission in ("configure", "write"):
            with suppress(AccessRefused):
                check(permission, kind, name)
                return
        check("read", kind, name)


def _status_of(error: BrokerError) -> int:
    if isinstance(error, _Answer):
        return error.status
    return next(_STATUSES[each] for each in type(error).__mro__ if each in _STATUSES)


# --- paths -----------------------------------------------------------------------------------


def _text(name: str) -> str:
    """Returns a name. Raises BrokerError: its line ends."""
    if "\r" in name or "\n" in name:
        raise _Answer(BAD_REQUEST, f"bad name {name[:255]!r}: line ends are not allowed")
    return name


def _name(path: str, part: str) -> str:
    """Returns the name that is a part of a path. Raises BrokerError: it is empty."""
    if not part:
        raise _Answer(BAD_REQUEST, "a queue needs a name")
    return _text(unquoted(path, part))


def _binding_of(path: str, parts: Sequence[str]) -> tuple[str, Destination, str, str | None]:
    """Returns source, destination, key and the tag of the arguments of a binding's path. Raises
    BrokerError."""
    found: dict[str, str] = {}
    for part in parts:
        word, equals, value = part.partition("=")
        if not equals or word in found or word not in ("src", "dstq", "dste", "key", "args"):
            raise _Answer(BAD_REQUEST, f"bad binding path segment {part[:255]!r}")
        found[word] = unquoted(path, value)
    kinds = [word for word in _KINDS if word in found]
    if len(kinds) != 1 or "src" not in found or "key" not in found:
        raise _Answer(BAD_REQUEST, "bad binding path segment: it needs src, dstq or dste, and key")
    destination = Destination(_KINDS[kinds[0]], found[kinds[0]])
    return found["src"], destination, found["key"], found.get("args")


def _tag_of(arguments: Table) -> str:
    """Returns the name of a binding's arguments in paths; without any, it is empty."""
    if not arguments:
        return ""
    tag = zlib.crc32(arguments.encoded).to_bytes(4, "big")
    return base64.urlsafe_b64encode(tag).decode().rstrip("=")


def _binding_row(binding: Binding) -> dict[Value, Value]:
    destination, tag = binding.destination, _tag_of(binding.arguments)
    word = next(word for word, kind in _KINDS.items() if kind is destination.kind)
    source, name, key = (
        quote(each, safe="") for each in (binding.source, destination.name, binding.routing_key)
    )
    return {
        "source": binding.source,
        f"destination_{destination.kind.value}": destination.name,
        "binding_key": binding.routing_key,
        "arguments": _plain(binding.arguments),
        "location": f"/bindings/src={source};{word}={name};key={key};args={tag}",
    }


# --- bodies ----------------------------------------------------------------------------------


def _fields(what: str, known: Mapping[str, Value], body: Value) -> dict[str, Value]:
    """Returns the fields of a body. Raises BrokerError: it has others, or of other types."""
    if not isinstance(body, dict):
        raise _Answer(BAD_REQUEST, f"the body of a {what} is a map")
    found = dict(known)
    for key, value in body.items():
        default = known.get(key) if isinstance(key, str) else None
        if default is None or not _fits(value, default):
            shown = f"{str(key)[:255]}={str(value)[:255]}"
            raise _Answer(BAD_REQUEST, f"bad {what} property {shown}")
        found[str(key)] = _text(str(value)) if isinstance(value, str) else value
    return found


def _fits(value: Value, default: Value) -> bool:
    if isinstance(default, bool):
        return isinstance(value, bool)
    return isinstance(value, str if isinstance(default, str) else dict)


def _arguments(values: Value) -> Table:
    """Returns arguments. Raises BrokerError: one has no form in AMQP 0-9-1."""
    assert isinstance(values, dict)
    fields: list[tuple[str, Field]] = []
    for key, value in values.items():
        field = field_of(value)
        name = str(key) if isinstance(key, str) else ""
        if not name or field is None or len(name.encode()) > SHORT_STRING_BYTES_MAX:
            raise _Answer(BAD_REQUEST, f"bad argument {str(key)[:255]}={str(value)[:255]}")
        fields.append((name, field))
    return Table.from_fields(fields)


def _plain(arguments: Table) -> dict[Value, Value]:
    """Returns arguments as a map with keys of text."""
    items = ((text_or_none(key), field) for key, field in arguments.items())
    return {key: value_of(field) for key, field in items if key is not None}
