"""The client library against a server that answers by script: retries, deadlines, errors, forks."""

from __future__ import annotations

import os
import pickle
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from convoymq.client import Client, ClientConfig, TlsConfig, errors
from convoymq.client.link import is_here
from convoymq.client.pool import client as pooled
from convoymq.kernels.column_frame import build_frame
from convoymq.kernels.columns import VALUE
from convoymq.model.columnar import (
    ANSWER,
    PREFACE,
    ColumnarError,
    ErrorCode,
    Frame,
    FrameReader,
    Op,
    encode_error,
    encode_frame,
)
from tests.patience import PATIENCE_S

EMPTY_ROWS = build_frame(VALUE, 0, 7, 7, [b"", bytes(4), b""])
CLOSE = object()
"""As an answer: the server closes the connection without a word."""
SILENCE = object()
"""As an answer: the server says nothing."""

Answer = Callable[[Frame], Any]


class Server:
    """One server. `answers` are used up one request each; the last one stays."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[Frame] = []
        self.connections = 0
        self.preface = PREFACE
        self.login: Any = {"frame_max": 1 << 20, "node": "n"}
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._stopped = False
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(accepted)
            threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        # Whoever is accepted while the server stops is closed by nobody else.
        with peer, suppress(OSError):
            self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        peer.recv(len(PREFACE), socket.MSG_WAITALL)
        peer.sendall(self.preface)
        reader = FrameReader(1 << 30)
        while data := peer.recv(1 << 16):
            for frame in reader.feed(data):
                if frame.op == Op.AUTHENTICATE:
                    answer = self.login
                else:
                    self.requests.append(frame)
                    answer = self.answers[0]
                    if len(self.answers) > 1:
                        self.answers.pop(0)
                if answer is CLOSE:
                    return
                if answer is not SILENCE:
                    peer.sendall(self._encoded(frame, answer))

    def _encoded(self, frame: Frame, answer: Any) -> bytes:
        if isinstance(answer, ColumnarError):
            return b"".join(encode_error(frame.op, frame.correlation, answer))
        if isinstance(answer, bytes):
            return answer
        fields, payload = answer if isinstance(answer, tuple) else (answer, b"")
        parts = encode_frame(frame.op + ANSWER, 0, frame.correlation, fields, payload)
        return b"".join(parts)

    def drop_all(self) -> None:
        """Close every connection, as a node does that dies."""
        for peer in self._open:
            peer.close()
        self._open.clear()

    def stop(self) -> None:
        self._listening.close()
        self.drop_all()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def start(*answers: Any) -> Server:
        made.append(Server(*answers))
        return made[-1]

    yield start
    for server in made:
        server.stop()


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def open_one(*servers: Server, **more: Any) -> Client:
        addresses = tuple(server.address for server in servers)
        made.append(
            Client(ClientConfig(addresses, **{"timeout": PATIENCE_S, "spread": False, **more}))
        )
        return made[-1]

    yield open_one
    for client in made:
        client.close()


def refusal(code: ErrorCode, **details: Any) -> ColumnarError:
    return ColumnarError(code, f"text of {code.name}", details)


Serve = Callable[..., Server]
Connect = Callable[..., Client]


# --- answers ----------------------------------------------------------------------------------


def test_metadata_filters_by_pattern_and_sorts(serve: Serve, connect: Connect) -> None:
    row = {
        "type": "stream",
        "group": 4,
        "leader": None,
        "members": ["a", "b"],
        "first": 1,
        "next": 9,
        "bytes": 70,
        "arguments": {"x-queue-type": "stream"},
    }
    server = serve({"queues": [{"name": n, **row} for n in ("s.2", "other", "s.1", "xs.1")]})
    found = connect(server).metadata(pattern=r"s\.\d")
    assert [each.name for each in found] == ["s.1", "s.2"]
    assert (found[0].members, found[0].next, found[0].leader) == (("a", "b"), 9, None)
    assert server.requests[0].map == {"names": None, "types": ["stream"]}
    with pytest.raises(errors.PreconditionFailed, match="pattern"):
        connect(server).metadata(pattern="(")


def test_fetch_returns_the_frame_and_the_bounds(serve: Serve, connect: Connect) -> None:
    server = serve(({"first": 2, "high": 7}, EMPTY_ROWS))
    result = connect(server).fetch("s", 7, end=9, max_rows=5, wait_ms=20, compression="zstd")
    assert (result.first, result.high, result.next, result.frame.rows) == (2, 7, 7, 0)
    assert server.requests[0].map == {
        "stream": "s",
        "offset": 7,
        "end": 9,
        "max_rows": 5,
        "max_bytes": 16 << 20,
        "columns": 15,
        "wait_ms": 20,
        "compression": "zstd",
    }


def test_every_other_call(serve: Serve, connect: Connect) -> None:
    server = serve(
        {"offsets": [[3, None], [None, None]]},
        {},
        {"offset": None},
        {"offset": 12},
        {"epoch": 3, "fencing_token": 1, "first": 0, "next": 5},
        ({"first": 1, "next": 4}, EMPTY_ROWS),
        ({"cursor": [1, 2]}, EMPTY_ROWS),
        {"count": 2, "duplicates": 1, "unroutable": 0},
    )
    client = connect(server)
    assert client.offsets([("s", "latest", None), ("t", "timestamp", 5)]) == [
        (3, None),
        (None,) * 2,
    ]
    client.store_offset("s", "c", 12)
    assert client.query_offset("s", "c") is None
    assert client.query_offset("s", "c") == 12
    answer = client.reservation("q", "open", reservation="x", owner="o", ttl_ms=5)
    assert answer["next"] == 5
    assert client.reservation_fetch("q", "x", 3, 1, end=4).high == 4
    assert client.browse("q")[1] == [1, 2]
    result = client.produce(EMPTY_ROWS, queue="q", producer="p", sequence=4, digest=bytes(16))
    assert (result.count, result.duplicates) == (2, 1)
    assert server.requests[-1].map["digest"] == bytes(16)
    ops = [frame.op for frame in server.requests]
    assert ops == [
        Op.OFFSETS,
        Op.STORE_OFFSET,
        Op.QUERY_OFFSET,
        Op.QUERY_OFFSET,
        Op.RESERVATION,
        Op.RESERVATION_FETCH,
        Op.BROWSE,
        Op.PRODUCE,
    ]
    assert server.requests[4].map == {
        "queue": "q",
        "op": "open",
        "reservation": "x",
        "owner": "o",
        "ttl_ms": 5,
    }
    assert server.connections == 1


@pytest.mark.parametrize(
    ("answer", "kind", "fields"),
    [
        (refusal(ErrorCode.NOT_FOUND, near=["t"]), errors.NotFound, {"near": ("t",)}),
        (refusal(ErrorCode.ACCESS_REFUSED), errors.AccessRefused, {}),
        (
            refusal(ErrorCode.OFFSET_OUT_OF_RANGE, first=5, high=9),
            errors.OffsetOutOfRange,
            {"first": 5, "high": 9},
        ),
        (refusal(ErrorCode.PRECONDITION_FAILED), errors.PreconditionFailed, {}),
        (
            refusal(ErrorCode.RESERVATION_GONE, reason="no_reservation"),
            errors.ReservationGone,
            {"reason": "no_reservation"},
        ),
        (refusal(ErrorCode.INTERNAL_ERROR), errors.ClientError, {"code": 10}),
        (refusal(ErrorCode.NOT_IMPLEMENTED), errors.ClientError, {"code": 11}),
        (ColumnarError(99, "from the future"), errors.ClientError, {"code": 99}),
    ],
)
def test_errors_of_the_server(
    serve: Serve,
    connect: Connect,
    answer: ColumnarError,
    kind: type[errors.ClientError],
    fields: dict[str, Any],
) -> None:
    server = serve(answer, {"offset": 1})
    client = connect(server)
    with pytest.raises(kind) as refused:
        client.query_offset("s", "c")
    assert type(refused.value) is kind
    assert answer.text in str(refused.value)
    for name, value in fields.items():
        assert getattr(refused.value, name) == value
    assert len(server.requests) == 1, "such an error is not asked for twice"
    again = pickle.loads(pickle.dumps(refused.value))
    assert type(again) is kind
    assert again.__dict__ == refused.value.__dict__
    assert str(again) == str(refused.value)
    # The connection is as good as before.
    assert client.query_offset("s", "c") == 1
    assert server.connections == 1


# --- trying again -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [refusal(ErrorCode.UNAVAILABLE), refusal(ErrorCode.REPLICA_BEHIND, high=3), CLOSE],
)
def test_another_server_is_asked(serve: Serve, connect: Connect, first: Any) -> None:
    bad, good = serve(first), serve({"offset": 8})
    client = connect(bad, good)
    assert client.query_offset("s", "c") == 8
    assert client.query_offset("s", "c") == 8
    assert (len(bad.requests), len(good.requests)) == (1, 2), "it stays with the good one"


def cluster_of(serve: Serve, leader: str | None) -> list[Server]:
    """Nodes a, b and c with a stream, which answer with their own number."""
    row = {"name": "s", "type": "stream", "group": 3, "leader": leader, "members": ["a", "b", "c"]}
    row |= {"first": 0, "next": 9, "bytes": 5, "arguments": {}}
    servers = []
    for number, name in enumerate("abc"):
        server = serve()
        server.login = {"frame_max": 1 << 20, "node": name}
        rows = {"queues": [row]}
        server.answers = [rows, {"offset": number}] if not number else [{"offset": number}]
        servers.append(server)
    return servers


@pytest.mark.parametrize(("leader", "reader"), [("a", 2), ("b", 0), ("c", 1), (None, 0)])
def test_readers_go_where_they_cost_least(
    serve: Serve, connect: Connect, leader: str | None, reader: int
) -> None:
    client = connect(*cluster_of(serve, leader))
    client.go_closer("s")
    client.go_closer("s")
    assert client.query_offset("s", "c") == reader


@pytest.mark.parametrize(
    ("here", "reader"), [({1}, 1), ({0}, 0), ({0, 1}, 0), (set(), 2), ({0, 1, 2}, 2)]
)
def test_a_replica_on_this_machine_is_the_closest(
    serve: Serve,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    here: set[int],
    reader: int,
) -> None:
    servers = cluster_of(serve, "a")
    addresses = {servers[number].address for number in here}
    monkeypatch.setattr(
        "convoymq.client.client.is_here", lambda address: f"{address[0]}:{address[1]}" in addresses
    )
    client = connect(*servers)
    client.go_closer("s")
    assert client.query_offset("s", "c") == reader


def test_addresses_of_this_machine_are_known() -> None:
    assert is_here(("127.0.0.1", 5672))
    assert is_here(("localhost", 5672))
    assert not is_here(("192.0.2.1", 5672))
    assert not is_here(("no.such.host.invalid", 5672))


def test_a_node_that_is_away_is_not_gone_to(serve: Serve, connect: Connect) -> None:
    servers = cluster_of(serve, "a")
    servers[2].login = CLOSE
    client = connect(*servers)
    client.go_closer("s")
    assert client.query_offset("s", "c") == 0
    assert servers[1].connections == 1


def test_who_may_not_look_stays_where_it_is(serve: Serve, connect: Connect) -> None:
    server = serve(refusal(ErrorCode.ACCESS_REFUSED), {"offset": 4})
    client = connect(server)
    client.go_closer("s")
    assert client.query_offset("s", "c") == 4


def test_an_alarm_is_waited_for_on_the_same_connection(serve: Serve, connect: Connect) -> None:
    alarm = refusal(ErrorCode.RESOURCE_ALARM)
    server = serve(alarm, alarm, {"count": 1, "duplicates": 0, "unroutable": 0})
    assert connect(server).produce(EMPTY_ROWS, queue="q").count == 1
    assert server.connections == 1


def test_a_connection_that_was_lost_between_calls_is_made_anew(
    serve: Serve, connect: Connect
) -> None:
    server = serve({"offset": 8})
    client = connect(server)
    assert client.query_offset("s", "c") == 8
    server.drop_all()
    assert client.query_offset("s", "c") == 8
    assert server.connections == 2


def test_a_silent_server_is_left_for_another(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoymq.client.client.ATTEMPT_TIMEOUT_S", 0.05)
    silent, good = serve(SILENCE), serve({"offset": 8})
    assert connect(silent, good).query_offset("s", "c") == 8


def test_when_time_is_over_servers_and_cause_are_named(serve: Serve, connect: Connect) -> None:
    servers = [serve(refusal(ErrorCode.UNAVAILABLE)), serve(CLOSE)]
    client = connect(*servers, timeout=0.3)
    with pytest.raises(errors.Unavailable) as refused:
        client.query_offset("s", "c")
    for server in servers:
        assert server.address in str(refused.value)
    assert "0.3 s" in str(refused.value)
    assert "UNAVAILABLE" in str(refused.value) or "closed" in str(refused.value)


def test_a_replica_that_stays_behind_is_told_as_such(serve: Serve, connect: Connect) -> None:
    server = serve(refusal(ErrorCode.REPLICA_BEHIND, high=3))
    with pytest.raises(errors.ReplicaBehind) as refused:
        connect(server, timeout=0.2).fetch("s", 9)
    assert refused.value.high == 3


def test_a_silent_server_costs_no_more_than_the_timeout(serve: Serve, connect: Connect) -> None:
    with pytest.raises(errors.Unavailable):
        connect(serve(SILENCE), timeout=0.2).query_offset("s", "c")


# --- producing --------------------------------------------------------------------------------


def test_a_lost_answer_to_rows_without_producer_is_not_repeated(
    serve: Serve, connect: Connect
) -> None:
    lost, other = serve(CLOSE), serve({"count": 1, "duplicates": 0, "unroutable": 0})
    client = connect(lost, other)
    with pytest.raises(errors.MaybeProduced):
        client.produce(EMPTY_ROWS, queue="q")
    assert not other.requests
    assert client.produce(EMPTY_ROWS, queue="q").count == 1


@pytest.mark.parametrize("code", [ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL_ERROR])
def test_rows_that_may_be_in_are_told_so(serve: Serve, connect: Connect, code: ErrorCode) -> None:
    server = serve(refusal(code, maybe=True))
    with pytest.raises(errors.MaybeProduced):
        connect(server).produce(EMPTY_ROWS, queue="q")
    assert len(server.requests) == 1


def test_a_refusal_before_any_row_is_repeated(serve: Serve, connect: Connect) -> None:
    server = serve(refusal(ErrorCode.UNAVAILABLE), {"count": 1, "duplicates": 0, "unroutable": 0})
    assert connect(server).produce(EMPTY_ROWS, queue="q").count == 1


@pytest.mark.parametrize("first", [CLOSE, refusal(ErrorCode.UNAVAILABLE, maybe=True)])
def test_a_producer_s_rows_are_repeated(serve: Serve, connect: Connect, first: Any) -> None:
    lost, other = serve(first), serve({"count": 1, "duplicates": 1, "unroutable": 0})
    result = connect(lost, other).produce(EMPTY_ROWS, queue="q", producer="p", sequence=3)
    assert result.duplicates == 1
    assert lost.requests[0].map == other.requests[0].map
    assert bytes(other.requests[0].payload) == EMPTY_ROWS


def test_a_frame_that_is_too_large_is_not_sent(serve: Serve, connect: Connect) -> None:
    server = serve({"offset": 1})
    client = connect(server)
    with pytest.raises(errors.PreconditionFailed, match="at most 1048576"):
        client.produce(bytes(1 << 20), queue="q")
    assert client.query_offset("s", "c") == 1
    assert server.connections == 1


# --- other protocols, broken answers ----------------------------------------------------------


@pytest.mark.parametrize(
    ("preface", "text"),
    [
        (b"AMQP\x00\x00\x09\x01", "does not speak"),
        (b"HTTP/1.1", "does not speak"),
        (b"CNVY\x00\x00\x02\x00", "version 2"),
    ],
)
def test_another_protocol_is_an_error_at_once(
    serve: Serve, connect: Connect, preface: bytes, text: str
) -> None:
    server = serve({})
    server.preface = preface
    with pytest.raises(errors.ProtocolError, match=text):
        connect(server).metadata()
    assert server.connections == 1


def test_a_wrong_password_is_an_error_at_once(serve: Serve, connect: Connect) -> None:
    server = serve({})
    server.login = refusal(ErrorCode.ACCESS_REFUSED)
    with pytest.raises(errors.AccessRefused):
        connect(server).metadata()
    assert server.connections == 1


def test_a_server_without_room_is_left_for_another(serve: Serve, connect: Connect) -> None:
    full, good = serve({}), serve({"offset": 8})
    full.login = refusal(ErrorCode.UNAVAILABLE)
    assert connect(full, good).query_offset("s", "c") == 8


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff" * 64,
        b"".join(encode_frame(Op.QUERY_OFFSET + ANSWER, 0, 1, {}))[:-1] + b"\x01",
        b"".join(encode_error(Op.QUERY_OFFSET, 0, refusal(ErrorCode.FRAME_ERROR))),
    ],
)
def test_broken_answers_are_an_error_and_cost_the_connection(
    serve: Serve, connect: Connect, answer: bytes
) -> None:
    server = serve(answer, {"offset": 1})
    client = connect(server)
    with pytest.raises(errors.ProtocolError):
        client.query_offset("s", "c")
    assert client.query_offset("s", "c") == 1
    assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "call"),
    [
        (({"first": 0, "high": 1}, b"not a frame"), lambda c: c.fetch("s", 0)),
        (({"first": 0}, EMPTY_ROWS), lambda c: c.fetch("s", 0)),
        ({"queues": [{"name": "x"}]}, lambda c: c.metadata()),
        ({"queues": 7}, lambda c: c.metadata()),
        ({"offsets": []}, lambda c: c.offsets([("s", "latest", None)])),
        ({"count": "1"}, lambda c: c.produce(EMPTY_ROWS, queue="q")),
    ],
)
def test_answers_without_what_belongs_in_them(
    serve: Serve, connect: Connect, answer: Any, call: Callable[[Client], Any]
) -> None:
    with pytest.raises(errors.ProtocolError):
        call(connect(serve(answer)))


# --- configuration, processes, threads --------------------------------------------------------


def test_secrets_are_never_printed() -> None:
    config = ClientConfig(
        ("h:1",), password="geheim", tls=TlsConfig(key_password="auch geheim", cert_file="c")
    )
    assert "geheim" not in repr(config) + repr(Client(config)) + str(config)
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(replace(config))


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        (("a:1", "b:2"), (("a", 1), ("b", 2))),
        (("a",), (("a", 5672),)),
        (("[::1]:99",), (("::1", 99),)),
        (["a:1"], (("a", 1),)),
    ],
)
def test_servers_are_host_and_port(servers: Any, expected: Any) -> None:
    assert ClientConfig(servers).addresses() == expected


def test_the_default_port_of_tls_is_another() -> None:
    assert ClientConfig(("a",), tls=TlsConfig()).addresses() == (("a", 5671),)


@pytest.mark.parametrize("servers", [(), "a:1", ("a:b",), ("a:0",), ("a:70000",), ("",), ("a b",)])
def test_wrong_servers_are_refused(servers: Any) -> None:
    with pytest.raises(ValueError):
        ClientConfig(servers)


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout"):
        ClientConfig(("a:1",), timeout=0)


def test_the_pool_has_one_client_for_a_configuration() -> None:
    one, other = ClientConfig(("a:1",)), ClientConfig(("a:2",))
    assert pooled(one) is pooled(ClientConfig(("a:1",)))
    assert pooled(one) is not pooled(other)


def test_threads_take_turns(serve: Serve, connect: Connect) -> None:
    client = connect(serve({"offset": 8}))
    found: list[int | None] = []
    threads = [
        threading.Thread(target=lambda: found.append(client.query_offset("s", "c")))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [8] * 20


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_connects_anew_and_leaves_the_parent_s_connection_alone(
    serve: Serve, connect: Connect
) -> None:
    server = serve({"offset": 8})
    client = connect(server)
    assert client.query_offset("s", "c") == 8
    child = os.fork()
    if not child:
        try:
            os._exit(0 if client.query_offset("s", "c") == 8 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.query_offset("s", "c") == 8
    assert server.connections == 2


def test_the_library_is_small() -> None:
    """Importing it loads no event loop, no engine and no server."""
    code = (
        "import sys, convoymq.client\n"
        "heavy = {'asyncio', 'uvloop', 'pyarrow', 'pyspark', 'numpy', 'structlog', 'ssl',"
        " 'convoymq.queues', 'convoymq.shells', 'convoymq.edges'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# --- what no other try can mend ------------------------------------------------------------------


def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a call that pauses: what is under test must not wait for its time-out."""

    def pause(_self: Client, error: Exception, _tries: int, _deadline: float) -> None:
        raise AssertionError("it tries again")

    monkeypatch.setattr(Client, "_pause", pause)


