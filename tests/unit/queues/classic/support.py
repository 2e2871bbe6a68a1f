"""Builds message records and drives classic queues without sockets or a loop."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

import convoymq.broker.drivers  # noqa: F401
from convoymq.kernels.batch import record
from convoymq.metadata.machine import QueueRecord
from convoymq.model.tables import Table
from convoymq.node.notes import log_note
from convoymq.queues.classic.log import FILE_BYTES_MAX
from convoymq.queues.dead_letter_publisher import DeadLetterOptions
from convoymq.queues.driver import MEMORY_TARGET_BYTES, HostParts
from convoymq.queues.interface import ConsumerSpec, Delivery, GetResult, PublishOutcome, QueueClient
from convoymq.queues.mirrored.host import MirroredHost
from convoymq.routing.policies import Policies, effective_settings
from convoymq.routing.types import Queue as DeclaredQueue
from convoymq.routing.types import QueueType
from convoymq.storage.files import RealDirectory
from convoymq.storage.threads import ThreadWorker
from convoymq.transport.control import ControlPlane
from tests.patience import PATIENCE_S
from tests.unit.queues.dead_letter_targets import Routes


def message(
    body: bytes,
    *,
    persistent: bool = True,
    priority: int | None = None,
    expiration: str = "",
    message_id: str = "",
) -> bytes:
    """One record: default exchange, routing key `q`."""
    flags = 1 << 12
    properties = bytes([2 if persistent else 1])
    if priority is not None:
        flags |= 1 << 11
        properties += bytes([priority])
    if expiration:
        flags |= 1 << 8
        properties += bytes([len(expiration)]) + expiration.encode()
    if message_id:
        flags |= 1 << 7
        properties += bytes([len(message_id)]) + message_id.encode()
    payload = struct.pack(">HHQH", 60, 0, len(body), flags) + properties
    header = struct.pack(">BHI", 2, 1, len(payload)) + payload + b"\xce"
    frame = struct.pack(">BHI", 3, 1, len(body)) + body + b"\xce" if body else b""
    return b"\x00\x01q" + header + frame


def body_of(block: bytes, command: int, index: int) -> bytes:
    """The body of a record, if it is in one frame."""
    data = record(block, command, index)
    at = 1 + data[0]
    at += 1 + data[at]
    length = struct.unpack_from(">I", data, at + 3)[0]
    at += 7 + length + 1
    if at == len(data):
        return b""
    size = struct.unpack_from(">I", data, at + 3)[0]
    return data[at + 7 : at + 7 + size]


class Channel:
    """Hears a client and keeps what it heard."""

    def __init__(self) -> None:
        self.client: QueueClient
        self.heard: list[tuple[Any, ...]] = []
        self.got: list[tuple[int, int, bytes, int]] = []
        """(consumer, message id, body, acquired)"""
        self.said: list[tuple[int, bytes]] = []
        """(failed deliveries, annotations) of the same messages"""

    def deliveries(self, consumer: int = 1) -> list[bytes]:
        return [body for number, _, body, _ in self.got if number == consumer]

    def on_published(
        self, client: QueueClient, tags: Sequence[int], outcome: PublishOutcome
    ) -> None:
        self.heard.append(("published", list(tags), bool(outcome)))

    def on_deliver(self, client: QueueClient, delivery: Delivery) -> None:
        consumer, first_id, block, command, first, count, acquired, *said = delivery
        for i in range(count):
            body = body_of(block, command, first + i)
            self.got.append((consumer, first_id + i, body, acquired))
            self.said.append((said[0], said[1]))

    def on_subscribed(self, client: QueueClient, consumer: int, error: Exception | None) -> None:
        self.heard.append(("subscribed", consumer, error and str(error)))

    def on_credit(self, client: QueueClient, consumer: int, granted: int, ready: int) -> None:
        self.heard.append(("credit", consumer, granted, ready))

    def on_activity(self, client: QueueClient, consumer: int, active: bool) -> None:
        self.heard.append(("activity", consumer, active))

    def on_cancel_ok(self, client: QueueClient, consumer: int) -> None:
        self.heard.append(("cancel-ok", consumer))

    def on_cancelled(self, client: QueueClient, consumer: int, reason: str) -> None:
        self.heard.append(("cancelled", consumer, reason))

    def on_get(self, client: QueueClient, result: GetResult) -> None:
        block, command, record, get_id, acquired, _, ready, error = result
        body = None if block is None else body_of(block, command, record)
        self.heard.append(("got", body, get_id, acquired, ready, error and str(error)))

    def on_purged(self, client: QueueClient, count: int, error: Exception | None) -> None:
        self.heard.append(("purged", count, error and str(error)))

    def on_flow(self, client: QueueClient, blocked: bool) -> None:
        self.heard.append(("flow", blocked))

    def publish(self, *bodies: bytes, tag: int = 0, **properties: Any) -> None:
        for body in bodies:
            flags = 4 if properties.get("expiration") else 0
            flags |= 2 if properties.get("priority") is not None else 0
            self.client.target.publish([message(body, **properties)], len(body), tag, flags)
            tag += 1 if tag else 0

    def consume(self, number: int = 1, *, prefetch: int = 0, **more: Any) -> None:
        spec = ConsumerSpec(
            number=number, tag=f"c{number}", prefetch=prefetch, no_ack=more.pop("no_ack", False),
            **more,
        )  # fmt: skip
        self.client.subscribe(spec)


class Timer:
    def __init__(self, time: Time, call: tuple[Any, ...]) -> None:
        self.time = time
        self.call = call

    def cancel(self) -> None:
        if self.call in self.time.calls:
            self.time.calls.remove(self.call)


class Time:
    """A clock that stands still until told."""

    def __init__(self) -> None:
        self.ms = 1_000_000
        self.calls: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = []

    def now_ms(self) -> int:
        return self.ms

    def monotonic_ms(self) -> int:
        return self.ms

    def call_later(self, delay_ms: int, callback: Any, *arguments: Any) -> Timer:
        self.calls.append((self.ms + delay_ms, callback, arguments))
        return Timer(self, self.calls[-1])

    def random(self) -> float:
        return 0.5

    def pass_by(self, ms: int) -> None:
        self.ms += ms
        due = [call for call in self.calls if call[0] <= self.ms]
        self.calls = [call for call in self.calls if call[0] > self.ms]
        for _, callback, arguments in due:
            callback(*arguments)


class Wire:
    """Transport between nodes of one test; frames arrive when `Node.settle` runs."""

    def __init__(self, node: int, nodes: dict[int, Node]) -> None:
        self.full: set[int] = set()
        self.node = node
        self.nodes = nodes
        self.down: set[int] = set()

    def send(self, node: int, frame: bytes, body: Sequence[bytes] = ()) -> None:
        if node in self.nodes:
            self.nodes[node].inbox.append((self.node, b"".join([frame, *body])))

    def is_connected(self, node: int) -> bool:
        return node in self.nodes and node not in self.down

    def backlog_bytes(self, node: int) -> int:
        return 0


class Node:
    """One classic host with its control plane."""

    lost_groups = 0

    def __init__(
        self,
        node: int,
        nodes: dict[int, Node],
        directory: Path,
        time: Time,
        *,
        file_bytes_max: int = FILE_BYTES_MAX,
        memory_target_bytes: int = MEMORY_TARGET_BYTES,
    ) -> None:
        self.id = node
        self.nodes = nodes
        self.inbox: list[tuple[int, bytes]] = []
        self.reports: list[tuple[str, int]] = []
        self.sessions = node << 56 | 1 << 24
        self.later: list[Callable[[], None]] = []
        self.wire = Wire(node, nodes)
        self.lines: dict[int, list[Any]] = {}
        """Node -> who waits for room on the link to it."""
        self.control = ControlPlane(node, self.wire)
        self.routes = Routes()
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.worker = ThreadWorker(self.later.append)
        self.host = MirroredHost(
            HostParts(
                node_id=node,
                incarnation=self.incarnation_of(node),
                open_directory=lambda _name: RealDirectory(directory / f"node-{node}"),
                clock=time,
                control=self.control,
                reports=self,
                new_session=self.new_session,
                node_name_of=self.node_name_of,
                on_routes=lambda: None,
                call_soon=self.later.append,
                wanted=lambda: None,
                await_room=lambda node, item: self.lines.setdefault(node, []).append(item),
                record_members=self.record_members,
                has_majority=lambda: True,
                running_nodes=lambda: sorted(nodes),
                incarnation_of=self.incarnation_of,
                load=dict,
                lost_groups=lambda: self.lost_groups,
                read_tree=lambda answer: answer(True, None),
                note=self.note,
                dead_letters=DeadLetterOptions(routes=self.routes),
                memory_target_bytes=memory_target_bytes,
            ),
            self.worker,
        )
        self.host.file_bytes_max = file_bytes_max
        nodes[node] = self

    def incarnation_of(self, node: int) -> int:
        return 1

    def record_members(self, command: Any, answer: Any) -> None:
        """The tree of one node has no other members."""

    def on_unused(self, record: QueueRecord) -> None:
        self.reports.append(("unused", record.group))

    def on_expired(self, record: QueueRecord) -> None:
        self.reports.append(("expired", record.group))

    def on_disk_error(self, record: QueueRecord, error: Exception) -> None:
        self.reports.append(("disk error", record.group))

    def note(self, event: str, **fields: Any) -> None:
        self.notes.append((event, fields))
        log_note(structlog.get_logger(), event, fields)

    def new_session(self) -> int:
        self.sessions += 1
        return self.sessions

    def node_name_of(self, node: int) -> str:
        return f"n{node}"

    def open(self, queue: QueueRecord, **arguments: Any) -> Any:
        table = Table.of({k.replace("_", "-"): v for k, v in arguments.items()})
        declared = DeclaredQueue(name=queue.name, type=queue.type, arguments=table)
        return self.host.open(queue, table, effective_settings(declared, Policies()))

    def channel(self, queue: Any) -> Channel:
        made = Channel()
        made.client = queue.client(self.new_session(), made)
        return made

    def make_room(self, node: int) -> None:
        """The link to a node takes bulk again."""
        self.wire.full.discard(node)
        for item in self.lines.pop(node, []):
            item.on_room(node)

    def suspect(self, node: int) -> None:
        """A node is silent, as `ReplicaHost.on_suspect` tells those that wait; its link stays."""
        for item in self.lines.pop(node, []):
            item.on_lost(node)

    def run_later(self) -> bool:
        callbacks, self.later[:] = list(self.later), []
        for callback in callbacks:
            callback()
        return bool(callbacks)


def settle(nodes: dict[int, Node], *, disk: bool = True) -> None:
    """Runs rounds, frames and the disk until nothing moves."""
    while True:
        for node in nodes.values():
            node.host.end_of_round()
        moved = False
        for node in nodes.values():
            inbox, node.inbox = node.inbox, []
            for sender, data in inbox:
                moved = True
                if sender not in node.wire.down:
                    node.control.on_frame(sender, data)
        if moved:
            continue
        if disk:
            for node in nodes.values():
                wait_for_writer(node)
                moved = node.run_later() or moved
        if not moved:
            return


def wait_for_writer(node: Node) -> None:
    """Returns when the worker has carried out everything it was given."""
    if node.host.writer.is_idle:
        return
    reached = threading.Event()
    node.worker.submit(reached.set, lambda _result, _error: None)
    assert reached.wait(PATIENCE_S)


def queue_record(
    name: str = "q",
    *,
    group: int = 1,
    home: int = 1,
    durable: bool = False,
    owner: str | None = None,
) -> QueueRecord:
    return QueueRecord(
        vhost="/",
        name=name,
        group=group,
        type=QueueType.CLASSIC,
        durable=durable,
        members=(home,),
        owner=owner,
        created_ms=0,
    )
