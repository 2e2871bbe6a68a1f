"""One load run: publishers and consumers on one thread, measured by the compiled client.

The run is a loop over `select`: due publishes are pumped, readable sockets are read, broken
connections are dialled again (next address, 50 ms pause). What was not confirmed is sent again in
order after a reconnect.
"""

from __future__ import annotations

import math
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from convoymq.cli.perf.amqp10 import Amqp10Connection, reason_of, template_of
from convoymq.cli.perf.connection import (
    NUMBER,
    Address,
    BrokerSaid,
    Connection,
    number_position,
    publish_template,
    stamp_position,
)
from convoymq.cli.perf.processes import BrokerProcesses
from convoymq.cli.perf.schedule import Schedule
from convoymq.edges.amqp091 import _spec, codec
from convoymq.edges.amqp10.performatives import read
from convoymq.kernels.perfclient import (
    STAMP_SIZE,
    Consumer,
    Histogram,
    Ledger,
    Publisher,
    clock_us,
    work_through,
)
from convoymq.kernels.perfclient_amqp10 import Consumer10, Publisher10

RECONNECT_PAUSE_S = 0.05
IDLE_WAIT_S = 0.05
ACK_PAUSE_S = 0.25
CREDIT = 65_536
"""Of a consumer of AMQP 1.0 without a prefetch."""
TOPIC_GROUP = "perf"
"""Group of the consumers of a topic."""
POLLED_MIN = 64
"""From so many clients on the kernel keeps the list of their sockets: `epoll`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Options of a measurement; see those of `convoy perf`."""

    publisher_uris: Sequence[Address]
    consumer_uris: Sequence[Address]
    declare_uris: Sequence[Address]
    protocol: str = "amqp091"
    queue_type: str = "quorum"
    declare_arguments: Mapping[str, bool | int | str] = field(default_factory=dict)
    properties: _spec.Properties = field(default_factory=_spec.Properties)
    distinct: int = 0
    queues: int = 1
    publishers: int = 1
    consumers: int = 1
    queue_prefix: str = "perf"
    size: int = 1024
    in_flight: int = 1000
    prefetch: int = 1000
    ack_every: int = 50
    seconds: float = 15.0
    warmup: float = 2.0
    drain: float = 20.0
    rate: float = 0.0
    variable_rates: Sequence[tuple[float, float]] = ()
    """(messages a second, seconds), instead of `rate`."""
    count: int = 0
    mode: str = "both"
    keep: bool = False
    delete_first: bool = True
    verify: bool = False
    pids: Sequence[int] = ()
    kill_pid: int = 0
    kill_at: float = 0.0
    kill_signal: int = 9
    label: str = ""

    def __post_init__(self) -> None:
        if self.mode not in ("both", "pub", "cons"):
            raise ValueError("--mode is one of both, pub, cons")
        if self.queue_type not in ("quorum", "classic", "stream", "topic", "none"):
            raise ValueError("--queue-type is one of quorum, classic, stream, topic, none")
        for name in ("queues", "publishers", "consumers", "in_flight"):
            if not 1 <= getattr(self, name) <= 65_535:
                hint = {"consumers": "; --mode pub only publishes",
                        "publishers": "; --mode cons only consumes"}.get(name, "")  # fmt: skip
                raise ValueError(f"--{name.replace('_', '-')} lies between 1 and 65535{hint}")
        if self.protocol not in ("amqp091", "amqp10"):
            raise ValueError("--protocol is one of amqp091, amqp10")
        if self.protocol == "amqp10" and self.topic:
            raise ValueError("--protocol amqp10 works on queues")
        if self.ack_every < 0 and self.protocol != "amqp10":
            raise ValueError("--ack-every of less than 0 (modified) needs --protocol amqp10")
        if self.verify and self.size < 16:
            raise ValueError("--verify needs --size of at least 16")
        if self.verify and self.topic:
            raise ValueError("--verify checks the order of a queue; a topic has one per key")
        if self.rate and self.variable_rates:
            raise ValueError("--rate and --variable-rate exclude each other")
        self.schedule()
        if self.prefetch and abs(self.ack_every) > (self.prefetch + 1) // 2:
            raise ValueError("--ack-every is at most half of --prefetch")

    def schedule(self) -> Schedule | None:
        """Returns when messages are due; None: at once. Raises ValueError."""
        if self.variable_rates:
            return Schedule(self.variable_rates)
        return Schedule([(self.rate, 1.0)]) if self.rate > 0 else None

    @property
    def topic(self) -> str:
        """Returns the ordered topic that is published to and consumed from; empty: queues are. It
        exists, and is neither declared nor deleted."""
        return self.queue_prefix if self.queue_type == "topic" else ""

    def queue_name(self, number: int) -> str:
        """Returns the name of the queue that client `number` works on."""
        if self.topic:
            return f"{self.topic}/{TOPIC_GROUP}"
        return f"{self.queue_prefix}-{number % self.queues}"

    @property
    def routing_key(self) -> str:
        """Returns the routing key of messages to a topic: a key of each message's number."""
        return f"key-{NUMBER.decode()}"


