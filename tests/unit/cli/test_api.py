"""What tools say when an address is not the HTTP API of a node: never a traceback, never a
password, always the address."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

from convoymq.cli.api import NoAnswer, base_of, call, get_json
from convoymq.model.errors import Misuse

ANSWERS = {
    b"AMQP\x00\x00\x09\x01": "a port for AMQP clients",
    b"": "closed without a whole answer",
    b"\x00\x01\x02\r\n\r\n": "no HTTP is spoken there",
    b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n[1": "closed without a whole answer",
    b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n<ht>": "is not JSON",
}


@contextmanager
def server(answer: bytes) -> Iterator[int]:
    """A port that answers each connection with these bytes, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    link, _ = listening.accept()
                except OSError:
                    return
                with link:
                    link.recv(65536)
                    link.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(60)


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_port_that_is_no_http_api_is_named(answer: bytes) -> None:
    with server(answer) as port, pytest.raises(NoAnswer) as raised:
        get_json(f"http://127.0.0.1:{port}/api/nodes")
    assert f"127.0.0.1:{port}: " in raised.value.text
    assert ANSWERS[answer] in raised.value.text


@pytest.mark.parametrize("answer", ANSWERS)
def test_no_tool_ends_with_a_traceback(answer: bytes) -> None:
    with server(answer) as port:
        url = f"http://guest:secret@127.0.0.1:{port}"
        for words in (["status"], ["ctl", "list_queues"], ["queues", "list"], ["topics", "list"]):
            done = subprocess.run(
                [sys.executable, "-m", "convoymq.cli", *words, "--url", url],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
            said = done.stdout + done.stderr
            assert done.returncode in (1, 69), said
            assert "Traceback" not in said
            assert "secret" not in said
            assert f"127.0.0.1:{port}: " in said


def test_a_port_where_nothing_listens_and_one_without_tls_are_named() -> None:
    with (
        server(b"HTTP/1.1 200 OK\r\n\r\n") as port,
        pytest.raises(NoAnswer, match=f"127.0.0.1:{port}: no TLS is spoken there"),
    ):
        call("GET", f"https://127.0.0.1:{port}/", PATIENCE_S, "a:b")
    with pytest.raises(NoAnswer, match=f"127.0.0.1:{port}: nothing listens there"):
        call("GET", f"http://127.0.0.1:{port}/", PATIENCE_S, "a:b")
    with pytest.raises(NoAnswer, match="no host of that name"):
        call("GET", "http://nowhere.invalid/", PATIENCE_S, "a:b")


def test_silence_is_no_answer_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        with pytest.raises(NoAnswer, match=r"no answer within 0\.1 s") as raised:
            call("GET", url, 0.1, "a:b")
        assert raised.value.timed_out


@pytest.mark.parametrize(
    ("url", "user", "expected"),
    [
        ("http://h:1/", "", ("http://h:1", "guest:guest")),
        ("h:1", "", ("http://h:1", "guest:guest")),
        ("http://a%3A:p%40/@h:1", "", ("http://h:1", "a::p@/")),
        ("https://a@h", "", ("https://h", "a:")),
        ("http://a:b@h", "c:d", ("http://h", "c:d")),
    ],
)
def test_a_url_may_have_the_user(url: str, user: str, expected: tuple[str, str]) -> None:
    assert base_of(url, user) == expected


@pytest.mark.parametrize("url", ["http://a:secret@h:x", "ftp://a:secret@h", "http://", "h:0", ""])
def test_what_is_no_address_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(Misuse, match="no address of an HTTP API") as raised:
        base_of(url)
    assert "secret" not in raised.value.text


def test_what_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    for words in (["up", "--data", taken / "x"], ["up", "--data", taken]):
        done = subprocess.run(
            [sys.executable, "-m", "convoymq.cli", *words],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 1
        assert done.stderr.startswith(f"convoy: {words[-1]}: ")
        assert done.stderr.count("\n") == 1
