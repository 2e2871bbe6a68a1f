"""A shop's messages for people who look at the page: objects of each kind, and clients that work.

    python -m tests.page.content [--base-port 5672] [--directory DIR]

starts three nodes, a broker group and clients, and serves until it is interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pika  # type: ignore[import-untyped]
from examples.demo_groups import Processes

from convoymq.cli.cluster import LocalCluster
from tests.clusters import call, serves_policies, wait_http
from tests.faults.traffic import until

JSON = "application/json"
STOP_S = 10.0
COUNTRIES = ("de", "fr", "pl", "it")
QUEUES: dict[str, dict[str, object]] = {
    "orders": {
        "x-queue-type": "quorum", "x-dead-letter-exchange": "failed", "x-delivery-limit": 3,
    },
    "payments": {"x-queue-type": "quorum", "x-single-active-consumer": True},
    "failed-orders": {"x-queue-type": "quorum"},
    "invoices": {"x-queue-type": "quorum"},
    "mail": {"x-queue-type": "classic", "x-max-priority": 3},
    "thumbnails": {"x-queue-type": "classic"},
    "sessions": {"x-queue-type": "classic"},
    "events": {"x-queue-type": "stream", "x-max-length-bytes": 1 << 30},
    "clicks": {"x-queue-type": "stream", "x-stream-max-segment-size-bytes": 1 << 20},
}  # fmt: skip
BINDINGS = {
    "shop": {
        "q/orders": "order.#", "q/payments": "order.paid", "q/invoices": "order.*",
        "q/events": "#", "e/notify": "order.paid",
    },
    "failed": {"q/failed-orders": ""},
    "notify": {"q/mail": "", "q/sessions": ""},
    "uploads": {"q/thumbnails": "image", "q/clicks": "click"},
}  # fmt: skip
EXCHANGES = {"shop": "topic", "failed": "fanout", "notify": "fanout", "uploads": "direct"}


def declare(ask: Callable[..., Any]) -> None:
    """Makes the objects of the shop."""
    for name, arguments in QUEUES.items():
        ask("PUT", f"queues/%2F/{name}", {"durable": True, "arguments": arguments})
    for name, kind in EXCHANGES.items():
        ask("PUT", f"exchanges/%2F/{name}", {"type": kind})
    for source, ends in BINDINGS.items():
        for end, key in ends.items():
            ask("POST", f"bindings/%2F/e/{source}/{end}", {"routing_key": key})
    ask("PUT", "topics/%2F/ledger", {"partitions": 3, "logical": 256})
    for group in ("billing", "reports"):
        ask("PUT", f"topics/%2F/ledger/groups/{group}", {})
    for name, pattern, definition, number in (
        ("work", "^(orders|payments|invoices)$", {"max-length": 1_000_000}, 1),
        ("orders-first", "^orders$", {"max-length": 500_000, "overflow": "reject-publish"}, 5),
        ("logs", "^(events|clicks)$", {"max-age": "7D"}, 1),
        ("mirrors", "^sessions$", {"ha-mode": "exactly", "ha-params": 2}, 1),
    ):
        policy = {"pattern": pattern, "definition": definition, "priority": number}
        ask("PUT", f"policies/%2F/{name}", {**policy, "apply-to": "queues"})
    limits = {"max-length": 5_000_000}
    ask("PUT", "operator-policies/%2F/bounds", {
        "pattern": ".*", "definition": limits, "priority": 0, "apply-to": "queues",
    })  # fmt: skip
    ask("PUT", "vhosts/staging", {"description": "Trials before a release"})
    ask("PUT", "vhost-limits/staging/max-queues", {"value": 50})
    ask("PUT", "users/anna", {"password": "anna", "tags": "management"})
    ask("PUT", "users/monitor", {"password": "monitor", "tags": "monitoring"})
    rights = {"configure": "^anna", "write": ".*", "read": ".*"}
    ask("PUT", "permissions/%2F/anna", rights)
    ask("PUT", "topic-permissions/%2F/anna", {"exchange": "shop", "write": "^order", "read": ".*"})
    ends = {"src-uri": "amqp://", "src-queue": "failed-orders", "dest-uri": "amqp://127.0.0.1:1"}
    ask("PUT", "parameters/shovel/%2F/to-archive", {"value": ends | {"dest-queue": "archive"}})


def change_route(ask: Callable[..., Any]) -> None:
    """Gives the topic a history: one partition is split, and a half of it merged with another."""

    def change(kind: str, body: dict[str, object]) -> None:
        ask("POST", f"topics/%2F/ledger/{kind}", body)
        until(lambda: ask("GET", "topics/%2F/ledger")["latest_change"]["is_finished"], "no end")

    change("split", {"pid": 0})
    route = sorted(ask("GET", "topics/%2F/ledger/route"), key=lambda row: row["lo"])
    change("merge", {"pids": [row["pid"] for row in route[1:3]]})


class Clients:
    """Publishers and consumers, each a thread with a connection that it opens again."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.ended = threading.Event()
        self.threads: list[threading.Thread] = []

    def run(self, name: str, work: Callable[[Any], None]) -> None:
        thread = threading.Thread(target=self._keep, args=(name, work), daemon=True)
        self.threads.append(thread)
        thread.start()

    def _keep(self, name: str, work: Callable[[Any], None]) -> None:
        for turn in itertools.count(len(self.threads)):
            if self.ended.is_set():
                return
            port = self.ports[turn % len(self.ports)]
            properties = {"connection_name": name}
            parameters = pika.ConnectionParameters(
                "127.0.0.1", port, client_properties=properties, blocked_connection_timeout=30
            )
            with contextlib.suppress(pika.exceptions.AMQPError, OSError):
                connection = pika.BlockingConnection(parameters)
                work(connection.channel())
            self.ended.wait(0.2)

    def publish(
        self, name: str, exchange: str, keys: list[str], rate: float, headers: dict[str, Any]
    ) -> None:
        """Publishes JSON with one key after the other, so many a second."""

        def work(channel: Any) -> None:
            channel.confirm_delivery()
            begin = time.monotonic()
            for number in itertools.count():
                if self.ended.is_set():
                    channel.connection.close()
                    return
                body = {"number": number, "total": number * 37 % 9000 / 100, "text": "x" * 200}
                properties = pika.BasicProperties(
                    content_type=JSON, delivery_mode=2, message_id=f"{name}-{number}",
                    headers={"country": COUNTRIES[number % 4], **headers},
                )  # fmt: skip
                channel.basic_publish(
                    exchange, keys[number % len(keys)], json.dumps(body).encode(), properties
                )
                self.ended.wait(max(0.0, begin + (number + 1) / rate - time.monotonic()))

        self.run(name, work)

    def consume(
        self,
        name: str,
        queue: str,
        *,
        prefetch: int = 20,
        wait_s: float = 0.0,
        reject: int = 0,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        """Takes messages, and rejects each so many-th; acknowledges after a wait."""

        def work(channel: Any) -> None:
            numbers = itertools.count()

            def take(channel: Any, method: Any, *_: object) -> None:
                if wait_s:
                    channel.connection.sleep(wait_s)
                if reject and next(numbers) % reject == 0:
                    channel.basic_reject(method.delivery_tag, requeue=False)
                else:
                    channel.basic_ack(method.delivery_tag)

            channel.basic_qos(prefetch_count=prefetch)
            channel.basic_consume(queue, take, arguments=arguments, consumer_tag=name)
            while not self.ended.is_set():
                channel.connection.process_data_events(0.2)
            channel.connection.close()

        self.run(name, work)

    def stop(self) -> None:
        """Ends the clients; one that waits for an answer of its node ends with the process."""
        self.ended.set()
        deadline = time.monotonic() + STOP_S
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def work(ports: list[int], ask: Callable[..., Any]) -> Clients:
    """Starts the shop's clients."""
    clients = Clients(ports)
    keys = ["order.new", "order.paid", "order.new", "order.sent"]
    clients.publish("web-shop 1", "shop", keys, 60, {})
    clients.publish("web-shop 2", "shop", ["order.new", "cart.changed"], 40, {})
    clients.publish("uploads", "uploads", ["image", "click", "click"], 30, {})
    clients.publish("accounts", "ledger", [f"account-{n}" for n in range(40)], 30, {})
    clients.consume("packing 1", "orders", reject=60)
    clients.consume("packing 2", "orders", prefetch=50, reject=90)
    clients.consume("slow packing", "orders", prefetch=5, wait_s=0.5)
    clients.consume("payments 1", "payments")
    clients.consume("payments 2", "payments")
    clients.consume("invoice printer", "invoices", prefetch=40, wait_s=0.05)
    clients.consume("mailer", "mail", wait_s=0.02)
    clients.consume("session log", "sessions")
    clients.consume("thumbnails", "thumbnails", wait_s=0.2, prefetch=10)
    clients.consume("event log", "events", arguments={"x-stream-offset": "first"})
    clients.consume("billing 1", "ledger/billing")
    clients.consume("billing 2", "ledger/billing")
    clients.consume("reports", "ledger/reports", wait_s=0.2, prefetch=5)
    for minutes in (1, 10, 60):
        properties = {"headers": {"x-delay": minutes * 60_000}, "content_type": JSON}
        payload = {"payload": '{"remind": true}', "payload_encoding": "string"}
        body = {"routing_key": "orders", "properties": properties, **payload}
        ask("POST", "exchanges/%2F/amq.default/publish", body)
    return clients


@contextlib.contextmanager
def shop(directory: Path, base_port: int, *, groups: bool = True) -> Iterator[LocalCluster]:
    """Three nodes with the objects and the clients, and a broker group with a topic."""
    with contextlib.ExitStack() as opened:
        settings = {}
        if groups:
            processes = Processes(directory, range(base_port + 20, base_port + 48, 4))
            opened.callback(processes.stop)
            for name in ("namesrv", "n-0", "n-1", "m-0"):
                processes.start(name)
            settings["rocketmq.namesrv"] = processes.name_server
        made = opened.enter_context(LocalCluster(directory / "nodes", 3, base_port, settings))
        made.wait_ready()
        wait_http(made)
        until(lambda: serves_policies(made), "policies are not served")

        def ask(method: str, path: str, body: object = None) -> Any:
            status, answer = call(made, method, path, body)
            assert status < 300, f"{method} {path}: {status} {answer}"
            return answer

        declare(ask)
        clients = work([node.amqp_port for node in made.nodes], ask)
        opened.callback(clients.stop)
        change_route(ask)
        yield made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-port", type=int, default=5672)
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.ExitStack() as opened:
        directory = given.directory or Path(opened.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        cluster = opened.enter_context(shop(directory, given.base_port))
        print(f"http://127.0.0.1:{cluster.nodes[0].http_port}/", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
