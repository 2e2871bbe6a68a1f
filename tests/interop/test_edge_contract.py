"""One table of behaviour that every client protocol passes, on three nodes that share a process:
refused log-ins, limits, alarms, closing by an operator, drain, stop, TLS, oversized input, silence.

The line protocol of tests/examples stands for protocols that are still to come.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pika.spec as spec  # type: ignore[import-untyped]
import pytest
import trustme

from convoymq.broker.changes import (
    SHA256,
    DeleteUser,
    PutPermission,
    PutUser,
    PutUserLimit,
    PutVhost,
    PutVhostLimit,
    hash_sha256,
)
from convoymq.edges import registry
from convoymq.edges.amqp10.opening import PLAIN_HEADER, SASL_HEADER, TLS_HEADER
from convoymq.model.columnar import PREFACE, Frame, FrameReader, Op, encode_frame
from tests.patience import PATIENCE_S
from tests.raw_amqp import PROTOCOL_HEADER, RawPeer
from tests.running import Nodes, until
from tests.unit.edges.columnar.support import values_frame

QUEUE = "contract"
VHOST_LIMITED, USER_LIMITED, VHOST_CLOSED = "limited", "limited", "closed"
HANDSHAKE_MS = 3_000
CONNECTIONS_MAX = 4
OVERSIZED = 1 << 20
PLAIN, CROWDED, SECURE = 1, 2, 3
"""The nodes: one as it comes, one with few connections, and one that listens with TLS only."""


def user_command(name: str, *tags: str) -> PutUser:
    return PutUser(name=name, password_hash=hash_sha256(b"secret"), algorithm=SHA256, tags=tags)


class Turned(Exception):
    """The node refused the client, or closed its connection, and said why."""


class Speaker:
    """A client of one protocol, on a bare socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(PATIENCE_S)

    def greet(self) -> None:
        """Says what it speaks, and does not log in yet."""
        raise NotImplementedError

    def log_in(self, user: str, password: str, vhost: str) -> None:
        """Logs in, after `greet`. Raises Turned."""
        raise NotImplementedError

    def publish(self) -> None:
        """Publishes a message and waits until it is safe. Raises Turned."""
        raise NotImplementedError

    def overflow(self) -> None:
        """Sends more at once than anybody takes before a log-in."""
        with suppress(OSError):
            self.socket.sendall(b"\x01" * OVERSIZED)

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()

    def end(self) -> str:
        """Returns what the node says last; it must close the connection."""
        raise NotImplementedError

    def rest(self) -> bytes:
        """Reads until the node closes the connection."""
        came = b""
        with suppress(ConnectionError):
            while data := self.socket.recv(65536):
                came += data
        return came


