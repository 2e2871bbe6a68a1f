"""TLS on a broker's port, beside connections without."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
import trustme

from convoymq.model.config.loading import ConfigError
from convoymq.model.errors import SyntaxFault
from convoymq.rocketmq.bridge.settings import BridgeSettings
from convoymq.rocketmq.broker.acl import read_signer
from convoymq.rocketmq.client.client import Queue, RocketClient
from convoymq.rocketmq.clocks import steady_ms
from convoymq.rocketmq.namesrv.service import NameServer
from convoymq.rocketmq.namesrv.settings import NamesrvSettings
from convoymq.rocketmq.observer.config import RocketmqConfig
from convoymq.rocketmq.observer.groups import ObservedGroups
from convoymq.rocketmq.remoting.client import RemotingClient
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, CommandReader, encode, request
from convoymq.rocketmq.remoting.connection import Unreachable
from convoymq.rocketmq.remoting.tls import TlsSettings
from convoymq.rocketmq.remoting.values import TopicConfig
from convoymq.rocketmq.store.types import Draft, PutStatus
from tests.patience import PATIENCE_S
from tests.rocketmq.broker_client import Running, configuration, records
from tests.running import until


class Secured:
    """Certificates, and connections that use them."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        issued = self.authority.issue_cert("127.0.0.1")
        self.files = {
            "tls.server.certPath": directory / "cert.pem",
            "tls.server.keyPath": directory / "key.pem",
        }
        issued.cert_chain_pems[0].write_to_path(self.files["tls.server.certPath"])
        issued.private_key_pem.write_to_path(self.files["tls.server.keyPath"])
        self.root = directory / "root.pem"
        self.authority.cert_pem.write_to_path(self.root)

    def context(self, *, with_certificate: bool = False) -> ssl.SSLContext:
        made = ssl.create_default_context()
        self.authority.configure_trust(made)
        if with_certificate:
            self.authority.issue_cert("client").configure_cert(made)
        return made


async def ask(port: int, context: ssl.SSLContext | None, *commands: Command) -> list[Command]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"".join(map(encode, commands)))
        found: list[Command] = []
        commands_of = CommandReader()
        while len(found) < len(commands):
            data = await asyncio.wait_for(reader.read(1 << 16), PATIENCE_S)
            if not data:
                raise ConnectionResetError
            found += commands_of.feed(data)
        return found
    finally:
        writer.close()


def send(body: bytes) -> Command:
    fields = {"a": "p", "b": "secret", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1",
              "h": "0", "i": ""}  # fmt: skip
    return request(Request.SEND_MESSAGE_V2, fields, body)


def pull() -> Command:
    fields = {"consumerGroup": "g", "topic": "secret", "queueId": "0", "queueOffset": "0",
              "maxMsgNums": "32", "sysFlag": "4", "subscription": "*"}  # fmt: skip
    return request(Request.PULL_MESSAGE, fields)


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[tuple[Secured, Running]]:
    files = Secured(tmp_path)
    made = await Running.begin(tmp_path / "store", **files.files)
    yield files, made
    await made.stop()


async def test_one_port_takes_both_kinds(secured: tuple[Secured, Running]) -> None:
    files, made = secured
    body = bytes(200_000)
    (sent,) = await ask(made.port, files.context(), send(body))
    assert sent.code == Answer.SUCCESS
    (pulled,) = await ask(made.port, files.context(), pull())
    assert bytes(records(pulled)[0].body) == body
    assert bytes(records(await made.client.pull("secret"))[0].body) == body


