"""What fixtures from 0.3.0 on hold beside `dataset`: all that version 2 of the machines keeps.

`fill` puts it into a running cluster: some of it before the state of every queue is saved, so that
it comes out of snapshots, some behind, so that it comes out of the log. `check` compares a cluster
with it and lets go on what was under way.
"""

from __future__ import annotations

import json
from typing import Any

import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]

from convoymq.cli.cluster import LocalCluster
from tests.faults.traffic import until

QUORUM = {"x-queue-type": "quorum"}
YEARS_MS = 300_000_000_000
"""Some nine years: longer than a fixture is read, and below the bound."""
SOON_MS = 1_000
"""What is due or over when the fixture is read."""
FAR_MS = 4_000_000_000_000
"""In the year 2096."""
LETTERS = {
    "x-dead-letter-exchange": "graves",
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}
QUEUES: dict[str, dict[str, Any]] = {
    "timed": {"x-message-ttl": YEARS_MS, "x-expires": YEARS_MS, "x-max-length-bytes": 1_000_000},
    "brief": {},
    "urgent": {"x-consumer-timeout": 3_600_000, "x-consumer-disconnected-timeout": 30_000},
    "classes": {"x-priority-mode": "two-classes"},
    "scheduled": {},
    "retried": {
        "x-delayed-retry-type": "all",
        "x-delayed-retry-min": YEARS_MS,
        "x-delayed-retry-max": YEARS_MS,
    },
    "once": {"x-deduplication-count": 100},
    "recent": {"x-deduplication-time": 7 * 24 * 3600 * 1000},
    "grouped": {},
    "dying": {**LETTERS, "x-delivery-limit": 1},
    "graveyard": {},
    "full": {"x-max-length": 2, "x-overflow": "reject-publish"},
    "chosen": {},
    "failing": {"x-delivery-limit": 5, "x-requeue-position": "front"},
}
EXCHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "hashed": ("x-consistent-hash", {}),
    "modulus": ("x-modulus-hash", {}),
    "chance": ("x-random", {}),
    "near": ("x-local-random", {}),
    "later": ("x-delayed-message", {"x-delayed-type": "topic"}),
}
LISTS = ("policies", "operator-policies", "vhost-limits", "user-limits")
BROWSED = ("urgent", "classes", "timed", "failing", "chosen", "full")
"""Queues whose messages are compared one by one."""
SHOWN = ("payload", "redelivered", "acquired_count", "delivery_count", "enqueued_at", "properties")
COUNTS = (
    "messages_ready",
    "messages_delayed",
    "messages_dlx",
    "messages_deduplicated",
    "deduplication_ids",
    "messages_by_priority",
)


def has_policies(cluster: LocalCluster, http: Any) -> bool:
    """Sets the first policy, which is refused until the version of the tree is raised."""
    body = {"pattern": "^timed$", "definition": {"max-length": 1000}, "apply-to": "queues"}
    http(cluster, "PUT", "policies/%2F/lengths", body)
    return True