class Amqp(Speaker):
    """AMQP 0-9-1."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.peer = RawPeer.__new__(RawPeer)
        self.peer.socket, self.peer.timeout_s, self.peer._received = sock, PATIENCE_S, b""

    def greet(self) -> None:
        self.peer.start()

    def _expect(self, kind: type) -> None:
        while True:
            _, method = self.peer.method()
            if isinstance(method, spec.Connection.Close | spec.Channel.Close):
                raise Turned(f"{method.reply_code} {method.reply_text}")
            if not isinstance(method, spec.Connection.Blocked | spec.Connection.Unblocked):
                assert isinstance(method, kind), method
                return

    def log_in(self, user: str, password: str, vhost: str) -> None:
        self.peer.start_ok(user=user, password=password)
        self._expect(spec.Connection.Tune)
        self.peer.send(0, spec.Connection.TuneOk(channel_max=9, frame_max=131072, heartbeat=0))
        self.peer.send(0, spec.Connection.Open(virtual_host=vhost))
        self._expect(spec.Connection.OpenOk)

    def publish(self) -> None:
        self.peer.send(1, spec.Channel.Open())
        self._expect(spec.Channel.OpenOk)
        self.peer.send(1, spec.Confirm.Select())
        self._expect(spec.Confirm.SelectOk)
        self.peer.publish(1, b"x", routing_key=QUEUE)
        self._expect(spec.Basic.Ack)

    def end(self) -> str:
        try:
            self._expect(type(None))
        except Turned as error:
            self.peer.send(0, spec.Connection.CloseOk())
            self.peer.wait_closed()
            return str(error)
        raise AssertionError


class Columnar(Speaker):
    """The columnar protocol."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.reader = FrameReader(1 << 20)
        self.frames: list[Frame] = []

    def greet(self) -> None:
        self.socket.sendall(PREFACE)
        answer = b""
        while len(answer) < len(PREFACE):
            answer += self.socket.recv(len(PREFACE) - len(answer))
        assert answer == PREFACE

    def _answer(self) -> Frame:
        while not self.frames:
            data = self.socket.recv(65536)
            assert data, "closed without a word"
            self.frames += self.reader.feed(data)
        frame = self.frames.pop(0)
        error = frame.error()
        if error is not None:
            raise Turned(error.text)
        return frame

    def _ask(self, op: Op, fields: dict[str, object], payload: bytes = b"") -> Frame:
        self.socket.sendall(b"".join(encode_frame(op, 0, 1, fields, payload)))
        return self._answer()

    def log_in(self, user: str, password: str, vhost: str) -> None:
        given = {"mechanism": "PLAIN", "user": user, "password": password, "vhost": vhost}
        self._ask(Op.AUTHENTICATE, given)

    def publish(self) -> None:
        self._ask(Op.PRODUCE, {"queue": QUEUE}, values_frame([b"x"]))

    def end(self) -> str:
        try:
            self._answer()
        except Turned as error:
            self.rest()
            return str(error)
        raise AssertionError


