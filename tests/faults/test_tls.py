"""TLS clients of a real node: encrypted, verified, and known by their certificate."""

from __future__ import annotations

import itertools
import signal
import socket
import ssl
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pytest
import trustme

from convoymq.cli.cluster import LocalCluster
from convoymq.client import Client, ClientConfig, TlsConfig, errors
from convoymq.kernels.column_frame import build_frame
from convoymq.kernels.columns import VALUE
from tests.clusters import call, serving_cluster
from tests.faults.traffic import until
from tests.patience import PATIENCE_S
from tests.ports import cluster_ports
from tests.provocation import Observed

pytestmark = pytest.mark.cluster

BASE_PORT = cluster_ports(__name__)
TLS_PORT = BASE_PORT + 40
HTTPS_PORT = BASE_PORT + 41
METRICS_PORT = BASE_PORT + 42
USER = "device-7"


@dataclass
class Setup:
    """A node that offers TLS, and who signs for it."""

    cluster: LocalCluster
    authority: trustme.CA
    certificate: Path

    def context(self) -> ssl.SSLContext:
        made = ssl.create_default_context()
        self.authority.configure_trust(made)
        return made


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    write_certificate(authority.issue_cert("127.0.0.1"), directory / "node.pem")
    settings = {
        "listeners.ssl.default": f"127.0.0.1:{TLS_PORT}",
        "ssl_options.certfile": str(directory / "node.pem"),
        "ssl_options.keyfile": str(directory / "node.pem"),
        "ssl_options.cacertfile": str(directory / "ca.pem"),
        "ssl_options.verify": "verify_peer",
        "management.ssl.port": f"127.0.0.1:{HTTPS_PORT}",
        "management.ssl.certfile": str(directory / "node.pem"),
        "management.ssl.keyfile": str(directory / "node.pem"),
        "prometheus.ssl.port": f"127.0.0.1:{METRICS_PORT}",
        "prometheus.ssl.certfile": str(directory / "node.pem"),
        "prometheus.ssl.keyfile": str(directory / "node.pem"),
        "prometheus.ssl.cacertfile": str(directory / "ca.pem"),
        "prometheus.ssl.verify": "verify_peer",
        "prometheus.ssl.fail_if_no_peer_cert": "true",
        "auth_mechanisms": "PLAIN EXTERNAL",
        "ssl_cert_login_from": "common_name",
    }
    with serving_cluster(directory / "cluster", BASE_PORT, settings, nodes=1) as cluster:
        user = {"password": "", "password_hash": "", "tags": ""}
        assert call(cluster, "PUT", f"users/{USER}", user)[0] < 300
        rules = {"configure": ".*", "write": ".*", "read": ".*"}
        assert call(cluster, "PUT", f"permissions/%2F/{USER}", rules)[0] < 300
        yield Setup(cluster, authority, directory / "node.pem")


def write_certificate(certificate: trustme.LeafCert, path: Path) -> None:
    certificate.private_key_and_cert_chain_pem.write_to_path(path)


def connect(
    setup: Setup,
    *,
    certificate: Path | None = None,
    credentials: Any = None,
) -> Any:
    context = setup.context()
    if certificate is not None:
        context.load_cert_chain(certificate)
    return pika.BlockingConnection(
        pika.ConnectionParameters(
            "127.0.0.1",
            TLS_PORT,
            credentials=credentials or pika.PlainCredentials("guest", "guest"),
            ssl_options=pika.SSLOptions(context, "127.0.0.1"),
            heartbeat=0,
            socket_timeout=10,
        )
    )