async def test_tls_may_be_required_and_so_may_certificates(tmp_path: Path) -> None:
    files = Secured(tmp_path)
    made = await Running.begin(
        tmp_path / "store", **files.files,
        **{"tls.server.mode": "enforcing", "tls.server.trustCertPath": files.root},
    )  # fmt: skip
    with pytest.raises(ConnectionResetError):
        await ask(made.port, None, send(b"plain"))
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        await ask(made.port, files.context(), send(b"nobody"))
    (sent,) = await ask(made.port, files.context(with_certificate=True), send(b"known"))
    assert sent.code == Answer.SUCCESS
    await made.stop()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tls.server.mode": "enforcing"}, "needs tls.server.certPath"),
        ({"tls.server.certPath": "/x"}, "go together"),
        ({"tls.server.mode": "odd"}, "tls.server.mode"),
        ({"tls.client.authServer": True}, "needs tls.client.trustCertPath"),
        ({"tls.client.certPath": "/x"}, "tls.client.keyPath go together"),
    ],
)
def test_settings_that_contradict_each_other(
    tmp_path: Path, settings: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        configuration(tmp_path, **settings)


async def test_brokers_of_a_group_use_tls_and_sign_for_each_other(tmp_path: Path) -> None:
    """Name server and master take nothing without TLS, and the master nothing without a signature:
    the slave is registered, copies log and topics, and a node shows both."""
    files = Secured(tmp_path)
    conf = tmp_path / "conf"
    conf.mkdir()
    account = "accessKey: inner\n  secretKey: word-of-it\n"
    (conf / "plain_acl.yml").write_text(f"accounts:\n- {account}  admin: true\n")
    (conf / "tools.yml").write_text(account.replace("  ", ""))
    cert, private = map(str, files.files.values())
    names = NameServer(
        NamesrvSettings(
            port=0, host="127.0.0.1", kv_path=str(tmp_path / "kv"), tls_mode="enforcing",
            tls_certificate=cert, tls_key=private, support_acting_master=True,
        ),
        steady_ms,
    )  # fmt: skip
    address = f"127.0.0.1:{await names.start()}"
    chosen = files.files | {
        "tls.server.mode": "enforcing", "tls.client.authServer": True,
        "tls.client.trustCertPath": files.root, "aclEnable": True, "rocketmqHome": tmp_path,
        "namesrvAddr": address, "enableSlaveActingMaster": True, "totalReplicas": 2,
        "skipPreOnline": True, "compatibleWithOldNameSrv": False,
    }  # fmt: skip
    master = await Running.begin(tmp_path / "m", **chosen)
    slave = await Running.begin(tmp_path / "s", brokerId=1, brokerRole="SLAVE", **chosen)
    master.broker.topics.create(TopicConfig("orders", 1, 1, 6))

    def is_stored() -> bool:
        (placed,) = master.broker.put_now([Draft("orders", 0, b"x")])
        return placed.status is PutStatus.PUT_OK

    await until(is_stored)
    await until(lambda: slave.broker.topics.get("orders") is not None)
    await until(lambda: slave.broker.store.queue_max("orders", 0) == 1)
    with pytest.raises(Unreachable):
        await master.client.send("orders")
    shown = ObservedGroups(
        RocketmqConfig(
            name_servers=address, access_key="inner", secret_key="word-of-it", timeout_ms=60_000,
            authorities=str(files.root),
        )
    )  # fmt: skip
    replicas = cast("list[dict[str, object]]", (await shown.group("b"))["replicas"])
    assert [(each["id"], each["running"]) for each in replicas] == [(0, True), (1, True)]
    nobody = ObservedGroups(
        RocketmqConfig(name_servers=address, authorities=str(files.root), timeout_ms=60_000)
    )
    (first, _) = cast("list[dict[str, str]]", (await nobody.group("b"))["replicas"])
    assert "No accessKey is configured" in first["reason"]
    # A bridge, and whoever else is a client.
    settings = BridgeSettings(
        name_servers=address, access_key="inner", secret_key="word-of-it", tls_client=True,
        tls_client_verifies=True, tls_client_authorities=str(files.root),
    )  # fmt: skip
    bridge = RocketClient(address, "g", settings.account, settings.client_tls())
    await until(lambda: names.tables.route("orders") is not None)
    await bridge.send("orders", Queue("b", 0), b"secret", {})
    for each in (bridge, shown, nobody, slave, master, names):
        await each.stop()


async def test_a_server_of_another_authority_is_not_spoken_to(tmp_path: Path) -> None:
    files = Secured(tmp_path)
    made = await Running.begin(tmp_path / "store", **files.files)
    (tmp_path / "other").mkdir()
    other = Secured(tmp_path / "other")
    settings = TlsSettings(
        tls_client=True, tls_client_verifies=True, tls_client_authorities=str(other.root)
    )
    client = RemotingClient(tls=settings.client_tls())
    with pytest.raises(Unreachable, match="certificate verify failed"):
        await client.connected(f"127.0.0.1:{made.port}", PATIENCE_S)
    await client.stop()
    await made.stop()


def test_a_file_of_tools_needs_both_keys() -> None:
    with pytest.raises(SyntaxFault, match="needs accessKey and secretKey"):
        read_signer("accessKey: a\n")
