"""A running cluster, as a backup reads it and a restore writes it: its HTTP API."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from convoymq.cli.api import base_of, call, json_of
from convoymq.model.errors import Misuse, Unavailable

CALL_TIMEOUT_S = 60.0
RETRY_S = 0.5
BUSY = 503
WRITE_TIMEOUT_S = 300.0


class Page(msgspec.Struct):
    """A page of a queue."""

    group: int
    source: int
    """Node whose positions these are; 0: those of all members of the queue."""
    upto: int
    after: int
    is_last: bool
    messages: int
    commands: list[tuple[int, bytes]]
    first: int


class QueueRow(msgspec.Struct):
    """A queue of a cluster."""

    vhost: str
    name: str
    type: str
    group: int
    durable: bool
    exclusive: bool


class TopicRow(msgspec.Struct):
    """An ordered topic of a cluster."""

    vhost: str
    name: str
    mode: str
    logical: int
    partitions: int
    settings: dict[str, bool | int | str]
    queues: list[str]
    """Names of the queues of its partitions, in the order of their messages."""


class Listing(msgspec.Struct):
    """Content of a cluster."""

    cluster: str
    cluster_id: str
    definitions: dict[str, object]
    queues: list[QueueRow]
    topics: list[TopicRow]


class Refusal(Misuse):
    """A node refused a request, with this status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Cluster:
    """See the module text. Questions are asked again at the next node while one does not answer."""

    def __init__(self, urls: Sequence[str], user: str, patience_s: float) -> None:
        """
        Args:
            patience_s: time for which a question is asked again.
        Raises Misuse.
        """
        found = [base_of(url, user) for url in urls]
        self._bases = [base for base, _ in found]
        self._user = found[0][1]
        self._patience_s = patience_s

    def listing(self) -> Listing:
        """Returns what there is to back up."""
        try:
            return msgspec.json.decode(self._ask("convoy/copies"), type=Listing)
        except msgspec.DecodeError as error:
            raise Unavailable(f"malformed list of queues: {error}") from None

    def page(self, vhost: str, name: str, after: int, upto: int) -> Page:
        """Returns a page of a queue. Raises LookupError: there is no such queue."""
        where = f"?after={after}" if after >= 0 else "?"
        where += f"&upto={upto}" if upto >= 0 else ""
        try:
            data = self._ask(f"convoy/copies/queues/{_path(vhost, name)}{where}")
            return msgspec.msgpack.decode(data, type=Page)
        except Refusal as error:
            if error.status == 404:
                raise LookupError(name) from None
            raise
        except msgspec.DecodeError as error:
            raise Unavailable(f"malformed page of queue '{name}': {error}") from None

    def publish(self, kind: str, vhost: str, name: str, commands: bytes) -> int:
        """Publishes messages into a queue or a topic (`kind`), once, and returns their number.
        Raises Unavailable: some may be published, Refusal."""
        path = f"convoy/copies/{kind}/{_path(vhost, name)}"
        found = json_of(self._bases[0], self._send("POST", path, commands))
        return int(found["messages"])

    def put(self, path: str, body: object) -> None:
        """Creates something by a PUT, which may be repeated."""
        self._again("PUT", path, json.dumps(body).encode())

    def import_definitions(self, definitions: object) -> None:
        """Imports definitions, which may be repeated."""
        self._again("POST", "definitions", json.dumps(definitions).encode())

    def delete(self, kind: str, vhost: str, name: str) -> None:
        """Deletes a queue or a topic, if there is one."""
        try:
            self._again("DELETE", f"{kind}/{_path(vhost, name)}")
        except Refusal as error:
            if error.status != 404:
                raise

    def _ask(self, path: str) -> bytes:
        return self._again("GET", path)

    def _again(self, method: str, path: str, data: bytes | None = None) -> bytes:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return self._send(method, path, data)
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
            self._bases.append(self._bases.pop(0))
            time.sleep(RETRY_S)

    def _send(self, method: str, path: str, data: bytes | None = None) -> bytes:
        url = f"{self._bases[0]}/api/{path}"
        timeout = CALL_TIMEOUT_S if data is None else WRITE_TIMEOUT_S
        try:
            return call(method, url, timeout, self._user, data)
        except urllib.error.HTTPError as error:
            with error:
                try:
                    reason = str(json.load(error)["reason"])
                except (ValueError, LookupError, TypeError, OSError):
                    reason = f"HTTP status {error.code}"
            name = self._user.partition(":")[0]
            if error.code == 401:
                reason = f"user {name!r} must be an administrator with this password: {reason}"
            if error.code == BUSY:
                raise Unavailable(f"{self._bases[0]}: {reason}") from None
            raise Refusal(error.code, f"{self._bases[0]}: {reason}") from None


def _path(vhost: str, name: str) -> str:
    return f"{quote(vhost, safe='')}/{quote(name, safe='')}"