@dataclass(slots=True)
class Progress:
    """A look at a running load, for a live display."""

    seconds: float
    published: int
    confirmed: int
    consumed: int
    in_flight: int
    reconnects: int
    phase: str


class _Client:
    """A publisher or consumer with its connection and how to get it back."""

    def __init__(self, number: int, addresses: Sequence[Address]) -> None:
        self.number = number
        self.addresses = addresses
        self.attempts = number
        self.connection: Connection | Amqp10Connection | None = None
        self.retry_at = 0.0

    def next_address(self) -> Address:
        address = self.addresses[self.attempts % len(self.addresses)]
        self.attempts += 1
        return address


class Run:
    """Executes a `Plan`; `run()` returns the report with the keys of the JSON output."""

    def __init__(self, plan: Plan, on_progress: Callable[[Progress], None] | None = None) -> None:
        self.plan = plan
        self.on_progress = on_progress
        self._schedule = plan.schedule()
        self.is_amqp10 = plan.protocol == "amqp10"
        self.run_id = random.SystemRandom().randrange(1, 65_536)
        self.confirm_latency = Histogram()
        self.e2e_latency = Histogram()
        self.ledgers = [Ledger() for _ in range(plan.publishers)]
        self.reconnects = self.cancelled = self.blocked = 0
        self.publishers: list[tuple[_Client, Publisher]] = []
        self.consumers: list[tuple[_Client, Consumer]] = []
        if plan.mode != "cons":
            self.publishers = [
                (
                    _Client(k, plan.publisher_uris),
                    (Publisher10 if self.is_amqp10 else Publisher)(
                        self.ledgers[k], k, self.run_id, plan.in_flight, self.confirm_latency
                    ),
                )
                for k in range(plan.publishers)
            ]
        if plan.mode != "pub":
            expected_run = self.run_id if plan.mode == "both" else 0
            self.consumers = [
                (
                    _Client(k, plan.consumer_uris),
                    (Consumer10 if self.is_amqp10 else Consumer)(
                        self.ledgers,
                        expected_run,
                        max(1, abs(plan.ack_every)),
                        plan.ack_every == 0,
                        self.e2e_latency,
                        plan.verify,
                    ),
                )
                for k in range(plan.consumers)
            ]
        self._workers: list[tuple[_Client, Publisher | Consumer]] = [
            *self.publishers,
            *self.consumers,
        ]
        #: Of many clients: who has a socket.
        self._polled: dict[int, Publisher | Consumer] = {}
        self._owners: dict[int, _Client] = {}
        self._epoll = select.epoll() if len(self._workers) >= POLLED_MIN else None
        #: Clients without a connection.
        self._away = len(self._workers)
        self._phase = "setup"
        self._processes = BrokerProcesses(plan.pids)
        self._killed_at_us = 0

    # -- connections -------------------------------------------------------------------------------

    def declare(self) -> None:
        """Declares the queues, deleting them first unless told otherwise."""
        plan = self.plan
        for number in () if plan.topic else range(plan.queues):
            connection = Connection(plan.declare_uris[number % len(plan.declare_uris)])
            try:
                name = plan.queue_name(number)
                if plan.delete_first and plan.mode != "cons":
                    connection.delete_queue(name)
                arguments = dict(plan.declare_arguments)
                if plan.queue_type != "none":
                    arguments = {"x-queue-type": plan.queue_type, **arguments}
                connection.declare_queue(name, arguments)
            finally:
                connection.close()

    def delete(self) -> None:
        """Deletes the queues of this run."""
        for number in range(self.plan.queues):
            for address in (*self.plan.declare_uris, *self.plan.publisher_uris):
                try:
                    connection = Connection(address)
                    connection.delete_queue(self.plan.queue_name(number))
                    connection.close()
                    break
                except (OSError, BrokerSaid):
                    continue

    def _connect_publisher(self, client: _Client, publisher: Publisher) -> None:
        if isinstance(publisher, Publisher10):
            self._attach_publisher(client, publisher)
            return
        connection = Connection(client.next_address())
        connection.confirm()
        plan = self.plan
        template = publish_template(
            plan.topic,
            plan.routing_key if plan.topic else plan.queue_name(client.number),
            self.plan.size,
            self.plan.properties,
            frame_bytes_max=connection.frame_bytes_max,
        )
        connection.socket.setblocking(False)
        publisher.connect(
            connection.socket.fileno(),
            template,
            stamp_position(template, self.plan.size),
            number_position(template),
            self.plan.distinct,
        )
        self._connected(client, publisher, connection)

    def _attach_publisher(self, client: _Client, publisher: Publisher10) -> None:
        connection = Amqp10Connection(client.next_address())
        behind = connection.publish(self.plan.queue_name(client.number))
        size = self.plan.size
        made = template_of(size, self.plan.properties, frame_bytes_max=connection.frame_bytes_max)
        connection.socket.setblocking(False)
        publisher.start(
            connection.socket.fileno(),
            made.frames,
            made.body_at if size >= STAMP_SIZE else -1,
            number_position(made.frames),
            self.plan.distinct,
            made.places(connection.window),
        )
        publisher.feed(behind)
        self._connected(client, publisher, connection)

    def _attach_consumer(self, client: _Client, consumer: Consumer10) -> None:
        connection = Amqp10Connection(client.next_address())
        settled = self.plan.ack_every == 0
        behind = connection.consume(self.plan.queue_name(client.number), settled=settled)
        connection.socket.setblocking(False)
        consumer.start(
            connection.socket.fileno(), self.plan.prefetch or CREDIT, self.plan.ack_every < 0
        )
        consumer.feed(behind)
        self._connected(client, consumer, connection)

    def _connect_consumer(self, client: _Client, consumer: Consumer) -> None:
        if isinstance(consumer, Consumer10):
            self._attach_consumer(client, consumer)
            return
        connection = Connection(client.next_address())
        behind = connection.consume(
            self.plan.queue_name(client.number),
            self.plan.prefetch,
            no_ack=self.plan.ack_every == 0,
            arguments=self.plan.declare_arguments if self.plan.topic else {},
        )
        connection.socket.setblocking(False)
        consumer.connect(connection.socket.fileno())
        consumer.feed(behind)
        self._connected(client, consumer, connection)

    def _connected(
        self,
        client: _Client,
        worker: Publisher | Consumer,
        connection: Connection | Amqp10Connection,
    ) -> None:
        client.connection = connection
        self._away -= 1
        if self._epoll is not None:
            self._polled[worker.fd] = worker
            self._owners[worker.fd] = client
            worker.awaits_write = False
            self._epoll.register(worker.fd, select.EPOLLIN)

    def _reconnect(self) -> None:
        if not self._away:
            return
        now = time.monotonic()
        for client, publisher in self.publishers:
            if client.connection is None and now >= client.retry_at:
                self._try(client, lambda c=client, p=publisher: self._connect_publisher(c, p))  # type: ignore[misc]
        for client, consumer in self.consumers:
            if client.connection is None and now >= client.retry_at:
                self._try(client, lambda c=client, k=consumer: self._connect_consumer(c, k))  # type: ignore[misc]

    def _try(self, client: _Client, connect: Callable[[], None]) -> None:
        try:
            connect()
            self.reconnects += 1
        except (OSError, BrokerSaid):
            client.retry_at = time.monotonic() + RECONNECT_PAUSE_S

    def _check(self, client: _Client, worker: Publisher | Consumer) -> None:
        """Handles control frames and a broken connection of one client."""
        if worker.others:
            for kind, channel, payload in worker.others:
                if self.is_amqp10:
                    self._ended(worker, payload)
                elif kind == _spec.FRAME_METHOD:
                    self._control(worker, channel, payload)
            worker.others.clear()
        if worker.closed and client.connection is not None:
            # Closing it ends its registration, too.
            self._polled.pop(worker.fd, None)
            self._owners.pop(worker.fd, None)
            client.connection.socket.close()
            client.connection = None
            self._away += 1
            client.retry_at = time.monotonic() + RECONNECT_PAUSE_S
            worker.lost()

    @staticmethod
    def _ended(worker: Publisher | Consumer, payload: bytes) -> None:
        reason = reason_of(read(payload)[0])
        if reason:
            print(f"perf: broker closed: {reason}", file=sys.stderr)
            worker.closed = True

    def _control(self, worker: Publisher | Consumer, channel: int, payload: bytes) -> None:
        method = codec.decode_method(payload)
        if isinstance(method, _spec.BasicCancel):
            self.cancelled += 1
            worker.closed = True
        elif isinstance(method, _spec.ConnectionClose | _spec.ChannelClose):
            print(f"perf: broker closed: {method.reply_text}", file=sys.stderr)
            worker.closed = True
        elif isinstance(method, _spec.ConnectionBlocked):
            self.blocked += 1

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> dict[str, object]:
        """Runs the plan.

        Raises:
            OSError: no broker at the start.
            BrokerSaid: the broker refused the set-up.
        """
        self.declare()
        for client, consumer in self.consumers:
            self._connect_consumer(client, consumer)
        for client, publisher in self.publishers:
            self._connect_publisher(client, publisher)
        try:
            return self._measure()
        finally:
            for client, _ in self._workers:
                if client.connection is not None:
                    client.connection.socket.setblocking(True)
                    client.connection.close()
            if not self.plan.keep and not self.plan.topic:
                self.delete()

    def _measure(self) -> dict[str, object]:
        plan = self.plan
        started = time.monotonic()
        start_us = clock_us()
        counted = plan.count > 0
        window_from = started if counted else started + plan.warmup
        window_to = math.inf if counted else window_from + plan.seconds
        measuring = stopped = False
        window_us = [0, 0]
        base = (0, 0)
        marks = (0, 0)
        drain_until = math.inf
        next_report = started + 1.0
        first_event_us = 0
        killed = plan.kill_pid == 0
        while True:
            now = time.monotonic()
            if not killed and now >= started + plan.kill_at:
                self._processes.mark()
                self._killed_at_us = clock_us()
                os.kill(plan.kill_pid, plan.kill_signal)
                killed = True
            if not measuring and now >= window_from:
                measuring = True
                window_us[0] = clock_us()
                base = (self._confirmed(), self._consumed())
                self._processes.start()
                for _, worker in self._workers:
                    worker.measuring = True
                self._reset_gaps()
                self._phase = "measuring"
            if measuring and not stopped:
                done = self._count_done() if counted else now >= window_to
                if done:
                    stopped = True
                    window_us[1] = clock_us()
                    marks = (self._confirmed(), self._consumed())
                    self._processes.stop()
                    self._close_gaps()
                    for _, worker in self._workers:
                        worker.measuring = False
                    drain_until = now + plan.drain
                    self._phase = "draining"
            if stopped and (now >= drain_until or self._drained()):
                break
            if counted and not stopped and now - started > 3600:
                break
            self._pump(now - started, stopped)
            self._wait(now, started, stopped)
            self._reconnect()
            if first_event_us == 0 and (self._confirmed() or self._consumed()):
                first_event_us = clock_us()
            if self.on_progress and now >= next_report:
                next_report = now + 1.0
                self.on_progress(
                    Progress(
                        now - started,
                        sum(p.published for _, p in self.publishers),
                        self._confirmed(),
                        self._consumed(),
                        sum(p.outstanding for _, p in self.publishers),
                        self.reconnects,
                        self._phase,
                    )
                )
        if counted and first_event_us:
            window_us[0] = start_us if plan.mode != "cons" else first_event_us
        return self._report(window_us, base, marks)

    def _pump(self, elapsed: float, stopped: bool) -> None:
        plan = self.plan
        for client, publisher in self.publishers:
            if client.connection is None:
                continue
            limit = -1
            share = len(self.publishers)
            if self._schedule is not None:
                # Publisher k's n-th message is due with the (n·share + k)-th of all.
                limit = int((self._schedule.due(elapsed) - client.number) // share) + 1
            if plan.count > 0:
                own = plan.count // share + (1 if client.number < plan.count % share else 0)
                limit = own if limit < 0 else min(limit, own)
            publisher.pump(limit, stopped)

    def _wait(self, now: float, started: float, stopped: bool) -> None:
        timeout = IDLE_WAIT_S
        if self._schedule is not None and not stopped and self.publishers:
            sent = sum(p.published for _, p in self.publishers)
            due = started + self._schedule.at(sent)
            timeout = min(max(0.0, due - time.monotonic()), IDLE_WAIT_S)
        if self._away == len(self._workers):
            time.sleep(min(timeout, 0.01))
        elif self._epoll is not None:
            self._wait_polled(self._epoll, timeout)
        else:
            self._wait_selected(timeout)

    def _wait_selected(self, timeout: float) -> None:
        """Of few clients: select() takes microseconds, which an even rate needs; epoll rounds to
        milliseconds."""
        readable: dict[int, tuple[_Client, Publisher | Consumer]] = {}
        writable: list[int] = []
        for client, worker in self._workers:
            if client.connection is not None:
                readable[worker.fd] = (client, worker)
                if worker.wants_write:
                    writable.append(worker.fd)
        ready, writes, _ = select.select(list(readable), writable, [], timeout)
        for fd in writes:
            readable[fd][1].on_writable()
        for fd in ready:
            readable[fd][1].on_readable()
        for client, worker in self._workers:
            if worker.others or worker.closed:
                self._check(client, worker)
        if not ready:
            self._acknowledge_rests()

    def _wait_polled(self, epoll: select.epoll, timeout: float) -> None:
        """Of many clients: a turn costs as much as there is to do."""
        for _, publisher in self.publishers:
            if publisher.wants_write and not publisher.awaits_write:
                self._want(epoll, publisher)
        events = epoll.poll(timeout)
        for fd in work_through(events, self._polled):
            worker = self._polled[fd]
            self._check(self._owners[fd], worker)
            if not worker.closed and worker.wants_write != worker.awaits_write:
                self._want(epoll, worker)
        if not events:
            self._acknowledge_rests()

    @staticmethod
    def _want(epoll: select.epoll, worker: Publisher | Consumer) -> None:
        """Has the kernel tell when a client may write, or no more."""
        worker.awaits_write = worker.wants_write
        wanted = select.EPOLLIN | (select.EPOLLOUT if worker.awaits_write else 0)
        epoll.modify(worker.fd, wanted)

    def _acknowledge_rests(self) -> None:
        for _, consumer in self.consumers:
            if self._is_pause(consumer):
                consumer.ack_all()

    @staticmethod
    def _is_pause(consumer: Consumer) -> bool:
        """Nothing came for a while: what is not acknowledged yet may never fill a batch."""
        return clock_us() - consumer.last_deliver_us > ACK_PAUSE_S * 1e6

    # -- counting ----------------------------------------------------------------------------------

    def _confirmed(self) -> int:
        return sum(ledger.confirmed for ledger in self.ledgers)

    def _consumed(self) -> int:
        return sum(consumer.consumed for _, consumer in self.consumers)

    def _unique(self) -> int:
        return sum(ledger.unique for ledger in self.ledgers)

    def _count_done(self) -> bool:
        if self.plan.mode == "cons":
            done = self._unique() if self.plan.verify else self._consumed()
            return done >= self.plan.count
        return self._confirmed() >= self.plan.count

    def _drained(self) -> bool:
        outstanding = sum(publisher.outstanding for _, publisher in self.publishers)
        if outstanding or any(client.connection is None for client, _ in self.publishers):
            return False
        if self.plan.mode != "both":
            return True
        if self.plan.verify:
            return sum(ledger.missing() for ledger in self.ledgers) == 0
        return self._consumed() >= self._confirmed()

    def _reset_gaps(self) -> None:
        now = clock_us()
        for _, publisher in self.publishers:
            publisher.longest_gap_us = 0
            publisher.last_confirm_us = publisher.last_confirm_us and now
        for _, consumer in self.consumers:
            consumer.longest_gap_us = 0
            consumer.last_deliver_us = consumer.last_deliver_us and now

    def _close_gaps(self) -> None:
        """A gap that is still open at the end counts."""
        now = clock_us()
        for _, publisher in self.publishers:
            if publisher.outstanding and publisher.last_confirm_us:
                gap = now - publisher.last_confirm_us
                publisher.longest_gap_us = max(publisher.longest_gap_us, gap)
        for _, consumer in self.consumers:
            if consumer.last_deliver_us and self._confirmed() > self._consumed():
                gap = now - consumer.last_deliver_us
                consumer.longest_gap_us = max(consumer.longest_gap_us, gap)

    def _report(
        self, window_us: list[int], base: tuple[int, int], marks: tuple[int, int]
    ) -> dict[str, object]:
        plan = self.plan
        window_s = max(1e-6, (window_us[1] - window_us[0]) / 1e6)
        if plan.count:
            base = (0, 0)
        confirmed = marks[0] - base[0]
        consumed = marks[1] - base[1]
        workers = [p for _, p in self.publishers], [c for _, c in self.consumers]
        published = sum(p.published for p in workers[0])
        unconfirmed = sum(p.outstanding for p in workers[0])
        report: dict[str, object] = {
            "label": plan.label,
            "protocol": plan.protocol,
            "mode": plan.mode,
            "queue_type": plan.queue_type,
            "queues": plan.queues,
            "publishers": plan.publishers,
            "consumers": plan.consumers,
            "size": plan.size,
            "in_flight": plan.in_flight,
            "prefetch": plan.prefetch,
            "ack_every": plan.ack_every,
            "rate": plan.rate,
            "window_s": round(window_s, 3),
            "confirmed_per_s": round(confirmed / window_s, 1),
            "consumed_per_s": round(consumed / window_s, 1),
            "confirm_us": self.confirm_latency.summary(),
            "e2e_us": self.e2e_latency.summary(),
            "published": published,
            "confirmed": self._confirmed(),
            "nacked": sum(p.nacked for p in workers[0]),
            "unconfirmed": unconfirmed,
            "resent": sum(p.resent for p in workers[0]),
            "lost_unconfirmed": max(0, published - self._confirmed() - unconfirmed),
            "consumed": self._consumed(),
            "out_of_order": sum(c.out_of_order for c in workers[1]),
            "gaps": sum(c.gaps for c in workers[1]),
            "duplicates": sum(ledger.duplicates for ledger in self.ledgers),
            "redelivered": sum(c.redelivered for c in workers[1]),
            "missing": self._missing(),
            "foreign": sum(c.foreign for c in workers[1]),
            "returned": sum(p.returned for p in workers[0]),
            "bad": sum(w.bad for group in workers for w in group),
            "max_confirm_gap_ms": max((p.longest_gap_us for p in workers[0]), default=0) / 1000,
            "max_deliver_gap_ms": max((c.longest_gap_us for c in workers[1]), default=0) / 1000,
            "reconnects": self.reconnects,
            "cancelled": self.cancelled,
            "blocked": self.blocked,
        }
        if plan.kill_pid:
            report["kill_to_confirm_ms"] = self._after_kill(
                [(p.longest_gap_us, p.longest_gap_end_us) for p in workers[0]]
            )
            report["kill_to_deliver_ms"] = self._after_kill(
                [(c.longest_gap_us, c.longest_gap_end_us) for c in workers[1]]
            )
        usage = self._processes.usage()
        if plan.pids:
            report["broker_cpu_cores"] = round(usage.broker_cpu_s / window_s, 4)
            messages = consumed if plan.mode == "cons" else confirmed
            report["broker_cpu_s_per_1M"] = (
                round(usage.broker_cpu_s / messages * 1e6, 3) if messages else 0.0
            )
            report["broker_rss_mb"] = round(usage.broker_rss_bytes / 1e6, 1)
        report["client_cpu_cores"] = round(usage.client_cpu_s / window_s, 4)
        report["other_cpu_cores"] = round(usage.other_cpu_s / window_s, 4)
        return report

    def _missing(self) -> int:
        """Returns the number of messages that should have come and did not."""
        plan = self.plan
        if not plan.verify:
            return max(0, self._confirmed() - self._consumed()) if plan.mode == "both" else 0
        if plan.mode == "cons" and plan.count:
            return max(0, plan.count - self._unique())
        if plan.mode == "both":
            return sum(ledger.missing() for ledger in self.ledgers)
        return 0

    def _after_kill(self, gaps: list[tuple[int, int]]) -> float:
        """ms from the signal to the end of the longest gap; -1 when none ended after it."""
        ended = [end for _, end in gaps if end > self._killed_at_us > 0]
        return (max(ended) - self._killed_at_us) / 1000 if ended else -1.0


def install_signal_handlers() -> None:
    """Makes SIGTERM end a run like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
