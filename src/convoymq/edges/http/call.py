"""One request to the HTTP API, and what a handler answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from starlette.requests import Request

from convoymq.broker.access import OPERATOR
from convoymq.broker.changes import Command
from convoymq.broker.facade import Broker
from convoymq.broker.records import User
from convoymq.edges.http.authentication import Authentication
from convoymq.edges.http.bodies import BODY_BYTES_MAX, ApiError, Bodies, bad_request
from convoymq.edges.http.fields import only_keys
from convoymq.edges.http.rates import Ranges, Rates, ranges_in
from convoymq.edges.http.served import Served
from convoymq.model.json import JsonObject

CREATED = 201
DONE = 204


def object_not_found() -> ApiError:
    """The path names something that does not exist."""
    return ApiError(404, "Object Not Found", "Not Found")


class Status:
    """A result that is only a status, with headers."""

    def __init__(self, status: int, location: str = "") -> None:
        self.status = status
        self.location = location


def put_status(created: bool) -> Status:
    """Returns the status of a PUT."""
    return Status(CREATED if created else DONE)


@dataclass(slots=True)
class Call:
    """One request, with its user."""

    broker: Broker
    rates: Rates
    bodies: Bodies
    request: Request
    user: User
    path: dict[str, str]
    served: Served
    authentication: Authentication

    @property
    def is_administrator(self) -> bool:
        """May change users, virtual hosts, everything."""
        return "administrator" in self.user.tags

    @property
    def is_monitor(self) -> bool:
        """May see all nodes, connections and virtual hosts."""
        return self.is_administrator or "monitoring" in self.user.tags

    @property
    def visible(self) -> set[str]:
        """Virtual hosts that the user may see."""
        if self.is_monitor:
            return self.broker.tree.vhosts.names()
        return self.broker.access.vhosts_of(self.user)

    @property
    def is_operator(self) -> bool:
        """Returns whether it came through the administration socket."""
        return self.user is OPERATOR

    def need(self, allowed: bool) -> None:
        """Raises 401 unless allowed."""
        if not allowed:
            raise ApiError(401, "not_authorized", "Not permitted")

    def vhost(self) -> str:
        """Returns the path's virtual host. Raises 404 or 401."""
        name = self.path["vhost"]
        if name not in self.broker.tree.vhosts.names():
            raise object_not_found()
        self.need(name in self.visible)
        return name

    def chosen(self, rows: Iterable[JsonObject], *names: str) -> list[JsonObject]:
        """Returns the rows that have these values of the path. Raises 404 when there is none."""
        found = [row for row in rows if all(row.get(name) == self.path[name] for name in names)]
        if not found:
            raise object_not_found()
        return found

    def may(self, permission: str, kind: str, name: str) -> None:
        """Checks the user's permission in the path's virtual host."""
        self.broker.access.check_permission(self.user, self.path["vhost"], permission, kind, name)

    @property
    def ranges(self) -> Ranges:
        """Returns what the request wants samples of. Raises 400."""
        return ranges_in(self.request.query_params)

    def flag(self, name: str) -> bool:
        """Returns whether a query parameter is true."""
        return self.request.query_params.get(name, "") == "true"

    async def json(
        self,
        most: int = BODY_BYTES_MAX,
        *,
        form: bool = False,
        keys: Collection[str] | None = None,
    ) -> JsonObject:
        """Returns the body as an object; empty means none of its keys. To be called after the
        permission checks: only who may do it makes the node read and parse.

        Args:
            form: see `Bodies.read`.
            keys: those that the request knows; others are refused by name. None: what RabbitMQ
                knows and this broker does not is passed over.
        Raises:
            ApiError: it is no such body.
        """
        body = await self.bodies.read(self.request, most, form=form)
        if body is None:
            return {}
        if not isinstance(body, dict):
            raise bad_request("the body must be a JSON object")
        if keys is not None:
            only_keys(body, keys)
        return body


async def change(call: Call, command: Command) -> bool:
    """Changes the tree; False when nothing was created or removed."""
    return bool(await call.broker.tree.execute(command))


async def done(call: Call, command: Command) -> Status:
    """Changes the tree; one that is so already is fine."""
    await change(call, command)
    return Status(DONE)