def test_names_that_nobody_knows_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    no_pauses(monkeypatch)
    monkeypatch.setattr("convoymq.client.link.socket.create_connection", unknown)
    with pytest.raises(errors.Unavailable, match=r"none of a:1 can be used; last: .*not known"):
        Client(ClientConfig(("a:1",))).metadata()


def test_certificates_that_are_not_trusted_are_told_at_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Distrusting:
        def wrap_socket(self, *_: Any, **__: Any) -> Any:
            raise ssl.SSLCertVerificationError(1, "certificate verify failed: self-signed")

    no_pauses(monkeypatch)
    monkeypatch.setattr(TlsConfig, "context", lambda _self: Distrusting())
    server = serve()
    where = server.address
    with pytest.raises(errors.Unavailable, match=r"can be used; last: .*verify failed"):
        Client(ClientConfig((where,), tls=TlsConfig())).metadata()


def test_files_of_tls_that_are_not_there_are_told_at_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pauses(monkeypatch)
    server = serve()
    where = server.address
    with pytest.raises(errors.PreconditionFailed, match=r"TLS with /no/such\.pem: .*No such file"):
        Client(ClientConfig((where,), tls=TlsConfig(ca_file="/no/such.pem"))).metadata()


def test_a_server_that_is_lost_in_the_middle_of_tls_is_tried_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Losing:
        def wrap_socket(self, *_: Any, **__: Any) -> Any:
            raise ssl.SSLEOFError(8, "EOF occurred in violation of protocol")

    no_pauses(monkeypatch)
    monkeypatch.setattr(TlsConfig, "context", lambda _self: Losing())
    server = serve()
    where = server.address
    with pytest.raises(AssertionError, match="it tries again"):
        Client(ClientConfig((where,), tls=TlsConfig())).metadata()