class Http(Speaker):
    """The HTTP API: each request logs in."""

    def greet(self) -> None:
        self.head, self.vhost = "", "/"

    def _ask(self, method: str, path: str, body: object = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} /api/{path} HTTP/1.1\r\nhost: node\r\n{self.head}"
        self.socket.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        came = b""
        while b"\r\n\r\n" not in came:
            came += self.socket.recv(65536)
        first, _, rest = came.partition(b"\r\n")
        fields, _, answer = rest.partition(b"\r\n\r\n")
        length = int(fields.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(answer) < length:
            answer += self.socket.recv(65536)
        if int(first.split()[1]) >= 400:
            raise Turned(f"{first.decode()} {answer.decode()}")

    def log_in(self, user: str, password: str, vhost: str) -> None:
        given = base64.b64encode(f"{user}:{password}".encode()).decode()
        self.head, self.vhost = f"authorization: Basic {given}\r\n", vhost.replace("/", "%2F")
        self._ask("GET", f"queues/{self.vhost}")

    def publish(self) -> None:
        body = {
            "properties": {}, "routing_key": QUEUE, "payload": "x", "payload_encoding": "string",
        }  # fmt: skip
        self._ask("POST", f"exchanges/{self.vhost}/amq.default/publish", body)

    def end(self) -> str:
        return self.rest().decode()


class Lines(Speaker):
    """The line protocol of tests/examples."""

    def greet(self) -> None:
        self.socket.sendall(b"LINES\n")
        self.file = self.socket.makefile("rb")

    def close(self) -> None:
        if hasattr(self, "file"):
            self.file.close()
        super().close()

    def _answer(self) -> str:
        line: str = self.file.readline().decode().rstrip("\n")
        if line.startswith("ERROR "):
            raise Turned(line.removeprefix("ERROR "))
        return line

    def log_in(self, user: str, password: str, vhost: str) -> None:
        self.socket.sendall(f"LOGIN {user} {password} {vhost}\n".encode())
        assert self._answer() == "READY"

    def publish(self) -> None:
        self.socket.sendall(f"PUBLISH {QUEUE} x\n".encode())
        assert self._answer() == "OK"

    def end(self) -> str:
        try:
            self._answer()
        except Turned as error:
            assert self.file.read() == b""
            return str(error)
        raise AssertionError


class Running:
    """Three nodes on a loop in a thread of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clients: list[Speaker] = []
        self.nodes = Nodes(directory, 3, handshake_timeout=str(HANDSHAKE_MS))
        authority = trustme.CA()
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority.configure_trust(self.tls)
        certificate = authority.issue_cert("127.0.0.1")
        certificate.private_key_and_cert_chain_pem.write_to_path(str(directory / "node.pem"))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.call(self._start())

    def call(self, work: Coroutine[object, object, Any]) -> Any:
        """Runs on the loop of the nodes."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def until(self, condition: Callable[[], object]) -> None:
        """Waits on the loop of the nodes."""
        self.call(until(condition))

    async def _start(self) -> None:
        for number in (PLAIN, CROWDED, SECURE):
            self.start(number)
        await self.nodes.ready()
        execute = self.nodes[PLAIN].broker.tree.execute
        for vhost in (VHOST_LIMITED, VHOST_CLOSED):
            await execute(PutVhost(name=vhost))
        for user in ("app", USER_LIMITED):
            await execute(user_command(user, "management"))
            for vhost in ("/", VHOST_LIMITED):
                every = {"configure": ".*", "write": ".*", "read": ".*"}
                await execute(PutPermission(user=user, vhost=vhost, **every))
        await execute(PutVhostLimit(vhost=VHOST_LIMITED, name="max-connections", value=1))
        await execute(PutUserLimit(user=USER_LIMITED, name="max-connections", value=1))
        await self.nodes[PLAIN].broker.declarations.declare_queue(
            "/", QUEUE, durable=True, exclusive=False, auto_delete=False
        )
        await self.settled()

    def start(self, number: int) -> None:
        """Starts a node."""
        more = {}
        if number == CROWDED:
            most = str(CONNECTIONS_MAX)
            more = {"connection_max": most, "fetch.connections_max": most}
        if number == SECURE:
            file = str(self.directory / "node.pem")
            port = str(self.nodes.amqp_port(SECURE))
            more = {
                "listeners.tcp.default": "none",
                "listeners.ssl.default": f"127.0.0.1:{port}",
                "ssl_options.certfile": file,
                "ssl_options.keyfile": file,
            }
        self.nodes.start(number, **more)

    async def settled(self) -> None:
        """Waits until all nodes have what was declared, and the queue has a leader."""
        for number in list(self.nodes.running):
            broker = self.nodes[number].broker
            tree, locations = broker.tree, broker.locations
            await until(lambda t=tree: t.queues.find("/", QUEUE) is not None)
            record = tree.queues.get("/", QUEUE)
            await until(lambda at=locations, q=record: at.leader_of(q) is not None)
            await until(lambda t=tree: t.users.limits_of(USER_LIMITED))

    def connect(self, kind: type[Speaker], number: int = PLAIN, *, tls: bool = False) -> Any:
        """Connects a client, which has said nothing yet."""
        name = "management.tcp.port" if kind is Http else "listeners.tcp.default"
        address = ("127.0.0.1", self.nodes.ports[number][name])
        sock = socket.create_connection(address, timeout=PATIENCE_S)
        if tls:
            sock = self.tls.wrap_socket(sock, server_hostname="127.0.0.1")
        made = kind(sock)
        self.clients.append(made)
        return made

    def hang_up(self) -> None:
        """Ends all clients."""
        for client in self.clients:
            client.close()
        self.clients.clear()

    def enter(self, kind: type[Speaker], number: int = PLAIN, **more: Any) -> Any:
        """Connects a client that has logged in."""
        made = self.connect(kind, number, tls=more.pop("tls", False))
        made.greet()
        try:
            made.log_in(**{"user": "app", "password": "secret", "vhost": "/", **more})
        except Turned:
            # A node waits for the answer to a connection.close.
            made.close()
            raise
        return made

    def connections(self, number: int) -> int:
        """Returns how many connections a node has, those that are not logged in too."""
        node = self.nodes[number]
        held = sum(len(getattr(edge, "connections", ())) for edge in node.edges)
        return held + len(node.served._ports.undecided)

    def empty(self) -> None:
        """Waits until no client is left on any node."""
        for number in list(self.nodes.running):
            node = self.nodes[number]
            self.until(lambda n=number, b=node.broker: not self.connections(n) + len(b.connections))

    def close(self) -> None:
        """Ends everything."""
        self.call(self.nodes.__aexit__())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)
        self.loop.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "EDGES", [*registry.EDGES, "tests.examples.protocol_edge"])
        made = Running(tmp_path_factory.mktemp("contract"))
        yield made
        made.close()


