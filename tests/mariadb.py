"""A MariaDB server for tests of captures, and a topic without a cluster to capture into."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from examples.cdc.database import MariaDb, Missing, check_version, execute, find

from convoymq.capture.database import Address
from convoymq.capture.reader import Capture, Options
from convoymq.capture.state import Progress, StateFile
from convoymq.client.producer_thread import TopicReceipt

__all__ = ["MariaDb", "Run", "Topic", "capture", "execute", "needs_mariadb", "options_of"]


def _missing() -> str:
    """Returns why no test can have a server; empty: it can."""
    try:
        check_version(find("mariadbd"))
    except Missing as error:
        return str(error)
    return ""


needs_mariadb = pytest.mark.skipif(bool(_missing()), reason=_missing() or "MariaDB is there")


@dataclass(slots=True)
class Topic:
    """A producer without a cluster: a topic that has a logical partition for every key.

    Each message is checked as it comes: places grow, and no message is stored twice.
    """

    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(key, event) in the order of their arrival."""
    fails_at: int = -1
    """Number of messages and tombstones after which the capture is killed."""
    tombstones: dict[str, int] = field(default_factory=dict)
    """Key -> tombstones, each of which followed its delete."""
    _stored: dict[bytes, bytes] = field(default_factory=dict)
    _last: bytes = b""
    _before: dict[bytes, bytes] = field(default_factory=dict)

    def begin_session(self) -> None:
        """A new producer knows what those before it have stored."""
        self._before = dict(self._stored)
        self._last = b""

    def is_stored(self, key: bytes | str, source_pos: bytes) -> bool:
        """As of `TopicProducer`."""
        assert isinstance(key, bytes)
        return self._before.get(key, b"") >= source_pos

    def send(
        self,
        key: bytes | str | None,
        body: bytes | None,
        headers: object = None,
        source_pos: bytes | None = None,
        *,
        timeout: float | None = None,
    ) -> Future[TopicReceipt]:
        """As of `TopicProducer`."""
        assert isinstance(key, bytes)
        assert source_pos is not None
        if len(self.messages) + sum(self.tombstones.values()) == self.fails_at:
            raise ConnectionError("killed")
        assert source_pos > self._last, "places of a session grow"
        assert source_pos > self._stored.get(key, b""), f"{key!r} is sent twice"
        self._last = self._stored[key] = source_pos
        done: Future[TopicReceipt] = Future()
        done.set_result(TopicReceipt(0, 0))
        name = key.decode()
        if body is None:
            deletes = [event for k, event in self.messages if k == name and event["op"] == "d"]
            assert source_pos.hex() == deletes[-1]["source"]["place"] + "00"
            self.tombstones[name] = self.tombstones.get(name, 0) + 1
            return done
        event = json.loads(body)
        assert event["source"]["place"] == source_pos.hex()
        self.messages.append((name, event))
        return done

    def flush(self, timeout: float | None = None) -> None:
        """As of `TopicProducer`: everything is stored at once."""

    def of(self, table: str) -> list[tuple[str, str]]:
        """Returns (operation, key) of a table's messages."""
        return [(event["op"], key) for key, event in self.messages if table == _table(event)]

    def rows(self, table: str) -> dict[str, dict[str, Any]]:
        """Returns the rows that the messages make, by key."""
        found: dict[str, dict[str, Any]] = {}
        for key, event in self.messages:
            if _table(event) != table:
                continue
            if event["op"] == "d":
                if not event["source"]["snapshot"]:
                    assert found[key] == event["before"]
                found.pop(key, None)
            elif event["op"] == "t":
                found.clear()
            else:
                if event["op"] == "u":
                    # Columns that came meanwhile are NULL.
                    assert all(event["before"].get(n) == v for n, v in found[key].items())
                found[key] = event["after"]
        return found


def _table(event: dict[str, Any]) -> str:
    return str(event["source"]["table"])


def options_of(**more: Any) -> Options:
    """Returns the rules of a capture that ends with what is there."""
    given: dict[str, Any] = {"server_id": 4_000_000_001, "keys": {}, "until_end": True, **more}
    return Options(**given)


@dataclass(slots=True)
class Run:
    """A capture that has ended: what it has reported, and its state."""

    reports: list[tuple[str, dict[str, Any]]]
    progress: Progress

    def reported(self, event: str) -> list[dict[str, Any]]:
        """Returns the values of reports of an event."""
        return [values for name, values in self.reports if name == event]


def capture(
    database: MariaDb,
    tables: Sequence[str],
    topic: Topic,
    state: Path,
    *,
    url: str = "",
    topic_created_ms: int = 1,
    **more: Any,
) -> Run:
    """Captures in this thread, until the end unless told otherwise."""
    place = url or database.url, topic_created_ms
    with capturing(database, tables, topic, state, options_of(**more), *place) as (made, run, _):
        made.run()
        run.progress = made.progress
        return run


@contextmanager
def capturing(
    database: MariaDb,
    tables: Sequence[str],
    topic: Topic,
    state: Path,
    options: Options,
    url: str = "",
    topic_created_ms: int = 1,
) -> Iterator[tuple[Capture, Run, threading.Event]]:
    """Yields a capture that has not begun, and what stops it."""
    topic.begin_session()
    stop = threading.Event()
    reports: list[tuple[str, dict[str, Any]]] = []

    def report(event: str, values: Mapping[str, Any]) -> None:
        reports.append((event, dict(values)))

    with StateFile(state) as file:
        made = Capture(
            Address.of(url or database.url), tables, topic, file, topic="changes",
            topic_created_ms=topic_created_ms, options=options, report=report,
            stop=stop,
        )  # fmt: skip
        yield made, Run(reports, made.progress), stop
