"""The administration socket: requests, progress, refusals, and its file."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from convoymq.model.errors import Misuse, Unavailable
from convoymq.node.admin_socket import REQUEST_BYTES_MAX, SOCKET_NAME, AdminSocket, Progress, ask


async def echo(request: dict[str, Any], progress: Progress) -> Any:
    progress("half")
    return request["value"]


async def refuse(_request: dict[str, Any], _progress: Progress) -> Any:
    raise Misuse("not now")


@pytest.fixture
async def directory(tmp_path: Path) -> AsyncIterator[Path]:
    # Longer than a socket address can be.
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    server = AdminSocket(deep, {"echo": echo, "refuse": refuse})
    await server.start()
    yield deep
    await server.stop()
    assert not (deep / SOCKET_NAME).exists()


async def call(directory: Path, request: dict[str, Any]) -> tuple[Any, list[str]]:
    said: list[str] = []
    result = await asyncio.get_running_loop().run_in_executor(
        None, ask, directory, request, said.append
    )
    return result, said


async def test_a_request_gets_progress_and_a_result(directory: Path) -> None:
    assert await call(directory, {"op": "echo", "value": [1, "ä"]}) == ([1, "ä"], ["half"])


async def test_a_refusal_is_told(directory: Path) -> None:
    with pytest.raises(Misuse, match="not now"):
        await call(directory, {"op": "refuse"})
    with pytest.raises(Misuse, match="unknown op 'nothing'"):
        await call(directory, {"op": "nothing"})


async def test_who_asks_is_told_by_the_system(tmp_path: Path) -> None:
    """Whatever the client writes about itself."""

    async def who(request: dict[str, Any], _progress: Progress) -> Any:
        return [request["uid"], request["pid"]]

    async with AdminSocket(tmp_path, {"who": who}):
        found, _ = await call(tmp_path, {"op": "who", "uid": 0, "pid": 1})
    assert found == [os.getuid(), os.getpid()]


async def test_only_the_owner_may_open_it(directory: Path) -> None:
    assert stat.S_IMODE((directory / SOCKET_NAME).stat().st_mode) == 0o600


@pytest.mark.parametrize("data", [b"\n", b"[]\n", b"{}\n", b"\xff\n", b"[" * 5000 + b"\n"])
async def test_what_is_no_request_is_answered_and_harms_nobody(
    directory: Path, data: bytes
) -> None:
    def send() -> Any:
        with socket.socket(socket.AF_UNIX) as link:
            handle = directory / SOCKET_NAME
            link.connect(f"/proc/self/fd/{_open(handle.parent)}/{SOCKET_NAME}")
            link.sendall(data)
            return json.loads(link.makefile("rb").readline())

    answer = await asyncio.get_running_loop().run_in_executor(None, send)
    assert "not a request" in answer["error"]
    assert (await call(directory, {"op": "echo", "value": 1}))[0] == 1


async def test_a_request_beyond_the_bound_is_refused(directory: Path) -> None:
    with pytest.raises((Misuse, Unavailable)):
        await call(directory, {"op": "echo", "value": "x" * REQUEST_BYTES_MAX})
    assert (await call(directory, {"op": "echo", "value": 1}))[0] == 1


async def test_without_a_node_the_text_says_so(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no node runs in"):
        await call(tmp_path, {"op": "echo"})


def _open(path: Path) -> int:
    import os

    return os.open(path, os.O_PATH)
