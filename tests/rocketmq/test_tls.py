"""TLS on a broker's port, beside connections without."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from convoymq.model.config.loading import ConfigError
from convoymq.rocketmq.remoting.codes import Answer, Request
from convoymq.rocketmq.remoting.command import Command, CommandReader, encode, request
from tests.patience import PATIENCE_S
from tests.rocketmq.broker_client import Running, configuration, records


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
    ],
)
def test_settings_that_contradict_each_other(
    tmp_path: Path, settings: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        configuration(tmp_path, **settings)