def shake_hands(context: ssl.SSLContext, port: int = TLS_PORT) -> None:
    """Opens a TLS connection, and closes it whatever becomes of the handshake."""
    with (
        socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        # A server of TLS 1.3 refuses a certificate after the client's side is done.
        secured.sendall(b"AMQP\x00\x00\x09\x01")
        if not secured.recv(1):
            raise ConnectionResetError("closed after the handshake")


def exchange_messages(connection: Any) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    queue = channel.queue_declare("tls", durable=True).method.queue
    bodies = [bytes([n]) * (n * 5000) for n in range(40)]
    for body in bodies:
        channel.basic_publish("", queue, body)
    got = []
    for method, _, body in channel.consume(queue, inactivity_timeout=PATIENCE_S):
        assert method is not None
        got.append(body)
        channel.basic_ack(method.delivery_tag)
        if len(got) == len(bodies):
            break
    assert got == bodies
    connection.close()


def test_the_columnar_protocol_over_tls(setup: Setup, tmp_path: Path) -> None:
    setup.authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    values = [bytes([n % 251]) * (n * 7) for n in range(2000)]
    ends = list(itertools.accumulate(map(len, values), initial=0))
    lengths = struct.pack(f"<{len(ends)}i", *ends)
    frame = build_frame(VALUE, len(values), 0, 0, [b"", lengths, b"".join(values)])
    connection = connect(setup)
    channel = connection.channel()
    arguments = {"x-queue-type": "stream"}
    channel.queue_declare("tls-stream", durable=True, arguments=arguments)
    server = f"127.0.0.1:{TLS_PORT}"
    trusting = TlsConfig(ca_file=str(tmp_path / "ca.pem"))
    with Client(ClientConfig((server,), tls=trusting)) as client:
        assert client.produce(frame, stream="tls-stream").count == len(values)
        at = 0
        while at < len(values):
            result = client.fetch("tls-stream", at, columns=VALUE)
            _, bounds, data = result.frame.buffers(VALUE)
            places = bounds.cast("i")
            for row in range(result.frame.rows):
                assert bytes(data[places[row] : places[row + 1]]) == values[at + row]
            at = result.next
    for config in (
        ClientConfig((server,), tls=TlsConfig(), timeout=1.0),
        ClientConfig((server,), timeout=1.0),
    ):
        with Client(config) as client, pytest.raises(errors.ClientError):
            client.metadata()
    channel.queue_delete("tls-stream")
    connection.close()


def test_messages_of_all_sizes_over_tls(setup: Setup) -> None:
    exchange_messages(connect(setup))


def test_a_certificate_is_a_login(setup: Setup, tmp_path: Path) -> None:
    certificate = tmp_path / "client.pem"
    write_certificate(setup.authority.issue_cert("x.example", common_name=USER), certificate)
    external = pika.credentials.ExternalCredentials()
    connection = connect(setup, certificate=certificate, credentials=external)
    channel = connection.channel()
    channel.confirm_delivery()
    foreign = pika.BasicProperties(user_id="guest")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as raised:
        channel.basic_publish("", "nowhere", b"", foreign)
    assert f"authenticated user was '{USER}'" in raised.value.reply_text
    exchange_messages(connection)


def test_a_certificate_of_nobody_is_refused(setup: Setup, tmp_path: Path) -> None:
    certificate = tmp_path / "client.pem"
    write_certificate(setup.authority.issue_cert("x.example", common_name="nobody"), certificate)
    with pytest.raises(pika.exceptions.ProbableAuthenticationError, match="EXTERNAL"):
        connect(setup, certificate=certificate, credentials=pika.credentials.ExternalCredentials())


def test_external_is_not_offered_without_a_certificate(setup: Setup) -> None:
    with pytest.raises(pika.exceptions.AuthenticationError):
        connect(setup, credentials=pika.credentials.ExternalCredentials())


def test_a_certificate_of_another_authority_is_refused(setup: Setup, tmp_path: Path) -> None:
    certificate = tmp_path / "client.pem"
    write_certificate(trustme.CA().issue_cert("x.example", common_name=USER), certificate)
    context = setup.context()
    context.load_cert_chain(certificate)
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        shake_hands(context)


def test_who_does_not_trust_the_node_leaves_and_it_goes_on(setup: Setup) -> None:
    with pytest.raises(ssl.SSLError):
        shake_hands(ssl.create_default_context())
    exchange_messages(connect(setup))


def test_the_api_over_tls(setup: Setup) -> None:
    api = {"base_url": f"https://127.0.0.1:{HTTPS_PORT}", "timeout": PATIENCE_S}
    with httpx.Client(verify=setup.context(), auth=("guest", "guest"), **api) as client:
        ports = {
            row["port"]: row["protocol"] for row in client.get("/api/overview").json()["listeners"]
        }
        assert ports[HTTPS_PORT] == "https"
        login = client.post("/api/login", data={"username": "guest", "password": "guest"})
        assert "; Secure" in login.headers["set-cookie"]
    with httpx.Client(**api) as client, pytest.raises(httpx.ConnectError, match="verify"):
        client.get("/api/overview")


def test_metrics_ask_for_a_certificate(setup: Setup, tmp_path: Path) -> None:
    url = f"https://127.0.0.1:{METRICS_PORT}/metrics"
    context = setup.context()
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
        httpx.get(url, verify=context, timeout=PATIENCE_S)
    certificate = tmp_path / "prometheus.pem"
    write_certificate(setup.authority.issue_cert("prometheus.example"), certificate)
    context.load_cert_chain(certificate)
    assert "convoy_" in httpx.get(url, verify=context, timeout=PATIENCE_S).text


@pytest.mark.provokes("tls.renewed", "tls.not_renewed")
def test_a_renewed_certificate_needs_no_restart(setup: Setup, observed: Observed) -> None:
    def serials() -> set[str]:
        return {ssl.get_server_certificate(("127.0.0.1", port)) for port in (TLS_PORT, HTTPS_PORT)}

    before = serials()
    open_before = connect(setup)
    good = setup.certificate.read_bytes()
    setup.certificate.write_bytes(b"half a fi")
    setup.cluster.kill(1, signal.SIGHUP)
    log = setup.cluster.data / "node-1" / "convoy.log"
    until(lambda: "tls.not_renewed" in log.read_text(), "a damaged certificate is not named")
    assert serials() == before
    setup.certificate.write_bytes(good)
    write_certificate(setup.authority.issue_cert("127.0.0.1"), setup.certificate)
    setup.cluster.kill(1, signal.SIGHUP)
    until(lambda: not serials() & before, "the former certificate is served")
    exchange_messages(open_before)
    exchange_messages(connect(setup))
    observed.log_files(setup.cluster.data)


def test_tls_on_the_plain_port_is_answered_and_closed(setup: Setup) -> None:
    with pytest.raises(ssl.SSLError):
        shake_hands(setup.context(), setup.cluster.nodes[0].amqp_port)