class Filling:
    """One cluster that is filled or looked at, by a channel with confirms."""

    def __init__(self, cluster: LocalCluster, channel: Any, http: Any) -> None:
        self.cluster = cluster
        self.channel = channel
        self.http = http

    # --- filling -------------------------------------------------------------------------

    def fill(self) -> dict[str, Any]:
        """Returns what `check` wants to find."""
        self._declare()
        self._part(0)
        self.http(self.cluster, "POST", "convoy/queues/checkpoint", {})
        self._part(1)
        self._operate()
        for name, count in (("dying", 6), ("retried", 2), ("scheduled", 2)):
            until(lambda n=name, c=count: self._elsewhere(n) == c, f"{name} is not filled")
        self._publish("brief", "over", expiration=str(SOON_MS))
        self._publish("scheduled", "soon", headers={"x-delay": SOON_MS})
        found: dict[str, Any] = {name: self._browse(name) for name in BROWSED}
        found["counts"] = {name: self._counts(name) for name in QUEUES}
        found["lists"] = {name: self._list(name) for name in LISTS}
        return found

    def _declare(self) -> None:
        channel = self.channel
        for name, arguments in QUEUES.items():
            channel.queue_declare(name, durable=True, arguments={**QUORUM, **arguments})
        for name, (kind, arguments) in EXCHANGES.items():
            channel.exchange_declare(name, kind, durable=True, arguments=arguments)
        channel.queue_bind("chosen", "hashed", "3")
        channel.queue_bind("chosen", "later", "a.#")
        for path, body in (
            (
                "operator-policies/%2F/bytes",
                {"pattern": "^timed$", "definition": {"max-length-bytes": 500_000}},
            ),
            ("vhost-limits/%2F/max-queues", {"value": 500}),
            ("user-limits/guest/max-channels", {"value": 500}),
        ):
            self.http(self.cluster, "PUT", path, body)

    def _part(self, part: int) -> None:
        """The same in every queue, before its state is saved and after that."""
        channel = self.channel
        for number in range(2):
            mark = f"{part}.{number}"
            self._publish("timed", mark)
            self._publish("once", mark, message_id=mark)
            self._publish("once", "repeat", message_id=mark)
            self._publish("recent", mark, message_id=mark)
            self._publish("chosen", mark, headers={"n": 2 * part + number})
            for group in ("a", "b"):
                self._publish("grouped", f"{group}{mark}", headers={"x-group-id": group})
            for priority in (0, 4, 9, 31):
                self._publish("urgent", f"{mark} {priority}", priority=priority)
                self._publish("classes", f"{mark} {priority}", priority=priority)
        self._publish("full", str(part))
        self._publish("scheduled", str(part), headers={"x-deliver-at": FAR_MS + part})
        for queue in ("retried", "failing"):
            self._publish(queue, str(part))
            method, _, _ = channel.basic_get(queue)
            channel.basic_reject(method.delivery_tag, requeue=True)
        for _ in range(3):
            self._publish("dying", str(part))
            channel.basic_reject(channel.basic_get("dying")[0].delivery_tag, requeue=False)
        channel.basic_ack(channel.basic_get("classes")[0].delivery_tag)

    def _operate(self) -> None:
        """One operation that is over, and one that waits for room in its target."""
        path = "convoy/queues/%2F/chosen/messages"
        chosen = {"filter": {"headers": {"n": 0}}, "operation": "ended"}
        self.http(self.cluster, "POST", f"{path}/delete", chosen)
        until(lambda: self._operation("ended")["state"] == "done", "it does not end")
        chosen = {"filter": {"headers": {"n": 3}}, "operation": "waits", "queue": "full"}
        self.http(self.cluster, "POST", f"{path}/move", chosen)
        until(lambda: self._operation("waits")["waiting"] == 1, "nothing waits")

    # --- looking at it -------------------------------------------------------------------

    def check(self, expected: dict[str, Any]) -> None:
        """Asserts that all is there, and that what was under way goes on."""
        for name in LISTS:
            assert self._list(name) == expected["lists"][name], name
        until(lambda: not self._counts("brief")["messages_ready"], "what is over does not go")
        until(lambda: self._counts("scheduled")["messages_ready"] == 1, "what is due does not come")
        for name in BROWSED:
            assert self._browse(name) == expected[name], name
        for name in ("once", "recent", "grouped", "dying", "retried", "full", "chosen", "failing"):
            assert self._counts(name) == expected["counts"][name], name
        self._check_repeats()
        self._check_groups()
        self._check_letters()
        self._check_operations()
        assert self._elsewhere("scheduled") == 2
        kinds = {row["name"]: row["type"] for row in self.http(self.cluster, "GET", "exchanges")}
        assert {name: kinds[name] for name in EXCHANGES} == {
            name: kind for name, (kind, _) in EXCHANGES.items()
        }

    def _check_repeats(self) -> None:
        for name in ("once", "recent"):
            # What the week of `recent` has forgotten meanwhile is taken; `once` forgets nothing.
            before = self._counts(name)
            self._publish(name, "again", message_id="1.1")
            until(lambda n=name, b=before: self._counts(n) != b, f"nothing comes into {name}")
        known = self._counts("once")
        assert known["messages_ready"] == 4
        assert known["messages_deduplicated"] == 5

    def _check_groups(self) -> None:
        got = []
        for _ in range(8):
            method, _, body = self.channel.basic_get("grouped")
            got.append(body.decode())
            self.channel.basic_ack(method.delivery_tag)
        for group in ("a", "b"):
            ours = [each[1:] for each in got if each[0] == group]
            assert ours == ["0.0", "0.1", "1.0", "1.1"]

    def _check_letters(self) -> None:
        """Dead letters that wait for their exchange arrive when it is declared."""
        self.channel.exchange_declare("graves", "fanout", durable=True)
        self.channel.queue_bind("graveyard", "graves")
        until(lambda: self._counts("graveyard")["messages_ready"] == 6, "dead letters are missing")
        for _ in range(6):
            method, properties, _ = self.channel.basic_get("graveyard")
            (death,) = properties.headers["x-death"]
            assert (death["queue"], death["reason"]) == ("dying", "rejected")
            self.channel.basic_ack(method.delivery_tag)

    def _check_operations(self) -> None:
        """The operation that was over is remembered; the other one gets room, and ends."""
        ended = self._operation("ended")
        assert (ended["state"], ended["deleted"]) == ("done", 1)
        for part in range(2):
            # The limit is soft: after a restart one message more may have been taken.
            method, _, body = self.channel.basic_get("full")
            assert body == b"%d" % part
            self.channel.basic_ack(method.delivery_tag)
        until(lambda: self._operation("waits")["state"] == "done", "the operation does not end")
        assert self._operation("waits")["moved"] == 1
        left = [row["payload"] for row in self._browse("full")]
        assert left == ["1.1"]

    # --- one by one ----------------------------------------------------------------------

    def _publish(self, queue: str, body: str, **properties: Any) -> None:
        sent = pika.BasicProperties(delivery_mode=2, **properties)
        self.channel.basic_publish("", queue, body.encode(), sent)

    def _browse(self, queue: str) -> list[dict[str, Any]]:
        page = self.http(self.cluster, "GET", f"convoy/queues/%2F/{queue}/messages")
        return [{name: row[name] for name in SHOWN} for row in page["messages"]]

    def _counts(self, queue: str) -> dict[str, Any]:
        row = self.http(self.cluster, "GET", f"queues/%2F/{queue}")
        return {name: row.get(name) for name in COUNTS}

    def _elsewhere(self, queue: str) -> int:
        """Messages that are kept for their target, or wait for a time."""
        row = self._counts(queue)
        return int(row["messages_dlx"] or 0) + int(row["messages_delayed"] or 0)

    def _operation(self, name: str) -> dict[str, Any]:
        path = f"convoy/queues/%2F/chosen/operations/{name}"
        found: dict[str, Any] = self.http(self.cluster, "GET", path)
        return found

    def _list(self, name: str) -> list[Any]:
        return sorted(self.http(self.cluster, "GET", name), key=json.dumps)