@pytest.fixture(autouse=True)
def left_as_found(running: Running) -> Iterator[None]:
    running.empty()
    yield
    running.hang_up()


#: Connections of the HTTP API are no clients: they have no limits, and TLS comes from a proxy.
EVERY = pytest.mark.parametrize("kind", [Amqp, Columnar, Http, Lines])
CONNECTED = pytest.mark.parametrize("kind", [Amqp, Columnar, Lines])


def reason(work: Callable[[], object]) -> str:
    """Returns why a client is turned away."""
    with pytest.raises(Turned) as turned:
        work()
    return str(turned.value)


@EVERY
@pytest.mark.parametrize(
    ("user", "password"), [("app", "wrong"), ("nobody", "secret"), ("app", "")]
)
def test_wrong_credentials_are_refused_alike(
    running: Running, kind: type[Speaker], user: str, password: str
) -> None:
    """Who is not known, and whose password is wrong, get one answer: nobody learns names."""
    said = reason(lambda: running.enter(kind, user=user, password=password)).lower()
    assert "refused" in said or "401" in said
    assert running.nodes[PLAIN].broker.access.logins


@EVERY
@pytest.mark.parametrize("vhost", [VHOST_CLOSED, "none"])
def test_a_virtual_host_without_permission_is_refused(
    running: Running, kind: type[Speaker], vhost: str
) -> None:
    said = reason(lambda: running.enter(kind, vhost=vhost))
    assert vhost in said or "401" in said or "404" in said


@CONNECTED
def test_a_node_takes_so_many_connections(running: Running, kind: type[Speaker]) -> None:
    """The columnar protocol has a bound of its own, and says so."""
    held = [running.enter(kind, CROWDED) for _ in range(CONNECTIONS_MAX)]
    late = running.connect(kind, CROWDED)
    if kind is Columnar:
        late.greet()
        assert "too many connections" in late.end()
    else:
        assert late.rest() == b""
    for each in held:
        each.close()
    running.empty()
    running.enter(kind, CROWDED)


@CONNECTED
@pytest.mark.parametrize("where", [{"vhost": VHOST_LIMITED}, {"user": USER_LIMITED}])
def test_limits_of_virtual_hosts_and_users_hold_over_all_nodes(
    running: Running, kind: type[Speaker], where: dict[str, str]
) -> None:
    first = running.enter(kind, **where)
    for other in (Amqp, Columnar, Lines):
        assert "limit" in reason(lambda o=other: running.enter(o, CROWDED, **where))
    first.close()
    running.empty()
    running.enter(kind, CROWDED, **where).close()


@EVERY
def test_alarms_hold_publishers_back(running: Running, kind: type[Speaker]) -> None:
    """A client waits for the end of the alarm, or is told of it; nothing is stored meanwhile."""
    client = running.enter(kind)
    alarms = running.nodes[CROWDED].broker.alarms

    async def set_alarm(on: bool) -> None:
        alarms.set("memory", on)

    running.call(set_alarm(True))
    running.until(lambda: running.nodes[PLAIN].broker.alarms.effective)
    outcome: list[object] = []

    def publish() -> None:
        try:
            client.publish()
        except Turned as error:
            outcome.append(str(error))
        else:
            outcome.append(None)

    thread = threading.Thread(target=publish)
    thread.start()
    node = running.nodes[PLAIN]
    running.until(lambda: outcome or any(r["state"] == "blocked" for r in _rows(node)))
    assert None not in outcome
    running.call(set_alarm(False))
    running.until(lambda: not node.broker.alarms.effective)
    thread.join(PATIENCE_S)
    (said,) = outcome
    if said is not None:
        assert "alarm" in str(said)
        client.publish()
    client.close()


def _rows(node: Any) -> list[dict[str, Any]]:
    return [each.info() for each in node.broker.connections.all()]


@CONNECTED
def test_an_operator_closes_a_connection_with_a_reason(
    running: Running, kind: type[Speaker]
) -> None:
    client = running.enter(kind, CROWDED)
    (row,) = _rows(running.nodes[CROWDED])
    assert (row["user"], row["vhost"], row["node"]) == (
        "app",
        "/",
        running.nodes[CROWDED].shown_name,
    )
    assert row["name"].endswith(f":{running.nodes.amqp_port(CROWDED)}")
    cluster = running.nodes[PLAIN].broker.cluster
    assert running.call(cluster.close_connection(row["name"], "too loud"))
    assert "too loud" in client.end()


@CONNECTED
def test_connections_of_a_deleted_user_end(running: Running, kind: type[Speaker]) -> None:
    execute = running.nodes[PLAIN].broker.tree.execute
    every = {"configure": ".*", "write": ".*", "read": ".*"}
    running.call(execute(user_command("passing")))
    running.call(execute(PutPermission(user="passing", vhost="/", **every)))
    client = running.enter(kind, user="passing")
    running.call(execute(DeleteUser(name="passing")))
    assert "user 'passing' is deleted" in client.end()


@CONNECTED
def test_a_drained_node_has_no_clients(running: Running, kind: type[Speaker]) -> None:
    """Clients are told why. One that was about to log in does not stay either."""
    maintenance = running.nodes[PLAIN].broker.maintenance
    client = running.enter(kind, CROWDED)
    late = running.connect(kind, CROWDED)
    late.greet()
    running.call(maintenance.set_drained(CROWDED, drained=True))
    assert "maintenance" in client.end()
    late.log_in("app", "secret", "/")
    assert "maintenance" in late.end()
    running.until(lambda: not running.connections(CROWDED))
    with pytest.raises(ConnectionError):
        running.connect(kind, CROWDED)
    running.call(maintenance.set_drained(CROWDED, drained=False))

    def takes_clients() -> bool:
        return bool(running.nodes[CROWDED].served._ports.sockets)

    running.until(takes_clients)
    running.enter(kind, CROWDED).close()


@CONNECTED
def test_a_node_with_tls_only_takes_nothing_else(running: Running, kind: type[Speaker]) -> None:
    client = running.enter(kind, SECURE, tls=True)
    client.publish()
    (row,) = _rows(running.nodes[SECURE])
    assert row["ssl"] is True
    client.close()
    plain = running.connect(kind, SECURE)
    with suppress(OSError):
        plain.socket.sendall(PROTOCOL_HEADER)
    assert b"AMQP" not in plain.rest()


@EVERY
def test_oversized_input_ends_the_connection(running: Running, kind: type[Speaker]) -> None:
    """Before a log-in; nobody keeps what is too much."""
    client = running.connect(kind, CROWDED)
    client.greet()
    client.overflow()
    client.rest()
    running.empty()


@CONNECTED
@pytest.mark.parametrize("greets", [False, True])
def test_a_client_that_does_not_log_in_is_closed(
    running: Running, kind: type[Speaker], greets: bool
) -> None:
    client = running.connect(kind, SECURE, tls=True)
    if greets:
        client.greet()
    client.rest()


OF_AMQP_10 = (PLAIN_HEADER, SASL_HEADER, TLS_HEADER)


@pytest.mark.parametrize("header", [*OF_AMQP_10, PROTOCOL_HEADER, b"AMQP\x00\x00\x09\x02"])
def test_two_versions_of_amqp_share_a_port(running: Running, header: bytes) -> None:
    client = running.connect(Amqp)
    for byte in header:
        client.socket.sendall(bytes((byte,)))
    if header == PROTOCOL_HEADER:
        client._expect(spec.Connection.Start)
        client.close()
    else:
        own = SASL_HEADER if header in OF_AMQP_10 else PROTOCOL_HEADER
        assert client.socket.recv(len(own), socket.MSG_WAITALL) == own
        client.close()


@CONNECTED
def test_a_node_that_stops_says_so(running: Running, kind: type[Speaker]) -> None:
    client = running.enter(kind, CROWDED)
    stopped = asyncio.run_coroutine_threadsafe(running.nodes.stop(CROWDED), running.loop)
    said = client.end()
    assert "stops" in said or "shutdown" in said
    stopped.result(PATIENCE_S)

    async def again() -> None:
        running.start(CROWDED)
        await running.nodes.ready(CROWDED)
        await running.settled()

    running.call(again())
